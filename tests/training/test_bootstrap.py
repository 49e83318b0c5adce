"""Bootstrap intervals against numbers worked out by hand and against theory."""

import numpy as np
import pytest

from phasicrl.training.bootstrap import bootstrap_band, bootstrap_mean_interval


def test_two_values_give_the_quantiles_of_three_possible_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The mean of two draws from {0, 1} is 0, ½ or 1 with probabilities ¼, ½, ¼.
    assert bootstrap_mean_interval([0.0, 1.0]) == (0.0, 1.0)
    monkeypatch.setattr("phasicrl.training.bootstrap._TAIL", 0.35)
    assert bootstrap_mean_interval([0.0, 1.0]) == (0.5, 0.5)


def test_equal_values_and_a_single_value_have_no_width() -> None:
    assert bootstrap_mean_interval([3.0]) == (3.0, 3.0)
    assert bootstrap_mean_interval([0.1] * 7) == pytest.approx((0.1, 0.1), abs=1e-15)


def test_many_values_agree_with_the_normal_approximation() -> None:
    values = np.random.default_rng(3).normal(loc=5.0, scale=2.0, size=2_000)
    low, high = bootstrap_mean_interval(values)
    half_width = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half_width, abs=0.01)
    assert high == pytest.approx(values.mean() + half_width, abs=0.01)


def test_the_interval_moves_and_scales_with_the_values() -> None:
    values = np.array([1.0, 4.0, 2.0, 8.0])
    low, high = bootstrap_mean_interval(values)
    assert bootstrap_mean_interval(values * 3 + 10) == pytest.approx((low * 3 + 10, high * 3 + 10))


def test_a_band_is_the_interval_of_each_column() -> None:
    curves = np.random.default_rng(1).normal(size=(5, 300))
    low, high = bootstrap_band(curves)
    assert low.shape == high.shape == (300,)
    for column in (0, 299):
        expected = pytest.approx(bootstrap_mean_interval(curves[:, column]), abs=1e-12)
        assert (low[column], high[column]) == expected


def test_a_band_over_no_points_is_empty() -> None:
    low, high = bootstrap_band(np.empty((3, 0)))
    assert low.shape == high.shape == (0,)


def test_results_do_not_depend_on_how_resamples_are_cut_into_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(0).normal(size=20)
    whole = bootstrap_mean_interval(values)
    monkeypatch.setattr("phasicrl.training.bootstrap.MAX_BLOCK", 999)
    assert bootstrap_mean_interval(values) == whole


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [1.0, float("inf")]])
def test_refuses_what_has_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_mean_interval(values)
