"""Trains presets over seeds and writes what was reached: one row a run, with the training curve's end and a greedy evaluation.

usage: python benchmarks/learning.py OUTPUT.csv PRESET[:FIELDS] … [--seeds 10] [--first-seed 101] [--threshold 475] [--jobs 1] [--runs FOLDER]
for example: python benchmarks/learning.py benchmarks/results/cartpole.csv cartpole-ppo cartpole-ppg "cartpole-ppg:--reward-norm none"

Runs whose rows the file has already are not made again, so that a command that was stopped goes on where it was. Settings are chosen on seeds 1 to 10,
whose rows are in benchmarks/results/selection, and reported on seeds from 101 on: no file has both.
"""

from __future__ import annotations

import argparse
import csv
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from phasicrl import evaluate, train
from phasicrl.cli import parse_config
from phasicrl.config import Config
from phasicrl.runs.directory import RunDirectory

COLUMNS = (
    "preset",
    "seed",
    "env",
    "env_steps",
    "seconds",
    "return_100",
    "steps_to_threshold",
    "greedy_mean",
    "greedy_min",
    "sampled_mean",
    "commit",
)
FIRST_REPORT_SEED = 101
"""Seeds below are for choosing, the others for reporting."""


def result(label: str, config: Config, threshold: float) -> dict[str, object]:
    """Train one run and say what it reached, and when the mean of 100 training episodes first reached the threshold."""
    run = train(config)
    rows = RunDirectory(run.directory).metrics()
    reached = (row["env_steps"] for row in rows if row.get("charts/episodic_return_100", float("-inf")) >= threshold)
    greedy, sampled = evaluate(run.directory, episodes=20)
    return {
        "preset": label,
        "seed": config.seed,
        "env": run.envs.name,
        "env_steps": run.env_steps,
        "seconds": round(run.seconds, 1),
        "return_100": round(run.collector.episodes.recent_mean, 2),
        "steps_to_threshold": int(next(reached, 0)) or "",
        "greedy_mean": greedy.mean_return,
        "greedy_min": min(greedy.returns),
        "sampled_mean": sampled.mean_return,
        "commit": RunDirectory(run.directory).card["commit"],
    }


def rows_of(output: Path, seeds: range) -> set[tuple[str, int]]:
    """Which runs, by preset and seed, a file has already.

    Raises:
        SystemExit: seeds for choosing and seeds for reporting would come together in it.
    """
    there = {(row["preset"], int(row["seed"])) for row in csv.DictReader(output.read_text().splitlines())} if output.is_file() else set()
    if len({seed >= FIRST_REPORT_SEED for seed in (*seeds, *(seed for _, seed in there))}) > 1:
        raise SystemExit(
            f"{output} would have seeds below {FIRST_REPORT_SEED}, on which settings are chosen, and others, which are reported; "
            "write them to another file"
        )
    return there


def main() -> None:
    """Run everything that the command line names, some runs at a time; a row is written when its run is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=FIRST_REPORT_SEED)
    parser.add_argument("--threshold", type=float, default=475.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", default="runs/learning")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    there = rows_of(options.output, seeds)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        pending = []
        for preset in options.presets:
            name, _, fields = preset.partition(":")
            label = f"{name} {fields}".strip()
            config = parse_config([name, "--output-dir", options.runs, "--log.no-tensorboard", "--log.console", "off", *fields.split()])
            wanted = [seed for seed in seeds if (label, seed) not in there]
            pending += [pool.submit(result, label, replace(config, seed=seed), options.threshold) for seed in wanted]
        for run in as_completed(pending):
            write(options.output, run.result())


def write(output: Path, row: dict[str, object]) -> None:
    """Add a row to a file, which is kept in the order of presets and seeds."""
    rows = list(csv.DictReader(output.read_text().splitlines())) if output.is_file() else []
    rows.append({name: str(value) for name, value in row.items()})
    order = list(dict.fromkeys(row["preset"] for row in rows))
    rows.sort(key=lambda row: (order.index(row["preset"]), int(row["seed"])))
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
