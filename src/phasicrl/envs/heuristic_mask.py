"""A mask of your own over the actions, to help the first part of training. Kind: state (counts steps around other environments)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from phasicrl.envs.protocol import EnvError, ExactState, TimeStep, VectorEnv
from phasicrl.masks import find_blocked
from phasicrl.spaces import choices

MaskFunction = Callable[[np.ndarray, "np.ndarray | None"], np.ndarray]
"""From stored observations `[B, …]` and the environments' own masks `[B, A]` (None without) to masks `[B, A]`, true where allowed."""


class HeuristicMask:
    """Environments whose actions are masked by a heuristic at first; a `VectorEnv` around a `VectorEnv`.

    Rules of thumb about hopeless actions spare the policy the beginner's mistakes; later it must be free to break them.

    Attributes:
        env_steps: how many steps were taken, summed over the environments; set it to go on where an earlier run ended.
    """

    def __init__(self, envs: VectorEnv, function: MaskFunction, *, num_steps: int, env_steps: int = 0) -> None:
        """Mask the actions of `envs` by `function` until `num_steps` steps were taken, summed over the environments.

        `function` is anded with the environments' own mask. Afterwards that alone counts, or everything is allowed.

        Raises:
            ValueError: the environments' actions have no discrete component.
        """
        self._envs, self._function, self.num_steps, self.env_steps = envs, function, num_steps, env_steps
        self._widths = choices(envs.action_space)
        if not self._widths:
            raise ValueError(
                f"{envs.name}: actions of the kind {envs.action_space} have nothing to mask; accepted: those with discrete components"
            )
        self.name, self.num_envs = envs.name, envs.num_envs
        self.exact_state: ExactState = envs.exact_state
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.mask_size = sum(self._widths)
        self.action_mask: np.ndarray | None = None

    def reset(self) -> np.ndarray:
        """Start every environment anew and return the first observations `[B, …]`."""
        obs = self._envs.reset()
        self.action_mask = self._mask(obs)
        return obs

    def step(self, action: np.ndarray) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`."""
        step = self._envs.step(action)
        self.env_steps += self.num_envs
        self.action_mask = self._mask(step.obs)
        return step

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    def _mask(self, obs: np.ndarray) -> np.ndarray:
        """What is allowed in `obs`.

        Raises:
            ValueError: the function returned something else than a mask.
            EnvError: nothing is left in some component.
        """
        own = self._envs.action_mask
        allowed = np.ones((self.num_envs, self.mask_size), dtype=bool) if own is None else own
        if self.env_steps >= self.num_steps:
            return allowed
        mask: Any = self._function(obs, own)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != allowed.shape:
            given = f"{mask.dtype}, shape {mask.shape}" if isinstance(mask, np.ndarray) else f"a {type(mask).__name__}"
            raise ValueError(f"{self.name}: the heuristic mask is {given}; a NumPy array of bool, shape {allowed.shape}, was expected")
        mask = mask & allowed
        blocked = find_blocked(self._widths, mask)
        if blocked is not None:
            index, component = blocked
            raise EnvError(
                f"{self.name}: the heuristic mask leaves nothing for environment {index} in component {component}, "
                f"at env_steps {self.env_steps}; allow at least one of the actions that its own mask allows"
            )
        return mask
