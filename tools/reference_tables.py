"""Make the tables of published results that the package carries, from their sources.

usage: python -m tools.reference_tables CURVES_FOLDER

The folder has OpenAI's learning curves, as one CSV file for each publication (`experiment`, `run`,
`game`, `step`, `episodic_return`, and `split` where there are test levels): they are thinned to
some fifty points each. Single numbers stand below, with where they were printed.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from phasicrl.analysis.references import FOLDER

POINTS = 48
CURVES = {
    "ppg-paper": "ppg_paper_hard_100M.csv.gz",
    "baselines-easy": "baselines_ppo_easy_all.csv.gz",
    "baselines-easy-200": "baselines_ppo_easy_200.csv.gz",
}
"""By the name of a reference, the file that it is made from."""
NUMBERS: dict[str, dict[str, tuple[float, int]]] = {
    "zoo": {
        "cartpole": (500.0, 100_000), "pendulum": (-172.2, 100_000), "acrobot": (-73.5, 1_000_000),
        "mountaincar": (-110.4, 1_000_000), "mountaincarcontinuous": (88.3, 20_000),
        "lunarlander": (242.1, 1_000_000), "halfcheetah": (5819.0, 1_000_000),
        "hopper": (2410.0, 1_000_000), "walker2d": (3479.0, 1_000_000), "ant": (1327.0, 1_000_000),
        "swimmer": (281.6, 1_000_000), "bipedalwalker": (287.9, 5_000_000),
        "pong": (20.99, 10_000_000), "breakout": (398.0, 10_000_000),
        "beamrider": (3397.0, 10_000_000), "qbert": (15627.0, 10_000_000),
    },
    "tianshou": {
        "invertedpendulum": (1000.0, 1_000_000), "reacher": (-4.1, 1_000_000),
        "inverteddoublependulum": (9231.0, 1_000_000), "halfcheetah": (5784.0, 1_000_000),
        "hopper": (2609.0, 1_000_000), "walker2d": (3589.0, 1_000_000), "ant": (3258.0, 1_000_000),
        "swimmer": (66.7, 1_000_000), "humanoid": (787.0, 1_000_000),
    },
    "slm-lab": {  # but for InvertedPendulum, for which the page has two budgets
        "cartpole": (498.94, 200_000), "acrobot": (-81.28, 300_000), "pendulum": (-174.87, 300_000),
        "lunarlander": (183.30, 300_000), "lunarlandercontinuous": (132.58, 300_000),
        "ant": (2138.28, 10_000_000), "halfcheetah": (6240.68, 10_000_000),
        "hopper": (1653.74, 4_000_000), "humanoid": (2661.26, 10_000_000),
        "humanoidstandup": (150104.59, 4_000_000), "pusher": (-49.59, 4_000_000),
        "inverteddoublependulum": (8383.76, 10_000_000), "reacher": (-5.03, 4_000_000),
        "swimmer": (282.44, 4_000_000), "walker2d": (4378.62, 10_000_000),
        "pong": (16.69, 10_000_000), "breakout": (326.47, 10_000_000),
        "beamrider": (2761.75, 10_000_000), "qbert": (15460.48, 10_000_000),
    },
    "cleanrl": {
        "cartpole": (490.04, 500_000), "acrobot": (-86.36, 500_000),
        "mountaincar": (-200.0, 500_000),
        "halfcheetah": (1442.6, 1_000_000), "walker2d": (2288.0, 1_000_000),
        "hopper": (2383.0, 1_000_000), "invertedpendulum": (963.1, 1_000_000),
        "humanoid": (716.0, 1_000_000), "pusher": (-40.4, 1_000_000),
        "pong": (20.36, 10_000_000), "beamrider": (1915.9, 10_000_000),
        "breakout": (414.7, 10_000_000),
    },
}  # fmt: skip
"""By reference and task: the mean return that was reached, and after how many steps."""
Row = tuple[str, str, str, str, int, float]


def curves(path: Path) -> Iterable[Row]:
    """The curves of a file on few steps, whose distances grow: a curve is steep where it begins."""
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["episodic_return"]:
                key = (row["experiment"], row["run"], row["game"], row.get("split", "train"))
                runs[key].append((float(row["step"]), float(row["episodic_return"])))
    for key, points in runs.items():
        steps, values = np.array(sorted(points)).T
        wanted = np.geomspace(steps[0], steps[-1], POINTS)
        chosen = np.unique(np.abs(steps[:, None] - wanted).argmin(0))
        for index in chosen:
            experiment, run, game, split = key
            yield experiment, run, game, split, int(steps[index]), float(values[index])


def write(name: str, rows: Iterable[Row]) -> None:
    """Write a reference; the same rows give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("experiment", "run", "game", "split", "step", "episodic_return"))
    for *about, value in rows:
        writer.writerow([*about, f"{value:.4g}"])
    path = FOLDER / f"{name}.csv.gz"
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    print(f"{path}: {path.stat().st_size:,} bytes")


def main(folder: Path) -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, file in CURVES.items():
        write(name, curves(folder / file))
    for name, tasks in NUMBERS.items():
        numbers = tasks.items()
        write(name, [(name, "1", task, "train", step, value) for task, (value, step) in numbers])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
