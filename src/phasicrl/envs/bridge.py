"""From back ends that speak NumPy to tensors, and the checks that they share. Kind: effects."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from phasicrl.envs.protocol import EnvError, ExactState, TimeStep
from phasicrl.envs.replay import EpisodeActions
from phasicrl.envs.watchdog import RESET_SECONDS, STEP_SECONDS, Watchdog
from phasicrl.spaces import ActionLayout, ObservationLayout


class NumpyStep(NamedTuple):
    """What a back end answers to a step: arrays that it does not write to again.

    Attributes:
        obs: `[B, …]` as stored, and checked; the first of the next episode where one ended.
        reward: `[B]`, of any float, and checked.
        terminated: `[B]` bool.
        truncated: `[B]` bool; may be true where `terminated` is.
        final_obs: `[B, …]`, whose rows count where an episode ended; None if none did.
        action_mask: `[B, mask_size]` of the observations in `obs`; None without masks.
        info: as in `TimeStep`.
    """

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: np.ndarray | None
    action_mask: np.ndarray | None
    info: dict[str, np.ndarray]


class NumpyEnv(Protocol):
    """What a back end that speaks NumPy has to offer; the attributes are those of `VectorEnv`.

    `has_masks` is true where there are action masks, even if they are not read.
    `Bridge` calls `reset` first, nothing after `close`, and `step` only with actions that are good.
    """

    name: str
    num_envs: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_size: int
    has_masks: bool
    exact_state: ExactState

    def reset(self) -> tuple[np.ndarray, np.ndarray | None]:
        """First observations `[B, …]`, as stored and checked, and their masks `[B, mask_size]`."""
        ...

    def step(self, action: np.ndarray) -> NumpyStep:
        """Step every environment with its action `[B]` or `[B, K]`."""
        ...

    def close(self) -> None:
        """Release processes and threads."""
        ...


class ReplayableEnv(NumpyEnv, Protocol):
    """A back end whose episodes can be played again; its `exact_state` is `replay`."""

    def starts(self) -> list[Any]:
        """How each environment's episode began, as JSON; None where that is not known."""
        ...

    def replay(
        self, starts: list[Any], actions: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """In place of the first reset, begin these episodes and step through them.

        Args:
            starts: what `starts` returned in another of the same seed.
            actions: of each environment since then, `[L, …]`.

        Returns:
            The observations that it leads to `[B, …]`, and their masks.
        """
        ...


class Bridge:
    """Environments of a NumPy back end; a `VectorEnv`. Arrays become tensors of the same memory."""

    device = torch.device("cpu")

    def __init__(self, backend: NumpyEnv, *, has_deadlines: bool = False) -> None:
        """Wrap a back end, whose calls a `Watchdog` ends if it has no deadlines of its own."""
        self.backend = backend
        self._watchdog = Watchdog(backend.name)
        self._step_seconds = math.inf if has_deadlines else STEP_SECONDS
        self._reset_seconds = math.inf if has_deadlines else RESET_SECONDS
        self.name, self.num_envs, self.mask_size = backend.name, backend.num_envs, backend.mask_size
        self.observation_space, self.action_space = backend.observation_space, backend.action_space
        self.exact_state: ExactState = backend.exact_state
        self.action_mask: Tensor | None = None
        self._allowed: np.ndarray | None = None  # the same memory
        self._actions = ActionLayout(self.action_space)
        self._is_reset = self._is_closed = False
        self._obs: np.ndarray | None = None
        self._episodes: EpisodeActions | None = None
        if self.exact_state == "replay":
            self._episodes = EpisodeActions(self.num_envs, self._actions.shape, self._actions.dtype)

    def reset(self) -> Tensor:
        """Start every environment anew and return the first observations `[B, …]`."""
        self._refuse_closed("reset")
        try:
            with self._watchdog.watch("reset()", self._reset_seconds):
                obs, mask = self.backend.reset()
        except Exception:
            self.close()
            raise
        self._is_reset = True
        self._take_mask(mask)
        if self._episodes is not None:
            self._obs = obs
            self._episodes.begin()
        return torch.from_numpy(obs)

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`; ended ones begin anew."""
        self._refuse_closed("step")
        if not self._is_reset:
            raise EnvError(f"{self.name}: step() before the first reset(); call reset() once")
        given = action.numpy() if isinstance(action, Tensor) else action
        self._actions.check(self.name, given, self.num_envs, action_mask=self._allowed)
        try:
            with self._watchdog.watch("step()", self._step_seconds):
                step = self.backend.step(given)
        except Exception:  # an environment that failed once is in no known state
            self.close()
            raise
        self._take_mask(step.action_mask)
        if self._episodes is not None:
            self._obs = step.obs
            self._episodes.add(given, step.terminated | step.truncated)
        tensor = torch.from_numpy
        return TimeStep(
            obs=tensor(step.obs),
            reward=tensor(step.reward.astype(np.float32, copy=False)),
            terminated=tensor(step.terminated),
            # Where both are true, the rules have ended the episode and nothing follows.
            truncated=tensor(step.truncated & ~step.terminated),
            final_obs=None if step.final_obs is None else tensor(step.final_obs),
            info={name: tensor(values) for name, values in step.info.items()},
        )

    def state_dict(self) -> dict[str, Any] | None:
        """How the episodes under way began, what was done in them, and what they show now.

        None where they cannot be played again.
        """
        if self._episodes is None or self._obs is None:
            return None
        starts = cast(ReplayableEnv, self.backend).starts()
        if None in starts:
            return None
        actions, lengths = map(torch.from_numpy, self._episodes.state())
        here = {"obs": torch.from_numpy(self._obs), "mask": self.action_mask}
        return {"starts": starts, "actions": actions, "lengths": lengths} | here

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Play the episodes again, up to where they were; they must show what they showed."""
        self._refuse_closed("load_state_dict")
        episodes, backend = self._episodes, cast(ReplayableEnv, self.backend)
        assert episodes is not None and not self._is_reset, f"{self.name} cannot be brought back"
        episodes.load(state["actions"].numpy(), state["lengths"].numpy())
        with self._watchdog.watch("replay of the episodes under way", 2 * self._reset_seconds):
            obs, mask = backend.replay(state["starts"], episodes.of_each())
        self._is_reset = True
        same_mask = mask is None or np.array_equal(mask, state["mask"].numpy())
        if not same_mask or not np.array_equal(obs, state["obs"].numpy()):
            text = "the episodes under way, played again, do not lead to where they were"
            raise EnvError(f"{self.name}: {text}")
        self._take_mask(mask)
        self._obs = obs
        return torch.from_numpy(obs)

    def close(self) -> None:
        """Close the back end; calling it twice is harmless."""
        self._is_closed = True
        with closing(self._watchdog), self._watchdog.watch("close()", self._step_seconds):
            self.backend.close()

    def _take_mask(self, mask: np.ndarray | None) -> None:
        self._allowed = mask
        self.action_mask = None if mask is None else torch.from_numpy(mask)

    def _refuse_closed(self, call: str) -> None:
        if self._is_closed:
            text = f"{call}() after close(); make new environments with make_envs"
            raise EnvError(f"{self.name}: {text}")


class BatchReader:
    """Stores and checks what a back end returned for a batch of environments.

    Attributes:
        num_steps: steps since the last reset of all environments, for messages; the back end counts
            them.
    """

    def __init__(
        self, name: str, observation_space: gym.Space[Any], num_envs: int, *, remedy: str
    ) -> None:
        self.name, self.num_envs, self.remedy = name, num_envs, remedy
        self.num_steps = 0
        self.layout = ObservationLayout(observation_space)

    def obs(self, obs: Any, call: str, env_ids: np.ndarray | None = None) -> np.ndarray:
        """Store observations of the environments `env_ids` (None: all); refuse unusable ones."""
        try:
            stored = self.layout.pack(obs, self.num_envs if env_ids is None else len(env_ids))
        except ValueError as error:
            raise EnvError(f"{self.name}: {call}() returned {error}; {self.remedy}") from None
        return self.check(stored, call, env_ids)

    def check(self, stored: np.ndarray, call: str, env_ids: np.ndarray | None = None) -> np.ndarray:
        """Refuse unusable ones among stored observations of environments; return them."""
        fault = self.layout.find_fault(stored)
        if fault is not None:
            self._refuse(fault[1], call, fault[0] if env_ids is None else int(env_ids[fault[0]]))
        return stored

    def reward(self, reward: np.ndarray) -> np.ndarray:
        """The rewards as float32, refusing those that are not finite then."""
        stored = reward
        if reward.dtype != np.float32:
            with np.errstate(over="ignore"):
                stored = reward.astype(np.float32)
        good = np.isfinite(stored)
        if not good.all():
            self._refuse(f"a reward that is not finite: {reward}", "step", int(np.argmin(good)))
        return stored

    def _refuse(self, what: str, call: str, index: int) -> NoReturn:
        where = f"{self.name}: environment {index}, {call}() at step {self.num_steps}"
        raise EnvError(f"{where}: returned {what}; {self.remedy}")
