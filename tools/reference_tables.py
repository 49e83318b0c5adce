"""Thin published learning curves to the tables of them that the package carries.

usage: python -m tools.reference_tables CURVES_FOLDER

The folder has one CSV file for each publication (`experiment`, `run`, `game`, `step`,
`episodic_return`, and `split` where there are test levels). The package's other tables, of single
numbers, are written by hand.
"""

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from phasicrl.lab.analysis.references import FOLDER

POINTS = 48
CURVES = {
    "ppg-paper": ("ppg_paper_hard_100M.csv.gz", "hard", 0),
    "baselines-easy": ("baselines_ppo_easy_all.csv.gz", "easy", 0),
    "baselines-easy-200": ("baselines_ppo_easy_200.csv.gz", "easy", 200),
    "cleanrl-ppg": ("cleanrl_ppg_starpilot_easy_250k.csv.gz", "easy", 0),
}
"""By the name of a reference: the file that it is made from, and the levels of the training."""


def curves(path: Path) -> Iterable[tuple[str, str, str, str, int, float]]:
    """Thin curves of 100 points or more to few, at growing distances: they start steep."""
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["episodic_return"]:
                game = row["game"].removesuffix("-train")  # as train-procgen names its training
                key = (row["experiment"], row["run"], game, row.get("split", "train"))
                runs[key].append((float(row["step"]), float(row["episodic_return"])))
    for key, points in runs.items():
        steps, values = np.array(sorted(points)).T
        wanted = steps if len(steps) < 100 else np.geomspace(steps[0], steps[-1], POINTS)
        chosen = np.unique(np.abs(steps[:, None] - wanted).argmin(0))
        for index in chosen:
            experiment, run, game, split = key
            yield experiment, run, game, split, int(steps[index]), float(values[index])


def main(folder: Path) -> None:
    """Write the tables of all curves."""
    for name, (source, *levels) in CURVES.items():
        path = FOLDER / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((
                "experiment", "run", "game", "split", "distribution", "num_levels",
                "step", "episodic_return",
            ))  # fmt: skip
            for *about, step, value in curves(folder / source):
                writer.writerow((*about, *levels, step, f"{value:.4g}"))
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
