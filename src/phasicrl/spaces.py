"""Observation and action spaces: parts, storage formats and checks. Kind: pure.

Inside the trainer an observation is one array and an action is a number or a row of numbers,
so that rollouts, minibatches and checkpoints hold plain tensors for every space.
`ObservationLayout` and `ActionLayout` translate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED_OBSERVATIONS = (
    "Box (images: uint8, height × width × channels or channels first; all others are vectors), "
    "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
)
SUPPORTED_ACTIONS = "Discrete, MultiDiscrete, MultiBinary, Box of floats, Dict, Tuple of these"

KeyPath = tuple[str | int, ...]
"""Path of a part in a tree of `Dict` spaces (keys) and `Tuple` spaces (indices)."""


_KINDS = (Box, Discrete, MultiDiscrete, MultiBinary)


def leaves(space: Space[Any], path: KeyPath = ()) -> list[tuple[KeyPath, Space[Any]]]:
    """Return the parts of a space that are neither `Dict` nor `Tuple`, with their paths."""
    if not _is_tree(space):
        return [(path, space)]
    return [leaf for key, part in _parts(space) for leaf in leaves(part, (*path, key))]


def get_nvec(space: Space[Any]) -> tuple[int, ...]:
    """Return the number of choices of each discrete component of an action space, as a tuple.

    `Discrete(5)` has (5,), `MultiBinary(2)` has (2, 2), `Box` has (). The sum is the width of an
    action mask.
    """
    return tuple(int(n) for _, leaf in leaves(space) for n in get_leaf_nvec(leaf).flat if n)


def is_image(space: Space[Any]) -> bool:
    """Return whether a part of an observation is an image: uint8 with three axes."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3


def describe_spaces(envs: Any) -> dict[str, str]:
    """Describe each part of the spaces of environments.

    Of a `Box`, the text before ` of ` is the shape, and the rest are dtype and bounds.
    """
    text_by_path: dict[str, str] = {}
    for name in ("observation_space", "action_space"):
        for path, leaf in leaves(getattr(envs, name)):
            text = str(leaf)
            if isinstance(leaf, Box):
                bounds = f"from {leaf.low_repr} to {leaf.high_repr}"
                text = f"Box{leaf.shape} of {leaf.dtype} {bounds}"
            text_by_path[format_path((name, *path))] = " ".join(text.split())
    return text_by_path


def check_spaces(name: str, observation_space: Space[Any], action_space: Space[Any]) -> None:
    """Check that networks can read the observations and choose the actions of these spaces.

    Raises:
        ValueError: a space is not supported; the message lists the supported ones.
    """
    for path, leaf in leaves(observation_space):
        given = f"{name}: observation_space{format_location(path)} is"
        if not isinstance(leaf, _KINDS):
            raise ValueError(f"{given} {leaf}; expected {SUPPORTED_OBSERVATIONS}")
        if isinstance(leaf, Box) and leaf.dtype == np.uint8 and len(leaf.shape) > 3:
            rule = "height × width × channels. Fold a stack of images into the channels"
            wrapper = "gymnasium.wrappers.ReshapeObservation"
            raise ValueError(f"{given} a Box{leaf.shape} of uint8; expected {rule} ({wrapper})")
    for path, leaf in leaves(action_space):
        is_box = isinstance(leaf, Box)
        if not isinstance(leaf, _KINDS) or (is_box and np.dtype(leaf.dtype).kind != "f"):
            given = f"{name}: action_space{format_location(path)} is {leaf}"
            remedy = ". Write a Box of integers as a MultiDiscrete" * is_box
            raise ValueError(f"{given}; expected {SUPPORTED_ACTIONS}{remedy}")
    for what, space in (("observation_space", observation_space), ("action_space", action_space)):
        if not sum(math.prod(leaf.shape or ()) for _, leaf in leaves(space)):
            raise ValueError(f"{name}: {what} is {space}; expected at least one number in it")


@dataclass(frozen=True, slots=True)
class ObservationLeaf:
    """Storage format of one part of an observation.

    Attributes:
        path: path in the tree; empty if the observation is not a tree.
        space: space of the part.
        shape: shape of one value.
        dtype: dtype in storage: uint8, int64 or float32.
        columns: bytes of the part in the row of a tree.
    """

    path: KeyPath
    space: Space[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columns: slice


class ObservationLayout:
    """Storage format of the observations of a space: one array, in a dtype that PyTorch has.

    - `Box`: the shape of the space; uint8, or float32 for all other dtypes (integers above 2²⁴ are
      rounded).
    - `Discrete`, `MultiDiscrete`: the shape of the space, int64, counted from zero. `MultiBinary`:
      the shape of the space, uint8.
    - `Dict` and `Tuple` (a "tree"): one row of bytes with the parts one after the other, each in
      its dtype above.

    Attributes:
        space: observation space of one environment.
        shape: shape of one stored observation.
        dtype: dtype of stored observations.
        is_tree: whether stored observations are rows of bytes.
        leaves: parts of the space, in order; a single one if the space is not a tree.

    Args:
        space: observation space that passes `check_spaces`.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.space, self.is_tree = space, _is_tree(space)
        parts: list[ObservationLeaf] = []
        end = 0
        for path, leaf in leaves(space):
            dtype, shape, start = _stored_dtype(leaf), tuple(leaf.shape or ()), end
            end += math.prod(shape) * dtype.itemsize
            parts.append(ObservationLeaf(path, leaf, shape, dtype, slice(start, end)))
        self.leaves = tuple(parts)
        self.shape: tuple[int, ...] = (end,) if self.is_tree else parts[0].shape
        self.dtype: np.dtype[Any] = np.dtype(np.uint8) if self.is_tree else parts[0].dtype

    def pack(self, obs: Any, num: int) -> np.ndarray:
        """Pack arrays `[num, …]` in the structure of the space into one array `[num, *shape]`.

        A single array that has the storage dtype is returned without copying.

        Raises:
            ValueError: a part is missing, or has a wrong shape or dtype.
        """
        if not self.is_tree:
            return _convert_leaf(self.leaves[0], obs, num)
        rows = np.empty((num, *self.shape), dtype=np.uint8)
        for leaf in self.leaves:
            values = np.ascontiguousarray(_convert_leaf(leaf, get_part(obs, leaf.path), num))
            values = values.reshape(num, math.prod(leaf.shape))
            rows[:, leaf.columns] = values.view(np.uint8)
        return rows

    def unpack(self, stored: Tensor) -> Any:
        """Unpack a tensor `[N, *shape]` into tensors `[N, *leaf.shape]` in the space's structure.

        Without a tree, the tensor itself is returned.
        """
        if not self.is_tree:
            return stored
        # Imported here because worker processes of environments pack only, and do without torch.
        import torch

        values: dict[KeyPath, Tensor] = {}
        for leaf in self.leaves:
            rows = stored[:, leaf.columns]
            if leaf.dtype != np.uint8:
                # `clone`, because `contiguous()` returns a single row at its unaligned address;
                # flat, because empty rows have strides that cannot be viewed.
                rows = rows.clone(memory_format=torch.contiguous_format).flatten()
                rows = rows.view(getattr(torch, leaf.dtype.name))
            values[leaf.path] = rows.reshape(stored.shape[0], *leaf.shape)
        return assemble(self.space, values)

    def assemble(self, values: Mapping[KeyPath, Any]) -> Any:
        """Put the values of all parts into the structure of the space."""
        return assemble(self.space, values)

    def find_invalid(self, stored: np.ndarray) -> tuple[int, str] | None:
        """Return the index of an invalid observation of `[N, *shape]`, and a description.

        Invalid are floats that are not finite, and numbers outside a discrete space, which would
        index beyond a network's weights. None if all are valid.
        """
        for leaf in self.leaves:
            if leaf.dtype == np.uint8 and isinstance(leaf.space, Box):
                continue
            values = stored
            if self.is_tree:
                values = stored[:, leaf.columns].view(leaf.dtype).reshape(len(stored), *leaf.shape)
            if leaf.dtype == np.float32:
                is_valid, what = np.isfinite(values), "is not finite"
            else:
                is_valid = (values >= 0) & (values < get_leaf_nvec(leaf.space))
                what = f"is outside of {leaf.space}"
            if not is_valid.all():
                index = int(np.argwhere(~is_valid)[0, 0])
                value = values[index] + get_start(leaf.space)
                return index, f"an observation that {what}{format_location(leaf.path)}: {value}"
        return None


class ActionLayout:
    """Translation of flat actions to the structure of an action space.

    A flat action is `[B]` int64 for a plain `Discrete` space, and otherwise `[B, K]`: the K numbers
    of all leaves in order: float32 if any leaf is a `Box`, else int64. Discrete components count
    from zero, and the space's `start` is added here.

    Attributes:
        space: action space of one environment.
        shape: shape of one flat action, `()` or `(K,)`.
        dtype: dtype of flat actions, int64 or float32.
        num_choices: number of choices of each component, `[K]`; 0 for components of a `Box`.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.space = space
        # Parts with their paths, and their columns in a flat action.
        self._leaves: list[tuple[KeyPath, Space[Any], slice]] = []
        num_choices, names = [], []
        for path, leaf in leaves(space):
            size = math.prod(leaf.shape or ())
            self._leaves.append((path, leaf, slice(len(names), len(names) + size)))
            num_choices.append(get_leaf_nvec(leaf).reshape(-1))
            names += [path if size == 1 else (*path, index) for index in range(size)]
        has_box = any(isinstance(leaf, Box) for _, leaf, _ in self._leaves)
        self.shape: tuple[int, ...] = () if isinstance(space, Discrete) else (len(names),)
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if has_box else np.int64)
        self.num_choices = np.concatenate(num_choices)
        self._discrete = np.flatnonzero(self.num_choices)
        # First numbers of the parts, unless all count from zero; no arrays, for `torch.compile`.
        starts = {path: get_start(leaf).tolist() for path, leaf in leaves(space)}
        self._starts = starts if any(np.any(start) for start in starts.values()) else {}
        # [C], first column of each discrete component in a mask
        self._mask_offsets = np.cumsum([0, *get_nvec(space)])[:-1]
        self._paths = names

    def unflatten(self, action: np.ndarray) -> Any:
        """Convert flat actions `[B, *shape]` to copies `[B, …]` in the space's structure."""
        num = len(action)
        if not self.shape:  # the most frequent case
            return (action + get_start(self.space)).astype(self.space.dtype)
        rows = action.reshape(num, len(self._paths))
        values: dict[KeyPath, np.ndarray] = {}
        for path, leaf, columns in self._leaves:
            part = rows[:, columns].reshape(num, *(leaf.shape or ()))
            if not isinstance(leaf, Box):
                part = part.astype(np.int64, copy=False) + get_start(leaf)
            elif leaf.dtype == np.float64:  # that float32 may lie below the bound
                with np.errstate(over="ignore"):
                    part = np.where(part == leaf.low.astype(np.float32), leaf.low, part)
            values[path] = part.astype(leaf.dtype)
        return assemble(self.space, values)

    def unflatten_tensor(self, action: Tensor) -> Any:
        """Convert flat actions to tensors `[B, …]` in the space's structure, int64 or float32."""
        rows = action.reshape(len(action), len(self._paths))
        values: dict[KeyPath, Any] = {}
        for path, leaf, columns in self._leaves:
            part = rows[:, columns].reshape(len(rows), *(leaf.shape or ()))
            part = part.float() if isinstance(leaf, Box) else part.long()
            values[path] = part + part.new_tensor(self._starts[path]) if self._starts else part
        return assemble(self.space, values)

    def describe_out_of_bounds(self, action: np.ndarray) -> str:
        """Describe the first number of flat actions `[B, K]` beyond its `Box`; "" if none is."""
        for path, leaf, _ in self._leaves:
            if isinstance(leaf, Box):
                part = get_part(self.unflatten(action), path)
                beyond = part[(part < leaf.low) | (part > leaf.high)]
                if beyond.size:
                    return f"{beyond[0]}{format_location(path)} is outside of {leaf}"
        return ""

    def check(
        self, name: str, action: np.ndarray, num_envs: int, *, action_mask: np.ndarray | None = None
    ) -> None:
        """Check a batch of flat actions before the environments get it.

        Bounds of a `Box` are not checked: `action.squash` decides whether actions keep to them.

        Raises:
            ValueError: actions of a wrong shape or kind of numbers, not finite, outside of a
                discrete space, or forbidden by `action_mask` `[num_envs, A]`.
        """
        # Valid choices of a plain Discrete space are recognized fast.
        is_batch = not self.shape and action.dtype.kind == "i" and action.shape == (num_envs,)
        is_valid = is_batch and action.min() >= 0 and action.max() < self.num_choices[0]
        if is_valid and action_mask is None:
            return
        shape, wanted = (num_envs, *self.shape), "iu" if self.dtype == np.int64 else "iuf"
        if action.dtype.kind not in wanted or action.shape != shape:
            given = f"{name}: the actions are {action.dtype}, shape {action.shape}"
            kind = "integers" if self.dtype == np.int64 else "numbers"
            raise ValueError(f"{given}; expected a tensor of {kind} of shape {shape}")
        rows, ends = action.reshape(num_envs, len(self._paths)), self.num_choices
        self._reject_bad(name, rows, ~np.isfinite(rows), "a finite number. A network has diverged")
        outside = (rows < 0) | (rows >= ends) | (rows != np.floor(rows))
        self._reject_bad(name, rows, outside & (ends > 0), "an integer from 0 to {last}")
        if action_mask is not None:
            columns = rows[:, self._discrete].astype(np.int64) + self._mask_offsets
            blocked = np.zeros(rows.shape, bool)
            blocked[:, self._discrete] = ~np.take_along_axis(action_mask, columns, axis=1)
            self._reject_bad(name, rows, blocked, "one that `action_mask` allows")

    def _reject_bad(self, name: str, rows: np.ndarray, bad: np.ndarray, rule: str) -> None:
        """Raise an error about the first of actions `[B, K]` that is `bad` `[B, K]`, if any.

        In the rule, `{last}` is the last choice of the component.
        """
        if not bad.any():
            return
        index, i = map(int, np.argwhere(bad)[0])
        component = f", component {i} ({format_path(self._paths[i])})" if self.shape else ""
        given = f"action {rows[index, i]} for environment {index}{component}"
        rule = rule.format(last=self.num_choices[i] - 1)
        raise ValueError(f"{name}: {given}; expected {rule}")


def to_float32_space(space: Space[Any]) -> Space[Any]:
    """Return a copy of the space whose floating dtypes are float32."""
    if isinstance(space, Dict):
        return Dict([(key, to_float32_space(part)) for key, part in space.spaces.items()])
    if isinstance(space, Tuple):
        return Tuple([to_float32_space(part) for part in space.spaces])
    if not (isinstance(space, Box) and space.dtype in (np.float16, np.float64, np.longdouble)):
        return space
    limit, bounds = np.finfo(np.float32).max, np.stack([space.low, space.high])
    low, high = np.where(np.isinf(bounds), bounds, bounds.clip(-limit, limit)).astype(np.float32)
    return Box(low, high, space.shape, np.float32)


def select_keys(tree: Any, keys: tuple[str, ...] | None) -> Any:
    """Return the entries of a `Dict` space, or of an observation in it, at some keys; None: all.

    Raises:
        ValueError: there are no entries, or a key is missing.
    """
    if keys is None:
        return tree
    entries = tree.spaces if isinstance(tree, Dict) else tree
    if not isinstance(entries, Mapping) or not set(keys) <= entries.keys():
        given = f"model.policy_obs and model.value_obs have {', '.join(keys)}"
        raise ValueError(f"{given}; expected keys of the observation_space, {tree}")
    chosen = {key: entries[key] for key in keys}
    return Dict(chosen) if isinstance(tree, Dict) else chosen


def to_array(values: Any) -> np.ndarray:
    """Convert values to an array, of objects if they have different shapes."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.fromiter(values, object)


def map_leaves(space: Space[Any], function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf of a value that has the structure of `space`.

    Raises:
        ValueError: the value lacks a part of the space.
    """
    if not _is_tree(space):  # the most frequent case, at every step of every environment
        return function(tree)
    return assemble(space, {path: function(get_part(tree, path)) for path, _ in leaves(space)})


def take_first(space: Space[Any], batch: Any) -> Any:
    """Return the first of values `[B, …]` in the structure of a space; of a float Box an array."""
    return map_leaves(space, lambda x: x[0, ...] if x.dtype.kind == "f" else x[0], batch)


def find_extra_keys(space: Space[Any], obs: Any, path: KeyPath = ()) -> list[str]:
    """Return the paths of an observation's entries that its space lacks."""
    if not _is_tree(space):
        return []
    extra = set(obs if isinstance(obs, Mapping) else range(len(obs))) - dict(_parts(space)).keys()
    parts = [(part, get_part(obs, (key,)), (*path, key)) for key, part in _parts(space)]
    inner = [name for part in parts for name in find_extra_keys(*part)]
    return sorted(format_path((*path, key)) for key in extra) + inner


def format_path(path: KeyPath) -> str:
    """Format the path of a part of a space: `("arm", 0)` is `arm/0`."""
    return "/".join(map(str, path))


def format_location(path: KeyPath) -> str:
    """Format the path of a part for a message: ` (at 'arm/0')`; empty for an empty path."""
    return f" (at {format_path(path)!r})" if path else ""


def _is_tree(space: Space[Any]) -> bool:
    return isinstance(space, (Dict, Tuple))


def _parts(space: Space[Any]) -> list[tuple[str | int, Space[Any]]]:
    """Return the parts of a `Dict` or `Tuple` with their keys."""
    parts: Any = space
    return list(parts.items() if isinstance(space, Dict) else enumerate(parts))


def assemble(space: Space[Any], values: Mapping[KeyPath, Any], path: KeyPath = ()) -> Any:
    """Arrange the values of all leaves, by path as in `leaves`, in the structure of a space."""
    if not _is_tree(space):
        return values[path]
    parts = [(key, assemble(part, values, (*path, key))) for key, part in _parts(space)]
    return dict(parts) if isinstance(space, Dict) else tuple(value for _, value in parts)


def get_part(tree: Any, path: KeyPath) -> Any:
    """Return the part of an observation at a path.

    Raises:
        ValueError: the observation has no such part.
    """
    for depth, key in enumerate(path):
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            given = f"an observation without {format_path(path[: depth + 1])!r}"
            raise ValueError(f"{given}; expected the parts of observation_space") from None
    return tree


def _stored_dtype(space: Space[Any]) -> np.dtype[Any]:
    """Return the dtype in which a part of an observation is stored."""
    if isinstance(space, Box):
        return np.dtype(np.uint8 if space.dtype == np.uint8 else np.float32)
    return np.dtype(np.uint8 if isinstance(space, MultiBinary) else np.int64)


def _convert_leaf(leaf: ObservationLeaf, values: Any, num: int) -> np.ndarray:
    """Convert values `[num, …]` of one part to its storage format."""
    array = to_array(values)
    if not leaf.shape and array.size == num:
        array = array.reshape(num)  # a single number may be in a list
    location, dtype = format_location(leaf.path), leaf.space.dtype
    if array.shape != (num, *leaf.shape):
        start = 1 if array.shape[:1] == (num,) else 0  # show the number of environments if wrong
        given = f"an observation of shape {array.shape[start:]}{location}"
        raise ValueError(f"{given}; expected {(num, *leaf.shape)[start:]}, as in observation_space")
    if array.dtype != dtype and not np.can_cast(array.dtype, np.dtype(dtype), "same_kind"):
        given = f"an observation of dtype {array.dtype}{location}"
        raise ValueError(f"{given}; expected {dtype}, as in observation_space")
    if leaf.dtype == np.int64:
        return array.astype(np.int64, copy=False) - get_start(leaf.space)
    if array.dtype == leaf.dtype:
        return array
    if leaf.dtype == np.uint8 and array.size and not 0 <= array.min() <= array.max() <= 255:
        extreme = array.max() if array.max() > 255 else array.min()
        raise ValueError(f"an observation with {extreme}{location}; expected 0 to 255")
    try:
        with np.errstate(over="raise"):
            return array.astype(leaf.dtype, copy=False)
    except FloatingPointError:
        finite = array[np.isfinite(array)]
        given = f"an observation with {max(finite.min(), finite.max(), key=abs):.3g}{location}"
        limit = np.finfo(np.float32).max
        raise ValueError(f"{given}; expected at most ±{limit:.3g} (float32). Scale it") from None


def get_start(space: Space[Any]) -> np.ndarray:
    """Return the number from which a discrete space counts; zero for others."""
    return np.asarray(getattr(space, "start", 0), dtype=np.int64)


def get_leaf_nvec(space: Space[Any]) -> np.ndarray:
    """Return the number of choices of each component of a part; 0 in a space of other kinds."""
    if isinstance(space, MultiDiscrete):
        return space.nvec.astype(np.int64)
    number = space.n if isinstance(space, Discrete) else 2 * isinstance(space, MultiBinary)
    return np.full(getattr(space, "shape", None) or (), number, np.int64)  # may be no space
