"""How the networks run best on this machine: measured once, kept on disk.

Kind: effects (times a network; keeps a cache).
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from phasicrl.config import ComputeConfig, Precision
from phasicrl.config_io import read_json, write_json
from phasicrl.execution.compute import explaining_memory, is_out_of_memory
from phasicrl.execution.plan import (
    Findings,
    Machine,
    Plan,
    Workload,
    make_plan,
    needs_probe,
    off_by,
    probe_size,
)
from phasicrl.host.machine import package_version, processor
from phasicrl.models.encoders import in_precision

MICRO_BATCHES = (32, 64, 128)
"""Tried on a CPU.

Micro-batches of 256 were 3 % faster than the best of these in bf16, 8 % slower in fp32, and take
half a gigabyte more.
"""
LARGEST_PIECE = 256 * 64 * 64 * 3
"""Numbers in a micro-batch: of larger images, the largest ones would need too much memory."""
LEAST_ROUNDING, LEAST_ROUNDING_OF_ONE = 2**-8, 0.1
"""What rounding to 8 bits makes at least, of features and all gradients, and of one gradient.

A single parameter's gradients are small sums of large terms.
"""
NOISE = 0.97
"""Rates this near the fastest are as fast.

Of these the largest micro-batches are taken, which have the fewest calls.
"""


TURNS = 3
"""Every size is tried so often, in turns: others who use the machine then slow down all."""


def probed_plan(
    wishes: ComputeConfig,
    machine: Machine,
    workload: Workload,
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    shape: tuple[int, ...],
) -> Plan:
    """The plan of a run on images, after a probe of its network where that pays.

    Args:
        wishes: the user's.
        machine: what there is.
        workload: what is asked of it.
        network: features `[N, D]` of images.
        parameters: the network's.
        shape: of an image.

    Raises:
        MemoryError: not even the probe fits.
    """
    plan, findings = make_plan(wishes, machine, workload), None
    device = torch.device(plan.device)

    def images(number: int) -> Tensor:
        generator = Generator().manual_seed(0)
        noise = torch.randint(256, (number, *shape), dtype=torch.uint8, generator=generator)
        return noise.to(device)

    most = probe_size(wishes, machine, workload, largest=max(MICRO_BATCHES))
    smaller = "a small number for compute.micro_batch"
    with explaining_memory("trying the networks", smaller, device=device):
        if needs_probe(wishes, machine, workload):
            findings = probe_once(network, parameters, images(most), num_threads=plan.num_threads)
            plan = make_plan(wishes, machine, workload, findings)
        aux_precision = wishes.aux_precision if workload.has_aux else "fp32"
        asked = {"policy_precision": wishes.policy_precision, "aux_precision": aux_precision}
        used = [f"compute.{name}" for name, precision in asked.items() if precision == "bf16"]
        if used:  # by hand, if it is wrong; looked at in short runs too
            few = images(min(most, MICRO_BATCHES[0]))
            error = findings.error if findings else bf16_error(network, parameters, few)
            if not error <= Findings.TOLERANCE:
                wrong = f"bf16 is wrong on this machine ({off_by(error)})"
                remark = f"{wrong}, and used because of {' and '.join(used)}"
                plan = dataclasses.replace(plan, remarks=(*plan.remarks, remark))
    return plan


def probe(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    obs: Tensor,
    *,
    seconds: float = 0.25,
) -> Findings:
    """Time forward and backward passes in each precision and size of micro-batch.

    bf16 is checked for rightness, too.

    Args:
        network: features `[N, D]` of observations.
        parameters: the network's.
        obs: images to try it with, `[N, …]`; no micro-batch is larger than this, or has more
            numbers than `LARGEST_PIECE`.
        seconds: for each combination.
    """
    most = min(len(obs), LARGEST_PIECE // obs[0].numel())
    sizes = [size for size in MICRO_BATCHES if size <= most] or [min(MICRO_BATCHES[0], len(obs))]
    if obs.device.type == "cuda":  # a GPU takes minibatches as they are
        sizes = [len(obs)]
    best: dict[Precision, tuple[float, int]] = {}
    error = float("nan")
    for precision in ("fp32", "bf16"):
        rates = _rates(network, parameters, obs, precision, sizes=sizes, seconds=seconds)
        fastest = max(rates.values(), default=0.0)
        fast = [size for size, rate in rates.items() if rate >= NOISE * fastest]
        size = max(fast, default=sizes[0])
        best[precision] = rates.get(size, 0.0), size
        if precision == "bf16" and rates:
            error = bf16_error(network, parameters, obs[:size])
    sizes_found: dict[Precision, int] = {name: size for name, (_, size) in best.items()}
    return Findings(sizes_found, {name: rate for name, (rate, _) in best.items()}, error)


def probe_once(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    obs: Tensor,
    *,
    num_threads: int,
    cache: Path | None = None,
) -> Findings:
    """`probe`, or what it found when it last ran here on such a network.

    That was with the same versions and number of threads.

    Args:
        network: see `probe`.
        parameters: see `probe`.
        obs: see `probe`.
        num_threads: of PyTorch.
        cache: the file that keeps findings; `~/.cache/phasicrl/probe.json` unless given.
    """
    device = f"{processor()}, {num_threads} threads"
    if obs.device.type == "cuda":
        device = torch.cuda.get_device_name(obs.device)
    versions = f"torch {package_version('torch')}; phasicrl {package_version('phasicrl')}"
    key = f"{platform.node()}; {device}; {versions}; {tuple(obs.shape)} {obs.dtype}; "
    key += f"{MICRO_BATCHES}; {[tuple(p.shape) for p in parameters]}"
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = cache or caches / "phasicrl" / "probe.json"
    except RuntimeError:  # there is no home
        return probe(network, parameters, obs)
    kept = _read(path)
    if key in kept:
        return Findings(**kept[key])
    findings = probe(network, parameters, obs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _read(path) | {key: dataclasses.asdict(findings)})
    except OSError:
        pass  # measured anew next time
    return findings


def _read(path: Path) -> dict[str, Any]:
    """What is kept; nothing, if the file is not there or is damaged."""
    try:
        kept = read_json(path)
    except (OSError, ValueError):
        return {}
    fields = {field.name for field in dataclasses.fields(Findings)}
    items = kept.items()
    return {key: it for key, it in items if isinstance(it, dict) and set(it) == fields}


def forward_backward(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    obs: Tensor,
    precision: Precision,
) -> list[Tensor]:
    """Features `[N, D]`, then the gradient of their weighted mean by each parameter, in fp32.

    Parameters that they do not depend on are left out.
    """
    with in_precision(precision, obs.device):
        features = network(obs).float()
    weights = torch.linspace(-1, 1, features.shape[-1], device=obs.device)
    mean = (features @ weights).mean()
    gradients = torch.autograd.grad(mean, list(parameters), allow_unused=True)
    return [features.detach(), *(grad.float() for grad in gradients if grad is not None)]


def bf16_error(
    network: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], obs: Tensor
) -> float:
    """How far bf16 is from fp32, in multiples of what rounding makes of this network.

    NaN where bf16 does not run.

    Counted are the features, all gradients together, and each parameter's gradient, whichever is
    off most. What rounding makes depends on the network (the narrower, the more), so that it is
    found out: fp32 kernels, with every number rounded to bf16 between them.
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
    of_rounding = np.maximum(_distances(rounded, exact), least)
    return float(np.max(_distances(found, exact) / of_rounding))  # Python's max may lose a NaN


def _distances(found: Sequence[Tensor], exact: Sequence[Tensor]) -> np.ndarray:
    """Relative errors of what `forward_backward` returns.

    They are those of the features, of all gradients together, and of each gradient.
    """
    (features, *gradients), (right_features, *right) = found, exact
    whole, right_whole = (torch.cat([g.flatten() for g in some]) for some in (gradients, right))
    # Of a gradient that is next to nothing, rounding may be more than all.
    least = max(0.01 * float(right_whole.norm()), 1e-12)
    each = [
        (one - other).norm() / other.norm().clamp_min(least)
        for one, other in zip(gradients, right, strict=True)
    ]
    of_features, of_all = (
        relative_error(features, right_features),
        relative_error(whole, right_whole),
    )
    return np.array([of_features, of_all, *map(float, each)])


class _Rounding(TorchFunctionMode):
    """Meanwhile every function's numbers are rounded to bf16.

    These are the numbers that it gets, those that it returns, and the gradients that go back.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = {name: _rounded(value) for name, value in (kwargs or {}).items()}
        return _rounded(func(*map(_rounded, args), **named))


def _rounded(value: Any) -> Any:
    """A tensor of fp32 numbers in bf16's precision, its gradient too; anything else as it is."""
    is_fp32 = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.bfloat16().float() if is_fp32 else value


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
    """Observations per second by size of the pieces.

    Those that there is no memory for are left out; there is none for a bf16 that does not run.

    Raises:
        RuntimeError: the network does not even run in fp32 with the smallest.
    """
    rates: dict[int, float] = {}
    for turn in range(TURNS):
        for size in sizes if turn == 0 else list(rates):
            pieces = obs[:size]
            try:
                rate = _rate(network, parameters, pieces, precision, seconds / TURNS)
            except RuntimeError as problem:
                if precision == "fp32" and not rates:
                    raise
                # Memory says nothing about a precision; a kernel that fails for one size is not to
                # be trusted with the others.
                if precision == "bf16" and not is_out_of_memory(problem):
                    return {}
                break
            rates[size] = max(rate, rates.get(size, 0.0))
    return rates


def _rate(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    obs: Tensor,
    precision: Precision,
    seconds: float,
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
