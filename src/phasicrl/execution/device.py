"""The device that a run computes on, and its threads.

Kind: effects (sets up PyTorch and the C library).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from phasicrl.execution.compiled import has_compiler
from phasicrl.execution.plan import Machine, Plan
from phasicrl.execution.turns import Turns
from phasicrl.host.machine import num_cores

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of glibc's malloc.h


def this_machine(device: str) -> Machine:
    """What a plan for this device depends on.

    Args:
        device: `auto` is a GPU if there is one.

    Raises:
        ValueError: the device does not exist here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"compute.device is {device!r}, which does not work here ({reason}); "
            "`auto` takes what is there"
        ) from None
    return Machine(device=str(found), num_cores=num_cores(), has_compiler=has_compiler())


def set_up_threads(plan: Plan) -> Callable[[], AbstractContextManager[None]]:
    """Set PyTorch's threads on a CPU, and return what makes a context to compute in.

    With `take_turns`, other runs on the same cores wait meanwhile.
    """
    if plan.on_gpu:
        return nullcontext
    torch.set_num_threads(plan.num_threads)
    keep_memory()
    return Turns().turn if plan.take_turns else nullcontext


def keep_memory() -> None:
    """Ask glibc to keep freed memory instead of giving it back to the system after every layer.

    PyTorch's CPU allocator has no cache of its own, so that each activation would be mapped,
    faulted in and unmapped again: a fifth of the IMPALA network's time with micro-batches of 64
    images, more than half of it with 2,048 (docs/performance.md). Other C libraries do without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
