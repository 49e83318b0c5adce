"""The contract of environments: what a step returns, and how episodes end. Kind: data.

Each back end implements it once. Inside the trainer there are no reset rows and no autoreset modes:
the next action is for `obs`, and the last observation of an ended episode is `final_obs`. All
tensors are on the environments' device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import gymnasium as gym

# Worker processes import this file; importing torch would cost each of them time and memory.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

ExactState = Literal["snapshot", "replay", "none"]


class EnvError(RuntimeError):
    """Failure of an environment; the message names the environment, the call and the remedy."""

    exit_code = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """Result of one step of B environments; later steps do not write into its tensors.

    Attributes:
        obs: `[B, …]` as `ObservationLayout` stores it; already the first of the next episode where
            one ended.
        reward: `[B]` float32.
        terminated: `[B]` bool; the episode ended by the environment's rules.
        truncated: `[B]` bool; the episode was cut, by a time limit for example, and returns are
            bootstrapped. Never true where `terminated` is.
        final_obs: `[B, …]` last observations, valid in the rows of ended episodes. None if no
            episode ended and that is known without waiting for the device.
        info: extra tensors `[B]` that describe the step, for statistics only (Procgen:
            `level_seed`, `level_complete`).
    """

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor | None = None
    info: dict[str, Tensor] = field(default_factory=dict)


class VectorEnv(Protocol):
    """B environments that are stepped together.

    Attributes:
        name: the full id, for messages: `procgen:starpilot`.
        num_envs: B.
        device: where all tensors are, actions included.
        observation_space: of one environment, with float32 in place of other floats. Observations
            are tensors in the shape and dtype that `phasicrl.spaces.ObservationLayout` stores them
            in.
        action_space: of one environment. `step` takes the flat actions that
            `phasicrl.spaces.ActionLayout` describes.
        mask_size: A, the width of action masks: the options of all discrete components; 0 without
            masks.
        action_mask: `[B, A]` bool, true where an action is allowed in the observations that `reset`
            or `step` returned last, at least one for each discrete component; a new tensor each
            time; None without masks, and before the first reset.
        exact_state: whether and how `state_dict` restores the environments exactly: by a
            `snapshot`, by a `replay` of the episode, or not (`none`: a resumed run starts new
            episodes).
    """

    name: str
    num_envs: int
    device: torch.device
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_size: int
    action_mask: Tensor | None
    exact_state: ExactState

    def reset(self) -> Tensor:
        """Reset every environment and return the first observations `[B, …]`."""
        ...

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]` and reset the ended ones."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that restores the environments exactly.

        None where `exact_state` is `none`, and before the first reset.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Restore a state in place of the first reset, and return its observations `[B, …]`.

        Raises:
            EnvError: the restored environments differ from those that were saved.
        """
        ...

    def close(self) -> None:
        """Release processes and threads; calling it twice is harmless."""
        ...
