"""The one contract for environments: what a step returns, and how episodes end. Kind: data. Imports nothing of ours.

Every back end is translated to this once, in its adapter. Inside the trainer there are no reset rows and no autoreset modes:
`obs` is always what the next action answers to, and the observation in which an ended episode stopped is `final_obs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np

ExactState = Literal["snapshot", "replay", "none"]


class EnvError(RuntimeError):
    """An environment did something it must not; the message names the environment, the call and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """What B environments answer to B actions. The arrays are the caller's: no later call writes into them.

    Attributes:
        obs: `[B, …]` as `ObservationLayout` stores it; already the first of the next episode where one ended.
        reward: `[B]` float32.
        terminated: `[B]` bool; the episode ended by the environment's rules: nothing follows.
        truncated: `[B]` bool; the episode was cut, by a time limit for example: its value goes on. Never true where `terminated` is.
        final_obs: `[D, …]`, the last observations of the D episodes that ended in this step, in the order of their
            environments; None if none ended.
        info: extra arrays `[B]` that describe the step, for statistics only (Procgen: `level_seed`, `level_complete`).
    """

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: np.ndarray | None = None
    info: dict[str, np.ndarray] = field(default_factory=dict)


class VectorEnv(Protocol):
    """B environments that are stepped together.

    Attributes:
        name: the full id, for messages: `procgen:starpilot`.
        num_envs: B.
        observation_space: of one environment, with float32 in place of other floats. Observations are arrays in the shape and dtype
            that `phasicrl.spaces.ObservationLayout` stores them in.
        action_space: of one environment. `step` takes the flat actions that `phasicrl.spaces.ActionLayout` describes.
        mask_size: A, the width of action masks: the options of all discrete components; 0 if the environment has no masks.
        action_mask: `[B, A]` bool, true where an action is allowed in the observations that `reset` or `step` returned last, at least
            one for each discrete component; a new array each time; None without masks, and before the first reset.
        exact_state: whether and how `state_dict` restores the environments exactly: by a `snapshot`, by a `replay` of the
            episode, or not (`none`: a resumed run starts new episodes).
    """

    name: str
    num_envs: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_size: int
    action_mask: np.ndarray | None
    exact_state: ExactState

    def reset(self) -> np.ndarray:
        """Start every environment anew and return the first observations `[B, …]`."""
        ...

    def step(self, action: np.ndarray) -> TimeStep:
        """Step every environment with its action `[B]` (or `[B, K]`); ended episodes are followed by new ones at once."""
        ...

    def close(self) -> None:
        """Release processes and threads; calling it twice is harmless."""
        ...
