"""How much faster several processes train than one, on the same cores of this machine.

usage: python benchmarks/scaling.py OUT.csv [--presets procgen-ppo …] [--rounds 5] [--processes 2]

One process with a thread on each core, and a process on each core with one thread: the same run,
the same environments in all. The two are measured in turns, whole iterations, and each round gives
a row with the median of its iterations. `exchanges` is what one process spends with the others,
waiting for them included; `message` is an exchange of that size alone, when both are there.
"""

from __future__ import annotations

import argparse
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
from versus import PEERS

from phasicrl import train
from phasicrl.cli import parse_config
from phasicrl.distributed import World
from phasicrl.host.machine import num_cores, processor
from phasicrl.host.provenance import commit
from phasicrl.session.run import Run

RUNS = {
    "procgen-ppo": "procgen-ppo --ppo.num-steps 32",
    "procgen-ppg": "procgen-ppg --ppo.num-steps 32 --aux.every 2 --aux.epochs 2",
    "cartpole-ppo": "cartpole-ppo --env.num-envs 64",
    "halfcheetah-ppo": "halfcheetah-ppo",
}
"""What is trained: a preset, with rollouts that leave time for several iterations."""
ITERATIONS = {"procgen-ppo": 4, "procgen-ppg": 4, "cartpole-ppo": 40, "halfcheetah-ppo": 4}
WARM_UP = 1
"""Iterations that are not counted; of PPG a phase."""
COLUMNS = (
    "run", "processes", "threads", "round", "seconds", "exchanges", "message", "bytes",
    "steps_per_second", "processor", "commit",
)  # fmt: skip
Row = dict[str, Any]


def measure(name: str) -> Row:
    """Train a few iterations, as one process of however many; returns medians over them."""
    warm_up = 2 * WARM_UP if name == "procgen-ppg" else WARM_UP
    threads = "1" if "RANK" in os.environ else str(num_cores())
    words = f"{RUNS[name]} --total-env-steps 100_000_000 --compute.num-threads {threads}"
    words += " --log.console off --log.no-tensorboard"
    seconds, exchanges, spent, counted = [], [], [0.0], [0]
    plain = World._exchange

    def timed(self: World, exchange: Any) -> None:
        start = time.perf_counter()
        plain(self, exchange)
        spent[0] += time.perf_counter() - start

    def note(run: Run, record: dict[str, float]) -> str | None:
        counted[0] += 1
        if counted[0] > warm_up:
            seconds.append(record["time/total"])
            exchanges.append(spent[0])
        spent[0] = 0.0
        return "stop" if counted[0] == warm_up + ITERATIONS[name] else None

    found: Row = {}

    def alone(run: Run, record: dict[str, float]) -> Any:
        answer = note(run, record)
        if answer == "stop":
            gradients = [torch.zeros_like(p) for p in run.agent.parameters()]
            found["bytes"] = sum(each.nbytes for each in gradients)
            found["message"] = _message(run, gradients)
            found["batch"] = run.config.batch_size
        return answer

    with tempfile.TemporaryDirectory() as folder:
        where = os.environ.get("SCALING_FOLDER", folder)  # one that all processes share
        config = parse_config([*words.split(), "--output-dir", where])
        config = config.with_updates({"checkpoint.every_minutes": None})
        with mock.patch.object(World, "_exchange", timed):
            run = train(config, on_iteration=alone)
    # PPG: an auxiliary phase belongs to every second iteration.
    middle = statistics.fmean if name == "procgen-ppg" else statistics.median
    return found | {
        "first": run.world.is_first,
        "threads": threads,
        "seconds": middle(seconds),
        "exchanges": middle(exchanges),
        "steps_per_second": found["batch"] / middle(seconds),
    }


def _message(run: Run, gradients: list[torch.Tensor]) -> float:
    """Seconds of one exchange of the gradients, while nobody is waited for."""
    if run.world.size == 1:
        return 0.0
    times = []
    for _ in range(20):
        run.world.any(False)  # all are here
        start = time.perf_counter()
        run.world.mean_(gradients)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measured(name: str, processes: int) -> Row:
    """Start so many processes, and return what the first of them has measured."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [*command, __file__, "--as", name, folder + "/found.json"],
            env=os.environ | {"SCALING_FOLDER": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        assert told.returncode == 0, told.stderr[-3000:]
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    """Measure in turns; append a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--presets", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    is_new = not options.output.exists()
    with options.output.open("a", newline="") as file:
        table: Any = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        if is_new:
            table.writeheader()
        for number in range(options.rounds):
            for name in options.presets:
                pair = {}
                for processes in (1, options.processes)[:: 1 if number % 2 else -1]:
                    found = pair[processes] = measured(name, processes)
                    where = {"run": name, "processes": processes, "round": number + 1}
                    about = {"processor": processor(), "commit": commit(PEERS) or "unknown"}
                    table.writerow(
                        found | where | about
                        | {key: f"{found[key]:.6g}" for key in
                           ("seconds", "exchanges", "message", "steps_per_second")}
                    )  # fmt: skip
                    file.flush()
                one, several = pair[1], pair[options.processes]
                print(
                    f"{name}: 1 process {one['seconds']:.3f} s, {options.processes} processes "
                    f"{several['seconds']:.3f} s an iteration, of which {several['exchanges']:.3f} "
                    f"in exchanges; {one['seconds'] / several['seconds']:.3f} times as fast",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        answer = measure(sys.argv[2])
        if answer.pop("first"):
            Path(sys.argv[3]).write_text(json.dumps(answer))
    else:
        main()
