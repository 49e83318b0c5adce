"""A user's own vector environment with Gymnasium's `VectorEnv` interface. Kind: effects.

Where an episode ends, such an environment does one of three things; its
`metadata["autoreset_mode"]` says which:

- `SAME_STEP`: it resets in the step of the end, and hands the last observation over in
  `info["final_obs"]`.
- `NEXT_STEP`: its next step ignores the action and returns the first observation. That row is no
  transition, and must not be learned from. Here it never comes: the ended environments are reset
  right after the step of the end, by
  `reset(options={"reset_mask": ended})`, which Gymnasium's own vector environments and EnvPool
  understand.
- `DISABLED`: it waits for that very call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from phasicrl.envs.bridge import BatchReader, NumpyStep
from phasicrl.envs.interface import ALWAYS, MASK, Fault, answer, describe, interface_of_spaces
from phasicrl.envs.protocol import EnvError, ExactState
from phasicrl.masks import find_blocked
from phasicrl.spaces import ActionLayout, check_spaces, choices

MakeVectorEnv = Callable[[int], gym.vector.VectorEnv[Any, Any, Any]]
"""Makes a vector environment of so many environments."""

REMEDY = "repair the vector environment"
WANTED = (
    "num_envs", "single_observation_space", "single_action_space", "metadata",
    "reset", "step", "close",
)  # fmt: skip
"""What is used of Gymnasium's interface."""
RETURNS = {"reset": "(obs, info)", "step": "(obs, reward, terminated, truncated, info)"}
"""What its calls must return."""


class OwnVectorEnv:
    """A vector environment of a user's own; a `NumpyEnv`.

    It is reset when it is made, to see whether `info` holds masks; the first `reset` returns that.
    """

    def __init__(
        self,
        make_vector_env: MakeVectorEnv,
        *,
        num_envs: int,
        seed: int,
        first_env: int = 0,
        name: str,
        action_masks: bool = True,
    ) -> None:
        """Make it; `first_env` is the number of its first environment among those of all ranks.

        It is reset with `seed + first_env`, from which Gymnasium counts on. Without `action_masks`
        its masks are left unread.

        Raises:
            ValueError: it is no such environment, of another size, with spaces or a way to reset
                that are not supported.
            EnvError: it cannot be made or reset.
        """
        self.name, self.num_envs = name, num_envs
        self.exact_state: ExactState = "none"
        self._vector = _made(name, make_vector_env, num_envs)
        self._mode = _autoreset_mode(name, self._vector)
        self._space = self._vector.single_observation_space
        interface = interface_of_spaces(name, self._space, self._vector.single_action_space)
        self.observation_space = interface.observation_space
        self.action_space = interface.action_space
        check_spaces(name, self.observation_space, self.action_space)
        self._actions, self._widths = ActionLayout(self.action_space), choices(self.action_space)
        self._reader = BatchReader(name, self.observation_space, num_envs, remedy=REMEDY)
        obs, info = self._call("reset", seed=seed + first_env)
        self._first: tuple[Any, dict[str, Any]] | None = obs, info
        self._source = interface.mask_source
        if self._source is None and self._widths and MASK in info:
            self._source = "info"
        self.has_masks, self._reads_masks = self._source is not None, action_masks
        self.mask_size = sum(self._widths) if self.has_masks and action_masks else 0

    def reset(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Start every environment anew; the first time, return what it said when it was made."""
        (obs, info), self._first = self._first or self._call("reset"), None
        self._reader.num_steps = 0
        return self._reader.obs(obs, "reset").copy(), self._checked(self._mask(obs, info))

    def step(self, action: np.ndarray) -> NumpyStep:
        """Step every environment with its action `[B]` or `[B, K]`; reset what ended."""
        given = self._actions.unflatten(action)
        obs, reward, terminated, truncated, info = self._call("step", given)
        self._reader.num_steps += 1
        stored = self._reader.obs(obs, "step").copy()
        reward = self._reader.reward(self._row("rewards", reward, np.float32))
        terminated = self._row("terminated", terminated, np.bool_)
        truncated = self._row("truncated", truncated, np.bool_)
        ended, final_obs = terminated | truncated, None
        if not ended.any():
            mask = self._mask(obs, info)
        elif self._mode is AutoresetMode.SAME_STEP:
            final_obs, mask = stored.copy(), self._mask(obs, info)
            last = self._final(info, ended)
            final_obs[ended] = self._reader.obs(last, "step", np.flatnonzero(ended))
        else:
            final_obs, mask = stored, self._mask(obs, info, of=~ended)
            obs, info = self._reset_alone(ended, stored)
            first = self._reader.obs(obs, "reset")
            stored = np.where(ended.reshape(-1, *[1] * (stored.ndim - 1)), first, stored)
            first_mask = self._mask(obs, info, of=ended)
            if mask is not None and first_mask is not None:
                mask[ended] = first_mask[ended]
        return NumpyStep(stored, reward, terminated, truncated, final_obs, self._checked(mask), {})

    def close(self) -> None:
        """Close it."""
        if not getattr(self._vector, "closed", False):
            self._vector.close()

    def _call(self, call: str, *args: Any, **kwargs: Any) -> Any:
        """Call it, and say in words what it raises or returns."""
        try:
            *rest, info = answer(getattr(self._vector, call)(*args, **kwargs), RETURNS[call])
            if info is not None and not isinstance(info, Mapping):
                raise Fault(f"returned {describe(info)} as its info; a dict was expected")
            return *rest, info or {}
        except Fault as error:
            self._refuse(f"{call}() {error}")
        except (Exception, SystemExit) as error:
            self._refuse(f"{call}() raised {type(error).__name__}: {error}")

    def _row(self, what: str, values: Any, dtype: type[np.generic]) -> np.ndarray:
        """A copy of one number for each environment."""
        row, shape = np.array(values, dtype=dtype), (self.num_envs,)
        if row.shape != shape:
            self._refuse(f"step() returned {what} of shape {row.shape}; {shape} was expected")
        return row

    def _final(self, info: Mapping[str, Any], ended: np.ndarray) -> Any:
        """The last observations of the ended episodes, as a batch of the space."""
        finals = info.get("final_obs")
        if finals is None:
            text = "step() ended an episode without info['final_obs'], which SAME_STEP promises"
            self._refuse(text)
        if not isinstance(finals, np.ndarray) or finals.dtype != object:
            parts = iterate(batch_space(self._space, self.num_envs), finals)  # of all
            finals = [part for part, end in zip(parts, ended, strict=True) if end]
        else:
            finals = list(finals[ended])
        return concatenate(self._space, finals, create_empty_array(self._space, len(finals)))

    def _reset_alone(self, ended: np.ndarray, stored: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Reset the ended environments, and look whether the others were left as they are."""
        obs, info = self._call("reset", options={"reset_mask": ended.copy()})
        if not np.array_equal(self._reader.obs(obs, "reset")[~ended], stored[~ended]):
            self._refuse(
                f"its autoreset mode is {self._mode.name}, and reset(options={{'reset_mask': …}}) "
                "resets other environments too; make it with autoreset_mode=SAME_STEP"
            )
        return obs, info

    def _mask(
        self, obs: Any, info: Mapping[str, Any], of: np.ndarray | None = None
    ) -> np.ndarray | None:
        """The masks `[B, mask_size]` that came with observations; those in `of` must be there."""
        if self._source is None and self._reads_masks and self._widths and MASK in info:
            self._refuse(f"gave an {MASK!r} in its info, where reset() had given none; {ALWAYS}")
        if not self.mask_size:
            return None
        mask = (obs if self._source == "observation" else info).get(MASK)
        shape = (self.num_envs, self.mask_size)
        if of is not None and not of.any():
            return np.zeros(shape, dtype=bool)
        if mask is None or np.shape(mask) != shape or not np.isin(mask, (0, 1)).all():
            given = "none" if mask is None else f"shape {np.shape(mask)}, {np.asarray(mask).dtype}"
            self._refuse(f"gave action masks of {given}; {shape} of True and False were expected")
        return np.array(mask, dtype=bool)

    def _checked(self, mask: np.ndarray | None) -> np.ndarray | None:
        """The same masks, each of which allows something."""
        blocked = None if mask is None else find_blocked(self._widths, mask)
        if blocked is not None:
            index, component = blocked
            text = f"gave an action mask that allows nothing in component {component}"
            self._refuse(f"environment {index} {text}, at step {self._reader.num_steps}")
        return mask

    def _refuse(self, text: str) -> NoReturn:
        raise EnvError(f"{self.name}: {text}; {REMEDY}")


def _made(name: str, make_vector_env: MakeVectorEnv, num_envs: int) -> Any:
    """Make the vector environment, and look whether it is one of that size."""
    if not callable(make_vector_env):
        given = describe(make_vector_env)
        raise ValueError(f"{name}: make_vector_env is {given}; expected a function of num_envs")
    try:
        vector = make_vector_env(num_envs)
    except (Exception, SystemExit) as error:
        raise EnvError(f"{name} cannot be made: {type(error).__name__}: {error}") from error
    missing = ", ".join(attribute for attribute in WANTED if not hasattr(vector, attribute))
    if missing:
        made = f"{name}: make_vector_env made {describe(vector)} without {missing}"
        raise ValueError(f"{made}; Gymnasium's VectorEnv interface was expected")
    if vector.num_envs != num_envs:
        vector.close()
        made = f"{name}: make_vector_env({num_envs}) made {vector.num_envs} environments"
        raise ValueError(f"{made}; make as many as it is asked for")
    return vector


def _autoreset_mode(name: str, vector: Any) -> AutoresetMode:
    """What it does at the end of an episode."""
    given = vector.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(given)
    except ValueError:
        vector.close()
        what = f"metadata['autoreset_mode'] of the vector environment is {given!r}"
        raise ValueError(f"{name}: {what}; expected one of {list(AutoresetMode)}") from None
