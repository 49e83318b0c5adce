"""Draw the kernels of one iteration, and those of one micro-batch.

usage: python benchmarks/draw_trace.py KERNELS.csv.gz OUT.png [--trace trace.json]

`phasicrl bench procgen-ppo --trace trace.json` records an iteration. `--trace` first extracts its
kernels to KERNELS, which is small enough to be committed.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from phasicrl.system.provenance import commit

KINDS = {
    "convolutions, forward": ("aten::mkldnn_convolution",),
    "convolutions, backward": ("aten::convolution_backward",),
    "max-pools": ("aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward"),
    "ReLUs": ("aten::clamp_min", "aten::threshold_backward"),
    "dense layers": ("aten::addmm", "aten::mm"),
    "Adam": ("aten::_fused_adam_",),
    "copies": ("aten::copy_", "aten::index_select", "aten::index"),
}
"""Kernels by kind; none of them calls another one, so that their times add up."""
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
"""First operation of a micro-batch's backward pass."""
COLORS = ("blue", "cyan", "orange", "green", "red", "purple", "brown")
COLUMNS = ("kind", "start", "duration", "commit")
"""Columns of the kernels; microseconds from the start of the first one."""
BINS = 300
ENVIRONMENTS = "environments, Python, everything else"


def write_kernels(trace: Path, output: Path) -> None:
    """Extract the kernels of a recorded iteration."""
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") == "cpu_op"
    ]
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    kinds = {name: kind for kind, names in KINDS.items() for name in names}
    kinds[BACKWARD] = "backward"
    rows = [("iteration", 0, round(end - begin), commit() or "unknown")]
    rows += [
        (kinds[event["name"]], round(event["ts"] - begin), round(event["dur"]), rows[0][3])
        for event in sorted(events, key=lambda event: event["ts"])
        if event["name"] in kinds
    ]
    with gzip.open(output, "wt", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def read_kernels(path: Path) -> dict[str, np.ndarray]:
    """Read starts and durations in seconds, `[N, 2]`, by kind."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            span = float(row["start"]) / 1e6, float(row["duration"]) / 1e6
            found.setdefault(row["kind"], []).append(span)
    return {kind: np.array(spans).reshape(-1, 2) for kind, spans in found.items()}


def draw(kernels: Path, output: Path) -> None:
    """Draw the whole iteration, and one micro-batch."""
    spans = read_kernels(kernels)
    length, begun = float(spans.pop("iteration")[0, 1]), spans.pop("backward")[:, 0]
    figure = Figure(figsize=(10, 5), layout="constrained")
    whole, piece = figure.subplots(2, 1, height_ratios=[3, 2])
    colors = {kind: f"tab:{color}" for kind, color in zip(KINDS, COLORS, strict=True)}

    edges = np.linspace(0, length, BINS + 1)
    shares = np.array(
        [
            np.histogram(rows[:, 0] + rows[:, 1] / 2, edges, weights=rows[:, 1])[0] / np.diff(edges)
            for rows in spans.values()
        ]
    )
    # A kernel longer than a bin is noted in the one where its middle lies: smoothing spreads it
    # again.
    shares = np.array([np.convolve(share, np.ones(5) / 5, mode="same") for share in shares]).clip(
        max=1
    )
    labels = [f"{kind} {rows[:, 1].sum() / length:.1%}" for kind, rows in spans.items()]
    rest = 1 - sum(rows[:, 1].sum() for rows in spans.values()) / length
    whole.stackplot(edges[:-1], shares, labels=labels, colors=[*colors.values()], step="post")
    whole.fill_between([], [], [], color="0.9", label=f"{ENVIRONMENTS} {rest:.1%}")
    whole.set(
        xlim=(0, length), ylim=(0, 1), xlabel="seconds", ylabel="share of the time", facecolor="0.9"
    )
    whole.set_title(
        "One iteration: the rollout, then the gradient steps", loc="left", fontsize="medium"
    )
    whole.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)

    # One piece: from one first layer's forward to the next one's, in the middle of the gradient
    # steps.
    gaps = np.flatnonzero(np.diff(begun) > np.diff(begun).max() / 2)
    start, stop = begun[gaps[len(gaps) // 2]], begun[gaps[len(gaps) // 2 + 1]]
    for kind, rows in spans.items():
        inside = rows[(rows[:, 0] >= start) & (rows[:, 0] < stop)]
        piece.broken_barh(
            [(1e3 * (at - start), 1e3 * duration) for at, duration in inside],
            (0, 1),
            color=colors[kind],
        )
    piece.set(xlim=(0, 1e3 * (stop - start)), yticks=[], xlabel="milliseconds", facecolor="0.9")
    piece.set_title(
        "One piece of a minibatch: backward of one, then forward of the next",
        loc="left",
        fontsize="medium",
    )
    figure.savefig(output, dpi=130)


def main(kernels: Path, output: Path, /, trace: Path | None = None) -> None:
    """Extract the kernels of a trace, if there is one, and draw them."""
    if trace:
        write_kernels(trace, kernels)
    draw(kernels, output)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
