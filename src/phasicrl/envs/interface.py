"""What all environments of one kind have in common, found out by making one. Kind: effects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium as gym

from phasicrl.envs.protocol import EnvError
from phasicrl.spaces import as_float32, check_spaces, choices

MakeEnv = Callable[[], "gym.Env[Any, Any]"]
MaskSource = Literal["observation", "method", "info"]

MASK = "action_mask"
"""The key of a mask in an observation or an `info`, an environment's or a guard's."""

MASK_METHOD = "action_masks"
"""The method that says the mask, as sb3-contrib calls it."""


@dataclass(frozen=True, slots=True)
class Interface:
    """What is the same in all environments of one kind.

    Attributes:
        observation_space: the environment's without its mask, with float32 in place of other
            floats.
        action_space: the environment's.
        mask_source: where the environment says which actions are allowed: in the entry
            `action_mask` of its observation (a `Dict`), by its method `action_masks()`, or in the
            entry `action_mask` of its `info`. None if it does not.
        reads_masks: whether anybody wants to know.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    mask_source: MaskSource | None
    reads_masks: bool = field(default=True, compare=False)


REMEDY = "gymnasium.utils.env_checker.check_env helps to find such faults"
ALWAYS = "give one with every reset and step, which may allow everything"
"""The remedy for masks that come late: a policy has them from the first observation or never."""


class Fault(Exception):
    """An environment returned what it must not."""

    def __init__(self, text: str, remedy: str = REMEDY) -> None:
        super().__init__(text)
        self.remedy = remedy


def probe(name: str, make_env: MakeEnv) -> Interface:
    """Make one environment to learn its interface, and refuse spaces that are not supported."""
    if not callable(make_env):
        given = describe(make_env)
        raise ValueError(f"{name}: make_env is {given}; expected a function that makes one")
    try:
        env = make_env()
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ImportError(f"{name} needs a package that is not installed: {error}") from error
    except (Exception, SystemExit) as error:
        raise EnvError(f"{name} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(env, gym.Env):
        made = f"{name}: make_env made {describe(env)}"
        raise ValueError(f"{made}; expected a gymnasium.Env (the older `gym` is another package)")
    with contextlib.closing(env):
        interface = interface_of(name, env)
        check_spaces(name, interface.observation_space, interface.action_space)
        if interface.mask_source is not None or not choices(interface.action_space):
            return interface
        try:
            _, info = answer(env.reset(seed=0), "(obs, info)")
        except (Exception, SystemExit) as error:
            words = str(error) if isinstance(error, Fault) else f"{type(error).__name__}: {error}"
            where = "reset() of the environment that was made to learn the spaces"
            raise EnvError(f"{name}: {where}: {words}; repair the environment") from error
        has_mask = isinstance(info, Mapping) and MASK in info
        return replace(interface, mask_source="info" if has_mask else None)


def interface_of(name: str, env: gym.Env[Any, Any]) -> Interface:
    """The interface of an environment as far as it is known without a reset."""
    spaces = (getattr(env, "observation_space", None), getattr(env, "action_space", None))
    interface = interface_of_spaces(name, *spaces)
    may_have_mask = interface.mask_source is None and choices(interface.action_space)
    if may_have_mask and env.has_wrapper_attr(MASK_METHOD):
        return replace(interface, mask_source="method")
    return interface


def interface_of_spaces(name: str, space: Any, actions: Any) -> Interface:
    """What the spaces alone say of an interface."""
    if not isinstance(space, gym.Space) or not isinstance(actions, gym.Space):
        given = f"observation_space is {describe(space)} and action_space {describe(actions)}"
        raise ValueError(f"{name}: {given}; expected Gymnasium spaces")
    source: MaskSource | None = None
    # There is nothing to mask in numbers.
    if choices(actions) and isinstance(space, gym.spaces.Dict) and MASK in space.spaces:
        source = "observation"
        space = gym.spaces.Dict([(key, part) for key, part in space.spaces.items() if key != MASK])
    return Interface(as_float32(space), actions, source)


def answer(result: Any, expected: str) -> tuple[Any, ...]:
    """What a call returned, refusing anything but a tuple of as many as expected."""
    if not isinstance(result, tuple) or len(result) != expected.count(",") + 1:
        raise Fault(f"returned {describe(result)}; {expected} was expected")
    return result


def describe(value: Any) -> str:
    """A value in a few words, for an error message."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"an object of type {type(value).__name__}"
