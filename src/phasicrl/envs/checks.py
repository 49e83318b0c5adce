"""Checks of Gymnasium environments, and a wrapper that applies them. Kind: effects.

Gymnasium 1.4.0 does not check the values that an environment returns: NaN passes, dtypes are cast,
and a reset overwrites `final_obs` if the environment has one buffer for all observations.
"""

import contextlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from phasicrl.envs.protocol import EnvError
from phasicrl.masks import find_first_blocked, flatten_mask, to_numeric
from phasicrl.seeding import env_seeds
from phasicrl.spaces import (
    ActionLayout,
    ObservationLayout,
    check_spaces,
    find_extra_keys,
    get_nvec,
    map_leaves,
    take_first,
    to_array,
    to_float32_space,
)

MakeEnv = Callable[[], "gym.Env[Any, Any]"]
ObsInfo = tuple[np.ndarray, dict[str, Any]]
MaskSource = Literal["observation", "method", "info"]

MASK = "action_mask"
"""Key of the mask in an observation or an `info`."""

_TIME_LIMIT_STEPS = "_elapsed_steps"
"""Attribute with which Gymnasium's `TimeLimit` counts the steps of an episode."""
_RESULT_TUPLES = {2: "(obs, info)", 5: "(obs, reward, terminated, truncated, info)"}
REMEDY = "repair the environment; gymnasium.utils.env_checker.check_env helps to find faults"
CLIP_REMEDY = "action.squash clip keeps actions in their bounds"
MASK_REMEDY = "return a mask with every reset and step; it may allow everything"


@dataclass(frozen=True, slots=True)
class EnvProperties:
    """Spaces, and source of action masks, that all environments of one kind share.

    Attributes:
        observation_space: observation space without the mask, with float32 in place of other
            floats.
        action_space: action space of one environment.
        mask_source: source of masks: the entry `action_mask` of the observation (a `Dict`), the
            method `action_masks()`, or the entry `action_mask` of `info`. None without masks.
        use_masks: whether the agent uses masks.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_source: MaskSource | None
    use_masks: bool = True

    @property
    def mask_size(self) -> int:
        """Width of the masks; 0 if there are none, or they are not used."""
        return sum(get_nvec(self.action_space)) if self.use_masks and self.mask_source else 0


class Invalid(Exception):
    """Invalid value from an environment; the text follows the name of the call in the message."""


@contextlib.contextmanager
def convert_errors(call_name: str, get_violation: Callable[[], str] = str) -> Iterator[None]:
    """Raise an environment's exceptions as `EnvError`, a missing package as `ImportError`.

    Args:
        call_name: name of the call.
        get_violation: function that describes the action outside of its bounds; "" without one.
    """
    try:
        yield
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        name = (isinstance(error, ModuleNotFoundError) and error.name) or ""
        package = name.partition(".")[0].replace("_", "-")
        hint = f". pip install {package}, or set PYTHONPATH" * bool(name)
        text = f"{call_name} needs a package that is not installed: {error}{hint}"
        raise ImportError(text) from error
    except EnvError:
        raise
    except Invalid as error:
        raise EnvError(f"{call_name} {error}; repair the environment") from None
    except (Exception, SystemExit) as error:
        violation = get_violation()
        hint = f"; the action {violation}: {CLIP_REMEDY}" if violation else ""
        raise EnvError(f"{call_name} raised {type(error).__name__}: {error}{hint}") from error


def close_env(name: str, env: Any) -> None:
    """Close an environment or vector environment; warn if its `close()` raises."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        text = f"{name}: close() raised {type(error).__name__}: {error}, which is ignored"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def has_mask(info: Mapping[str, Any], *envs: object) -> bool:
    """Return whether an `info` has action masks.

    Raises:
        Invalid: it has them by the name `action_masks`, or only a method of an environment has.
    """
    if f"{MASK}s" in info and MASK not in info:
        raise Invalid(f"returned '{MASK}s' in info; expected {MASK!r}, or env.action_masks False")
    if MASK not in info and any(hasattr(env, f"{MASK}s") for env in envs):
        raise Invalid(f"returned no {MASK!r} in info; expected it, from {MASK}s()")
    return MASK in info


def refuse_late_mask(info: Mapping[str, Any]) -> None:
    """Refuse action masks that begin after `reset`.

    Raises:
        Invalid: the `info` has them.
    """
    if has_mask(info):
        raise Invalid(f"returned an {MASK!r} that reset() did not return; {MASK_REMEDY}")


def inspect_env(name: str, make_env: MakeEnv, *, use_masks: bool = True) -> EnvProperties:
    """Make one environment, and return its spaces and where its action masks are.

    Raises:
        ValueError: the observation or action space is not supported.
        ImportError: the environment needs a package that is missing.
        EnvError: the result is not a Gymnasium environment, or it cannot be made or reset.
    """
    with convert_errors(f"{name}: make_env()"):
        env = make_env()
        if not isinstance(env, gym.Env):
            given = f"returned an object of type {type(env).__name__}"
            hint = "the older `gym` is another package; make_vector_env takes vector environments"
            raise Invalid(f"{given}; expected a gymnasium.Env ({hint})")
    try:
        properties = make_properties(name, env)
        source = properties.mask_source
        if source is None and get_nvec(properties.action_space):
            if env.has_wrapper_attr("action_masks"):
                source = "method"
            else:
                with convert_errors(f"{name}: reset() of a first environment"):
                    _, info = check_tuple(env.reset(seed=0), 2)
                    source = "info" if use_masks and has_mask(info) else None
        return replace(properties, mask_source=source, use_masks=use_masks)
    finally:
        close_env(name, env)


def warn_of_extra_obs_keys(name: str, properties: EnvProperties, obs: Any) -> bool:
    """Warn of entries of an observation that its space lacks; return whether there are any."""
    ignored = MASK if properties.mask_source == "observation" else ""
    found = find_extra_keys(properties.observation_space, obs)
    if extra := [key for key in found if key != ignored]:
        text = f"{name}: observations have {', '.join(map(repr, extra))}, which observation_space"
        warnings.warn(f"{text} lacks; the agent does not see it. Add it", stacklevel=2)
    return bool(extra)


def make_properties(name: str, envs: Any, prefix: str = "") -> EnvProperties:
    """Make the properties of environments from their spaces, whose names have a prefix.

    Raises:
        ValueError: a space is missing or not supported.
    """
    mask_source: MaskSource | None = None
    spaces: Any = (getattr(envs, f"{prefix}{x}_space", None) for x in ("observation", "action"))
    space, action_space = spaces
    # Masks apply to discrete components only.
    if get_nvec(action_space) and isinstance(space, gym.spaces.Dict) and MASK in space.spaces:
        mask_source = "observation"
        space = gym.spaces.Dict([(key, part) for key, part in space.spaces.items() if key != MASK])
    space = to_float32_space(space)
    check_spaces(name, space, action_space)
    return EnvProperties(space, action_space, mask_source)


def check_tuple(result: Any, size: int) -> tuple[Any, ...]:
    """Check the tuple that a reset (2 values) or a step (5) returned; return it.

    The last value, `info`, becomes a dict if it is None.

    Raises:
        Invalid: the result is not a tuple of that size, or its `info` is not a dict.
    """
    if not isinstance(result, tuple) or len(result) != size:
        given = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise Invalid(f"returned {given}; expected {_RESULT_TUPLES[size]}")
    if not hasattr(info := {} if result[-1] is None else result[-1], "get"):
        raise Invalid(f"returned info {info!r:.80} of type {type(info).__name__}; expected a dict")
    return *result[:-1], info


def _get_generator_state(env: Any) -> Any:
    """Return the state of an environment's random generator, or a generator that is not NumPy's."""
    generator = getattr(env.unwrapped, "np_random", None)
    is_numpy = isinstance(generator, np.random.Generator)
    return generator.bit_generator.state if is_numpy else generator


class CheckedEnv(gym.Env[Any, Any]):
    """Wrapper of one environment that copies, packs and checks its observations.

    Its spaces are those of stored observations and flat actions; `info`, which may be sent between
    processes, has only the flat mask. The environment is made at the first reset. Errors raise
    an `EnvError`; with `can_restart`, an error truncates the episode instead, the next episode
    begins in a new environment with a seed derived from the old one, and `info["restarted"]` is the
    error.

    Attributes:
        error_types: kinds of exceptions that are the environment's; in a separate process, all are.

    Args:
        make_env: function that makes the environment.
        name: name of the environment, for messages.
        can_restart: whether a failed environment is replaced.
        properties: spaces and source of masks.
        index: index among the environments of this process.
    """

    def __init__(
        self, make_env: MakeEnv, name: str, can_restart: bool, properties: EnvProperties, index: int
    ) -> None:
        self._make_env, self._name, self._properties = make_env, name, properties
        self.error_types: tuple[type[BaseException], ...] = (Exception, SystemExit)
        self.env_index = index
        self._can_restart = can_restart
        self._has_extra = False
        self._layout = ObservationLayout(properties.observation_space)
        self._actions = ActionLayout(properties.action_space)
        self._widths = get_nvec(properties.action_space) if properties.use_masks else ()
        # Vector environments use only the shapes and dtypes of these spaces.
        self.observation_space = gym.spaces.Box(0, 1, self._layout.shape, self._layout.dtype.type)
        self.action_space = gym.spaces.Box(0, 1, self._actions.shape, self._actions.dtype.type)
        self.env: Any = None
        self._num_steps = 0
        self._seed: int | None = None
        self._generator: Any = None  # state at the start of the episode; None after a seed

    def reset(self, *, seed: int | None = None, options: Any = None) -> ObsInfo:
        """Reset the environment, made first if there is none; ignore `options`."""
        failure_info: dict[str, str] = {}
        while True:
            try:
                obs, mask = self._make_and_reset_env(seed)
                return obs, mask | failure_info
            except self.error_types as error:
                failure = self._make_error("reset", error)
                if failure_info or not self._can_restart or self.env is None:
                    raise failure from error
            self.close()
            seed, failure_info = None, {"restarted": str(failure)}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step the wrapped environment; return the checked result with a packed observation."""
        self._num_steps += 1
        try:
            batch = self._actions.unflatten(np.asarray(action)[None])
            env_action = take_first(self._properties.action_space, batch)
            obs, reward, terminated, truncated, info = check_tuple(self.env.step(env_action), 5)
            number = to_numeric(reward)
            if number is None or number.size != 1:
                given = f"returned a reward of {type(reward).__name__}: {reward!r:.80}"
                raise Invalid(f"{given}; expected one number")
            reward = float(number.item())
            flags = (x for x in (terminated, truncated) if type(x) not in (bool, np.bool_))
            if any(np.size(x) != 1 or x not in (False, True) for x in flags):
                ends = f"terminated = {terminated!r} and truncated = {truncated!r}"
                raise Invalid(f"returned {ends}; expected True or False")
            # The mask of a final observation is not used.
            mask = {} if terminated or truncated else self._make_mask_info(obs, info)
            self._last_obs = self._pack_copy(obs)
            return self._last_obs, reward, bool(terminated), bool(truncated), mask
        except self.error_types as error:
            violation = self._actions.describe_out_of_bounds(np.asarray(action)[None])
            failure = self._make_error("step", error, violation)
            if not self._can_restart:
                raise failure from error
        self.close()
        return self._last_obs, 0.0, False, True, {"restarted": str(failure)}

    def get_replay_start(self) -> str | None:
        """Return JSON text from which another environment can restore this episode.

        It has the last seed, and the current `get_state()`, random generator and count of
        Gymnasium's TimeLimit if they are JSON and there is a `set_state()`, else the generator's
        state at the start of the episode. None if that is not JSON.
        """
        env, start = self.env, dict[str, Any](seed=self._seed)
        if env is not None and all(map(env.has_wrapper_attr, ("get_state", "set_state"))):
            with contextlib.suppress(Exception):  # of a method with another purpose
                generator = _get_generator_state(env)
                start["generator"] = generator if isinstance(generator, dict) else None
                has_limit = env.has_wrapper_attr(_TIME_LIMIT_STEPS)
                start["steps"] = has_limit and env.get_wrapper_attr(_TIME_LIMIT_STEPS)
                return json.dumps(start | {"state": env.get_wrapper_attr("get_state")()})
        try:
            return json.dumps(start | {"generator": self._generator})
        except TypeError:
            return None

    def restore(self, starts_json: Sequence[str], all_actions: Sequence[np.ndarray]) -> ObsInfo:
        """Replay this environment's episode, and return its current observation and `info`.

        Args:
            starts_json: results of `get_replay_start` of all environments.
            all_actions: actions `[L, …]` of the current episodes of all environments.
        """
        # A restart would lead to another state.
        can_restart, self._can_restart = self._can_restart, False
        start, remaining = json.loads(starts_json[self.env_index]), all_actions[self.env_index]
        _, info = self.reset(seed=start["seed"])
        if "state" in start:
            steps = start.get("steps", len(remaining))  # before `set_state`, which may know better
            self.env.set_wrapper_attr(_TIME_LIMIT_STEPS, steps, force=False)
            with convert_errors(f"{self._name}: set_state() of environment {self.env_index}"):
                set_state, remaining = self.env.get_wrapper_attr("set_state"), []
                env_obs, info = check_tuple(set_state(start["state"]), 2)
                self._last_obs, info = self._pack_copy(env_obs), self._make_mask_info(env_obs, info)
        if isinstance(start.get("generator"), dict):
            self.env.unwrapped.np_random.bit_generator.state = start["generator"]
            info = info if "state" in start else self.reset()[1]
        for action in remaining:
            *_, info = self.step(action)
        self._can_restart = can_restart
        return self._last_obs, info

    def close(self) -> None:
        """Close the environment; the next reset makes another."""
        if self.env is not None:
            close_env(self._name, self.env)
        self.env = None

    def _make_and_reset_env(self, seed: int | None) -> ObsInfo:
        """Start an episode, in a new environment if there is none."""
        if self.env is None:
            if seed is None and self._seed is not None:  # replaces a failed environment
                (seed,) = env_seeds(self._seed, 1)
            self.env = self._make_env()
        self._generator = _get_generator_state(self.env) if seed is None else None
        self._seed = self._seed if seed is None else seed
        obs, info = check_tuple(self.env.reset(seed=seed), 2)
        self._last_obs = self._pack_copy(obs)
        return self._last_obs, self._make_mask_info(obs, info)

    def _pack_copy(self, obs: Any) -> np.ndarray:
        """Return a packed copy of an observation."""
        try:
            space = self._properties.observation_space
            batch = map_leaves(space, lambda value: to_array(value)[None].copy(), obs)
            # At the first reset and step.
            if self.env_index == 0 and self._num_steps < 2 and not self._has_extra:
                self._has_extra = warn_of_extra_obs_keys(self._name, self._properties, obs)
            return self._layout.pack(batch, 1)[0]
        except ValueError as error:
            raise Invalid(f"returned a wrong observation: {error}") from None

    def _make_mask_info(self, obs: Any, info: Any) -> dict[str, Any]:
        """Return the mask of an observation as an `info`; empty without masks."""
        mask_source = self._properties.mask_source
        if not self._widths:
            return {}
        if mask_source is None:
            return refuse_late_mask(info) or {}
        if mask_source == "method":
            given = self.env.get_wrapper_attr("action_masks")()
        else:
            holder = obs if mask_source == "observation" else info
            if not isinstance(holder, Mapping) or MASK not in holder:
                raise Invalid(f"returned no {MASK!r} in its {mask_source}; {MASK_REMEDY}")
            given = holder[MASK]
        try:
            mask = flatten_mask(self._properties.action_space, given)
        except ValueError as error:
            raise Invalid(f"returned {error}") from None
        if blocked := find_first_blocked(self._widths, mask[None]):
            raise Invalid(f"returned a mask that allows nothing in component {blocked[1]}: {mask}")
        return {MASK: mask}

    def _make_error(self, call_name: str, error: BaseException, violation: str = "") -> EnvError:
        raised = "" if isinstance(error, Invalid) else f"raised {type(error).__name__}: "
        location = f"environment {self.env_index}, {call_name}() at step {self._num_steps}"
        hint = f"the action {violation}: {CLIP_REMEDY}; " if raised and violation else ""
        failure = EnvError(f"{self._name}: {location} {raised}{error}; {hint}{REMEDY}")
        if not isinstance(error, Invalid):
            failure.add_note("".join(traceback.format_exception(error)))
        return failure
