"""Environment that most tests train in. Its processes import this file, and need no torch."""

from typing import Any

import gymnasium as gym
import numpy as np


class Corridor(gym.Env[np.ndarray, np.int64]):
    """Line of cells to walk right: reward 1 at the end, which terminates.

    After `limit` steps the episode is truncated.
    """

    def __init__(self, length: int = 4, limit: int = 9) -> None:
        self.length, self.limit = length, limit
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._at = self._steps = 0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self._at, self._steps = int(self.np_random.integers(2)), 0
        return self._obs(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._at = max(0, self._at + (1 if action == 1 else -1))
        self._steps += 1
        done = self._at >= self.length
        return self._obs(), float(done), done, self._steps >= self.limit and not done, {}

    def _obs(self) -> np.ndarray:
        return np.array([self._at / self.length, 1 - self._at / self.length], dtype=np.float32)


def corridor() -> Corridor:
    return Corridor()
