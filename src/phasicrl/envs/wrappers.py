"""Wrappers: some components of an observation alone, and masks of a user's own. Kind: effects.

Each is a `VectorEnv` around a `VectorEnv`, so that it is written once for all back ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from phasicrl.envs.protocol import EnvError, ExactState, TimeStep, VectorEnv
from phasicrl.masks import find_blocked
from phasicrl.spaces import choices

MaskFunction = Callable[[np.ndarray, "np.ndarray | None"], np.ndarray]
"""From stored observations `[B, …]` and the environments' masks `[B, A]` or None to masks."""


class _Wrapper:
    """What all wrappers leave to the environments inside."""

    action_mask: Tensor | None = None

    def __init__(self, envs: VectorEnv) -> None:
        self._envs = envs
        self.name, self.num_envs, self.device = envs.name, envs.num_envs, envs.device
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.mask_size = envs.mask_size
        self.exact_state: ExactState = envs.exact_state

    def state_dict(self) -> dict[str, Any] | None:
        """That of the environments inside."""
        return self._envs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Give the environments inside their state back."""
        return self._envs.load_state_dict(state)

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()


class PartialObservation(_Wrapper):
    """The environments with the named components of their observation vectors alone."""

    def __init__(self, envs: VectorEnv, components: tuple[int, ...]) -> None:
        """Show only `components`, in that order.

        Raises:
            ValueError: observations that are not vectors, or components that they do not have.
        """
        super().__init__(envs)
        space = envs.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(
                f"{envs.name}: env.observe picks components of vectors, "
                f"but observations are {space}; leave it off"
            )
        wrong = [c for c in components if not 0 <= c < space.shape[0]]
        if wrong or not components:
            raise ValueError(
                f"{envs.name}: env.observe is {components}; "
                f"components 0 … {space.shape[0] - 1} were expected, at least one"
            )
        self._components = torch.tensor(components, device=self.device)
        low, high = (bound[list(components)] for bound in (space.low, space.high))
        self.observation_space: gym.Space[Any] = gym.spaces.Box(low, high, dtype=space.dtype.type)

    def reset(self) -> Tensor:
        """Start every environment anew and return the first observations `[B, len(components)]`."""
        obs = self._envs.reset()
        self.action_mask = self._envs.action_mask
        return obs[:, self._components]

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Bring the environments to where others were."""
        obs = self._envs.load_state_dict(state)
        self.action_mask = self._envs.action_mask
        return obs[:, self._components]

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action."""
        step = self._envs.step(action)
        self.action_mask = self._envs.action_mask
        final_obs = None if step.final_obs is None else step.final_obs[:, self._components]
        return dataclasses.replace(step, obs=step.obs[:, self._components], final_obs=final_obs)


class HeuristicMask(_Wrapper):
    """Environments whose actions are masked by a heuristic at first.

    Rules of thumb about hopeless actions spare the policy the beginner's mistakes; later it must be
    free to break them.

    Attributes:
        env_steps: how many steps were taken, summed over the environments; set it to go on where an
            earlier run ended.
    """

    action_mask: Tensor | None = None

    def __init__(
        self, envs: VectorEnv, function: MaskFunction, *, num_steps: int, env_steps: int = 0
    ) -> None:
        """Mask the actions of `envs` by `function` for `num_steps` steps, summed over them.

        `function` is anded with the environments' own mask. Afterwards that alone counts, or
        everything is allowed.

        Raises:
            ValueError: the environments' actions have no discrete component.
        """
        super().__init__(envs)
        self._function, self.num_steps, self.env_steps = function, num_steps, env_steps
        self._widths = choices(envs.action_space)
        if not self._widths:
            raise ValueError(
                f"{envs.name}: actions of the kind {envs.action_space} have nothing to mask; "
                "accepted: those with discrete components"
            )
        self.mask_size = sum(self._widths)

    def reset(self) -> Tensor:
        """Start every environment anew and return the first observations `[B, …]`."""
        obs = self._envs.reset()
        self.action_mask = self._mask(obs)
        return obs

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Bring the environments to where others were; `env_steps` is the run's."""
        obs = self._envs.load_state_dict(state)
        self.action_mask = self._mask(obs)
        return obs

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`."""
        step = self._envs.step(action)
        self.env_steps += self.num_envs
        self.action_mask = self._mask(step.obs)
        return step

    def _mask(self, obs: Tensor) -> Tensor:
        """What is allowed in `obs`.

        Raises:
            ValueError: the function returned something else than a mask.
            EnvError: nothing is left in some component.
        """
        own = self._envs.action_mask
        if self.env_steps >= self.num_steps:
            shape = (self.num_envs, self.mask_size)
            return torch.ones(shape, dtype=torch.bool, device=self.device) if own is None else own
        mask = self._asked(obs.numpy(force=True), None if own is None else own.numpy(force=True))
        blocked = find_blocked(self._widths, mask)
        if blocked is not None:
            index, component = blocked
            raise EnvError(
                f"{self.name}: the heuristic mask leaves nothing "
                f"for environment {index} in component {component}, "
                f"at env_steps {self.env_steps}; "
                "allow at least one of the actions that its own mask allows"
            )
        return torch.from_numpy(mask).to(self.device)

    def _asked(self, obs: np.ndarray, own: np.ndarray | None) -> np.ndarray:
        """The function's mask and the environments' own; a user's function speaks NumPy."""
        mask: Any = self._function(obs, own)
        shape = (self.num_envs, self.mask_size)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != shape:
            given = f"a {type(mask).__name__}"
            if isinstance(mask, np.ndarray):
                given = f"{mask.dtype}, shape {mask.shape}"
            raise ValueError(
                f"{self.name}: the heuristic mask is {given}; "
                f"a NumPy array of bool, shape {shape}, was expected"
            )
        return mask.copy() if own is None else mask & own
