"""Gymnasium: any Python environment, stepped in this process or in one process each. Kind: effects.

Facts about Gymnasium 1.4.0 that this file rests on (held by tests in `tests/envs`):

- `AutoresetMode.SAME_STEP` (since 1.1) resets in the step of the end, and hands the true last
  observation over in `info["final_obs"]`, an object array `[B]` with None where no episode ended.
- What `info` says of a step that ended an episode goes to `info["final_info"]`; beside it stands
  what the reset said. So a mask that is handed over in `info` is that of the first observation of
  the next episode, which is the one that is returned.
- An array in `info` arrives stacked, `[B, …]`, in new memory, with `info["_key"]` saying which
  environments gave one; where one did not there are zeros.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import SyncVectorEnv

from phasicrl.config import OptionValue
from phasicrl.envs.bridge import BatchReader, NumpyStep
from phasicrl.envs.guard import GuardedEnv
from phasicrl.envs.interface import MASK, REMEDY, MakeEnv, probe
from phasicrl.envs.options import checked_options
from phasicrl.envs.processes import ProcessLostError, ProcessVectorEnv, check_sendable
from phasicrl.envs.protocol import EnvError, ExactState
from phasicrl.seeding import env_seeds
from phasicrl.spaces import choices


class GymnasiumEnv:
    """B Gymnasium environments of one kind; a `NumpyEnv`.

    Observations are packed and actions unpacked beside each environment, by `GuardedEnv`: between
    them and the trainer there are plain arrays only, whatever the spaces are.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        *,
        num_envs: int,
        seed: int,
        first_env: int = 0,
        name: str,
        parallel: Literal["sync", "processes"] = "sync",
        action_masks: bool = True,
        max_restarts: int = 0,
    ) -> None:
        """Prepare `num_envs` environments, from the `first_env`-th of all ranks on (seeds differ).

        `make_env` makes each at the first reset. One more is made at once, to learn the spaces, and
        reset once to see whether there is an action mask in `info`. Without `action_masks` masks
        are left unread: every action is tried. Up to `max_restarts` faults are answered by making
        what failed anew: the environment, or where a process died or hangs, all of them. The
        episodes are cut there, as truncated.

        Raises:
            ValueError: spaces that are not supported, or `make_env` does not make a Gymnasium
                environment.
            EnvError: the environment cannot be made or reset.
            ImportError: it needs a package that is missing.
        """
        self.name, self.num_envs = name, num_envs
        self.exact_state: ExactState = "replay"
        interface = replace(probe(name, make_env), reads_masks=action_masks)
        self.observation_space = interface.observation_space
        self.action_space = interface.action_space
        self.has_masks = interface.mask_source is not None
        self.mask_size = sum(choices(self.action_space)) if self.has_masks and action_masks else 0
        if parallel == "processes":
            check_sendable(name, make_env)
        guard = functools.partial(GuardedEnv, make_env, name, max_restarts > 0)
        makers: Any = [functools.partial(guard, index, interface) for index in range(num_envs)]
        self._make_vector: Callable[[], SyncVectorEnv | ProcessVectorEnv] = (
            functools.partial(ProcessVectorEnv, makers, name)
            if parallel == "processes"
            else functools.partial(SyncVectorEnv, makers, autoreset_mode="SameStep")
        )
        self._vector = self._make_vector()
        self._seed, self._first_env = seed, first_env
        self._max_restarts, self._num_restarts = max_restarts, 0
        # None once they were given.
        self._seeds: list[int | None] | None = list(env_seeds(seed, num_envs, first=first_env))
        self._obs = np.empty(0)
        self._reader = BatchReader(name, self.observation_space, num_envs, remedy=REMEDY)
        self._lost: EnvError | None = None

    def reset(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Start every environment anew; seeds are given the first time only."""
        obs, info = self._vector.reset(seed=self._seeds)
        self._seeds = None
        _raise_fault(info)
        self._restarts_in(info)
        made = self._vector.envs if isinstance(self._vector, SyncVectorEnv) else []
        if made and len({id(guard.unwrapped) for guard in made}) < self.num_envs:
            what = f"{self.name}: make_env returned the same environment twice"
            raise ValueError(f"{what}; make a new one in it at each call")
        self._obs = self._reader.check(obs, "reset")
        return obs, self._mask(info)

    def step(self, action: np.ndarray) -> NumpyStep:
        """Step every environment with its action `[B]` or `[B, K]`; ended ones begin anew."""
        self._reader.num_steps += 1
        try:
            if self._lost is not None:
                raise self._lost
            obs, reward, terminated, truncated, info = self._vector.step(action)
            _raise_fault(info)
            reward = self._reader.reward(reward)
            done, final_obs = terminated | truncated, None
            if done.any():
                final_obs = obs.copy()
                last = np.stack(info["final_obs"][done])
                final_obs[done] = last.reshape(-1, *obs.shape[1:])  # Gymnasium unwraps `[1]`
                self._reader.check(final_obs[done], "step", np.flatnonzero(done))
            self._obs = self._reader.check(obs, "step")
        except EnvError as error:
            return self._begin_anew(error)
        told = self._restarts_in(info)
        return NumpyStep(obs, reward, terminated, truncated, final_obs, self._mask(info), told)

    def starts(self) -> list[str | None]:
        """The seed, or the generator's state, with which each environment began its episode.

        None where that is not known, such as after the death of a process, of which the next step
        tells.
        """
        try:
            return list(self._vector.call("replay_path"))
        except ProcessLostError as error:
            self._lost = error
            return [None] * self.num_envs

    def replay(
        self, starts: list[Any], actions: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Begin these episodes, and take the actions."""
        self._seeds = None
        obs, infos = zip(*self._vector.call("restore", starts, actions), strict=True)
        for info in infos:
            if "fault" in info:
                raise EnvError(info["fault"])
        return np.stack(obs), np.stack([info[MASK] for info in infos]) if self.mask_size else None

    def close(self) -> None:
        """End the environments and their processes; calling it twice is harmless."""
        self._vector.close()

    def _begin_anew(self, error: EnvError) -> NumpyStep:
        """In place of a step, make all environments anew, and cut every episode."""
        last_obs, yes = self._obs, np.ones(self.num_envs, bool)
        restarts, lost = np.zeros(self.num_envs, np.int64), error
        while lost is not None:
            self._count_restart(lost)
            restarts += 1
            (self._seed,) = env_seeds(self._seed, 1)
            self._seeds = list(env_seeds(self._seed, self.num_envs, first=self._first_env))
            try:
                self._vector.close()
                self._vector = self._make_vector()
                obs, mask = self.reset()
                self._lost = lost = None
            except ProcessLostError as again:
                lost = again
        told = {"restarts": restarts, "cut": yes}
        return NumpyStep(obs, np.zeros(self.num_envs), ~yes, yes, last_obs, mask, told)

    def _restarts_in(self, info: dict[str, Any]) -> dict[str, np.ndarray]:
        """How often each environment was made anew in a step, and whose episode that cut, `[B]`.

        Nothing where none may be made anew.
        """
        if not self._max_restarts:
            return {}
        restarts, cut = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        of_step = info.get("final_info", {})
        for where in (of_step, info):  # what the reset after it says stands beside it
            for index in np.flatnonzero(where.get("_restarted", ())):
                self._count_restart(EnvError(where["restarted"][index]))
                restarts[index] += 1
                cut[index] |= where is of_step
        return {"restarts": restarts, "cut": cut}

    def _count_restart(self, error: EnvError) -> None:
        """Say that something is made anew; refuse it if that was done too often."""
        if self._num_restarts == self._max_restarts:
            if self._max_restarts:
                error.add_note(f"Before, {self._max_restarts} were made anew (env.max_restarts).")
            raise error
        self._num_restarts += 1
        number = f"restart {self._num_restarts} of {self._max_restarts}"
        warnings.warn(f"{error}; it is made anew, {number}", RuntimeWarning, stacklevel=2)

    def _mask(self, info: dict[str, Any]) -> np.ndarray | None:
        """The masks `[B, mask_size]` of the observations that are returned."""
        if not self.mask_size:
            return None
        return info[MASK]


def _raise_fault(info: dict[str, Any]) -> None:
    """Turn what a guard reported into an error."""
    if "fault" not in info:
        return
    index = int(np.argmax(info["_fault"]))
    error = EnvError(info["fault"][index])
    if info["traceback"][index]:
        error.add_note(f"The environment's own traceback:\n{info['traceback'][index]}")
    raise error


def made_by_id(name: str, options: Mapping[str, OptionValue] | None = None) -> MakeEnv:
    """A function that makes Gymnasium's environment `name` (also `module:Id`) with options.

    It still works in another process.

    Raises:
        ValueError: Gymnasium does not know it, or it does not have such options.
    """
    env_id = name.rpartition(":")[2]
    try:
        import_module_of(name)
        spec = gym.spec(env_id)
    except (gym.error.Error, ImportError) as error:
        raise ValueError(f"Gymnasium does not find {name!r}: {error}") from error
    # By its spec, since a process of its own does not know what was registered here. Our guard
    # checks more than Gymnasium's checker.
    return functools.partial(
        gym.make, spec, disable_env_checker=True, **options_for(spec, options or {})
    )


def import_module_of(name: str) -> None:
    """Import the module of Gymnasium's `module:Id`, which registers it; a plain id has none.

    Raises:
        ImportError: it cannot be imported.
    """
    module = name.rpartition(":")[0]
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            what = f"the module {module!r} cannot be imported ({error})"
            raise ImportError(f"{what}; install it, or put its folder into PYTHONPATH") from error


def options_for(spec: EnvSpec, given: Mapping[str, OptionValue]) -> dict[str, Any]:
    """The given options as `gym.make` takes them: `max_episode_steps`, and the constructor's.

    Raises:
        ValueError: the constructor does not have such an argument, or its default is of another
            type.
    """
    if not given:
        return {}
    name = f"gymnasium:{spec.id}"
    try:
        entry = spec.entry_point
        creator = entry if callable(entry) else load_env_creator(entry or "")
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ImportError(f"{name} needs a package that is not installed: {error}") from error
    parameters = inspect.signature(creator).parameters.values()
    takes = {
        part.name: None if part.default is part.empty else part.default
        for part in parameters
        if part.kind in (part.POSITIONAL_OR_KEYWORD, part.KEYWORD_ONLY)
        and part.name != "render_mode"
    }
    takes |= spec.kwargs | {"max_episode_steps": spec.max_episode_steps or -1}
    takes_more = any(part.kind is part.VAR_KEYWORD for part in parameters)
    return checked_options(name, given, takes, takes_more=takes_more)
