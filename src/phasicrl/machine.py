"""What this machine has: cores, free memory, installed packages. Kind: effects (asks the system)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def processor() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def package_version(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
