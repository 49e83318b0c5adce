"""Statistics over seeds and episodes: bootstrap intervals of a mean. Kind: pure mathematics. Imports NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_DRAWS_AT_ONCE = 2_000_000  # 16 MB


def bootstrap_interval(values: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """Interval of the mean of `values` by the percentile bootstrap (Efron 1979): how far the mean moves if the values are drawn again.

    The same values and seed always give the same interval. One value gives an interval of no width:
    it says nothing about spread.

    Raises:
        ValueError: no values, values that are not finite numbers or not in one row, or a confidence
            outside (0, 1).
    """
    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1:
        raise ValueError(f"values have the shape {row.shape}; one row of numbers was expected (bootstrap_band takes curves)")
    low, high = bootstrap_band(row[:, None], confidence=confidence, resamples=resamples, seed=seed)
    return float(low[0]), float(high[0])


def bootstrap_band(
    curves: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Interval of the mean over rows, for each column of `curves` (runs × points): lower and upper edge.

    A resample draws whole rows, the same at every point, so that the band of a smooth curve is
    smooth.

    Raises:
        ValueError: no rows, values that are not finite numbers, or a confidence outside (0, 1).
    """
    rows = np.asarray(curves, dtype=np.float64)
    _check(rows, confidence, resamples)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(_resampled_means(rows, resamples, seed), (tail, 1.0 - tail), axis=0)
    return low, high


def _resampled_means(rows: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Mean over rows drawn with replacement, `resamples` times: resamples × points."""
    count = len(rows)
    generator = np.random.default_rng(seed)
    block = max(1, _DRAWS_AT_ONCE // count)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    # How often each row is drawn is multinomial, so that a resample is a row of counts and all of
    # them are one product.
    counts = (generator.multinomial(count, np.full(count, 1.0 / count), size=size) for size in sizes)
    return np.concatenate([drawn @ rows for drawn in counts]) / count


def _check(rows: NDArray[np.float64], confidence: float, resamples: int) -> None:
    """Refuse what no interval can be computed from."""
    if rows.ndim != 2:
        raise ValueError(f"curves have the shape {rows.shape}; runs × points was expected")
    if len(rows) == 0:
        raise ValueError("there are no values; an interval of the mean needs at least one")
    if not np.isfinite(rows).all():
        raise ValueError("some values are not finite numbers; leave them out before asking for an interval")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must lie between 0 and 1, for example 0.95")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; it must be above zero")
