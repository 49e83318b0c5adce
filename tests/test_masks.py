"""Action masks: every form in which an environment may give one, and those that are refused."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from phasicrl.masks import find_first_blocked, flatten_mask
from phasicrl.spaces import get_nvec
from tests.test_spaces import ACTIONS, Dict, MultiDiscrete


def mask_tree(space: Any, flat: list[np.ndarray], nested: bool) -> Any:
    """Return masks of the components, from the front of `flat`, in the structure of the space."""
    if isinstance(space, Dict):
        return {key: mask_tree(part, flat, nested) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return [mask_tree(part, flat, nested) for part in space.spaces]
    taken = [flat.pop(0) for _ in get_nvec(space)]
    if isinstance(space, Box):
        return None
    if isinstance(space, Discrete):
        return taken[0].tolist()
    if not nested:
        return np.concatenate(taken)
    rows: list[Any] = taken
    for size in reversed(space.shape[1:]):
        rows = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    return rows


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ACTIONS, st.booleans(), st.integers(0, 2**31), st.sampled_from([bool, np.int8, np.float32]))
def test_masks_in_every_form_are_the_same(space: Any, nested: bool, seed: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    components = [rng.integers(0, 2, width).astype(dtype) for width in get_nvec(space)]
    forms: list[Any] = [np.concatenate([np.ones(0, dtype), *components]).astype(dtype)]
    expected = forms[0].astype(bool)
    if not isinstance(space, Box):
        forms.append(mask_tree(space, components.copy(), nested))
    for form in forms:
        flat = flatten_mask(space, form)
        assert flat.dtype == np.bool_
        np.testing.assert_array_equal(flat, expected)


def test_a_mask_is_a_copy() -> None:
    given = np.ones(3, bool)
    flat = flatten_mask(Discrete(3), given)
    given[0] = False
    assert flat.all()
    space = Tuple((MultiDiscrete([2, 2]), Discrete(2)))  # NumPy stacks only some of such pairs
    assert flatten_mask(space, (np.ones((2, 2)), np.ones(2))).all()


@pytest.mark.parametrize("arm", [None, (None, None), ([1, 1], [])])
def test_parts_without_a_mask_allow_everything(arm: Any) -> None:
    space = Dict(go=Discrete(2), arm=Tuple([Discrete(2), Box(-1, 1, (2,))]))
    found = flatten_mask(space, {"go": [0, 1], "arm": arm})
    np.testing.assert_array_equal(found, [False, True, True, True])
    numbers = Dict(go=Discrete(2), number=Box(-1, 1, (2,)))
    assert flatten_mask(numbers, {"go": [0, 1]}).tolist() == [False, True]


PAIR = Dict(a=Discrete(2), b=Discrete(2))


@pytest.mark.parametrize(("space", "mask", "match"), [
    (Discrete(3), [1, 0], r"shape \(2,\); expected for Discrete\(3\): shape \(3,\)$"),
    (Discrete(3), [[1, 0, 1]], r"shape \(1, 3\)"),
    (Discrete(3), None, "NoneType"),
    (Discrete(3), [1, 2, 0], r"values \[0 1 2\]"),
    (Discrete(2), [0.5, 1], r"values \[0.5 1. \]"),
    (MultiDiscrete([2, 3]), [1, 1], r"shape \(5,\), or one mask for each part"),
    (MultiDiscrete([2, 3]), [[1, 1], [1, 1]], r"shape \(2,\) \(at '1'\)"),
    (MultiDiscrete([2, 3]), [[1, 1], [1, 1, 1], [1]], "list; expected for MultiDiscrete"),
    (MultiDiscrete([[2], [2], [2]]), [[[1, 1], [1, 1], [1, 1]]], r"shape \(1, 3, 2\)"),
    (MultiBinary((2, 2)), np.ones((4, 2)), r"shape \(4, 2\)"),
    (MultiBinary((2, 2)), [[[1, 1], [1, 1], [1, 1]], [[1, 1]]], "list"),
    (Tuple([Discrete(2), Discrete(2)]), ([1, 1],), r"shape \(1, 2\)"),
    (PAIR, {"a": [1, 1]}, "dict; expected for Dict"),
    (PAIR, {"a": [1, 1], "b": [1, 1], "c": [1]}, "dict; expected for Dict"),
    (PAIR, {"a": [1, 1], "b": [1, 1, 1]}, r"shape \(3,\) \(at 'b'\)"),
    (Box(-1, 1, (2,)), [1, 1], r"expected for Box.*: shape \(0,\)$"),
])  # fmt: skip
def test_masks_that_do_not_fit_are_refused(space: gym.Space[Any], mask: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        flatten_mask(space, mask)


def test_components_without_any_choice_are_found() -> None:
    widths, mask = (2, 1, 3), np.ones((3, 6), bool)
    assert find_first_blocked(widths, mask) is None is find_first_blocked((), mask[:, :0])
    mask[2, :2] = mask[1, 3:5] = False
    assert find_first_blocked(widths, mask) == (2, 0)
    mask[1, 5] = False
    assert find_first_blocked(widths, mask) == (1, 2)
    mask[1, 2] = False
    assert find_first_blocked(widths, mask) == (1, 1)
