"""Environments with rsl_rl's interface: Isaac Lab, Genesis and others. Kind: effects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

from phasicrl.envs.checks import Invalid


class RslRlSimulator:
    """`Simulator` over a `VecEnv` of rsl_rl 5, which resets in its steps.

    Episodes that `extras["time_outs"]` names are truncated; without it, those that last
    `max_episode_length` steps, unless `cfg.is_finite_horizon` says that the limit is a termination.
    Final observations are lost, but for Isaac Lab's `extras["final_obs"]`, if
    `cfg.compute_final_obs`.
    """

    def __init__(self, envs: Any) -> None:
        self._envs, config = envs, getattr(envs, "cfg", None)
        self.has_final_obs = bool(getattr(config, "compute_final_obs", False))
        if hasattr(envs, "close"):
            self.close = envs.close
        self._is_finite = bool(getattr(config, "is_finite_horizon", False))
        self.num_envs, self.device = envs.num_envs, envs.device
        self.single_observation_space = Dict(
            [(name, unbounded(*obs.shape[1:])) for name, obs in self._observe().items()]
        )
        self.single_action_space = unbounded(envs.num_actions)
        self._lengths = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the current observations: a `VecEnv` has no seed, and has reset itself."""
        return self._observe(), {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every environment with its action `[B, K]`.

        Raises:
            Invalid: a time limit looks like a termination.
        """
        obs, reward, dones, extras = self._envs.step(action)
        done = dones.bool()
        self._lengths += 1
        time_outs = extras.get("time_outs")
        if self._is_finite:
            time_outs = torch.zeros_like(done)
        elif time_outs is None:
            if not (limit := getattr(self._envs, "max_episode_length", None)):
                text = "returned neither extras['time_outs'] nor has a max_episode_length"
                raise Invalid(f"{text}; expected one, to tell a time limit from a termination")
            time_outs = self._lengths >= limit
        truncated = done & time_outs.bool()
        self._lengths.masked_fill_(done, 0)
        return dict(obs.items()), reward, done & ~truncated, truncated, extras

    def _observe(self) -> dict[str, Tensor]:
        return dict(self._envs.get_observations().items())


def unbounded(*shape: int) -> Box:
    """Return the space of all float32 arrays of a shape."""
    return Box(-np.inf, np.inf, shape, np.float32)
