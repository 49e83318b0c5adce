"""Spaces: how observations are stored, how actions are taken apart, and masks in every form."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, Graph, MultiBinary, Sequence, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from phasicrl.spaces import (
    ActionLayout,
    ObservationLayout,
    Path,
    as_float32,
    check_spaces,
    choices,
    leaves,
    map_leaves,
)

Dict: Any = gym.spaces.Dict  # their types are narrower than what they take
MultiDiscrete: Any = gym.spaces.MultiDiscrete

SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def boxes(*dtypes: type[Any]) -> st.SearchStrategy[gym.Space[Any]]:
    return st.builds(
        lambda shape, dtype: Box(0, 100, shape, dtype), SHAPES, st.sampled_from(dtypes)
    )


DISCRETE = st.one_of(
    st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(
        lambda shape,
        start: MultiDiscrete(np.full(shape, 3) + np.arange(shape[-1]), start=np.full(shape, start)),
        SHAPES.filter(len), st.integers(-3, 3),
    ),
    st.builds(MultiBinary, SHAPES.filter(len)),
)  # fmt: skip


def trees(parts: st.SearchStrategy[gym.Space[Any]]) -> st.SearchStrategy[gym.Space[Any]]:
    """Spaces of `parts`, plain and nested; with at least one part."""
    return st.recursive(
        parts,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(Tuple),
            st.dictionaries(st.sampled_from("abcdef"), inner, min_size=1, max_size=3).map(
                lambda parts: Dict(OrderedDict(parts))
            ),
        ),
        max_leaves=6,
    )


OBSERVATIONS = trees(
    st.one_of(DISCRETE, boxes(np.uint8, np.float16, np.float32, np.float64, np.int16))
)
ACTIONS = trees(st.one_of(DISCRETE, boxes(np.float32, np.float64)))


def random_batch(leaf: Any, num: int, rng: np.random.Generator) -> np.ndarray:
    """Values `[num, …]` of one part; floats of any bits, so infinities and NaN too."""
    if leaf.dtype == np.float32:
        return (
            np.frombuffer(rng.bytes(4 * num * int(np.prod(leaf.shape))), np.float32)
            .reshape(num, *leaf.shape)
            .copy()
        )
    if isinstance(leaf, Box):
        return (rng.normal(size=(num, *leaf.shape)) * 50).astype(leaf.dtype)
    return (
        np.stack([np.asarray(leaf.sample()) for _ in range(num)])
        if num
        else np.zeros((0, *leaf.shape), leaf.dtype)
    )


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def tree_of(space: Any, values: dict[Path, Any], path: Path = ()) -> Any:
    if isinstance(space, Dict):
        return {key: tree_of(part, values, (*path, key)) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(
            tree_of(part, values, (*path, index)) for index, part in enumerate(space.spaces)
        )
    return values[path]


@settings(max_examples=120, deadline=None)
@given(
    space=OBSERVATIONS, num=st.integers(0, 3), before=st.integers(0, 2), seed=st.integers(0, 2**31)
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_observations_come_back_bit_by_bit(
    space: gym.Space[Any], num: int, before: int, seed: int
) -> None:
    """Also from the middle of a larger storage, where rows begin at any address."""
    rng, layout = np.random.default_rng(seed), ObservationLayout(space)
    values = {path: random_batch(leaf, num, rng) for path, leaf in leaves(space)}
    packed = layout.pack(tree_of(space, values), num)
    assert packed.shape == (num, *layout.shape) and packed.dtype == layout.dtype
    storage = torch.zeros(before + num + 1, *layout.shape, dtype=torch.from_numpy(packed).dtype)
    storage[before : before + num] = torch.from_numpy(packed)
    read = layout.unpack(storage[before : before + num])
    assert (
        layout.is_tree == (not isinstance(read, torch.Tensor)) == isinstance(space, (Dict, Tuple))
    )
    for leaf in layout.leaves:
        stored, given = at(read, leaf.path), values[leaf.path]
        expected = (
            (given - getattr(leaf.space, "start", 0)).astype(leaf.dtype)
            if leaf.dtype == np.int64
            else given.astype(leaf.dtype)
        )
        assert stored.shape == (num, *leaf.shape) and stored.numpy().dtype == leaf.dtype
        assert stored.numpy().tobytes() == expected.tobytes()


def test_where_every_part_lies() -> None:
    space = Dict(
        OrderedDict(
            z=Box(0, 255, (2, 3), np.uint8),
            a=Tuple([Discrete(4, start=7), Box(-1, 1, (), np.float64), MultiBinary((2, 2))]),
            m=MultiDiscrete([3, 4]),
            i=Box(-5, 5, (1,), np.int32),
        )
    )
    layout = ObservationLayout(space)
    assert layout.is_tree and layout.shape == (6 + 8 + 4 + 4 + 16 + 4,) and layout.dtype == np.uint8
    assert [
        (leaf.path, leaf.shape, leaf.dtype.name, leaf.offset, leaf.num_bytes)
        for leaf in layout.leaves
    ] == [
        (("z",), (2, 3), "uint8", 0, 6),
        (("a", 0), (), "int64", 6, 8),
        (("a", 1), (), "float32", 14, 4),
        (("a", 2), (2, 2), "uint8", 18, 4),
        (("m",), (2,), "int64", 22, 16),
        (("i",), (1,), "float32", 38, 4),
    ]
    sample = {
        "z": np.full((1, 2, 3), 9, np.uint8),
        "a": ([8], [0.5], [[[1, 0], [0, 1]]]),
        "m": [[2, 3]],
        "i": [[-5]],
    }
    row = layout.pack(sample, 1)[0]
    assert row[:6].tolist() == [9] * 6 and row[18:22].tolist() == [1, 0, 0, 1]
    assert (
        row[6:14].view(np.int64) == 1
        and row[14:18].view(np.float32) == 0.5
        and row[38:].view(np.float32) == -5
    )


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (Box(0, 255, (64, 64, 3), np.uint8), (64, 64, 3), "uint8"),
        (Box(-1, 1, (5,), np.float64), (5,), "float32"),
        (Box(-1, 1, (2, 3), np.float32), (2, 3), "float32"),
        (Box(-9, 9, (2,), np.int64), (2,), "float32"),
        (Box(0, 255, (128,), np.uint8), (128,), "uint8"),
        (Discrete(5, start=2), (), "int64"),
        (MultiDiscrete([[2, 3], [4, 5]]), (2, 2), "int64"),
        (MultiBinary((2, 3)), (2, 3), "uint8"),
        (Tuple([MultiBinary(3)]), (3,), "uint8"),
    ],
)
def test_how_observations_are_stored(
    space: gym.Space[Any], shape: tuple[int, ...], dtype: str
) -> None:
    layout = ObservationLayout(space)
    assert (layout.shape, layout.dtype.name, layout.space) == (shape, dtype, space)


def test_what_needs_no_translation_is_not_copied() -> None:
    for space in (Box(0, 255, (4, 4, 3), np.uint8), Box(-1, 1, (3,), np.float32)):
        batch = np.zeros((2, *space.shape), space.dtype)
        layout = ObservationLayout(space)
        assert layout.pack(batch, 2) is batch
        stored = torch.from_numpy(batch)
        assert layout.unpack(stored) is stored


TREE = Dict(counts=Box(-1, 1, (3,), np.float32), stage=Discrete(4, start=1))


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ({"counts": np.zeros((2, 3))}, "without 'stage', which its observation_space has"),
        (np.zeros((2, 3)), "without 'counts'"),
        (
            {"counts": np.zeros((2, 4)), "stage": [1, 1]},
            r"shape \(4,\) \(at 'counts'\); its observation_space says \(3,\)",
        ),
        ({"counts": np.zeros((3, 3)), "stage": [1, 1]}, r"shape \(3,\)"),
        (
            {"counts": np.zeros((2, 3)), "stage": [1.0, 1.0]},
            r"dtype float64 \(at 'stage'\); its observation_space says int64",
        ),
        ({"counts": np.zeros((2, 3), complex), "stage": [1, 1]}, "dtype complex128"),
    ],
)
def test_observations_that_do_not_fit_are_refused(obs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^an observation .*{message}"):
        ObservationLayout(TREE).pack(obs, 2)


def test_a_single_number_may_come_in_brackets() -> None:
    for space in (Discrete(4), Box(0, 9, (), np.float32)):
        np.testing.assert_array_equal(ObservationLayout(space).pack([[1], [2]], 2), [1, 2])
        with pytest.raises(ValueError, match="shape"):
            ObservationLayout(space).pack([[1, 2], [3, 4]], 2)


@pytest.mark.parametrize(
    ("counts", "stage", "fault"),
    [
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 4, 2], None),
        (
            [[0, 0, 0], [0, 0, 0], [0, np.nan, 1]],
            [1, 4, 2],
            (2, "an observation that is not finite (at 'counts'): [ 0. nan  1.]"),
        ),
        (
            [[0, 0, 0], [1e300, 0, 0], [0, np.nan, 1]],
            [1, 4, 2],
            (1, "an observation that is not finite (at 'counts'): [inf  0.  0.]"),
        ),
        (
            [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
            [1, 5, 0],
            (1, "an observation that is outside of Discrete(4, start=1) (at 'stage'): 5"),
        ),
        (
            [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
            [0, 1, 1],
            (0, "an observation that is outside of Discrete(4, start=1) (at 'stage'): 0"),
        ),
    ],
)
def test_numbers_that_cannot_be_used_are_found(
    counts: list[list[float]], stage: list[int], fault: tuple[int, str] | None
) -> None:
    layout = ObservationLayout(TREE)
    assert (
        layout.find_fault(layout.pack({"counts": np.array(counts), "stage": np.array(stage)}, 3))
        == fault
    )


def test_components_of_several_choices_have_their_own_limits() -> None:
    layout = ObservationLayout(MultiDiscrete([[2, 5], [3, 1]], start=[[0, 1], [0, 0]]))
    assert layout.find_fault(layout.pack(np.array([[[1, 5], [2, 0]]]), 1)) is None
    fault = layout.find_fault(layout.pack(np.array([[[0, 1], [0, 0]], [[2, 5], [2, 0]]]), 2))
    assert fault is not None and fault[0] == 1 and "[[2 5]\n [2 0]]" in fault[1]


@settings(max_examples=120, deadline=None)
@given(space=ACTIONS, num=st.integers(1, 3))
def test_actions_arrive_as_their_space_has_them(space: gym.Space[Any], num: int) -> None:
    space.seed(num)
    layout, samples = ActionLayout(space), [space.sample() for _ in range(num)]
    rows = []
    for sample in samples:
        numbers = [
            np.ravel(at(sample, path) - np.asarray(getattr(leaf, "start", 0)))
            for path, leaf in leaves(space)
        ]
        rows.append(np.concatenate(numbers))
    action = np.stack(rows).astype(layout.dtype).reshape(num, *layout.shape)
    has_box = any(isinstance(leaf, Box) for _, leaf in leaves(space))
    assert layout.dtype == (np.float32 if has_box else np.int64)
    assert layout.shape == (() if isinstance(space, Discrete) else (len(rows[0]),))
    copy = action.copy()
    layout.check("mine", action, num)
    batch = layout.unflatten(action)
    for path, leaf in leaves(space):
        values = at(batch, path)
        assert values.dtype == leaf.dtype and values.shape == (num, *(leaf.shape or ()))
        np.testing.assert_allclose(
            values, np.stack([at(sample, path) for sample in samples]), rtol=1e-6
        )
        values[...] = 0  # an environment may write into what it is given
    np.testing.assert_array_equal(action, copy)


MIXED = Dict(
    OrderedDict(
        go=Discrete(3), arm=Tuple([Box(-1, 1, (2,)), MultiDiscrete([2, 4])]), flags=MultiBinary(1)
    )
)


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (Discrete(3), np.array([0, 3]), "action 3 for environment 1 is outside of 0 … 2"),
        (
            Discrete(3, start=5),
            np.array([-1, 0]),
            "action -1 for environment 0 is outside of 0 … 2",
        ),
        (
            Discrete(3),
            np.zeros(2),
            r"the actions are float64, shape \(2,\); a tensor of integers, shape \(2,\), "
            "was expected",
        ),
        (
            Discrete(3),
            np.zeros((2, 1), int),
            r"the actions are int64, shape \(2, 1\); .* shape \(2,\)",
        ),
        (Discrete(3), [0, 1], "the actions are a list"),
        (
            MultiDiscrete([2, 3]),
            np.array([[0, 0], [1, 3]]),
            r"action 3 for environment 1, component 1 \(1\) is outside of 0 … 2",
        ),
        (
            MultiBinary(2),
            np.array([[0, 0], [2, 1]]),
            r"action 2 for environment 1, component 0 \(0\) is outside of 0 … 1",
        ),
        (
            MIXED,
            np.array([[0, 9, -9, 1, 3, 1], [0, 0, 0, 1, 4, 0.0]]),
            r"action 4.0 for environment 1, component 4 \(arm/1/1\) is outside of 0 … 3",
        ),
        (
            MIXED,
            np.array([[0, 9, -9, 1, 3, 1], [0.5, 0, 0, 1, 3, 0]]),
            r"action 0.5 for environment 1, component 0 \(go\) is outside",
        ),
        (
            MIXED,
            np.array([[0, 9, -9, 1, 3, 1], [0, 0, np.inf, 1, 3, 0]]),
            r"action inf for environment 1, component 2 \(arm/0/1\) is not finite",
        ),
        (
            MIXED,
            np.zeros((2, 5)),
            r"the actions are float64, shape \(2, 5\); a tensor of numbers, shape \(2, 6\)",
        ),
        (MIXED, np.zeros((2, 6), bool), "the actions are bool"),
    ],
)
def test_actions_that_would_be_misread_are_refused(
    space: gym.Space[Any], action: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^mine: {message}"):
        ActionLayout(space).check("mine", action, 2)


def test_numbers_may_be_beyond_the_bounds_and_integers_may_be_floats() -> None:
    layout = ActionLayout(MIXED)
    action = np.array([[2, 9, -9, 1, 3, 1]])
    layout.check("mine", action, 1)
    layout.check("mine", action.astype(np.float32), 1)
    arrived = layout.unflatten(action)
    assert (
        arrived["go"] == 2
        and arrived["arm"][0].tolist() == [[9, -9]]
        and arrived["arm"][1].tolist() == [[1, 3]]
    )


def test_actions_that_are_not_allowed_are_refused() -> None:
    layout, mask = ActionLayout(MIXED), np.ones((2, 11), bool)
    action = np.array([[2, 0, 0, 1, 3, 1], [0, 0, 0, 0, 2, 0]], np.float32)
    layout.check("mine", action, 2, action_mask=mask)
    for place, message in {
        2: (0, r"action 2.0 for environment 0, component 0 \(go\)"),
        8: (0, r"action 3.0 for environment 0, component 4 \(arm/1/1\)"),
        7: (1, r"action 2.0 for environment 1, component 4 \(arm/1/1\)"),
        9: (1, r"action 0.0 for environment 1, component 5 \(flags\)"),
    }.items():
        forbidding = mask.copy()
        forbidding[message[0], place] = False
        with pytest.raises(
            ValueError,
            match=f"^mine: {message[1]} is not allowed now; choose among those that `action_mask` "
            "allows",
        ):
            layout.check("mine", action, 2, action_mask=forbidding)


GOOD = Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    "space", [Text(5), Graph(GOOD, None), Sequence(GOOD), Dict(a=GOOD, b=Tuple([Text(5)]))]
)
def test_spaces_that_are_not_supported_are_refused(space: gym.Space[Any]) -> None:
    where = r" \(at 'b/0'\)" if isinstance(space, Dict) else ""
    for what, spaces in (("observations", (space, Discrete(2))), ("actions", (GOOD, space))):
        with pytest.raises(
            ValueError,
            match=f"^mine: {what} of the kind .*{where} are not supported; "
            "supported: .*Dict and Tuple of these$",
        ):
            check_spaces("mine", *spaces)
    with pytest.raises(ValueError, match="are not supported; supported: Box"):
        ObservationLayout(space)


def test_empty_spaces_are_refused() -> None:
    for empty in (Dict(), Tuple([]), Dict(a=Dict()), Box(-1, 1, (0,), np.float32)):
        with pytest.raises(ValueError, match=r"mine: the space of observations .* is empty"):
            check_spaces("mine", empty, Discrete(2))
        with pytest.raises(ValueError, match=r"mine: the space of actions .* is empty"):
            check_spaces("mine", GOOD, empty)


def test_a_part_may_be_empty() -> None:
    """As the goals of some robots are."""
    space = Dict(goal=Box(-1, 1, (0,), np.float64), state=GOOD)
    check_spaces("mine", space, space)
    layout = ObservationLayout(space)
    stored = layout.pack({"goal": np.zeros((2, 0)), "state": np.ones((2, 2))}, 2)
    assert layout.find_fault(stored) is None
    read = layout.unpack(torch.from_numpy(stored))
    assert read["goal"].shape == (2, 0) and read["state"].tolist() == [[1, 1]] * 2
    assert ActionLayout(space).unflatten(np.ones((2, 2), np.float32))["goal"].shape == (2, 0)


@given(observation_space=OBSERVATIONS, action_space=ACTIONS)
@settings(max_examples=30, deadline=None)
def test_spaces_that_can_be_stored_are_accepted(
    observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> None:
    check_spaces("mine", observation_space, action_space)


def test_integers_as_numbers_are_no_actions() -> None:
    with pytest.raises(
        ValueError, match=r"actions of the kind Box.*write a Box of integers as a MultiDiscrete"
    ):
        check_spaces("mine", GOOD, Box(0, 9, (2,), np.int64))


def test_float32_in_place_of_other_floats_at_every_depth() -> None:
    space = Dict(
        OrderedDict(
            z=Box(-1, 1, (2,), np.float64),
            a=Tuple([Box(-np.inf, 1e300, (1,), np.float64), Discrete(3)]),
            b=Box(0, 9, (1,), np.uint8),
        )
    )
    changed = as_float32(space)
    limit = np.finfo(np.float32).max
    expected = OrderedDict(
        z=Box(-1, 1, (2,), np.float32),
        a=Tuple([Box(-np.inf, limit, (1,), np.float32), Discrete(3)]),
        b=Box(0, 9, (1,), np.uint8),
    )
    assert changed == Dict(expected)
    assert list(changed.spaces) == ["z", "a", "b"]  # type: ignore[attr-defined]
    assert [leaf.dtype for leaf in ObservationLayout(changed).leaves] == [
        leaf.dtype for leaf in ObservationLayout(space).leaves
    ]
    assert as_float32(GOOD) is GOOD


def test_parts_can_be_mapped() -> None:
    value = {"a": 1, "b": (2, 3), "more": 4}
    space = Dict(a=Discrete(9), b=Tuple([Discrete(9), Discrete(9)]))
    assert map_leaves(space, lambda part: part * 10, value) == {"a": 10, "b": (20, 30)}
    assert map_leaves(Discrete(9), lambda part: part * 10, 4) == 40
    with pytest.raises(ValueError, match="without 'b/1'"):
        map_leaves(space, str, {"a": 1, "b": [2]})


def test_options_of_all_discrete_components() -> None:
    assert choices(MIXED) == (3, 2, 4, 2) and choices(GOOD) == ()
    assert (
        choices(MultiDiscrete([[2, 3], [4, 5]])) == (2, 3, 4, 5)
        and choices(MultiBinary((2, 2))) == (2,) * 4
    )
