"""What rliable says of scores; runs in rliable's Python, without phasicrl.

usage: python ask_rliable.py      {"mine": matrix, "theirs": matrix, "thresholds": list} on stdin
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np

RESAMPLES = 5000
FEWER = 1000
"""Of pairs and profiles, which take it longer."""


def main() -> None:
    """Print value, low and high of each measure, and of the profile."""
    library: Any = importlib.import_module("rliable.library")
    metrics: Any = importlib.import_module("rliable.metrics")
    measures = {
        "IQM": metrics.aggregate_iqm,
        "mean": metrics.aggregate_mean,
        "median": metrics.aggregate_median,
        "optimality gap": metrics.aggregate_optimality_gap,
    }
    given = json.load(sys.stdin)
    mine, theirs = np.array(given["mine"]), np.array(given["theirs"])
    draw = np.random.RandomState(0)
    points, intervals = library.get_interval_estimates(
        {"mine": mine},
        lambda scores: np.array([measure(scores) for measure in measures.values()]),
        reps=RESAMPLES,
        random_state=draw,
    )
    found = {
        name: [float(points["mine"][index]), *map(float, intervals["mine"][:, index])]
        for index, name in enumerate(measures)
    }
    points, intervals = library.get_interval_estimates(
        {"pair": (mine, theirs)}, metrics.probability_of_improvement, reps=FEWER, random_state=draw
    )
    found["improvement"] = [float(points["pair"]), *map(float, intervals["pair"].ravel())]
    shares, edges = library.create_performance_profile(
        {"mine": mine}, np.array(given["thresholds"]), reps=FEWER
    )
    found["profile"] = [shares["mine"].tolist(), *edges["mine"].tolist()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
