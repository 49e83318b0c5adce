"""Two things at the same time on a GPU, while a CUDA graph is recorded.

Kind: effects (uses a stream beside the current one).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def side_by_side(one: Callable[[], A], other: Callable[[], B], device: torch.device) -> tuple[A, B]:
    """The results of two functions that do not depend on each other.

    In a recorded graph they run at the same time, and so do their gradients: a gradient is computed
    on the stream of what it is the gradient of, so that the fork goes both ways. Elsewhere one
    comes after the other.

    Args:
        one: what is called on the current stream.
        other: what is called beside it.
        device: where they compute.
    """
    if device.type != "cuda":
        return one(), other()
    main = torch.cuda.current_stream(device)
    if main == torch.cuda.default_stream(device):
        return one(), other()
    # A graph is recorded, or tried before that: both never happen on the default stream.
    side = _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        of_other = other()
    of_one = one()
    main.wait_stream(side)
    return of_one, of_other


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream beside the main one."""
    return torch.cuda.Stream(device)
