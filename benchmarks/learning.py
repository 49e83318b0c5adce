"""Train presets over seeds, and write a row for each run with its returns.

usage: python benchmarks/learning.py OUTPUT.csv PRESET[:FIELDS] … [--seeds 10] [--first-seed 101]
           [--threshold 475] [--jobs 1] [--runs FOLDER]
for example: python benchmarks/learning.py benchmarks/results/cartpole.csv cartpole-ppo
    "cartpole-ppg:--reward-norm.per none"

Runs that the file has are not repeated, so that an interrupted command continues.
Settings are chosen on seeds 1 to 10, whose rows are in benchmarks/results/selection, and reported
on seeds from 101 on: no file has both.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import tyro

from phasicrl.algorithm import train
from phasicrl.cli import parse_config
from phasicrl.lab.experiments.trials import (
    FIRST_REPORT_SEED,
    RETURN,
    ResultTable,
    Row,
    Trial,
    run_missing_trials,
    vary_seed,
)
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.evaluate import evaluate

LEARNING_COLUMNS = (
    "preset", "seed", "env", "env_steps", "seconds", "return_100", "steps_to_threshold",
    "greedy_mean", "greedy_min", "sampled_mean", "commit",
)  # fmt: skip
"""Columns of `train_and_measure`."""


def train_and_measure(trial: Trial, *, threshold: float) -> list[Row]:
    """Train and evaluate; returns one row.

    Args:
        trial: the run.
        threshold: mean return of 100 training episodes; the row has the steps to it.
    """
    run = train(trial.config)
    files = RunDirectory(run.directory)
    reached = (row for row in files.metrics(RETURN) if row.get(RETURN, float("-inf")) >= threshold)
    steps_to_threshold = int(next(reached, {"env_steps": 0})["env_steps"])
    greedy, sampled = evaluate(run.directory, episodes=20)
    row: Row = {
        "preset": trial.label_parts[0],
        "seed": trial.config.seed,
        "env": run.envs.name,
        "env_steps": run.env_steps,
        "seconds": round(run.seconds, 1),
        "return_100": round(run.collector.episodes.recent_mean_return, 2),
        "steps_to_threshold": steps_to_threshold or "",
        "greedy_mean": greedy.mean_return,
        "greedy_min": min(greedy.returns),
        "sampled_mean": sampled.mean_return,
        "commit": files.card["commit"],
    }
    return [row]


def make_trials(presets: Iterable[str], seeds: Iterable[int], runs: str) -> list[Trial]:
    """Return the trials of the command line."""
    trials: list[Trial] = []
    for preset in presets:
        name, _, fields = preset.partition(":")
        quiet = ["--output-dir", runs, "--log.no-tensorboard", "--log.console", "off"]
        config = parse_config([name, *quiet, *fields.split()])
        trials += vary_seed((f"{name} {fields}".strip(),), config, seeds)
    return trials


def main(
    output: Path,
    presets: tuple[str, ...],
    /,
    seeds: int = 10,
    first_seed: int = FIRST_REPORT_SEED,
    threshold: float = 475.0,
    jobs: int = 1,
    runs: str = "runs/learning",
) -> None:
    """Run everything that the command line names, some runs at a time."""
    trials = make_trials(presets, range(first_seed, first_seed + seeds), runs)
    measure = partial(train_and_measure, threshold=threshold)
    for trial in run_missing_trials(
        ResultTable(output, LEARNING_COLUMNS), trials, measure, jobs=jobs
    ):
        print(*trial.key, flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
