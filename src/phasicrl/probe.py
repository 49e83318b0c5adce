"""How the networks run best on this machine: measured once, kept on disk. Kind: effects (times the network; reads and writes a cache)."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn

from phasicrl.machine import package_version, processor

Precision = Literal["fp32", "bf16"]

MICRO_BATCHES = (32, 64, 128, 256)
TOLERANCE = 0.03
"""Largest relative error of bf16's features and gradients against fp32's, by their norms: rounding to 8 bits leaves about 0.01."""
WORTH = 1.1
"""How much faster bf16 must be to be taken."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the probe found.

    Attributes:
        micro_batch: observations per piece that were fastest, for each precision.
        rate: observations per second, forward and backward, with these pieces.
        error: relative error of bf16's features and gradients, the larger; NaN where it does not run.
    """

    micro_batch: dict[Precision, int]
    rate: dict[Precision, float]
    error: float

    @property
    def bf16_is_right(self) -> bool:
        """Whether bf16 gives fp32's numbers, up to its rounding."""
        return self.error <= TOLERANCE

    @property
    def bf16_pays(self) -> bool:
        """Whether bf16 is right and faster."""
        return self.bf16_is_right and self.rate["bf16"] > WORTH * self.rate["fp32"]

    def __str__(self) -> str:
        """One line."""
        speeds = ", ".join(f"{name} {rate:,.0f} pictures/s in pieces of {self.micro_batch[name]}" for name, rate in self.rate.items())
        return f"networks on this machine: {speeds}; bf16 is {'right' if self.bf16_is_right else f'wrong here (off by {self.error:.1%}) and left out'}"


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The context in which encoders run in that precision. Nothing is kept between calls: a recorded step would go on with old weights."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def probe(network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor, *, seconds: float = 0.25) -> Findings:
    """Time forward and backward passes in each precision and size of piece, and check bf16 against fp32.

    Args:
        network: features `[N, D]` of observations.
        parameters: the network's.
        obs: at least as many observations as the largest piece, `[N, …]`.
        seconds: for each combination.
    """
    sizes = [size for size in MICRO_BATCHES if size <= len(obs)] or [len(obs)]
    best: dict[Precision, tuple[float, int]] = {}
    exact, error = _pass(network, parameters, obs[: sizes[0]], "fp32"), float("nan")
    for precision in ("fp32", "bf16"):
        try:
            if precision == "bf16":
                error = max(
                    _error(found, right) for found, right in zip(_pass(network, parameters, obs[: sizes[0]], "bf16"), exact, strict=True)
                )
            best[precision] = max((_rate(network, parameters, obs[:size], precision, seconds), size) for size in sizes)
        except RuntimeError:  # a kernel that this machine does not have
            best[precision] = (0.0, sizes[0])
    return Findings({name: size for name, (_, size) in best.items()}, {name: rate for name, (rate, _) in best.items()}, error)


def probe_once(
    network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor, *, num_threads: int, cache: Path | None = None
) -> Findings:
    """`probe`, or what it found when it last ran here on such a network, with these versions and so many threads.

    Args:
        network: see `probe`.
        parameters: see `probe`.
        obs: see `probe`.
        num_threads: of PyTorch.
        cache: the file that keeps findings; `~/.cache/phasicrl/probe.json` unless given.
    """
    path = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phasicrl" / "probe.json"
    device = torch.cuda.get_device_name(obs.device) if obs.device.type == "cuda" else f"{processor()}, {num_threads} threads"
    shapes = [tuple(parameter.shape) for parameter in parameters]
    key = f"{platform.node()}; {device}; torch {package_version('torch')}; {tuple(obs.shape[1:])} {obs.dtype}; {shapes}"
    try:
        kept = json.loads(path.read_text())
        return Findings(**kept[key])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    findings = probe(network, parameters, obs)
    try:
        kept = json.loads(path.read_text()) if path.is_file() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(kept | {key: dataclasses.asdict(findings)}, indent=1))
        os.replace(temporary, path)
    except (OSError, ValueError):
        pass  # measured anew next time
    return findings


def _pass(network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor, precision: Precision) -> list[Tensor]:
    """Features, and the gradient of their weighted sum."""
    with autocast(obs.device, precision):
        features = network(obs)
    features = features.float()
    weights = torch.linspace(-1, 1, features.shape[-1], device=obs.device)
    gradients = torch.autograd.grad((features @ weights).mean(), list(parameters), allow_unused=True)
    return [features.detach(), torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])]


def _error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm().clamp_min(1e-12))


def _rate(
    network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor, precision: Precision, seconds: float
) -> float:
    """Observations per second: the fastest of some passes, because others use the machine too."""
    _pass(network, parameters, obs, precision)
    fastest, start = float("inf"), perf_counter()
    while perf_counter() - start < seconds:
        before = perf_counter()
        _pass(network, parameters, obs, precision)
        if obs.device.type == "cuda":
            torch.cuda.synchronize(obs.device)
        fastest = min(fastest, perf_counter() - before)
    return len(obs) / fastest
