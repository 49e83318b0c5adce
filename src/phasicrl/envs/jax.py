"""Simulators that are pure functions of JAX. Kind: effects."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasicrl.envs.checks import MASK

jax: Any = importlib.import_module("jax")


def import_without_jax_preallocation(name: str) -> Any:
    """Import a package that uses JAX, after JAX was started without reserving a GPU's memory.

    Otherwise JAX takes three quarters of that memory, which the networks need. If JAX has started
    before, or XLA_PYTHON_CLIENT_PREALLOCATE is set, the user's choice stays.
    """
    variable = "XLA_PYTHON_CLIENT_PREALLOCATE"
    if variable not in os.environ:
        os.environ[variable] = "false"  # read once, when JAX looks for its devices
        jax.devices()
        del os.environ[variable]
    return importlib.import_module(name)


class JaxSimulator:
    """`Simulator` over pure functions of one environment.

    One function, compiled at the first step in 1 s (large games: 10 s), steps all environments and
    resets those that ended.

    Args:
        reset_one: function of a key that returns state, observation and action mask (None without).
        step_one: function of key, state and action that returns state, observation, action mask,
            reward, terminated and truncated, and never resets.
        spaces: observation and action space.
        num_envs: number of environments.
    """

    def __init__(
        self, reset_one: Callable[..., Any], step_one: Callable[..., Any], spaces: Any,
        num_envs: int,
    ) -> None:  # fmt: skip
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = spaces
        self._on_cpu = jax.default_backend() != "gpu" or not torch.cuda.is_available()
        index = 0 if self._on_cpu else torch.cuda.current_device()
        self.device = torch.device("cpu") if self._on_cpu else torch.device("cuda", index)
        self._jax_device = jax.devices("cpu" if self._on_cpu else "gpu")[index]

        def reset_all(key: Any) -> Any:
            key, reset_key = jax.random.split(key)
            rows = jax.vmap(reset_one)(jax.random.split(reset_key, num_envs))
            # Without the "weak" dtypes of Python's numbers, which a step does not return: else the
            # second step would be compiled again.
            state, obs, mask = jax.tree.map(lambda x: x.astype(x.dtype), rows)
            return (key, state), obs, mask

        def step_all(carry: Any, action: Any) -> Any:
            key, step_key, reset_key = jax.random.split(carry[0], 3)
            keys = jax.random.split(step_key, num_envs)
            *raw, reward, terminated, truncated = jax.vmap(step_one)(keys, carry[1], action)
            first = jax.vmap(reset_one)(jax.random.split(reset_key, num_envs))
            ended = terminated | truncated

            def select(new: Any, old: Any) -> Any:
                rows = ended.reshape(-1, *(1,) * (old.ndim - 1))
                return jax.numpy.where(rows, new, old).astype(old.dtype)

            state, obs, mask = jax.tree.map(select, first, tuple(raw))
            return (key, state), obs, mask, raw[1], reward, terminated, truncated

        self._jit_reset, self._jit_step = jax.jit(reset_all), jax.jit(step_all)
        self._carry: Any = None

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Reset every environment."""
        key = self._carry[0] if seed is None else jax.random.PRNGKey(seed)
        # "Committed" to its device, as the results of a step are: else it would be compiled again.
        self._carry, obs, mask = self._jit_reset(jax.device_put(key, self._jax_device))
        return self._to_torch(obs), self._make_mask_info(mask)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Step every environment with its action `[B]` or `[B, K]`, and reset ended ones."""
        # On a CPU, JAX reads the action's memory until the results are there, which are waited for.
        given = action.numpy() if self._on_cpu else jax.dlpack.from_dlpack(action)
        self._carry, obs, mask, *others = self._jit_step(self._carry, given)
        final_obs, reward, terminated, truncated = map(self._to_torch, others)
        info = {"final_obs": final_obs} | self._make_mask_info(mask)
        return self._to_torch(obs), reward, terminated, truncated, info

    def get_state(self) -> dict[str, Tensor]:
        """Return the states of all environments and the key of the random numbers."""
        return {str(i): self._to_torch(x) for i, x in enumerate(jax.tree.leaves(self._carry))}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `get_state`."""
        leaves = [jax.numpy.array(jax.dlpack.from_dlpack(leaf)) for leaf in state.values()]
        carry = jax.tree.unflatten(jax.tree.structure(self._carry), leaves)
        self._carry = jax.device_put(carry, self._jax_device)

    def _to_torch(self, array: Any) -> Tensor:
        # NumPy copies so little faster than DLPack shares it.
        if self._on_cpu and array.nbytes < 2**18:
            return torch.from_numpy(np.array(array))
        return torch.from_dlpack(array)

    def _make_mask_info(self, mask: Any) -> dict[str, Tensor]:
        return {} if mask is None else {MASK: self._to_torch(mask)}
