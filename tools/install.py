"""Install phasicrl and what it needs into the environment of the Python that runs this; `make` does. Kind: effects, around one pure decision.

usage: install.py [REQUIREMENTS]      a file of requirements, with PyTorch among them, in place of phasicrl: for the peers of a benchmark

On Linux a plain `pip install torch` may bring several GB of CUDA libraries to a machine that has no GPU. So where none is found, pip is first asked what
it would bring, and if CUDA is in it, nothing is installed. Two environment variables answer that:
TORCH_INDEX   address of the package index from which to take PyTorch, and only PyTorch
TORCH_CUDA=1  take the CUDA libraries all the same
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")  # errors only
CUDA_PACKAGE = re.compile(r"(pytorch[-_.])?(nvidia|cuda|triton)(?![a-z0-9])", re.IGNORECASE)


def main() -> int:
    """Install and say what is going on; return the exit status."""
    given = sys.argv[1:2]
    torch = pinned("torch", Path(given[0]).read_text() if given else CONSTRAINTS.read_text())
    wanted = ("--requirement", given[0]) if given else ("--constraint", str(CONSTRAINTS), "--editable", f"{ROOT}[all,dev]")
    try:
        if is_installed(torch):
            say(f"Bringing the environment up to date with {given[0] if given else 'pyproject.toml and constraints.txt'}.")
        else:
            if problem := choose_build(torch):
                print(problem, file=sys.stderr)
                return 1
            what = given[0] if given else "phasicrl, PyTorch, EnvPool and the development tools: 0.7 GB to load, 2.5 GB on disk"
            say(f"Installing {what}; a minute or a few.")
        began = time.monotonic()
        pip("install", *wanted)
        say(f"Installed in {time.monotonic() - began:.0f} s.")
    except subprocess.CalledProcessError as error:
        print("pip failed; its message stands above. The same command tries again.", file=sys.stderr)
        return error.returncode
    return 0


def choose_build(torch: str) -> str | None:
    """Install `torch` from where the user says, or see that pip's own choice fits the machine; return why it does not."""
    if index := os.environ.get("TORCH_INDEX"):
        say(f"Installing {torch} from TORCH_INDEX.")
        pip("install", "--no-deps", "--index-url", index, torch)  # what it requires comes from the usual index, with everything else
        return None
    if os.environ.get("TORCH_CUDA") == "1" or has_nvidia_gpu():
        return None
    say(f"No NVIDIA GPU: asking pip what {torch} would bring.")
    return refusal(torch, what_would_come(torch))


def refusal(torch: str, report: dict[str, Any]) -> str | None:
    """Return why not to install what pip's `report` lists on a machine without a GPU, and the ways out; `None` if nothing is against it."""
    packages = [(item["metadata"]["name"], item["metadata"]["version"]) for item in report["install"]]
    cuda = sorted(f"{name} {version}" for name, version in packages if CUDA_PACKAGE.match(name))
    if not cuda:
        return None
    listed = textwrap.fill(", ".join(cuda), width=110, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"""\
No NVIDIA GPU was found here, but {torch} would bring the CUDA libraries, several GB:
{listed}
Nothing was installed. Choose one, then give the same command again with it:
  TORCH_INDEX=...   the CPU build. The address to put here stands on PyTorch's install page, behind --index-url in the
                    command shown for Linux, pip and CPU. Only PyTorch is taken from there.
  TORCH_CUDA=1      the CUDA build all the same, say for an image that will run on another machine."""


def what_would_come(torch: str) -> dict[str, Any]:
    """Ask pip what it would install for `torch`."""
    # Older releases of pip load whole files to find that out; this one reads the index's metadata.
    pip("install", "--upgrade", pinned("pip", CONSTRAINTS.read_text()))
    return json.loads(pip("install", "--dry-run", "--report", "-", torch))


def pinned(name: str, constraints: str) -> str:
    """Return the requirement of `name` in the text of a constraints file.

    >>> pinned("torch", "numpy==2.4.6\\ntorch==2.13.0\\n")
    'torch==2.13.0'
    """
    return next(line.strip() for line in constraints.splitlines() if line.startswith(f"{name}=="))


def is_installed(requirement: str) -> bool:
    """Whether this very version is there, whatever its build (`2.13.0+cpu` is 2.13.0)."""
    name, version = requirement.split("==")
    try:
        return importlib.metadata.version(name).split("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def has_nvidia_gpu() -> bool:
    """Whether the driver knows a GPU: its programs alone are in many images that run without one."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    program = shutil.which("nvidia-smi")
    return program is not None and "GPU 0" in subprocess.run([program, "-L"], capture_output=True, text=True).stdout


def pip(*arguments: str) -> str:
    """Run pip quietly and return what it writes; its errors go to the screen."""
    return subprocess.run([*PIP, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def say(line: str) -> None:
    """Print at once, so that it stands there while pip works."""
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
