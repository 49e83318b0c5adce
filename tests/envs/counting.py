"""Small environments with known answers, for the tests of the adapters. Kind: state.

Their processes import this file, and must not wait for torch.
"""

import os
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np

from tests.corridor import Corridor


class Counting(gym.Env[np.ndarray, Any]):
    """Counter: the observation is (environment, episode, step), the reward the step.

    Episode e lasts 2 + (id + e) % 3 steps. Even episodes terminate, odd ones are truncated, and
    every sixth does both. Observations are written into one buffer, as in many environments.
    """

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self._buffer = np.zeros(3, self.observation_space.dtype)
        self._episode, self._time = -1, 0

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._id = int(self.np_random.integers(1000))
        self._episode, self._time = self._episode + 1, 0
        return self._observe(), {"ignored": object()}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._time += 1
        ended, even, both = self._is_last(), self._episode % 2 == 0, self._episode % 6 == 0
        flags = ended and (even or both), ended and (not even or both)
        return self._observe(), float(self._time), *flags, {"ignored": lambda: None}

    def _is_last(self) -> bool:
        return self._time == 2 + (self._id + self._episode) % 3

    def _observe(self) -> np.ndarray:
        self._buffer[:] = (self._id, self._episode, self._time)
        return self._buffer


class PlainCounting(Counting):
    """`Counting` in new arrays for each step and with an empty `info`.

    Gymnasium's vector environments keep the returned array and send `info`.
    """

    def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return super().reset(**given)[0].copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs.copy(), reward, terminated, truncated, {}


class CountingInFloat32(Counting):
    """`Counting` in the trainer's dtype, so that no conversion copies the buffer by chance."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)


class Structured(Counting):
    """`Counting` in all kinds of spaces.

    The reward is the action that arrived, each number at a decimal place of its own.

    The image has the step in every pixel, `flags` the step in binary digits; `stage` is the step,
    counted from two.
    """

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (4, 5, 3), np.uint8),
        counts=gym.spaces.Box(-1e9, 1e9, (3,), np.float64),
        more=gym.spaces.Tuple([gym.spaces.Discrete(9, start=2), gym.spaces.MultiBinary(3)]),
    )
    action_space = gym.spaces.Tuple([
        gym.spaces.Discrete(3, start=1),
        gym.spaces.MultiDiscrete([2, 4], start=[0, 5]),
        gym.spaces.Box(-1, 1, (2,), np.float64),
    ])  # fmt: skip

    def __init__(self) -> None:
        self._buffer, self._image = np.zeros(3), np.zeros((4, 5, 3), np.uint8)
        self._episode, self._time = -1, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is no action"
        one, pair, numbers = action
        reward = one + 10 * pair[0] + 100 * pair[1] + 1000 * numbers[0] + 10000 * numbers[1]
        for array in (pair, numbers):
            array[:] = 0  # must not reach the trainer
        obs, _, terminated, truncated, info = super().step(0)
        return obs, float(reward), terminated, truncated, info

    def _observe(self) -> Any:
        self._image[:] = self._time
        more = (2 + self._time, np.array([self._time >> place & 1 for place in range(3)], np.int8))
        return {"image": self._image, "counts": super()._observe(), "more": more}


class Masked(Counting):
    """Counter that forbids two actions, which depend on episode and step.

    At the last step of an episode the mask forbids everything, or is missing. It is in the
    observation, in `info`, or returned by a method; actions are a pair of a `Discrete(4)` and a
    `Discrete(3)`.
    """

    action_space = gym.spaces.Tuple([gym.spaces.Discrete(4), gym.spaces.Discrete(3)])

    def _mask(self) -> tuple[np.ndarray, ...]:
        forbidden = self._id + 2 * self._episode + self._time
        return tuple(
            (np.zeros(n) if self._is_last() else np.arange(n) != forbidden % n).astype(np.int8)
            for n in (4, 3)
        )


class MaskedInObservation(Masked):
    observation_space = gym.spaces.Dict(
        counts=Counting.observation_space,
        action_mask=gym.spaces.Tuple([gym.spaces.MultiBinary(4), gym.spaces.MultiBinary(3)]),
    )

    def __init__(self) -> None:
        self._buffer, self._episode, self._time = np.zeros(3), -1, 0

    def _observe(self) -> Any:
        return {"counts": super()._observe(), "action_mask": self._mask()}


class MaskedNumbers(MaskedInObservation):
    """Environment that has a mask but no discrete action."""

    action_space = gym.spaces.Box(-1, 1, (2,))  # type: ignore[assignment]


class MaskedByMethod(Masked):
    def action_masks(self) -> np.ndarray:
        assert not self._is_last(), "nobody should ask"
        return np.concatenate(self._mask()).astype(bool)


class MaskedInInfo(Masked):
    def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(**given)
        return obs, {**info, "action_mask": self._mask()}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(0)
        info |= {} if self._is_last() else {"action_mask": self._mask()}
        return obs, reward, terminated, truncated, info


class MaskedInFlatInfo(MaskedInInfo):
    """`MaskedInInfo` with new arrays and flat masks, which vector environments can stack."""

    def _observe(self) -> np.ndarray:
        return super()._observe().copy()

    def _mask(self) -> Any:
        return np.concatenate(super()._mask())


GOOD = np.zeros(2, np.float32)
ANSWERS: dict[str, Any] = {
    "shape": (np.zeros(3, np.float32), 0.0, False, False, {}),
    "dtype": (np.zeros(2, np.complex64), 0.0, False, False, {}),
    "NaN seen": (np.array([0, np.nan], np.float32), 0.0, False, False, {}),
    "infinity seen": (np.array([np.inf, 0], np.float32), 0.0, False, False, {}),
    "1e300 seen": (np.full(2, 1e300), 0.0, False, False, {}),
    "NaN reward": (GOOD, float("nan"), False, False, {}),
    "1e300 reward": (GOOD, -1e300, False, False, {}),
    "no reward": (GOOD, None, False, False, {}),
    "old step": (GOOD, 0.0, False, {}),
    "None": None,
    "terminated None": (GOOD, 0.0, None, False, {}),
    "truncated text": (GOOD, 0.0, False, "no", {}),
    "ragged": ([[1.0], [1.0, 2.0]], 0.0, False, False, {}),
    "keys": ({"a": GOOD}, 0.0, False, False, {}),
}
"""Wrong results of a step, where observations are `Box(-1, 1, (2,))`."""


def misbehave(how: str) -> Any:
    """Go wrong in a step, or return something wrong."""
    match how:
        case "raises":
            raise ZeroDivisionError("division by zero")
        case "exits":
            sys.exit(3)
        case "dies":
            os.kill(os.getpid(), 9)
        case "hangs":
            time.sleep(100)
        case "no info":
            return GOOD
    return ANSWERS[how]


class Misbehaving(Corridor):
    """Environment that fails at one of its steps, or at a reset."""

    def __init__(self, what: str, at: int | str) -> None:
        super().__init__()
        self.what, self.at, self.count, self.resets = what, at, 0, 0

    def reset(self, **given: Any) -> Any:
        self.resets += 1
        if (self.at, self.resets) in (("first reset", 1), ("later reset", 2)):
            answer = misbehave(self.what)
            return answer if answer is None or len(answer) < 5 else (answer[0], answer[-1])
        return super().reset(**given)

    def step(self, action: np.int64) -> Any:
        self.count += 1
        return misbehave(self.what) if self.count == self.at else super().step(action)


class FaultyStructure(Structured):
    """`Structured` with one part of the observation replaced or missing from step 3 on."""

    def __init__(self, part: str, value: Any) -> None:
        super().__init__()
        self._part, self._value = part, value

    def _observe(self) -> Any:
        obs = super()._observe()
        if self._time < 3:
            return obs
        return {
            key: self._value if key == self._part else value
            for key, value in obs.items()
            if key != self._part or self._value is not None
        }

    def _is_last(self) -> bool:
        return False


class FaultyMask(gym.Env[np.ndarray, Any]):
    """Environment with the given mask from the third step on; None for no mask."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def __init__(self, mask: Any) -> None:
        self._mask, self._time = mask, 0

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), {"action_mask": np.ones(5, bool)}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._time += 1
        mask = np.ones(5, bool) if self._time < 3 else self._mask
        info = {} if mask is None else {"action_mask": mask}
        return np.zeros(2, np.float32), 0.0, False, False, info


class Spaces(gym.Env[Any, Any]):
    """Random members of any space; each step pays 1 and ends its episode."""

    def __init__(self, observation_space: Any, action_space: Any, mask: Any = None) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._info = {} if mask is None else {"action_mask": np.array(mask)}

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), self._info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, True, False, self._info
