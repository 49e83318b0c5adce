"""What masks and a heuristic are worth in examples/trading.py: one row a run.

usage: python benchmarks/trading.py OUTPUT.csv [--seeds 5] [--first-seed 101] [--runs FOLDER]
for example: python benchmarks/trading.py benchmarks/results/trading.csv

Runs whose rows the file has already are not made again.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

from phasicrl import EnvConfig, train
from phasicrl.lab.experiments.trials import (
    FIRST_REPORT_SEED,
    ResultTable,
    Row,
    Trial,
    fill_table,
    over_seeds,
    reached,
)

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "trading.py"))
NO_HEURISTIC = {
    "env.heuristic_mask_steps": EnvConfig(id="market").heuristic_mask_steps
}  # its default
ARMS = {
    "no masks": NO_HEURISTIC | {"env.action_masks": False},
    "masks": NO_HEURISTIC,
    "masks, and the heuristic at first": {},
}
COLUMNS = (
    "arm", "seed", "env_steps", "return_100", "greedy_mean", "value_loss", "seconds", "commit",
    "curve",
)  # fmt: skip


def measure(trial: Trial) -> list[Row]:
    """Train in the market, and say what was reached."""
    heuristic = None if ARMS[trial.label[0]] else EXAMPLE["buy_low"]
    run = train(trial.config, make_env=EXAMPLE["Market"], mask_actions=heuristic)
    row = reached(run.directory, make_env=EXAMPLE["Market"])
    return [{"arm": trial.label[0], "seed": trial.config.seed, **row}]


def main() -> None:
    """Train every arm with every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=FIRST_REPORT_SEED)
    parser.add_argument("--runs", default="runs/trading")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    quiet = {"output_dir": options.runs, "log.console": "off", "log.tensorboard": False}
    trials = [
        trial
        for arm, changes in ARMS.items()
        for trial in over_seeds((arm,), EXAMPLE["config"].with_updates(quiet | changes), seeds)
    ]
    table = ResultTable(options.output, COLUMNS, label=("arm",))
    for trial in fill_table(table, trials, measure):
        print(*trial.key, flush=True)


if __name__ == "__main__":
    main()
