"""Running statistics against a direct computation over everything that was ever seen."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from phasicrl import normalize
from phasicrl.normalize import EmaMoments, ObservationNormalizer, RewardNormalizer, RunningMoments

SIZES, SEEDS = st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 2**32 - 1)


def updated(moments: Any, *batches: Any) -> Any:
    for batch in batches:
        moments.update(torch.as_tensor(batch))
    return moments


def mixture_moments(batches: list[np.ndarray], decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of all samples, with weights decay^age / size of their batch."""
    ages = zip(range(len(batches))[::-1], batches, strict=True)
    weights = np.concatenate([np.full(len(x), decay**age / len(x)) for age, x in ages])
    whole = np.concatenate(batches)
    mean = np.average(whole, axis=0, weights=weights)
    return mean, np.average((whole - mean) ** 2, axis=0, weights=weights)


def assert_moments(moments: Any, mean: Any, variance: Any, rtol: float = 1e-10) -> None:
    np.testing.assert_allclose(moments.mean.numpy(), mean, rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(moments.variance.numpy(), variance, rtol=rtol, atol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SIZES, SEEDS, st.sampled_from([0.0, 0.3, 0.9, 0.999]), st.sampled_from([(), (2,)]))
def test_moments_are_those_of_all_samples(
    sizes: list[int], seed: int, decay: float, shape: Any
) -> None:
    random, batches = np.random.default_rng(seed), []
    for size in sizes:
        loc, scale = 5 * random.normal(size=shape), random.uniform(0.1, 2)
        batches.append(random.normal(loc=loc, scale=scale, size=(size, *shape)))
    whole, moments = np.concatenate(batches), updated(RunningMoments(shape), *batches)
    assert moments.count.item() == len(whole)
    assert_moments(moments, whole.mean(0), whole.var(0))
    ema = updated(EmaMoments(decay, shape), *batches)
    assert_moments(ema, *mixture_moments(batches, decay))


@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_a_huge_offset_does_not_drown_the_variance(offset: float) -> None:
    # E[x²] − E[x]² would lose every digit: x² has 1e12 or 1e18 times the size of the variance.
    batches = list(np.random.default_rng(0).normal(loc=offset, size=(30, 100)))
    whole = np.concatenate(batches)
    assert_moments(updated(RunningMoments(), *batches), whole.mean(), whole.var(), rtol=1e-7)
    assert_moments(updated(EmaMoments(0.9), *batches), *mixture_moments(batches, 0.9), rtol=1e-6)


def test_moments_are_in_float64_whatever_the_data() -> None:
    # In float32 the mean of these would be off by parts in a thousand of their deviation.
    batches = 1000 + np.random.default_rng(0).normal(size=(50, 5, 4)).astype(np.float32)
    whole = batches.astype(np.float64)
    assert_moments(updated(RunningMoments(), *batches), whole.mean(), whole.var(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_each_component_has_its_own_moments(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(3)
    offset, spread = random.normal(size=shape) * 100, random.uniform(0.1, 10, size=shape)
    data = offset + spread * random.normal(size=(24, *shape))
    # Any number of leading axes, none too, is so many samples.
    parts = data[:6].reshape(2, 3, *shape), data[6], data[7:12], data[12:].reshape(3, 1, 4, *shape)
    moments = RunningMoments(shape)
    assert not moments.variance.any()
    updated(moments, *parts)
    assert moments.count.shape == () and moments.count.item() == 24
    assert_moments(moments, data.mean(0), data.var(0))
    with pytest.raises(AssertionError, match=r"\(4, 7\)"):
        moments.update(torch.zeros(4, 7))


def test_exponential_moments_by_hand() -> None:
    # Decay ½. The first batch is everything: mean 1, variance 1. The second counts twice as much:
    # mean (1 + 2·5)/3 = 11/3 and
    # variance (1 + 2·0)/3 within batches + ⅓·⅔·(5 − 1)² between them = 35/9.
    moments = EmaMoments(0.5)
    assert_moments(moments, 0, 0)
    assert_moments(updated(moments, [0.0, 2.0]), 1, 1)
    assert_moments(updated(moments, [[5.0, 5.0, 5.0]]), 11 / 3, 35 / 9)


# Rewards


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.999])
def test_rewards_are_divided_by_the_deviation_of_returns(gamma: float, per_step: bool) -> None:
    """Step by step as Baselines' vec_normalize.py:26-34, or by whole rollouts, in a loop."""
    random, num_envs, num_steps = np.random.default_rng(1), 4, 7
    normalizer = RewardNormalizer(num_envs, gamma=gamma, clip=10.0, per_step=per_step)
    running, history = np.zeros(num_envs), []
    for rollout in range(5):
        reward = random.normal(loc=1.0, scale=3.0, size=(num_envs, num_steps)).astype(np.float32)
        first, scales = random.random((num_envs, num_steps)) < 0.25, []
        first[:, 0] |= rollout == 0
        # An episode starts from nothing; what it has gathered goes into the next rollout.
        for t in range(num_steps):
            running = reward[:, t] + gamma * np.where(first[:, t], 0.0, running)
            history.append(running)
            scales.append(math.sqrt(np.concatenate(history).var() + 1e-8))
        scaled = normalizer(torch.from_numpy(reward), torch.from_numpy(first))
        expected = np.clip(reward / (scales if per_step else scales[-1]), -10, 10)
        assert scaled.dtype == torch.float32
        np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(normalizer.running_return.numpy(), running, rtol=1e-12)


@pytest.mark.parametrize("before", [0, 4])
def test_moments_by_steps_are_those_of_one_update_for_each(before: int) -> None:
    """Far from zero, where a difference of squares would lose the digits."""
    generator = Generator().manual_seed(0)
    samples = 1e4 + torch.randn(3, 20, dtype=torch.float64, generator=generator)
    earlier = [[9990.0, 9993.0]] * before
    one_by_one, at_once = (updated(RunningMoments(), *earlier) for _ in range(2))
    variances = at_once.update_per_step(samples)
    expected = [updated(one_by_one, samples[:, t]).variance for t in range(20)]
    torch.testing.assert_close(variances, torch.stack(expected), rtol=1e-10, atol=0)
    found, wanted = dict(at_once.state_dict()), dict(one_by_one.state_dict())
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


def test_scaled_rewards_are_clipped_on_both_sides_and_no_mean_is_subtracted() -> None:
    normalizer = RewardNormalizer(1, gamma=0.0, clip=1.25)
    reward = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]])  # deviation √2
    scaled = normalizer(reward, torch.zeros(1, 5, dtype=torch.bool))
    half = 0.5**0.5
    torch.testing.assert_close(scaled, torch.tensor([[-1.25, -half, 0.0, half, 1.25]]))
    normalizer = RewardNormalizer(1, gamma=0.0, clip=10.0)
    scaled = normalizer(torch.tensor([[0.0, 2.0]]), torch.zeros(1, 2, dtype=torch.bool))
    torch.testing.assert_close(scaled, torch.tensor([[0.0, 2.0]]))


@pytest.mark.parametrize(("reward", "scaled"), [(0.0, 0.0), (1e-6, 0.01), (1.0, 10.0)])
def test_rewards_that_never_vary_stay_finite(reward: float, scaled: float) -> None:
    """Divided by √1e-8 = 1e-4, then clipped."""
    normalizer = RewardNormalizer(1, gamma=0.0, clip=10.0)
    found = normalizer(torch.full((1, 4), reward), torch.zeros(1, 4, dtype=torch.bool))
    assert found.tolist() == [[pytest.approx(scaled)] * 4]


# Observations and values

BOTH = pytest.mark.parametrize("statistics", ["moments", "ema"])


def observations(seed: int, *shape: int) -> Tensor:
    """Return float32 observations, each component with another offset and spread."""
    offset, spread = torch.tensor([0.0, -100.0, 3.0]), torch.tensor([0.01, 30.0, 1.0])
    return offset + spread * torch.randn(*shape, 3, generator=Generator().manual_seed(seed))


def make(statistics: Any = "moments", size: int = 3, **options: Any) -> ObservationNormalizer:
    options = {"decay": 0.9, "clip": 10.0, **options}
    return ObservationNormalizer(size, statistics=statistics, **options)


def make_value(statistics: Any, decay: float = 0.9) -> normalize.ValueNormalizer:
    return normalize.ValueNormalizer(statistics=statistics, decay=decay)


@BOTH
def test_observations_pass_unchanged_before_the_first_update(statistics: str) -> None:
    normalizer, extreme = make(statistics), torch.tensor([[0.0, -1e30, torch.inf], [1, 1e-30, 5.0]])
    assert torch.equal(normalizer(extreme), extreme)
    assert normalizer(extreme.double()).dtype == torch.float32


@BOTH
def test_observations_are_shifted_scaled_and_clipped_by_statistics(statistics: str) -> None:
    # All of 20 samples, so that the batches weigh alike, or 1, 2 and 4.
    batches = [observations(0, 4, 5), observations(1, 20), observations(2, 2, 2, 5)]
    normalizer, x = updated(make(statistics, decay=0.5, clip=1.0), *batches), observations(3, 50)
    samples = [batch.reshape(-1, 3).double().numpy() for batch in batches]
    mean, variance = mixture_moments(samples, 0.5 if statistics == "ema" else 1.0)
    result = normalizer(x)
    expected = np.clip((x.double().numpy() - mean) / np.sqrt(variance + 1e-8), -1, 1)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert (result.amin(0) == -1).all() and (result.amax(0) == 1).all()
    assert result.dtype == torch.float32 and torch.equal(normalizer(x), result)


def test_components_that_never_varied_become_zero_and_are_clipped_when_they_begin_to() -> None:
    normalizer, constant = make(), torch.tensor([0.1, -12345.678, 2.0])
    updated(normalizer, *(constant.expand(size, 3) for size in (1, 7, 992)))
    assert normalizer(constant.expand(2, 3)).tolist() == [[0, 0, 0]] * 2
    found = normalizer(constant + torch.tensor([[0, 0, -1.0], [0, 0, 1e-4], [0, 0, 1.0]]))[:, 2]
    assert found.tolist() == [-10, pytest.approx(1, rel=0.01), 10]
    one = updated(make(size=1), torch.full((6, 1), 2.0), torch.tensor([[1.0], [3.0]]))
    found = one(torch.tensor([[1.0], [3.0]]))  # variance 2/8
    torch.testing.assert_close(found, torch.tensor([[-2.0], [2.0]]))


def test_a_large_offset_does_not_blur_what_varies_around_it() -> None:
    # x / scale − shift / scale would be the difference of two numbers of 1e5, rounded to
    # hundredths.
    x = 2.0**20 + 8 * torch.randn(1000, 1, generator=Generator().manual_seed(0))
    exact = (x.double() - x.double().mean()) / x.double().std(correction=0)
    difference = updated(make(size=1), x)(x).double() - exact
    # The mean's own rounding shifts all alike.
    assert (difference - difference.mean()).abs().max().item() < 1e-6
    assert difference.abs().max().item() < 0.01


@BOTH
@pytest.mark.parametrize("kind", ["rewards", "observations", "values"])
def test_saved_and_loaded_normalizers_continue_in_place(kind: str, statistics: str) -> None:
    """Updates write in place, so that captured graphs see them."""

    def build() -> Any:
        rewards = RewardNormalizer(3, gamma=0.9, clip=10.0)
        return {"rewards": rewards, "values": make_value(statistics)}.get(kind, make(statistics))

    def use(normalizer: Any, seed: int) -> Tensor:
        if kind == "rewards":
            generator = Generator().manual_seed(seed)
            ends = torch.rand(3, 5, generator=generator) < 0.2
            return normalizer(torch.randn(3, 5, generator=generator), ends)
        updated(normalizer, observations(seed, 4))
        x = observations(9, 8)
        return normalizer.denormalize(x) if kind == "values" else normalizer(x)

    straight, loaded = build(), build()
    places = [buffer.data_ptr() for buffer in straight.buffers()]
    use(straight, 0)
    loaded.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    assert torch.equal(use(straight, 1), use(loaded, 1))
    assert not torch.equal(use(straight, 2), use(build(), 2))
    assert [buffer.data_ptr() for buffer in straight.buffers()] == places
    assert list(straight.parameters()) == []


@BOTH
def test_values_are_in_units_of_the_targets_so_far(statistics: str) -> None:
    normalizer, output = make_value(statistics, 0.5), torch.tensor([[-1.0, 0.0], [0.5, 3.0]])
    assert torch.equal(normalizer.denormalize(output), output)
    # Batches of weights 1 and 1, or 1 and 2; means 1 and 7, variances 1 and 4.
    updated(normalizer, [[0.0, 2.0]])
    assert normalizer.denormalize(output).tolist() == [[0, 1], [1.5, 4]]
    updated(normalizer, [[5.0], [9.0]])
    by_statistics = {"moments": (4, 2.5 + 3**2), "ema": (5, (1 + 2 * 4) / 3 + 2 / 9 * 6**2)}
    mean, variance = by_statistics[statistics]
    found = normalizer.denormalize(output)
    torch.testing.assert_close(found, output * math.sqrt(variance) + mean)
    assert found.dtype == normalizer.mean.dtype == torch.float32


@BOTH
@pytest.mark.parametrize("constant", [0.0, 0.1, -3e4])
def test_targets_that_never_vary_leave_a_small_unit(statistics: str, constant: float) -> None:
    normalizer = updated(make_value(statistics), *[torch.full((4, 33), constant)] * 3)
    assert normalizer.std.item() == pytest.approx(1e-4)
    assert normalizer.mean.item() == pytest.approx(constant)
