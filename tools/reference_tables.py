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

from phasicrl.lab.analysis.references import FOLDER

POINTS = 48
CURVES = {
    "ppg-paper": "ppg_paper_hard_100M.csv.gz",
    "baselines-easy": "baselines_ppo_easy_all.csv.gz",
    "baselines-easy-200": "baselines_ppo_easy_200.csv.gz",
}
"""By the name of a reference, the file that it is made from."""
LEVELS: dict[str, tuple[str, int | str]] = {
    "ppg-paper": ("hard", 0), "procgen-easy-25m": ("easy", 0), "easy-all": ("easy", 0),
    "easy": ("easy", 0), "easy-200": ("easy", 200), "hard": ("hard", 0), "hard-500": ("hard", 500),
}  # fmt: skip
"""By reference or experiment: the levels' difficulty, and how many of them the training had."""
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
FINALS_OF = (
    ("easy", "train", 25), ("easy", "train", 50), ("hard", "train", 100), ("hard", "train", 200),
    ("easy-200", "train", 25), ("easy-200", "test", 25),
    ("hard-500", "train", 200), ("hard-500", "test", 200),
)  # fmt: skip
FINALS = {
    "coinrun": (9.17, 9.52, 8.47, 8.98, 9.49, 8.61, 7.7, 6.33),
    "starpilot": (34.89, 36.86, 19.17, 20.9, 30.72, 24.12, 13.04, 4.06),
    "caveflyer": (7.41, 8.2, 8.92, 10.2, 7.23, 5.33, 4.81, 3.19),
    "dodgeball": (6.45, 9.73, 7.96, 10.25, 5.08, 1.94, 7.85, 4.92),
    "fruitbot": (28.71, 29.38, 21.91, 23.65, 29.53, 26.55, 19.09, 8.75),
    "chaser": (6.83, 8.09, 6.94, 8.18, 6.87, 6.04, 7.26, 6.86),
    "miner": (11.05, 11.8, 11.94, 16.71, 12.83, 9.47, 18.45, 14),
    "jumper": (7.7, 8.32, 6.11, 6.69, 8.53, 5.71, 7.02, 3.04),
    "leaper": (7.19, 7.21, 8.71, 9.34, 6.35, 5.99, 6.43, 5.63),
    "maze": (9.86, 9.97, 8.64, 9.87, 9.37, 5.74, 7.1, 3.47),
    "bigfish": (19.58, 23.82, 20.49, 23.44, 12.13, 4.7, 10.12, 3.61),
    "heist": (7.04, 9.38, 5.78, 9.22, 8.05, 2.7, 3.83, 1.01),
    "climber": (10.3, 10.97, 9.15, 10.3, 8.67, 5.96, 9.12, 6.13),
    "plunder": (14.87, 15.9, 15.14, 17.11, 5.31, 4.69, 5.47, 4.1),
    "ninja": (8.14, 9.32, 8.75, 9.56, 7.55, 5.63, 7.97, 5.77),
    "bossfight": (9.03, 9.17, 10.51, 10.98, 8.3, 7.46, 10.46, 10.02),
}  # fmt: skip
"""Of Baselines' PPO by game: the last returns of each protocol of `FINALS_OF`, with its levels and
millions of steps; openai/train-procgen at 1a2ae21, results/."""
SOURCE_000 = {
    "starpilot": (34.82, 32.47, 42.01), "bossfight": (10.78, 9.63, 10.71),
    "bigfish": (24.23, 16.80, 15.94),
}  # fmt: skip
"""By game: PPG and PPO of CleanRL, PPG of OpenAI; easy, 25M steps."""
Row = tuple[str, str, str, str, int, float]


def curves(path: Path) -> Iterable[Row]:
    """The curves of a file on few steps, whose distances grow: a curve is steep where it begins."""
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["episodic_return"]:
                game = row["game"].removesuffix("-train")  # as train-procgen names its training
                key = (row["experiment"], row["run"], game, row.get("split", "train"))
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
    levels = ("distribution", "num_levels")
    writer.writerow(("experiment", "run", "game", "split", *levels, "step", "episodic_return"))
    for experiment, run, game, split, step, value in rows:
        about = (experiment, run, game, split, *LEVELS.get(name, LEVELS.get(experiment, ("", ""))))
        writer.writerow([*about, step, f"{value:.4g}"])
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
    write("baselines-final", [
        (levels, "1", game, split, millions * 1_000_000, value)
        for game, values in FINALS.items()
        for (levels, split, millions), value in zip(FINALS_OF, values, strict=True)
    ])  # fmt: skip
    write("procgen-easy-25m", [
        (code, "1", game, "train", 25_000_000, value)
        for game, values in SOURCE_000.items()
        for code, value in zip(("cleanrl-ppg", "cleanrl-ppo", "openai-ppg"), values, strict=True)
    ])  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
