"""What this machine has: cores, memory, threads, installed packages.

Kind: effects (asks the system).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any


def num_cores() -> int:
    """Return the number of cores that this process may use: its affinity, or less by its cgroup.

    Half a core or more counts as one: a thread that mostly waits for its share delays the others.
    """
    cores, quota = len(os.sched_getaffinity(0)), cgroup_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota + 0.5)))


_MOUNTED = Path("/sys/fs/cgroup")


def cgroup_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = _MOUNTED) -> float | None:
    """Return the CPU time that control groups allow this process, in cores; None without a limit.

    Args:
        groups: file with the names of the process's groups.
        root: folder where control groups are mounted. Of version 1 only the group at the mount
            counts, which is a container's own.
    """
    quotas: list[float] = []
    with suppress(OSError):
        own = Path(groups.read_text().rpartition("0::")[2].strip().lstrip("/"))
        for folder in (own, *own.parents):  # the tightest of nested groups counts
            with suppress(OSError, ValueError):  # without a limit the quota is the word "max"
                quota, period = (root / folder / "cpu.max").read_text().split()
                quotas.append(int(quota) / int(period))
    with suppress(OSError, ValueError):
        files = (root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        limit, period_us = (int(file.read_text()) for file in files)
        quotas += [limit / period_us] if limit > 0 else []
    return min(quotas, default=None)


def free_memory() -> int | None:
    """Bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    free = int(available.split()[1]) * 1024
    with suppress(OSError, ValueError):  # no control group, or the word "max": no limit
        limit = int((_MOUNTED / "memory.max").read_text())
        return min(free, limit - int((_MOUNTED / "memory.current").read_text()))
    return free


def peak_memory() -> int:
    """Most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def processor() -> str:
    """Name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def describe() -> dict[str, str | int | None]:
    """What decides about speed anywhere: processor, cores, versions."""
    return {"processor": processor(), "cores": num_cores(), **versions()}


def versions() -> dict[str, str | None]:
    """Of Python and the packages that decide about results; None of one that is not installed."""
    packages = ("phasicrl", "torch", "numpy", "gymnasium", "envpool")
    return {"python": platform.python_version()} | {x: package_version(x) for x in packages}


def package_version(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def optional_module(name: str, need: str, extra: str) -> Any:
    """Import a module that need not be installed.

    Args:
        name: of the module.
        need: what needs which package, for the message: `films need imageio-ffmpeg`.
        extra: of phasicrl, which brings the package.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModuleNotFoundError(f"{need}: pip install 'phasicrl[{extra}]'") from None
