"""Measure how far our numbers differ from those of the reference codes' own programs.

usage: python benchmarks/agreement.py [--openai-ppg FOLDER] [--cleanrl FOLDER] [--sb3]
    [--rsl-rl FOLDER] [--spinning-up FOLDER] [--baselines FOLDER] [--output FILE]
    [--mistake 1e-9]

Features that no reference has are compared with the papers' formulas (references/formulas.py), and
our compiled steps and two processes with our own run without (references/ourselves.py).

FOLDER is a checkout of the reference. Nothing of it is changed or copied: it is imported, with
stand-ins for what does not install (references/). Stable-Baselines3, its contrib, and gym 0.23.1
for CleanRL's Procgen scripts are those of the Python that runs this
(peers/requirements-agreement.txt). Both sides start from the same weights, get the same made-up
recording (observations, rewards, ends of episodes, actions) and take the samples in the same order;
ours calls `phasicrl.algorithm.learn`. Everything runs in float32 and, by giving that name another
meaning, in float64. Eight minutes of processor time. `--mistake` multiplies our value loss by 1 +
its value, to show how a mistake looks.

The table has, for each quantity, the largest difference between theirs and ours over all updates
and tensors: the norm of the difference, as a share of the distance that theirs has moved since the
start of the check. That distance is the norm of the change for weights, and the norm itself for
everything else, which starts at zero. Beside it, their own noise: in float64 the difference between
two runs of theirs, one of which adds up each minibatch's samples, and the terms of a divergence, in
the opposite order; in float32 the larger difference of these two runs from their run in float64.
An asterisk marks a difference above both ten times the noise and `NEGLIGIBLE`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tyro

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from references.cases import CASES, MISTAKE  # noqa: E402  # from the folder beside this file

from phasicrl.system.machine import find_commit  # noqa: E402

REFERENCES = {
    "openai-ppg": "https://github.com/openai/phasic-policy-gradient",
    "cleanrl": "https://github.com/vwxyzjn/cleanrl",
    "sb3": "https://github.com/DLR-RM/stable-baselines3",
    "rsl-rl": "https://github.com/leggedrobotics/rsl_rl",
    "spinning-up": "https://github.com/openai/spinningup",
    "baselines": "https://github.com/openai/baselines",
    "formulas": "benchmarks/references/formulas.py, here",
    "ourselves": "here",
}
"""Repository of each; formulas and our own plain run need none, and are always compared."""
MARGIN = 10.0
"""Multiple of the noise up to which a difference agrees."""
NEGLIGIBLE = {"float32": 10 * 2.0**-23, "float64": 1e-12}
"""Shares of the moved distance that agree whatever the noise, which may be small by chance.

A mistake of one part in a billion moves losses and weights a thousand times as far.
"""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One quantity of one comparison.

    Attributes:
        reference: name of the reference code.
        program: program of the reference code.
        preset: our preset.
        updates: number of updates.
        quantity: name of the quantity.
        float64: largest difference, as a share of the moved distance.
        noise64: difference of two runs of theirs with two orders of adding up.
        float32: largest difference in float32.
        noise32: difference of theirs in float32 from theirs in float64.
        absolute64: largest absolute difference of two numbers.
        by_design: reason of a difference that is meant.
    """

    reference: str
    program: str
    preset: str
    updates: int
    quantity: str
    float64: float
    noise64: float
    float32: float
    noise32: float
    absolute64: float
    by_design: str

    def agrees(self, precision: str) -> bool:
        """Return whether the difference is within the noise, or negligible."""
        bits = precision.removeprefix("float")
        noise = getattr(self, f"noise{bits}")
        return getattr(self, precision) <= max(MARGIN * noise, NEGLIGIBLE[precision])


def relative(one: np.ndarray, other: np.ndarray) -> float:
    """Return the norm of the difference over that of `other`, or the norm where that is zero."""
    return float(np.linalg.norm(one.ravel() - other.ravel()) / (np.linalg.norm(other) or 1.0))


def farthest(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest absolute difference of two numbers."""
    return float(np.abs(one.ravel() - other.ravel()).max())


def largest(ours: Arrays, theirs: Arrays, measure: Any = relative) -> dict[str, float]:
    """Return the largest difference of each quantity over all updates and parts.

    Raises:
        ValueError: ours lacks one of their arrays.
    """
    if missing := sorted(set(theirs) - set(ours)):
        raise ValueError(f"only one side has {', '.join(missing[:3])}")
    found: dict[str, float] = {}
    for name, value in theirs.items():
        quantity = name.split("|")[1]
        # NumPy's maximum, as that of Python loses a NaN.
        found[quantity] = float(np.maximum(found.get(quantity, 0.0), measure(ours[name], value)))
    return found


def rows_of(number: int, load: Callable[[str], Arrays]) -> list[Row]:
    """Compare the runs of a case.

    Args:
        number: index of the case.
        load: returns the arrays of one run, `ours.float32` or `theirs.float64.turned`.
    """
    case, theirs, ours = CASES[number], load("theirs.float64"), load("ours.float64")
    far, double = largest(ours, theirs, farthest), largest(ours, theirs)
    noise = largest(load("theirs.float64.turned"), theirs)
    single = largest(load("ours.float32"), load("theirs.float32"))
    errors = [largest(load(f"theirs.float32{order}"), theirs) for order in ("", ".turned")]
    updates = max(int(name.split("|")[0]) for name in theirs)
    return [
        Row(
            case.reference, case.name, case.preset, updates, quantity, double[quantity],
            noise[quantity], single[quantity], max(error[quantity] for error in errors),
            far[quantity], case.by_design,
        )
        for quantity in double
    ]  # fmt: skip


def shown(rows: list[Row]) -> str:
    """Format the table."""
    lines = [f"{'':<46} {'float64':>9} {'noise':>9}   {'float32':>9} {'noise':>9}"]
    title = ""
    for row in rows:
        above = f"{row.reference}: {row.program}, {row.updates} updates; ours: {row.preset}"
        if above != title:
            title = above
            lines += ["", above, *([f"meant to differ: {row.by_design}"] if row.by_design else [])]
        marks = [" " if row.agrees(precision) else "*" for precision in ("float64", "float32")]
        lines.append(
            f"  {row.quantity:<44} {row.float64:9.1e} {row.noise64:9.1e} {marks[0]} "
            f"{row.float32:9.1e} {row.noise32:9.1e} {marks[1]}".rstrip()
        )
    return "\n".join(lines)


def run_all(given: dict[str, Path], folder: Path) -> list[Row]:
    """Run every side of every case, two at a time, and compare."""
    numbers = {
        name: [str(number) for number, case in enumerate(CASES) if case.reference == name]
        for name in given
    }
    every = [number for of_one in numbers.values() for number in of_one]
    # These runs draw the weights and the orders that all others read.
    for ranks in (1, 2):
        some = [number for number in every if CASES[int(number)].ranks == ranks]
        for precision in NEGLIGIBLE:
            child("ours", precision, folder, "-", some, ranks)
    jobs = [
        (name, precision, folder, str(path), numbers[name])
        for name, path in given.items()
        for precision in NEGLIGIBLE
    ]
    with ThreadPoolExecutor(2) as pool:
        for reads_ours in (False, True):  # Baselines' part runs on our values
            some = [job for job in jobs if (job[0] == "baselines") == reads_ours]
            list(pool.map(lambda job: child(*job), some))

    def load(name: str) -> Arrays:
        with np.load(folder / name) as arrays:
            return dict(arrays)

    return [
        row
        for number in every
        for row in rows_of(int(number), lambda run, at=number: load(f"{at}.{run}.npz"))
    ]


def child(
    who: str, precision: str, folder: Path, path: str, numbers: list[str], ranks: int = 1
) -> None:
    """Run one side in a new process, or in several.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    program = str(HERE / "references" / "child.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [sys.executable, "-W", "ignore", *(torchrun if ranks > 1 else []), program]
    words += [who, precision, str(folder), path, *numbers]
    print(f"running {who} in {precision}", file=sys.stderr, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{who} in {precision} failed:\n{done.stderr[-3000:]}")


def describe(given: dict[str, Path]) -> dict[str, Any]:
    """Return commits and versions of everything that is compared."""
    references = {
        name: {
            "repository": REFERENCES[name],
            "commit": f"version {version('stable_baselines3')}"
            if name == "sb3"
            else find_commit(HERE if path == Path("-") else path) or "unknown",
        }
        for name, path in given.items()
    }
    packages = ("torch", "numpy", "gymnasium", *(["gym"] if "cleanrl" in given else []))
    versions = {package: version(package) for package in packages}
    return {
        "commit": find_commit(HERE) or "unknown",
        "versions": versions,
        "references": references,
    }


def main(
    openai_ppg: Path | None = None,
    cleanrl: Path | None = None,
    sb3: bool = False,
    rsl_rl: Path | None = None,
    spinning_up: Path | None = None,
    baselines: Path | None = None,
    output: Path | None = None,
    mistake: float = 0.0,
) -> None:
    """Compare with the references given, print the table, and write all rows as JSON."""
    folders = (openai_ppg, cleanrl, Path("-") if sb3 else None, rsl_rl, spinning_up, baselines)
    folders += (Path("-"), Path("-"))
    given = {name: path for name, path in zip(REFERENCES, folders, strict=True) if path}
    os.environ[MISTAKE] = str(mistake)  # read by the processes that run the two sides
    about = describe(given)  # before anything can be edited
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(given, Path(folder))
    print(shown(rows))
    if output is not None:
        output.write_text(json.dumps(about | {"rows": list(map(asdict, rows))}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
