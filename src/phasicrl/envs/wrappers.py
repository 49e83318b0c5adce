"""Wrappers of vector environments: observed components, heuristic masks. Kind: effects."""

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from phasicrl.envs.protocol import EnvError, RestoreMethod, TimeStep, VectorEnv
from phasicrl.masks import find_first_blocked
from phasicrl.spaces import get_nvec

MaskFunction = Callable[[np.ndarray, "np.ndarray | None"], np.ndarray]
"""Function of stored observations `[B, …]` and the environments' masks `[B, A]` or None.

It returns masks `[B, A]`."""


class _VectorEnvWrapper:
    """Wrapper of a `VectorEnv`; subclasses change observations and masks in `_observe`."""

    def __init__(self, envs: VectorEnv) -> None:
        self._envs = envs
        self.name, self.num_envs, self.device = envs.name, envs.num_envs, envs.device
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.restore_method: RestoreMethod = envs.restore_method
        self.mask_size, self.has_final_obs = envs.mask_size, envs.has_final_obs
        self.action_mask: Tensor | None = None
        self.state_dict, self.check, self.close = envs.state_dict, envs.check, envs.close

    def reset(self) -> Tensor:
        """Reset every environment and return the first observations `[B, …]`."""
        return self._observe(self._envs.reset())

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`."""
        step = self._envs.step(action)
        return dataclasses.replace(step, obs=self._observe(step.obs))

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Restore the result of `state_dict`; return the current observations `[B, …]`."""
        return self._observe(self._envs.load_state_dict(state))

    _observe: Callable[[Tensor], Tensor]


class PartialObservation(_VectorEnvWrapper):
    """Wrapper that returns only some components of observation vectors."""

    def __init__(self, envs: VectorEnv, components: tuple[int, ...]) -> None:
        """Select components in the given order.

        Raises:
            ValueError: observations are not vectors, or do not have these components.
        """
        super().__init__(envs)
        space: Any = envs.observation_space
        size = space.shape[0] if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 else 0
        if not components or not set(components) <= set(range(size)):
            text = f"{envs.name}: env.observe is {components}, and observations are {space}"
            raise ValueError(f"{text}; expected components of a vector, counted from 0")
        self._components = torch.tensor(components, device=self.device)
        low, high = (bound[list(components)] for bound in (space.low, space.high))
        self.observation_space: gym.Space[Any] = gym.spaces.Box(low, high, dtype=space.dtype.type)

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`."""
        step = super().step(action)
        final_obs = None if step.final_obs is None else step.final_obs[:, self._components]
        return dataclasses.replace(step, final_obs=final_obs)

    def _observe(self, obs: Tensor) -> Tensor:
        self.action_mask = self._envs.action_mask
        return obs[:, self._components]


class HeuristicMask(_VectorEnvWrapper):
    """Wrapper that masks actions by a heuristic in the first steps only.

    A heuristic that excludes bad actions helps a policy at first; later the policy may do better
    without.

    Attributes:
        env_steps: number of steps so far, summed over the environments.
    """

    action_mask: Tensor | None

    def __init__(
        self, envs: VectorEnv, function: MaskFunction, *, mask_steps: int, steps_before: int = 0
    ) -> None:
        """Mask the actions of environments in their first steps.

        Args:
            envs: environments to wrap.
            function: heuristic; an action is allowed if the environment's mask allows it, too.
            mask_steps: number of steps with the heuristic, summed over the environments.
            steps_before: number of steps before, in a resumed run.

        Raises:
            ValueError: the action space has no discrete component.
        """
        super().__init__(envs)
        self._function, self.mask_steps, self.env_steps = function, mask_steps, steps_before
        self._widths = get_nvec(envs.action_space)
        if not self._widths:
            text = f"{envs.name}: mask_actions is given, and actions are {envs.action_space}"
            raise ValueError(f"{text}; expected a discrete component")
        self.mask_size = sum(self._widths)

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`."""
        self.env_steps += self.num_envs
        return super().step(action)

    def _observe(self, obs: Tensor) -> Tensor:
        """Compute the masks of observations, and return the observations.

        Raises:
            ValueError: the result of the heuristic is not a mask.
            EnvError: a mask allows nothing in a component.
        """
        given_mask, shape = self._envs.action_mask, (self.num_envs, self.mask_size)
        if self.env_steps >= self.mask_steps:
            allowed = torch.ones(shape, dtype=torch.bool, device=self.device)
            self.action_mask = allowed if given_mask is None else given_mask
            return obs
        # Copies, as the function may write into them.
        env_mask = None if given_mask is None else given_mask.numpy(force=True).copy()
        mask: Any = self._function(obs.numpy(force=True).copy(), env_mask)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != shape:
            given = getattr(mask, "dtype", type(mask).__name__), np.shape(mask)
            text = f"{self.name}: mask_actions returned {given[0]} of shape {given[1]}"
            raise ValueError(f"{text}; expected a NumPy array of bool of shape {shape}")
        mask = mask.copy() if given_mask is None else mask & given_mask.numpy(force=True)
        if blocked := find_first_blocked(self._widths, mask):
            location = f"environment {blocked[0]} in component {blocked[1]}"
            text = f"{self.name}: mask_actions allows nothing for {location}, step {self.env_steps}"
            raise EnvError(f"{text}; expected an action that the environment's mask allows")
        self.action_mask = torch.from_numpy(mask).to(self.device)
        return obs
