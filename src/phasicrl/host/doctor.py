"""What this machine can run, and the remedy for what it cannot: `phasicrl doctor`. Kind: effects.

Everything that may abort a process (environments in C++) is tried in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from phasicrl.envs.envpool import PROCGEN, import_envpool, task_families
from phasicrl.envs.native import GRAPHICS_LIBRARIES, GRAPHICS_REMEDIES, QT_REMEDIES, ensure_graphics, ensure_qt
from phasicrl.envs.protocol import EnvError
from phasicrl.host.machine import cgroup_quota, free_memory, num_cores, package_version, usable_cores

Status = Literal["ok", "warning", "missing", "broken"]

PROBES = {"Procgen": "StarpilotEasy-v0", "Atari": "Pong-v5", "MuJoCo": "Ant-v4", "classic control": "CartPole-v1"}
"""Families of EnvPool, and the task that is tried for each."""

PROBE_SECONDS = 120.0
GIB = 2**30
ENOUGH_MEMORY, ENOUGH_DISK = 4 * GIB, 5 * GIB
"""Below these a Procgen run with the paper's settings becomes tight: one phase stores 6.4 GB of images in full."""

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        status: `ok`; `warning`: works, but; `missing`: not installed; `broken`: installed, and does
            not work.
        found: what was found, in a few words.
        remedy: what to do; empty if nothing.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def diagnose() -> list[Check]:
    """Look at everything; takes some seconds."""
    python = Check(name="Python", status="ok", found=f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    extras = [
        _video(),
        _package("MuJoCo of Gymnasium, films", "mujoco", "mujoco"),
        _package("plotting", "matplotlib", "plot"),
        _package("TensorBoard", "tensorboard", "tensorboard"),
    ]
    return [python, _torch(), _gpu(), _cpu(), *_envpool(), _gymnasium(), *extras, _memory(), _disk()]


def print_diagnosis() -> None:
    """Say what works on this machine, and the remedy for what does not."""
    with Console().status("looking at everything that can be used; some seconds …"):
        table = as_table(diagnose())
    Console().print(table)


def as_table(checks: Iterable[Check]) -> Table:
    """All checks as one table for the terminal."""
    table = Table(title="phasicrl doctor", title_justify="left")
    for column in ("what", "status", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status}", check.found, check.remedy)
    return table


def probe(task_id: str) -> dict[str, Any]:
    """Make one environment of an EnvPool task, look at its first observation, and step it; runs in a process of its own.

    Returns:
        Shape and dtype of the observation, whether it is all zeros, where the graphics libraries
        came from, and, for Procgen, where Qt did.
    """
    import numpy as np

    is_procgen = task_families()[task_id] == PROCGEN
    qt = ensure_qt() if is_procgen else ""
    pool = import_envpool(procgen=is_procgen).make_gymnasium(task_id, num_envs=1, seed=1)
    obs, _ = pool.reset()
    pool.step(np.zeros((1, *pool.action_space.shape), pool.action_space.dtype))
    return {"shape": obs.shape[1:], "dtype": str(obs.dtype), "blank": not obs.any(), "qt": qt, "graphics": ensure_graphics()}


def _torch() -> Check:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10)
    remedy = "pip install 'torch>=2.10' (older ones can be made to run code by a file they load)" if old else ""
    return Check(name="PyTorch", status="warning" if old else "ok", found=f"{torch.__version__}, {build}", remedy=remedy)


def _gpu() -> Check:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return Check(name="GPU", status="ok", found=", ".join(f"{device.name}, {device.total_memory / GIB:.0f} GiB" for device in devices))
    if Path("/proc/driver/nvidia/version").exists():
        remedy = "install a CUDA build of PyTorch (pytorch.org, Get Started), or update the driver"
        return Check(name="GPU", status="warning", found="an NVIDIA driver, but PyTorch does not reach it", remedy=remedy)
    return Check(name="GPU", status="ok", found="none; the CPU trains")


def _cpu() -> Check:
    """Cores that runs use here, and why not all."""
    used, allowed, quota = num_cores(), len(usable_cores()), cgroup_quota()
    reasons = [f"{os.cpu_count()} in the machine"]
    reasons += [f"this process may use {allowed}"] if 0 < allowed < (os.cpu_count() or 1) else []
    reasons += [f"the container allows the time of {quota:.3g}"] if quota is not None else []
    return Check(name="CPU", status="ok", found=f"{used} {'core is' if used == 1 else 'cores are'} used ({', '.join(reasons)})")


def _envpool() -> list[Check]:
    """EnvPool's version, each family by a probe, and Qt."""
    version = package_version("envpool")
    if version is None:
        return [Check(name="EnvPool", status="missing", found="not installed", remedy="pip install 'phasicrl[procgen]'")]
    running = {family: _start_probe(task_id) for family, task_id in PROBES.items()}
    checks = [Check(name="EnvPool", status="ok", found=version)]
    for family, process in running.items():
        checks += _read_probe(family, process)
    return checks


def _start_probe(task_id: str) -> subprocess.Popen[str]:
    code = f"import json; from phasicrl.host.doctor import probe; print('PROBE' + json.dumps(probe({task_id!r})))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _read_probe(family: str, process: subprocess.Popen[str]) -> list[Check]:
    """Turn the end of a probe into checks: one for the family, and one for Qt where it matters."""
    name = f"EnvPool {family}"
    try:
        output, errors = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [Check(name=name, status="broken", found=f"no answer within {PROBE_SECONDS:g} s", remedy="try again on an idle machine")]
    answers = [line.removeprefix("PROBE") for line in output.splitlines() if line.startswith("PROBE")]
    if process.returncode != 0 or not answers:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
        end = f"{signal.Signals(-process.returncode).name}: " if process.returncode < 0 else ""
        return [Check(name=name, status="broken", found=end + last.strip(), remedy=_envpool_remedy(last))]
    answer = json.loads(answers[-1])
    shape = " × ".join(map(str, answer["shape"]))
    if answer["blank"] and family in ("Procgen", "Atari"):
        check = Check(name=name, status="broken", found="every pixel of the first image is black", remedy=_envpool_remedy(""))
    else:
        check = Check(name=name, status="ok", found=f"{PROBES[family]}: {shape} {answer['dtype']}")
    parts = {"Qt": answer["qt"], "graphics libraries": answer["graphics"]} if answer["qt"] else {}  # the same for every family: said once
    return [check, *(Check(name=part, status="ok", found=found) for part, found in parts.items())]


def _envpool_remedy(message: str) -> str:
    if any(name in message for name in GRAPHICS_LIBRARIES):
        return GRAPHICS_REMEDIES
    return QT_REMEDIES if "Qt" in message else "pip install --force-reinstall envpool envpool-assets"


def _gymnasium() -> Check:
    """Gymnasium, by some steps of CartPole through our adapter."""
    import gymnasium
    import numpy as np

    from phasicrl.envs.gymnasium import GymnasiumEnv, made_by_id

    try:
        envs = GymnasiumEnv(made_by_id("CartPole-v1"), num_envs=2, seed=1, name="gymnasium:CartPole-v1")
        envs.reset()
        envs.step(np.zeros(2, np.int64))
        envs.close()
    except (EnvError, ImportError, ValueError) as error:
        return Check(name="Gymnasium", status="broken", found=str(error), remedy="pip install --upgrade 'gymnasium>=1.4'")
    return Check(name="Gymnasium", status="ok", found=f"{gymnasium.__version__}, CartPole-v1 steps")


def _video() -> Check:
    """The video encoder: an ffmpeg that comes with imageio-ffmpeg."""
    try:
        import imageio_ffmpeg

        found = f"imageio-ffmpeg {imageio_ffmpeg.__version__}, ffmpeg {imageio_ffmpeg.get_ffmpeg_version()}"
        return Check(name="video", status="ok", found=found)
    except (ImportError, OSError, RuntimeError) as error:
        status = "missing" if isinstance(error, ImportError) else "broken"
        return Check(name="video", status=status, found=str(error), remedy="pip install 'phasicrl[video]'")


def _package(name: str, package: str, extra: str) -> Check:
    """An optional package that is only looked up, not imported."""
    version = package_version(package)
    if version is None:
        return Check(name=name, status="missing", found=f"{package} is not installed", remedy=f"pip install 'phasicrl[{extra}]'")
    return Check(name=name, status="ok", found=f"{package} {version}")


def _memory() -> Check:
    """Memory that is free, by the machine and by the container's limit."""
    free = free_memory()
    if free is None:
        return Check(name="memory", status="ok", found="unknown on this system")
    status, remedy = ("warning", "fewer env.num_envs or a shorter aux.every need less") if free < ENOUGH_MEMORY else ("ok", "")
    return Check(name="memory", status=status, found=f"{free / GIB:.1f} GiB free", remedy=remedy)


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    status, remedy = ("warning", "runs write checkpoints here; choose another output_dir") if free < ENOUGH_DISK else ("ok", "")
    return Check(name="disk", status=status, found=f"{free / GIB:.1f} GiB free in {Path.cwd()}", remedy=remedy)
