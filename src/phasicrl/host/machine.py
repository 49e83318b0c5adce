"""What this machine has: cores, memory, threads, installed packages.

Kind: effects (asks the system, and moves threads).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import math
import os
import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any


def num_cores() -> int:
    """Threads that can run at once; never below one.

    They are as many as the cores that this process may use, or fewer if a container allows less
    time. Half a core more counts as one: a thread that mostly waits for its share holds up those
    that wait for it.
    """
    cores, quota = len(usable_cores()), cgroup_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota + 0.5)))


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may use.

    OpenMP may have bound the thread that asks to one of them (`OMP_PROC_BIND`,
    `GOMP_CPU_AFFINITY`), as soon as it was loaded; its list of places then has the others.
    """
    return set(os.sched_getaffinity(0)) | _places_of_openmp()


def _places_of_openmp() -> set[int]:
    """The cores to which OpenMP binds its threads.

    Empty if it is not loaded, or leaves them to the system.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    cores: set[int] = set()
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "omp" in line}):
        if not Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        with suppress(OSError, AttributeError):  # not a library, or one from before OpenMP 4.5
            library = ctypes.CDLL(path)
            for place in range(library.omp_get_num_places()):
                numbers = (ctypes.c_int * library.omp_get_place_num_procs(place))()
                library.omp_get_place_proc_ids(place, numbers)
                cores.update(numbers)
    return cores


_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cgroup_quota(groups: Path = _GROUPS, root: Path = _MOUNTED) -> float | None:
    """Processor time that this process's control groups allow, in cores.

    The tightest of nested groups counts. None without a limit.

    Args:
        groups: the file that names the process's groups.
        root: where control groups are mounted: version 2 there or in `unified`, version 1 in a
            folder for each set of controllers.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return None
    quotas: list[float] = []
    for _, controllers, name in (line for line in lines if len(line) == 3):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = (root / controllers, root / "cpu") if controllers else (root, root / "unified")
        # Inside a container the name may be the host's, and not be there; the container's own limit
        # is then at the mount itself.
        own = Path(name.lstrip("/"))
        folders = [mount / folder for mount in mounts for folder in (own, *own.parents)]
        quotas += [quota for folder in folders if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _quota(folder: Path) -> float | None:
    """One group's limit in cores, from its quota and its period; None without a limit."""
    with suppress(OSError, ValueError):  # version 2; without a limit its quota is the word "max"
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):  # version 1
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    return None


def thread_ids() -> set[int]:
    """The threads of this process; empty where the system does not say."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


class FollowingThreads:
    """Threads that work only while another one waits for them, and are kept on its core.

    A core with nothing to do falls asleep, and to wake it can take a virtual machine longer than a
    quick environment steps.

    Args:
        threads: ids of the system's, as `thread_ids` tells them.
    """

    def __init__(self, threads: set[int]) -> None:
        self._threads = set(threads)
        self._core_of_caller = _core_teller() if threads else None
        self._core = -1

    def follow(self) -> None:
        """Move to the core that the caller runs on."""
        if self._core_of_caller is None or (core := self._core_of_caller()) == self._core:
            return
        self._core = core
        place(self._threads, {core})


def _core_teller() -> Callable[[], int] | None:
    """The C library's function that tells the caller's core; None where there is none."""
    return getattr(ctypes.CDLL(None), "sched_getcpu", None)


def spread(threads: set[int], cores: set[int] | None = None) -> None:
    """Give each of these threads a core of its own, in turn: of these cores, or of all usable ones.

    Linux starts a thread on the core of the one that wakes it, and does not look for an idle core
    if waits are shorter than half a millisecond: of two threads that step environments one would
    wait for the other.
    """
    for thread, core in zip(sorted(threads), cycle(sorted(cores or usable_cores())), strict=False):
        place({thread}, {core})


def place(threads: set[int], cores: set[int]) -> None:
    """Let these threads run on these cores and no others. 0 is the thread that calls.

    This is only about speed: a thread that has ended, and a system that does not know or allow it,
    are passed over.
    """
    for thread in threads:
        with suppress(OSError, AttributeError):
            os.sched_setaffinity(thread, cores)


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Meanwhile the caller may run on every usable core, and so may every thread that starts.

    A thread inherits the cores of the one that starts it, which OpenMP may have bound to one.
    """
    own = os.sched_getaffinity(0)
    place({0}, usable_cores())
    try:
        yield
    finally:
        place({0}, own)


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
