"""Machine: cores, processor, installed packages, commit of the code.

Kind: effects (reads system files, runs git).
"""

import importlib.metadata
import math
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


def num_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and control group.

    The quota of a control group is rounded: a thread with less than half a core would delay others.
    """
    cores, quota = len(os.sched_getaffinity(0)), cgroup_cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota + 0.5)))


def cgroup_cpu_quota(
    membership_file: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return the CPU quota of this process's control groups, in cores; None without a limit.

    Args:
        membership_file: file with the names of the process's groups.
        root: directory where control groups are mounted. For version 1, only the group mounted
            at `root` is read: in a container, its own.
    """
    group = Path()
    with suppress(OSError):
        group = Path(membership_file.read_text().rpartition("0::")[2].strip().lstrip("/"))
    limits = [(root / folder / "cpu.max",) for folder in (group, *group.parents)]
    limits += [tuple(root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))]
    quotas: list[float] = []  # of nested groups, of which the smallest counts
    for files in limits:
        with suppress(OSError, ValueError):  # no limit is the word "max", or -1
            quota, period = map(int, " ".join(file.read_text() for file in files).split())
            quotas += [quota / period] if quota > 0 else []
    return min(quotas, default=None)


def processor() -> str:
    """Return the name of the processor, such as its brand and model."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def get_versions() -> dict[str, str | None]:
    """Return the versions of Python and of required packages; None for a missing package."""
    packages = ("phasicrl", "torch", "numpy", "gymnasium", "envpool")
    return {"python": platform.python_version()} | {x: package_version(x) for x in packages}


def package_version(package: str) -> str | None:
    """Return the installed version of a package; None if the package is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def find_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return a directory's git commit, with `-dirty` after changes; None outside a checkout."""
    # The first command fails in folders that the surrounding repository does not track.
    verify, describe = "rev-parse --verify HEAD:./", "describe --always --dirty --exclude=*"
    try:
        for words in (verify, describe):
            answer = subprocess.check_output(
                ["git", *words.split()], cwd=folder, stderr=subprocess.DEVNULL, text=True
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.strip()


def import_optional(name: str, message: str, extra: str = "lab") -> Any:
    """Import and return a module of an optional package.

    Args:
        name: name of the module.
        message: beginning of the error message, such as `films need imageio-ffmpeg`.
        extra: extra of phasicrl with the package.

    Raises:
        ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModuleNotFoundError(f"{message}: pip install 'phasicrl[{extra}]'") from None
