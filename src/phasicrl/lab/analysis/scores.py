"""Scores of many runs on several tasks in one number, with what is known of it.

Kind: pure mathematics.

The measures of Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical
precipice" (arXiv 2108.13264), as its library rliable computes them. Intervals are of the stratified
bootstrap: runs are drawn anew within each task, tasks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasicrl.session.bootstrap import CONFIDENCE, DRAWS_AT_ONCE, RESAMPLES, middle_of

Array: TypeAlias = NDArray[np.float64]
Measure: TypeAlias = Callable[[Array], Array]
"""Of scores `[..., R, T]`, of R runs on each of T tasks, to numbers `[...]`."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the 95 % interval of it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (number_text(x, 3) for x in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def number_text(value: float, digits: int) -> str:
    """A number of so many digits; large ones whole: -1,229, not -1.23e+03."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.{digits}g}"


def interquartile_mean(scores: Array) -> Array:
    """The mean of the middle half of all runs, of whatever task."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(-1)


def mean_score(scores: Array) -> Array:
    """The mean over tasks of means over runs."""
    return scores.mean((-2, -1))


def median_score(scores: Array) -> Array:
    """The median over tasks of means over runs."""
    return np.median(scores.mean(-2), axis=-1)


def optimality_gap(scores: Array, *, target: float = 1.0) -> Array:
    """How much runs lack to a score that is wanted, on average; more than that counts as that."""
    return target - np.minimum(scores, target).mean((-2, -1))


MEASURES: dict[str, Measure] = {
    "IQM": interquartile_mean,
    "mean": mean_score,
    "median": median_score,
    "optimality gap": optimality_gap,
}


def estimate(scores: ArrayLike, measure: Measure = interquartile_mean) -> Estimate:
    """A measure of scores `[R, T]`, and its interval. The same scores give the same interval."""
    matrix = _checked(scores)
    drawn = np.concatenate([measure(block) for block in _resampled(matrix, seed=0)])
    return Estimate(float(measure(matrix)), *_interval(drawn))


def probability_of_improvement(scores: ArrayLike, others: ArrayLike) -> Estimate:
    """That a run is better than one of the others on the same task; the mean over tasks.

    Args:
        scores: `[R, T]`.
        others: `[R', T]`, of the same tasks in the same order.

    Raises:
        ValueError: the numbers of tasks differ.
    """
    ours, theirs = _checked(scores), _checked(others)
    if ours.shape[1] != theirs.shape[1]:
        raise ValueError(f"{ours.shape[1]} tasks are compared with {theirs.shape[1]}")
    # Larger blocks would not fit: each run is compared with each of the others.
    pairs = zip(
        _resampled(ours, seed=0, share=len(theirs)),
        _resampled(theirs, seed=1, share=len(theirs), like=ours),
        strict=True,
    )
    drawn = np.concatenate([_share_of_wins(mine, other) for mine, other in pairs])
    return Estimate(float(_share_of_wins(ours, theirs)), *_interval(drawn))


def performance_profile(scores: ArrayLike, thresholds: ArrayLike) -> tuple[Array, Array, Array]:
    """The share of runs whose score is above each threshold, and the band of it.

    Returns:
        Share, lower and upper edge, `[K]` each.
    """
    matrix, levels = _checked(scores), np.asarray(thresholds, dtype=np.float64)

    def above(block: Array) -> Array:
        return (block[..., None] > levels).mean((-3, -2))

    drawn = np.concatenate(
        [above(block) for block in _resampled(matrix, seed=0, share=len(levels))]
    )
    low, high = middle_of(drawn)
    return above(matrix), low, high


def steps_to_reach(steps: ArrayLike, values: ArrayLike, target: float) -> float:
    """The first of the steps at which a curve is at least at a target; infinity if it never is."""
    at = np.flatnonzero(np.asarray(values, dtype=np.float64) >= target)
    return float(np.asarray(steps, dtype=np.float64)[at[0]]) if len(at) else np.inf


def median_steps(steps: ArrayLike) -> Estimate:
    """The median over runs `[R]` of the steps that they need; infinity for one that never arrives.

    Between a number and infinity there is none: the interval's edges are medians that were drawn,
    and of two in the middle, one of which is infinity, the median is that.
    """
    runs = np.asarray(steps, dtype=np.float64)[:, None]
    blocks = [np.median(block, axis=(-2, -1)) for block in _resampled(runs, seed=0)]
    drawn = np.sort(np.concatenate(blocks))
    tail = round((1.0 - CONFIDENCE) / 2.0 * len(drawn))
    return Estimate(float(np.median(runs)), float(drawn[tail]), float(drawn[-1 - tail]))


Score = TypeVar("Score", float, Array)


def normalized(score: Score, bounds: tuple[float, float]) -> Score:
    """A score in units of the task: 0 is the first bound (chance), 1 the second (the best)."""
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
"""By difficulty and game: chance and the best possible (openai/train-procgen, constants.py)."""

PROCGEN_BOUNDS["easy-paper"] = PROCGEN_BOUNDS["easy"] | {"jumper": (3, 10), "leaper": (3, 10)}
"""Those that the paper prints (Cobbe et al. 2020, arXiv 1912.01588, appendix C) differ in two."""


def _checked(scores: ArrayLike) -> Array:
    """Scores `[R, T]`, or an error that says what they are."""
    matrix = np.asarray(scores, dtype=np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"scores have the shape {matrix.shape}; runs × tasks was expected")
    if not np.isfinite(matrix).all():
        raise ValueError("some scores are not finite numbers; leave them out")
    return matrix


def _resampled(
    scores: Array, *, seed: int, share: int = 1, like: Array | None = None
) -> Iterator[Array]:
    """Blocks `[B, R, T]`, in each task of which runs were drawn with replacement.

    Args:
        scores: `[R, T]`.
        seed: of the draws.
        share: how much larger than a resample what is made from it is.
        like: scores whose blocks have the lengths that these shall have.
    """
    runs, tasks = scores.shape
    generator, places = np.random.default_rng(seed), np.arange(tasks)
    size = (scores if like is None else like).size
    block = max(1, DRAWS_AT_ONCE // (size * share))
    for start in range(0, RESAMPLES, block):
        drawn = generator.integers(runs, size=(min(block, RESAMPLES - start), runs, tasks))
        yield scores[drawn, places]


def _share_of_wins(scores: Array, others: Array) -> Array:
    """Of scores `[..., R, T]` and others `[..., R', T]`: Mann and Whitney's U, in units of pairs.

    A tie is half a win.
    """
    mine, theirs = scores[..., :, None, :], others[..., None, :, :]
    return (mine > theirs).mean((-3, -2, -1)) + (mine == theirs).mean((-3, -2, -1)) / 2


def _interval(drawn: Array) -> tuple[float, float]:
    """The 95 % interval of numbers `[B]` that were drawn."""
    low, high = middle_of(drawn)
    return float(low), float(high)
