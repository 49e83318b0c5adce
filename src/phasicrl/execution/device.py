"""The device that a run computes on, and its threads.

Kind: effects (sets up PyTorch and the C library).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from phasicrl.execution.compiled import has_compiler
from phasicrl.execution.plan import Machine, Plan
from phasicrl.execution.turns import Turns
from phasicrl.host.machine import Team, num_cores, thread_ids, usable_cores

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of glibc's malloc.h
_GRAIN = 32_768  # numbers that a thread gets at least (ATen/TensorIterator.h)


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


class Threads:
    """The threads that compute, and the turns in which they do.

    Args:
        plan: how many, and whether they are pinned and take turns with other runs.

    Attributes:
        turn: makes a context in which to use all threads: each has a core of its own, and other
            runs on the same cores wait.
    """

    def __init__(self, plan: Plan) -> None:
        self._turns = Turns() if plan.take_turns else None
        self._team = Team(set())
        self.turn: Callable[[], AbstractContextManager[None]] = nullcontext
        if plan.on_gpu:
            return
        torch.set_num_threads(plan.num_threads)
        keep_memory()
        # Fewer are left to the system, and those that OpenMP has bound to it.
        cores, bound = len(usable_cores()), len(os.sched_getaffinity(0))
        if plan.pin_threads and 1 < plan.num_threads == cores == bound:
            self._team = Team(set(_openmp_threads(plan.num_threads)))
        if self._turns is not None or self._team.is_many:
            self.turn = self._turn

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with nullcontext() if self._turns is None else self._turns.turn(), self._team.at_work():
            yield


@functools.cache
def _openmp_threads(num_threads: int) -> frozenset[int]:
    """The threads that libgomp makes for PyTorch beside the caller, made now.

    Those from before cannot be told from others.
    """
    before = thread_ids()
    torch.zeros(num_threads * _GRAIN).add_(1.0)
    return frozenset(thread_ids() - before)


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
