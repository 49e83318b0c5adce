"""Measures of many runs: as in rliable, by hand, and by slow definitions."""

import numpy as np
import pytest

from phasicrl.lab.analysis import scores

RUNS = np.random.default_rng(3).normal(0.6, 0.4, (5, 3))


def test_measures_equal_those_of_rliable() -> None:
    """Numbers printed by rliable 1.2.0 with 10,000 resamples (4,000 of pairs)."""
    draw = np.random.default_rng(3)
    mine, others = draw.normal(0.6, 0.4, (5, 3)), draw.normal(0.5, 0.4, (4, 3))
    theirs = {
        "IQM": (0.4484738017501668, 0.2593, 0.6503),
        "mean": (0.5131167016658145, 0.2561, 0.7719),
        "median": (0.4343605809451483, 0.2560, 0.6139),
        "optimality gap": (0.5765877953483207, 0.4032, 0.7694),
    }
    for name, (value, low, high) in theirs.items():
        found = scores.estimate(mine, scores.MEASURES[name])
        assert found.value == pytest.approx(value, abs=1e-12)
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)
    found = scores.probability_of_improvement(mine, others)
    assert found.value == pytest.approx(0.35, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((0.15, 0.5667), abs=0.01)
    share, low_edge, high_edge = scores.performance_profile(mine, np.linspace(0, 1.5, 7))
    assert share[:4] == pytest.approx([13 / 15, 0.8, 0.4, 0.2])
    assert low_edge[:4] == pytest.approx([10 / 15, 0.6, 2 / 15, 1 / 15])
    assert high_edge[:4] == pytest.approx([1, 1, 10 / 15, 0.4])


def test_intervals_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores.estimate(RUNS), scores.performance_profile(RUNS, [0.5])[1]
    monkeypatch.setattr(scores, "MAX_BLOCK", 1000)
    pieces = scores.estimate(RUNS), scores.performance_profile(RUNS, [0.5])[1]
    assert whole == pieces


def test_a_profile_is_the_share_above_each_threshold() -> None:
    levels = [-1.0, 0.5, RUNS.max(), 9.0]
    share, low, high = scores.performance_profile(RUNS, levels)
    slow = [np.mean([score > level for score in RUNS.flat]) for level in levels]
    assert share.tolist() == pytest.approx(slow)
    assert share[0] == 1 and share[2] == share[3] == 0  # at the best run none is above it
    assert (low <= share).all() and (share <= high).all() and low[1] < high[1]


def test_the_median_of_steps_counts_runs_that_never_arrive_as_the_latest() -> None:
    never, found = float("inf"), scores.median_steps_to_target([100, 300])
    assert (found.value, found.low, found.high) == (200, 100, 300)
    found = scores.median_steps_to_target([100, never])
    assert (found.value, found.low, found.high) == (never, 100, never)
    found = scores.median_steps_to_target([never, never])
    assert (found.value, found.low, found.high) == (never, never, never)
