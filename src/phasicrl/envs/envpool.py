"""EnvPool: environments in C++ that are stepped by a pool of threads. Kind: effects.

Facts about EnvPool 1.2.5 and 1.2.7 that this file rests on (those that results depend on are held
by tests in `tests/envs`):

- It resets in the step *after* an end: that step ignores its action and returns a first observation
  with reward zero. Resetting just the finished environments right after the step, with
  `reset_mask`, leaves no such row, and what the step returned is the true last observation. In sync
  mode the answers come in the order of the environments asked for.
- Every call returns arrays in memory of their own, so they may be kept and written to.
- `truncated` is "done at the step limit". In most families nothing else is told, `terminated` is
  "done and not truncated", and an episode that ends by its rules in exactly the last step counts as
  truncated. From 1.2.7 on Highway, dm_control's locomotion and MJLab tell `terminated` too; both
  are then true in such a step, and here it counts as terminated. (`info:terminated` of Atari is
  something else: the end of the game, not of the life.)
- A batch of actions that is too short aborts the process. Action 99, floats, longer batches and a
  step after `close` are accepted silently; action -1 of Procgen forces a reset.
- Observations of several parts come as dictionaries, nested like the space, of float64 mostly; a
  `Discrete` part is int32 `[B]`, a `MultiBinary` one is bool. The bounds of dm_control's are not
  kept: above zero, for numbers of both signs.
- Actions of several integers (Jumanji) have a `Box` of integers as their space, with both bounds
  included; there is no `MultiDiscrete`. Any array of the right shape is taken, in whatever dtype,
  and cast. No family has a structured action.
- Tasks of several players return one observation and reward for each player, and not one for each
  environment.
- Its Python layer rebuilds a dictionary of all options and a tree of all arrays in every call.
  `_send` and `_recv` are what it calls; the names and the order of their arrays are checked when a
  pool is made, and that `_to`, which makes an answer of them, is the common one: MJLab and
  locomotion have their own, which cut one array into the parts of an observation.
- Seeds are fixed when the pool is made. An environment's default seed is `seed + index`, so that
  pools with neighboring seeds share environments; we give one seed to each.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.config import OptionValue
from phasicrl.envs.bridge import BatchReader, NumpyStep
from phasicrl.envs.native import ensure_graphics, ensure_qt
from phasicrl.envs.options import checked_options
from phasicrl.envs.protocol import ExactState
from phasicrl.seeding import env_seeds
from phasicrl.spaces import ActionLayout, as_float32, check_spaces

PROCGEN = "envpool.procgen"
"""EnvPool's name of the Procgen family."""

NOT_OPTIONS = {
    "num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset",
    "base_path", "seed", "env_seed", "gym_reset_return_info", "reward_threshold", "task",
    "env_name", "num_levels", "channel_first", "distribution_mode", "use_sequential_levels",
}  # fmt: skip
"""Fields of a task's configuration in EnvPool that are set by us, say what the task is, or have no
effect there."""

OF_TRAINING = ("episodic_life", "reward_clip")
"""Options that change what an episode or a reward is, for learning only.

An evaluation is of whole games in their own reward.
"""

REMEDY = "the simulation broke down: bound the actions, or report it to EnvPool with the seed"
"""For numbers that nobody can use."""


_THREADS = "/proc/self/task"


class EnvPoolEnv:
    """A pool of environments of one EnvPool task, in sync mode; a `NumpyEnv`."""

    def __init__(
        self,
        task_id: str,
        *,
        num_envs: int,
        seed: int,
        first_env: int = 0,
        num_threads: int,
        options: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Make the pool.

        `first_env` is the number of the first of them among those of all ranks, whose seeds differ.
        `options` are EnvPool's own for the task, `name` is for messages.
        """
        family, options = task_families()[task_id], options or {}
        self._is_procgen = family == PROCGEN
        self.exact_state: ExactState = "replay" if _can_be_replayed(family, options) else "none"
        self._num_resets = np.zeros(num_envs, np.int64)
        envpool = import_envpool(procgen=self._is_procgen)
        self.name = name or f"envpool:{task_id}"
        self.num_envs, self.mask_size, self.has_masks = num_envs, 0, False
        self.observation_space, self.action_space = task_spaces(task_id, options)
        check_spaces(self.name, self.observation_space, self.action_space)
        self._reader = BatchReader(self.name, self.observation_space, num_envs, remedy=REMEDY)
        self._actions = ActionLayout(self.action_space)
        threads = set(os.listdir(_THREADS))
        self._pool: Any = envpool.make_gymnasium(
            task_id,
            num_envs=num_envs,
            num_threads=num_threads,
            seed=env_seeds(seed, num_envs, first=first_env),
            **options,
        )
        # A single thread computes only while this one waits. On the same core it starts at once; a
        # core that sleeps takes longer to wake than a quick step (docs/performance.md).
        new_threads = set(os.listdir(_THREADS)) - threads if num_threads == 1 else set[str]()
        self._followers, self._core = [int(thread) for thread in new_threads], -1
        self._current_core = ctypes.CDLL(None).sched_getcpu
        told = ("level_seed", "prev_level_complete") if self._is_procgen else ()
        calls = _direct_calls(self._pool, told) or _public_calls(self._pool)
        self._step: Any = calls[0]
        self._reset: Any = calls[1]
        # Made now and kept by EnvPool, so that the warning does not come from the first reset.
        with _quiet():
            _ = self._pool.observation_space

    def reset(self) -> tuple[np.ndarray, None]:
        """Start every environment anew and return the first observations `[B, …]`."""
        obs, _ = self._pool.reset()
        self._reader.num_steps = 0
        self._num_resets += 1
        return self._reader.obs(obs, "reset"), None

    def step(self, action: np.ndarray) -> NumpyStep:
        """Step every environment with its action `[B]` or `[B, K]`; reset those that ended."""
        if self._followers and (core := self._current_core()) != self._core:
            self._core = core
            for thread in self._followers:
                with suppress(OSError):  # a thread that only started the pool has ended
                    os.sched_setaffinity(thread, {core})
        obs, reward, terminated, truncated, info = self._step(self._actions.unflatten(action))
        self._reader.num_steps += 1
        obs, reward = self._reader.obs(obs, "step"), self._reader.reward(reward)
        done = terminated | truncated
        extras, final_obs = {}, None
        if self._is_procgen:
            # Since the pool's games do not reset themselves, `level_seed` is still that of the
            # level that was played, and `prev_level_complete` tells about it, at the step where it
            # ended only; after the reset both are gone.
            complete = (info["prev_level_complete"] != 0) & done
            extras = {"level_seed": info["level_seed"], "level_complete": complete}
        if done.any():
            final_obs, obs = obs, obs.copy()
            obs[done] = self._reader.obs(self._reset(done), "reset", np.flatnonzero(done))
            self._num_resets[done] += 1
        return NumpyStep(obs, reward, terminated, truncated, final_obs, None, extras)

    def starts(self) -> list[int]:
        """The number of each environment's resets.

        In the families that are played again, the generator moves at resets alone.
        """
        return self._num_resets.tolist()

    def replay(self, starts: list[Any], actions: list[np.ndarray]) -> tuple[np.ndarray, None]:
        """Reset each environment as often as the other was, and take the actions of its episode."""
        obs, _ = self.reset()
        while (behind := self._num_resets < np.array(starts)).any():
            obs[behind] = self._reader.obs(self._reset(behind), "reset", np.flatnonzero(behind))
            self._num_resets[behind] += 1
        dtype = self._pool.spec._action_spec[-1][0]
        lengths = np.array([len(taken) for taken in actions])
        for t in range(lengths.max()):
            env_ids = np.flatnonzero(lengths > t).astype(np.int32)
            action = self._actions.unflatten(np.stack([actions[env][t] for env in env_ids]))
            stepped, *_ = self._pool.step(np.asarray(action).astype(dtype, copy=False), env_ids)
            obs[env_ids] = self._reader.obs(stepped, "step", env_ids)
        return obs, None

    def close(self) -> None:
        """Stop the pool's threads."""
        # EnvPool's own close() leaves the threads running; they end with the pool.
        self._pool = self._step = self._reset = None


def _can_be_replayed(family: str, options: Mapping[str, Any]) -> bool:
    """Whether an episode follows from the number of resets before it and its actions.

    So it is where nothing but a reset draws numbers.
    """
    if family == "envpool.atari":  # a lost life, and a repeated action, are drawn in between
        return not options.get("episodic_life") and not options.get("repeat_action_probability")
    return family in (PROCGEN, "envpool.classic_control", "envpool.mujoco.gym")


_Calls = tuple[Callable[[Any], tuple[Any, ...]], Callable[[np.ndarray], Any]]
"""Steps all environments; resets those of a mask `[B]` and returns their first observations."""

_STATE_KEYS = frozenset(
    {"obs", "reward", "done", "trunc", "terminated", "elapsed_step", "discount", "step_type"}
)
"""What a step tells besides `info`, in the versions that were read.

Another key may change what one of these means.
"""

_COMMON_READER = "envpool.python.gymnasium_envpool"
"""Where `_to` is from in the families whose answers are the arrays as they are."""


def _public_calls(pool: Any) -> _Calls:
    """The calls that EnvPool means its users to make."""
    return pool.step, lambda done: pool.reset(options={"reset_mask": done})[0]


def _direct_calls(pool: Any, info: tuple[str, ...]) -> _Calls | None:
    """The same without EnvPool's Python layer; of what a step tells besides, only `info`.

    None where its arrays are not as known.
    """
    action_keys: Sequence[str] = getattr(pool.spec, "_action_keys", ())
    state_keys: Sequence[str] = getattr(pool, "_state_keys", ())
    place = {key: index for index, key in enumerate(state_keys)}
    wanted = ("obs", "reward", "done", "trunc", *(f"info:{key}" for key in info))
    told = {key for key in place if not key.startswith("info:")}
    known_actions = tuple(action_keys[:2]) == ("env_id", "players.env_id") and len(action_keys) == 3
    reader = getattr(getattr(pool, "_to", None), "__module__", None)
    known_answers = set(wanted) <= set(place) and told <= _STATE_KEYS and reader == _COMMON_READER
    if not known_actions or not known_answers:
        return None
    dtype, terminated_at = pool.spec._action_spec[-1][0], place.get("terminated")
    places = [place[key] for key in wanted]
    env_ids = np.arange(pool.config["num_envs"], dtype=np.int32)

    def step(action: np.ndarray) -> tuple[Any, ...]:
        pool._send([env_ids, env_ids, action.astype(dtype, order="C", copy=False)])
        state = pool._recv()
        obs, reward, done, truncated, *more = (state[index] for index in places)
        terminated = done & ~truncated if terminated_at is None else state[terminated_at]
        return obs, reward, terminated, truncated, dict(zip(info, more, strict=True))

    def reset(done: np.ndarray) -> np.ndarray:
        pool._reset(env_ids[done])
        return pool._recv()[places[0]]

    return step, reset


def import_envpool(*, procgen: bool = False) -> ModuleType:
    """Import EnvPool (about a second); with `procgen` including Qt.

    Raises:
        ImportError: EnvPool, a library that it needs or, with `procgen`, Qt is not there; the
            message names the remedy.
    """
    try:
        if importlib.util.find_spec("envpool") is not None:
            ensure_graphics()
            if procgen:
                ensure_qt()
        import envpool
    except ModuleNotFoundError as error:
        extra = "procgen" if procgen else "envpool"
        text = f"EnvPool is not installed ({error}); pip install 'phasicrl[{extra}]'"
        raise ImportError(text) from error
    if procgen:
        family = importlib.import_module(PROCGEN)
        # EnvPool keeps the failure if somebody imported it before Qt was there; importing the
        # family once more heals that.
        if getattr(family, "_PROCGEN_IMPORT_ERROR", None) is not None:
            importlib.reload(family)
    return envpool


@functools.cache
def task_families() -> dict[str, str]:
    """EnvPool's tasks, and the packages they are from, such as `envpool.mujoco.gym`."""
    import_envpool()
    registration = importlib.import_module("envpool.registration")
    return {task_id: entry[0] for task_id, entry in registration.registry.specs.items()}


def task_spaces(
    task_id: str, options: dict[str, Any] | None = None
) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Observation and action space of a task as the adapter hands them out.

    No environment is made for it.

    Raises:
        ValueError: a task of several players.
    """
    envpool = import_envpool(procgen=task_families()[task_id] == PROCGEN)
    with _quiet():
        spec = envpool.make_spec(task_id, **(options or {}))
        if (players := spec.config.max_num_players) != 1:
            raise ValueError(f"envpool:{task_id} has {players} players; expected a task of one")
        return as_float32(spec.gymnasium_observation_space), _counted(spec.gymnasium_action_space)


def task_limit(task_id: str, options: Mapping[str, OptionValue]) -> int:
    """Steps after which a task cuts an episode."""
    config = import_envpool().make_spec(task_id, **task_options(task_id, options)).config
    return config.max_episode_steps


def task_options(task_id: str, given: Mapping[str, OptionValue]) -> dict[str, Any]:
    """The given options of a task as EnvPool takes them.

    Raises:
        ValueError: the task does not have such an option, its default is of another type, or
            EnvPool would crash on the value.
    """
    if not given:
        return {}
    envpool = import_envpool(procgen=task_families()[task_id] == PROCGEN)
    name, fields = f"envpool:{task_id}", envpool.make_spec(task_id).config._asdict()
    for key in NOT_OPTIONS.intersection(given):
        what = f"{name}: env.options cannot set {key}"
        raise ValueError(f"{what}, which follows from other options, from the seed or the id")
    takes = {key: value for key, value in fields.items() if key not in NOT_OPTIONS}
    options = checked_options(name, given, takes)
    for key, value in options.items():
        # No image or no-op at all is a segmentation fault.
        if type(value) is int and value <= 0 < fields[key]:
            raise ValueError(f"{name}: env.options has {key} = {value}; it must be above zero")
    return options


def _counted(space: gym.Space[Any]) -> gym.Space[Any]:
    """An action space with `MultiDiscrete` in place of a `Box` of integers, EnvPool's word."""
    if not isinstance(space, gym.spaces.Box) or np.dtype(space.dtype).kind not in "iu":
        return space
    low, high = space.low.astype(np.int64), space.high.astype(np.int64)
    return gym.spaces.MultiDiscrete(high - low + 1, start=low)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Gymnasium's warning that EnvPool makes float32 spaces from float64 bounds.

    Nobody here can do anything about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
        yield
