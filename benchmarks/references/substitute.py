"""Stand-ins for modules that are not installed, for precisions, and for random draws.

No reference is changed. In float64 the name `float32` means 64 bits to the modules imported here,
theirs and ours: all of them name 32 bits in their source, and none has an option for it.
"""

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium  # noqa: F401  # before anything is substituted
import numpy as np
import torch


def stand_in(module: Any, **changes: Any) -> Any:
    """Return a module that is another one except for some names."""
    other = types.ModuleType(module.__name__)
    other.__dict__.update(
        {"__getattr__": lambda name: getattr(module, name), "__spec__": module.__spec__}, **changes
    )
    return other


def invented(name: str, **names: Any) -> Any:
    """Return a package in place of one that is not installed."""
    module: Any = types.ModuleType(name)
    module.__dict__.update({"__path__": []} | names)
    return module


def packages_in(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return packages of a repository, without running their `__init__`."""
    places = {name: str(path.joinpath(*name.split("."))) for name in names}
    return {name: invented(name, __path__=[place]) for name, place in places.items()}


@contextlib.contextmanager
def importing(substitutes: dict[str, Any]) -> Iterator[None]:
    """Let imports find these modules meanwhile."""
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
    """Return PyTorch and NumPy for a program; in float64 its `float32` has 64 bits."""
    return {
        "torch": stand_in(torch, float32=getattr(torch, precision), **(of_torch or {})),
        "numpy": stand_in(np, float32=getattr(np, precision), **(of_numpy or {})),
    }


def compute_in(precision: str) -> None:
    """Make tensors in this precision from here on, also by `tensor.float()`.

    `tensor.double()` stays a copy, as it is of 32 bits.
    """
    if precision == "float64":
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        torch.Tensor.double = lambda x: x.to(torch.float64, copy=True)  # type: ignore[method-assign]


def fresh_import(name: str, substitutes: dict[str, Any]) -> Any:
    """Import a module with these substitutes."""
    with importing(substitutes):
        return importlib.import_module(name)


@contextlib.contextmanager
def draws_given(draw: Callable[[], np.ndarray]) -> Iterator[None]:
    """Let PyTorch's distributions return given draws."""

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
    """Collect every number whose gradient is computed meanwhile."""
    noted: list[float] = []
    backward = torch.Tensor.backward

    def noting(self: torch.Tensor, *args: Any, **options: Any) -> None:
        noted.append(float(self.detach()))
        backward(self, *args, **options)

    with patch.object(torch.Tensor, "backward", noting):
        yield noted


@contextlib.contextmanager
def optimizers_noted() -> Iterator[list[torch.optim.Adam]]:
    """Collect every Adam that is made meanwhile."""
    made: list[torch.optim.Adam] = []
    begin = torch.optim.Adam.__init__

    def noting(self: torch.optim.Adam, *args: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *args, **options)

    with patch.object(torch.optim.Adam, "__init__", noting):
        yield made


@contextlib.contextmanager
def divergence_turned(turned: bool) -> Iterator[None]:
    """Let PyTorch's divergence of categorical distributions add up its terms in reverse order."""
    divergence = torch.distributions.kl_divergence

    def of_turned(
        old: torch.distributions.Categorical, new: torch.distributions.Categorical
    ) -> torch.Tensor:
        return divergence(
            *(torch.distributions.Categorical(logits=one.logits.flip(-1)) for one in (old, new))
        )

    with patch.object(torch.distributions, "kl_divergence", of_turned if turned else divergence):
        yield
