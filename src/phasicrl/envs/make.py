"""From a configuration to environments: finds the back end of an id. Kind: effects."""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, get_args

import gymnasium as gym

from phasicrl.config import Backend as AnyBackend
from phasicrl.config import EnvConfig
from phasicrl.config_io import nearest_name
from phasicrl.envs.bridge import Bridge, NumpyEnv
from phasicrl.envs.envpool import (
    OF_TRAINING,
    PROCGEN,
    EnvPoolEnv,
    import_envpool,
    task_families,
    task_limit,
    task_options,
)
from phasicrl.envs.gymnasium import GymnasiumEnv, import_module_of, made_by_id
from phasicrl.envs.interface import MakeEnv
from phasicrl.envs.procgen import GAMES, distributions, procgen_options, procgen_task
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv, OwnVectorEnv
from phasicrl.envs.watchdog import RESET_SECONDS, Watchdog
from phasicrl.envs.wrappers import PartialObservation
from phasicrl.host.machine import num_cores

Backend = Literal["procgen", "envpool", "gymnasium"]


@dataclass(frozen=True, slots=True)
class EnvListing:
    """One line of `phasicrl envs`: the full id, its back end, and what it is."""

    id: str
    backend: Backend
    description: str

    def __str__(self) -> str:
        return f"{self.id:<40} {self.description}"


class EnvShare(TypedDict):
    """How many environments, their seed, and the number of the first among those of all ranks."""

    num_envs: int
    seed: int
    first_env: int


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
    if make_env is not None and make_vector_env is not None:
        raise ValueError("make_env and make_vector_env were both given; give one of them")
    num_envs = config.num_envs if num_envs is None else num_envs
    share: EnvShare = {"num_envs": num_envs, "seed": seed, "first_env": first_env}
    backend: AnyBackend
    with closing(Watchdog(config.id)) as watchdog, watchdog.watch("its start", 2 * RESET_SECONDS):
        if make_vector_env is not None:
            backend, masks = "vector", config.action_masks
            envs = OwnVectorEnv(make_vector_env, name=config.id, action_masks=masks, **share)
        elif make_env is not None:
            backend, envs = "own", _make_gymnasium(make_env, config.id, config, share)
        else:
            backend, name = resolve(config.id)
            envs = _FACTORIES[backend](name, config, share)
    try:
        bridge = Bridge(envs, has_deadlines=config.parallel == "processes")
        return bridge if config.observe is None else PartialObservation(bridge, config.observe)
    except ValueError:
        envs.close()
        raise


def _make_procgen(game: str, config: EnvConfig, share: EnvShare) -> NumpyEnv:
    task_id, options = procgen_task(game, config), procgen_options(game, config)
    return _make_pool(f"procgen:{game}", task_id, options, config, share)


def _make_envpool(task_id: str, config: EnvConfig, share: EnvShare) -> NumpyEnv:
    options = task_options(task_id, config.options)
    return _make_pool(f"envpool:{task_id}", task_id, options, config, share)


def _make_pool(
    name: str, task_id: str, options: dict[str, Any], config: EnvConfig, share: EnvShare
) -> NumpyEnv:
    # Handing a step of these to a second thread costs more than the step.
    quick = task_families()[task_id] in ("envpool.classic_control", "envpool.toy_text")
    num_threads = min(config.num_threads or (1 if quick else num_cores()), share["num_envs"])
    try:
        return EnvPoolEnv(task_id, **share, num_threads=num_threads, options=options, name=name)
    except (RuntimeError, TypeError) as error:  # EnvPool's word for a value that it cannot use
        if not config.options:
            raise
        what = f"{name}: EnvPool does not take env.options {dict(config.options)}"
        raise ValueError(f"{what}: {str(error).splitlines()[0]}") from error


def _make_gymnasium_id(name: str, config: EnvConfig, share: EnvShare) -> NumpyEnv:
    return _make_gymnasium(made_by_id(name, config.options), f"gymnasium:{name}", config, share)


def _make_gymnasium(make_env: MakeEnv, name: str, config: EnvConfig, share: EnvShare) -> NumpyEnv:
    return GymnasiumEnv(
        make_env,
        **share,
        name=name,
        parallel=config.parallel,
        max_restarts=config.max_restarts,
        action_masks=config.action_masks,
    )


_FACTORIES = dict(procgen=_make_procgen, envpool=_make_envpool, gymnasium=_make_gymnasium_id)


def for_evaluation(config: EnvConfig) -> EnvConfig:
    """The same environments as they are evaluated: whole games, in their own reward."""
    if not any(key in OF_TRAINING for key in config.options) or resolve(config.id)[0] != "envpool":
        return config
    kept = {key: value for key, value in config.options.items() if key not in OF_TRAINING}
    return replace(config, options=kept)


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
    if colon and prefix not in get_args(Backend):
        what = f"env.id is {env_id!r}; expected an id behind procgen:, envpool: or gymnasium:"
        raise ValueError(f"{what}. For Gymnasium's `module:Id` write gymnasium:{env_id}.")
    name = name if colon else env_id
    if prefix == "gymnasium":
        import_module_of(name)
    key, names = name.rpartition(":")[2], _names()
    if prefix == "envpool" and prefix not in names:
        import_envpool()  # says how to install it
    for backend in names:
        if backend == prefix or not colon:
            if backend == "procgen" and key.lower() in GAMES:
                return backend, key.lower()
            if key in names[backend]:
                return backend, name
    near = nearest_name(key, [each for known in names.values() for each in known])
    missing = "" if "envpool" in names else " EnvPool is missing: pip install 'phasicrl[procgen]'."
    raise ValueError(
        f"env.id is {env_id!r}, an unknown environment{near}. `phasicrl envs` lists those that are "
        f"known, `--import MODULE` adds a module's.{missing}"
    )


def _names() -> dict[Backend, Collection[str]]:
    """Return the names of environments of each back end that is installed."""
    names: dict[Backend, Collection[str]] = {"procgen": GAMES}
    if importlib.util.find_spec("envpool") is not None:
        families = task_families()
        names["envpool"] = {task for task in families if families[task] != PROCGEN}
    names["gymnasium"] = gym.registry
    return names


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
    return [
        EnvListing(env_id, backend, _describe(backend, name))
        for backend, names in _names().items()
        for name in (names if backend == "procgen" else sorted(names))
        if fnmatch.fnmatchcase((env_id := f"{backend}:{name}").lower(), wanted)
    ]


def _describe(backend: Backend, name: str) -> str:
    """Describe an environment without making it."""
    if backend == "envpool":
        family = task_families()[name].removeprefix("envpool.")
        return f"EnvPool, {family.replace('_', ' ').replace('.', ', ')}"
    if backend == "gymnasium":
        limit = gym.registry[name].max_episode_steps
        return f"Gymnasium, at most {limit} steps" if limit else "Gymnasium"
    if importlib.util.find_spec("envpool") is None:
        return "Procgen; needs pip install 'phasicrl[procgen]'"
    return f"Procgen; levels: {', '.join(distributions(name, task_families()))}"
