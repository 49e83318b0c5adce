"""EnvPool: environments in C++ that are stepped by a pool of threads. Kind: effects.

Facts about EnvPool 1.2.5 and 1.2.7 that this file rests on (those that results depend on are held
by tests in `tests/envs`):

- It resets in the step *after* an end: that step ignores its action and returns a first observation
  with reward zero. Resetting just the finished environments right after the step, with
  `reset_mask`, leaves no such row, and what the step returned is the true last observation. In sync
  mode results come in the order of the requested environments.
- Every call returns new arrays, so they may be kept and written to.
- `truncated` is "done at the step limit". In most families `terminated` is "done and not
  truncated", so that an episode that ends by its rules in exactly the last step counts as
  truncated. From 1.2.7 on Highway, dm_control's locomotion and MJLab also return `terminated`; both
  are then true in such a step, which counts as terminated here. (`info:terminated` of Atari is
  something else: the end of the game, not of the life.)
- A batch of actions that is too short aborts the process. Action 99, floats, longer batches and a
  step after `close` are accepted silently; action -1 of Procgen forces a reset.
- Observations of several parts are dictionaries, nested like the space, mostly of float64; a
  `Discrete` part is int32 `[B]`, a `MultiBinary` one is bool. dm_control's observations exceed the
  bounds of their spaces.
- Actions of several integers (Jumanji) have a `Box` of integers as their space, with both bounds
  included; there is no `MultiDiscrete`. Any array of the right shape is taken, in whatever dtype,
  and cast. No family has a structured action.
- Tasks of several players return one observation and reward for each player, and not one for each
  environment.
- Its Python layer rebuilds a dictionary of all options and a tree of all arrays in every call of
  `_send` and `_recv`. These are called directly where an observation is one array and `_to`, which
  makes a result of the arrays, is the common one. MJLab and locomotion have their own, which cuts
  one array into the parts of an observation.
- Seeds are fixed when the pool is made. An environment's default seed is `seed + index`, so that
  pools with neighboring seeds share environments; here each environment gets a derived seed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, cast, get_args

import gymnasium as gym
import numpy as np

from phasicrl.config import EnvConfig, OptionValue, ProcgenDistribution
from phasicrl.envs.bridge import EnvShare, NumpyStep, NumpyVectorEnv
from phasicrl.envs.checks import Interface
from phasicrl.envs.native import ensure_graphics, ensure_qt
from phasicrl.envs.options import read_options
from phasicrl.envs.protocol import ExactState
from phasicrl.spaces import as_float32, check_spaces
from phasicrl.system.machine import num_cores

PROCGEN = "envpool.procgen"
"""EnvPool's name of the Procgen family."""

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
"""Games of Procgen."""

NOT_OPTIONS = {
    "num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset",
    "base_path", "seed", "env_seed", "gym_reset_return_info", "reward_threshold", "task",
    "env_name", "num_levels", "channel_first", "distribution_mode", "use_sequential_levels",
}  # fmt: skip
"""Fields of a task's configuration in EnvPool that other options set, or that have no effect."""

TRAINING_OPTIONS = ("episodic_life", "reward_clip")
"""Options that change episodes or rewards for learning; evaluations leave them out."""

_THREADS = "/proc/self/task"
_COMMON_READER = "envpool.python.gymnasium_envpool"
"""Module of `_to` in the families whose results are the arrays of `_recv` as they are."""


class EnvPoolEnv(NumpyVectorEnv):
    """A pool of environments of one EnvPool task, in sync mode."""

    remedy = "the simulation broke down: bound the actions, or report it to EnvPool with the seed"

    def __init__(
        self, task_id: str, name: str, options: dict[str, Any], threads: int | None, share: EnvShare
    ) -> None:
        """Make a pool of a task with EnvPool's options; `name` is for messages.

        Without a number of `threads` there is one thread per core, or one alone for quick tasks.
        """
        family, num_envs = task_families()[task_id], share.num_envs
        self._is_procgen = family == PROCGEN
        self.exact_state: ExactState = "replay" if _is_replayable(family, options) else "none"
        self._num_resets = np.zeros(num_envs, np.int64)
        spaces = task_spaces(task_id, options)
        check_spaces(name, *spaces)
        # A second thread costs more than a step of these.
        is_quick = family in ("envpool.classic_control", "envpool.toy_text")
        num_threads = min(threads or (1 if is_quick else num_cores()), num_envs)
        sizes: dict[str, Any] = {"num_envs": num_envs, "num_threads": num_threads}
        envpool, before = import_envpool(procgen=self._is_procgen), os.listdir(_THREADS)
        self._pool: Any = envpool.make_gymnasium(task_id, seed=share.seeds(), **sizes, **options)
        # A single thread computes only while this one waits. On the same core it starts at once; a
        # core that sleeps takes longer to wake than a quick step (docs/performance.md).
        new = {*os.listdir(_THREADS)} - {*before} if num_threads == 1 else ()
        self._followers, self._core = [int(thread) for thread in new], -1
        self._current_core = ctypes.CDLL(None).sched_getcpu
        infos = ("level_seed", "prev_level_complete") if self._is_procgen else ()
        self._step_pool, self._reset_pool = make_calls(self._pool, infos)
        # EnvPool caches the space, so that its first reset does not warn.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            _ = self._pool.observation_space
        super().__init__(name, num_envs, Interface(*spaces, None))

    def _reset(self) -> tuple[np.ndarray, None]:
        obs, _ = self._pool.reset()
        self._num_resets += 1
        return self._store(obs, "reset"), None

    def _step(self, action: np.ndarray) -> NumpyStep:
        if self._followers and (core := self._current_core()) != self._core:
            self._core = core
            for thread in self._followers:
                with suppress(OSError):  # a thread that only started the pool has ended
                    os.sched_setaffinity(thread, {core})
        obs, reward, terminated, truncated, info = self._step_pool(self._actions.unflatten(action))
        obs, reward = self._store(obs, "step"), self._check_reward(reward)
        done = terminated | truncated
        extras, final_obs = {}, None
        if self._is_procgen:
            # Since the pool's games do not reset themselves, `level_seed` is still that of the
            # current level, and `prev_level_complete` is about it, in the step that ends it only.
            complete = (info["prev_level_complete"] != 0) & done
            extras = {"level_seed": info["level_seed"], "level_complete": complete}
        if done.any():
            final_obs, obs = obs, obs.copy()
            self._reset_some(obs, done)
        return NumpyStep(obs, reward, terminated, truncated, final_obs, info=extras)

    def _reset_some(self, obs: np.ndarray, mask: np.ndarray) -> None:
        """Reset the environments in `mask` `[B]` and write their first observations into `obs`."""
        obs[mask] = self._store(self._reset_pool(mask), "reset", np.flatnonzero(mask))
        self._num_resets[mask] += 1

    def _starts(self) -> list[int]:
        # In the families that are replayed, only resets advance the random generator.
        return self._num_resets.tolist()

    def _replay(self, starts: list[Any], actions: list[np.ndarray]) -> tuple[np.ndarray, None]:
        obs, _ = self._reset()
        while (behind := self._num_resets < np.array(starts)).any():
            self._reset_some(obs, behind)
        dtype = self._pool.spec._action_spec[-1][0]
        lengths = np.array([len(taken) for taken in actions])
        for t in range(lengths.max()):
            env_ids = np.flatnonzero(lengths > t).astype(np.int32)
            action = self._actions.unflatten(np.stack([actions[env][t] for env in env_ids]))
            stepped, *_ = self._pool.step(np.asarray(action).astype(dtype, copy=False), env_ids)
            obs[env_ids] = self._store(stepped, "step", env_ids)
        return obs, None

    def _close(self) -> None:
        # EnvPool's own close() leaves the threads running; they end with the pool.
        self._pool = self._step_pool = self._reset_pool = cast(Any, None)


def _is_replayable(family: str, options: Mapping[str, Any]) -> bool:
    """Return whether only resets draw random numbers, so that actions determine an episode."""
    if family == "envpool.atari":  # a lost life and a repeated action draw in between
        return not options.get("episodic_life") and not options.get("repeat_action_probability")
    return family in (PROCGEN, "envpool.classic_control", "envpool.mujoco.gym")


def make_calls(pool: Any, infos: tuple[str, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return functions that step all environments, and reset those of a mask `[B]`.

    They skip EnvPool's Python layer, and return only `infos` of its info, where that is possible.
    """
    index = {key: number for number, key in enumerate(pool._state_keys)}
    wanted = ("obs", "reward", "done", "trunc", *(f"info:{key}" for key in infos))
    if not index.keys() >= set(wanted) or pool._to.__module__ != _COMMON_READER:
        return pool.step, lambda mask: pool.reset(options={"reset_mask": mask})[0]
    dtype, terminated_at = pool.spec._action_spec[-1][0], index.get("terminated")
    places = [index[key] for key in wanted]
    env_ids = np.arange(pool.config["num_envs"], dtype=np.int32)

    def step(action: np.ndarray) -> tuple[Any, ...]:
        pool._send([env_ids, env_ids, action.astype(dtype, order="C", copy=False)])
        state = pool._recv()
        obs, reward, done, truncated, *more = (state[place] for place in places)
        terminated = done & ~truncated if terminated_at is None else state[terminated_at]
        return obs, reward, terminated, truncated, dict(zip(infos, more, strict=True))

    def reset(mask: np.ndarray) -> np.ndarray:
        pool._reset(env_ids[mask])
        return pool._recv()[places[0]]

    return step, reset


def import_envpool(*, procgen: bool = False) -> ModuleType:
    """Import EnvPool (about a second); with `procgen` including Qt.

    Raises:
        ImportError: EnvPool, a library that it needs or, with `procgen`, Qt is missing.
    """
    if importlib.util.find_spec("envpool") is None:
        raise ImportError("EnvPool is not installed: pip install envpool (Linux only)")
    ensure_graphics()
    if procgen:
        ensure_qt()
        family = importlib.import_module(PROCGEN)
        # EnvPool keeps the failure if it was imported before Qt was there.
        if getattr(family, "_PROCGEN_IMPORT_ERROR", None) is not None:
            importlib.reload(family)
    return importlib.import_module("envpool")


@functools.cache
def task_families() -> dict[str, str]:
    """Return EnvPool's tasks with their packages, such as `envpool.mujoco.gym`."""
    import_envpool()
    registration = importlib.import_module("envpool.registration")
    return {task_id: entry[0] for task_id, entry in registration.registry.specs.items()}


def make_spec(task_id: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return EnvPool's specification of a task; no environment is made."""
    envpool = import_envpool(procgen=task_families()[task_id] == PROCGEN)
    return envpool.make_spec(task_id, **(options or {}))


def task_spaces(
    task_id: str, options: dict[str, Any] | None = None
) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the observation and action space of a task.

    A `Box` of integers, EnvPool's word for several choices, becomes a `MultiDiscrete`.

    Raises:
        ValueError: a task of several players.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # float64 bounds
        spec = make_spec(task_id, options)
        if (players := spec.config.max_num_players) != 1:
            raise ValueError(f"envpool:{task_id} has {players} players; expected a task of one")
        space, actions = as_float32(spec.gymnasium_observation_space), spec.gymnasium_action_space
    if isinstance(actions, gym.spaces.Box) and np.dtype(actions.dtype).kind in "iu":
        low, high = actions.low.astype(np.int64), actions.high.astype(np.int64)
        actions = gym.spaces.MultiDiscrete(high - low + 1, start=low)
    return space, actions


def task_options(task_id: str, given: Mapping[str, OptionValue]) -> dict[str, Any]:
    """Return the given options of a task as EnvPool takes them.

    Raises:
        ValueError: an option that the task does not have, of the wrong type, or that would crash
            EnvPool.
    """
    name, fields = f"envpool:{task_id}", make_spec(task_id).config._asdict()
    known = {key: value for key, value in fields.items() if key not in NOT_OPTIONS}
    options = read_options(name, given, known)
    for key, value in options.items():
        if type(value) is int and value <= 0 < fields[key]:  # a segmentation fault in EnvPool
            raise ValueError(f"{name}: env.options has {key} = {value}; expected a number above 0")
    return options


def procgen_task(game: str, config: EnvConfig) -> tuple[str, dict[str, Any]]:
    """Return EnvPool's id of a game, such as `StarpilotEasy-v0`, and its options.

    Raises:
        ValueError: a distribution of levels that the game does not have, or options that EnvPool
            would abort on or misunderstand.
    """
    task_id, modes = _task_id(game, config.distribution), distributions(game, task_families())
    if config.distribution not in modes:
        what = f"procgen:{game}: env.distribution is {config.distribution}"
        raise ValueError(f"{what}; expected one of {', '.join(modes)}")
    options = task_options(task_id, config.options)
    if config.distribution == "exploration" and (config.num_levels or "start_level" in options):
        what = f"procgen:{game}: env.distribution is exploration, which is one fixed level"
        raise ValueError(f"{what}; leave out env.num_levels and start_level of env.options")
    # The game draws HWC: without another copy, in the layout that convolutions prefer.
    return task_id, options | {"num_levels": config.num_levels, "channel_first": False}


def distributions(game: str, task_ids: Container[str]) -> list[str]:
    """Return the distributions of levels that a game has among EnvPool's tasks."""
    return [mode for mode in get_args(ProcgenDistribution) if _task_id(game, mode) in task_ids]


def _task_id(game: str, distribution: str) -> str:
    return f"{game.capitalize()}{distribution.capitalize()}-v0"
