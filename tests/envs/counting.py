"""Small environments with known answers, for the tests of the adapters. Kind: state."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np


class Counting(gym.Env[np.ndarray, Any]):
    """Counts: the observation is (id of the environment, episode, step of the episode), the reward the step.

    Episode e lasts 2 + (id + e) % 3 steps. Even episodes terminate, odd ones are truncated, and every sixth says both.
    Observations are written into one buffer, as many environments do.
    """

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self._buffer = np.zeros(3, self.observation_space.dtype)
        self._episode, self._time = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._id = int(self.np_random.integers(1000))
        self._episode, self._time = self._episode + 1, 0
        return self._observe(), {"ignored": object()}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._time += 1
        ended = self._time == 2 + (self._id + self._episode) % 3
        both = self._episode % 6 == 0
        even = self._episode % 2 == 0
        return self._observe(), float(self._time), ended and (even or both), ended and (not even or both), {"ignored": lambda: None}

    def _observe(self) -> np.ndarray:
        self._buffer[:] = (self._id, self._episode, self._time)
        return self._buffer


class CountingInFloat32(Counting):
    """The same in the trainer's dtype, so that no conversion copies the buffer by chance."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)


class FromFive(Counting):
    """Actions counted from five; the reward is the action that arrived."""

    action_space = gym.spaces.Discrete(3, start=5)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(action), terminated, truncated, info


class Faulty(gym.Env[np.ndarray, Any]):
    """Goes wrong in the way it is told to, at its third step; `nothing` goes wrong on request."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault: str) -> None:
        self._fault, self._time = fault, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._fault == "reset raises":
            raise RuntimeError("no level today")
        if self._fault == "reset without info":
            return np.zeros(2, np.float32)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self._time += 1
        if self._fault == "nothing" or self._time < 3:
            return np.zeros(2, np.float32), 0.0, False, False, {}
        return self._misbehave()

    def _misbehave(self) -> Any:
        good = np.zeros(2, np.float32)
        match self._fault:
            case "raises":
                raise ZeroDivisionError("division by zero")
            case "exits":
                sys.exit(3)
            case "dies":
                os.kill(os.getpid(), 9)
            case "hangs":
                time.sleep(100)
        return {
            "shape": (np.zeros(3, np.float32), 0.0, False, False, {}),
            "dtype": (np.zeros(2, np.complex64), 0.0, False, False, {}),
            "nan": (np.array([0, np.nan], np.float32), 0.0, False, False, {}),
            "nan reward": (good, float("nan"), False, False, {}),
            "old step": (good, 0.0, False, {}),
            "none": None,
            "terminated": (good, 0.0, None, False, {}),
        }[self._fault]


class Spaces(gym.Env[Any, Any]):
    """Only has spaces."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space
