"""Environments with rsl_rl's interface: Isaac Lab, Genesis and others. Kind: effects."""

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Space
from torch import Tensor

from phasicrl.envs.checks import Invalid


class RslRlSimulator:
    """`Simulator` over a `VecEnv` of rsl_rl 5, whose steps also reset.

    With `cfg.is_finite_horizon`, no episode is truncated; else those in `extras["time_outs"]` are,
    or without it those of `max_episode_length` steps. Only Isaac Lab returns final observations, in
    `extras["final_obs"]`, if `cfg.compute_final_obs`.
    """

    def __init__(self, envs: Any, steps_before: int = 0) -> None:
        self._envs, config = envs, getattr(envs, "cfg", None)
        self.has_final_obs = bool(getattr(config, "compute_final_obs", False))
        self.close = getattr(envs, "close", lambda: None)
        self._is_finite = bool(getattr(config, "is_finite_horizon", False))
        self.num_envs, self.device = envs.num_envs, envs.device
        if hasattr(core := getattr(envs, "unwrapped", envs), "common_step_counter"):
            core.common_step_counter = steps_before  # which curricula read
        obs = envs.get_observations()
        if not hasattr(obs, "items"):
            raise Invalid("returned a VecEnv of rsl_rl 1 or 2; expected groups in a TensorDict")
        self.single_observation_space = infer_space(obs)
        self.single_action_space = make_unbounded(envs.num_actions)
        self._lengths = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the current observations: a `VecEnv` has no seed, and has reset itself."""
        return dict(self._envs.get_observations().items()), {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every environment with its action `[B, K]`.

        Raises:
            Invalid: nothing distinguishes time limits from terminations.
        """
        # A step may change the limits, of which there is one, or one for each environment.
        lasted = getattr(self._envs, "episode_length_buf", self._lengths) + 1
        limit = getattr(self._envs, "max_episode_length", None)
        at_limit = None if limit is None else lasted >= limit
        obs, reward, dones, extras = self._envs.step(action)
        done = dones.bool()
        time_outs = torch.zeros_like(done) if self._is_finite else extras.get("time_outs", at_limit)
        if time_outs is None:
            text = "returned neither extras['time_outs'] nor has a max_episode_length"
            raise Invalid(f"{text}; expected one, to tell a time limit from a termination")
        truncated = done & time_outs.bool()
        self._lengths = torch.where(done, 0, lasted)
        return dict(obs.items()), reward, done & ~truncated, truncated, extras


def infer_space(given: Any) -> Space[Any]:
    """Return one environment's space, from observations `[B, …]`, their space, or their groups."""
    groups = getattr(given, "spaces", given)
    if hasattr(groups, "items"):
        return Dict([(name, infer_space(part)) for name, part in groups.items()])
    is_image = given.dtype == torch.uint8 and len(given.shape) == 4
    return Box(0, 255, given.shape[1:], np.uint8) if is_image else make_unbounded(*given.shape[1:])


def make_unbounded(*shape: int) -> Box:
    """Return the space of all float32 arrays of a shape."""
    return Box(-np.inf, np.inf, shape, np.float32)
