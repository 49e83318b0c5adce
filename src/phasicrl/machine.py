"""What this machine has: cores, memory, threads, installed packages. Kind: effects (asks the system, and moves threads)."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import sys
from contextlib import suppress
from itertools import cycle
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_ids() -> set[int]:
    """The threads of this process; empty where the system does not say."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


class Companion:
    """Threads that work only while another one waits for them, and are kept on its core.

    A core with nothing to do falls asleep, and to wake it can take a virtual machine longer than a quick environment steps.

    Args:
        threads: ids of the system's, as `thread_ids` tells them.
    """

    def __init__(self, threads: set[int]) -> None:
        self._threads = set(threads) if hasattr(os, "sched_setaffinity") else set()
        self._core_of_caller = getattr(ctypes.CDLL(None), "sched_getcpu", None) if self._threads else None
        self._core = -1

    def follow(self) -> None:
        """Move to the core that the caller runs on."""
        if self._core_of_caller is None or (core := self._core_of_caller()) == self._core:
            return
        self._core = core
        for thread in tuple(self._threads):
            try:
                os.sched_setaffinity(thread, {core})
            except OSError:  # it has ended, or the system does not allow it: this is only about speed
                self._threads.discard(thread)


def spread(threads: set[int]) -> None:
    """Give each of these threads a core of its own, in turn.

    Linux starts a thread on the core of the one that wakes it, and does not look for an idle core if waits are shorter than half a
    millisecond: of two threads that step environments one would wait for the other.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    for thread, core in zip(sorted(threads), cycle(cores), strict=False):
        with suppress(OSError):  # it has ended, or the system does not allow it: this is only about speed
            os.sched_setaffinity(thread, {core})


def free_memory() -> int | None:
    """Bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        return free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):
        return free


def peak_memory() -> int:
    """Most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def processor() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def describe() -> dict[str, str | int | None]:
    """What decides about speed anywhere: processor, cores, versions."""
    versions = {package: package_version(package) for package in ("phasicrl", "torch", "envpool", "gymnasium", "numpy")}
    return {"processor": processor(), "cores": num_cores(), **versions, "python": platform.python_version()}


def package_version(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
