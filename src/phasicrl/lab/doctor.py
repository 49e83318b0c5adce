"""What this machine can run, and the remedy for what it cannot: `phasicrl doctor`. Kind: effects.

Optional packages are tried in processes of their own: libraries in C++ may abort theirs.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from phasicrl.envs import native
from phasicrl.envs.envpool import PROCGEN, import_envpool, task_families
from phasicrl.envs.gymnasium import GymnasiumEnv, made_by_id
from phasicrl.host import machine

Status = Literal["ok", "warning", "missing", "broken"]

_ENVPOOL = "from phasicrl.lab.doctor import step_envpool; print(step_envpool({!r}))"
_GYMNASIUM = "from phasicrl.lab.doctor import step_gymnasium; print(step_gymnasium())"
_FFMPEG = "import imageio_ffmpeg as x; print(x.__version__, 'ffmpeg', x.get_ffmpeg_version())"
PROBES = {
    "EnvPool Procgen": ("envpool", "procgen", _ENVPOOL.format("StarpilotEasy-v0")),
    "EnvPool Atari": ("envpool", "envpool", _ENVPOOL.format("Pong-v5")),
    "EnvPool MuJoCo": ("envpool", "envpool", _ENVPOOL.format("Ant-v4")),
    "EnvPool classic control": ("envpool", "envpool", _ENVPOOL.format("CartPole-v1")),
    "Gymnasium": ("gymnasium", "all", _GYMNASIUM),
    "MuJoCo of Gymnasium, films": ("mujoco", "mujoco", "import mujoco as x; print(x.__version__)"),
    "video": ("imageio-ffmpeg", "video", _FFMPEG),
    "plotting": ("matplotlib", "plot", "import matplotlib as x; print(x.__version__)"),
    "TensorBoard": ("tensorboard", "tensorboard", "import tensorboard as x; print(x.__version__)"),
}
"""For each name a package, the extra that brings it, and a program that prints what it found."""

PROBE_SECONDS = 120.0
GIB = 2**30
ENOUGH_MEMORY, ENOUGH_DISK = 4 * GIB, 5 * GIB
"""Below these a Procgen run with the paper's settings becomes tight.

One phase stores 6.4 GB of images in full.
"""
_LESS_MEMORY = "fewer env.num_envs or a shorter aux.every need less"
_OTHER_DISK = "runs write checkpoints here; choose another output_dir"

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: what was checked.
        status: `ok`; `warning`: works, but; `missing`: not installed; `broken`: installed, and does
            not work.
        found: result in a few words.
        remedy: what to do; empty if nothing.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def diagnose() -> list[Check]:
    """Return what works on this machine, and remedies for what does not; takes some seconds."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    with ThreadPoolExecutor() as pool:
        probes = list(pool.map(_probe, PROBES))
    return [
        Check("Python", "ok", python),
        Check("PyTorch", "ok", f"{torch.__version__}, {build}"),
        _gpu(),
        _cpu(),
        *probes,
        _space("memory", machine.free_memory(), ENOUGH_MEMORY, _LESS_MEMORY),
        _space("disk", shutil.disk_usage(".").free, ENOUGH_DISK, _OTHER_DISK),
    ]


def as_table(checks: Iterable[Check]) -> Table:
    """Return the checks as a table for the terminal."""
    table = Table(title="phasicrl doctor", title_justify="left")
    for column in ("what", "status", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for check in checks:
        status = Text(check.status, _STYLES[check.status])
        # Plain strings are markup: `phasicrl[plot]` would lose its extra.
        table.add_row(Text(check.name), status, Text(check.found), Text(check.remedy))
    return table


def step_envpool(task_id: str) -> str:
    """Step one environment of an EnvPool task; describe its observations.

    Raises:
        RuntimeError: an image is black.
    """
    is_procgen = task_families()[task_id] == PROCGEN
    libraries = f"; Qt: {native.ensure_qt()}" if is_procgen else ""
    pool = import_envpool(procgen=is_procgen).make_gymnasium(task_id, num_envs=1, seed=1)
    obs, _ = pool.reset()
    pool.step(np.zeros((1, *pool.action_space.shape), pool.action_space.dtype))
    if obs.dtype == np.uint8 and not obs.any():
        raise RuntimeError("every pixel of the first image is black")
    version, shape = machine.package_version("envpool"), " × ".join(map(str, obs.shape[1:]))
    libraries += f"; graphics: {native.ensure_graphics()}"
    return f"{version}, {task_id}: {shape} {obs.dtype}{libraries}"


def step_gymnasium() -> str:
    """Step CartPole through our adapter of Gymnasium."""
    task_id = "CartPole-v1"
    envs = GymnasiumEnv(made_by_id(task_id), num_envs=2, seed=1, name=f"gymnasium:{task_id}")
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    envs.close()
    return f"{machine.package_version('gymnasium')}, {task_id} steps"


def _probe(name: str) -> Check:
    """Run the program of a probe in a process of its own."""
    package, extra, code = PROBES[name]
    if machine.package_version(package) is None:
        remedy = f"pip install 'phasicrl[{extra}]'"
        return Check(name, "missing", f"{package} is not installed", remedy)
    words = [sys.executable, "-c", code]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        found = f"no answer within {PROBE_SECONDS:g} s"
        return Check(name, "broken", found, "try again on an idle machine")
    if done.returncode == 0:
        return Check(name, "ok", done.stdout.splitlines()[-1])
    found = (done.stderr.strip() or "no message").splitlines()[-1]
    if any(library in found for library in native.GRAPHICS_LIBRARIES):
        remedy = native.GRAPHICS_REMEDIES
    elif "Qt" in found:
        remedy = native.QT_REMEDIES
    else:
        remedy = f"pip install --force-reinstall {package}"
    if done.returncode < 0:
        found = f"{signal.Signals(-done.returncode).name}: {found}"
    return Check(name, "broken", found, remedy)


def _gpu() -> Check:
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found = [f"{device.name}, {device.total_memory / GIB:.0f} GiB" for device in devices]
        return Check("GPU", "ok", ", ".join(found))
    if Path("/proc/driver/nvidia/version").exists():
        remedy = "install a CUDA build of PyTorch (pytorch.org, Get Started), or update the driver"
        return Check("GPU", "warning", "an NVIDIA driver, but PyTorch does not reach it", remedy)
    return Check("GPU", "ok", "none; the CPU trains")


def _cpu() -> Check:
    limits = f"affinity {len(os.sched_getaffinity(0))}"
    if (quota := machine.cgroup_quota()) is not None:
        limits += f", container's limit {quota:.3g}"
    return Check("CPU", "ok", f"{machine.num_cores()} of {os.cpu_count()} cores used ({limits})")


def _space(name: str, free: int | None, enough: int, remedy: str) -> Check:
    found = "unknown on this system" if free is None else f"{free / GIB:.1f} GiB free"
    is_enough = free is None or free >= enough
    return Check(name, "ok", found) if is_enough else Check(name, "warning", found, remedy)
