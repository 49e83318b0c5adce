"""How a gradient step is executed: device, threads, micro-batches. Kind: effects. Nothing here changes what is computed, up to rounding."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phasicrl.config import ComputeConfig
from phasicrl.machine import num_cores
from phasicrl.rollout import Samples

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of glibc's malloc.h
S = TypeVar("S", bound=Samples)


class Compute:
    """The machine as the phases see it.

    Args:
        config: the user's choices.
        pictures: whether observations are pictures: convolutions like all cores and small pieces, dense layers on vectors do not.

    Raises:
        ValueError: the device does not exist here.
    """

    def __init__(self, config: ComputeConfig, *, pictures: bool) -> None:
        self.device = _device(config.device)
        on_cpu = self.device.type == "cpu"
        self.micro_batch = config.micro_batch if on_cpu and pictures else None
        self.num_threads = config.num_threads or (num_cores() if pictures else 1)
        if on_cpu:
            torch.set_num_threads(self.num_threads)
            _keep_memory()
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without
            torch.use_deterministic_algorithms(True)

    def pieces(self, samples: S) -> Iterator[tuple[S, float]]:
        """Cut samples into micro-batches, with the share of the whole that each is: their weighted losses add up to the mean loss."""
        size = max(self.micro_batch // samples.first.shape[1], 1) if self.micro_batch else len(samples)
        for start in range(0, len(samples), size):
            piece = samples.take(slice(start, start + size))
            yield piece, len(piece) / len(samples)

    def gradient_step(
        self,
        loss_of: Callable[[S], Tensor],
        samples: S,
        *,
        networks: Sequence[Sequence[nn.Parameter]],
        optimizer: Optimizer,
        max_grad_norm: float | None,
    ) -> Tensor:
        """One step of gradient descent on the mean loss over `samples`; returns the gradient's norm before clipping.

        The gradient of each network is clipped by its own norm, so that a large value loss does not shrink the policy's step.
        Parameters that the loss does not reach have no gradient, rather than a zero one, so that Adam leaves them alone.
        """
        optimizer.zero_grad(set_to_none=True)
        for piece, share in self.pieces(samples):
            (loss_of(piece) * share).backward()
        norms = []
        for parameters in networks:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not gradients:
                continue
            norms.append(nn.utils.get_total_norm(gradients))
            if max_grad_norm is not None:
                torch._foreach_mul_(gradients, (max_grad_norm / (norms[-1] + 1e-6)).clamp(max=1.0))
        optimizer.step()
        return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def _keep_memory() -> None:
    """Ask glibc to keep freed memory instead of giving it back to the system after every layer.

    PyTorch's CPU allocator has no cache of its own, so that each activation would be mapped, faulted in and unmapped again: a quarter
    of the IMPALA network's time with pieces of 64 pictures, half of it with 2,048 (docs/performance.md). Other C libraries do without.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _device(name: str) -> torch.device:
    """The device of that name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"compute.device is {name!r}, which does not work here ({reason}); `auto` takes what is there") from None
    return device
