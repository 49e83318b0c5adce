"""Max-pooling that halves pictures, by PyTorch's kernel or by one compiled for the shape. Kind: effects (compiles; keeps what it compiled)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phasicrl.execution.compiled import fuse

ENOUGH_CALLS, SHARE_OF_CALLS = 16, 0.05
"""Without a gradient a shape is compiled after so many calls, if they are such a share of all: batches of final observations have many sizes."""
TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 0.003}
"""Largest relative error of gradients: bf16's are rounded at other places."""
_kernels: dict[tuple[object, ...], tuple[Callable[..., Any], ...] | None] = {}
_calls: Counter[tuple[object, ...]] = Counter()


class MaxPool(nn.MaxPool2d):
    """Maxima of 3×3 windows, two apart: `[N, C, H, W]` → `[N, C, ⌈H/2⌉, ⌈W/2⌉]`.

    PyTorch's kernel for CPUs notes the place of each maximum in 64 bits and takes an eighth of the IMPALA network's time, in bf16 a fifth.
    Compiled by Inductor, with a byte for a place, it takes a quarter of that. Numbers are the same, and in fp32 gradients too, to the bit;
    in bf16 the gradients of overlapping windows are rounded once, not after each addition.

    Args:
        padding: on both sides, or as TensorFlow's `same`: an odd size on both sides and an even one at its end only.
        height: H of the pictures.
        width: W of the pictures.

    Attributes:
        compiled: use compiled code where it can be had: on a CPU, for even sizes, in channels_last. It is compared with PyTorch's first.
        can_be_compiled: whether sizes are even.
        starts_at: row and column of the first window, where sizes are even.
    """

    def __init__(self, padding: Literal["symmetric", "same"], height: int, width: int) -> None:
        if padding == "symmetric":
            super().__init__(kernel_size=3, stride=2, padding=1)
        else:
            super().__init__(kernel_size=3, stride=2, padding=(height % 2, width % 2), ceil_mode=True)
        self.compiled = False
        self.can_be_compiled = height % 2 == width % 2 == 0
        self.starts_at = -1 if padding == "symmetric" else 0

    def forward(self, x: Tensor) -> Tensor:
        """Pool."""
        last = x.permute(0, 2, 3, 1)
        there = x.device.type == "cpu" and x.dtype in TOLERANCE and last.is_contiguous() and x.numel() > 0
        if self.compiled and there and self.can_be_compiled:
            places = x.requires_grad and torch.is_grad_enabled()
            if (functions := _compiled(last, self, places=places)) is not None:
                y = _Pool.apply(last, *functions) if places else functions[0](last)[0]  # type: ignore[no-untyped-call]
                return y.permute(0, 3, 1, 2)
        return self.pooled_by_pytorch(x)

    def pooled_by_pytorch(self, x: Tensor) -> Tensor:
        """Pool, by PyTorch's kernel."""
        return nn.functional.max_pool2d(x, self.kernel_size, self.stride, self.padding, ceil_mode=self.ceil_mode)


class _Pool(torch.autograd.Function):
    """`[N, H, W, C]` → `[N, H/2, W/2, C]`, by a pair of compiled functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[..., Any], backward: Callable[..., Any]) -> Tensor:
        best, place = forward(x)
        ctx.save_for_backward(place)
        ctx.compiled = backward
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return ctx.compiled(gradient.contiguous(), place)[0], None, None


def pool(x: Tensor, *, starts_at: int, places: bool = True) -> tuple[Tensor, ...]:
    """Maxima `[N, H/2, W/2, C]` of `[N, H, W, C]`, and where each was, in a byte: four times its row in the window, plus its column.

    Of equal ones the first counts, row by row, as in PyTorch. Outside the picture its edge is looked at again, which is no maximum
    that is not there already: so nothing is padded, and every load is of whole vectors. Plain operations, for a compiler.

    Args:
        x: even H and W.
        starts_at: row and column of the first window: −1 or 0.
        places: give the second result.
    """
    _, height, width, _ = x.shape
    row, column = 2 * torch.arange(height // 2)[:, None], 2 * torch.arange(width // 2)
    best = place = None
    for i in range(3):
        for j in range(3):
            at_row, at_column = (row + starts_at + i).clamp(0, height - 1), (column + starts_at + j).clamp(0, width - 1)
            value = x[:, at_row, at_column].float()
            code = (4 * (at_row - row - starts_at) + (at_column - column - starts_at)).float()[..., None]
            if best is None or place is None:
                best, place = value, code.expand_as(value)
            else:
                best, place = torch.maximum(best, value), torch.where(value > best, code, place)
    assert best is not None and place is not None
    return (best.to(x.dtype), place.to(torch.uint8)) if places else (best.to(x.dtype),)


def pool_backward(gradient: Tensor, place: Tensor, *, starts_at: int) -> tuple[Tensor]:
    """Gradient `[N, H, W, C]` of `pool`'s input, from that of its maxima and their places. Plain operations, for a compiler.

    Each pixel asks the windows that it lies in, four at most, whether it was their maximum; in PyTorch's order, so that sums are the same.
    """
    size, height, width, channels = gradient.shape
    row, column = torch.arange(height)[:, None, None, None], torch.arange(width)[:, None]
    odd_row, odd_column = torch.arange(2)[:, None, None], torch.arange(2)
    total = None
    for i in (0, 1):
        for j in (0, 1):
            down, right = (i, j) if starts_at < 0 else (i - 1, j - 1)
            at_row, at_column = row + down, column + right
            there = (at_row >= 0) & (at_row < height) & (at_column >= 0) & (at_column < width)
            code = 4 * (odd_row - starts_at - 2 * down) + (odd_column - starts_at - 2 * right)
            code = torch.where(there, code, -9).float()[..., None]  # rows and columns −1 and 3, of windows without this pixel, have no code
            at = (slice(None), at_row.clamp(0, height - 1), at_column.clamp(0, width - 1))
            part = torch.where(place[at].float() == code, gradient[at].float(), 0.0)
            total = part if total is None else total + part
    assert total is not None
    return (total.to(gradient.dtype).reshape(size, 2 * height, 2 * width, channels),)


def _compile(example: Tensor, eager: MaxPool, *, places: bool) -> tuple[Callable[..., Any], ...]:
    """`pool` for inputs like `example`, `[N, H, W, C]`, and with places `pool_backward` too.

    Raises:
        ValueError: what was compiled gives other numbers than PyTorch.
        Exception: of many kinds, if it cannot be compiled.
    """
    # Few different numbers, so that many maxima are equal.
    x = torch.randint(-9, 9, example.shape, generator=torch.Generator().manual_seed(0)).to(example.dtype)
    forward = fuse(partial(pool, starts_at=eager.starts_at, places=places), [x])
    best, *rest = forward(x)
    with torch.enable_grad():
        leaf = x.permute(0, 3, 1, 2).detach().requires_grad_()
        values = eager.pooled_by_pytorch(leaf)
    right, functions = torch.equal(best, values.detach().permute(0, 2, 3, 1)), (forward,)
    if places:
        functions = (forward, fuse(partial(pool_backward, starts_at=eager.starts_at), [best, *rest]))
        expected = torch.autograd.grad(values, leaf, best.permute(0, 3, 1, 2))[0].permute(0, 2, 3, 1)
        off = (functions[1](best, *rest)[0] - expected).float().norm() / expected.float().norm()
        right = right and bool(off <= TOLERANCE[example.dtype])
    if not right:
        raise ValueError("compiled, they give other numbers here")
    return functions


def _compiled(x: Tensor, eager: MaxPool, *, places: bool) -> tuple[Callable[..., Any], ...] | None:
    """Compiled functions for such an input; None if there are none yet, or can be none."""
    key = (places, tuple(x.shape), x.dtype, eager.starts_at, torch.get_num_threads())
    if not places:
        _calls[key] += 1
    if key not in _kernels:
        if not places and (_calls[key] < ENOUGH_CALLS or _calls[key] < SHARE_OF_CALLS * _calls.total()):
            return None
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                _kernels[key] = _compile(x, eager, places=places)
            except Exception as error:  # Inductor's are of many kinds
                _kernels[key] = None
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
                warnings.warn(f"max-pools of {tuple(x.shape)} run eagerly: {reason}", RuntimeWarning, stacklevel=2)
    return _kernels[key]
