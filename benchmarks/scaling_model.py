"""A model, not a measurement: how fast many processes would train, and what batches that costs.

usage: python benchmarks/scaling_model.py SCALING.csv INVARIANCE.csv.gz FIGURE.png

What is measured here (`scaling.py`): seconds of an iteration of one process with one thread, bytes
of its gradients, seconds of a message of that size between two processes of this machine. What is
assumed stands in `NETWORKS` and `RANKS`: links, and how much faster than a core here a rank
computes. An iteration then takes

    compute / (speed · k) + steps · (floor + message)
    message = 2 (k − 1) / k · bytes / bandwidth + 2 ⌈log₂ k⌉ · latency

with `steps` gradient steps, k processes that share a batch, and `floor` seconds that a gradient
step takes however small its minibatch is. With more processes than the batch has environments for,
the batch grows; what that costs in learning is measured (`batch_invariance.py`) and drawn beside.
"""

from __future__ import annotations

import argparse
import csv
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import batch_invariance
import scaling
from matplotlib.figure import Figure

from phasicrl.cli import parse_config
from phasicrl.config import Config
from phasicrl.lab.experiments.trials import ResultTable


@dataclass(frozen=True)
class Link:
    """What joins processes: bytes per second, and seconds until the first of them arrives."""

    bandwidth: float
    latency: float


NETWORKS = {
    "inside a machine of 8 GPUs": Link(200e9, 10e-6),
    "25 Gbit Ethernet": Link(25e9 / 8, 30e-6),
    "1 Gbit Ethernet": Link(1e9 / 8, 100e-6),
}
"""Assumed: round numbers of what such links have."""
SPEEDS = {"a core here": 1.0, "a hundred cores here, such as a GPU": 100.0}
"""Assumed: how fast a rank computes, counted in cores of the machine that was measured."""
FLOORS = {"a core here": 0.0, "a hundred cores here, such as a GPU": 2e-3}
"""Assumed: seconds of a gradient step on nothing; launching some hundred kernels."""


def gradient_steps(config: Config) -> float:
    """Gradient steps in an iteration, on average: of policy phases and of auxiliary ones."""
    ppo, aux = config.ppo, config.aux
    steps = float(len(ppo.epoch_schedule) * ppo.num_minibatches)
    if aux is not None:
        rollouts = aux.iterations_per_epoch or aux.every
        steps += aux.epochs * aux.num_minibatches * rollouts / (aux.every * aux.run_every)
    return steps


def message_seconds(size: int, num_bytes: int, link: Link) -> float:
    """Seconds of the mean of so many bytes over `size` processes, by a ring with a tree's latency.

    The bytes of a ring all-reduce: each process sends and takes `2 (k − 1) / k` times the message
    (Patarasuk and Yuan 2009).
    """
    if size == 1:
        return 0.0
    around = 2 * (size - 1) / size * num_bytes / link.bandwidth
    return around + 2 * math.ceil(math.log2(size)) * link.latency


def iteration_seconds(
    size: int, *, compute: float, steps: float, num_bytes: int, speed: float, floor: float,
    link: Link,
) -> float:  # fmt: skip
    """Seconds of an iteration with `size` processes that share a batch.

    Args:
        size: how many.
        compute: seconds of one process of speed 1 that does all of it.
        steps: gradient steps in it.
        num_bytes: of the gradients.
        speed: of a process.
        floor: seconds of a gradient step without any samples.
        link: what joins them.
    """
    per_step = floor + message_seconds(size, num_bytes, link)
    return compute / (speed * size) + steps * per_step


def measured(path: Path, run: str) -> dict[str, float]:
    """Medians of what two processes took, and `compute`, what one of them would.

    Two processes with a thread each do half of an iteration each: one would take as long as both
    together, without their exchanges.
    """
    with path.open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["run"] == run and row["processes"] == "2"
        ]
    names = ("seconds", "exchanges", "message", "bytes")
    found = {name: median(float(row[name]) for row in rows) for name in names}
    return found | {"compute": 2 * (found["seconds"] - found["exchanges"])}


def share_of_messages(path: Path, run: str) -> str:
    """What of an iteration of two processes is spent in the exchange of gradients, in words."""
    found, steps = measured(path, run), gradient_steps(parse_config(scaling.RUNS[run].split()))
    share = steps * found["message"] / found["seconds"]
    return (
        f"{run}: {steps:.0f} messages of {found['bytes'] / 1e6:.2f} MB, "
        f"{found['message'] * 1e3:.2f} ms each: {share:.1%} of an iteration of "
        f"{found['seconds']:.3f} s; with waiting {found['exchanges'] / found['seconds']:.1%}"
    )


RUN = "procgen-ppo"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_THAT_SHARE = 8
"""Processes among which one batch is divided; with more, there are more environments."""


def table(path: Path) -> list[dict[str, Any]]:
    """A row for each number of processes and each kind of rank and link.

    Of the preset as it is: it was measured with shorter rollouts, which take as long a step.
    """
    found, config = measured(path, RUN), parse_config([RUN])
    shorter = parse_config(scaling.RUNS[RUN].split())
    found["compute"] *= config.batch_size / shorter.batch_size
    steps = gradient_steps(config)
    rows = []
    for rank, speed in SPEEDS.items():
        for network, link in NETWORKS.items():
            one = iteration_seconds(1, compute=found["compute"], steps=steps, speed=speed,
                                    num_bytes=int(found["bytes"]), floor=FLOORS[rank],
                                    link=link)  # fmt: skip
            for size in SIZES:
                growth = max(size // MOST_THAT_SHARE, 1)
                seconds = iteration_seconds(
                    size, compute=growth * found["compute"], steps=steps, speed=speed,
                    num_bytes=int(found["bytes"]), floor=FLOORS[rank], link=link,
                )  # fmt: skip
                rows.append({"rank": rank, "network": network, "processes": size, "batch": growth,
                             "speedup": growth * one / seconds})  # fmt: skip
    return rows


def draw(rows: list[dict[str, Any]], learning: list[dict[str, str]], path: Path) -> None:
    """Left: steps per second against processes, by the model. Others: learning, as measured."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(batch_invariance.TASKS))
    for rank in SPEEDS:
        for network in NETWORKS:
            line = [row for row in rows if (row["rank"], row["network"]) == (rank, network)]
            left.plot(
                [row["processes"] for row in line],
                [row["speedup"] for row in line],
                "-" if SPEEDS[rank] == 1 else "--",
                label=f"{rank}; {network}",
            )
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
            if points:
                mean, low, high = zip(*points.values(), strict=True)
                batch = [max(points) / size for size in points]
                panel.plot(batch, mean, marker=".", label=arm)
                panel.fill_between(batch, low, high, alpha=0.15, linewidth=0)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("batch, in units of the smallest")
        panel.set_ylabel("mean return over a run")
        panel.set_title(f"Measured: {task}", fontsize="small", loc="left")
        if panel.lines:
            panel.legend(fontsize="xx-small", frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table and draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scaling", type=Path)
    parser.add_argument("learning", type=Path)
    parser.add_argument("figure", type=Path)
    options = parser.parse_args()
    for run in scaling.RUNS:
        print(share_of_messages(options.scaling, run))
    rows = table(options.scaling)
    print("| a rank is | link | " + " | ".join(map(str, SIZES)) + " |")
    print("|---|---|" + "---|" * len(SIZES))
    for rank in SPEEDS:
        for network in NETWORKS:
            line = [row for row in rows if (row["rank"], row["network"]) == (rank, network)]
            shares = (f"{row['speedup'] / row['processes']:.0%}" for row in line)
            print(f"| {rank} | {network} | " + " | ".join(shares) + " |")
    label = ("task", "arm", "divided_by")
    learning = ResultTable(options.learning, batch_invariance.COLUMNS, label=label).rows()
    draw(rows, learning, options.figure)


if __name__ == "__main__":
    main()
