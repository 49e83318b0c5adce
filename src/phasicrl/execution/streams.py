"""Two things at the same time on a GPU, while a CUDA graph is recorded. Kind: state (one stream, for the length of a `with`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

_side: ContextVar[torch.cuda.Stream | None] = ContextVar("side", default=None)
"""The stream for what may run beside the rest, while a graph is recorded."""
A = TypeVar("A")
B = TypeVar("B")


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let `side_by_side` use a stream."""
    token = _side.set(stream)
    try:
        yield
    finally:
        _side.reset(token)


def side_by_side(one: Callable[[], A], other: Callable[[], B]) -> tuple[A, B]:
    """The results of two functions that do not depend on each other: in a recorded graph they run at the same time, and so do their gradients.

    Elsewhere one comes after the other. A gradient is computed on the stream of what it is the gradient of, so that the fork goes both ways.
    """
    side = _side.get()
    if side is None:
        return one(), other()
    main = torch.cuda.current_stream(side.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        of_other = other()
    of_one = one()
    main.wait_stream(side)
    return of_one, of_other
