"""EnvPool: C++ environments stepped by a pool of threads. Kind: effects.

This file relies on these facts about EnvPool 1.2.5 and 1.2.7 (tested in `tests/envs` where results
depend on them):

- EnvPool resets in the step *after* an end, which ignores its action and returns the first
  observation with reward zero. Resetting ended environments right after the step, with
  `reset_mask`, avoids such rows, and the step's observation is the final one. In sync mode, results
  have the order of the requested environments.
- Every call returns new arrays.
- `truncated` means "done at the step limit". In most families, `terminated` means "done and not
  truncated", so that an episode that ends by its rules in exactly the last step counts as
  truncated. Since 1.2.7, Highway, dm_control's locomotion and MJLab also return `terminated`; both
  are then true in such a step, which counts as terminated here. (Atari's `info:terminated` is the
  end of the game, not of the life.)
- A batch of actions that is too short aborts the process. Action 99, floats, longer batches and a
  step after `close` are accepted silently; action -1 of Procgen forces a reset.
- Observations with several parts are nested dictionaries, mostly of float64; a `Discrete` part is
  int32 `[B]`, a `MultiBinary` part is bool. dm_control's observations exceed the bounds of their
  spaces.
- Actions of several integers (Jumanji) have a `Box` of integers as their space, with inclusive
  bounds; there is no `MultiDiscrete`. Any array of the right shape is cast. No family has
  structured actions.
- Tasks of several players return an observation and a reward for each player instead of each
  environment.
- The Python layer rebuilds a dictionary of all options and a tree of all arrays in every call of
  `_send` and `_recv`. They are called directly if an observation is one array and `_to`, which
  converts arrays to a result, is the common one. MJLab and locomotion split one array into the
  parts of an observation.
- Seeds are fixed when the pool is made. The default seed of an environment is `seed + index`, so
  that pools with neighboring seeds share environments; here each environment has a derived seed.
"""

import ctypes
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, cast, get_args

import gymnasium as gym
import numpy as np

from phasicrl.config import EnvConfig, OptionValue, ProcgenDistribution
from phasicrl.envs.bridge import EnvSlice, NumpyStep, NumpyVectorEnv
from phasicrl.envs.checks import EnvProperties
from phasicrl.envs.native import load_envpool_libraries, load_qt
from phasicrl.envs.options import convert_options
from phasicrl.envs.protocol import RestoreMethod
from phasicrl.spaces import check_spaces, to_float32_space
from phasicrl.system.machine import num_cores

PROCGEN = "envpool.procgen"
"""Package of the Procgen family in EnvPool."""

PROCGEN_GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
"""Games of Procgen."""

RESERVED_OPTIONS = {
    "num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset",
    "base_path", "seed", "env_seed", "gym_reset_return_info", "reward_threshold", "task",
    "env_name", "num_levels", "channel_first", "distribution_mode", "use_sequential_levels",
}  # fmt: skip
"""EnvPool's options that have no effect here, or are set by options of `EnvConfig`."""

TRAINING_OPTIONS = ("episodic_life", "reward_clip")
"""Options that change episodes or rewards for training, which evaluations do not use."""

GAMES_WITH_MEMORY = (
    "Hangman-v5", "HauntedHouse-v5", "IceHockey-v5", "SirLancelot-v5", "Surround-v5",
    "TimePilot-v5", "YarsRevenge-v5",
)  # fmt: skip
"""Games of Atari whose episodes depend on earlier ones, of 104 that were replayed."""

_THREAD_DIR = "/proc/self/task"
_UNCHANGED_ARRAYS_MODULE = "envpool.python.gymnasium_envpool"
"""Module of `_to` in families that return the arrays of `_recv` unchanged."""


class EnvPoolEnv(NumpyVectorEnv):
    """Pool of environments of one EnvPool task, in sync mode."""

    remedy = "the simulation broke down: bound the actions, or report it to EnvPool with the seed"

    def __init__(
        self, task_id: str, name: str, options: dict[str, Any], threads: int | None, local: EnvSlice
    ) -> None:
        """Make a pool of environments.

        Args:
            task_id: EnvPool's id of the task.
            name: name of the environment, for messages.
            options: EnvPool's options of the task.
            threads: number of threads; None for one per core, or a single one for fast tasks.
            local: number and seeds of this rank's environments.
        """
        family, num_envs = get_family_by_task()[task_id], local.num_envs
        self._is_procgen = family == PROCGEN
        can_replay = _is_replayable(task_id, family, options)
        self.restore_method: RestoreMethod = "replay" if can_replay else "none"
        self._num_resets = np.zeros(num_envs, np.int64)
        spaces = get_task_spaces(task_id, options)
        check_spaces(name, *spaces)
        # Synchronizing a second thread takes longer than a step of these.
        is_fast = family in ("envpool.classic_control", "envpool.toy_text")
        num_threads = min(threads or (1 if is_fast else num_cores()), num_envs)
        # Linux may leave two threads on one core for the time of a short step.
        offset = 0 if num_threads == os.cpu_count() else -1
        kwargs = dict(num_envs=num_envs, num_threads=num_threads, thread_affinity_offset=offset)
        envpool = import_envpool(procgen=self._is_procgen)
        before = os.listdir(_THREAD_DIR)
        self._pool: Any = envpool.make_gymnasium(task_id, seed=local.seeds(), **kwargs, **options)
        # A single thread of the pool computes only while this one waits, and starts fastest on the
        # same core: waking another core takes longer than a fast step (docs/performance.md).
        new = {*os.listdir(_THREAD_DIR)} - {*before} if num_threads == 1 else ()
        self._pool_threads, self._core = [int(thread) for thread in new], -1
        self._get_current_core = ctypes.CDLL(None).sched_getcpu
        info_keys = ("level_seed", "prev_level_complete") if self._is_procgen else ()
        self._step_pool, self._reset_pool = make_step_and_reset(self._pool, info_keys)
        # EnvPool caches the space, whose first use warns.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            _ = self._pool.observation_space
        super().__init__(name, num_envs, EnvProperties(*spaces, None))

    def _reset(self) -> tuple[np.ndarray, None]:
        obs, _ = self._pool.reset()
        self._num_resets += 1
        return self._pack_obs(obs, "reset"), None

    def _step(self, action: np.ndarray) -> NumpyStep:
        if self._pool_threads and (core := self._get_current_core()) != self._core:
            self._core = core
            for thread in self._pool_threads:
                with suppress(OSError):  # a thread that has ended
                    os.sched_setaffinity(thread, {core})
        obs, reward, terminated, truncated, info = self._step_pool(self._actions.unflatten(action))
        obs, reward = self._pack_obs(obs, "step"), self._convert_reward(reward)
        done = terminated | truncated
        extras, final_obs = {}, None
        if self._is_procgen:
            # Games do not reset themselves here, so that `level_seed` is that of the current level,
            # and `prev_level_complete` refers to it in the step that ends it.
            complete = (info["prev_level_complete"] != 0) & done
            extras = {"level_seed": info["level_seed"], "level_complete": complete}
        if done.any():
            final_obs, obs = obs, obs.copy()
            self._reset_into(obs, done)
        return NumpyStep(obs, reward, terminated, truncated, final_obs, info=extras)

    def _reset_into(self, obs: np.ndarray, ended: np.ndarray) -> None:
        """Reset the environments that `ended` `[B]`, and write their observations into `obs`."""
        obs[ended] = self._pack_obs(self._reset_pool(ended), "reset", np.flatnonzero(ended))
        self._num_resets[ended] += 1

    def _get_replay_starts(self) -> list[int]:
        # In families with replay, only resets advance the random generator.
        return self._num_resets.tolist()

    def _replay(self, starts: list[Any], actions: list[np.ndarray]) -> tuple[np.ndarray, None]:
        obs, _ = self._reset()
        while (behind := self._num_resets < np.array(starts)).any():
            self._reset_into(obs, behind)
        dtype = self._pool.spec._action_spec[-1][0]
        lengths = np.array([len(taken) for taken in actions])
        for t in range(lengths.max()):
            env_ids = np.flatnonzero(lengths > t).astype(np.int32)
            action = self._actions.unflatten(np.stack([actions[env][t] for env in env_ids]))
            stepped, *_ = self._pool.step(np.asarray(action).astype(dtype, copy=False), env_ids)
            obs[env_ids] = self._pack_obs(stepped, "step", env_ids)
        return obs, None

    def _close(self) -> None:
        # EnvPool's own close() leaves the threads running; they end with the pool.
        self._pool = self._step_pool = self._reset_pool = cast(Any, None)


def _is_replayable(task_id: str, family: str, options: Mapping[str, Any]) -> bool:
    """Return whether seed and number of resets determine an episode, given its actions."""
    if family == "envpool.atari":  # lost lives and sticky actions draw random numbers
        draws = options.get("episodic_life") or options.get("repeat_action_probability")
        return not draws and task_id not in GAMES_WITH_MEMORY
    return family in (PROCGEN, "envpool.classic_control", "envpool.mujoco.gym")


def make_step_and_reset(
    pool: Any, info_keys: tuple[str, ...]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: step all; reset those that ended, `[B]` bool, and return their `obs`.

    Where possible they skip EnvPool's Python layer, and return only `info_keys` of its info.
    """
    index = {key: number for number, key in enumerate(pool._state_keys)}
    wanted = ("obs", "reward", "done", "trunc", *(f"info:{key}" for key in info_keys))
    if not index.keys() >= set(wanted) or pool._to.__module__ != _UNCHANGED_ARRAYS_MODULE:
        return pool.step, lambda ended: pool.reset(options={"reset_mask": ended})[0]
    dtype = pool.spec._action_spec[-1][0]
    terminated_at = index.get("terminated")
    places = [index[key] for key in wanted]
    env_ids = np.arange(pool.config["num_envs"], dtype=np.int32)

    def step(action: np.ndarray) -> tuple[Any, ...]:
        pool._send([env_ids, env_ids, action.astype(dtype, order="C", copy=False)])
        state = pool._recv()
        obs, reward, done, truncated, *more = (state[place] for place in places)
        terminated = done & ~truncated if terminated_at is None else state[terminated_at]
        return obs, reward, terminated, truncated, dict(zip(info_keys, more, strict=True))

    def reset_ended_envs(ended: np.ndarray) -> np.ndarray:
        pool._reset(env_ids[ended])
        return pool._recv()[places[0]]

    return step, reset_ended_envs


def import_envpool(*, procgen: bool = False) -> ModuleType:
    """Load Qt if `procgen`, and import EnvPool, which takes about a second.

    Raises:
        ImportError: EnvPool, a library that it needs, or Qt is missing.
    """
    if importlib.util.find_spec("envpool") is None:
        raise ImportError("EnvPool is not installed: pip install envpool (Linux only)")
    load_envpool_libraries()
    if procgen:
        load_qt()
    with suppress(ImportError):  # imported first, it does not read EnvPool's MPLBACKEND=Agg
        importlib.import_module("matplotlib")
    before = set(os.environ)
    module = importlib.import_module(PROCGEN if procgen else "envpool")
    # An import before Qt was loaded has failed, and EnvPool keeps the failure.
    if getattr(module, "_PROCGEN_IMPORT_ERROR", None) is not None:
        importlib.reload(module)
    for name in set(os.environ) - before:  # programs that are started later would inherit them
        del os.environ[name]
    return importlib.import_module("envpool")


@functools.cache
def get_family_by_task() -> dict[str, str]:
    """Return the family, such as the package `envpool.atari`, of each EnvPool task by its id."""
    import_envpool()
    registration = importlib.import_module("envpool.registration")
    return {task_id: entry[0] for task_id, entry in registration.registry.specs.items()}


def make_spec(task_id: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return EnvPool's specification of a task, without making environments."""
    envpool = import_envpool(procgen=get_family_by_task()[task_id] == PROCGEN)
    return envpool.make_spec(task_id, **(options or {}))


def get_task_spaces(
    task_id: str, options: dict[str, Any] | None = None
) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the observation and action space of a task, with `MultiDiscrete` for integer actions.

    Raises:
        ValueError: the task has several players.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # float64 bounds
        spec = make_spec(task_id, options)
        if (players := spec.config.max_num_players) != 1:
            raise ValueError(f"env.id is envpool:{task_id}, for {players} players; expected one")
        space = to_float32_space(spec.gymnasium_observation_space)
        actions = spec.gymnasium_action_space
    if isinstance(actions, gym.spaces.Box) and np.dtype(actions.dtype).kind in "iu":
        low, high = actions.low.astype(np.int64), actions.high.astype(np.int64)
        actions = gym.spaces.MultiDiscrete(high - low + 1, start=low)
    return space, actions


def convert_task_options(task_id: str, given: Mapping[str, OptionValue]) -> dict[str, Any]:
    """Convert the given options of a task to EnvPool's types.

    Raises:
        ValueError: an option does not exist, has a wrong type, or would crash EnvPool.
    """
    name = f"envpool:{task_id}"
    fields = make_spec(task_id).config._asdict()
    known = {key: value for key, value in fields.items() if key not in RESERVED_OPTIONS}
    options = convert_options(name, given, known)
    for key, value in options.items():
        if type(value) is int and value <= 0 < fields[key]:  # a segmentation fault in EnvPool
            raise ValueError(f"{name}: env.options has {key} = {value}; expected a number above 0")
    return options


def resolve_procgen_task(game: str, config: EnvConfig) -> tuple[str, dict[str, Any]]:
    """Return EnvPool's id of a game, such as `StarpilotEasy-v0`, and its options.

    Raises:
        ValueError: the game does not have the distribution of levels, or options do not fit.
    """
    ids = {x: f"{game.capitalize()}{x.capitalize()}-v0" for x in get_args(ProcgenDistribution)}
    task_ids = {x: ids[x] for x in ids if ids[x] in get_family_by_task()}
    if (task_id := task_ids.get(config.distribution)) is None:
        given = f"procgen:{game}: env.distribution is {config.distribution}"
        raise ValueError(f"{given}; expected one of {', '.join(task_ids)}")
    options = convert_task_options(task_id, config.options)
    if config.distribution == "exploration" and (config.num_levels or "start_level" in options):
        given = f"procgen:{game}: env.distribution is exploration, which is one fixed level"
        raise ValueError(f"{given}; expected neither env.num_levels nor start_level in env.options")
    # Games draw HWC, which needs no copy and is the fastest layout for convolutions.
    return task_id, options | {"num_levels": config.num_levels, "channel_first": False}
