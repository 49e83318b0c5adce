"""Measure how much faster two processes train than one on the same cores, and model more of them.

usage: python benchmarks/scaling.py OUT.csv [--presets procgen-ppo …] [--rounds 5]

One process with a thread on each core, and two with half of the threads: the same run and the same
environments in all. The two are measured in turns, whole iterations, and each round gives a row
with the median of its iterations. `exchanges` is what one process spends with the others, waiting
included; `message` is an exchange of that size alone, when both are there.

The model, drawn by `python -m tools.figures scaling-model.png`, is not a measurement: links and the
speed of a GPU are assumed (`NETWORKS`, `RANKS`). From the measured seconds, bytes and messages, an
iteration of k processes that share a batch takes

    compute / (speed · k) + steps · (floor + message)
    message = 2 (k − 1) / k · bytes / bandwidth + 2 ⌈log₂ k⌉ · latency

with `steps` gradient steps, and `floor` seconds of a gradient step however small its minibatch is.
The bytes are those of a ring all-reduce (Patarasuk and Yuan 2009), the latency that of a tree. With
more processes than the batch has environments for, the batch grows.
"""

from __future__ import annotations

import csv
import json
import math
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
from matplotlib.figure import Figure

from phasicrl import train
from phasicrl.cli import parse_config
from phasicrl.config import Config
from phasicrl.distributed import World
from phasicrl.system.machine import num_cores, processor
from phasicrl.system.provenance import commit
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
NETWORKS = {
    "inside a machine of 8 GPUs": (200e9, 10e-6),
    "25 Gbit Ethernet": (25e9 / 8, 30e-6),
    "1 Gbit Ethernet": (1e9 / 8, 100e-6),
}
"""Assumed bandwidth in bytes per second, and latency in seconds: round numbers of such links."""
RANKS = {"a core here": (1.0, 0.0), "a hundred cores here, such as a GPU": (100.0, 2e-3)}
"""Assumed speed of a rank, in cores of the machine that was measured, and `floor`: the seconds that
launching some hundred kernels takes."""
RUN = "procgen-ppo"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_THAT_SHARE = 8
"""Processes among which one batch is divided; with more, there are more environments."""


def measure(name: str, output: Path) -> None:
    """Train a few iterations, as one of the processes; the first writes the medians over them."""
    warm_up = 2 if name == "procgen-ppg" else 1  # of PPG a phase
    threads = 1 if "RANK" in os.environ else num_cores()
    seconds, exchanges, spent = [], [], [0.0]
    exchange = World._exchange
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
    with mock.patch.object(World, "_exchange", timed):
        run = train(config, on_iteration=note)
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
        run.world.any_rank(False)  # all are here
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
    """Measure in turns, and append a row for each."""
    is_new = not output.exists()
    with output.open("a", newline="") as file:
        table: Any = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            table.writeheader()
        for number in range(1, rounds + 1):
            for name in presets:
                for processes in (1, 2) if number % 2 else (2, 1):
                    row = measure_apart(name, processes)
                    row |= {key: f"{row[key]:.6g}" for key in ROUNDED}
                    row |= {"run": name, "processes": processes, "round": number}
                    row |= {"processor": processor(), "commit": commit() or "unknown"}
                    table.writerow(row)
                    file.flush()
                    print(*row.values(), flush=True)


def gradient_steps(config: Config) -> float:
    """Return the gradient steps of an iteration, on average over auxiliary phases."""
    ppo, aux = config.ppo, config.aux
    steps = float(len(ppo.epoch_schedule) * ppo.num_minibatches)
    if config.has_auxiliary_phase:
        rollouts = aux.iterations_per_epoch or aux.every
        steps += aux.epochs * aux.num_minibatches * rollouts / (aux.every * aux.run_every)
    return steps


def model(path: Path) -> list[dict[str, Any]]:
    """Return the speedup for each number of processes and each kind of rank and link.

    It is that of the preset as it is: measured were shorter rollouts, which take as long a step.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["run"], row["processes"]) == (RUN, "2")]
    seconds, exchanges, num_bytes = (
        statistics.median(float(row[name]) for row in rows)
        for name in ("seconds", "exchanges", "bytes")
    )
    config, shorter = (parse_config(words.split()) for words in (RUN, RUNS[RUN]))
    # Two processes do half of an iteration each: one would take as long as both together.
    compute = 2 * (seconds - exchanges) * config.batch_size / shorter.batch_size

    def iteration(size: int, rank: str, network: str) -> float:
        (speed, floor), (bandwidth, latency) = RANKS[rank], NETWORKS[network]
        message = 2 * (size - 1) / size * num_bytes / bandwidth
        message += 2 * math.ceil(math.log2(size)) * latency
        growth = max(size // MOST_THAT_SHARE, 1)
        return growth * compute / (speed * size) + gradient_steps(config) * (floor + message)

    return [
        {
            "rank": rank, "network": network, "processes": size,
            "speedup": max(size // MOST_THAT_SHARE, 1) * iteration(1, rank, network)
            / iteration(size, rank, network),
        }
        for rank in RANKS for network in NETWORKS for size in SIZES
    ]  # fmt: skip


def draw(measured: Path, learning: list[dict[str, str]], path: Path) -> None:
    """Draw the modeled steps per second on the left, and beside it the measured learning."""
    from benchmarks import batch_invariance  # found where `-m tools.figures` runs

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(batch_invariance.TASKS))
    rows = model(measured)
    for rank in RANKS:
        for network in NETWORKS:
            line = [row for row in rows if (row["rank"], row["network"]) == (rank, network)]
            speedups = [row["speedup"] for row in line]
            style = "-" if RANKS[rank][0] == 1 else "--"
            left.plot(SIZES, speedups, style, label=f"{rank}; {network}")
    left.plot(SIZES, SIZES, color="0.8", zorder=0)
    for axis in (left.set_xscale, left.set_yscale):
        axis("log", base=2)
    left.set_xlabel(f"processes; above {MOST_THAT_SHARE} the batch grows with them")
    left.set_ylabel("times the steps per second of one")
    left.set_title("A model, not a measurement", fontsize="small", loc="left")
    left.legend(fontsize="x-small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    for panel, task in zip(others, batch_invariance.TASKS, strict=True):
        for arm in batch_invariance.ARMS:
            points = batch_invariance.by_size(learning, task, arm)
            mean, low, high = zip(*points.values(), strict=True)
            batch = [max(points) / size for size in points]
            panel.plot(batch, mean, marker=".", label=arm)
            panel.fill_between(batch, low, high, alpha=0.15, linewidth=0)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("batch, in units of the smallest")
        panel.set_ylabel("mean return over a run")
        panel.set_title(f"Measured: {task}", fontsize="small", loc="left")
        panel.legend(fontsize="xx-small", frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        measure(sys.argv[2], Path(sys.argv[3]))
    else:
        tyro.cli(main, description=__doc__)
