"""Base class of environments with NumPy arrays: tensors, checks, resume. Kind: effects."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from phasicrl.envs.checks import EnvProperties
from phasicrl.envs.protocol import EnvError, RestoreMethod, TimeStep
from phasicrl.envs.watchdog import CALL_TIMEOUT, EnvWatchdog
from phasicrl.seeding import env_seeds
from phasicrl.spaces import ActionLayout, ObservationLayout

ObsAndMask = tuple[np.ndarray, "np.ndarray | None"]
"""Observations `[B, …]` and their masks `[B, mask_size]`; None without masks."""


class EnvSlice(NamedTuple):
    """Environments that one rank makes: how many, and what their seeds are made from.

    Attributes:
        num_envs: number of environments.
        base_seed: seed of the environments of all ranks.
        first_index: index of the first environment among those of all ranks.
        steps_before: steps of each environment of the run before these are made.
    """

    num_envs: int
    base_seed: int
    first_index: int = 0
    steps_before: int = 0

    def seeds(self) -> list[int]:
        """Derive one seed for each environment."""
        return env_seeds(self.base_seed, self.num_envs, first=self.first_index)


class NumpyStep(NamedTuple):
    """Arrays of one step; later steps do not change them.

    Attributes:
        obs: stored and checked observations `[B, …]`; the first of the next episode where one
            ended.
        reward: checked rewards `[B]` float32.
        terminated: whether the episode ended by the environment's rules, `[B]` bool.
        truncated: whether the episode was cut, `[B]` bool; may be true where `terminated` is.
        final_obs: final observations `[B, …]`, valid in the rows of ended episodes; None if no
            episode ended.
        action_mask: allowed actions `[B, mask_size]` for `obs`; None without masks.
        info: extra arrays `[B]`, see `TimeStep`.
    """

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: np.ndarray | None
    action_mask: np.ndarray | None = None
    info: dict[str, np.ndarray] = {}  # noqa: RUF012  # never written to


class EpisodeActions:
    """Recorded actions of each environment's current episode, from which it can be replayed.

    Args:
        num_envs: number of environments B.
        shape: shape of an action.
        dtype: dtype of an action.
    """

    def __init__(self, num_envs: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._steps, self._end = np.empty((0, num_envs, *shape), dtype), 0
        self._lengths = np.zeros(num_envs, np.int64)

    def add(self, action: np.ndarray, ended: np.ndarray) -> None:
        """Record the actions `[B, …]` of a step; drop all of the episodes that it `ended` `[B]`."""
        if self._end == len(self._steps):  # full: keep the current episodes, with as much space
            current, _ = self.get_actions()
            space = np.empty((len(current) + 64, *current.shape[1:]), current.dtype)
            self._steps, self._end = np.concatenate([current, space]), len(current)
        self._steps[self._end] = action
        self._end += 1
        self._lengths += 1
        self._lengths[ended] = 0

    def get_actions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the last T actions `[T, B, …]` and of the current lengths `[B]`.

        T is the length of the longest current episode.
        """
        start = self._end - self._lengths.max()
        return self._steps[start : self._end].copy(), self._lengths.copy()

    def set_actions(self, actions: np.ndarray, lengths: np.ndarray) -> None:
        """Restore the result of `get_actions`."""
        self._steps, self._end, self._lengths = actions.copy(), len(actions), lengths.copy()

    def clear(self) -> None:
        """Drop all actions, after a reset of all environments."""
        self._lengths[:] = 0

    def split_by_env(self) -> list[np.ndarray]:
        """Return the actions `[L, …]` of the current episodes: B arrays, each oldest first."""
        actions, lengths = self.get_actions()
        return [actions[len(actions) - n :, env] for env, n in enumerate(lengths.tolist())]


class NumpyVectorEnv:
    """`VectorEnv` on the CPU, whose tensors share memory with NumPy arrays.

    Subclasses implement `_reset`, `_step` and `_close`. With `restore_method` `replay`, they also
    implement `_get_replay_starts`, which returns the start of each current episode as JSON (None
    if unknown), and `_replay`, which restarts them and takes the actions `[L, …]` of each.

    Attributes:
        is_open: whether `close` has not been called.
        timeout: deadline of a call in this process, in seconds.
        remedy: end of error messages.
    """

    device = torch.device("cpu")
    restore_method: RestoreMethod = "none"
    has_final_obs = is_open = True
    timeout: float = CALL_TIMEOUT
    remedy = ""

    def __init__(self, name: str, num_envs: int, properties: EnvProperties) -> None:
        self.name, self.num_envs, self.mask_size = name, num_envs, properties.mask_size
        self.observation_space = properties.observation_space
        self.action_space = properties.action_space
        self.action_mask: Tensor | None = None
        self._layout = ObservationLayout(self.observation_space)
        self._actions = ActionLayout(self.action_space)
        self._episodes = EpisodeActions(num_envs, self._actions.shape, self._actions.dtype)
        self._obs: np.ndarray | None = None  # None before the first reset and after close
        self._num_steps, self._watchdog = 0, EnvWatchdog(name)

    def reset(self) -> Tensor:
        """Reset every environment and return the first observations `[B, …]`."""
        obs, mask = self._call_with_watchdog("reset()", self.timeout, self._reset)
        self._episodes.clear()
        self._num_steps = 0
        return self._keep_obs_and_mask(obs, mask)

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`, and reset ended ones."""
        if self._obs is None:
            raise EnvError(f"{self.name}: step() before reset() or after close(). Call reset()")
        actions = action.numpy()
        mask = None if self.action_mask is None else self.action_mask.numpy()
        self._actions.check(self.name, actions, self.num_envs, action_mask=mask)
        self._num_steps += 1
        step: NumpyStep = self._call_with_watchdog("step()", self.timeout, self._step, actions)
        if self.restore_method == "replay":
            self._episodes.add(actions, step.terminated | step.truncated)
        return TimeStep(
            obs=self._keep_obs_and_mask(step.obs, step.action_mask),
            reward=torch.from_numpy(step.reward),
            terminated=torch.from_numpy(step.terminated),
            # Where both are true, the episode ended by its rules.
            truncated=torch.from_numpy(step.truncated & ~step.terminated),
            final_obs=None if step.final_obs is None else torch.from_numpy(step.final_obs),
            info={name: torch.from_numpy(values) for name, values in step.info.items()},
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a resumed run needs to replay the current episodes.

        That is the start of each episode (see `_get_replay_starts`), its actions so far and its
        current observation. None if episodes cannot be replayed.
        """
        if self.restore_method != "replay" or self._obs is None:
            return None
        if None in (starts := self._get_replay_starts()):
            return None
        actions, lengths = map(torch.from_numpy, self._episodes.get_actions())
        current = {"obs": torch.from_numpy(self._obs), "mask": self.action_mask}
        return {"starts": starts, "actions": actions, "lengths": lengths} | current

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Replay the episodes of a state and return their current observations `[B, …]`.

        Raises:
            EnvError: the replay leads to other observations than those in the state, or episodes
                cannot be replayed.
        """
        if self.restore_method == "none":
            raise EnvError(f"{self.name}: episodes cannot be replayed")
        self._episodes.set_actions(state["actions"].numpy(), state["lengths"].numpy())
        parts = state["starts"], self._episodes.split_by_env()
        timeout = self.timeout * (2 + len(state["actions"]))
        obs, mask = self._call_with_watchdog("replay", timeout, self._replay, *parts)
        is_same = mask is None or np.array_equal(mask, state["mask"])
        if not is_same or not np.array_equal(obs, state["obs"]):
            raise EnvError(f"{self.name}: replayed episodes do not lead to the saved observations")
        return self._keep_obs_and_mask(obs, mask)

    def check(self) -> None:
        """Do nothing: `step` checks each step."""

    def close(self) -> None:
        """Release processes and threads; further calls do nothing."""
        self._obs, self.is_open = None, False
        self._watchdog.current_call = "close()", self.timeout
        try:
            self._close()
        finally:
            self._watchdog.close()

    _reset: Callable[[], ObsAndMask]
    _step: Callable[[np.ndarray], NumpyStep]
    _close: Callable[[], None]
    _get_replay_starts: Callable[[], list[Any]]
    _replay: Callable[[list[Any], list[np.ndarray]], ObsAndMask]

    def _call_with_watchdog(
        self, call_name: str, timeout: float, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Call a method of the subclass under a deadline, and close if it fails."""
        self._watchdog.current_call = call_name, timeout
        try:
            with torch.inference_mode(False):  # the environment may train a network
                return function(*args)
        except Exception:  # a failed environment has an unknown state
            self.close()
            raise
        finally:
            self._watchdog.current_call = None

    def _keep_obs_and_mask(self, obs: np.ndarray, mask: np.ndarray | None) -> Tensor:
        self._obs = obs
        self.action_mask = None if mask is None else torch.from_numpy(mask)
        return torch.from_numpy(obs)

    def _pack_obs(self, obs: Any, call_name: str, env_ids: np.ndarray | None = None) -> np.ndarray:
        """Pack and check observations of the environments `env_ids`; None for all."""
        try:
            stored = self._layout.pack(obs, self.num_envs if env_ids is None else len(env_ids))
        except ValueError as error:
            raise EnvError(f"{self.name}: {call_name}() returned {error}; {self.remedy}") from None
        return self._check_obs_values(stored, call_name, env_ids)

    def _check_obs_values(
        self, stored: np.ndarray, call_name: str, env_ids: np.ndarray | None = None
    ) -> np.ndarray:
        """Check the numbers in packed observations, and return the observations.

        Raises:
            EnvError: a number is not finite, or outside its discrete space.
        """
        if invalid := self._layout.find_invalid(stored):
            index = invalid[0] if env_ids is None else int(env_ids[invalid[0]])
            self._raise_error(index, call_name, f"returned {invalid[1]}")
        return stored

    def _convert_reward(self, reward: np.ndarray) -> np.ndarray:
        """Return rewards as float32.

        Raises:
            EnvError: a reward is not finite.
        """
        with np.errstate(over="ignore"):
            number = reward.astype(np.float32, copy=False)
        if not (is_finite := np.isfinite(number)).all():
            text = f"returned a reward that is not finite, or too large for float32: {reward}"
            self._raise_error(int(np.argmin(is_finite)), "step", text)
        return number

    def _raise_error(self, index: int, call_name: str, text: str) -> NoReturn:
        location = f"{self.name}: environment {index}, {call_name}() at step {self._num_steps}"
        raise EnvError(f"{location} {text}; {self.remedy}")
