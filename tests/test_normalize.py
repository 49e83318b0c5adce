"""Running statistics against a direct computation over everything that was ever seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasicrl.normalize import RewardNormalizer, RunningMoments


def moments_of(*batches: np.ndarray) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    return moments


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 3))
def test_moments_do_not_depend_on_how_the_data_is_split(sizes: list[int], seed: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    batches = [random.normal(loc=spread * random.normal(), scale=random.uniform(0.1, 2), size=size) for size in sizes]
    whole = np.concatenate(batches)
    moments = moments_of(*batches)
    assert moments.count.item() == len(whole)
    np.testing.assert_allclose(moments.mean.item(), whole.mean(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moments.variance.item(), whole.var(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_a_huge_offset_does_not_drown_the_variance(offset: float) -> None:
    # E[x²] − E[x]² would lose every digit: x² has 1e12 or 1e18 times the size of the variance.
    batches = list(np.random.default_rng(0).normal(loc=offset, size=(30, 100)))
    np.testing.assert_allclose(moments_of(*batches).variance.item(), np.concatenate(batches).var(), rtol=1e-7)


def test_moments_are_kept_in_float64_whatever_the_data() -> None:
    # In float32 the mean of these would be off by parts in a thousand of their deviation.
    batches = [np.float32(1000) + np.random.default_rng(seed).normal(size=(5, 4)).astype(np.float32) for seed in range(50)]
    moments = moments_of(*batches)
    whole = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose((moments.mean.item(), moments.variance.item()), (whole.mean(), whole.var()), rtol=1e-12)


def test_before_the_first_batch_the_variance_is_zero() -> None:
    assert RunningMoments().variance.item() == 0


def history_scale(returns: list[np.ndarray]) -> float:
    """The deviation of all running returns so far, as the reward normaliser's source defines it."""
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
        # Step by step: an episode starts from nothing, and what an environment's episode has gathered goes on in the next rollout.
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


def test_step_by_step_a_reward_is_scaled_by_what_was_seen_up_to_it() -> None:
    # As Baselines' vec_normalize.py:26-34 does it, in a loop; over two rollouts and an episode's end inside one.
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
    torch.testing.assert_close(scaled, torch.tensor([[-(2**0.5), -(0.5**0.5), 0.0, 0.5**0.5, 2**0.5]]))
    normalizer.clip = 1.25
    assert normalizer(reward, torch.zeros(1, 5, dtype=torch.bool))[0, [0, 4]].tolist() == [-1.25, 1.25]


def test_rewards_that_never_vary_stay_finite() -> None:
    for reward, scaled in ((0.0, 0.0), (1e-6, 0.01), (1.0, 10.0)):  # divided by √1e-8 = 1e-4, then clipped
        normalizer = RewardNormalizer(1, gamma=0.0, clip=10.0)
        assert normalizer(torch.full((1, 4), reward), torch.zeros(1, 4, dtype=torch.bool)).tolist() == [[pytest.approx(scaled)] * 4]


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened() -> None:
    def data(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(3, 5, generator=generator), torch.rand(3, 5, generator=generator) < 0.2

    straight, loaded = (RewardNormalizer(3, gamma=0.9, clip=10.0) for _ in range(2))
    straight(*data(0))
    loaded.load_state_dict({name: value.clone() for name, value in straight.state_dict().items()})
    assert torch.equal(straight(*data(1)), loaded(*data(1)))
    assert torch.equal(straight.running_return, loaded.running_return)
