"""Device and PyTorch settings of a run. Kind: effects (changes PyTorch's settings)."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phasicrl.execution.plan import Plan
from phasicrl.seeding import derive_seed

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of glibc's malloc.h
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_TRAINING_LOCK = threading.RLock()
"""Lock of the thread that trains: all threads share PyTorch's settings."""


def resolve_device(device: str, prefers_gpu: bool) -> str:
    """Return the device's name with its index; `auto` is a GPU if `prefers_gpu` and there is one.

    Raises:
        ValueError: the device does not exist here.
    """
    if device == "auto":
        device = "cuda" if prefers_gpu and torch.cuda.is_available() else "cpu"
    try:
        return str(torch.empty(0, device=device).device)
    except (RuntimeError, AssertionError) as error:
        rule = f"a device that works here ({str(error).splitlines()[0]}). Use auto"
        raise ValueError(f"compute.device is {device!r}; expected {rule}") from None


@contextmanager
def use_threads(num_threads: int) -> Iterator[None]:
    """Set PyTorch's threads on a CPU, and restore their number at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def use_torch_settings(plan: Plan, seed: int, rank: int) -> Iterator[None]:
    """Set PyTorch's threads, determinism and global generator, and restore all at the end.

    Networks of the user draw from the generator on the CPU, such as for dropout.

    Raises:
        ValueError: another thread of this process trains.
    """
    if not _TRAINING_LOCK.acquire(blocking=False):
        raise ValueError("another thread is training; expected none. Use one process per run")
    mode, variable = torch.get_deterministic_debug_mode(), os.environ.get(_CUBLAS)
    try:
        if not plan.on_gpu:
            keep_freed_memory()
        if plan.deterministic:
            os.environ.setdefault(_CUBLAS, ":4096:8")  # cuBLAS is not deterministic without
            torch.use_deterministic_algorithms(True)
        num_threads = torch.get_num_threads() if plan.on_gpu else plan.num_threads
        with use_threads(num_threads), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, "torch", rank))
            yield
    finally:
        if variable is None:
            os.environ.pop(_CUBLAS, None)
        torch.set_deterministic_debug_mode(mode)
        _TRAINING_LOCK.release()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system after every layer.

    PyTorch's CPU allocator has no cache: mapping memory for each activation takes a fifth of the
    IMPALA network's time with micro-batches of 64 images, and more than half with 2,048
    (docs/performance.md).
    """
    glibc = ctypes.CDLL(None)
    glibc.mallopt(_M_MMAP_MAX, 0)
    glibc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
