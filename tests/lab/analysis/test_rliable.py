"""Measures of many runs beside rliable itself, where it is installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasicrl.lab.analysis.scores import (
    MEASURES,
    estimate,
    performance_profile,
    probability_of_improvement,
)

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".peers" / "rliable" / "bin" / "python"
ASK = Path(__file__).with_name("ask_rliable.py")
THRESHOLDS = [-0.1, 0.25, 0.5, 0.75, 1.0]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="rliable is not there; make .peers/rliable/.ready gets it"
    ),
]


@pytest.mark.parametrize(
    ("runs", "tasks", "other_runs"),
    [(8, 1, 6), (5, 3, 4), (3, 16, 10)],
    ids=["one task", "few", "as Procgen"],
)
def test_rliable_says_the_same(runs: int, tasks: int, other_runs: int) -> None:
    draw = np.random.default_rng(100 * runs + tasks)
    level = draw.uniform(0.0, 1.0, tasks)
    # To one digit, so that some are equal: the probability counts those by half.
    mine = draw.normal(level + 0.1, 0.3, (runs, tasks)).round(1)
    theirs = draw.normal(level, 0.3, (other_runs, tasks)).round(1)
    given = {"mine": mine.tolist(), "theirs": theirs.tolist(), "thresholds": THRESHOLDS}
    told = subprocess.run(
        [str(PYTHON), str(ASK)], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(told.stdout)

    ours = {name: estimate(mine, MEASURES[name]) for name in MEASURES}
    assert ours.keys() < answer.keys()
    ours["improvement"] = probability_of_improvement(mine, theirs)
    for name, found in ours.items():
        value, low, high = answer[name]
        assert found.value == pytest.approx(value, abs=1e-9), name
        # Two streams of draws: edges differ by some hundredths of the interval.
        near = 0.1 * (high - low) + 0.01
        assert [found.low, found.high] == pytest.approx([low, high], abs=near), name

    share, low_edge, high_edge = performance_profile(mine, THRESHOLDS)
    shares, lows, highs = answer["profile"]
    assert share == pytest.approx(shares, abs=1e-9)
    assert low_edge == pytest.approx(lows, abs=1.01 / mine.size)  # one run more or less
    assert high_edge == pytest.approx(highs, abs=1.01 / mine.size)
