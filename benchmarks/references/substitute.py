"""What a program runs with in place of parts of its surroundings.

Modules that are not installed, doubles for singles, orders and draws that are given.

Nothing of a reference's own text is changed. In float64 the name `float32` means 64 bits to the
modules that are imported meanwhile, theirs and ours
alike: all of them name 32 bits in their source, and none has a switch.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import gymnasium  # noqa: F401  # before anything is substituted
import numpy as np
import torch


def stand_in(module: Any, **changes: Any) -> Any:
    """A module that is another but for some names."""
    other = types.ModuleType(module.__name__)
    other.__dict__.update(
        {"__getattr__": lambda name: getattr(module, name), "__spec__": module.__spec__}, **changes
    )
    if hasattr(module, "__path__"):
        other.__path__ = module.__path__
    return other


def invented(name: str, **names: Any) -> Any:
    """A module that is not installed, with what is asked of it.

    A package, so that modules can lie in it.
    """
    module: Any = types.ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []
    return module


def folder_of(name: str, path: str) -> Any:
    """A package at a path, without running its `__init__`."""
    module: Any = types.ModuleType(name)
    module.__path__ = [path]
    return module


@contextlib.contextmanager
def importing(substitutes: dict[str, Any]) -> Iterator[None]:
    """Imports find these modules meanwhile."""
    before = {name: sys.modules.get(name) for name in substitutes}
    sys.modules.update(substitutes)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def torch_and_numpy(
    precision: str,
    *,
    of_torch: dict[str, Any] | None = None,
    of_numpy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """PyTorch and NumPy as a program gets to see them.

    In float64 what it calls `float32` has 64 bits.
    """
    double = precision == "float64"
    return {
        "torch": stand_in(
            torch, **({"float32": torch.float64} if double else {}), **(of_torch or {})
        ),
        "numpy": stand_in(np, **({"float32": np.float64} if double else {}), **(of_numpy or {})),
    }


def compute_in(precision: str) -> None:
    """From now on, tensors are made in this precision, and `tensor.float()` gives it."""
    if precision == "float64":
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def fresh_import(name: str, substitutes: dict[str, Any]) -> Any:
    """Import a module with these substitutes, and with nothing of it kept from before."""
    with importing(substitutes):
        return importlib.import_module(name)


@contextlib.contextmanager
def draws_given(draw: Callable[[], np.ndarray]) -> Iterator[None]:
    """PyTorch's distributions draw what they are told to."""

    def sample(self: Any, sample_shape: Any = ()) -> torch.Tensor:
        values = torch.as_tensor(draw())
        values = values.to(self.mean.dtype) if values.is_floating_point() else values
        return values.reshape(self._extended_shape(torch.Size(sample_shape)))

    with (
        patch.object(torch.distributions.Categorical, "sample", sample),
        patch.object(torch.distributions.Normal, "sample", sample),
        patch.object(torch.distributions.Normal, "rsample", sample),
    ):
        yield


@contextlib.contextmanager
def losses_noted() -> Iterator[list[float]]:
    """Every number whose gradient is taken meanwhile."""
    noted: list[float] = []
    backward = torch.Tensor.backward

    def noting(self: torch.Tensor, *args: Any, **options: Any) -> None:
        noted.append(float(self.detach()))
        backward(self, *args, **options)

    with patch.object(torch.Tensor, "backward", noting):
        yield noted


@contextlib.contextmanager
def optimizers_noted() -> Iterator[list[torch.optim.Adam]]:
    """Every Adam that is made meanwhile."""
    made: list[torch.optim.Adam] = []
    begin = torch.optim.Adam.__init__

    def noting(self: torch.optim.Adam, *args: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *args, **options)

    with patch.object(torch.optim.Adam, "__init__", noting):
        yield made


@contextlib.contextmanager
def divergence_turned(turned: bool) -> Iterator[None]:
    """PyTorch's divergence of categorical distributions meanwhile adds up its terms backwards.

    So it does if that is wished.
    """
    divergence = torch.distributions.kl_divergence

    def of_turned(
        old: torch.distributions.Categorical, new: torch.distributions.Categorical
    ) -> torch.Tensor:
        return divergence(
            *(torch.distributions.Categorical(logits=one.logits.flip(-1)) for one in (old, new))
        )

    with patch.object(torch.distributions, "kl_divergence", of_turned if turned else divergence):
        yield
