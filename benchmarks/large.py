"""Measure time and memory of many environments and of many runs.

usage: python benchmarks/large.py OUT.csv [--repeats 3]

Each command runs in a process of its own; seconds are those of the whole program, memory is its
peak. A thousand environments of images, a thousand of vectors, and curves of fifty
runs with 5,000 rows each, which are copies of one short run.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import tyro

from phasicrl import get_preset, train
from phasicrl.system.machine import find_commit

TRAIN = {
    "images": "train procgen-ppo --env.num-envs 1024 --ppo.num-steps 8 --total-env-steps 8192 "
    "--compute.micro-batch 64",
    "vectors": "train cartpole-ppo --env.id gymnasium:CartPole-v1 --env.num-envs 1024 "
    "--ppo.num-steps 16 --total-env-steps 163840",
}
RUNS, ROWS = 50, 5_000
COLUMNS = ("what", "command", "seconds", "gigabytes", "commit")


def measure(words: list[str], folder: Path) -> tuple[float, float]:
    """Return seconds and gigabytes of a command of `phasicrl`."""
    start = perf_counter()
    command = [sys.executable, "-m", "phasicrl", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return perf_counter() - start, usage.ru_maxrss * 1024 / 1e9


def make_run_copies(folder: Path) -> list[str]:
    """Make fifty run directories; returns their names."""
    config = get_preset("cartpole-ppo").with_updates(
        {"total_env_steps": 1, "output_dir": str(folder), "log.console": "off"}
    )
    one = train(config).files.path
    row = json.loads((one / "metrics.jsonl").read_text().splitlines()[0])
    lines = [
        json.dumps(row | {"env_steps": number * row["env_steps"], "iteration": number}) + "\n"
        for number in range(1, ROWS + 1)
    ]
    (one / "metrics.jsonl").write_text("".join(lines))
    copies = [folder / f"run{number}" for number in range(RUNS)]
    config = json.loads((one / "config.json").read_text())
    for seed, copy in enumerate(copies):
        shutil.copytree(one, copy)
        (copy / "config.json").write_text(json.dumps(config | {"seed": seed}))
    return [copy.name for copy in copies]


def main(output: Path, /, repeats: int = 3) -> None:
    """Measure each command several times; a row each."""
    with output.open("w", newline="") as file, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {what: (words, words.split()) for what, words in TRAIN.items()}
        commands["curves"] = (f"plot of {RUNS} runs", ["plot", *make_run_copies(folder)])
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for _ in range(repeats):
            for what, (shown, words) in commands.items():
                seconds, gigabytes = measure(words, folder)
                row = [
                    what,
                    shown,
                    f"{seconds:.1f}",
                    f"{gigabytes:.2f}",
                    find_commit() or "unknown",
                ]
                writer.writerow(row)
                file.flush()
                print(*row, flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
