"""Compare the speed of two checkouts, such as those before and after a change.

usage: python benchmarks/before_after.py OUT.csv --before OLDER/.venv/bin/phasicrl [--rounds 5]

Each round trains with both, in alternating order. A row has the environment steps per second of one
run after its second iteration; medians and ratios are printed. Nothing else may run.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tyro
from versus import median_and_interval

PROCGEN = "--env.id starpilot --env.num-envs 16 --ppo.num-steps 128"
BF16 = "--compute.policy-precision bf16"
TASKS = {
    "cartpole": "cartpole-ppo --total-env-steps 200000",
    "cartpole-compiled": "cartpole-ppo --total-env-steps 200000 --compute.compile on",
    "halfcheetah": "halfcheetah-ppo --total-env-steps 60000",
    "halfcheetah-compiled": "halfcheetah-ppo --total-env-steps 60000 --compute.compile on",
    "procgen-ppo": f"procgen-ppo {PROCGEN} --total-env-steps 12288 {BF16}",
    "procgen-ppg": f"procgen-ppg-single {PROCGEN} --total-env-steps 16384 {BF16} --aux.every 2 "
    "--compute.aux-precision bf16",
}
FIELDS = ["task", "checkout", "commit", "round", "steps_per_second"]


def measure(program: Path, words: str, seed: int) -> tuple[str, float]:
    """Train with a checkout; return its commit and the environment steps per second."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "train", *words.split(), "--seed", str(seed), "--output-dir", folder]
        command += ["--log.console", "off", "--checkpoint.every-minutes", "none"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        (run,) = Path(folder).iterdir()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        first, last = rows[1], rows[-1]
        steps, seconds = (last[name] - first[name] for name in ("env_steps", "wall_time"))
        return json.loads((run / "card.json").read_text())["commit"], steps / seconds


def main(output: Path, /, before: Path, rounds: int = 5, tasks: tuple[str, ...] = ()) -> None:
    """Measure tasks in turn, and write each run to the table as soon as it has ended."""
    programs = {"before": before, "after": Path(sys.executable).with_name("phasicrl")}
    with output.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(FIELDS)
        for task in tasks or TASKS:
            rates = {name: list[float]() for name in programs}
            for seed in range(1, rounds + 1):
                for name in [*programs][:: 1 if seed % 2 else -1]:
                    commit, rate = measure(programs[name], TASKS[task], seed)
                    rates[name].append(rate)
                    table.writerow([task, name, commit, seed, f"{rate:.1f}"])
                    file.flush()
            ratios = np.divide(rates["after"], rates["before"])
            found = median_and_interval(ratios, np.random.default_rng(0))
            medians = ", ".join(f"{x} {statistics.median(rates[x]):,.0f}" for x in rates)
            low, high = found["interval"]
            text = f"{task}: {medians} steps/s, ratio {found['ratio']:.3f} [{low:.3f}, {high:.3f}]"
            print(text, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
