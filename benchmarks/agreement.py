"""Runs the reference codes' own programs and ours, and says how far their numbers are apart.

Both get the same weights, data and orders of samples.

usage: python benchmarks/agreement.py [--openai-ppg FOLDER] [--cleanrl FOLDER] [--sb3]
    [--spinning-up FOLDER] [--baselines FOLDER] [--output FILE]
           [--mistake 1e-9]

FOLDER is a checkout of the reference. Nothing of it is changed or copied: it is imported, with
stand-ins for what does not install (references/). Stable-Baselines3, and gym 0.23.1 for CleanRL's
Procgen scripts, are taken from the Python that runs this (peers/requirements-agreement.txt).
Observations, rewards, ends of episodes and actions are made up once and played back to both sides;
both begin with the same weights and take their samples in the same order. Everything runs in
float32 and, by giving the name another meaning, in float64. Three minutes of processor time.

For each quantity the table has the largest difference between theirs and ours over all updates and
all tensors, each by its norm, as a share of the norm of theirs; weights are compared by how far
they have moved. Beside it, their own noise: in float64 the difference between two runs of theirs,
one of which adds up each minibatch's samples, and the terms of a divergence, in the opposite order;
in float32 the larger difference of these two runs from their run in float64. An asterisk marks what
is off by more than ten times the noise, or rounding if that is more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from references.cases import CASES, MISTAKE  # noqa: E402  # from the folder beside this file
from versus import PEERS  # noqa: E402

from phasicrl.host.provenance import commit  # noqa: E402

REFERENCES = {
    "openai-ppg": (
        "https://github.com/openai/phasic-policy-gradient",
        "phasic_policy_gradient/ppg.py",
    ),
    "cleanrl": ("https://github.com/vwxyzjn/cleanrl", "cleanrl/ppo.py"),
    "sb3": ("https://github.com/DLR-RM/stable-baselines3", None),
    "spinning-up": ("https://github.com/openai/spinningup", "spinup/algos/pytorch/ppo/ppo.py"),
    "baselines": ("https://github.com/openai/baselines", "baselines/ppo2/runner.py"),
}
"""Where each is from, and a file by which a checkout is known."""
MARGIN = 10.0
"""So many times the noise may be between theirs and ours."""
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
"""The least noise there is: a rounding of the last bit."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One quantity of one comparison.

    Attributes:
        reference: whose.
        program: of theirs.
        preset: of ours.
        updates: how many were made.
        quantity: its name.
        float64: largest relative difference between theirs and ours.
        noise64: theirs between two orders of adding up.
        float32: largest relative difference between theirs and ours.
        noise32: theirs from theirs in float64.
        absolute64: largest difference of two numbers.
        by_design: why they differ, where they are meant to.
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
        """Whether theirs and ours are as near to each other as their noise lets one say."""
        difference, noise = (
            (self.float64, self.noise64) if precision == "float64" else (self.float32, self.noise32)
        )
        return difference <= MARGIN * max(noise, EPSILON[precision])


def relative(one: np.ndarray, other: np.ndarray) -> float:
    """The norm of the difference, as a share of the norm of `other`.

    The norm itself where that is zero.
    """
    scale = float(np.linalg.norm(other))
    return float(np.linalg.norm(one.ravel() - other.ravel())) / (scale or 1.0)


def largest(ours: Arrays, theirs: Arrays, measure: Any = relative) -> dict[str, float]:
    """Of each quantity the largest difference over all updates and parts.

    Raises:
        ValueError: there is something that they say and we do not.
    """
    if missing := sorted(set(theirs) - set(ours)):
        raise ValueError(f"only one side has {', '.join(missing[:3])}")
    found: dict[str, float] = {}
    for name, value in theirs.items():
        quantity = name.split("|")[1]
        found[quantity] = max(found.get(quantity, 0.0), measure(ours[name], value))
    return found


def rows_of(number: int, load: Any) -> list[Row]:
    """All rows of a case.

    Args:
        number: the case's.
        load: gives the arrays of one run, `ours.float32` or `theirs.float64.turned`.
    """
    case, reference = CASES[number], load("theirs.float64")
    far = largest(
        load("ours.float64"),
        reference,
        lambda one, other: float(np.abs(one.ravel() - other.ravel()).max()),
    )
    double, noise = (
        largest(load("ours.float64"), reference),
        largest(load("theirs.float64.turned"), reference),
    )
    single = largest(load("ours.float32"), load("theirs.float32"))
    errors = [largest(load(f"theirs.float32{order}"), reference) for order in ("", ".turned")]
    return [
        Row(
            case.reference, case.name, case.preset,
            max(int(name.split("|")[0]) for name in reference), quantity, double[quantity],
            noise[quantity],
            single[quantity], max(error[quantity] for error in errors), far[quantity],
            case.by_design,
        )
        for quantity in double
    ]  # fmt: skip


def shown(rows: list[Row]) -> str:
    """The table for people."""
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


def absent(given: dict[str, Path | bool | None]) -> list[str]:
    """What is not there of what was asked for, as sentences."""
    sentences = []
    for name, (address, file) in REFERENCES.items():
        path = given.get(name)
        if isinstance(path, Path) and file is not None and not (path / file).is_file():
            sentences.append(
                f"--{name} {path}: there is no {file} in it; "
                f"give the folder of a checkout of {address}"
            )
    needed = ([("sb3", "stable_baselines3")] if given.get("sb3") else []) + (
        [("cleanrl", "gym")] if given.get("cleanrl") else []
    )
    for name, package in needed:
        if importlib.util.find_spec(package) is None:
            sentences.append(
                f"--{name}: the package {package} is not installed here; "
                "see benchmarks/peers/requirements-agreement.txt"
            )
    return sentences


def run_all(given: dict[str, Path | bool], folder: Path) -> list[Row]:
    """Run every side of every case, two at a time, and compare."""
    numbers = {
        name: [str(number) for number, case in enumerate(CASES) if case.reference == name]
        for name in given
    }
    every = [number for of_one in numbers.values() for number in of_one]
    # Draws the weights and the orders that all others take.
    child("ours", "float32", folder, "-", every)
    first = [("ours", "float64", folder, "-", every)]
    theirs = [
        (name, precision, folder, str(path), numbers[name])
        for name, path in given.items()
        for precision in ("float64", "float32")
    ]
    apart = [job for job in theirs if job[0] != "baselines"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: child(*job), first + apart))
        # These read what ours said.
        list(pool.map(lambda job: child(*job), [job for job in theirs if job not in apart]))

    def load(name: str) -> Arrays:
        with np.load(folder / name) as arrays:
            return dict(arrays)

    return [
        row
        for number in every
        for row in rows_of(int(number), lambda run, at=number: load(f"{at}.{run}.npz"))
    ]


def child(who: str, precision: str, folder: Path, path: str, numbers: list[str]) -> None:
    """Run one side in a process of its own.

    Raises:
        SystemExit: it failed; what it said last.
    """
    words = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "references" / "child.py"),
        who,
        precision,
        str(folder),
        path,
        *numbers,
    ]
    print(f"running {who} in {precision}", file=sys.stderr, flush=True)
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{who} in {precision} failed:\n{done.stderr[-3000:]}")


def about(given: dict[str, Path | bool]) -> dict[str, Any]:
    """What was compared, with commits and versions."""
    from importlib.metadata import version

    found = {}
    for name, path in given.items():
        state = (
            commit(path) or "unknown"
            if isinstance(path, Path)
            else f"version {version('stable_baselines3')}"
        )
        found[name] = {"repository": REFERENCES[name][0], "commit": state}
    packages = ("torch", "numpy", "gymnasium", *(["gym"] if "cleanrl" in given else []))
    return {
        "commit": commit(PEERS) or "unknown",
        "versions": {package: version(package) for package in packages},
        "references": found,
    }


def main() -> None:
    """Compare, print the table, and write it if a file is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in REFERENCES:
        options: dict[str, Any] = (
            {"action": "store_true"} if name == "sb3" else {"type": Path, "metavar": "FOLDER"}
        )
        parser.add_argument(f"--{name}", **options)
    parser.add_argument(
        "--mistake",
        type=float,
        default=0.0,
        metavar="PART",
        help="make our value loss wrong by this part, to see how a mistake shows",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="a JSON file for all rows, with the commits of everything",
    )
    options = vars(parser.parse_args())
    given = {
        name: options[name.replace("-", "_")]
        for name in REFERENCES
        if options[name.replace("-", "_")]
    }
    if not given:
        parser.error(
            "there is nothing to compare with; "
            f"give at least one of {', '.join(f'--{name}' for name in REFERENCES)}"
        )
    if sentences := absent(given):
        parser.error("\n".join(sentences))
    os.environ[MISTAKE] = str(options["mistake"])  # of the processes that run the two sides
    found = about(given)  # before anything can be edited
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(given, Path(folder))
    print(shown(rows))
    if options["output"] is not None:
        options["output"].write_text(
            json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
