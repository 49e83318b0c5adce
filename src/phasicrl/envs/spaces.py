"""What the networks here can read and act in, and the checks of it that every back end shares. Kind: pure."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

SUPPORTED_OBSERVATIONS = "pictures (Box, uint8, height × width × channels or channels first) and vectors (Box, float)"
SUPPORTED_ACTIONS = "Discrete"


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
