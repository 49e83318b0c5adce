"""Spaces: how observations are stored, how actions are taken apart, and what is refused."""

import functools
import operator
import re
from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, Graph, MultiBinary, Sequence, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from phasicrl import spaces
from phasicrl.models.encoders import ObservationReader
from tests.helpers import OBS_NORM

Dict: Any = gym.spaces.Dict  # their types are narrower than what they take
MultiDiscrete: Any = gym.spaces.MultiDiscrete

SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def boxes(*dtypes: type[Any]) -> st.SearchStrategy[gym.Space[Any]]:
    make = lambda shape, dtype: Box(0, 100, shape, dtype)  # noqa: E731
    return st.builds(make, SHAPES, st.sampled_from(dtypes))


def multi_discrete(shape: tuple[int, ...], start: int) -> Any:
    return MultiDiscrete(np.full(shape, 3) + np.arange(shape[-1]), start=np.full(shape, start))


STARTS, AXES = st.integers(-3, 3), SHAPES.filter(len)
DISCRETE = st.one_of(
    st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 5), STARTS),
    st.builds(multi_discrete, AXES, STARTS),
    st.builds(MultiBinary, AXES),
)


def trees(parts: st.SearchStrategy[gym.Space[Any]]) -> st.SearchStrategy[gym.Space[Any]]:
    """Draw spaces of `parts`, plain and nested; with at least one part."""

    def grow(inner: st.SearchStrategy[gym.Space[Any]]) -> st.SearchStrategy[gym.Space[Any]]:
        named = st.dictionaries(st.sampled_from("abcdef"), inner, min_size=1, max_size=3)
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(Tuple),
            named.map(lambda parts: Dict(OrderedDict(parts))),
        )

    return st.recursive(parts, grow, max_leaves=6)


NUMBERS = boxes(np.uint8, np.float16, np.float32, np.float64, np.int16)
OBSERVATIONS = trees(st.one_of(DISCRETE, NUMBERS))
ACTIONS = trees(st.one_of(DISCRETE, boxes(np.float32, np.float64)))


def random_batch(leaf: Any, num: int, rng: np.random.Generator) -> np.ndarray:
    """Draw values `[num, …]` of one part; floats of any bits, so infinities and NaN too."""
    shape = (num, *leaf.shape)
    if leaf.dtype == np.float32:
        numbers = np.frombuffer(rng.bytes(4 * num * int(np.prod(leaf.shape))), np.float32)
        return numbers.reshape(shape).copy()
    if isinstance(leaf, Box):
        return (rng.normal(size=shape) * 50).astype(leaf.dtype)
    samples = [np.asarray(leaf.sample()) for _ in range(num)]
    return np.stack(samples) if num else np.zeros(shape, leaf.dtype)


def at(tree: Any, path: spaces.KeyPath) -> Any:
    return functools.reduce(operator.getitem, path, tree)


def start_of(leaf: Any) -> np.ndarray:
    return np.asarray(getattr(leaf, "start", 0))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(OBSERVATIONS, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2**31))
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_observations_come_back(space: gym.Space[Any], num: int, before: int, seed: int) -> None:
    """A row of a larger storage may begin at any address."""
    spaces.check_spaces("mine", space, Discrete(2))
    rng, layout = np.random.default_rng(seed), spaces.ObservationLayout(space)
    values: Any = {path: random_batch(leaf, num, rng) for path, leaf in spaces.leaves(space)}
    packed = layout.pack(spaces.assemble(space, values), num)
    assert packed.shape == (num, *layout.shape) and packed.dtype == layout.dtype
    storage = torch.zeros(before + num + 1, *layout.shape, dtype=torch.from_numpy(packed).dtype)
    storage[before : before + num] = torch.from_numpy(packed)
    read = layout.unpack(storage[before : before + num])
    assert layout.is_tree == isinstance(space, Dict | Tuple) != isinstance(read, torch.Tensor)
    for leaf in layout.leaves:
        stored, expected = at(read, leaf.path).numpy(), values[leaf.path]
        if leaf.dtype == np.int64:
            expected = expected - start_of(leaf.space)
        assert stored.shape == (num, *leaf.shape) and stored.dtype == leaf.dtype
        assert stored.tobytes() == expected.astype(leaf.dtype).tobytes()


def test_where_every_part_lies() -> None:
    parts = Tuple([Discrete(4, start=7), Box(-1, 1, (), np.float64), MultiBinary((2, 2))])
    space = OrderedDict(z=Box(0, 255, (2, 3), np.uint8), a=parts)
    space |= {"m": MultiDiscrete([3, 4]), "i": Box(-5, 5, (1,), np.int32)}
    layout = spaces.ObservationLayout(Dict(space))
    assert layout.is_tree and layout.shape == (6 + 8 + 4 + 4 + 16 + 4,) and layout.dtype == np.uint8
    assert [
        (leaf.path, leaf.shape, leaf.dtype.name, leaf.columns.start, leaf.columns.stop)
        for leaf in layout.leaves
    ] == [
        (("z",), (2, 3), "uint8", 0, 6), (("a", 0), (), "int64", 6, 14),
        (("a", 1), (), "float32", 14, 18), (("a", 2), (2, 2), "uint8", 18, 22),
        (("m",), (2,), "int64", 22, 38), (("i",), (1,), "float32", 38, 42),
    ]  # fmt: skip
    obs = {"z": np.full((1, 2, 3), 9, np.uint8), "a": ([8], [0.5], [[[1, 0], [0, 1]]])}
    row = layout.pack({**obs, "m": [[2, 3]], "i": [[-5]]}, 1)[0]
    assert row[:6].tolist() == [9] * 6 and row[18:22].tolist() == [1, 0, 0, 1]
    assert row[6:14].view(np.int64) == 1
    assert row[14:18].view(np.float32) == 0.5 and row[38:].view(np.float32) == -5


def test_what_needs_no_translation_is_not_copied() -> None:
    for space in (Box(0, 255, (4, 4, 3), np.uint8), Box(-1, 1, (3,), np.float32)):
        batch = np.zeros((2, *space.shape), space.dtype)
        layout, stored = spaces.ObservationLayout(space), torch.from_numpy(batch)
        assert layout.pack(batch, 2) is batch and layout.unpack(stored) is stored


TREE = Dict(counts=Box(-1, 1, (3,), np.float32), stage=Discrete(4, start=1))
COUNTS = np.zeros((2, 3))


@pytest.mark.parametrize(("obs", "match"), [
    ({"counts": COUNTS}, "without 'stage'"),
    (COUNTS, "without 'counts'"),
    ({"counts": np.zeros((2, 4)), "stage": [1, 1]}, r"shape \(4,\) \(at 'counts'\)"),
    ({"counts": np.zeros((3, 3)), "stage": [1, 1]}, r"shape \(3, 3\).*expected \(2, 3\)"),
    ({"counts": COUNTS, "stage": [1.0, 1.0]}, r"dtype float64 \(at 'stage'\)"),
    ({"counts": COUNTS.astype(complex), "stage": [1, 1]}, "dtype complex128"),
])  # fmt: skip
def test_observations_that_do_not_fit_are_refused(obs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        spaces.ObservationLayout(TREE).pack(obs, 2)


def test_bytes_beyond_their_range_are_refused() -> None:
    for number in (-1, 256):
        with pytest.raises(ValueError, match="0 to 255"):
            spaces.ObservationLayout(MultiBinary(2)).pack(np.array([[0, number]]), 1)


def test_a_single_number_may_come_in_brackets() -> None:
    for space in (Discrete(4), Box(0, 9, (), np.float32)):
        np.testing.assert_array_equal(spaces.ObservationLayout(space).pack([[1], [2]], 2), [1, 2])
        with pytest.raises(ValueError, match="shape"):
            spaces.ObservationLayout(space).pack([[1, 2], [3, 4]], 2)


@pytest.mark.parametrize(("counts", "stage", "index", "match"), [
    ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 4, 2], None, ""),
    ([[0, 0, 0], [0, 0, 0], [0, np.nan, 1]], [1, 4, 2], 2, "'counts'): [ 0. nan  1.]"),
    ([[0, 0, 0], [np.inf, 0, 0], [0, np.nan, 1]], [1, 4, 2], 1, "'counts'): [inf  0.  0.]"),
    ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 5, 0], 1, "(at 'stage'): 5"),
    ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], [0, 1, 1], 0, "(at 'stage'): 0"),
])  # fmt: skip
def test_numbers_that_cannot_be_used_are_found(
    counts: Any, stage: list[int], index: Any, match: str
) -> None:
    layout = spaces.ObservationLayout(TREE)
    packed = layout.pack({"counts": np.array(counts), "stage": np.array(stage)}, 3)
    found = layout.find_invalid(packed) or (None, "")
    assert found[0] == index and match in found[1]


@pytest.mark.parametrize("number", [1e300, -4e38])
def test_numbers_too_large_for_float32_are_not_infinity(number: float) -> None:
    layout = spaces.ObservationLayout(TREE)
    counts = np.array([[0, np.inf, 0], [number, np.nan, 0]])
    with pytest.raises(ValueError, match=rf"{re.escape(f'{number:g}')} .*'counts'.*float32"):
        layout.pack({"counts": counts, "stage": np.array([1, 2])}, 2)


def test_components_of_several_choices_have_their_own_limits() -> None:
    layout = spaces.ObservationLayout(MultiDiscrete([[2, 5], [3, 1]], start=[[0, 1], [0, 0]]))
    assert layout.find_invalid(layout.pack(np.array([[[1, 5], [2, 0]]]), 1)) is None
    fault = layout.find_invalid(layout.pack(np.array([[[0, 1], [0, 0]], [[2, 5], [2, 0]]]), 2))
    assert fault is not None and fault[0] == 1 and "[[2 5]\n [2 0]]" in fault[1]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(space=ACTIONS, num=st.integers(1, 3))
def test_actions_arrive_as_their_space_has_them(space: gym.Space[Any], num: int) -> None:
    space.seed(num)
    layout, parts = spaces.ActionLayout(space), spaces.leaves(space)
    samples = [space.sample() for _ in range(num)]
    pieces = [[np.ravel(at(one, path) - start_of(leaf)) for path, leaf in parts] for one in samples]
    rows = list(map(np.concatenate, pieces))
    action = np.stack(rows).astype(layout.dtype).reshape(num, *layout.shape)
    has_box = any(isinstance(leaf, Box) for _, leaf in parts)
    assert layout.dtype == (np.float32 if has_box else np.int64)
    assert layout.shape == (() if isinstance(space, Discrete) else (len(rows[0]),))
    copy = action.copy()
    layout.check("mine", action, num)
    batch = layout.unflatten(action)
    for path, leaf in parts:
        values, expected = at(batch, path), [at(sample, path) for sample in samples]
        assert values.dtype == leaf.dtype and values.shape == (num, *(leaf.shape or ()))
        np.testing.assert_allclose(values, np.stack(expected), rtol=1e-6)
        assert isinstance(at(spaces.take_first(space, batch), path), np.ndarray | np.integer)
        values[...] = 0  # an environment may write into what it is given
    np.testing.assert_array_equal(action, copy)


ARM = Tuple([Box(-1, 1, (2,)), MultiDiscrete([2, 4])])
MIXED = Dict(OrderedDict(go=Discrete(3), arm=ARM, flags=MultiBinary(1)))
GOOD_ROW = [0, 9, -9, 1, 3, 1]


@pytest.mark.parametrize(("space", "action", "match"), [
    (Discrete(3), np.array([0, 3]), "action 3 for environment 1; expected an .* 0 to 2"),
    (Discrete(3, start=5), np.array([-1, 0]), "action -1 for environment 0"),
    (Discrete(3), np.zeros(2), r"float64, shape \(2,\); expected a tensor of integers"),
    (Discrete(3), np.zeros((2, 1), int), r"shape \(2, 1\); .* shape \(2,\)"),
    (MultiDiscrete([2, 3]), np.array([[0, 0], [1, 3]]), r"1, component 1 \(1\); .* 0 to 2"),
    (MultiBinary(2), np.array([[0, 0], [2, 1]]), r"1, component 0 \(0\); .* 0 to 1"),
    (MIXED, np.array([GOOD_ROW, [0, 0, 0, 1, 4, 0.0]]), r"1, component 4 \(arm/1/1\);.*0 to 3"),
    (MIXED, np.array([GOOD_ROW, [0.5, 0, 0, 1, 3, 0]]), r"1, component 0 \(go\)"),
    (MIXED, np.array([GOOD_ROW, [0, 0, np.inf, 1, 3, 0]]), r"2 \(arm/0/1\); expected a finite"),
    (MIXED, np.zeros((2, 5)), r"a tensor of numbers of shape \(2, 6\)"),
    (MIXED, np.zeros((2, 6), bool), "bool"),
])  # fmt: skip
def test_wrong_actions_are_refused(space: gym.Space[Any], action: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"^mine: .*{match}"):
        spaces.ActionLayout(space).check("mine", action, 2)


def test_numbers_may_be_beyond_the_bounds_and_integers_may_be_floats() -> None:
    layout, action = spaces.ActionLayout(MIXED), np.array([[2, 9, -9, 1, 3, 1]])
    layout.check("mine", action, 1)
    layout.check("mine", action.astype(np.float32), 1)
    assert spaces.ActionLayout(Discrete(3, start=5)).unflatten(np.array([0, 2])).tolist() == [5, 7]
    arrived = layout.unflatten(action)
    assert arrived["go"] == 2 and [x.tolist() for x in arrived["arm"]] == [[[9, -9]], [[1, 3]]]


@pytest.mark.parametrize(("place", "env", "match"), [
    (2, 0, r"2.0 .* 0 \(go\)"), (8, 0, r"3.0 .* 4 \(arm/1/1\)"), (7, 1, r"2.0 .* 4 \(arm/1/1\)"),
    (9, 1, r"0.0 .* 5 \(flags\)"),
])  # fmt: skip
def test_actions_that_are_not_allowed_are_refused(place: int, env: int, match: str) -> None:
    layout, mask = spaces.ActionLayout(MIXED), np.ones((2, 11), bool)
    action = np.array([[2, 0, 0, 1, 3, 1], [0, 0, 0, 0, 2, 0]], np.float32)
    layout.check("mine", action, 2, action_mask=mask)
    mask[env, place] = False
    with pytest.raises(ValueError, match=f"^mine: action {match}; expected .*`action_mask` allows"):
        layout.check("mine", action, 2, action_mask=mask)


GOOD = Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    "space", [Text(5), Graph(GOOD, None), Sequence(GOOD), Dict(a=GOOD, b=Tuple([Text(5)]))]
)
def test_spaces_that_are_not_supported_are_refused(space: gym.Space[Any]) -> None:
    where = r" \(at 'b/0'\)" if isinstance(space, Dict) else ""
    for what, pair in (("observation", (space, Discrete(2))), ("action", (GOOD, space))):
        with pytest.raises(ValueError, match=f"^mine: {what}_space{where} is .*; expected "):
            spaces.check_spaces("mine", *pair)


@pytest.mark.parametrize(("observation_space", "action_space", "match"), [
    *((empty, Discrete(2), "observation_") for empty in (Dict(), Tuple([]), Dict(a=Dict()))),
    (Box(-1, 1, (0,), np.float32), Discrete(2), "observation_space"),
    (GOOD, Tuple([]), "action_space"),
    (GOOD, Box(0, 9, (2,), np.int64), "MultiDiscrete$"),
    (Box(0, 255, (4, 8, 8, 3), np.uint8), Discrete(2), "ReshapeObservation"),
])  # fmt: skip
def test_empty_spaces_are_refused(observation_space: Any, action_space: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        spaces.check_spaces("mine", observation_space, action_space)


def test_a_part_may_be_empty() -> None:
    """Goals of some robots are empty."""
    space = Dict(goal=Box(-1, 1, (0,), np.float64), state=GOOD)
    spaces.check_spaces("mine", space, space)
    layout = spaces.ObservationLayout(space)
    stored = layout.pack({"goal": np.zeros((2, 0)), "state": np.ones((2, 2))}, 2)
    assert layout.find_invalid(stored) is None
    read = ObservationReader(space, OBS_NORM)(torch.from_numpy(stored))
    assert read["goal"].shape == (2, 0) and read["state"].tolist() == [[1, 1]] * 2
    assert spaces.ActionLayout(space).unflatten(np.ones((2, 2), np.float32))["goal"].shape == (2, 0)


def test_float32_in_place_of_other_floats_at_every_depth() -> None:
    def make(dtype: Any, high: float) -> Any:
        parts = Tuple([Box(-np.inf, high, (1,), dtype), Discrete(3)])
        return Dict(OrderedDict(z=Box(-1, 1, (2,), dtype), a=parts, b=Box(0, 9, (1,), np.uint8)))

    changed = spaces.to_float32_space(make(np.float64, 1e300))
    assert changed == make(np.float32, float(np.finfo(np.float32).max))
    assert list(changed.spaces) == ["z", "a", "b"]  # type: ignore[attr-defined]
    wide = spaces.ActionLayout(Box(-1e300, 1e300, (1,), np.float64))
    assert wide.unflatten(np.ones((1, 1), np.float32)).tolist() == [[1.0]]
    assert spaces.to_float32_space(GOOD) is GOOD


def test_parts_can_be_mapped() -> None:
    value = {"a": 1, "b": (2, 3), "more": 4}
    space = Dict(a=Discrete(9), b=Tuple([Discrete(9), Discrete(9)]))
    assert spaces.map_leaves(space, lambda part: part * 10, value) == {"a": 10, "b": (20, 30)}
    assert spaces.map_leaves(Discrete(9), lambda part: part * 10, 4) == 40
    with pytest.raises(ValueError, match="without 'b/1'"):
        spaces.map_leaves(space, str, {"a": 1, "b": [2]})


def test_options_of_all_discrete_components() -> None:
    assert spaces.get_nvec(MIXED) == (3, 2, 4, 2) and spaces.get_nvec(GOOD) == ()
    assert spaces.get_nvec(MultiDiscrete([[2, 3], [4, 5]])) == (2, 3, 4, 5)
    assert spaces.get_nvec(MultiBinary((2, 2))) == (2,) * 4


def test_extra_entries_are_found_at_any_depth() -> None:
    box = gym.spaces.Box(0, 1, (2,))
    space = gym.spaces.Dict(a=box, b=gym.spaces.Tuple([box, gym.spaces.Dict(c=box)]))
    obs = {"a": 0, "b": (0, {"c": 0})}
    assert spaces.find_extra_keys(space, obs) == spaces.find_extra_keys(box, obs) == []
    more = {"a": 0, "z": 1, "b": (0, {"c": 0, "d": 1}, 2)}
    assert spaces.find_extra_keys(space, more) == ["z", "b/2", "b/1/d"]
