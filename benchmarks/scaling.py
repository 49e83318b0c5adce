"""Measure how much faster two processes train than one on the same cores.

usage: python benchmarks/scaling.py OUT.csv [--presets procgen-ppo …] [--rounds 5]

One process with a thread on each core, and two with half of the threads: the same run and the same
environments in all. The two are measured in turns, whole iterations, and each round gives a row
with the median of its iterations. `exchanges` is what one process spends with the others, waiting
included; `message` is an exchange of that size alone, when both are there.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tyro

from phasicrl import train
from phasicrl.cli import parse_config
from phasicrl.config import Config
from phasicrl.distributed import World
from phasicrl.system.machine import find_commit, num_cores, processor
from phasicrl.training.run import Run

RUNS = {
    "procgen-ppo": "procgen-ppo --ppo.num-steps 32",
    "procgen-ppg": "procgen-ppg --ppo.num-steps 32 --aux.every 2 --aux.epochs 2",
    "cartpole-ppo": "cartpole-ppo --env.num-envs 64",
    "halfcheetah-ppo": "halfcheetah-ppo",
}
"""Presets that are trained, with rollouts that leave time for several iterations."""
ITERATIONS = {"procgen-ppo": 4, "procgen-ppg": 4, "cartpole-ppo": 40, "halfcheetah-ppo": 4}
ROUNDED = ("seconds", "exchanges", "message", "steps_per_second")
COLUMNS = (
    "run", "processes", "threads", "round", "seconds", "exchanges", "message", "bytes",
    "steps_per_second", "processor", "commit",
)  # fmt: skip


def measure(name: str, output: Path) -> None:
    """Train a few iterations, as one of the processes; the first writes the medians over them."""
    warm_up = 2 if name == "procgen-ppg" else 1  # of PPG a phase
    threads = max(num_cores() // 2, 1) if "RANK" in os.environ else num_cores()
    seconds, exchanges, spent = [], [], [0.0]
    exchange = World._run_collective
    found: dict[str, Any] = {"threads": threads}

    def timed(self: World, *args: Any) -> None:
        start = time.perf_counter()
        exchange(self, *args)
        spent[0] += time.perf_counter() - start

    def note(run: Run, record: dict[str, float]) -> Any:
        if run.iteration > warm_up:
            seconds.append(record["time/total"])
            exchanges.append(spent[0])
        spent[0] = 0.0
        if run.iteration < warm_up + ITERATIONS[name]:
            return None
        gradients = [torch.zeros_like(p) for p in run.agent.parameters()]
        found["bytes"] = sum(each.nbytes for each in gradients)
        found["message"] = message_alone(run, gradients)
        return "stop"

    words = f"{RUNS[name]} --total-env-steps 100_000_000 --compute.num-threads {threads} "
    words += f"--log.console off --log.no-tensorboard --output-dir {output.parent}"
    config = parse_config(words.split()).with_updates({"checkpoint.every_minutes": None})
    with mock.patch.object(World, "_run_collective", timed):
        run = train(config, callbacks=note)
    # PPG: an auxiliary phase belongs to every second iteration.
    middle = statistics.fmean if name == "procgen-ppg" else statistics.median
    found |= {"seconds": middle(seconds), "exchanges": middle(exchanges)}
    found["steps_per_second"] = config.batch_size / found["seconds"]
    if run.world.is_first:
        output.write_text(json.dumps(found))


def message_alone(run: Run, gradients: list[torch.Tensor]) -> float:
    """Return the seconds of one exchange of the gradients, without waiting for others."""
    if run.world.size == 1:
        return 0.0
    times = []
    for _ in range(20):
        run.world.all_reduce_any(False)  # all are here
        start = time.perf_counter()
        run.world.all_reduce_mean_(gradients)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_apart(name: str, processes: int) -> dict[str, Any]:
    """Start one or two processes, and return the measurement of the first of them."""
    launch = f"-m torch.distributed.run --nproc-per-node {processes}" if processes > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found.json")
        words = f"{launch} {__file__} --as {name} {output}".split()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def main(output: Path, /, presets: tuple[str, ...] = tuple(RUNS), rounds: int = 5) -> None:
    """Measure in turns, and write a row for each."""
    with output.open("w", newline="") as file:
        table: Any = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for number in range(1, rounds + 1):
            for name in presets:
                for processes in (1, 2) if number % 2 else (2, 1):
                    row = measure_apart(name, processes)
                    row |= {key: f"{row[key]:.6g}" for key in ROUNDED}
                    row |= {"run": name, "processes": processes, "round": number}
                    row |= {"processor": processor(), "commit": find_commit() or "unknown"}
                    table.writerow(row)
                    file.flush()
                    print(*row.values(), flush=True)


def gradient_steps(config: Config) -> float:
    """Return the gradient steps of an iteration, on average over auxiliary phases."""
    ppo, aux = config.ppo, config.aux
    steps = float(len(ppo.epoch_kinds) * ppo.num_minibatches)
    if config.has_auxiliary_phase:
        rollouts = aux.iterations_per_epoch or aux.every
        steps += aux.epochs * aux.num_minibatches * rollouts / (aux.every * aux.run_every)
    return steps


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        measure(sys.argv[2], Path(sys.argv[3]))
    else:
        tyro.cli(main, description=__doc__)
