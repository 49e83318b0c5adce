"""Pack a folder of packages for a machine that has Python, PyTorch and NumPy, but no network.

usage: python tools/offline_bundle.py FILE.tar.xz [--python 3.12] [--families procgen
    classic_control …] [--there NAME …] [--more NAME …]
on the machine: mkdir site && tar xJf FILE.tar.xz -C site && export PYTHONPATH=$PWD/src:$PWD/site

This project comes too, because its commands are found by what pip knows of it. For Linux on x86-64.
EnvPool comes with the families that are given and without the others, most of its size. A package
that the machine has (`--there rich safetensors`) stays out; `--more` adds others, as pip names them
(`--more beartype gym==0.23.1`), also pure Python that exists as source alone, without what they
need in turn. `PACKAGES` has the rest.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import tyro

PACKAGES = (
    "envpool==1.2.7", "envpool-assets>=0.4.1,<0.5", "dm-env", "dm-tree", "optree", "absl-py",
    "attrs", "wrapt", "packaging",
    "gymnasium>=1.4", "cloudpickle", "farama-notifications", "typing-extensions",
    "tyro>=1.0", "docstring-parser", "typeguard",
    "jaxtyping>=0.3", "wadler-lindig",
    "rich>=13.7", "markdown-it-py", "mdurl", "pygments",
    "safetensors>=0.5", "tensorboard>=2.18", "protobuf",
)  # fmt: skip
"""Requirements of `import phasicrl`, training on EnvPool and the command line.

What these require is listed too; the machine has PyTorch and NumPy.
"""
PLATFORMS = (
    "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any",
)  # fmt: skip
ENTRY = "envpool/entry.py"
"""File of EnvPool that imports every family."""


def name_of(requirement: str) -> str:
    """Return a requirement's package in pip's spelling: `gym==0.23.1` is `gym`."""
    return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-").replace(".", "-")


def fetch(requirements: Sequence[str], folder: Path, *, python: str) -> None:
    """Fetch a wheel of each, or make it from the source where there is none."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"--dest={folder}"]
    pip += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    pip += [f"--platform={name}" for name in PLATFORMS]
    for requirement in requirements:
        if subprocess.run([*pip, requirement], check=False).returncode:
            make_wheel(requirement, folder)


def make_wheel(requirement: str, folder: Path) -> None:
    """Make a wheel from a source, of a package or in a folder, that any Python can use."""
    before = {*folder.glob("*.whl")}
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"--wheel-dir={folder}"]
    subprocess.run([*pip, requirement], check=True)
    if native := [x.name for x in {*folder.glob("*.whl")} - before if "-none-any" not in x.name]:
        raise ValueError(f"{requirement} is {native}; expected a wheel for any Python. Try again")


def is_wanted(name: str, families: Sequence[str]) -> bool:
    """Return whether a file is needed: all but the other families of EnvPool and its assets."""
    top, *rest = PurePosixPath(name).parts
    is_of_family = top in ("envpool", "envpool_assets") and len(rest) > 1
    return not is_of_family or rest[0] in (*families, "python")


def unpack(path: Path, site: Path, families: Sequence[str]) -> None:
    """Unpack what is needed of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site, [name for name in wheel.namelist() if is_wanted(name, families)])


def filter_imports(text: str, families: Sequence[str]) -> str:
    """Return EnvPool's list of imports without the families that are left out."""
    lines = r"(?m)^import envpool\.(\w+).*\n?"
    return re.sub(lines, lambda line: line[0] if line[1] in families else "", text)


def main(
    file: Path,
    /,
    python: str = "3.12",
    families: tuple[str, ...] = ("procgen", "classic_control"),
    there: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> None:
    """Download, unpack, pack.

    Args:
        file: archive to write.
        python: version of the machine's Python.
        families: EnvPool's families that come.
        there: packages that the machine has.
        more: packages to add.
    """
    absent = set(map(name_of, there))
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        site.mkdir()
        wanted = [name for name in PACKAGES if name_of(name) not in absent]
        fetch([*wanted, *more], wheels, python=python)
        make_wheel(str(Path(__file__).parents[1]), wheels)
        for path in sorted(wheels.iterdir()):
            unpack(path, site, families)
        (site / ENTRY).write_text(filter_imports((site / ENTRY).read_text(), families))
        with tarfile.open(file, "w:xz") as packed:
            packed.add(site, ".")
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
