"""In which precision the encoders run at the moment. Kind: state (one setting, for the length of a `with`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Precision = Literal["fp32", "bf16"]

_now: ContextVar[Precision] = ContextVar("precision", default="fp32")


@contextmanager
def encoders_in(precision: Precision) -> Iterator[None]:
    """Encoders run in that precision meanwhile; heads, losses and gradients of heads do not."""
    token = _now.set(precision)
    try:
        yield
    finally:
        _now.reset(token)


def encode(encoder: Callable[[Any], Tensor], inputs: Any, *, device: torch.device) -> Float[Tensor, "N D"]:
    """An encoder's features, in fp32, computed in the precision of the moment."""
    with _autocast(device, _now.get()):
        return encoder(inputs).float()


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The context for forward passes in that precision. Nothing is kept between calls: a recorded step would go on with old weights."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
