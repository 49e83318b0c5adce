"""From a configuration to environments: finds the back end of an id. Kind: effects.

It refuses what cannot work before anything starts.
"""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, get_args

import gymnasium as gym

from phasicrl.config import EnvConfig, Options, Task, refuse_idle_env
from phasicrl.config_io import nearest_name
from phasicrl.envs.bridge import Bridge
from phasicrl.envs.envpool import (
    OF_TRAINING,
    PROCGEN,
    EnvPoolEnv,
    task_families,
    task_limit,
    task_options,
    task_spaces,
)
from phasicrl.envs.gymnasium import GymnasiumEnv, import_module_of, made_by_id
from phasicrl.envs.interface import MakeEnv
from phasicrl.envs.procgen import GAMES, distributions, procgen_options, procgen_task, split_task_id
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv, OwnVectorEnv
from phasicrl.envs.watchdog import RESET_SECONDS, Watchdog
from phasicrl.envs.wrappers import PartialObservation
from phasicrl.host.machine import num_cores
from phasicrl.spaces import check_spaces

Backend = Literal["procgen", "envpool", "gymnasium"]

SPACES_LISTED = 50
"""Up to this many found environments are listed with their spaces, at a few milliseconds each."""


@dataclass(frozen=True, slots=True)
class EnvListing:
    """One line of `phasicrl envs`: the full id, its back end, and what it is."""

    id: str
    backend: Backend
    description: str

    def __str__(self) -> str:
        return f"{self.id:<40} {self.description}"


def make_envs(
    config: EnvConfig,
    *,
    seed: int,
    num_envs: int | None = None,
    first_env: int = 0,
    make_env: MakeEnv | None = None,
    make_vector_env: MakeVectorEnv | None = None,
) -> VectorEnv:
    """Make the environments that `config` describes.

    Args:
        config: which, and how.
        seed: everything random in them follows from it; each environment gets a seed of its own.
        num_envs: how many, if not `config.num_envs` (one rank's share, or an evaluation's).
        first_env: the number of the first of them among those of all ranks.
        make_env: makes one of your own environments (a Gymnasium `Env`); `config.id` then only
            names it.
        make_vector_env: makes a vector environment of your own (Gymnasium's `VectorEnv` interface),
            given the number of environments.

    Raises:
        ValueError: an unknown id, a field that the back end does not understand, or spaces that are
            not supported.
        ImportError: the back end is not installed; the message names the extra.
    """
    num_envs = config.num_envs if num_envs is None else num_envs
    if make_env is not None and make_vector_env is not None:
        raise ValueError("make_env and make_vector_env were both given; give one of them")
    which: _Which = {"num_envs": num_envs, "seed": seed, "first_env": first_env}
    with closing(Watchdog(config.id)) as watchdog, watchdog.watch("its start", 2 * RESET_SECONDS):
        if make_vector_env is None:
            envs = _make_whole(config, make_env=make_env, **which)
        else:
            envs = _own_vector(make_vector_env, config, **which)
    if config.observe is None:
        return envs
    try:
        return PartialObservation(envs, config.observe)
    except ValueError:
        envs.close()
        raise


class _Which(TypedDict):
    """How many environments, their seed, and the number of the first among those of all ranks."""

    num_envs: int
    seed: int
    first_env: int


def _make_whole(
    config: EnvConfig, *, make_env: MakeEnv | None, **which: Unpack[_Which]
) -> VectorEnv:
    """The environments with everything there is to see."""
    num_envs = which["num_envs"]
    if make_env is not None:
        task = Task(name=config.id, backend="own")
        return _gymnasium(make_env, config, task, **which)
    backend, name = resolve(config.id)
    env_id = f"{backend}:{name}"
    if backend == "gymnasium":
        made, task = made_by_id(name, config.options), Task(name=env_id, backend=backend)
        return _gymnasium(made, config, task, **which)
    refuse_idle_env(config, Task(name=env_id, backend=backend, has_masks=False))
    if backend == "procgen":
        task_id, options = procgen_task(name, config), procgen_options(name, config)
    else:
        task_id, options = name, task_options(name, config.options)
    # A step of these takes a fraction of a microsecond: handing it to a second thread costs more
    # than the step.
    quick = task_families()[task_id] in ("envpool.classic_control", "envpool.toy_text")
    num_threads = min(config.num_threads or (1 if quick else num_cores()), num_envs)
    try:
        pool = EnvPoolEnv(task_id, **which, num_threads=num_threads, options=options, name=env_id)
    except (RuntimeError, TypeError) as error:  # EnvPool's word for a value that it cannot use
        if not config.options:
            raise
        raise ValueError(
            f"{env_id}: EnvPool does not take env.options {dict(config.options)}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return Bridge(pool)


def _own_vector(
    make_vector_env: MakeVectorEnv, config: EnvConfig, **which: Unpack[_Which]
) -> VectorEnv:
    """A vector environment of a user's own."""
    task = Task(name=config.id, backend="vector")
    refuse_idle_env(config, task)
    envs = OwnVectorEnv(
        make_vector_env,
        **which,
        name=task.name,
        action_masks=config.action_masks,
    )
    return _checked(envs, config, task)


def _gymnasium(
    make_env: MakeEnv, config: EnvConfig, task: Task, **which: Unpack[_Which]
) -> VectorEnv:
    """Environments of Gymnasium's, as `config` wants them."""
    refuse_idle_env(config, task)
    envs = GymnasiumEnv(
        make_env,
        **which,
        name=task.name,
        parallel=config.parallel,
        max_restarts=config.max_restarts,
        action_masks=config.action_masks,
    )
    return _checked(envs, config, task)


def _checked(envs: GymnasiumEnv | OwnVectorEnv, config: EnvConfig, task: Task) -> VectorEnv:
    """The environments, unless the configuration has a knob about masks and they have none."""
    try:
        refuse_idle_env(config, replace(task, has_masks=envs.has_masks))
    except ValueError:
        envs.close()
        raise
    return Bridge(envs, has_deadlines=config.parallel == "processes")


def for_evaluation(config: EnvConfig) -> EnvConfig:
    """The same environments as they are evaluated: whole games, in their own reward."""
    if not any(key in OF_TRAINING for key in config.options) or resolve(config.id)[0] != "envpool":
        return config
    kept = {key: value for key, value in config.options.items() if key not in OF_TRAINING}
    return replace(config, options=Options(kept))


def resolve(env_id: str) -> tuple[Backend, str]:
    """Find the back end of an id, and its name there.

    `procgen:`, `envpool:` and `gymnasium:` say it; `gymnasium:module:Id` imports a module first,
    which registers the id. A bare id is looked up as a game of Procgen, then in EnvPool, then in
    Gymnasium.

    Raises:
        ValueError: nobody knows it; the message has the nearest name.
        ImportError: the back end that the id names is not installed, or Gymnasium's `module:Id`
            names a module that cannot be imported.
    """
    prefix, colon, name = env_id.partition(":")
    if not colon:
        return _resolve_bare(env_id)
    if prefix == "procgen":
        game = name.lower()
        if game not in GAMES:
            raise ValueError(
                f"Procgen has no game {name!r}{nearest_name(name, GAMES)}; "
                f"its games: {', '.join(GAMES)}"
            )
        return "procgen", game
    if prefix == "envpool":
        return _resolve_envpool(name)
    if prefix == "gymnasium":
        import_module_of(name)
        there = name.rpartition(":")[2]
        if there not in gym.registry:
            raise ValueError(
                f"Gymnasium has no environment {there!r}{nearest_name(there, gym.registry)}; "
                "`phasicrl envs` lists them, and `--import MODULE` adds those of a module"
            )
        return "gymnasium", name
    known = ", ".join(f"{backend}:" for backend in get_args(Backend))
    raise ValueError(
        f"{env_id!r} begins with {prefix!r}, which is not a back end; "
        f"accepted: {known}, or a bare id (for Gymnasium's `module:Id` write gymnasium:{env_id})"
    )


def episode_limit(config: EnvConfig) -> int | None:
    """Steps after which the environment cuts an episode; None where it cuts none.

    Raises:
        ValueError: there is no such environment, or it has no such option.
    """
    backend, name = resolve(config.id)
    if backend == "envpool":
        return task_limit(name, config.options)
    if backend != "gymnasium":
        return None
    given = config.options.get("max_episode_steps")
    limit = gym.registry[name.rpartition(":")[2]].max_episode_steps if given is None else int(given)
    return limit if limit and limit > 0 else None


def list_envs(pattern: str = "*") -> list[EnvListing]:
    """List what can be trained.

    Args:
        pattern: Part of a name, or a pattern with * and ?; upper and lower case are the same.
    """
    wanted = pattern.lower() if any(sign in pattern for sign in "*?[") else f"*{pattern.lower()}*"
    found = [one for one in _all_listings() if fnmatch.fnmatchcase(one.id.lower(), wanted)]
    return [_with_spaces(listing) for listing in found] if len(found) <= SPACES_LISTED else found


def _resolve_bare(name: str) -> tuple[Backend, str]:
    """Look a bare id up: Procgen, EnvPool, Gymnasium."""
    if name.lower() in GAMES:
        return "procgen", name.lower()
    in_envpool = _envpool_tasks()
    if name in in_envpool:
        return _resolve_envpool(name)
    if name in gym.registry:
        return "gymnasium", name
    known = [*GAMES, *in_envpool, *gym.registry]
    missing = ""
    if not _has_envpool():
        missing = " (EnvPool is not installed: pip install 'phasicrl[procgen]')"
    raise ValueError(
        f"unknown environment {name!r}{nearest_name(name, known)}; "
        f"`phasicrl envs` lists what can be trained{missing}"
    )


def _resolve_envpool(name: str) -> tuple[Backend, str]:
    """Look an id up in EnvPool, whose Procgen tasks have one way of being named here."""
    tasks = task_families()
    if name not in tasks:
        raise ValueError(
            f"EnvPool has no task {name!r}{nearest_name(name, tasks)}; "
            "`phasicrl envs envpool:` lists them"
        )
    if tasks[name] == PROCGEN:
        game, distribution = split_task_id(name)
        raise ValueError(
            f"{name!r} is a game of Procgen; "
            f"write procgen:{game} with env.distribution {distribution}"
        )
    return "envpool", name


def _has_envpool() -> bool:
    return importlib.util.find_spec("envpool") is not None


def _envpool_tasks() -> dict[str, str]:
    """EnvPool's task ids and the families they are from; empty without EnvPool."""
    return task_families() if _has_envpool() else {}


def _all_listings() -> Iterator[EnvListing]:
    """Everything there is, without making anything."""
    tasks = _envpool_tasks()
    for game in GAMES:
        modes = distributions(game, tasks or None)
        needs = "" if tasks else "; needs pip install 'phasicrl[procgen]'"
        about = f"Procgen, 64 × 64 images, 15 actions; levels: {', '.join(modes)}{needs}"
        yield EnvListing(f"procgen:{game}", "procgen", about)
    for task_id, family in sorted(tasks.items()):
        if family != PROCGEN:
            kind = family.removeprefix("envpool.").replace("_", " ").replace(".", ", ")
            yield EnvListing(f"envpool:{task_id}", "envpool", f"EnvPool, {kind}")
    for env_id, spec in sorted(gym.registry.items()):
        limit = f", at most {spec.max_episode_steps} steps" if spec.max_episode_steps else ""
        yield EnvListing(f"gymnasium:{env_id}", "gymnasium", f"Gymnasium{limit}")


def _with_spaces(listing: EnvListing) -> EnvListing:
    """Add the spaces of an EnvPool task, or why it cannot be trained.

    Those of Gymnasium are known only by making the environment.
    """
    if listing.backend != "envpool":
        return listing
    try:
        observation_space, action_space = task_spaces(listing.id.removeprefix("envpool:"))
        check_spaces(listing.id, observation_space, action_space)
        more = f"{_short(observation_space)} → {_short(action_space)}"
    except Exception as error:  # what a family's C++ says when its files are missing, for example
        more = f"cannot be trained here: {str(error).splitlines()[0]}"
    return replace(listing, description=f"{listing.description}; {more}")


def _short(space: gym.Space[Any]) -> str:
    """A space in a few characters, without its bounds."""
    if isinstance(space, gym.spaces.Dict):
        return f"Dict({', '.join(f'{key}: {_short(part)}' for key, part in space.spaces.items())})"
    if isinstance(space, gym.spaces.Tuple):
        return f"Tuple({', '.join(map(_short, space.spaces))})"
    if isinstance(space, gym.spaces.Box):
        return f"Box {' × '.join(map(str, space.shape)) or 'scalar'} {space.dtype}"
    if isinstance(space, gym.spaces.MultiDiscrete):
        return f"MultiDiscrete({space.nvec.tolist()})"
    return str(space)
