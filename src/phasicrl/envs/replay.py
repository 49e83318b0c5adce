"""Records the actions of current episodes, from which they can be replayed. Kind: state."""

from __future__ import annotations

import numpy as np


class EpisodeActions:
    """Actions of each environment since its episode began.

    Args:
        num_envs: B.
        shape: of an action.
        dtype: of an action.
    """

    def __init__(self, num_envs: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._rows = np.zeros((64, num_envs, *shape), dtype)
        self._lengths = np.zeros(num_envs, np.int64)
        self._end = 0

    def begin(self) -> None:
        """Drop all actions: every environment was reset."""
        self._lengths[:] = 0
        self._end = 0

    def add(self, action: np.ndarray, ended: np.ndarray) -> None:
        """Add the actions `[B, …]` of a step and whether it ended episodes `[B]`."""
        if self._end == len(self._rows):
            self._grow()
        self._rows[self._end] = action
        self._end += 1
        self._lengths += 1
        self._lengths[ended] = 0

    def state(self) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the last actions `[T, B, …]` and of the lengths of episodes `[B]`.

        T is the length of the longest episode.
        """
        return self._rows[self._end - self._lengths.max() : self._end].copy(), self._lengths.copy()

    def load(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Restore what `state` returned."""
        self._end = len(rows)
        if self._end > len(self._rows):
            self._rows = np.zeros_like(rows)
        self._rows[: self._end], self._lengths[:] = rows, lengths

    def per_env(self) -> list[np.ndarray]:
        """Return the actions of each environment's episode `[L, …]`, oldest first."""
        return [
            self._rows[self._end - length : self._end, env]
            for env, length in enumerate(self._lengths.tolist())
        ]

    def _grow(self) -> None:
        """Drop actions of ended episodes; double the buffer if fewer than half of them are."""
        kept = int(self._lengths.max())
        rows = self._rows[self._end - kept : self._end]
        if 2 * kept > len(self._rows):
            self._rows = np.zeros((2 * len(self._rows), *self._rows.shape[1:]), self._rows.dtype)
        self._rows[:kept] = rows.copy()
        self._end = kept
