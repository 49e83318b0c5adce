"""How the networks run best on this machine: measured once, kept on disk. Kind: effects (times the network; reads and writes a cache)."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phasicrl.execution.pooling import MaxPool
from phasicrl.execution.precision import Precision, encode, encoders_in
from phasicrl.host.machine import package_version, processor

MICRO_BATCHES = (32, 64, 128)
"""Pieces of 256 were 3 % faster than the best of these in bf16, 8 % slower in fp32 (docs/performance.md), and take half a gigabyte more."""
LARGEST_PIECE = 256 * 64 * 64 * 3
"""Numbers in a piece: of larger pictures, the largest pieces would need too much memory."""
TOLERANCE = 2.0
"""How many times as far off as rounding makes bf16's features and gradients may be: 0.98 to 1.14 in sixty networks of all widths."""
LEAST_ROUNDING, LEAST_ROUNDING_OF_ONE = 2**-8, 0.1
"""What rounding to 8 bits is taken to make at least, of features and all gradients, and of a single parameter's gradient: these are small sums of large terms."""
WORTH = 1.1
"""How much faster bf16 must be to be taken."""
NOISE = 0.97
"""Rates this near the fastest are as fast: of these the largest pieces are taken, which have the fewest calls."""
WORTH_OF_POOLS = 1.02
"""How much faster compiled max-pools must be: more than noise."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the probe found.

    Attributes:
        micro_batch: observations per piece that were fastest, for each precision; of sizes that are as fast the largest.
        rate: observations per second, forward and backward, with these pieces.
        error: of bf16, in multiples of what rounding makes, as `bf16_error` says; NaN where it does not run.
        compiled: the rate with compiled max-pools, zero where they cannot be compiled or are wrong; empty if that was not tried.
    """

    micro_batch: dict[Precision, int]
    rate: dict[Precision, float]
    error: float
    compiled: dict[Precision, float] = field(default_factory=dict)

    @property
    def bf16_is_right(self) -> bool:
        """Whether bf16 gives fp32's numbers, up to its rounding."""
        return self.error <= TOLERANCE

    @property
    def bf16_pays(self) -> bool:
        """Whether bf16 is right and faster."""
        return self.bf16_is_right and self.rate["bf16"] > WORTH * self.rate["fp32"]

    def compiling_pays(self, precision: Precision) -> bool:
        """Whether compiled max-pools are right and faster."""
        return self.compiled.get(precision, 0.0) > WORTH_OF_POOLS * self.rate[precision]

    def __str__(self) -> str:
        """One line."""
        speeds = ", ".join(f"{name} {rate:,.0f} pictures/s in pieces of {self.micro_batch[name]}" for name, rate in self.rate.items())
        if self.compiled:
            rates = ", ".join(f"{name} {rate:,.0f}" if rate else f"{name} does not run here" for name, rate in self.compiled.items())
            speeds += f", with compiled max-pools {rates}"
        return f"networks on this machine: {speeds}; bf16 is {'right' if self.bf16_is_right else f'wrong here ({off_by(self.error)})'}"


def probe(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    obs: Tensor,
    *,
    pools: Sequence[MaxPool] = (),
    seconds: float = 0.25,
) -> Findings:
    """Time forward and backward passes in each precision and size of piece, then with compiled max-pools; check bf16 for rightness.

    Args:
        network: features `[N, D]` of observations.
        parameters: the network's.
        obs: pictures to try it with, `[N, …]`; no piece is larger than this, or has more numbers than `LARGEST_PIECE`.
        pools: the network's, to be tried compiled, which takes half a minute the first time; they are left eager.
        seconds: for each combination.
    """
    most = min(len(obs), LARGEST_PIECE // obs[0].numel())
    whole = obs.device.type == "cuda"  # a GPU takes minibatches as they are
    sizes = [len(obs)] if whole else [size for size in MICRO_BATCHES if size <= most] or [min(MICRO_BATCHES[0], len(obs))]
    best: dict[Precision, tuple[float, int]] = {}
    error = float("nan")
    for precision in ("fp32", "bf16"):
        rates = _rates(network, parameters, obs, precision, sizes=sizes, seconds=seconds)
        size = max((size for size, rate in rates.items() if rate >= NOISE * max(rates.values())), default=sizes[0])
        best[precision] = rates.get(size, 0.0), size
        if precision == "bf16" and rates:
            error = bf16_error(network, parameters, obs[:size])

    def with_pools(some: Tensor, precision: Precision) -> float:
        """Observations per second with compiled max-pools; zero if they cannot be had."""
        try:
            for pool in pools:
                pool.compiled = True
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # which is how they say that they run eagerly
                return _rate(network, parameters, some, precision, seconds)
        except (RuntimeError, RuntimeWarning):
            return 0.0
        finally:
            for pool in pools:
                pool.compiled = False

    compiled: dict[Precision, float] = {
        name: with_pools(obs[:size], name)
        for name, (rate, size) in best.items()
        if pools and rate and (name == "fp32" or error <= TOLERANCE)
    }
    return Findings({name: size for name, (_, size) in best.items()}, {name: rate for name, (rate, _) in best.items()}, error, compiled)


def probe_once(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    obs: Tensor,
    *,
    pools: Sequence[MaxPool] = (),
    num_threads: int,
    cache: Path | None = None,
) -> Findings:
    """`probe`, or what it found when it last ran here on such a network, with these versions and so many threads.

    Args:
        network: see `probe`.
        parameters: see `probe`.
        obs: see `probe`.
        pools: see `probe`.
        num_threads: of PyTorch.
        cache: the file that keeps findings; `~/.cache/phasicrl/probe.json` unless given.
    """
    device = torch.cuda.get_device_name(obs.device) if obs.device.type == "cuda" else f"{processor()}, {num_threads} threads"
    versions = f"torch {package_version('torch')}; phasicrl {package_version('phasicrl')}"
    key = f"{platform.node()}; {device}; {versions}; {tuple(obs.shape)} {obs.dtype}; {MICRO_BATCHES}; {[tuple(p.shape) for p in parameters]}; {len(pools)}"
    try:
        path = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phasicrl" / "probe.json"
    except RuntimeError:  # there is no home
        return probe(network, parameters, obs, pools=pools)
    kept = _read(path)
    if key in kept:
        return Findings(**kept[key])
    findings = probe(network, parameters, obs, pools=pools)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(_read(path) | {key: dataclasses.asdict(findings)}, indent=1))
        os.replace(temporary, path)
    except OSError:
        pass  # measured anew next time
    return findings


def _read(path: Path) -> dict[str, Any]:
    """What is kept; nothing, if the file is not there or is damaged."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    fields = {field.name for field in dataclasses.fields(Findings)}
    return {key: value for key, value in kept.items() if isinstance(value, dict) and set(value) == fields} if isinstance(kept, dict) else {}


def forward_backward(
    network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor, precision: Precision
) -> list[Tensor]:
    """Features `[N, D]`, then the gradient of their weighted mean by each parameter that they depend on, all in fp32."""
    with encoders_in(precision):
        features = encode(network, obs, device=obs.device)
    weights = torch.linspace(-1, 1, features.shape[-1], device=obs.device)
    gradients = torch.autograd.grad((features @ weights).mean(), list(parameters), allow_unused=True)
    return [features.detach(), *(gradient.float() for gradient in gradients if gradient is not None)]


def bf16_error(network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor) -> float:
    """How far bf16 is from fp32, in multiples of what rounding makes of this network; NaN where bf16 does not run.

    Counted are the features, all gradients together, and each parameter's gradient, whichever is off most. What rounding makes depends on
    the network (the narrower, the more), so that it is found out: fp32 kernels, with every number rounded to bf16 between them.
    """
    exact = forward_backward(network, parameters, obs, "fp32")
    try:
        found = forward_backward(network, parameters, obs, "bf16")
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        return float("nan")
    with _Rounding():
        rounded = forward_backward(network, parameters, obs, "fp32")
    least = np.full(len(exact) + 1, LEAST_ROUNDING_OF_ONE)
    least[:2] = LEAST_ROUNDING
    return float(np.max(_distances(found, exact) / np.maximum(_distances(rounded, exact), least)))  # not Python's max, which may lose a NaN


def _distances(found: Sequence[Tensor], exact: Sequence[Tensor]) -> np.ndarray:
    """Relative errors of what `forward_backward` returns: of the features, of all gradients together, and of each gradient."""
    (features, *gradients), (right_features, *right) = found, exact
    whole, right_whole = (torch.cat([gradient.flatten() for gradient in some]) for some in (gradients, right))
    # Of a gradient that is next to nothing, rounding may be more than all.
    least = max(0.01 * float(right_whole.norm()), 1e-12)
    each = [(one - other).norm() / other.norm().clamp_min(least) for one, other in zip(gradients, right, strict=True)]
    return np.array([relative_error(features, right_features), relative_error(whole, right_whole), *map(float, each)])


class _Rounding(TorchFunctionMode):
    """Meanwhile every function's numbers are rounded to bf16, those that it gets and those that it returns, and so are the gradients that go back."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rounded = [_rounded(value) for value in args]
        return _rounded(func(*rounded, **{name: _rounded(value) for name, value in (kwargs or {}).items()}))


def _rounded(value: Any) -> Any:
    """A tensor of fp32 numbers in bf16's precision, its gradient too; anything else as it is."""
    return value.bfloat16().float() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def off_by(error: float) -> str:
    """An error of `bf16_error`, for people."""
    return "it does not run" if np.isnan(error) else f"off by {error:,.0f} times what rounding makes"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch says by it that memory is full; on a CPU it is a plain error."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def relative_error(found: Tensor, right: Tensor) -> float:
    """‖found − right‖ / ‖right‖."""
    return float((found - right).norm() / right.norm().clamp_min(1e-12))


def _rates(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    obs: Tensor,
    precision: Precision,
    *,
    sizes: list[int],
    seconds: float,
) -> dict[int, float]:
    """Observations per second by size of the pieces, without those that there is no memory for; none for a bf16 that does not run.

    Raises:
        RuntimeError: the network does not even run in fp32 with the smallest.
    """
    rates: dict[int, float] = {}
    for size in sizes:
        try:
            rates[size] = _rate(network, parameters, obs[:size], precision, seconds)
        except RuntimeError as problem:
            if precision == "fp32" and not rates:
                raise
            # Memory says nothing about a precision; a kernel that fails for one size is not to be trusted with the others.
            return rates if precision == "fp32" or is_out_of_memory(problem) else {}
    return rates


def _rate(
    network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor, precision: Precision, seconds: float
) -> float:
    """Observations per second: the fastest of some passes, because others use the machine too."""
    forward_backward(network, parameters, obs, precision)
    fastest, start = float("inf"), perf_counter()
    while perf_counter() - start < seconds:
        before = perf_counter()
        forward_backward(network, parameters, obs, precision)
        if obs.device.type == "cuda":
            torch.cuda.synchronize(obs.device)
        fastest = min(fastest, perf_counter() - before)
    return len(obs) / fastest
