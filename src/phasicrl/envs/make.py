"""Makes the environments of a configuration, by the back end of their id. Kind: effects."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import importlib.util
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym

from phasicrl.config import EnvConfig
from phasicrl.config_io import nearest_name
from phasicrl.envs import envpool
from phasicrl.envs.bridge import EnvShare, NumpyVectorEnv
from phasicrl.envs.checks import MakeEnv
from phasicrl.envs.gymnasium import GymnasiumEnv, get_make_options
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import CustomVectorEnv, MakeVectorEnv
from phasicrl.envs.watchdog import RESET_SECONDS, Watchdog
from phasicrl.envs.wrappers import PartialObservation

Backend = Literal["procgen", "envpool", "gymnasium"]


def make_envs(
    config: EnvConfig,
    *,
    seed: int,
    num_envs: int | None = None,
    first_env: int = 0,
    make_env: MakeEnv | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    whole_games: bool = False,
) -> VectorEnv:
    """Make the environments that `config` describes.

    Args:
        config: options of the environments.
        seed: seed of all environments, from which one for each is derived.
        num_envs: number of environments, if not `config.num_envs` (one rank's share, for example).
        first_env: index of the first environment among those of all ranks.
        make_env: function that makes a custom environment (Gymnasium's `Env`); `config.id` is then
            only its name.
        make_vector_env: function that makes a custom vector environment (Gymnasium's `VectorEnv`
            interface) of a number of environments.
        whole_games: leave out EnvPool's options that end episodes early or change rewards.

    Raises:
        ValueError: an unknown id, two functions that make environments, an unknown option of the
            environment, or spaces that are not supported.
        ImportError: EnvPool is not installed.
    """
    if make_env is not None and make_vector_env is not None:
        raise ValueError("make_env and make_vector_env are both given; expected one. Drop one.")
    share = EnvShare(config.num_envs if num_envs is None else num_envs, seed, first_env)
    with closing(Watchdog(config.id)) as watchdog:
        watchdog.call = "its start", 2 * RESET_SECONDS
        if make_vector_env is not None:
            envs = CustomVectorEnv(make_vector_env, config, share)
        elif make_env is not None:
            envs = GymnasiumEnv(make_env, config.id, config, share)
        else:
            backend, name = resolve(config.id)
            if backend == "gymnasium":
                envs = GymnasiumEnv(find_maker(name, config), f"gymnasium:{name}", config, share)
            else:
                left_out = envpool.TRAINING_OPTIONS if whole_games else ()
                kept = {key: v for key, v in config.options.items() if key not in left_out}
                envs = _make_pool(backend, name, replace(config, options=kept), share)
    try:
        return envs if config.observe is None else PartialObservation(envs, config.observe)
    except ValueError:
        envs.close()
        raise


def _make_pool(backend: str, name: str, config: EnvConfig, share: EnvShare) -> NumpyVectorEnv:
    if backend == "procgen":
        task_id, options = envpool.procgen_task(name, config)
    else:
        task_id, options = name, envpool.task_options(name, config.options)
    try:
        return envpool.EnvPoolEnv(task_id, f"{backend}:{name}", options, config.num_threads, share)
    except (RuntimeError, TypeError) as error:
        if not config.options:
            raise
        what = f"{backend}:{name}: EnvPool does not take env.options {dict(config.options)}"
        raise ValueError(f"{what}: {str(error).splitlines()[0]}") from error


def find_maker(name: str, config: EnvConfig) -> Callable[..., gym.Env[Any, Any]]:
    """Return the function that makes a registered environment with `env.options`."""
    # By its spec, since other processes do not know ids that were registered here. GuardedEnv
    # checks more than Gymnasium's checker.
    spec = gym.spec(name.rpartition(":")[2])
    options = get_make_options(spec, config.options)
    return functools.partial(gym.make, spec, disable_env_checker=True, **options)


def resolve(env_id: str) -> tuple[Backend, str]:
    """Return the back end of an id, and its name there.

    The prefixes are `procgen:`, `envpool:` and `gymnasium:`; `gymnasium:module:Id` imports a module
    first, which registers the id. Without a prefix the games of Procgen are searched, then EnvPool,
    then Gymnasium.

    Raises:
        ValueError: an unknown id; the message has the nearest name.
        ImportError: a missing back end, or a module that cannot be imported.
    """
    prefix, _, name = env_id.partition(":") if ":" in env_id else ("", "", env_id)
    module, _, bare = name.rpartition(":")
    if prefix == "gymnasium" and module:
        importlib.import_module(module)
    elif prefix == "envpool":
        envpool.import_envpool()  # raises if it is not installed
    names = _names()
    for backend, known in names.items():
        key = bare.lower() if backend == "procgen" else bare
        if key in known and backend == (prefix or backend):
            return backend, key if backend == "procgen" else name
    near = nearest_name(bare, [each for known in names.values() for each in known])
    missing = (
        "" if "envpool" in names else " EnvPool is not installed: pip install envpool (Linux only)."
    )
    raise ValueError(
        f"env.id is {env_id!r}, an unknown environment{near}; expected an id behind procgen:, "
        "envpool: or gymnasium:. `phasicrl envs` lists known ones. For one that a module registers "
        f"write gymnasium:MODULE:ID, or add `--import MODULE`.{missing}"
    )


def _names() -> dict[Backend, Collection[str]]:
    """Return the names of environments of each back end that is installed."""
    names: dict[Backend, Collection[str]] = {"procgen": envpool.GAMES}
    if importlib.util.find_spec("envpool") is not None:
        families = envpool.task_families()
        names["envpool"] = sorted(task for task in families if families[task] != envpool.PROCGEN)
    names["gymnasium"] = sorted(gym.registry)
    return names


def episode_limit(config: EnvConfig) -> int | None:
    """Return the number of steps after which the environment truncates; None without a limit.

    Raises:
        ValueError: an unknown id or option.
    """
    backend, name = resolve(config.id)
    if backend == "procgen":
        return None
    if backend == "envpool":
        options = envpool.task_options(name, config.options)
        return envpool.make_spec(name, options).config.max_episode_steps
    given = config.options.get("max_episode_steps")
    limit = gym.registry[name.rpartition(":")[2]].max_episode_steps if given is None else int(given)
    return limit if limit and limit > 0 else None


def list_envs(pattern: str = "*") -> list[str]:
    """List the ids of environments that can be trained.

    Args:
        pattern: Part of a name, with * and ? as wildcards; upper and lower case are the same.
    """
    ids = [f"{backend}:{name}" for backend, names in _names().items() for name in names]
    return [env_id for env_id in ids if fnmatch.fnmatchcase(env_id.lower(), f"*{pattern.lower()}*")]
