"""The one contract for environments: what a step returns, and how episodes end. Kind: data.

Every back end is translated to this once. Inside the trainer there are no reset rows and no
autoreset modes: `obs` is always what the next action answers to, and the observation in which an
ended episode stopped is `final_obs`. All tensors lie on the environments' own device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import gymnasium as gym

# The processes of environments import this file, and would each wait for torch and hold it.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

ExactState = Literal["snapshot", "replay", "none"]


class EnvError(RuntimeError):
    """An environment failed; the message names the environment, the call and the remedy."""

    exit_code = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """What B environments answer to B actions.

    The tensors are the caller's: no later call writes into them.

    Attributes:
        obs: `[B, …]` as `ObservationLayout` stores it; already the first of the next episode where
            one ended.
        reward: `[B]` float32.
        terminated: `[B]` bool; the episode ended by the environment's rules: nothing follows.
        truncated: `[B]` bool; the episode was cut, by a time limit for example: its value goes on.
            Never true where `terminated` is.
        final_obs: `[B, …]`; the rows of the episodes that ended are their last observations, the
            others say nothing. None where it is known, without asking a device, that no episode
            ended.
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
        """Start every environment anew and return the first observations `[B, …]`."""
        ...

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`; ended ones begin anew."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """What restores the environments exactly.

        None where `exact_state` is `none`, and before the first reset.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """In place of the first reset, bring environments to where others were.

        They were just made, with the same seed.

        Returns:
            The observations `[B, …]` that the next actions answer to.

        Raises:
            EnvError: they do not come to where those were.
        """
        ...

    def close(self) -> None:
        """Release processes and threads; calling it twice is harmless."""
        ...
