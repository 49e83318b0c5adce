"""Trains presets over seeds and writes what was reached: one row a run, with the training curve's end and a greedy evaluation.

usage: python benchmarks/learning.py OUTPUT.csv PRESET[:FIELDS] … [--seeds 5] [--first-seed 1] [--threshold 475] [--jobs 1] [--runs FOLDER]
for example: python benchmarks/learning.py benchmarks/results/cartpole.csv classic-ppo classic-ppg "classic-ppg:--reward-norm none"
"""

from __future__ import annotations

import argparse
import csv
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from phasicrl import evaluate, train
from phasicrl.cli import parse_config
from phasicrl.config import Config
from phasicrl.metrics import read_metrics

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


def result(label: str, config: Config, threshold: float) -> dict[str, object]:
    """Train one run and say what it reached, and when the mean of 100 training episodes first reached the threshold."""
    run = train(config)
    rows = read_metrics(run.directory)
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
        "commit": json.loads((run.directory / "card.json").read_text())["commit"],
    }


def main() -> None:
    """Run everything that the command line names, some runs at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1, help="to add seeds to what is there")
    parser.add_argument("--threshold", type=float, default=475.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", default="runs/learning")
    options = parser.parse_args()
    more = options.first_seed > 1 and options.output.is_file()
    with options.output.open("a" if more else "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not more:
            writer.writeheader()
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            pending = []
            for preset in options.presets:
                name, _, fields = preset.partition(":")
                config = parse_config([name, "--output-dir", options.runs, "--log.no-tensorboard", "--log.console", "off", *fields.split()])
                label = f"{name} {fields}".strip()
                seeds = range(options.first_seed, options.first_seed + options.seeds)
                pending += [pool.submit(result, label, replace(config, seed=seed), options.threshold) for seed in seeds]
            for run in pending:
                writer.writerow(run.result())
                file.flush()


if __name__ == "__main__":
    main()
