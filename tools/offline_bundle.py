"""Makes a folder of packages for a machine that has Python, PyTorch and NumPy, but no network.

Unpack it there, and put it on PYTHONPATH.

usage: python tools/offline_bundle.py FILE.tar.xz [--python 3.12] [--families procgen
    classic_control …] [--there NAME …] [--more NAME …]
there: mkdir site && tar xJf FILE.tar.xz -C site && export PYTHONPATH=$PWD/src:$PWD/site

For Linux on x86-64. EnvPool comes with the families that are asked for and without the others, most
of its size. A package that the machine has (`--there rich safetensors`) stays out; `--more` brings
others in, as pip names them (`--more beartype gym==0.23.1`), and takes those that exist as source
alone, too, if they are nothing but Python. What they need in turn is not looked for: name it. Which
packages come is `PACKAGES`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

PACKAGES = (
    "envpool==1.2.7", "envpool-assets>=0.4.1,<0.5", "dm-env", "dm-tree", "optree", "absl-py",
    "attrs", "wrapt", "packaging",
    "gymnasium>=1.4", "cloudpickle", "farama-notifications", "typing-extensions",
    "tyro>=1.0", "docstring-parser", "typeguard",
    "jaxtyping>=0.3", "wadler-lindig",
    "rich>=13.7", "markdown-it-py", "mdurl", "pygments",
    "safetensors>=0.5",
)  # fmt: skip
"""What `import phasicrl`, training on EnvPool and the command line need, and what that needs.

PyTorch and NumPy are there already.
"""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "any",
)
ENTRY = "envpool/entry.py"
"""Imports every family when EnvPool is imported."""


def name_of(requirement: str) -> str:
    """A requirement's package, in pip's spelling: `gym==0.23.1` is `gym`."""
    letters = requirement
    for sign in "<>=!~[; ":
        letters = letters.partition(sign)[0]
    return letters.lower().replace("_", "-").replace(".", "-")


def download(requirements: Sequence[str], folder: Path, *, python: str) -> None:
    """Fetch a wheel of each, or where there is none its source.

    Raises:
        SystemExit: one of them cannot be had; pip's words are above.
    """
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    chosen = [
        "--only-binary=:all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
        *(f"--platform={name}" for name in PLATFORMS),
    ]
    for requirement in requirements:
        binary = subprocess.run(
            [*pip, *chosen, requirement], capture_output=True, text=True, check=False
        )
        if (
            binary.returncode
            and subprocess.run([*pip, "--no-binary", ":all:", requirement], check=False).returncode
        ):
            raise SystemExit(f"{requirement} cannot be had for Python {python}:\n{binary.stderr}")


def is_wanted(name: str, families: Sequence[str]) -> bool:
    """Whether a file of a package is needed.

    Everything, but of EnvPool and its assets the families alone.
    """
    top, *rest = PurePosixPath(name).parts
    if top == "envpool" and len(rest) > 1:
        return rest[0] in (*families, "python")
    if top == "envpool_assets" and len(rest) > 1:
        return rest[0] in families
    return True


def unpack(archive: Path, site: Path, families: Sequence[str]) -> None:
    """A wheel's files, or of a source the folders that are packages."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if is_wanted(name, families)])
        return
    with tarfile.open(archive) as source, tempfile.TemporaryDirectory() as folder:
        source.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        for package in (root / "src" if (root / "src").is_dir() else root).iterdir():
            if (package / "__init__.py").is_file() and package.name != "tests":
                package.rename(site / package.name)


def entry_of(text: str, families: Sequence[str]) -> str:
    """EnvPool's list of families, without those that are not there."""

    def lines() -> Iterator[str]:
        for line in text.splitlines(keepends=True):
            words = line.split()
            if (
                words[:1] != ["import"]
                or not words[1].startswith("envpool.")
                or words[1].split(".")[1] in families
            ):
                yield line

    return "".join(lines())


def main() -> None:
    """Download, unpack, pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--families", nargs="+", default=["procgen", "classic_control"])
    parser.add_argument("--there", nargs="+", default=[], help="packages that the machine has")
    parser.add_argument("--more", nargs="+", default=[], help="packages to be added")
    options = parser.parse_args()
    absent = {name_of(name) for name in options.there}
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        site.mkdir()
        download(
            [name for name in PACKAGES if name_of(name) not in absent] + options.more,
            wheels,
            python=options.python,
        )
        for archive in sorted(wheels.iterdir()):
            unpack(archive, site, options.families)
        (site / ENTRY).write_text(entry_of((site / ENTRY).read_text(), options.families))
        with tarfile.open(options.file, "w:xz") as packed:
            packed.add(site, ".")
        size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(
        f"{options.file}: {options.file.stat().st_size / 2**20:.1f} MiB, "
        f"unpacked {size / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    main()
