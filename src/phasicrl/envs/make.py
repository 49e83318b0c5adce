"""Construction of environments by the back end of their id. Kind: effects."""

import fnmatch
import functools
import importlib.util
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym

from phasicrl.config import EnvConfig
from phasicrl.config_io import suggest_name
from phasicrl.envs import envpool
from phasicrl.envs.bridge import EnvSlice, NumpyVectorEnv
from phasicrl.envs.checks import MakeEnv, convert_errors
from phasicrl.envs.gymnasium import GymnasiumEnv, convert_make_options
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.envs.tensor import TensorVectorEnv, use_torch_seed
from phasicrl.envs.vector import MakeVectorEnv, make_custom_envs
from phasicrl.envs.watchdog import CALL_TIMEOUT, EnvWatchdog
from phasicrl.envs.wrappers import PartialObservation

Backend = Literal["procgen", "envpool", "gymnasium", "mjlab", "gymnax", "pgx"]
SIMULATOR_BACKENDS: tuple[Backend, ...] = ("mjlab", "gymnax", "pgx")
"""Back ends of tensors: modules of this package, with `list_names` and `make_simulator`."""


def make_envs(
    config: EnvConfig,
    *,
    seed: int,
    num_envs: int | None = None,
    first_index: int = 0,
    steps_before: int = 0,
    make_env: MakeEnv | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    whole_games: bool = False,
) -> VectorEnv:
    """Make the environments that `config` describes.

    Args:
        config: options of the environments.
        seed: seed from which the environments' seeds are derived.
        num_envs: number of environments; None for `config.num_envs`.
        first_index: index of the first environment among those of all ranks.
        steps_before: steps of each environment of the run before these are made, from which
            curricula of mjlab and Isaac Lab continue when a first episode has ended.
        make_env: function that makes a custom environment (Gymnasium's `Env`), whose name is then
            `config.id`.
        make_vector_env: function of a number of environments that makes a custom vector
            environment, see `MakeVectorEnv`.
        whole_games: whether to drop EnvPool's options that end episodes early or change rewards.

    Raises:
        ValueError: the id or an option of the environment is unknown, both functions are given, or
            the spaces are not supported.
        ImportError: the back end is not installed, or a module cannot be imported.
    """
    if make_env is not None and make_vector_env is not None:
        raise ValueError("make_env and make_vector_env are both given; expected one of them")
    count = config.num_envs if num_envs is None else num_envs
    local = EnvSlice(count, seed, first_index, steps_before)
    with closing(EnvWatchdog(config.id)) as watchdog:
        watchdog.current_call = "its start", 2 * CALL_TIMEOUT
        if make_vector_env is not None:
            envs = make_custom_envs(make_vector_env, config, local)
        elif make_env is not None:
            envs = GymnasiumEnv(make_env, config.id, config, local)
        else:
            backend, name = resolve_env_id(config.id)
            if backend in SIMULATOR_BACKENDS:
                envs = _make_sim_envs(backend, name, config, local)
            elif backend == "gymnasium":
                envs = GymnasiumEnv(get_gym_maker(name, config), f"gymnasium:{name}", config, local)
            else:
                dropped = envpool.TRAINING_OPTIONS if whole_games else ()
                options = {key: v for key, v in config.options.items() if key not in dropped}
                envs = _make_pool(backend, name, replace(config, options=options), local)
    try:
        return envs if config.observe is None else PartialObservation(envs, config.observe)
    except ValueError:
        envs.close()
        raise


def _make_pool(backend: str, name: str, config: EnvConfig, local: EnvSlice) -> NumpyVectorEnv:
    if backend == "procgen":
        task_id, options = envpool.resolve_procgen_task(name, config)
    else:
        task_id, options = name, envpool.convert_task_options(name, config.options)
    try:
        return envpool.EnvPoolEnv(task_id, f"{backend}:{name}", options, config.num_threads, local)
    except (RuntimeError, TypeError) as error:
        if not config.options:
            raise
        given = f"{backend}:{name}: env.options is {dict(config.options)}"
        rule = f"options that EnvPool accepts ({str(error).splitlines()[0]})"
        raise ValueError(f"{given}; expected {rule}") from error


def _make_sim_envs(backend: str, name: str, config: EnvConfig, local: EnvSlice) -> TensorVectorEnv:
    with use_torch_seed(local):
        try:
            simulator = _import_backend(backend).make_simulator(name, dict(config.options), local)
        except OSError as error:  # of a download, or of its files
            raise EnvError(f"{config.id} cannot be made: {error!r}") from error
    return TensorVectorEnv(simulator, config, local)


def _import_backend(backend: str) -> Any:
    """Import the module of a back end of tensors.

    Raises:
        ImportError: the back end is not installed.
    """
    with convert_errors(f"{backend}: its import"):
        try:
            return importlib.import_module(f"phasicrl.envs.{backend}")
        except ModuleNotFoundError as error:
            raise ImportError(f"{error}. docs/environments.md says how to install it") from None


def get_gym_maker(name: str, config: EnvConfig, **drawing: Any) -> functools.partial[Any]:
    """Return the function that makes a registered environment with `env.options`.

    The name may follow that of a module, as in `MODULE:ID`. Arguments for `drawing` are passed to
    constructors that have them.
    """
    # Use the spec, because other processes do not know ids registered in this one. CheckedEnv
    # checks more than Gymnasium's checker.
    spec = gym.registry.get(name) or gym.spec(name.rpartition(":")[2])
    options = convert_make_options(spec, config.options, **drawing)
    return functools.partial(gym.make, spec, disable_env_checker=True, **options)


def resolve_env_id(env_id: str) -> tuple[Backend, str]:
    """Split an id into its back end and its name there.

    The prefixes are `procgen:`, `envpool:`, `gymnasium:` and those of `SIMULATOR_BACKENDS`;
    `gymnasium:module:Id` imports a module first, which registers the id or has a function or class
    of this name. An id without prefix is searched in Procgen's games, EnvPool and Gymnasium, in
    this order.

    Raises:
        ValueError: the id is unknown; the message has the nearest one.
        ImportError: the back end is missing, or the module cannot be imported.
    """
    prefix, _, name = env_id.partition(":") if ":" in env_id else ("", "", env_id)
    module, _, bare = name.rpartition(":")
    if prefix == "gymnasium" and module:
        with convert_errors(f"env.id {env_id}"):
            found = importlib.import_module(module)
        if not {bare, name} & gym.registry.keys() and hasattr(found, bare):
            gym.register(name, entry_point=name)
    elif prefix == "envpool":
        envpool.import_envpool()  # raises if it is not installed
    if prefix == "gymnasium" and {bare, name} & gym.registry.keys():  # EnvPool is not imported
        return "gymnasium", name
    names_by_backend: dict[Any, Collection[str]] = _list_names_by_backend(prefix)
    for backend, known in names_by_backend.items():
        key = bare.lower() if backend == "procgen" else bare
        if key in known and backend == (prefix or backend):
            return backend, key if backend == "procgen" else name
    ids = {x: f"{k}:{x}" for k in (*names_by_backend, prefix) for x in names_by_backend.get(k, ())}
    has_backend = prefix and not module  # the name may be one of another back end
    hint = suggest_name(bare.replace("NoFrameskip", ""), ids, ids if has_backend else None)
    has_envpool = "envpool" in names_by_backend or prefix in SIMULATOR_BACKENDS
    missing = "" if has_envpool else " EnvPool is not installed: pip install envpool."
    raise ValueError(
        f"env.id is {env_id!r}, an unknown environment{hint}; expected an id behind procgen:, "
        "envpool:, gymnasium:, mjlab:, gymnax: or pgx:. `phasicrl envs` lists known ones. For one "
        "that a module registers write gymnasium:MODULE:ID (gymnasium:ale_py:ALE/Pong-v5 after "
        "`pip install ale-py`), or add `--import MODULE`; for one that a function makes, "
        f"`--make-env MODULE:FUNCTION` or gymnasium:MODULE:FUNCTION.{missing}"
    )


def _list_names_by_backend(backend_prefix: str) -> dict[Backend, Collection[str]]:
    """Return the environments of a back end of tensors, else of the other installed ones, by name.

    Raises:
        ImportError: the back end of tensors is not installed.
    """
    if backend_prefix in SIMULATOR_BACKENDS:
        return {backend_prefix: _import_backend(backend_prefix).list_names()}
    by_backend: dict[Backend, Collection[str]] = {"procgen": envpool.PROCGEN_GAMES}
    if importlib.util.find_spec("envpool") is not None:
        families = envpool.get_family_by_task()
        by_backend["envpool"] = sorted(x for x in families if families[x] != envpool.PROCGEN)
    by_backend["gymnasium"] = sorted(gym.registry)
    return by_backend


def get_time_limit(config: EnvConfig) -> int | None:
    """Return the maximum length of an episode, registered or by `env.options`; None without one.

    Raises:
        ValueError: the id or an option is unknown.
    """
    backend, name = resolve_env_id(config.id)
    if backend in ("procgen", *SIMULATOR_BACKENDS):
        return None
    if backend == "envpool":
        options = envpool.convert_task_options(name, config.options)
        return envpool.make_spec(name, options).config.max_episode_steps
    maker = get_gym_maker(name, config)
    max_steps: int = maker.keywords.get("max_episode_steps", maker.args[0].max_episode_steps or 0)
    return max_steps if max_steps > 0 else None


def list_envs(pattern: str = "*") -> list[str]:
    """List the ids of environments that can be trained.

    Args:
        pattern: Part of an id, with wildcards * and ?, in upper or lower case. One that begins with
            `mjlab:`, `gymnax:` or `pgx:` lists the environments of this back end.
    """
    by_backend = _list_names_by_backend(pattern.partition(":")[0])
    ids = [f"{backend}:{name}" for backend in by_backend for name in by_backend[backend]]
    return [env_id for env_id in ids if fnmatch.fnmatchcase(env_id.lower(), f"*{pattern.lower()}*")]
