"""Gymnasium environments, in this process or in one process each. Kind: effects.

This file relies on these facts about Gymnasium 1.4.0 (tested in `tests/envs`):

- `AutoresetMode.SAME_STEP` (since 1.1) resets in the step that ends an episode. The final
  observation is in `info["final_obs"]`, an object array `[B]` with None where no episode ended.
- The `info` of a step that ended an episode is `info["final_info"]`, and that of the reset is
  `info`, so that a mask in `info` is for the returned observation.
- Arrays in `info` are stacked, `[B, …]`, in new memory; `info["_key"]` is true for environments
  that returned one; the others have zeros.
"""

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from phasicrl.config import EnvConfig
from phasicrl.envs.bridge import EnvSlice, NumpyStep, NumpyVectorEnv, ObsAndMask
from phasicrl.envs.checks import MASK, REMEDY, CheckedEnv, MakeEnv, convert_errors, inspect_env
from phasicrl.envs.options import convert_options
from phasicrl.envs.processes import ProcessLostError, ProcessVectorEnv
from phasicrl.envs.protocol import EnvError, RestoreMethod
from phasicrl.seeding import derive_seed


class GymnasiumEnv(NumpyVectorEnv):
    """Batch of Gymnasium environments of one kind.

    A `CheckedEnv` around each environment packs observations and unpacks actions, so that this
    class handles plain arrays for all spaces.
    """

    restore_method: RestoreMethod = "replay"
    remedy = REMEDY

    def __init__(self, make_env: MakeEnv, name: str, config: EnvConfig, local: EnvSlice) -> None:
        """Prepare environments, which are made at the first reset.

        Up to `env.max_restarts` failures truncate episodes: a failed environment is replaced, or
        all of them if a process died or hangs, or a reward or observation is not finite.

        Args:
            make_env: function that makes one environment; an extra one is made for its spaces.
            name: name of the environments, for messages.
            config: options of the environments; `num_envs` is not used.
            local: number and seeds of this rank's environments.

        Raises:
            ValueError: the spaces are not supported.
            ImportError: the environment needs a package that is missing.
            EnvError: the result is not a Gymnasium environment, or it cannot be made or reset.
        """
        properties = inspect_env(name, make_env, use_masks=config.action_masks)
        self._max_restarts, self._num_restarts = config.max_restarts, 0
        guard = functools.partial(CheckedEnv, make_env, name, self._max_restarts > 0, properties)
        makers: Any = [functools.partial(guard, index) for index in range(local.num_envs)]
        if config.vectorization == "async":  # the processes have separate deadlines
            self.timeout = math.inf
            self._make_vector: Callable[[], Any] = functools.partial(ProcessVectorEnv, makers, name)
        else:
            self._make_vector = functools.partial(SyncVectorEnv, makers, autoreset_mode="SameStep")
        self._vector: Any = self._make_vector()
        self._make_first = makers[0]
        self._local = local
        self._seeds: list[Any] | None = local.seeds()
        super().__init__(name, local.num_envs, properties)

    def state_dict(self) -> dict[str, Any] | None:
        """Add the seed from which the next restart of all environments follows."""
        state = super().state_dict()
        return state and state | {"base_seed": self._local.base_seed}

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Restore that seed as well."""
        base_seed = state.get("base_seed", self._local.base_seed)
        self._local = self._local._replace(base_seed=base_seed)
        return super().load_state_dict(state)

    def _reset(self) -> ObsAndMask:
        obs, info = self._vector.reset(seed=self._seeds)
        if self._seeds and isinstance(self._vector, ProcessVectorEnv):
            self._warn_if_unseeded(obs)
        self._seeds = None  # seeds are for the first reset only
        self._count_and_flag_failures(info)
        made = {id(guard.env.unwrapped) for guard in getattr(self._vector, "envs", ())}
        if 0 < len(made) < self.num_envs:
            given = f"{self.name}: make_env() returned the same environment twice"
            raise ValueError(f"{given}; expected a new one in each call")
        return self._check_obs_values(obs, "reset"), info.get(MASK)

    def _warn_if_unseeded(self, obs: np.ndarray) -> None:
        """Warn if environments have equal first observations, and episodes do not follow the seed.

        Processes have equal copies of a generator that is not the environment's own.
        """
        if len(np.unique(obs.reshape(self.num_envs, -1), axis=0)) == self.num_envs:
            return
        obs_pairs: list[Any] = []  # observations that are equal if they follow the seed
        with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
            # In a process, because an environment may end its own.
            probe = ProcessVectorEnv([self._make_first], self.name)
            stack.enter_context(contextlib.closing(probe))
            obs_pairs += [(probe.reset(seed=[0])[0], probe.reset(seed=[0])[0]) for _ in range(3)]
            space = self._vector.single_action_space
            action = np.zeros((1, *space.shape), space.dtype)
            steps = [(probe.reset(seed=[0]), probe.step(action)[:2])[1] for _ in range(2)]
            obs_pairs += zip(*steps, strict=True)
        if any(not np.array_equal(*pair) for pair in obs_pairs):
            text = f"{self.name}: environments in different processes start equally, and do not"
            text += " follow their seeds. Draw from self.np_random, which reset(seed) seeds"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _step(self, action: np.ndarray) -> NumpyStep:
        try:
            obs, reward, terminated, truncated, info = self._vector.step(action)
            reward = self._convert_reward(reward)
            done = terminated | truncated
            final_obs = None
            if done.any():
                # Gymnasium unwraps `[1]`.
                last = np.stack(info["final_obs"][done]).reshape(-1, *obs.shape[1:])
                final_obs = obs.copy()
                final_obs[done] = self._check_obs_values(last, "step", np.flatnonzero(done))
            self._check_obs_values(obs, "step")
        except EnvError as error:
            return self._restart_all(error)
        failures = self._count_and_flag_failures(info)
        return NumpyStep(obs, reward, terminated, truncated, final_obs, info.get(MASK), failures)

    def _get_replay_starts(self) -> list[Any]:
        with contextlib.suppress(ProcessLostError):  # the next step raises it again
            return list(self._vector.call("get_replay_start"))
        return [None] * self.num_envs

    def _replay(self, starts: list[Any], actions: list[np.ndarray]) -> ObsAndMask:
        self._seeds = None
        obs, infos = zip(*self._vector.call("restore", starts, actions), strict=True)
        return np.stack(obs), np.stack([info[MASK] for info in infos]) if self.mask_size else None

    def _close(self) -> None:
        self._vector.close()

    def _restart_all(self, error: EnvError) -> NumpyStep:
        """Replace all environments and truncate every episode."""
        cut, num_restarts = np.ones(self.num_envs, bool), 0
        while True:
            self._count_restart(error)
            num_restarts += 1
            base_seed = derive_seed(self._local.base_seed, "env")  # none of the environments' seeds
            self._local = self._local._replace(base_seed=base_seed)
            self._seeds = self._local.seeds()
            try:
                self._vector.close()
                self._vector = self._make_vector()
                obs, mask = self._reset()
                break
            except ProcessLostError as next_error:
                error = next_error
        info = {"restarts": np.full(self.num_envs, num_restarts), "cut": cut}
        return NumpyStep(obs, np.zeros(self.num_envs, np.float32), ~cut, cut, self._obs, mask, info)

    def _count_and_flag_failures(self, info: dict[str, Any]) -> dict[str, np.ndarray]:
        """Count the failures of each environment in a step, and flag those that cut its episode.

        Both are `[B]`; empty if `env.max_restarts` is 0.
        """
        if not self._max_restarts:
            return {}
        restarts, cut = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        step_info = info.get("final_info", {})
        for part in (step_info, info):  # of the step, and of the reset after it
            for index in np.flatnonzero(part.get("_restarted", ())):
                self._count_restart(EnvError(part["restarted"][index]))
                restarts[index] += 1
                cut[index] |= part is step_info
        return {"restarts": restarts, "cut": cut}

    def _count_restart(self, error: EnvError) -> None:
        """Count and warn of a restart; raise the error after `env.max_restarts`."""
        if self._num_restarts == self._max_restarts:
            raise error
        self._num_restarts += 1
        text = f"restart {self._num_restarts} of {self._max_restarts} (env.max_restarts): {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def convert_make_options(spec: EnvSpec, given: Mapping[str, Any], **drawing: Any) -> dict[str, Any]:
    """Convert the given options to arguments of `gym.make`.

    Options are `max_episode_steps` and the arguments of the environment's constructor. Those of
    `drawing` that the constructor does not have are left out.

    Raises:
        ValueError: an option does not exist, or its default has another type.
    """
    entry = spec.entry_point
    with convert_errors(f"gymnasium:{spec.id}: its import"):
        creator = entry if callable(entry) else load_env_creator(entry or "")
    parts = inspect.signature(creator).parameters.values()
    named = [part for part in parts if part.kind in (part.POSITIONAL_OR_KEYWORD, part.KEYWORD_ONLY)]
    known = {part.name: None if part.default is part.empty else part.default for part in named}
    accepts_any = any(part.kind is part.VAR_KEYWORD for part in parts)
    fixed = {key: value for key, value in drawing.items() if accepts_any or key in known}
    known.pop("render_mode", None)
    known |= spec.kwargs | {"max_episode_steps": spec.max_episode_steps or -1}
    return convert_options(f"gymnasium:{spec.id}", given, known, accepts_any=accepts_any) | fixed
