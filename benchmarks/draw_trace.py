"""Draws a trace of `phasicrl bench procgen-ppo --trace trace.json`.

Where the time of an iteration and of one piece of a minibatch goes.

usage: python benchmarks/draw_trace.py trace.json OUT.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

KINDS = {
    "convolutions, forward": ("aten::mkldnn_convolution",),
    "convolutions, backward": ("aten::convolution_backward",),
    "max-pools": ("aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward"),
    "ReLUs": ("aten::clamp_min", "aten::threshold_backward"),
    "dense layers": ("aten::addmm", "aten::mm"),
    "Adam": ("aten::_fused_adam_",),
    "copies": ("aten::copy_", "aten::index_select", "aten::index"),
}
"""Kernels by kind; none of them calls another of these, so that their times add up."""
BINS = 300
ENVIRONMENTS = "environments, Python, everything else"


def main() -> None:
    """Read, sort into kinds, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    events = [
        event
        for event in json.loads(options.trace.read_text())["traceEvents"]
        if event.get("cat") == "cpu_op"
    ]
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    spans = {
        kind: np.array(
            [(event["ts"] - begin, event["dur"]) for event in events if event["name"] in names]
        ).reshape(-1, 2)
        / 1e6
        for kind, names in KINDS.items()
    }
    length = (end - begin) / 1e6
    figure = Figure(figsize=(10, 5), layout="constrained")
    whole, piece = figure.subplots(2, 1, height_ratios=[3, 2])
    colors = dict(
        zip(
            KINDS,
            (
                "tab:blue",
                "tab:cyan",
                "tab:orange",
                "tab:green",
                "tab:red",
                "tab:purple",
                "tab:brown",
            ),
            strict=True,
        )
    )

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
    steps = np.array(
        sorted(
            event["ts"]
            for event in events
            if event["name"] == "autograd::engine::evaluate_function: AddmmBackward0"
        )
    )
    gaps = np.flatnonzero(np.diff(steps) > np.diff(steps).max() / 2)
    middle = gaps[len(gaps) // 2]
    start, stop = (steps[middle] - begin) / 1e6, (steps[gaps[len(gaps) // 2 + 1]] - begin) / 1e6
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
    figure.savefig(options.output, dpi=130)


if __name__ == "__main__":
    main()
