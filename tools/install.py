"""Install phasicrl and what it needs into the environment of the Python that runs this.

`make` does. Kind: effects, around one pure decision.

usage: install.py [REQUIREMENTS]      a file of requirements, with PyTorch among them, in place of
    phasicrl: for the peers of a benchmark

Which build of PyTorch comes is pip's choice. On Linux that usually is the one with the CUDA
libraries, which works without a GPU too, but is large. So pip is first asked what it would bring;
if that is CUDA on a machine without a GPU, one line says how large it is and how to get less.
Nothing is installed where it would not fit on the disk. One environment variable changes the
choice:
TORCH_INDEX   address of the package index from which to take PyTorch, and only PyTorch
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")  # errors only
CUDA_PACKAGE = re.compile(r"(pytorch[-_.])?(nvidia|cuda|triton)(?![a-z0-9])", re.IGNORECASE)


class Size(NamedTuple):
    """Sizes of an installation, in GB.

    Packages in the temporary folder for the time of the installation, and disk space afterwards.
    """

    load: float
    disk: float


# Of the whole environment, with EnvPool and the development tools; measured with the versions in
# constraints.txt.
WITHOUT_CUDA, WITH_CUDA = Size(load=0.8, disk=2.7), Size(load=3.3, disk=6.9)


def main() -> int:
    """Install and say what is going on; return the exit status."""
    given = sys.argv[1:2]
    torch = pinned("torch", Path(given[0]).read_text() if given else CONSTRAINTS.read_text())
    wanted = (
        ("--requirement", given[0])
        if given
        else ("--constraint", str(CONSTRAINTS), "--editable", f"{ROOT}[all,dev]")
    )
    try:
        if is_installed(torch):
            say(
                "Bringing the environment up to date with "
                f"{given[0] if given else 'pyproject.toml and constraints.txt'}."
            )
        else:
            size = expected_size(torch)
            environment = Path(sys.prefix)
            folder = choose_download_folder(
                size, environment=environment, temporary=Path(tempfile.gettempdir())
            )
            if folder is None:
                print(no_room(size, environment), file=sys.stderr)
                return 1
            os.environ["TMPDIR"] = str(folder)  # pip's
            what = given[0] if given else "phasicrl, PyTorch, EnvPool and the development tools"
            say(
                f"Installing {what}: {size.load} GB to load, {size.disk} GB on disk; "
                "a minute or a few."
            )
            # What it requires comes from the usual index, with everything else.
            if index := os.environ.get("TORCH_INDEX"):
                pip("install", "--no-deps", "--index-url", index, torch)
        began = time.monotonic()
        pip("install", *wanted)
        say(f"Installed in {time.monotonic() - began:.0f} s.")
    except subprocess.CalledProcessError as error:
        print(
            "pip failed; its message stands above. The same command tries again.", file=sys.stderr
        )
        return error.returncode
    return 0


def expected_size(torch: str) -> Size:
    """Return the size of what will be installed, by the build of PyTorch that comes.

    Tell the user where a smaller build would do.
    """
    if os.environ.get("TORCH_INDEX"):
        say(f"Taking {torch} from TORCH_INDEX.")
        return WITHOUT_CUDA
    if not brings_cuda(get_pip_report(torch)):
        return WITHOUT_CUDA
    if not has_nvidia_gpu():
        say(
            f"No NVIDIA GPU here, but pip's PyTorch has the CUDA libraries: {WITH_CUDA.load} "
            f"GB to load in place of {WITHOUT_CUDA.load}; it works on the CPU as well. "
            "For less, stop this and give TORCH_INDEX=ADDRESS, "
            "the one behind --index-url on PyTorch's install page for Linux, pip and CPU."
        )
    return WITH_CUDA


def brings_cuda(report: dict[str, Any]) -> bool:
    """Return true if CUDA's libraries are in what pip's `report` lists."""
    return any(CUDA_PACKAGE.match(item["metadata"]["name"]) for item in report["install"])


def choose_download_folder(size: Size, *, environment: Path, temporary: Path) -> Path | None:
    """Return the folder in which what is loaded fits until it is installed into `environment`.

    `None` if nothing fits.

    The usual temporary folder may be small, in memory even; then it is the disk of the environment.
    """
    disk, free = environment.stat().st_dev, shutil.disk_usage(environment).free / 1e9
    if (
        temporary.stat().st_dev != disk
        and free >= size.disk
        and shutil.disk_usage(temporary).free / 1e9 >= size.load
    ):
        return temporary
    if free < size.disk + size.load:
        return None
    return temporary if temporary.stat().st_dev == disk else environment


def no_room(size: Size, environment: Path) -> str:
    """Say that it does not fit, with the numbers and the ways out."""
    free = shutil.disk_usage(environment).free / 1e9
    smaller = (
        f"\n  or take PyTorch's CPU build, {WITHOUT_CUDA.disk} GB: "
        "TORCH_INDEX=ADDRESS, behind --index-url on PyTorch's install page"
    )
    return (
        f"Nothing was installed: it takes {size.disk} GB in {environment} "
        f"and {size.load} GB more while it is loaded, and {free:.1f} GB are free there.\n"
        "Then give the same command again:\n"
        "  free some room, or put the checkout on a larger disk"
        f"{smaller if size == WITH_CUDA else ''}"
    )


def get_pip_report(torch: str) -> dict[str, Any]:
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
    """Return true if this version is installed, in any build (`2.13.0+cpu` is 2.13.0)."""
    name, version = requirement.split("==")
    try:
        return importlib.metadata.version(name).split("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def has_nvidia_gpu() -> bool:
    """Return true if the driver knows a GPU.

    The driver's programs alone are in many images that run without one.
    """
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    program = shutil.which("nvidia-smi")
    return (
        program is not None
        and "GPU 0" in subprocess.run([program, "-L"], capture_output=True, text=True).stdout
    )


def pip(*arguments: str) -> str:
    """Run pip quietly and return what it writes; its errors go to the screen."""
    return subprocess.run([*PIP, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def say(line: str) -> None:
    """Print at once, so that it stands there while pip works."""
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
