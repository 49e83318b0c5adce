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

from rich.table import Table
from rich.text import Text

from phasicrl.envs import native
from phasicrl.envs.envpool import PROCGEN, import_envpool, task_families
from phasicrl.envs.protocol import EnvError
from phasicrl.host import machine

Status = Literal["ok", "warning", "missing", "broken"]

PROBES = {
    "Procgen": "StarpilotEasy-v0",
    "Atari": "Pong-v5",
    "MuJoCo": "Ant-v4",
    "classic control": "CartPole-v1",
}
"""Families of EnvPool, and the task that is tried for each."""

PROBE_SECONDS = 120.0
GIB = 2**30
ENOUGH_MEMORY, ENOUGH_DISK = 4 * GIB, 5 * GIB
"""Below these a Procgen run with the paper's settings becomes tight.

One phase stores 6.4 GB of images in full.
"""

_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "bold red"}


@dataclass(frozen=True, slots=True)
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
    """Say what works on this machine, and the remedy for what does not; takes some seconds."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [
        Check("Python", "ok", python),
        _torch(),
        _gpu(),
        _cpu(),
        *_envpool(),
        _gymnasium(),
        _video(),
        _package("MuJoCo of Gymnasium, films", "mujoco", "mujoco"),
        _package("plotting", "matplotlib", "plot"),
        _package("TensorBoard", "tensorboard", "tensorboard"),
        _memory(),
        _disk(),
    ]


def as_table(checks: Iterable[Check]) -> Table:
    """All checks as one table for the terminal."""
    table = Table(title="phasicrl doctor", title_justify="left")
    for column in ("what", "status", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for check in checks:
        status = Text(check.status, _STYLES[check.status])
        # Plain strings are markup: `phasicrl[plot]` would lose its extra.
        table.add_row(Text(check.name), status, Text(check.found), Text(check.remedy))
    return table


def probe(task_id: str) -> dict[str, Any]:
    """Make one environment of an EnvPool task, look at it and step it, in a process of its own.

    Returns:
        Shape and dtype of the first observation, whether it is all zeros, where the graphics
        libraries came from, and, for Procgen, where Qt did.
    """
    import numpy as np

    is_procgen = task_families()[task_id] == PROCGEN
    qt = native.ensure_qt() if is_procgen else ""
    pool = import_envpool(procgen=is_procgen).make_gymnasium(task_id, num_envs=1, seed=1)
    obs, _ = pool.reset()
    pool.step(np.zeros((1, *pool.action_space.shape), pool.action_space.dtype))
    return {
        "shape": obs.shape[1:],
        "dtype": str(obs.dtype),
        "blank": not obs.any(),
        "qt": qt,
        "graphics": native.ensure_graphics(),
    }


def _torch() -> Check:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__}, {build}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10):
        return Check("PyTorch", "ok", found)
    remedy = "pip install 'torch>=2.10' (older ones can be made to run code by a file they load)"
    return Check("PyTorch", "warning", found, remedy)


def _gpu() -> Check:
    import torch

    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found = [f"{device.name}, {device.total_memory / GIB:.0f} GiB" for device in devices]
        return Check("GPU", "ok", ", ".join(found))
    if Path("/proc/driver/nvidia/version").exists():
        remedy = "install a CUDA build of PyTorch (pytorch.org, Get Started), or update the driver"
        return Check("GPU", "warning", "an NVIDIA driver, but PyTorch does not reach it", remedy)
    return Check("GPU", "ok", "none; the CPU trains")


def _cpu() -> Check:
    """Cores that runs use here, and why not all."""
    used, allowed, quota = machine.num_cores(), len(os.sched_getaffinity(0)), machine.cgroup_quota()
    reasons = [f"{os.cpu_count()} in the machine"]
    if 0 < allowed < (os.cpu_count() or 1):
        reasons.append(f"this process may use {allowed}")
    if quota is not None:
        reasons.append(f"the container allows the time of {quota:.3g}")
    are = "core is" if used == 1 else "cores are"
    return Check("CPU", "ok", f"{used} {are} used ({', '.join(reasons)})")


def _envpool() -> list[Check]:
    """EnvPool's version, each family by a probe, and Qt."""
    version = machine.package_version("envpool")
    if version is None:
        return [Check("EnvPool", "missing", "not installed", "pip install 'phasicrl[procgen]'")]
    running = {family: _start_probe(task_id) for family, task_id in PROBES.items()}
    checks = [Check("EnvPool", "ok", version)]
    for family, process in running.items():
        checks += _read_probe(family, process)
    return checks


def _start_probe(task_id: str) -> subprocess.Popen[str]:
    imports = "import json; from phasicrl.host.doctor import probe"
    code = f"{imports}; print('PROBE' + json.dumps(probe({task_id!r})))"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True)


def _read_probe(family: str, process: subprocess.Popen[str]) -> list[Check]:
    """Turn the end of a probe into checks: one for the family, and one for Qt where it matters."""
    name = f"EnvPool {family}"
    try:
        output, errors = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        found = f"no answer within {PROBE_SECONDS:g} s"
        return [Check(name, "broken", found, "try again on an idle machine")]
    answers = [line for line in output.splitlines() if line.startswith("PROBE")]
    if process.returncode != 0 or not answers:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
        end = f"{signal.Signals(-process.returncode).name}: " if process.returncode < 0 else ""
        return [Check(name, "broken", end + last.strip(), _envpool_remedy(last))]
    answer = json.loads(answers[-1].removeprefix("PROBE"))
    if answer["blank"] and family in ("Procgen", "Atari"):
        found = "every pixel of the first image is black"
        checks = [Check(name, "broken", found, _envpool_remedy(""))]
    else:
        shape = " × ".join(map(str, answer["shape"]))
        checks = [Check(name, "ok", f"{PROBES[family]}: {shape} {answer['dtype']}")]
    if answer["qt"]:  # the graphics libraries are the same for every family: said once
        checks.append(Check("Qt", "ok", answer["qt"]))
        checks.append(Check("graphics libraries", "ok", answer["graphics"]))
    return checks


def _envpool_remedy(message: str) -> str:
    if any(name in message for name in native.GRAPHICS_LIBRARIES):
        return native.GRAPHICS_REMEDIES
    if "Qt" in message:
        return native.QT_REMEDIES
    return "pip install --force-reinstall envpool envpool-assets"


def _gymnasium() -> Check:
    """Gymnasium, by some steps of CartPole through our adapter."""
    import gymnasium
    import numpy as np

    from phasicrl.envs.gymnasium import GymnasiumEnv, made_by_id

    try:
        make_env = made_by_id("CartPole-v1")
        envs = GymnasiumEnv(make_env, num_envs=2, seed=1, name="gymnasium:CartPole-v1")
        envs.reset()
        envs.step(np.zeros(2, np.int64))
        envs.close()
    except (EnvError, ImportError, ValueError) as error:
        remedy = "pip install --upgrade 'gymnasium>=1.4'"
        return Check("Gymnasium", "broken", str(error), remedy)
    return Check("Gymnasium", "ok", f"{gymnasium.__version__}, CartPole-v1 steps")


def _video() -> Check:
    """The video encoder: an ffmpeg that comes with imageio-ffmpeg."""
    try:
        import imageio_ffmpeg

        ffmpeg = f"ffmpeg {imageio_ffmpeg.get_ffmpeg_version()}"
        return Check("video", "ok", f"imageio-ffmpeg {imageio_ffmpeg.__version__}, {ffmpeg}")
    except (ImportError, OSError, RuntimeError) as error:
        status = "missing" if isinstance(error, ImportError) else "broken"
        return Check("video", status, str(error), "pip install 'phasicrl[video]'")


def _package(name: str, package: str, extra: str) -> Check:
    """An optional package that is only looked up, not imported."""
    version = machine.package_version(package)
    if version is None:
        found = f"{package} is not installed"
        return Check(name, "missing", found, f"pip install 'phasicrl[{extra}]'")
    return Check(name, "ok", f"{package} {version}")


def _memory() -> Check:
    """Memory that is free, by the machine and by the container's limit."""
    free = machine.free_memory()
    if free is None:
        return Check("memory", "ok", "unknown on this system")
    found = f"{free / GIB:.1f} GiB free"
    if free >= ENOUGH_MEMORY:
        return Check("memory", "ok", found)
    return Check("memory", "warning", found, "fewer env.num_envs or a shorter aux.every need less")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / GIB:.1f} GiB free in {Path.cwd()}"
    if free >= ENOUGH_DISK:
        return Check("disk", "ok", found)
    return Check("disk", "warning", found, "runs write checkpoints here; choose another output_dir")
