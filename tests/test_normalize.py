"""Running statistics against a direct computation over everything that was ever seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasicrl.config import Statistics
from phasicrl.normalize import (
    EmaMoments,
    ObservationNormalizer,
    RewardNormalizer,
    RunningMoments,
    ValueNormalizer,
    make_moments,
)


def moments_of(*batches: np.ndarray) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    return moments


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0, 3),
)
def test_moments_do_not_depend_on_how_the_data_is_split(
    sizes: list[int], seed: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    batches = [
        random.normal(loc=spread * random.normal(), scale=random.uniform(0.1, 2), size=size)
        for size in sizes
    ]
    whole = np.concatenate(batches)
    moments = moments_of(*batches)
    assert moments.count.item() == len(whole)
    np.testing.assert_allclose(moments.mean.item(), whole.mean(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moments.variance.item(), whole.var(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_a_huge_offset_does_not_drown_the_variance(offset: float) -> None:
    # E[x²] − E[x]² would lose every digit: x² has 1e12 or 1e18 times the size of the variance.
    batches = list(np.random.default_rng(0).normal(loc=offset, size=(30, 100)))
    np.testing.assert_allclose(
        moments_of(*batches).variance.item(), np.concatenate(batches).var(), rtol=1e-7
    )


def test_moments_are_kept_in_float64_whatever_the_data() -> None:
    # In float32 the mean of these would be off by parts in a thousand of their deviation.
    batches = [
        np.float32(1000) + np.random.default_rng(seed).normal(size=(5, 4)).astype(np.float32)
        for seed in range(50)
    ]
    moments = moments_of(*batches)
    whole = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(
        (moments.mean.item(), moments.variance.item()), (whole.mean(), whole.var()), rtol=1e-12
    )


def test_before_the_first_batch_the_variance_is_zero() -> None:
    assert RunningMoments().variance.item() == 0


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_each_component_has_moments_of_its_own(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(3)
    offset, spread = random.normal(size=shape) * 100, random.uniform(0.1, 10, size=shape)
    data = offset + spread * random.normal(size=(24, *shape))
    moments = RunningMoments(shape)
    # Any number of leading axes, none too, is so many samples.
    for batch in (
        data[:6].reshape(2, 3, *shape),
        data[6],
        data[7:12],
        data[12:].reshape(3, 1, 4, *shape),
    ):
        moments.update(torch.from_numpy(batch))
    assert moments.count.shape == ()
    assert moments.count.item() == 24
    np.testing.assert_allclose(moments.mean.numpy(), data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance.numpy(), data.var(0), rtol=1e-12)
    with pytest.raises(AssertionError, match=r"\(4, 7\).*samples have the shape"):
        moments.update(torch.zeros(4, 7))


def mixture_moments(batches: list[np.ndarray], decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of all samples, each weighted by its batch's weight, decay^age, over the
    batch's size.
    """
    weights = np.concatenate(
        [
            np.full(len(batch), decay**age / len(batch))
            for age, batch in zip(range(len(batches))[::-1], batches, strict=True)
        ]
    )
    whole = np.concatenate(batches)
    mean = np.average(whole, axis=0, weights=weights)
    return mean, np.average((whole - mean) ** 2, axis=0, weights=weights)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
    decay=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    shape=st.sampled_from([(), (2,)]),
)
def test_exponential_moments_are_those_of_the_weighted_mixture_of_batches(
    sizes: list[int], seed: int, decay: float, shape: tuple[int, ...]
) -> None:
    random = np.random.default_rng(seed)
    batches = [
        random.normal(
            loc=5 * random.normal(size=shape), scale=random.uniform(0.1, 2), size=(size, *shape)
        )
        for size in sizes
    ]
    moments = EmaMoments(decay, shape)
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    mean, variance = mixture_moments(batches, decay)
    np.testing.assert_allclose(moments.mean.numpy(), mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(moments.variance.numpy(), variance, rtol=1e-10, atol=1e-12)


def test_exponential_moments_by_hand() -> None:
    # Decay ½. The first batch is everything: mean 1, variance 1. The second counts twice as much:
    # mean (1 + 2·5)/3 = 11/3 and
    # variance (1 + 2·0)/3 within batches + ⅓·⅔·(5 − 1)² between them = 35/9.
    moments = EmaMoments(0.5)
    assert (moments.mean.item(), moments.variance.item()) == (0, 0)
    moments.update(torch.tensor([0.0, 2.0]))
    assert (moments.mean.item(), moments.variance.item()) == (1, 1)
    moments.update(torch.tensor([[5.0, 5.0, 5.0]]))
    assert moments.mean.item() == pytest.approx(11 / 3, rel=1e-12)
    assert moments.variance.item() == pytest.approx(35 / 9, rel=1e-12)


def test_an_exponential_mean_moves_by_one_minus_the_decay_in_the_end() -> None:
    moments = EmaMoments(0.9)
    for _ in range(400):
        moments.update(torch.tensor([-1.0, 1.0]))
    moments.update(torch.tensor([9.0, 11.0]))
    assert moments.mean.item() == pytest.approx(0.1 * 10, rel=1e-12)
    assert moments.variance.item() == pytest.approx(1 + 0.1 * 0.9 * 10**2, rel=1e-12)
    for _ in range(400):  # and forgets
        moments.update(torch.tensor([3.0]))
    assert (moments.mean.item(), moments.variance.item()) == (
        pytest.approx(3),
        pytest.approx(0, abs=1e-12),
    )


def test_at_first_batches_count_about_alike_whatever_the_decay() -> None:
    batches = np.random.default_rng(4).normal(loc=np.arange(10.0)[:, None], size=(10, 50))
    moments = EmaMoments(0.999)
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    assert moments.mean.item() == pytest.approx(batches.mean(), rel=5e-3)
    assert moments.variance.item() == pytest.approx(batches.var(), rel=5e-3)


@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_nor_does_it_drown_the_exponential_variance(offset: float) -> None:
    batches = list(np.random.default_rng(0).normal(loc=offset, size=(30, 100)))
    moments = EmaMoments(0.9)
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    np.testing.assert_allclose(moments.variance.item(), mixture_moments(batches, 0.9)[1], rtol=1e-6)


def test_moments_by_name() -> None:
    running, exponential = (
        make_moments("moments", decay=0.9),
        make_moments("ema", decay=0.75, shape=(3,)),
    )
    assert isinstance(running, RunningMoments)
    assert isinstance(exponential, EmaMoments)
    assert running.mean.shape == ()
    assert exponential.mean.shape == exponential.variance.shape == (3,)
    assert exponential.decay == 0.75
    assert make_moments("moments", decay=0.9, shape=(2, 1)).variance.shape == (2, 1)
    assert {buffer.dtype for moments in (running, exponential) for buffer in moments.buffers()} == {
        torch.float64
    }


def history_scale(returns: list[np.ndarray]) -> float:
    """The deviation of all running returns so far, as the reward normalizer's source defines it."""
    return math.sqrt(np.concatenate(returns, axis=None).var() + 1e-8)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.999])
def test_rewards_are_divided_by_the_deviation_of_every_return_so_far(gamma: float) -> None:
    random = np.random.default_rng(1)
    num_envs, num_steps = 4, 7
    normalizer = RewardNormalizer(num_envs, gamma=gamma, clip=10.0)
    running, history = np.zeros(num_envs), []
    for rollout in range(5):
        reward = random.normal(loc=1.0, scale=3.0, size=(num_envs, num_steps)).astype(np.float32)
        first = random.random((num_envs, num_steps)) < 0.25
        first[:, 0] |= rollout == 0
        # Step by step: an episode starts from nothing, and what an environment's episode has
        # gathered goes on in the next rollout.
        for t in range(num_steps):
            running = reward[:, t] + gamma * np.where(first[:, t], 0.0, running)
            history.append(running)
        scaled = normalizer(torch.from_numpy(reward), torch.from_numpy(first))
        assert scaled.dtype == torch.float32
        np.testing.assert_allclose(scaled.numpy(), reward / history_scale(history), rtol=1e-6)
        np.testing.assert_allclose(normalizer.running_return.numpy(), running, rtol=1e-12)


def test_the_reward_of_the_last_step_belongs_to_the_old_episode_by_hand() -> None:
    # γ = ½. The episode is 2, 4, 8 | and then 16 begins another: running returns 2, 5, 10.5 | 16.
    normalizer = RewardNormalizer(1, gamma=0.5, clip=10.0)
    normalizer(torch.tensor([[2.0, 4.0, 8.0, 16.0]]), torch.tensor([[True, False, False, True]]))
    assert normalizer.moments.mean.item() == pytest.approx((2 + 5 + 10.5 + 16) / 4, rel=1e-12)
    # The next rollout goes on from 16: 1 + ½·16 = 9.
    normalizer(torch.tensor([[1.0]]), torch.tensor([[False]]))
    assert normalizer.running_return.tolist() == [9]
    assert normalizer.moments.mean.item() == pytest.approx((2 + 5 + 10.5 + 16 + 9) / 5, rel=1e-12)


def test_reset_at_terminations_by_hand() -> None:
    # γ = ½. 4 ends an episode by the rules, so that nothing but itself goes on: 2 | 4, 8 + ½·4 =
    # 10, 1 + ½·10 = 6, whatever was cut between.
    normalizer = RewardNormalizer(1, gamma=0.5, clip=10.0)
    normalizer(torch.tensor([[2.0, 4.0, 8.0, 1.0]]), torch.tensor([[False, True, False, False]]))
    assert normalizer.running_return.tolist() == [6]
    assert normalizer.moments.mean.item() == pytest.approx((2 + 4 + 10 + 6) / 4, rel=1e-12)


def test_step_by_step_a_reward_is_scaled_by_what_was_seen_up_to_it() -> None:
    # As Baselines' vec_normalize.py:26-34 does it, in a loop; over two rollouts and an episode's
    # end inside one.
    random = np.random.default_rng(2)
    num_envs, num_steps, gamma = 3, 5, 0.9
    normalizer = RewardNormalizer(num_envs, gamma=gamma, clip=10.0, per_step=True)
    running, history = np.zeros(num_envs), []
    for rollout in range(2):
        reward = random.normal(loc=1.0, scale=3.0, size=(num_envs, num_steps)).astype(np.float32)
        first = random.random((num_envs, num_steps)) < 0.25
        first[:, 0] |= rollout == 0
        expected = np.zeros_like(reward)
        for t in range(num_steps):
            running = reward[:, t] + gamma * np.where(first[:, t], 0.0, running)
            history.append(running)
            expected[:, t] = np.clip(reward[:, t] / history_scale(history), -10, 10)
        scaled = normalizer(torch.from_numpy(reward), torch.from_numpy(first))
        np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("before", [0, 4])
def test_moments_by_steps_are_those_of_one_update_for_each(before: int) -> None:
    """Far from zero, where a difference of squares would lose the digits."""
    samples = 1e4 + torch.randn(
        3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    one_by_one, at_once = RunningMoments(), RunningMoments()
    for moments in (one_by_one, at_once):
        for _ in range(before):
            moments.update(torch.tensor([9990.0, 9993.0]))
    variances = at_once.update_by_steps(samples)
    for t in range(20):
        one_by_one.update(samples[:, t])
        torch.testing.assert_close(variances[t], one_by_one.variance, rtol=1e-10, atol=0)
    for name in ("count", "mean", "sum_of_squares"):
        torch.testing.assert_close(
            getattr(at_once, name), getattr(one_by_one, name), rtol=1e-10, atol=0
        )


def test_no_mean_is_subtracted() -> None:
    normalizer = RewardNormalizer(2, gamma=0.9, clip=10.0)
    reward = torch.tensor([[0.0, 5.0], [0.0, 6.0]])
    scaled = normalizer(reward, torch.ones(2, 2, dtype=torch.bool))
    assert scaled[:, 0].tolist() == [0, 0]
    assert (scaled[:, 1] > 0).all()


def test_scaled_rewards_are_clipped_on_both_sides() -> None:
    normalizer = RewardNormalizer(1, gamma=0.0, clip=1.5)
    reward = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]])  # deviation √2
    scaled = normalizer(reward, torch.zeros(1, 5, dtype=torch.bool))
    torch.testing.assert_close(
        scaled, torch.tensor([[-(2**0.5), -(0.5**0.5), 0.0, 0.5**0.5, 2**0.5]])
    )
    normalizer.clip = 1.25
    assert normalizer(reward, torch.zeros(1, 5, dtype=torch.bool))[0, [0, 4]].tolist() == [
        -1.25,
        1.25,
    ]


def test_rewards_that_never_vary_stay_finite() -> None:
    # Divided by √1e-8 = 1e-4, then clipped.
    for reward, scaled in (
        (0.0, 0.0),
        (1e-6, 0.01),
        (1.0, 10.0),
    ):
        normalizer = RewardNormalizer(1, gamma=0.0, clip=10.0)
        assert normalizer(
            torch.full((1, 4), reward), torch.zeros(1, 4, dtype=torch.bool)
        ).tolist() == [[pytest.approx(scaled)] * 4]


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened() -> None:
    def data(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(3, 5, generator=generator), torch.rand(3, 5, generator=generator) < 0.2

    straight, loaded = (RewardNormalizer(3, gamma=0.9, clip=10.0) for _ in range(2))
    straight(*data(0))
    loaded.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    assert torch.equal(straight(*data(1)), loaded(*data(1)))
    assert torch.equal(straight.running_return, loaded.running_return)


BOTH = pytest.mark.parametrize("statistics", ["moments", "ema"])


def observations(seed: int, *shape: int) -> Tensor:
    """Float32, each component with an offset and a spread of its own."""
    offset, spread = torch.tensor([0.0, -100.0, 3.0]), torch.tensor([0.01, 30.0, 1.0])
    return offset + spread * torch.randn(*shape, 3, generator=torch.Generator().manual_seed(seed))


@BOTH
def test_observations_pass_unchanged_before_the_first_update(statistics: Statistics) -> None:
    normalizer = ObservationNormalizer(3, statistics=statistics, decay=0.9, clip=2.0)
    extreme = torch.tensor([[0.0, -1e30, torch.inf], [-0.1, 1e-30, 5.0]])
    assert torch.equal(normalizer(extreme), extreme)
    assert normalizer(extreme.double()).dtype == torch.float32


@BOTH
def test_observations_are_shifted_scaled_and_clipped_by_the_statistics_so_far(
    statistics: Statistics,
) -> None:
    normalizer = ObservationNormalizer(3, statistics=statistics, decay=0.5, clip=1.0)
    # All of 20 samples, so that the batches weigh alike, or 1, 2 and 4.
    batches = [observations(0, 4, 5), observations(1, 20), observations(2, 2, 2, 5)]
    for batch in batches:
        normalizer.update(batch)
    samples = [batch.reshape(-1, 3).double().numpy() for batch in batches]
    mean, variance = mixture_moments(samples, 0.5 if statistics == "ema" else 1.0)
    x = observations(3, 50)
    result = normalizer(x)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(
        result.numpy(),
        np.clip((x.double().numpy() - mean) / np.sqrt(variance + 1e-8), -1, 1),
        rtol=1e-4,
        atol=1e-5,
    )
    assert (result.amin(0) == -1).all()
    assert (result.amax(0) == 1).all()
    assert torch.equal(normalizer(x), result)  # looking moves nothing


def test_components_that_never_varied_become_zero() -> None:
    normalizer = ObservationNormalizer(3, statistics="moments", decay=0.9, clip=10.0)
    constant = torch.tensor([0.1, -12345.678, 3e7])
    for size in (1, 7, 1000):
        normalizer.update(constant.expand(size, 3))
    assert normalizer(constant.expand(2, 3)).tolist() == [[0, 0, 0]] * 2


def test_a_component_that_begins_to_vary_is_clipped_until_the_next_update() -> None:
    normalizer = ObservationNormalizer(1, statistics="moments", decay=0.9, clip=10.0)
    normalizer.update(torch.full((6, 1), 2.0))
    assert normalizer(torch.tensor([[1.0], [2.0], [2.0001], [3.0]])).flatten().tolist() == [
        -10,
        0,
        pytest.approx(1, rel=0.01),
        10,
    ]
    normalizer.update(torch.tensor([[1.0], [3.0]]))  # variance 2/8
    torch.testing.assert_close(
        normalizer(torch.tensor([[1.0], [3.0]])), torch.tensor([[-2.0], [2.0]])
    )


def test_a_large_offset_does_not_blur_what_varies_around_it() -> None:
    # x / scale − shift / scale would be the difference of two numbers of 1e5, rounded to
    # hundredths.
    normalizer = ObservationNormalizer(1, statistics="moments", decay=0.9, clip=10.0)
    x = 2.0**20 + 8 * torch.randn(1000, 1, generator=torch.Generator().manual_seed(0))
    normalizer.update(x)
    exact = (x.double() - x.double().mean()) / x.double().std(correction=0)
    difference = normalizer(x).double() - exact
    assert (
        difference - difference.mean()
    ).abs().max().item() < 1e-6  # the mean's own rounding shifts all alike
    assert difference.abs().max().item() < 0.01


@BOTH
def test_a_saved_observation_normalizer_normalizes_and_goes_on_the_same(
    statistics: Statistics,
) -> None:
    straight, loaded = (
        ObservationNormalizer(3, statistics=statistics, decay=0.9, clip=10.0) for _ in range(2)
    )
    assert list(straight.parameters()) == []
    straight.update(observations(0, 4, 5))
    loaded.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    x = observations(1, 8)
    assert (straight(x) != x).all()
    assert torch.equal(straight(x), loaded(x))
    for normalizer in (straight, loaded):
        normalizer.update(observations(2, 7))
    assert torch.equal(straight(x), loaded(x))


@BOTH
def test_updates_write_in_place_so_that_captured_graphs_see_them(statistics: Statistics) -> None:
    observation, value = (
        ObservationNormalizer(3, statistics=statistics, decay=0.9, clip=10.0),
        ValueNormalizer(statistics=statistics, decay=0.9),
    )
    before = [buffer.data_ptr() for module in (observation, value) for buffer in module.buffers()]
    for seed in range(2):
        observation.update(observations(seed, 5))
        value.update(observations(seed, 5))
    assert [
        buffer.data_ptr() for module in (observation, value) for buffer in module.buffers()
    ] == before


@BOTH
def test_values_are_in_units_of_the_targets_so_far(statistics: Statistics) -> None:
    normalizer = ValueNormalizer(statistics=statistics, decay=0.5)
    assert (normalizer.mean.item(), normalizer.std.item()) == (0, 1)
    output = torch.tensor([[-1.0, 0.0], [0.5, 3.0]])
    assert torch.equal(normalizer.denormalize(output), output)
    # Batches of weights 1 and 1, or 1 and 2; means 1 and 7, variances 1 and 4.
    normalizer.update(torch.tensor([[0.0, 2.0]]))
    assert normalizer.denormalize(output).tolist() == [[0, 1], [1.5, 4]]
    normalizer.update(torch.tensor([[5.0], [9.0]]))
    mean, variance = (
        (4, 2.5 + 3**2) if statistics == "moments" else (5, (1 + 2 * 4) / 3 + 2 / 9 * 6**2)
    )
    assert normalizer.mean.item() == pytest.approx(mean)
    assert normalizer.std.item() == pytest.approx(math.sqrt(variance))
    torch.testing.assert_close(normalizer.denormalize(output), output * math.sqrt(variance) + mean)
    assert {normalizer.mean.dtype, normalizer.std.dtype, normalizer.denormalize(output).dtype} == {
        torch.float32
    }
    assert normalizer.mean.shape == normalizer.std.shape == ()


@BOTH
@pytest.mark.parametrize("constant", [0.0, 0.1, -3e4])
def test_targets_that_never_vary_leave_a_small_unit(
    statistics: Statistics, constant: float
) -> None:
    normalizer = ValueNormalizer(statistics=statistics, decay=0.9)
    for _ in range(3):
        normalizer.update(torch.full((4, 33), constant))
    assert normalizer.std.item() == pytest.approx(1e-4)
    assert normalizer.mean.item() == pytest.approx(constant)


@BOTH
def test_a_saved_value_normalizer_goes_on_the_same(statistics: Statistics) -> None:
    straight, loaded = (ValueNormalizer(statistics=statistics, decay=0.9) for _ in range(2))
    assert list(straight.parameters()) == []
    straight.update(observations(0, 5))
    loaded.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    assert torch.equal(straight.denormalize(torch.ones(2)), loaded.denormalize(torch.ones(2)))
    assert loaded.std.item() > 1.5
    for normalizer in (straight, loaded):
        normalizer.update(observations(1, 5))
    assert torch.equal(straight.denormalize(torch.ones(2)), loaded.denormalize(torch.ones(2)))
