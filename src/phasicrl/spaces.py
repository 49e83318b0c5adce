"""Spaces of observations and actions: their parts, what of them is supported, and the checks that every back end shares. Kind: pure."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

SUPPORTED_OBSERVATIONS = "pictures (Box, uint8, height × width × channels or channels first) and vectors (Box, float)"
SUPPORTED_ACTIONS = "Discrete"


Path = tuple[str | int, ...]
"""Where a part lies in a tree of `Dict` (keys) and `Tuple` (numbers) spaces."""


def leaves(space: gym.Space[Any], path: Path = ()) -> list[tuple[Path, gym.Space[Any]]]:
    """The parts of a space that are neither `Dict` nor `Tuple`, in order, with the path to each."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in leaves(part, (*path, key))]
    if isinstance(space, gym.spaces.Tuple):
        return [leaf for index, part in enumerate(space.spaces) for leaf in leaves(part, (*path, index))]
    return [(path, space)]


def choices(space: gym.Space[Any]) -> tuple[int, ...]:
    """How many options each discrete component of an action space has, in order: `Discrete(5)` (5,), `MultiBinary(2)` (2, 2), `Box` none.

    Their sum is the width of an action mask.
    """
    widths: list[int] = []
    for _, leaf in leaves(space):
        if isinstance(leaf, gym.spaces.Discrete):
            widths.append(int(leaf.n))
        elif isinstance(leaf, gym.spaces.MultiDiscrete):
            widths += [int(n) for n in leaf.nvec.flatten()]
        elif isinstance(leaf, gym.spaces.MultiBinary):
            widths += [2] * int(np.prod(leaf.n))
    return tuple(widths)


def check_spaces(name: str, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
    """Refuse spaces that no network here can read or act in.

    Raises:
        ValueError: which space it is, and what is supported.
    """
    box = observation_space if isinstance(observation_space, gym.spaces.Box) else None
    is_picture = box is not None and box.dtype == np.uint8 and len(box.shape) == 3
    is_vector = box is not None and box.dtype.kind == "f" and len(box.shape) == 1
    if not is_picture and not is_vector:
        raise ValueError(f"{name}: observations of the kind {observation_space} are not supported; supported: {SUPPORTED_OBSERVATIONS}")
    if not isinstance(action_space, gym.spaces.Discrete):
        raise ValueError(f"{name}: actions of the kind {action_space} are not supported yet; supported: {SUPPORTED_ACTIONS}")


def check_action(name: str, space: gym.Space[Any], action: np.ndarray, num_envs: int) -> None:
    """Refuse a batch of actions `[B]` that the environments would misread.

    Raises:
        ValueError: not integers, not one for each environment, or outside of the action space.
    """
    if not isinstance(action, np.ndarray) or action.dtype.kind not in "iu" or action.shape != (num_envs,):
        given = f"{action.dtype}, shape {action.shape}" if isinstance(action, np.ndarray) else f"a {type(action).__name__}"
        raise ValueError(f"{name}: the actions are {given}; a NumPy array of integers, shape ({num_envs},), was expected")
    num_actions = int(getattr(space, "n", 0))
    outside = (action < 0) | (action >= num_actions)
    if outside.any():
        index = int(np.argmax(outside))
        raise ValueError(f"{name}: action {action[index]} for environment {index} is outside of 0 … {num_actions - 1}")


def as_float32(space: gym.Space[Any]) -> gym.Space[Any]:
    """The same space, with float32 in place of other floats."""
    if not isinstance(space, gym.spaces.Box) or space.dtype == np.float32 or np.dtype(space.dtype).kind != "f":
        return space
    limit = np.finfo(np.float32).max
    low, high = (np.where(np.isinf(bound), bound, np.clip(bound, -limit, limit)).astype(np.float32) for bound in (space.low, space.high))
    return gym.spaces.Box(low, high, dtype=np.float32)


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """One seed of 31 bits for each environment; pools with neighbouring seeds share none, unlike with `seed + index`."""
    return [int(word) >> 1 for word in np.random.SeedSequence(seed).generate_state(num_envs, np.uint32)]
