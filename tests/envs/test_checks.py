"""Checks of environments: masks, faults, and methods that restore them."""

import os
import re
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.config import EnvConfig
from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.protocol import EnvError
from phasicrl.envs.vector import make_custom_envs
from phasicrl.spaces import ActionLayout
from tests.envs.acting import MODES, NEVER, Mode, check_known_masks, draw_action, make
from tests.envs.counting import (
    Counting,
    FaultyMask,
    FaultyStructure,
    Masked,
    MaskedByMethod,
    MaskedInInfo,
    MaskedInObservation,
    MaskedNumbers,
    Misbehaving,
    Spaces,
    misbehave,
)
from tests.helpers import Corridor

MASKED: tuple[type[Masked], ...] = (MaskedInObservation, MaskedByMethod, MaskedInInfo)


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("mode", MODES)
def test_masks_are_those_of_the_observations_returned(mode: Mode, kind: type[Masked]) -> None:
    """At the end of an episode the mask is that of the next episode's first observation."""
    envs = make(kind, mode)
    assert envs.mask_size == 7 and envs.action_mask is None
    expected_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)
    assert envs.observation_space == (
        gym.spaces.Dict(counts=expected_space) if kind is MaskedInObservation else expected_space
    )
    check_known_masks(envs)


def test_actions_that_are_not_allowed_are_refused() -> None:
    envs = make(MaskedInInfo)
    envs.reset()
    assert envs.action_mask is not None
    action = draw_action(envs, np.random.default_rng(1))
    action[2, 1] = envs.action_mask[2, 4:].int().argmin()
    with pytest.raises(ValueError, match=f"action {action[2, 1]} for environment 2.* one that"):
        envs.step(action)
    envs.close()


def test_the_observation_goes_before_the_method_and_the_method_before_info() -> None:
    class Twice(MaskedByMethod, MaskedInInfo):
        def action_masks(self) -> np.ndarray:
            return np.arange(7) > 0

    class Thrice(Twice, MaskedInObservation):
        observation_space = MaskedInObservation.observation_space

    for kind, from_method in ((Twice, True), (Thrice, False)):
        envs = make(kind)
        envs.reset()
        assert envs.action_mask is not None
        assert (envs.action_mask.sum() == 3 * 6) == from_method
        envs.close()


def test_masks_are_found_through_wrappers() -> None:
    envs = make(lambda: gym.wrappers.TimeLimit(MaskedByMethod(), 100))
    assert envs.mask_size == 7
    envs.reset()
    assert envs.action_mask is not None and not envs.action_mask.all()
    envs.close()


def test_numbers_are_not_masked() -> None:
    """Without a discrete component `action_mask` is nothing special."""
    envs = make(MaskedNumbers)
    assert envs.mask_size == 0
    assert "action_mask" in envs.observation_space.spaces  # type: ignore[attr-defined]
    envs.reset()
    envs.step(torch.zeros(3, 2))
    assert envs.action_mask is None
    envs.close()


FAULTY_MASKS = {
    "missing": (None, "returned no 'action_mask' in its info"),
    "too short": ([1, 1], r"returned an action mask of shape \(2,\); expected for MultiDiscrete"),
    "no numbers": ("all", "returned an action mask of a str"),
    "values": ([0, 1, 2, 0, 1], r"returned an action mask with values \[0 1 2\]"),
    "nothing left": ([[1, 1], [0, 0, 0]], "allows nothing in component 1: .* True  True False"),
}
FAULTY_PARTS = {
    "missing": ("more", None, "without 'more'; expected the parts"),
    "too few": ("more", (3,), "without 'more/1'; expected"),
    "shape": ("counts", np.zeros(4), r"shape \(4,\) \(at 'counts'\); expected \(3,\)"),
    "dtype": ("image", np.zeros((4, 5, 3)), r"dtype float64 \(at 'image'\); expected uint8"),
    "not finite": ("counts", [0, np.inf, 1], r"not finite \(at 'counts'\): \[ 0. inf  1.\]"),
    "above": ("more", (11, np.zeros(3, int)), r"Discrete\(9, start=2\) \(at 'more/0'\): 11"),
    "below": ("more", (1, np.zeros(3, int)), r"Discrete\(9, start=2\) \(at 'more/0'\): 1"),
    "no digit": ("more", (2, np.array([0, 2, 0])), r"MultiBinary\(3\) \(at 'more/1'\): \[0 2 0\]"),
}
FAULTS = {
    "raises": r"raised ZeroDivisionError: division by zero",
    "exits": "raised SystemExit: 3",
    "shape": r"shape \(3,\); expected \(2,\), as in observation_space",
    "dtype": "dtype complex64; expected float32",
    "NaN seen": "an observation that is not finite",
    "old step": "returned 4 values; expected .obs, reward, terminated, truncated, info",
    "None": "returned NoneType",
    "terminated None": "terminated = None",
    "ragged": "dtype object; expected float32",
}
ALL_FAULTS = [
    *((FaultyMask, (mask,), (np.ones(5),), message) for mask, message in FAULTY_MASKS.values()),
    *((FaultyStructure, (part, value), None, text) for part, value, text in FAULTY_PARTS.values()),
    *((Misbehaving, (fault, 3), ("none", 0), message) for fault, message in FAULTS.items()),
]


@pytest.mark.parametrize("number", range(len(ALL_FAULTS)))
def test_a_fault_names_environment_call_and_step(number: int) -> None:
    """One of two environments returns something wrong in its third step."""
    kind, arguments, good, message = ALL_FAULTS[number]
    # For the probe, for environment 0, for environment 1.
    made = iter([good or arguments] * 2 + [arguments])
    envs = make(lambda: kind(*next(made)), num_envs=2)  # type: ignore[arg-type]
    envs.reset()
    action = torch.zeros(2, *ActionLayout(envs.action_space).shape, dtype=torch.int64)
    for _ in range(2):
        envs.step(action)
    where = rf"mine: environment {int(good is not None)}, step\(\) at step 3"
    with pytest.raises(EnvError, match=f"{where}.*{message}"):
        envs.step(action)
    with pytest.raises(EnvError, match="after close"):
        envs.step(action)


@pytest.mark.parametrize("mode", MODES)
def test_the_environments_own_traceback_is_attached(mode: Mode) -> None:
    envs = make(lambda: Misbehaving("raises", 3), mode, num_envs=1)
    envs.reset()
    with pytest.raises(EnvError, match="ZeroDivisionError") as caught:
        for _ in range(3):
            envs.step(NEVER[:1])
    assert "raise ZeroDivisionError" in caught.value.__notes__[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fault", "message"), [
    ("raises", "ZeroDivisionError: division by zero"), ("no info", r"\(obs, info\)"),
])  # fmt: skip
def test_faults_of_a_reset(mode: Mode, fault: str, message: str) -> None:
    home, at = os.getpid(), "first reset"
    made = iter(["never", at, at])  # for the probe, then for those that are stepped
    kind = partial(Misbehaving, fault)
    envs = make(lambda: kind(next(made) if os.getpid() == home else at), mode, num_envs=2)
    with pytest.raises(EnvError, match=rf"environment \d, reset\(\) at step 0.*{message}"):
        envs.reset()
    with pytest.raises(EnvError, match=rf"mine: reset\(\) of a first environment.*{message}"):
        make(lambda: kind(at))


@pytest.mark.parametrize("kind", [misbehave, partial(Misbehaving, at="first reset")])
def test_an_environment_that_exits_before_training_is_an_error(kind: Any) -> None:
    with pytest.raises(EnvError, match="SystemExit: 3"):
        make(partial(kind, "exits"))


class Sticky(Counting):
    """Environment that raises an error when it is closed."""

    error: BaseException = RuntimeError("no connection")

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no connection"), SystemExit(3)])
def test_a_close_that_raises_is_a_warning(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sticky, "error", error)
    with pytest.warns(RuntimeWarning, match=rf"mine: close\(\).*{type(error).__name__}: {error}"):
        envs = make(Sticky, num_envs=1)
    envs.reset()
    assert envs.step(NEVER[:1]).reward.tolist() == [1.0]
    with pytest.warns(RuntimeWarning, match=r"close\(\)"):
        envs.close()


class Strict(Spaces):
    """Environment that refuses actions beyond its bounds."""

    def __init__(self, low: float, high: float) -> None:
        box = gym.spaces.Box(low, high, (1,), np.float32)
        actions = gym.spaces.Dict(a=gym.spaces.Discrete(2), b=box)
        super().__init__(gym.spaces.Box(0, 1, (2,), np.float32), actions)

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise AssertionError(action)
        return super().step(action)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("low", "high", "value"), [(-0.1, 0.1, 0.5), (0, np.inf, -1)])
def test_a_complaint_about_an_action_beyond_its_bounds_names_the_remedy(
    low: float, high: float, value: float, vector: bool
) -> None:
    def make_vector_env(num_envs: int) -> Any:
        kind = partial(Strict, low, high)
        return gym.vector.SyncVectorEnv([kind] * num_envs, autoreset_mode="SameStep")

    envs: Any = make(partial(Strict, low, high), num_envs=2)
    if vector:
        envs = make_custom_envs(make_vector_env, EnvConfig(id="mine"), EnvSlice(2, 1))
    envs.reset()
    inside = max(low, 0.0)
    assert envs.step(torch.tensor([[1, inside], [0, inside]])).reward.tolist() == [1, 1]
    message = rf"AssertionError.*{value}.*'b'.*Box\(.*action\.squash clip"
    with pytest.raises(EnvError, match=message):
        envs.step(torch.tensor([[1, inside], [0, value]]))


class Says(Counting):
    """Environment that returns the given reward, observation or `info` in each step."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self._said = said

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        reward, info = self._said.get("reward", reward), self._said.get("info", info)
        return self._said.get("obs", obs), reward, terminated, truncated, info


@pytest.mark.parametrize("reward", [np.array([2.5]), [2.5], np.float32(2.5), torch.tensor(2.5)])
def test_a_reward_may_come_in_brackets(reward: Any) -> None:
    envs = make(lambda: Says(reward=reward), num_envs=1)
    envs.reset()
    assert envs.step(NEVER[:1]).reward.tolist() == [2.5]


@pytest.mark.parametrize("reward", [np.ones(2), None, "much", "1", [], [None], [1, [2]], 1j])
def test_a_wrong_reward_is_refused(reward: Any) -> None:
    envs = make(lambda: Says(reward=reward), num_envs=1)
    envs.reset()
    with pytest.raises(EnvError, match=r"environment 0, step\(\) at step 1.* reward") as caught:
        envs.step(NEVER[:1])
    assert type(reward).__name__ in str(caught.value) and repr(reward) in str(caught.value)


@pytest.mark.parametrize("key", ["action_mask", "action_masks"])
def test_masks_that_come_late_or_by_another_name_are_refused(key: str) -> None:
    """The first reset decides whether there are masks: later ones would be ignored."""
    envs = make(lambda: Says(info={key: np.ones(2)}), num_envs=1)
    envs.reset()
    wrong = "that reset() did not return" if key == "action_mask" else "in info; expected"
    with pytest.raises(EnvError, match=re.escape(f"'{key}' {wrong}")):
        envs.step(NEVER[:1])


class Named(Corridor):
    """Environment with methods of exact resume, or with such names for another purpose."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def get_state(self, *player: int) -> Any:
        if self._kind == "wants more":
            raise TypeError("get_state() missing 1 required positional argument: 'player'")
        return np.zeros(2) if self._kind == "array" else [self._at, self._steps]


class NamedBoth(Named):
    def set_state(self, state: Any) -> Any:
        assert self._kind == "right", "must not be called"
        self._at, self._steps = state
        return self._obs(), {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["alone", "wants more", "array", "right"])
def test_episodes_go_on_with_generator_and_time_limit_and_other_methods_are_left_alone(
    mode: Mode, kind: str
) -> None:
    named = Named if kind == "alone" else NamedBoth

    right = torch.ones(2, dtype=torch.int64)
    limited = lambda: gym.wrappers.TimeLimit(named(kind), 3)  # noqa: E731
    envs, other = (make(limited, mode, num_envs=2) for _ in range(2))
    envs.reset()
    for _ in range(5):  # in the middle of the second episode
        envs.step(right)
    state = envs.state_dict()
    assert state is not None
    other.load_state_dict(state)
    for _ in range(9):
        one, same = envs.step(right), other.step(right)
        assert torch.equal(one.obs, same.obs) and torch.equal(one.truncated, same.truncated)
    envs.close()
    other.close()
