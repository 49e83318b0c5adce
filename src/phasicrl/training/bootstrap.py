"""Bootstrap intervals of a mean over seeds or episodes. Kind: pure. Imports NumPy only."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, MAX_BLOCK, _TAIL = 10_000, 2_000_000, (1.0 - 0.95) / 2.0
"""Resamples of an interval, numbers computed at a time (16 MB), and the part of the resamples
below it."""


def bootstrap_mean_interval(values: ArrayLike) -> tuple[float, float]:
    """Return lower and upper bound of the mean of values: 95 % percentile bootstrap (Efron 1979).

    The result is deterministic; a single value has an interval of width 0.

    Raises:
        ValueError: there are no values, or some are not finite.
    """
    low, high = bootstrap_band(np.asarray(values, dtype=np.float64)[:, None])
    return float(low[0]), float(high[0])


def bootstrap_band(curves: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the 95 % intervals of the mean over rows, for each column of `[runs, points]`.

    Whole rows are resampled, so that the band of a smooth curve is smooth.

    Returns:
        Lower and upper edges, `[points]`.

    Raises:
        ValueError: there are no rows, or some values are not finite.
    """
    rows = np.asarray(curves, dtype=np.float64)
    if len(rows) == 0 or not np.isfinite(rows).all():
        raise ValueError(f"values has shape {rows.shape}; expected at least one value, all finite")
    count, draw = len(rows), np.random.default_rng(0).multinomial
    block = max(1, MAX_BLOCK // count)
    sizes = [min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block)]
    # A resample is a row of multinomial counts: all resamples are one matrix product.
    share = np.full(count, 1.0 / count)
    means = np.concatenate([draw(count, share, size=size) @ rows for size in sizes]) / count
    low, high = np.quantile(means, (_TAIL, 1.0 - _TAIL), axis=0)
    return low, high
