"""Environments of which only some numbers are seen: tasks for a memory. Kind: effects (steps other environments)."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.envs.protocol import ExactState, TimeStep, VectorEnv


class PartialObservation:
    """The environments with the named components of their observation vectors alone; a `VectorEnv` around a `VectorEnv`."""

    def __init__(self, envs: VectorEnv, components: tuple[int, ...]) -> None:
        """Show only `components`, in that order.

        Raises:
            ValueError: observations that are not vectors, or components that they do not have.
        """
        space = envs.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"{envs.name}: env.observe picks components of vectors, but observations are {space}; leave it off")
        wrong = [c for c in components if not 0 <= c < space.shape[0]]
        if wrong or not components:
            raise ValueError(f"{envs.name}: env.observe is {components}; components 0 … {space.shape[0] - 1} were expected, at least one")
        self._envs, self._components = envs, list(components)
        self.name, self.num_envs = envs.name, envs.num_envs
        self.exact_state: ExactState = envs.exact_state
        low, high = (bound[self._components] for bound in (space.low, space.high))
        self.observation_space: gym.Space[Any] = gym.spaces.Box(low, high, dtype=space.dtype.type)
        self.action_space, self.mask_size = envs.action_space, envs.mask_size
        self.action_mask: np.ndarray | None = None

    def reset(self) -> np.ndarray:
        """Start every environment anew and return the first observations `[B, len(components)]`."""
        obs = self._envs.reset()[:, self._components]
        self.action_mask = self._envs.action_mask
        return obs

    def step(self, action: np.ndarray) -> TimeStep:
        """Step every environment with its action."""
        step = self._envs.step(action)
        self.action_mask = self._envs.action_mask
        final_obs = None if step.final_obs is None else step.final_obs[:, self._components]
        return dataclasses.replace(step, obs=step.obs[:, self._components], final_obs=final_obs)

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()
