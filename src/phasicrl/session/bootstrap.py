"""Statistics over seeds and episodes: bootstrap intervals of a mean.

Kind: pure mathematics. Imports NumPy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
DRAWS_AT_ONCE = 2_000_000  # 16 MB
CONFIDENCE = 0.95


def bootstrap_interval(values: ArrayLike) -> tuple[float, float]:
    """95 % interval of the mean of `values` by the percentile bootstrap (Efron 1979).

    It says how far the mean moves if the values are drawn again. The same values always give the
    same interval. One value gives an interval of no width: it says nothing about spread.

    Raises:
        ValueError: no values, or values that are not finite numbers or not in one row.
    """
    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1:
        wanted = "one row of numbers was expected (bootstrap_band takes curves)"
        raise ValueError(f"values have the shape {row.shape}; {wanted}")
    low, high = bootstrap_band(row[:, None])
    return float(low[0]), float(high[0])


def bootstrap_band(curves: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """95 % interval of the mean over rows, for each column of `curves` (runs × points).

    A resample draws whole rows, the same at every point, so that the band of a smooth curve is
    smooth.

    Returns:
        Lower and upper edge.

    Raises:
        ValueError: no rows, or values that are not finite numbers.
    """
    rows = np.asarray(curves, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"curves have the shape {rows.shape}; runs × points was expected")
    if len(rows) == 0:
        raise ValueError("there are no values; an interval of the mean needs at least one")
    if not np.isfinite(rows).all():
        raise ValueError(
            "some values are not finite numbers; leave them out before asking for an interval"
        )
    return middle_of(_resampled_means(rows))


def middle_of(drawn: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What holds 95 % of what was drawn, `[resamples, ...]`: lower and upper edges `[...]`."""
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(drawn, (tail, 1.0 - tail), axis=0)
    return low, high


def _resampled_means(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over rows drawn with replacement, again and again: resamples × points."""
    count, generator = len(rows), np.random.default_rng(0)
    block = max(1, DRAWS_AT_ONCE // count)
    sizes = [min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block)]
    # How often each row is drawn is multinomial, so that a resample is a row of counts and all of
    # them are one product.
    share = np.full(count, 1.0 / count)
    counts = (generator.multinomial(count, share, size=size) for size in sizes)
    return np.concatenate([drawn @ rows for drawn in counts]) / count
