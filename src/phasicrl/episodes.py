"""Returns and lengths of episodes, in unnormalized rewards. Kind: state."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor


class EpisodeStatistics:
    """Statistics of a run's episodes, updated once per rollout.

    Args:
        num_envs: number of environments B, of all processes.
        window: number of episodes of the moving mean.
    """

    def __init__(self, num_envs: int, *, window: int = 100) -> None:
        self._current = np.zeros((2, num_envs))  # returns and lengths of unfinished episodes
        self._finished: list[list[float]] = []
        self._recent: deque[float] = deque(maxlen=window)
        self._completed: list[bool] = []
        self._restarts: int | None = None  # None: environments that fail end the run
        self._levels: set[int] = set()

    def update(self, reward: Tensor, ended: Tensor, info: dict[str, Tensor]) -> None:
        """Add T steps of every environment to the running and finished episodes.

        Args:
            reward: rewards `[T, B]`.
            ended: whether an episode ended with the step, `[T, B]` bool.
            info: extra tensors of the steps (`TimeStep.info`), `[T, B]` each.
        """
        continues, ends = ~ended.cpu().numpy(), ended.cpu().numpy()
        if "cut" in info:  # by a failure: such episodes are not finished
            ends = ends & ~info["cut"].cpu().numpy()
            self._restarts = (self._restarts or 0) + int(info["restarts"].sum())
        # Rewards and lengths of the steps, [T, 2, B], summed in place.
        sums = np.stack([reward.cpu().numpy(), np.ones(ends.shape)], axis=1)
        # Sum step by step, so that rounding does not depend on where rollouts begin.
        for total, is_same_episode in zip(sums, continues, strict=True):
            total += self._current
            self._current = total * is_same_episode
        finished = sums.transpose(0, 2, 1)[ends].tolist()  # in the order in which they ended
        self._finished += finished
        self._recent.extend(episode_return for episode_return, _ in finished)
        if "level_seed" in info:
            self._levels.update(info["level_seed"].unique().tolist())
        if "level_complete" in info:
            self._completed += (info["level_complete"][ended] != 0).tolist()

    def report(self) -> dict[str, float]:
        """Return the metrics of the episodes finished since the last call."""
        record: dict[str, float] = {"charts/num_episodes": len(self._finished)}
        if self._finished:
            returns, lengths = zip(*self._finished, strict=True)
            record["charts/episodic_return"] = float(np.mean(returns))
            record["charts/episodic_length"] = float(np.mean(lengths))
        if self._recent:
            record["charts/episodic_return_100"] = self.recent_mean
        if self._restarts is not None:
            record["charts/env_restarts"] = self._restarts
            self._restarts = 0
        if self._completed:
            record["procgen/level_complete"] = float(np.mean(self._completed))
        if self._levels:
            record["procgen/num_levels_seen"] = len(self._levels)
        self._finished.clear()
        self._completed.clear()
        return record

    @property
    def is_full(self) -> bool:
        """Return whether as many episodes have finished as the window has."""
        return len(self._recent) == self._recent.maxlen

    @property
    def recent_mean(self) -> float:
        """Mean return over the window; NaN before the first episode has finished."""
        return float(np.mean(self._recent)) if self._recent else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return the returns, lengths and counters of episodes to save in a checkpoint."""
        return {
            "finished": list(self._finished),
            "completed": list(self._completed),
            "restarts": self._restarts,
            "recent": list(self._recent),
            "levels": sorted(self._levels),
            "under_way": self._current.ravel().tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], *, same_episodes: bool = True) -> None:
        """Restore the result of `state_dict`; `same_episodes` is false after a new start."""
        if same_episodes:
            self._current = np.reshape(state["under_way"], self._current.shape).astype(float)
        self._finished.extend(state["finished"])
        self._completed.extend(state["completed"])
        self._restarts = state["restarts"]
        self._recent.extend(state["recent"])
        self._levels.update(int(level) for level in state["levels"])
