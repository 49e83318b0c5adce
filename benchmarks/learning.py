"""Trains presets over seeds and writes what was reached.

One row a run, see `learning_row`.

usage: python benchmarks/learning.py OUTPUT.csv PRESET[:FIELDS] … [--seeds 10] [--first-seed 101]
           [--threshold 475] [--jobs 1] [--runs FOLDER]
for example: python benchmarks/learning.py benchmarks/results/cartpole.csv cartpole-ppo
    "cartpole-ppg:--reward-norm.per none"

Runs whose rows the file has already are not made again, so that a command that was stopped goes on.
Settings are chosen on seeds 1 to 10, whose rows are in benchmarks/results/selection, and reported
on seeds from 101 on: no file has both.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from phasicrl.algorithm import train
from phasicrl.cli import parse_config
from phasicrl.lab.experiments.trials import (
    FIRST_REPORT_SEED,
    RETURN,
    ResultTable,
    Row,
    Trial,
    fill_table,
    over_seeds,
)
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.evaluate import evaluate

LEARNING_COLUMNS = (
    "preset", "seed", "env", "env_steps", "seconds", "return_100", "steps_to_threshold",
    "greedy_mean", "greedy_min", "sampled_mean", "commit",
)  # fmt: skip
"""Columns of `learning_row`."""


def learning_row(trial: Trial, *, threshold: float) -> list[Row]:
    """Train, and say in one row what was reached: at the end of training, and evaluated.

    Args:
        trial: the run.
        threshold: the return whose first time, as a mean of 100 training episodes, is noted.
    """
    run = train(trial.config)
    files = RunDirectory(run.directory)
    reached = (row for row in files.metrics(RETURN) if row.get(RETURN, float("-inf")) >= threshold)
    steps_to_threshold = int(next(reached, {"env_steps": 0})["env_steps"])
    greedy, sampled = evaluate(run.directory, episodes=20)
    row: Row = {
        "preset": trial.label[0],
        "seed": trial.config.seed,
        "env": run.envs.name,
        "env_steps": run.env_steps,
        "seconds": round(run.seconds, 1),
        "return_100": round(run.collector.episodes.recent_mean, 2),
        "steps_to_threshold": steps_to_threshold or "",
        "greedy_mean": greedy.mean_return,
        "greedy_min": min(greedy.returns),
        "sampled_mean": sampled.mean_return,
        "commit": files.card["commit"],
    }
    return [row]


def asked(presets: list[str], seeds: range, runs: str) -> list[Trial]:
    """The trials that the command line names."""
    trials: list[Trial] = []
    for preset in presets:
        name, _, fields = preset.partition(":")
        quiet = ["--output-dir", runs, "--log.no-tensorboard", "--log.console", "off"]
        config = parse_config([name, *quiet, *fields.split()])
        trials += over_seeds((f"{name} {fields}".strip(),), config, seeds)
    return trials


def main() -> None:
    """Run everything that the command line names, some runs at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=FIRST_REPORT_SEED)
    parser.add_argument("--threshold", type=float, default=475.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", default="runs/learning")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    table = ResultTable(options.output, LEARNING_COLUMNS)
    measure = partial(learning_row, threshold=options.threshold)
    for trial in fill_table(
        table, asked(options.presets, seeds, options.runs), measure, jobs=options.jobs
    ):
        print(*trial.key, flush=True)


if __name__ == "__main__":
    main()
