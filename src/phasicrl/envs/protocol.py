"""Contract of vector environments: results of a step, ends of episodes. Kind: data.

There are no autoreset modes: the next action is for `obs`, and the final observation of an ended
episode is in `final_obs`. All tensors are on the environments' device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import gymnasium as gym

# Worker processes import this file, and must not spend time and memory on torch.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

RestoreMethod = Literal["snapshot", "replay", "none"]


LIMIT_HINT = "for Gymnasium env.options max_episode_steps=N, in your own code TimeLimit"
"""Remedy for environments whose episodes do not end."""


class EnvError(RuntimeError):
    """Failure of an environment; the message names the environment, the call and a remedy.

    Attributes:
        steps_ago: number of steps since the one that failed.
    """

    exit_code, steps_ago = 4, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """Result of one step of B environments; later steps do not change its tensors.

    Attributes:
        obs: stored observations `[B, …]` (see `ObservationLayout`); the first of the next episode
            where one ended.
        reward: rewards `[B]` float32.
        terminated: whether the episode ended by the environment's rules, `[B]` bool.
        truncated: whether the episode was cut, for example by a time limit, so that returns are
            bootstrapped, `[B]` bool. False where `terminated` is true.
        final_obs: final observations `[B, …]`, valid in the rows of ended episodes. None if no
            episode ended, as far as that is known without waiting for the device.
        info: extra tensors `[B]` for statistics (Procgen: `level_seed`, `level_complete`).
    """

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor | None = None
    info: dict[str, Tensor] = field(default_factory=dict)


class VectorEnv(Protocol):
    """Batch of B environments that are stepped together.

    Attributes:
        name: full id, for messages, such as `procgen:starpilot`.
        num_envs: number of environments B.
        device: device of all tensors, including actions.
        observation_space: observation space of one environment, with float32 in place of other
            floats. Observations have the storage format of `phasicrl.spaces.ObservationLayout`.
        action_space: action space of one environment. Actions have the flat format of
            `phasicrl.spaces.ActionLayout`.
        mask_size: width A of action masks, the number of choices of all discrete components; 0
            without masks.
        action_mask: allowed actions `[B, A]` bool for the observations that `reset` or `step`
            returned last, at least one for each discrete component; a new tensor each time. None
            without masks, and before the first reset.
        restore_method: method by which `state_dict` restores the environments exactly: `snapshot`,
            `replay` of the episode, or `none`, with which a resumed run starts new episodes.
        has_final_obs: whether final observations of truncated episodes are known; else the last
            step of such an episode is not trained on.
    """

    name: str
    num_envs: int
    device: torch.device
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_size: int
    action_mask: Tensor | None
    restore_method: RestoreMethod
    has_final_obs: bool

    def reset(self) -> Tensor:
        """Reset every environment and return the first observations `[B, …]`."""
        ...

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`, and reset ended ones."""
        ...

    def check(self) -> None:
        """Check the steps that `step` has not checked, for example to not wait for a GPU.

        Raises:
            EnvError: one of them has a wrong number.
        """

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that restores the environments exactly.

        None if `restore_method` is `none`, and before the first reset.
        """

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Restore a state in place of the first reset, and return its observations `[B, …]`.

        Raises:
            EnvError: replayed episodes lead to other observations than those in the state.
        """
        ...

    def close(self) -> None:
        """Release processes and threads; further calls do nothing."""
