"""Trains presets over seeds and writes what was reached.

One row a run, see `phasicrl.experiments.trials`.

usage: python benchmarks/learning.py OUTPUT.csv PRESET[:FIELDS] … [--seeds 10] [--first-seed 101]
           [--threshold 475] [--jobs 1] [--runs FOLDER]
for example: python benchmarks/learning.py benchmarks/results/cartpole.csv cartpole-ppo
    "cartpole-ppg:--reward-norm none"

Runs whose rows the file has already are not made again, so that a command that was stopped goes on.
Settings are chosen on seeds 1 to 10, whose rows are in benchmarks/results/selection, and reported
on seeds from 101 on: no file has both.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from phasicrl.cli import parse_config
from phasicrl.experiments.trials import (
    FIRST_REPORT_SEED,
    LEARNING_COLUMNS,
    ResultTable,
    Trial,
    fill_table,
    learning_row,
    over_seeds,
)


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
