"""Checks of this machine, with remedies: `phasicrl doctor`. Kind: effects.

Optional packages are tried in separate processes, which libraries in C++ may abort.
"""

import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.text import Text

from phasicrl import Config
from phasicrl.envs.make import make_envs
from phasicrl.system.machine import num_cores

_FFMPEG_PROBE = "import imageio_ffmpeg as x; print('ffmpeg', x.get_ffmpeg_version())"
PROBES = {
    "EnvPool Procgen": ("envpool", None, "procgen:starpilot"),
    "EnvPool Atari": ("envpool", None, "envpool:Pong-v5"),
    "EnvPool MuJoCo": ("envpool", None, "envpool:Ant-v4"),
    "EnvPool classic control": ("envpool", None, "envpool:CartPole-v1"),
    "Gymnasium": ("gymnasium", None, "gymnasium:CartPole-v1"),
    "MuJoCo of Gymnasium, films": ("mujoco", "mujoco", ""),
    "video": ("pygame-ce pillow imageio-ffmpeg", "lab", _FFMPEG_PROBE),
    "plots, reports": ("matplotlib jinja2", "lab", ""),
    "search": ("optuna", "lab", ""),
    "export": ("onnx onnxscript onnxruntime", "lab", ""),
    "hub": ("huggingface_hub", "lab", ""),
    "tracking: TensorBoard": ("tensorboard", None, ""),
    "tracking: Weights & Biases": ("wandb", "wandb", ""),
    "sweeps on a cluster": ("ray", "ray", ""),
}
"""Packages, their extra or None, and an environment to step or a program to run, by name.

Without a program the packages are imported.
"""

PROBE_SECONDS = 120.0
GIB = 2**30
ENOUGH_MEMORY, ENOUGH_DISK = 4 * GIB, 5 * GIB
"""Space for a Procgen run with the paper's settings, whose phases store 6.4 GB."""
_STYLES = {"ok": "green", "warning": "yellow", "missing": "yellow", "broken": "bold red"}


class Check(NamedTuple):
    """Result of one check of this machine.

    Attributes:
        name: name of the check.
        status: `ok`; `warning`: works, with a limitation; `missing`: not installed; `broken`:
            installed, but does not work.
        found: result in a few words.
        remedy: action to take, or empty.
    """

    name: str
    status: Literal["ok", "warning", "missing", "broken"]
    found: str
    remedy: str = ""


def check_machine() -> list[Check]:
    """Check machine, GPU and optional packages in some seconds, and return the results."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    disk, other = shutil.disk_usage(".").free, "runs write here; choose another output_dir"
    used, affinity = num_cores(), len(os.sched_getaffinity(0))
    limits = f"affinity {affinity}" + ", limited by the container" * (used < affinity)
    fewer = "fewer env.num_envs or a shorter aux.every need less"
    with ThreadPoolExecutor() as pool:
        probes = list(pool.map(_run_probe, PROBES))
    available = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
    return [
        Check("Python", "ok", python),
        Check("PyTorch", "ok", f"{torch.__version__}, {build}"),
        _check_gpu(),
        Check("CPU", "ok", f"{used} of {os.cpu_count()} cores used ({limits})"),
        *probes,
        _check_free_bytes("memory", int(available) * 1024, ENOUGH_MEMORY, fewer),
        _check_free_bytes("disk", disk, ENOUGH_DISK, other),
    ]


def make_check_rows(checks: Iterable[Check]) -> list[tuple[Any, ...]]:
    """Make a row of a table for each check, with its status in color."""
    return [(each.name, Text(each.status, _STYLES[each.status]), each.found, each.remedy)
            for each in checks]  # fmt: skip


def probe_env(env_id: str) -> str:
    """Step an environment by its id, and return a text that describes its observations.

    Raises:
        RuntimeError: an image is black.
    """
    config = Config().with_updates({"env.id": env_id})
    with closing(make_envs(config.env, num_envs=1, seed=1)) as envs:
        obs, space = envs.reset(), envs.action_space
        envs.step(torch.zeros(1, *space.shape or (), dtype=getattr(torch, str(space.dtype))))
    if obs.dtype == torch.uint8 and not obs.any():
        raise RuntimeError("every pixel of the first image is black")
    return f"{env_id}: {' × '.join(map(str, obs.shape[1:]))} {obs.dtype}"


def _run_probe(name: str) -> Check:
    """Run the program of a probe in a separate process."""
    packages, extra, code = PROBES[name]
    try:
        version = [importlib.metadata.version(name) for name in packages.split()][-1]
    except importlib.metadata.PackageNotFoundError as error:
        remedy = f"pip install 'phasicrl[{extra}]'" if extra else f"pip install {error.name}"
        return Check(name, "missing", f"{error.name} is not installed", remedy)
    code = code or f"import {packages.replace(' ', ', ')}; print('works')"
    if code.partition(":")[0] in ("procgen", "envpool", "gymnasium"):
        code = f"from phasicrl.lab.doctor import probe_env; print(probe_env({code!r}))"
    words = [sys.executable, "-c", code]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        found = f"no answer within {PROBE_SECONDS:g} s"
        return Check(name, "broken", found, "try again on an idle machine")
    if done.returncode == 0:
        return Check(name, "ok", f"{version}: {done.stdout.splitlines()[-1]}")
    # Errors of this package end with what to do.
    found, _, remedy = (done.stderr.strip() or "no message").splitlines()[-1].partition("; ")
    if done.returncode < 0:
        found = f"{signal.Signals(-done.returncode).name}: {found}"
    return Check(name, "broken", found, remedy or f"pip install --force-reinstall {packages}")


def _check_gpu() -> Check:
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found = [f"{device.name}, {device.total_memory / GIB:.0f} GiB" for device in devices]
        return Check("GPU", "ok", ", ".join(found))
    if Path("/proc/driver/nvidia/version").exists():
        remedy = "install a CUDA build of PyTorch (pytorch.org, Get Started), or update the driver"
        return Check("GPU", "warning", "an NVIDIA driver, but PyTorch does not reach it", remedy)
    return Check("GPU", "ok", "none; the CPU trains")


def _check_free_bytes(name: str, free: int, enough: int, remedy: str) -> Check:
    found = f"{free / GIB:.1f} GiB free"
    return Check(name, "ok", found) if free >= enough else Check(name, "warning", found, remedy)
