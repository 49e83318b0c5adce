"""Custom vector environments with Gymnasium's `VectorEnv` interface. Kind: effects.

Their `metadata["autoreset_mode"]` is one of:

- `SAME_STEP`: an environment resets in the step that ends its episode; the final observation is in
  `info["final_obs"]`.
- `NEXT_STEP`: the next step ignores the action and returns the first observation. Such steps do not
  occur here, because ended environments are reset right away by
  `reset(options={"reset_mask": ended})`, which `SyncVectorEnv` and `AsyncVectorEnv` support.
- `DISABLED`: ended environments are reset by that call only.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate

from phasicrl.config import EnvConfig
from phasicrl.envs.bridge import EnvSlice, NumpyStep, NumpyVectorEnv, ObsAndMask
from phasicrl.envs.checks import (
    MASK,
    Invalid,
    check_tuple,
    close_env,
    convert_errors,
    has_mask,
    make_properties,
    refuse_late_mask,
    warn_of_extra_obs_keys,
)
from phasicrl.envs.rsl_rl import RslRlSimulator
from phasicrl.envs.tensor import TensorVectorEnv, use_torch_seed
from phasicrl.masks import find_first_blocked
from phasicrl.spaces import get_nvec, get_part, map_leaves, to_array

MakeVectorEnv = Callable[[int], Any]
"""Function that makes a vector environment of a number of environments.

Its result is Gymnasium's `VectorEnv`, of NumPy arrays or tensors, rsl_rl's `VecEnv`, or a
`Simulator`."""

_made: "WeakValueDictionary[int, CustomVectorEnv | TensorVectorEnv]" = WeakValueDictionary()
"""Environments by the id of what `make_vector_env` returned."""


def make_custom_envs(
    make_vector_env: MakeVectorEnv, config: EnvConfig, local: EnvSlice
) -> "CustomVectorEnv | TensorVectorEnv":
    """Make a custom vector environment, of tensors if it has a `device`, otherwise of arrays.

    Raises:
        ValueError: the spaces are not supported.
        EnvError: the result is not a vector environment of that size, or it cannot be made or
            reset.
    """
    with convert_errors(f"{config.id}: make_vector_env()"), use_torch_seed(local):
        given = vector = make_vector_env(local.num_envs)
        if getattr(_made.get(id(given)), "is_open", False):
            rule = "new ones in each call, as evaluations make their own"
            raise Invalid(f"returned the same environments twice; expected {rule}")
        if (size := getattr(vector, "num_envs", None)) != local.num_envs:
            text = f"returned a {type(vector).__name__} with num_envs {size}"
            raise Invalid(f"{text}; expected a VectorEnv of {local.num_envs} environments")
        if hasattr(vector, "get_observations"):
            vector = RslRlSimulator(vector, local.steps_before)
        has_device = getattr(vector, "device", None) is not None
        if not has_device and not hasattr(vector, "metadata"):
            rule = "a VectorEnv, or a simulator of tensors on its device"
            raise Invalid(f"returned a {type(vector).__name__} without a device; expected {rule}")
        mode = getattr(vector, "metadata", {}).get("autoreset_mode")
        is_late = getattr(mode, "value", mode) in ("NextStep", "Disabled")
        if has_device and is_late and not hasattr(vector, "reset_rows"):
            rule = "AutoresetMode.SAME_STEP, or a method reset_rows"
            raise Invalid(f"returned tensors with {mode}; expected {rule}")
    kind = TensorVectorEnv if has_device else CustomVectorEnv
    _made[id(given)] = envs = kind(vector, config, local)
    return envs


class CustomVectorEnv(NumpyVectorEnv):
    """Custom vector environment.

    It is reset at construction, to detect masks in `info`; the first `reset` returns that result.
    """

    remedy = "repair the vector environment"

    def __init__(self, vector: Any, config: EnvConfig, local: EnvSlice) -> None:
        """Reset the vector environment with the seed `seed + first_index`.

        Raises:
            ValueError: the spaces are not supported.
            EnvError: the autoreset mode is missing, or a reset fails.
        """
        name, self._vector, base = config.id, vector, getattr(vector, "unwrapped", vector)
        with convert_errors(f"{name}: metadata['autoreset_mode'] (AutoresetMode.SAME_STEP, …)"):
            self._mode = mode = AutoresetMode(self._vector.metadata.get("autoreset_mode"))
            if mode is AutoresetMode.NEXT_STEP and getattr(base, "shared_memory", True) is False:
                raise Invalid("is NextStep without shared_memory; expected it, or SameStep")
        properties = make_properties(name, vector, "single_")
        self._widths = get_nvec(properties.action_space) if config.action_masks else ()
        with convert_errors(f"{name}: reset()"):
            _, info = self._first_reset = self._reset_envs(seed=local.base_seed + local.first_index)
            parts = [x.unwrapped for x in base.envs] if isinstance(base, SyncVectorEnv) else [base]
            if self._widths and not properties.mask_source and has_mask(info, *parts):
                properties = replace(properties, mask_source="info")
        self._properties = replace(properties, use_masks=config.action_masks)
        super().__init__(name, local.num_envs, self._properties)

    def _reset(self) -> ObsAndMask:
        with convert_errors(f"{self.name}: reset()"):
            (obs, info), self._first_reset = self._first_reset or self._reset_envs(), None
            stored = self._pack_obs(obs, "reset").copy()
            self._has_extra = warn_of_extra_obs_keys(self.name, self._properties, obs)
            return stored, self._read_mask(obs, info, np.ones(self.num_envs, bool))

    def _step(self, action: np.ndarray) -> NumpyStep:
        describe = self._actions.describe_out_of_bounds
        with convert_errors(f"{self.name}: step()", lambda: describe(action)):
            obs, *rows, info = check_tuple(self._vector.step(self._actions.unflatten(action)), 5)
            stored = self._pack_obs(obs, "step").copy()
            if self._num_steps == 1 and not self._has_extra:
                warn_of_extra_obs_keys(self.name, self._properties, obs)
            rows, shape = [to_array(row) for row in rows], (self.num_envs,)
            is_wrong = any(x.shape != shape or x.dtype.kind not in "biuf" for x in rows)
            if is_wrong or any(not np.isin(x, (0, 1)).all() for x in rows[1:] if x.dtype != "bool"):
                given = ", ".join(f"{row.dtype} {row.shape}" for row in rows)
                wanted = f"numbers {shape}, and 0 or 1 as a flag"
                raise Invalid(f"returned {given} as reward and flags; expected {wanted}")
            rows[0] = self._convert_reward(rows[0])
            reward, terminated, truncated = map(np.array, rows, (np.float32, bool, bool))
            ended, has_reset = terminated | truncated, self._mode is AutoresetMode.SAME_STEP
            mask = self._read_mask(obs, info, ~ended | has_reset)
            if not ended.any():
                return NumpyStep(stored, reward, terminated, truncated, None, mask)
            final_obs = stored.copy()
            if has_reset:
                final_obs[ended] = self._read_final_obs(info, ended, obs)
            else:
                obs, info = self._reset_envs(options={"reset_mask": ended.copy()})
                first = self._pack_obs(obs, "reset")
                if not np.array_equal(first[~ended], stored[~ended]):
                    text = "changes others in reset(options={'reset_mask': …}); expected ended ones"
                    raise Invalid(f"{text}. Use SyncVectorEnv(…, autoreset_mode=SAME_STEP)")
                stored[ended] = first[ended]
                first_mask = self._read_mask(obs, info, ended)
                mask = None if mask is None else mask | first_mask
            return NumpyStep(stored, reward, terminated, truncated, final_obs, mask)

    def _close(self) -> None:
        if not getattr(self._vector, "closed", False):
            close_env(self.name, self._vector)

    def _reset_envs(self, **options: Any) -> tuple[Any, ...]:
        return check_tuple(self._vector.reset(**options), 2)

    def _read_final_obs(self, info: Any, ended: np.ndarray, obs: Any) -> np.ndarray:
        """Return the stored final observations of the ended episodes."""
        finals, space = info.get("final_obs"), self._vector.single_observation_space
        rows, envs, stored_space = finals, np.flatnonzero(ended), self.observation_space
        is_array = isinstance(finals, np.ndarray) and finals.dtype != object
        try:
            if is_array or type(finals) not in (list, np.ndarray):
                rows = iterate(batch_space(space, self.num_envs), finals)
            rows = [row for row, end in zip(rows, ended, strict=True) if end]
            parts = [map_leaves(stored_space, lambda x: np.asarray(x)[None], row) for row in rows]
            stored = np.concatenate([self._layout.pack(part, 1) for part in parts])
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            given = f"of shape {finals.shape}" if is_array else " ".join(repr(finals).split())[:80]
            if "final_observation" in info:
                given += " (and 'final_observation', its name in older versions of Gymnasium)"
            text = f"ended the episode of environment {envs[0]} with info['final_obs'] {given}"
            wanted = f"{self.num_envs} observations of {space}, or None where no episode ended"
            why = f" ({error})" if str(error).startswith("an observation") else ""  # of `pack`
            raise Invalid(f"{text}; expected with SAME_STEP {wanted}{why}") from None
        paths = [leaf.path for leaf in self._layout.leaves]
        pairs = [(get_part(parts[0], path), to_array(get_part(obs, path))) for path in paths]
        if all(np.shares_memory(*pair) for pair in pairs):
            raise Invalid("returned info['final_obs'] in the memory of obs; expected a copy")
        return self._check_obs_values(stored, "step", envs)

    def _read_mask(self, obs: Any, info: Mapping[str, Any], rows: np.ndarray) -> Any:
        """Return masks `[B, mask_size]`, false outside of `rows` `[B]`; None without masks."""
        shape = (self.num_envs, self.mask_size)
        if not self.mask_size:
            return refuse_late_mask(info) if self._widths else None
        if not rows.any():
            return np.zeros(shape, dtype=bool)
        mask = (obs if self._properties.mask_source == "observation" else info).get(MASK)
        if mask is None or np.shape(mask) != shape or not np.isin(mask, (0, 1)).all():
            given = "none" if mask is None else f"shape {np.shape(mask)}, {np.asarray(mask).dtype}"
            raise Invalid(f"returned action masks of {given}; expected {shape} of True and False")
        mask = np.array(mask, dtype=bool) & rows[:, None]
        if blocked := find_first_blocked(self._widths, mask[rows]):
            raise Invalid(f"returned a mask that allows nothing in component {blocked[1]}")
        return mask
