"""Action masks: flat rows of booleans from the formats of environments. Kind: pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from phasicrl.spaces import KeyPath, format_location, get_nvec, to_array


def flatten_mask(space: Space[Any], mask: Any, path: KeyPath = ()) -> np.ndarray:
    """Flatten an environment's mask to `[sum(get_nvec(space))]` bool, true where allowed.

    Args:
        space: action space.
        mask: booleans, or zeros and ones: either one array of that length, or one mask for each
            part of the space, in a mapping for `Dict` and a sequence for `Tuple`, `MultiDiscrete`
            and `MultiBinary`. None for a part allows everything in it.
        path: path of the space if it is a part of another one, for messages.

    Raises:
        ValueError: the mask has another length or structure, or other values.
    """
    size = sum(get_nvec(space))
    if mask is None and path:
        return np.ones(size, dtype=bool)
    flat, location = to_numeric(mask), format_location(path)
    if flat is not None and not np.isin(flat, (0, 1)).all():
        given = f"an action mask with values {np.unique(flat)}{location}"
        raise ValueError(f"{given}; expected True and False, or 1 and 0")
    if flat is not None and flat.shape == (size,):
        return flat.astype(bool)
    masks = None if flat is not None and flat.ndim == 1 else _pair_masks(space, mask)
    if masks is None:
        given = f"a {type(mask).__name__}" if flat is None else f"shape {flat.shape}"
        has_parts = size and not isinstance(space, Discrete)
        parts = ", or one mask for each part of the space" if has_parts else ""
        rule = f"for {space}: shape ({size},){parts}"
        raise ValueError(f"an action mask of {given}{location}; expected {rule}")
    return np.concatenate([flatten_mask(part, each, (*path, key)) for key, part, each in masks])


def find_first_blocked(widths: tuple[int, ...], mask: np.ndarray) -> tuple[int, int] | None:
    """Find the first environment and component in which masks `[B, sum(widths)]` allow nothing."""
    has_choice = np.logical_or.reduceat(mask, np.cumsum([0, *widths])[:-1], axis=1)
    if has_choice.all():
        return None
    index, component = np.argwhere(~has_choice)[0]
    return int(index), int(component)


def _pair_masks(space: Space[Any], mask: Any) -> list[tuple[str | int, Space[Any], Any]] | None:
    """Return the parts of a space with their masks; None if the mask has another structure."""
    if isinstance(space, Dict):
        required = {key for key, part in space.spaces.items() if get_nvec(part)}
        if not isinstance(mask, Mapping) or not required <= set(mask) <= set(space.spaces):
            return None
        return [(key, part, mask.get(key)) for key, part in space.spaces.items()]
    if isinstance(space, Tuple):
        parts = list(space.spaces)
    elif isinstance(space, (MultiDiscrete, MultiBinary)):
        parts = [Discrete(width) for width in get_nvec(space)]
        for size in space.shape[1:]:  # several axes: sequences of sequences
            if not _is_sequence(mask) or not all(_is_sequence(x) and len(x) == size for x in mask):
                return None
            mask = [component for row in mask for component in row]
    else:
        return None
    if not _is_sequence(mask) or len(mask) != len(parts):
        return None
    return list(zip(range(len(parts)), parts, mask, strict=True))


def _is_sequence(mask: Any) -> bool:
    return isinstance(mask, (Sequence, np.ndarray)) and getattr(mask, "ndim", 1) > 0


def to_numeric(value: Any) -> np.ndarray | None:
    """Return a value as an array of numbers; None if it is something else."""
    return array if (array := to_array(value)).dtype.kind in "biuf" else None
