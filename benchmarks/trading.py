"""Train the trader of examples/trading.py with and without masks and its heuristic.

usage: python benchmarks/trading.py OUTPUT.csv [--seeds 5] [--first-seed 101] [--runs FOLDER]
for example: python benchmarks/trading.py benchmarks/results/trading.csv

Runs that the file has are not repeated.
"""

import runpy
from pathlib import Path

import tyro

from phasicrl import EnvConfig, train
from phasicrl.lab.experiments.trials import (
    FIRST_REPORT_SEED,
    ResultTable,
    Row,
    Trial,
    run_missing_trials,
    summarize_run,
    vary_seed,
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
    """Train in the market; returns one row."""
    heuristic = None if ARMS[trial.label_parts[0]] else EXAMPLE["buy_low"]
    run = train(trial.config, make_env=EXAMPLE["Market"], mask_actions=heuristic)
    row = summarize_run(run.directory, make_env=EXAMPLE["Market"])
    return [{"arm": trial.label_parts[0], "seed": trial.config.seed, **row}]


def main(
    output: Path,
    /,
    seeds: int = 5,
    first_seed: int = FIRST_REPORT_SEED,
    runs: str = "runs/trading",
) -> None:
    """Train every arm with every seed."""
    quiet = {"output_dir": runs, "log.console": "off", "log.tensorboard": False}
    trials = [
        trial
        for arm, changes in ARMS.items()
        for trial in vary_seed(
            (arm,), EXAMPLE["config"].with_updates(quiet | changes),
            range(first_seed, first_seed + seeds),
        )
    ]  # fmt: skip
    for trial in run_missing_trials(ResultTable(output, COLUMNS, ("arm",)), trials, measure):
        print(*trial.key, flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
