"""One environment with everything it returns copied and packed. Kind: effects.

Gymnasium 1.4.0 checks nothing of what an environment returns: NaN passes, dtypes are cast, and an
environment that writes its observations into one buffer overwrites its own `final_obs` with the
reset.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.envs.interface import (
    ALWAYS,
    MASK,
    MASK_METHOD,
    Fault,
    Interface,
    MakeEnv,
    answer,
    interface_of,
)
from phasicrl.masks import find_blocked, flatten_mask
from phasicrl.seeding import env_seeds
from phasicrl.spaces import ActionLayout, ObservationLayout, choices, map_leaves


class GuardedEnv(gym.Env[Any, Any]):
    """One environment with everything it returns copied and packed.

    It raises nothing: a fault, such as an array of another shape or dtype, is reported in `info`.
    Numbers that are not usable are found in the batch of all environments.

    Its own spaces are those of the trainer: a stored observation and a flat action. `info` holds
    the flat mask and is otherwise empty: the trainer reads nothing from it, and it would travel
    between processes. The environment is made at the first reset, so that a failure of that is a
    fault like any other, under the same deadline.

    With `restarts` a fault ends the episode where it was, as truncated, and the next one begins in
    a new environment; `info` then says "restarted" and why. Its seed follows from that of the old.
    """

    def __init__(
        self, make_env: MakeEnv, name: str, restarts: bool, index: int, interface: Interface
    ) -> None:
        """Guard environment `index`, which must have the given interface."""
        self._make_env, self._name, self._interface = make_env, name, interface
        self.env_index, self._restarts = index, restarts
        self._layout = ObservationLayout(interface.observation_space)
        self._actions = ActionLayout(interface.action_space)
        self._widths = choices(interface.action_space)
        self.observation_space = _any_array(self._layout.shape, self._layout.dtype)
        self.action_space = _any_array(self._actions.shape, self._actions.dtype)
        self._env: gym.Env[Any, Any] | None = None
        self._num_steps = 0
        self._last_obs = self._blank_obs()
        self._seed: int | None = None
        self._generator: Any = None  # its state when the episode began; None if a seed began it

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset, making the environment if that was not done."""
        try:
            return self._begin(seed, options)
        except (Exception, SystemExit) as error:
            report = self._report("reset", error)
        if self._restarts and self._env is not None:  # it could be made
            self._drop()
            try:
                obs, info = self._begin(None, options)
                return obs, info | {"restarted": report["fault"]}
            except (Exception, SystemExit) as error:
                report = self._report("reset", error)
        return self._blank_obs(), report

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Step, checking what comes back."""
        self._num_steps += 1
        try:
            if self._env is None:
                raise Fault("was called before reset()")
            batch = self._actions.unflatten(np.asarray(action)[None])
            own_action = map_leaves(self._interface.action_space, lambda part: part[0], batch)
            expected = "(obs, reward, terminated, truncated, info)"
            obs, reward, terminated, truncated, info = answer(self._env.step(own_action), expected)
            reward = _number(reward)
            if terminated not in (False, True) or truncated not in (False, True):
                ends = f"terminated = {terminated!r} and truncated = {truncated!r}"
                raise Fault(f"returned {ends}; True or False was expected")
            # Nobody acts on the last observation of an episode, and often nothing is allowed there.
            mask = {} if terminated or truncated else self._mask(obs, info)
            self._last_obs = self._stored(obs)
            return self._last_obs, reward, bool(terminated), bool(truncated), mask
        except (Exception, SystemExit) as error:
            report = self._report("step", error)
        if not self._restarts or self._env is None:
            return self._blank_obs(), 0.0, False, False, report
        self._drop()
        return self._last_obs, 0.0, False, True, {"restarted": report["fault"]}

    def replay_path(self) -> str | None:
        """Return how another can be brought here, as JSON.

        It holds the seed that was given last, and the environment's `get_state()`, if it has that
        and `set_state()`. Else, or if these are for something else (they want arguments, raise, or
        return what JSON does not hold), the state of its generator when the episode began: the
        actions since then lead here. None if JSON does not hold that, as of another generator.
        """
        env, start = self._env, {"seed": self._seed}
        if env is not None and all(map(env.has_wrapper_attr, ("get_state", "set_state"))):
            with contextlib.suppress(Exception):
                return json.dumps(start | {"state": env.get_wrapper_attr("get_state")()})
        try:
            return json.dumps(start | {"generator": self._generator})
        except TypeError:
            return None

    def restore(
        self, paths: Sequence[str], actions: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Follow a path that `replay_path` returned and the actions since then.

        Args:
            paths: of all environments, by their index.
            actions: likewise, `[L, …]` each.

        Returns:
            The observation and `info` to which they lead.
        """
        restarts, self._restarts = self._restarts, False  # a new one would be at another place
        path = json.loads(paths[self.env_index])
        result = self._follow(path, actions[self.env_index])
        self._restarts = restarts
        return result

    def _follow(
        self, start: dict[str, Any], actions: np.ndarray
    ) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = self.reset(seed=start["seed"])
        try:
            if "state" in start and self._env is not None:
                set_state = self._env.get_wrapper_attr("set_state")
                its_obs, its_info = answer(set_state(start["state"]), "(obs, info)")
                return self._stored(its_obs), self._mask(its_obs, its_info)
            if start["generator"] is not None and self._env is not None:
                self._env.unwrapped.np_random.bit_generator.state = start["generator"]
                obs, info = self.reset()
        except (Exception, SystemExit) as error:
            return self._blank_obs(), self._report("set_state", error)
        for action in actions:
            if "fault" not in info:
                obs, *_, info = self.step(action)
        return obs, info

    @property
    def unwrapped(self) -> gym.Env[Any, Any]:
        """The environment itself, once it is made."""
        return self if self._env is None else self._env.unwrapped

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            with contextlib.suppress(Exception):  # must not hide the fault that led here
                self._env.close()

    def _begin(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode, in a new environment if there is none."""
        if self._env is None:
            if seed is None and self._seed is not None:  # the place of another, which failed
                (seed,) = env_seeds(self._seed, 1)
            self._env = self._make()
        self._seed = self._seed if seed is None else seed
        self._generator = None
        if seed is None:  # one that is not NumPy's is kept itself, which JSON does not hold
            generator: Any = self._env.unwrapped.np_random
            is_known = isinstance(generator, np.random.Generator)
            self._generator = generator.bit_generator.state if is_known else generator
        obs, info = answer(self._env.reset(seed=seed, options=options), "(obs, info)")
        self._last_obs = self._stored(obs)
        return self._last_obs, self._mask(obs, info)

    def _drop(self) -> None:
        """Close the environment, whose place another takes."""
        self.close()
        self._env = None

    def _make(self) -> gym.Env[Any, Any]:
        """Make the environment, and compare its interface with the first one's."""
        env, expected = self._make_env(), self._interface
        if expected.mask_source == "info":  # seen only by a reset
            expected = replace(expected, mask_source=None)
        made = interface_of(self._name, env)
        if made != expected:
            what = f"made an environment with other spaces, {made}"
            raise Fault(f"{what}, than the first one's, {expected}")
        return env

    def _stored(self, obs: Any) -> np.ndarray:
        """A copy of an observation as it is stored."""
        try:
            batch = map_leaves(self._interface.observation_space, _batch_of_one, obs)
            stored = self._layout.pack(batch, 1)
        except ValueError as error:
            raise Fault(f"returned {error}") from None
        return stored[0]

    def _mask(self, obs: Any, info: Any) -> dict[str, Any]:
        """What is allowed in an observation, in the form of an `info`; empty without masks."""
        source = self._interface.mask_source
        if self._env is None or not self._interface.reads_masks:
            return {}
        if source is None:
            if self._widths and isinstance(info, Mapping) and MASK in info:
                raise Fault(f"gave an {MASK!r} in its info, where it had none at first", ALWAYS)
            return {}
        each = "at least one of them true for each discrete component, at every step"
        remedy = f"give a mask of {sum(self._widths)} values, {each}"
        if source == "method":
            given = self._env.get_wrapper_attr(MASK_METHOD)()
        else:
            holder = obs if source == "observation" else info
            if not isinstance(holder, Mapping) or MASK not in holder:
                text = f"returned no {MASK!r} in its {source}, where it had one at first"
                raise Fault(text, remedy)
            given = holder[MASK]
        try:
            mask = flatten_mask(self._interface.action_space, given)
        except ValueError as error:
            raise Fault(f"gave {error}", remedy) from None
        blocked = find_blocked(self._widths, mask[None])
        if blocked is not None:
            text = f"gave an action mask that allows nothing in component {blocked[1]}: {mask}"
            raise Fault(text, remedy)
        return {MASK: mask}

    def _blank_obs(self) -> np.ndarray:
        return np.zeros(self._layout.shape, self._layout.dtype)

    def _report(self, call: str, error: BaseException) -> dict[str, Any]:
        """What `info` says about a fault."""
        where = f"{self._name}: environment {self.env_index}, {call}() at step {self._num_steps}"
        if isinstance(error, Fault):
            return {"fault": f"{where}: {error}; {error.remedy}", "traceback": ""}
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name}"
        text = f"{where}: {type(error).__name__}: {error} ({place}); repair the environment"
        return {"fault": text, "traceback": "".join(traceback.format_exception(error))}


def _number(reward: Any) -> float:
    """A reward, which may come in brackets, as of computations with arrays."""
    try:
        return float(np.asarray(reward).item())
    except (TypeError, ValueError):
        raise Fault(f"returned the reward {reward!r}; one number was expected") from None


def _batch_of_one(value: Any) -> np.ndarray:
    """A copy of one value `[…]` as `[1, …]`."""
    try:
        return np.array(value)[None]
    except ValueError as error:
        raise ValueError(f"an observation that is no array ({error})") from None


def _any_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> gym.spaces.Box:
    """A space of all arrays of a shape and dtype."""
    low, high = -np.inf, np.inf
    if dtype.kind != "f":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return gym.spaces.Box(low, high, shape, dtype.type)
