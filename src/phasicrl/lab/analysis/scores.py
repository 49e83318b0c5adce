"""Aggregate scores of many runs on several tasks, with intervals.

Kind: pure mathematics.

The measures of Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical
precipice" (arXiv 2108.13264), as its library rliable computes them. Intervals are of the stratified
bootstrap: runs are resampled within each task.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Measure: TypeAlias = Callable[[Array], Array]
"""Maps scores `[..., R, T]` of R runs on each of T tasks to numbers `[...]`."""
RESAMPLES, MAX_BLOCK, _TAIL = 10_000, 2_000_000, (1.0 - 0.95) / 2.0
"""Resamples of an interval, numbers computed at a time (16 MB), and the part of the resamples
below it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (format_number(x, 3) for x in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def format_number(value: float, digits: int) -> str:
    """Format a number with `digits` significant digits, or as an integer from 1,000 to 10¹²."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e12 else f"{value:.{digits}g}"


def interquartile_mean(scores: Array) -> Array:
    """Return the interquartile mean of scores `[…, R, T]`, over all runs and tasks, `[…]`."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(-1)


MEASURES: dict[str, Measure] = {
    "IQM": interquartile_mean,
    "mean": lambda scores: scores.mean((-2, -1)),
    "median": lambda scores: np.median(scores.mean(-2), axis=-1),
    "optimality gap": lambda scores: 1 - np.minimum(scores, 1).mean((-2, -1)),
}
"""Measures by name. Median: over tasks of means over runs. Optimality gap: mean distance to a score
of 1, 0 above it."""


def estimate(scores: ArrayLike, measure: Measure = interquartile_mean) -> Estimate:
    """Return a measure of scores `[R, T]` with its 95 % bootstrap interval, of a fixed seed."""
    matrix = np.asarray(scores, np.float64)
    drawn = np.concatenate([measure(block) for block in _resample(matrix, seed=0)])
    return Estimate(float(measure(matrix)), *map(float, _compute_interval(drawn)))


def probability_of_improvement(scores: ArrayLike, others: ArrayLike) -> Estimate:
    """Estimate, with an interval, the probability that a run beats one of the others, over tasks.

    Args:
        scores: `[R, T]`.
        others: `[R', T]`, with tasks in the same order.
    """
    ours, theirs = np.asarray(scores, np.float64), np.asarray(others, np.float64)
    # Larger blocks would not fit: each run is compared with each of the others.
    count = ours.size * len(theirs)
    blocks = _resample(ours, seed=0, floats_per_resample=count)
    pairs = zip(blocks, _resample(theirs, seed=1, floats_per_resample=count), strict=True)
    drawn = np.concatenate([_compute_win_rate(*pair) for pair in pairs])
    return Estimate(float(_compute_win_rate(ours, theirs)), *map(float, _compute_interval(drawn)))


def performance_profile(scores: ArrayLike, thresholds: ArrayLike) -> tuple[Array, Array, Array]:
    """Return the fraction of runs with a score above each of K thresholds, with its interval.

    Returns:
        Fraction, lower and upper bound, `[K]` each.
    """
    matrix, levels = np.asarray(scores, np.float64), np.asarray(thresholds, np.float64)

    def compute_share_above(block: Array) -> Array:
        return (block[..., None] > levels).mean((-3, -2))

    blocks = _resample(matrix, seed=0, floats_per_resample=matrix.size * len(levels))
    drawn = np.concatenate([compute_share_above(block) for block in blocks])
    return compute_share_above(matrix), *_compute_interval(drawn)


def median_steps_to_target(steps: ArrayLike) -> Estimate:
    """Return the median of given steps to a target, `[R]`, infinite for runs that missed it.

    Each edge of the interval is one resample's median; a median halfway between a number and
    infinity is infinite.
    """
    runs = np.asarray(steps, dtype=np.float64)[:, None]
    blocks = [np.median(block, axis=(-2, -1)) for block in _resample(runs, seed=0)]
    drawn = np.sort(np.concatenate(blocks))
    tail = round(_TAIL * len(drawn))
    return Estimate(float(np.median(runs)), float(drawn[tail]), float(drawn[-1 - tail]))


Score = TypeVar("Score", float, Array)


def scale_score(score: Score, bounds: tuple[float, float]) -> Score:
    """Scale a score: 0 is the first bound (chance), 1 the second (the best)."""
    low, high = bounds
    return (score - low) / (high - low)


PROCGEN_BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    "easy": {
        "coinrun": (5, 10), "starpilot": (2.5, 64), "caveflyer": (3.5, 12), "dodgeball": (1.5, 19),
        "fruitbot": (-1.5, 32.4), "chaser": (0.5, 13), "miner": (1.5, 13), "jumper": (1, 10),
        "leaper": (1.5, 10), "maze": (5, 10), "bigfish": (1, 40), "heist": (3.5, 10),
        "climber": (2, 12.6), "plunder": (4.5, 30), "ninja": (3.5, 10), "bossfight": (0.5, 13),
    },
    "hard": {
        "coinrun": (5, 10), "starpilot": (1.5, 35), "caveflyer": (2, 13.4), "dodgeball": (1.5, 19),
        "fruitbot": (-0.5, 27.2), "chaser": (0.5, 14.2), "miner": (1.5, 20), "jumper": (1, 10),
        "leaper": (1.5, 10), "maze": (4, 10), "bigfish": (0, 40), "heist": (2, 10),
        "climber": (1, 12.6), "plunder": (3, 30), "ninja": (2, 10), "bossfight": (0.5, 13),
    },
}  # fmt: skip
"""Scores of chance and the best possible, by difficulty and game (openai/train-procgen,
constants.py)."""

PROCGEN_BOUNDS["easy-paper"] = PROCGEN_BOUNDS["easy"] | {"jumper": (3, 10), "leaper": (3, 10)}
"""The paper prints other bounds of two games (Cobbe et al. 2020, arXiv 1912.01588, appendix C)."""


def _resample(scores: Array, *, seed: int, floats_per_resample: int = 0) -> Iterator[Array]:
    """Yield blocks `[B, R, T]` of runs resampled with replacement within each task.

    Args:
        scores: `[R, T]`.
        seed: seed of the resampling.
        floats_per_resample: numbers computed from a resample, by which blocks are sized; 0: as
            many as it has.
    """
    runs, tasks = scores.shape
    generator, places = np.random.default_rng(seed), np.arange(tasks)
    block = max(1, MAX_BLOCK // (floats_per_resample or scores.size))
    for start in range(0, RESAMPLES, block):
        drawn = generator.integers(runs, size=(min(block, RESAMPLES - start), runs, tasks))
        yield scores[drawn, places]


def _compute_interval(drawn: Array) -> Array:
    """Return lower and upper edges `[2, ...]` of the middle 95 % of resamples `[N, ...]`."""
    return np.quantile(drawn, (_TAIL, 1.0 - _TAIL), axis=0)


def _compute_win_rate(scores: Array, others: Array) -> Array:
    """Return Mann and Whitney's U of scores `[..., R, T]` and `[..., R', T]` per pair.

    A tie is half a win.
    """
    mine, theirs = scores[..., :, None, :], others[..., None, :, :]
    return (mine > theirs).mean((-3, -2, -1)) + (mine == theirs).mean((-3, -2, -1)) / 2
