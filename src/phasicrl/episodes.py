"""Returns and lengths of episodes, in unnormalized rewards. Kind: state."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class Episode(NamedTuple):
    """Finished episode of training.

    Attributes:
        total_reward: return of the episode, the sum of its rewards.
        length: number of steps.
        env_index: index of the environment, over all processes.
        terminated: whether the environment ended it; false if it was cut, as by a time limit.
        level_complete: Procgen: whether the level was completed; None elsewhere.
    """

    total_reward: float
    length: int
    env_index: int
    terminated: bool
    level_complete: bool | None = None


class EpisodeStatistics:
    """Statistics of a run's episodes, updated once per rollout.

    Args:
        num_envs: number of environments B, of all processes.
        window: number of episodes of the moving mean.

    Attributes:
        finished: episodes that have ended since the last report, in the order of their ends.
    """

    def __init__(self, num_envs: int, *, window: int = 100) -> None:
        self._current = np.zeros((2, num_envs))  # returns and lengths of unfinished episodes
        self.finished: list[Episode] = []
        self._recent: deque[float] = deque(maxlen=window)
        self._restarts: int | None = None  # None: environments that fail end the run
        self._levels: set[int] = set()

    def add_steps(self, step_tensors: dict[str, Tensor]) -> None:
        """Add T steps of every environment to the running and finished episodes.

        Args:
            step_tensors: `reward`, `terminated`, `ended` (by termination or truncation) and the
                tensors of `TimeStep.info`, `[T, B]` each.
        """
        values = {name: tensor.cpu().numpy() for name, tensor in step_tensors.items()}
        continues, ends = ~values["ended"], values["ended"]
        if "cut" in values:  # by a failure: such episodes are not finished
            ends = ends & ~values["cut"]
            self._restarts = (self._restarts or 0) + int(values["restarts"].sum())
        # Rewards and lengths of the steps, [T, 2, B], summed in place.
        sums = np.stack([values["reward"], np.ones(ends.shape)], axis=1)
        # Sum step by step, so that rounding does not depend on where rollouts begin.
        for total, is_same_episode in zip(sums, continues, strict=True):
            total += self._current
            self._current = total * is_same_episode
        envs = np.broadcast_to(np.arange(ends.shape[1]), ends.shape)
        columns = [sums[:, 0], sums[:, 1].astype(int), envs, values["terminated"]]
        if "level_complete" in values:
            columns.append(values["level_complete"] != 0)
        rows = zip(*(column[ends].tolist() for column in columns), strict=True)
        finished = [Episode(*row) for row in rows]  # in the order in which they ended
        self.finished += finished
        self._recent.extend(episode.total_reward for episode in finished)
        if "level_seed" in values:
            self._levels.update(np.unique(values["level_seed"]).tolist())

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the episodes finished since the last call."""
        metrics: dict[str, float] = {"charts/num_episodes": len(self.finished)}
        if self.finished:
            returns, lengths, _, _, completed = zip(*self.finished, strict=True)
            metrics["charts/episodic_return"] = float(np.mean(returns))
            metrics["charts/episodic_length"] = float(np.mean(lengths))
            if completed[0] is not None:
                metrics["procgen/level_complete"] = float(np.mean(completed))
        if self._recent:
            metrics["charts/episodic_return_100"] = self.recent_mean_return
        if self._restarts is not None:
            metrics["charts/env_restarts"] = self._restarts
            self._restarts = 0
        if self._levels:
            metrics["procgen/num_levels_seen"] = len(self._levels)
        self.finished.clear()
        return metrics

    @property
    def is_full(self) -> bool:
        """Return whether as many episodes have finished as the window has."""
        return len(self._recent) == self._recent.maxlen

    @property
    def recent_mean_return(self) -> float:
        """Mean return of the last `window` episodes; NaN before the first has finished."""
        return float(np.mean(self._recent)) if self._recent else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return the returns, lengths and counters of episodes to save in a checkpoint."""
        return {
            "finished": list(self.finished),
            "restarts": self._restarts,
            "recent": list(self._recent),
            "levels": sorted(self._levels),
            "under_way": self._current.ravel().tolist(),
        }

    def load_state_dict(
        self, state: dict[str, Any], *, same_episodes: Sequence[bool] = (True,)
    ) -> None:
        """Restore the result of `state_dict`.

        Args:
            state: result of `state_dict`.
            same_episodes: whether each rank's environments are in the same episodes as before.
        """
        if any(same_episodes):
            current = np.reshape(state["under_way"], self._current.shape).astype(float)
            is_same = np.repeat(same_episodes, current.shape[1] // len(same_episodes))
            self._current = np.where(is_same, current, 0.0)
        self.finished.extend(Episode(*episode) for episode in state["finished"])
        self._restarts = state["restarts"]
        self._recent.extend(state["recent"])
        self._levels.update(int(level) for level in state["levels"])
