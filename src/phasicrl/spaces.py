"""Spaces of observations and actions: parts, storage, and the checks of all back ends. Kind: pure.

Inside the trainer an observation is one array and an action is a number or a row of numbers,
whatever the environment's spaces are: rollouts, minibatches and checkpoints hold plain tensors.
`ObservationLayout` and `ActionLayout` are the two translations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED_OBSERVATIONS = (
    "Box (images: uint8, height × width × channels or channels first; anything else is numbers), "
    "Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
)
SUPPORTED_ACTIONS = (
    "Discrete, MultiDiscrete, MultiBinary, Box of floats, and Dict and Tuple of these"
)

KeyPath = tuple[str | int, ...]
"""Where a part lies in a tree of `Dict` (keys) and `Tuple` (numbers) spaces."""


_KINDS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def leaves(space: gym.Space[Any], path: KeyPath = ()) -> list[tuple[KeyPath, gym.Space[Any]]]:
    """Return the parts of a space that are neither `Dict` nor `Tuple`, each with its path."""
    if not _is_tree(space):
        return [(path, space)]
    return [leaf for key, part in _parts(space) for leaf in leaves(part, (*path, key))]


def choices(space: gym.Space[Any]) -> tuple[int, ...]:
    """Return the number of options of each discrete component of an action space, in order.

    `Discrete(5)` has (5,), `MultiBinary(2)` (2, 2), `Box` none. Their sum is the width of an action
    mask.
    """
    widths: list[int] = []
    for _, leaf in leaves(space):
        if isinstance(leaf, gym.spaces.Discrete):
            widths.append(int(leaf.n))
        elif isinstance(leaf, gym.spaces.MultiDiscrete):
            widths += [int(n) for n in leaf.nvec.flatten()]
        elif isinstance(leaf, gym.spaces.MultiBinary):
            widths += [2] * math.prod(leaf.shape)
    return tuple(widths)


def is_image(space: gym.Space[Any]) -> bool:
    """Return whether a part of an observation is an image: bytes of rank 3."""
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def check_spaces(
    name: str, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> None:
    """Refuse spaces that no network here can read or act in.

    Raises:
        ValueError: which space it is, and what is supported.
    """
    for path, leaf in leaves(observation_space):
        what = f"{name}: observations of the kind"
        if not isinstance(leaf, _KINDS):
            raise ValueError(
                f"{what} {leaf}{where(path)} are not supported; supported: {SUPPORTED_OBSERVATIONS}"
            )
        if isinstance(leaf, gym.spaces.Box) and leaf.dtype == np.uint8 and len(leaf.shape) > 3:
            raise ValueError(
                f"{what} Box{leaf.shape} uint8{where(path)} look like a stack of color images; "
                "fold the stack into the channels (gymnasium.wrappers.ReshapeObservation), "
                "height × width × channels"
            )
    for path, leaf in leaves(action_space):
        is_box = isinstance(leaf, gym.spaces.Box)
        if not isinstance(leaf, _KINDS) or (is_box and np.dtype(leaf.dtype).kind != "f"):
            raise ValueError(
                f"{name}: actions of the kind {leaf}{where(path)} are not supported; "
                f"supported: {SUPPORTED_ACTIONS}"
                + "; write a Box of integers as a MultiDiscrete"
                * is_box
            )
    for what, space in (("observations", observation_space), ("actions", action_space)):
        if not sum(math.prod(leaf.shape or ()) for _, leaf in leaves(space)):
            raise ValueError(
                f"{name}: the space of {what} {space} is empty; give it at least one number"
            )


@dataclass(frozen=True, slots=True)
class ObservationLeaf:
    """One part of an observation as it is stored.

    Attributes:
        path: where it lies in the tree; empty if the observation is no tree.
        space: the environment's space of it.
        shape: of one value.
        dtype: uint8, int64 or float32.
        columns: its bytes in the row of a tree.
    """

    path: KeyPath
    space: gym.Space[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columns: slice


class ObservationLayout:
    """How the observations of a space are stored: one array each, in a dtype that torch has.

    - `Box`: its shape; uint8 stays uint8, all other numbers become float32 (integers above 2²⁴ lose
      their last digits).
    - `Discrete`, `MultiDiscrete`: their shape, int64, counted from zero. `MultiBinary`: its shape,
      uint8.
    - `Dict` and `Tuple` ("tree"): one row of bytes, in which the parts lie one after the other in
      the dtypes above.

    Attributes:
        space: the environment's.
        shape: of one stored observation.
        dtype: of stored observations.
        is_tree: whether they are rows of bytes.
        leaves: the parts, in order; one of them if the space is no tree.

    Args:
        space: a space that passes `check_spaces`.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.is_tree = _is_tree(space)
        placed: list[ObservationLeaf] = []
        end = 0
        for path, leaf in leaves(space):
            dtype, shape, start = _stored_dtype(leaf), tuple(leaf.shape or ()), end
            end += math.prod(shape) * dtype.itemsize
            placed.append(ObservationLeaf(path, leaf, shape, dtype, slice(start, end)))
        self.leaves = tuple(placed)
        self.shape: tuple[int, ...] = (end,) if self.is_tree else placed[0].shape
        self.dtype: np.dtype[Any] = np.dtype(np.uint8) if self.is_tree else placed[0].dtype

    def pack(self, obs: Any, num: int) -> np.ndarray:
        """Store observations: from arrays `[num, …]` to one array `[num, *shape]`.

        The arrays come in the structure of the space. What is in the right dtype already, and no
        tree, is returned as it is: no copy is made.

        Raises:
            ValueError: a part is missing, has another shape, or a dtype that does not fit.
        """
        if not self.is_tree:
            return _stored(self.leaves[0], obs, num)
        rows = np.empty((num, *self.shape), dtype=np.uint8)
        for leaf in self.leaves:
            values = np.ascontiguousarray(_stored(leaf, at_path(obs, leaf.path), num))
            values = values.reshape(num, math.prod(leaf.shape))
            rows[:, leaf.columns] = values.view(np.uint8)
        return rows

    def unpack(self, stored: Tensor) -> Any:
        """Read observations: from one tensor `[N, *shape]` to tensors `[N, *leaf.shape]`.

        They come in the structure of the space. Without a tree that is the tensor itself.
        """
        if not self.is_tree:
            return stored
        # Not above: the processes of environments pack, and would each wait for torch and hold it.
        import torch

        values: dict[KeyPath, Tensor] = {}
        for leaf in self.leaves:
            rows = stored[:, leaf.columns]
            if leaf.dtype != np.uint8:
                # Not `contiguous()`: it returns a single row as it is, at an address that wider
                # numbers must not have. Flat, since rows of no bytes have strides that cannot be
                # viewed.
                rows = rows.clone(memory_format=torch.contiguous_format).flatten()
                rows = rows.view(getattr(torch, leaf.dtype.name))
            values[leaf.path] = rows.reshape(stored.shape[0], *leaf.shape)
        return self.assemble(values)

    def assemble(self, values: Mapping[KeyPath, Any]) -> Any:
        """Put the values of all parts into the structure of the space."""
        return assembled(self.space, values)

    def find_fault(self, stored: np.ndarray) -> tuple[int, str] | None:
        """Find the first of the observations `[N, *shape]` that is not usable, and say why.

        Not usable are floats that are not finite, and numbers outside of a discrete space, which
        would index beyond a network's weights.
        """
        for leaf in self.leaves:
            if leaf.dtype == np.uint8 and isinstance(leaf.space, gym.spaces.Box):
                continue
            values = stored
            if self.is_tree:
                values = stored[:, leaf.columns].view(leaf.dtype)
                values = values.reshape(len(stored), *leaf.shape)
            if leaf.dtype == np.float32:
                good, what = np.isfinite(values), "is not finite"
            else:
                good = (values >= 0) & (values < _num_options(leaf.space))
                what = f"is outside of {leaf.space}"
            if not good.all():
                index = int(np.argwhere(~good)[0, 0])
                value = values[index] + _first(leaf.space)
                return index, f"an observation that {what}{where(leaf.path)}: {value}"
        return None


@dataclass(frozen=True, slots=True)
class _ActionLeaf:
    """One part of an action and its columns in the trainer's; options count from `start`."""

    path: KeyPath
    space: gym.Space[Any]
    columns: slice
    start: np.ndarray | None


class ActionLayout:
    """The trainer's flat action, and the environment's structure.

    The trainer's action is `[B]` int64 for a plain `Discrete`, and otherwise `[B, K]`: K numbers,
    those of the leaves of the space in order, each leaf flattened; int64 without any `Box`, float32
    with one (the integers are then floats too). Discrete components are counted from zero; a space
    that begins elsewhere has its `start` added here.

    Attributes:
        space: the environment's.
        shape: of one of the trainer's actions, `()` or `(K,)`.
        dtype: int64 or float32.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self._leaves: list[_ActionLeaf] = []
        options, names = [], []
        for path, leaf in leaves(space):
            is_box, shape = isinstance(leaf, gym.spaces.Box), leaf.shape or ()
            size = math.prod(shape)
            start = None if is_box else _first(leaf)
            columns = slice(len(names), len(names) + size)
            self._leaves.append(_ActionLeaf(path, leaf, columns, start))
            options.append(np.broadcast_to(0 if is_box else _num_options(leaf), shape).reshape(-1))
            names += [path if size == 1 else (*path, index) for index in range(size)]
        has_box = any(isinstance(leaf.space, gym.spaces.Box) for leaf in self._leaves)
        is_plain = isinstance(space, gym.spaces.Discrete)
        self.shape: tuple[int, ...] = () if is_plain else (len(names),)
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if has_box else np.int64)
        self._num_options = np.concatenate(options)  # [K], zero for numbers of a Box
        self._discrete = np.flatnonzero(self._num_options)
        # [C], where each discrete component begins in a mask
        self._mask_offsets = np.cumsum([0, *choices(space)])[:-1]
        self._names = names

    def unflatten(self, action: np.ndarray) -> Any:
        """From the trainer's actions `[B, *shape]` to the environments' `[B, …]`.

        They are copies in the structure and dtypes of the space.
        """
        num = len(action)
        if not self.shape:  # no parts to be taken apart: much the most frequent case
            return (action + self._leaves[0].start).astype(self.space.dtype)
        rows = action.reshape(num, len(self._names))
        values: dict[KeyPath, np.ndarray] = {}
        for leaf in self._leaves:
            part = rows[:, leaf.columns].reshape(num, *(leaf.space.shape or ()))
            if leaf.start is not None:
                part = part.astype(np.int64, copy=False) + leaf.start
            values[leaf.path] = part.astype(leaf.space.dtype)
        return assembled(self.space, values)

    def check(
        self, name: str, action: Any, num_envs: int, *, action_mask: np.ndarray | None = None
    ) -> None:
        """Refuse a batch of the trainer's actions that the environments would misread.

        Numbers of a `Box` may be beyond its bounds: the policy decides whether to clip them.

        Raises:
            ValueError: not an array of `[num_envs, *shape]` with the right kind of numbers, not
                finite, outside of a discrete space, or not allowed by `action_mask` `[num_envs,
                sum(choices(space))]`.
        """
        if self._is_plainly_good(action, num_envs) and action_mask is None:
            return
        shape, wanted = (num_envs, *self.shape), "iu" if self.dtype == np.int64 else "iuf"
        is_array = isinstance(action, np.ndarray)
        if not is_array or action.dtype.kind not in wanted or action.shape != shape:
            array = f"{action.dtype}, shape {action.shape}" if is_array else ""
            given = array or f"a {type(action).__name__}"
            kind = "integers" if self.dtype == np.int64 else "numbers"
            raise ValueError(
                f"{name}: the actions are {given}; a tensor of {kind}, shape {shape}, was expected"
            )
        rows, ends = action.reshape(num_envs, len(self._names)), self._num_options
        self._refuse(name, rows, ~np.isfinite(rows), "is not finite; a network has diverged")
        outside = (rows < 0) | (rows >= ends) | (rows != np.floor(rows))
        self._refuse(name, rows, outside & (ends > 0), "is outside of 0 … {last} (integers)")
        if action_mask is not None:
            places = rows[:, self._discrete].astype(np.int64) + self._mask_offsets
            blocked = np.zeros(rows.shape, bool)
            blocked[:, self._discrete] = ~np.take_along_axis(action_mask, places, axis=1)
            self._refuse(name, rows, blocked, "is not allowed now; obey `action_mask`")

    def _is_plainly_good(self, action: Any, num_envs: int) -> bool:
        """Check quickly, as it is the usual case, for options of a plain `Discrete` space."""
        if self.shape or not isinstance(action, np.ndarray):
            return False
        is_right = action.dtype.kind == "i" and action.shape == (num_envs,)
        return bool(is_right and action.min() >= 0 and action.max() < self._num_options[0])

    def _refuse(self, name: str, rows: np.ndarray, bad: np.ndarray, text: str) -> None:
        """Refuse actions `[B, K]` if one is `bad`; `{last}` in the text is its last option."""
        if not bad.any():
            return
        index, i = map(int, np.argwhere(bad)[0])
        component = f", component {i} ({format_path(self._names[i])})" if self.shape else ""
        taken = f"action {rows[index, i]} for environment {index}{component}"
        raise ValueError(f"{name}: {taken} {text.format(last=self._num_options[i] - 1)}")


def as_float32(space: gym.Space[Any]) -> gym.Space[Any]:
    """Return a space with float32 in place of other floats."""
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict([(key, as_float32(part)) for key, part in space.spaces.items()])
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([as_float32(part) for part in space.spaces])
    others = (np.float16, np.float64, np.longdouble)
    if not (isinstance(space, gym.spaces.Box) and space.dtype in others):
        return space
    limit = np.finfo(np.float32).max
    bounds = np.stack([space.low, space.high])
    low, high = np.where(np.isinf(bounds), bounds, bounds.clip(-limit, limit)).astype(np.float32)
    return gym.spaces.Box(low, high, space.shape, np.float32)


def map_leaves(space: gym.Space[Any], function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every part of a value that has the structure of `space`.

    Raises:
        ValueError: a part is missing.
    """
    if not _is_tree(space):  # much the most frequent case, at every step of every environment
        return function(tree)
    return assembled(space, {path: function(at_path(tree, path)) for path, _ in leaves(space)})


def format_path(path: KeyPath) -> str:
    """Format a path: `arm/0`."""
    return "/".join(map(str, path))


def where(path: KeyPath) -> str:
    """Format a path as a part of a sentence; an empty one is left out."""
    return f" (at {format_path(path)!r})" if path else ""


def _is_tree(space: gym.Space[Any]) -> bool:
    return isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple))


def _parts(space: gym.Space[Any]) -> list[tuple[str | int, gym.Space[Any]]]:
    """Return the parts of a `Dict` or `Tuple` with their keys."""
    parts: Any = space
    return list(parts.items() if isinstance(space, gym.spaces.Dict) else enumerate(parts))


def assembled(space: gym.Space[Any], values: Mapping[KeyPath, Any], path: KeyPath = ()) -> Any:
    """Put values of leaves into the structure of a space."""
    if not _is_tree(space):
        return values[path]
    parts = [(key, assembled(part, values, (*path, key))) for key, part in _parts(space)]
    return dict(parts) if isinstance(space, gym.spaces.Dict) else tuple(value for _, value in parts)


def at_path(tree: Any, path: KeyPath) -> Any:
    """Return the part of an observation at a path.

    Raises:
        ValueError: there is none.
    """
    for depth, key in enumerate(path):
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            missing = format_path(path[: depth + 1])
            raise ValueError(
                f"an observation without {missing!r}, which its observation_space has"
            ) from None
    return tree


def _stored_dtype(leaf: gym.Space[Any]) -> np.dtype[Any]:
    """Return the dtype in which a part of an observation is stored."""
    if isinstance(leaf, gym.spaces.Box):
        return np.dtype(np.uint8 if leaf.dtype == np.uint8 else np.float32)
    return np.dtype(np.uint8 if isinstance(leaf, gym.spaces.MultiBinary) else np.int64)


def _stored(leaf: ObservationLeaf, values: Any, num: int) -> np.ndarray:
    """Convert values `[num, …]` of one part to the form in which they are stored."""
    array = np.asarray(values)
    if not leaf.shape and array.size == num:
        array = array.reshape(num)  # a single number may come in brackets
    at, wanted = where(leaf.path), leaf.space.dtype
    if array.shape != (num, *leaf.shape):
        given = f"an observation of shape {array.shape[1:]}{at}"
        raise ValueError(f"{given}; its observation_space says {leaf.shape}")
    if array.dtype != wanted and not np.can_cast(array.dtype, np.dtype(wanted), "same_kind"):
        given = f"an observation of dtype {array.dtype}{at}"
        raise ValueError(f"{given}; its observation_space says {wanted}")
    if leaf.dtype == np.int64:
        return array.astype(np.int64, copy=False) - _first(leaf.space)
    if array.dtype == leaf.dtype:
        return array
    if leaf.dtype == np.uint8 and array.size and not 0 <= array.min() <= array.max() <= 255:
        extreme = array.max() if array.max() > 255 else array.min()
        raise ValueError(f"an observation{at} with {extreme}; from 0 to 255 was expected")
    # `find_fault` reports infinity, with the environment's index.
    with np.errstate(over="ignore"):
        return array.astype(leaf.dtype, copy=False)


def _first(space: gym.Space[Any]) -> np.ndarray:
    """Return the number from which a discrete space counts; zero for others."""
    return np.asarray(getattr(space, "start", 0), dtype=np.int64)


def _num_options(space: gym.Space[Any]) -> np.ndarray:
    """Return the number of options of a discrete space: one for all components, or one for each."""
    if isinstance(space, gym.spaces.MultiDiscrete):
        return np.asarray(space.nvec, dtype=np.int64)
    return np.asarray(space.n if isinstance(space, gym.spaces.Discrete) else 2, dtype=np.int64)
