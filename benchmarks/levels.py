"""Train on few levels, and evaluate on those and on all.

usage: python benchmarks/levels.py OUT.csv FIGURE.png [--levels 10 200] [--seeds 101 102 103]
    [--jobs 1] [--fields "…"]

FruitBot, `quickstart` with narrower convolutions. Every thirty iterations 64 episodes are run on
the levels of the training and 64 on levels of the whole distribution, with sampled actions, as for
the published curves; each is a row. Runs that the file has are not repeated. The figure has the
mean over seeds and the range. A run is eight minutes of one core.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from phasicrl import train
from phasicrl.cli import parse_config
from phasicrl.lab.experiments.trials import ResultTable, Trial, fill_table
from phasicrl.system.provenance import commit
from phasicrl.training.run import Run

FIELDS = "--model.channels 8 16 16 --total-env-steps 300_000"
EVALUATION = (
    "--evaluation.levels both --evaluation.policy sampled --evaluation.every-iterations 30 "
    "--evaluation.episodes 64"
)
METRICS = ("evaluation/train_return", "evaluation/return", "evaluation/gap")
COLUMNS = ("levels", "seed", "env_steps", *METRICS, "commit")
Row = dict[str, str]


def measure(trial: Trial) -> list[Row]:
    """Train once; returns a row for each evaluation."""
    rows: list[Row] = []
    made = {
        "levels": trial.label[0],
        "seed": str(trial.config.seed),
        "commit": commit() or "unknown",
    }

    def note(trained: Run, record: dict[str, float]) -> None:
        if METRICS[0] in record:
            found = {name: f"{record[name]:.5g}" for name in METRICS}
            rows.append(made | {"env_steps": str(trained.env_steps)} | found)

    with tempfile.TemporaryDirectory() as folder:
        train(replace(trial.config, output_dir=folder), on_iteration=note)
    return rows


def make_trials(levels: Iterable[int], seeds: Iterable[int], fields: str) -> list[Trial]:
    """Return all trials, seed by seed: an interrupted measurement has each number of levels."""
    trials: list[Trial] = []
    for seed in seeds:
        for number in levels:
            words = f"quickstart --env.id fruitbot --env.num-levels {number} --seed {seed} "
            words += f"--log.console off --log.no-tensorboard {EVALUATION} {fields} "
            words += "--compute.num-threads 1 --env.num-threads 1 --compute.micro-batch 64"
            config = parse_config(words.split()).with_updates({"checkpoint.every_minutes": None})
            trials.append(Trial((str(number),), config))
    return trials


def draw(rows: list[Row], path: Path) -> None:
    """Draw a panel for each number of levels."""
    numbers = sorted({int(row["levels"]) for row in rows})
    figure = Figure(figsize=(4 * len(numbers), 2.8), layout="constrained")
    panels = figure.subplots(1, len(numbers), squeeze=False, sharey=True)[0]
    titles = {METRICS[0]: "the training's levels", METRICS[1]: "all levels"}
    for panel, number in zip(panels, numbers, strict=True):
        of_number = [row for row in rows if row["levels"] == str(number)]
        steps = sorted({int(row["env_steps"]) for row in of_number})
        for metric, title in titles.items():
            values = [
                [float(row[metric]) for row in of_number if row["env_steps"] == str(at)]
                for at in steps
            ]
            (line,) = panel.plot(np.array(steps) / 1e3, [np.mean(at) for at in values], label=title)
            low, high = [min(at) for at in values], [max(at) for at in values]
            panel.fill_between(
                np.array(steps) / 1e3, low, high, color=line.get_color(), alpha=0.15, linewidth=0
            )
        panel.set_title(f"trained on {number} levels", fontsize="small", loc="left")
        panel.set_xlabel("thousand environment steps", fontsize="small")
    panels[0].set_ylabel("return", fontsize="small")
    panels[0].legend(fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=110)


def main(
    output: Path,
    figure: Path,
    /,
    levels: tuple[int, ...] = (10, 200),
    seeds: tuple[int, ...] = (101, 102, 103),
    jobs: int = 1,
    fields: str = FIELDS,
) -> None:
    """Run what is missing, and draw everything."""
    table = ResultTable(output, COLUMNS, label=("levels",))
    for trial in fill_table(table, make_trials(levels, seeds, fields), measure, jobs=jobs):
        print(*trial.key, flush=True)
    draw(table.rows(), figure)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
