"""Action masks: one flat row of booleans from whatever form an environment gives. Kind: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.spaces import KeyPath, choices, where


def flatten_mask(space: gym.Space[Any], mask: Any) -> np.ndarray:
    """Make one flat mask `[sum(choices(space))]` bool, true where allowed, from an environment's.

    Args:
        space: of the actions.
        mask: booleans, or zeros and ones. Either one array of that length, or one mask for each
            part of the space: a mapping for `Dict`, a sequence for `Tuple`, `MultiDiscrete` and
            `MultiBinary`. None for a part allows everything in it.

    Raises:
        ValueError: another length or structure, or other values.
    """
    return _flat_mask(space, mask, ())


def find_blocked(widths: tuple[int, ...], mask: np.ndarray) -> tuple[int, int] | None:
    """Find where masks `[B, sum(widths)]` allow nothing: environment and discrete component."""
    if not widths:
        return None
    open_ = np.logical_or.reduceat(mask, np.cumsum([0, *widths])[:-1], axis=1)
    if open_.all():
        return None
    index, component = np.argwhere(~open_)[0]
    return int(index), int(component)


def _flat_mask(space: gym.Space[Any], mask: Any, path: KeyPath) -> np.ndarray:
    """The mask of the part of a space at `path`, flat."""
    size = sum(choices(space))
    if mask is None and path:
        return np.ones(size, dtype=bool)
    given, flat = f"a {type(mask).__name__}", _numbers(mask)
    if flat is not None:
        given = f"shape {flat.shape}"
        if not np.isin(flat, (0, 1)).all():
            raise ValueError(
                f"an action mask with the values {np.unique(flat)}{where(path)}; "
                "accepted: True and False, or 1 and 0"
            )
        if flat.shape == (size,):
            return flat.astype(bool)
    masks = None if flat is not None and flat.ndim == 1 else _masks_of_parts(space, mask)
    if masks is None:
        has_parts = size and not isinstance(space, gym.spaces.Discrete)
        parts = ", or one mask for each part of the space" if has_parts else ""
        raise ValueError(
            f"an action mask of {given}{where(path)}; accepted for {space}: shape ({size},){parts}"
        )
    return np.concatenate([_flat_mask(part, of_part, (*path, key)) for key, part, of_part in masks])


def _masks_of_parts(
    space: gym.Space[Any], mask: Any
) -> list[tuple[str | int, gym.Space[Any], Any]] | None:
    """The parts of a space, each with its mask; None if the mask does not have them."""
    if isinstance(space, gym.spaces.Dict):
        having = {key for key, part in space.spaces.items() if choices(part)}
        if not isinstance(mask, Mapping) or not having <= set(mask) <= set(space.spaces):
            return None
        return [(key, part, mask.get(key)) for key, part in space.spaces.items()]
    if isinstance(space, gym.spaces.Tuple):
        parts = list(space.spaces)
    elif isinstance(space, (gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)):
        parts = [gym.spaces.Discrete(width) for width in choices(space)]
        for size in space.shape[1:]:  # of several axes: sequences of sequences
            if not _is_sequence(mask):
                return None
            if not all(_is_sequence(row) and len(row) == size for row in mask):
                return None
            mask = [component for row in mask for component in row]
    else:
        return None
    if not _is_sequence(mask) or len(mask) != len(parts):
        return None
    return list(zip(range(len(parts)), parts, mask, strict=True))


def _is_sequence(mask: Any) -> bool:
    return isinstance(mask, (Sequence, np.ndarray)) and getattr(mask, "ndim", 1) > 0


def _numbers(mask: Any) -> np.ndarray | None:
    """A mask as an array of numbers, if it is one."""
    if isinstance(mask, Mapping):
        return None
    try:
        array = np.asarray(mask)
    except ValueError:  # parts of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None
