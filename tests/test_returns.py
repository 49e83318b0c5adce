"""Returns and advantages: numbers by hand, relations, and slow sums in float64 as the judges."""

from __future__ import annotations

import math
from typing import NamedTuple

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasicrl.returns import (
    complete_episode_mask,
    discounted_forward_return,
    explained_variance,
    gae,
    monte_carlo_return,
    n_step_return,
    normalize,
)

NAN = float("nan")


def flags(*rows: str) -> Tensor:
    """`"..x"` is (False, False, True)."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def random_steps(num_envs: int, num_steps: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Reward, value and next value, `[B, T]` float64."""
    reward, value, next_value = torch.randn(
        3, num_envs, num_steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return reward, value, next_value


def test_gae_by_hand_with_a_termination_and_a_truncation() -> None:
    # γ = λ = ½, so γλ = ¼. The first row terminates in step 1 and is truncated in step 3, in an
    # observation of value 20.
    #   δ0 = 1 + ½·4 − 2 = 1     δ1 = 2 − 4 = −2     δ2 = 3 + ½·8 − 6 = 1     δ3 = 4 + ½·20 − 8 = 6
    # δ4 = 5 + ½·12 − 10 = 1
    #   A4 = 1     A3 = 6     A2 = 1 + ¼·6 = 2.5     A1 = −2     A0 = 1 + ¼·(−2) = 0.5
    # The second row has no ends: δ = 1 in every step, and A_t = 1 + ¼ A_{t+1}.
    advantage = gae(
        reward=torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5]]),
        value=torch.tensor([[2.0, 4, 6, 8, 10], [2, 4, 6, 8, 10]]),
        next_value=torch.tensor([[4, NAN, 8, 20, 12], [4, 6, 8, 10, 12]]),
        terminated=flags(".x...", "....."),
        truncated=flags("...x.", "....."),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantage.tolist() == [[0.5, -2, 2.5, 6, 1], [1.33203125, 1.328125, 1.3125, 1.25, 1]]


def test_lambda_zero_is_the_one_step_error() -> None:
    reward, value, next_value = random_steps(2, 6)
    terminated, truncated = flags(".x...x", "x....."), flags("...x..", ".....x")
    advantage = gae(reward, value, next_value, terminated, truncated, gamma=0.9, gae_lambda=0.0)
    torch.testing.assert_close(advantage, reward + 0.9 * next_value * ~terminated - value)


def test_lambda_one_without_ends_is_monte_carlo_minus_value() -> None:
    reward, value, other = random_steps(3, 7)
    next_value = torch.cat([value[:, 1:], other[:, -1:]], dim=1)
    never = torch.zeros_like(value, dtype=torch.bool)
    advantage = gae(reward, value, next_value, never, never, gamma=0.9, gae_lambda=1.0)
    for t in range(7):
        powers = 0.9 ** torch.arange(7 - t, dtype=torch.float64)
        monte_carlo = (powers * reward[:, t:]).sum(1) + 0.9 ** (7 - t) * next_value[:, -1]
        torch.testing.assert_close(advantage[:, t], monte_carlo - value[:, t])


class Episodes(NamedTuple):
    """Random steps, `[B, T]` float64.

    `end` is 0 where the episode goes on, 1 where it terminates, 2 where it is truncated.
    """

    reward: np.ndarray
    value: np.ndarray
    next_value: np.ndarray
    end: np.ndarray


@st.composite
def episodes(draw: st.DrawFn) -> Episodes:
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 9)))
    numbers = npst.arrays(np.float64, shape, elements=st.floats(-100, 100, width=32))
    end = draw(npst.arrays(np.int64, shape, elements=st.integers(0, 2)))
    return Episodes(reward=draw(numbers), value=draw(numbers), next_value=draw(numbers), end=end)


def brute_force_gae(data: Episodes, gamma: float, gae_lambda: float) -> np.ndarray:
    """`A_t = Σ_k (γλ)^k δ_{t+k}` up to and with the step that ends the episode, or the rollout."""
    advantage = np.zeros_like(data.reward)
    num_envs, num_steps = advantage.shape
    for b in range(num_envs):
        for t in range(num_steps):
            for k in range(num_steps - t):
                s = t + k
                after = 0.0 if data.end[b, s] == 1 else data.next_value[b, s]
                delta = data.reward[b, s] + gamma * after - data.value[b, s]
                advantage[b, t] += (gamma * gae_lambda) ** k * delta
                if data.end[b, s] != 0:
                    break
    return advantage


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=episodes(), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors_until_the_end(
    data: Episodes, gamma: float, gae_lambda: float
) -> None:
    # Nobody may look at what follows a termination.
    next_value = np.where(data.end == 1, NAN, data.next_value)
    reward, value, next_value, end = map(
        torch.from_numpy, (data.reward, data.value, next_value, data.end)
    )
    advantage = gae(
        reward, value, next_value, end == 1, end == 2, gamma=gamma, gae_lambda=gae_lambda
    )
    np.testing.assert_allclose(
        advantage.numpy(), brute_force_gae(data, gamma, gae_lambda), rtol=1e-12, atol=1e-10
    )


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_nothing_leaks_across_an_end(kind: str) -> None:
    ends = {"terminated": flags(".....", "....."), "truncated": flags(".....", ".....")}
    ends[kind] = flags("..x..", ".....")
    before, after = random_steps(2, 5, seed=1), random_steps(2, 5, seed=2)
    for changed, new in zip(before, after, strict=True):
        old_advantage = gae(
            *before, ends["terminated"], ends["truncated"], gamma=0.9, gae_lambda=0.9
        )
        changed[:, 3:] = new[:, 3:]
        advantage = gae(*before, ends["terminated"], ends["truncated"], gamma=0.9, gae_lambda=0.9)
        assert torch.equal(advantage[0, :3], old_advantage[0, :3])
        assert (
            advantage[1, :3] != old_advantage[1, :3]
        ).all()  # the other environment goes on, and notices


def test_gae_keeps_the_dtype_and_leaves_its_arguments_alone() -> None:
    steps = [data.float() for data in random_steps(2, 4)]
    copies = [data.clone() for data in steps]
    advantage = gae(
        steps[0],
        steps[1],
        steps[2],
        flags(".x..", "...."),
        flags("....", "..x."),
        gamma=0.9,
        gae_lambda=0.9,
    )
    assert advantage.dtype == torch.float32
    assert all(torch.equal(data, copy) for data, copy in zip(steps, copies, strict=True))


def test_n_step_returns_by_hand_with_a_termination_and_a_truncation() -> None:
    # γ = ½. The first row terminates in step 1 and is truncated in step 3, in an observation of
    # value 20; the second has no ends.
    #   n = 1: 1 + ½·4 = 3     2     3 + ½·8 = 7     4 + ½·20 = 14     5 + ½·12 = 11
    #   n = 2: 1 + ½·2 = 2     2     3 + ½·14 = 10   14                11
    #   second row, n = 2: 1 + ½·(2 + ½·6) = 3.5     2 + ½·(3 + ½·8) = 5.5     7.5     4 + ½·(5 +
    # ½·12) = 9.5     11
    #   second row, n = 3: 1 + ½·5.5 = 3.75     2 + ½·7.5 = 5.75     3 + ½·9.5 = 7.75     9.5     11
    steps = {
        "reward": torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5]]),
        "value": torch.tensor([[2.0, 4, 6, 8, 10], [2, 4, 6, 8, 10]]),
        "next_value": torch.tensor([[4, NAN, 8, 20, 12], [4, 6, 8, 10, 12]]),
        "terminated": flags(".x...", "....."),
        "truncated": flags("...x.", "....."),
    }
    assert n_step_return(**steps, gamma=0.5, n=1).tolist() == [[3, 2, 7, 14, 11], [3, 5, 7, 9, 11]]
    assert n_step_return(**steps, gamma=0.5, n=2).tolist() == [
        [2, 2, 10, 14, 11],
        [3.5, 5.5, 7.5, 9.5, 11],
    ]
    assert n_step_return(**steps, gamma=0.5, n=3).tolist() == [
        [2, 2, 10, 14, 11],
        [3.75, 5.75, 7.75, 9.5, 11],
    ]


def test_monte_carlo_returns_by_hand_with_a_termination_and_a_truncation() -> None:
    # γ = ½, the steps as above. Only the values at the truncation (20) and after the last step (12)
    # may be looked at.
    #   second row: 5 + ½·12 = 11     4 + ½·11 = 9.5     3 + ½·9.5 = 7.75     2 + ½·7.75 = 5.875
    # 1 + ½·5.875 = 3.9375
    returns = monte_carlo_return(
        reward=torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5]]),
        next_value=torch.tensor([[NAN, NAN, NAN, 20, 12], [NAN, NAN, NAN, NAN, 12]]),
        terminated=flags(".x...", "....."),
        truncated=flags("...x.", "....."),
        gamma=0.5,
    )
    assert returns.tolist() == [[2, 2, 10, 14, 11], [3.9375, 5.875, 7.75, 9.5, 11]]


def test_without_a_value_function_the_rest_of_an_unfinished_episode_is_worth_nothing() -> None:
    # γ = ½. Terminated in step 1, truncated in step 3, unfinished after step 5.
    reward, ends = torch.ones(1, 6), (flags(".x...."), flags("...x.."))
    assert monte_carlo_return(reward, torch.zeros(1, 6), *ends, gamma=0.5).tolist() == [
        [1.5, 1, 1.5, 1, 1.5, 1]
    ]


def test_a_termination_in_a_truncated_step_has_nothing_after_it() -> None:
    reward, value, next_value = random_steps(1, 3)
    ended = flags(".x.")
    for returns in (
        n_step_return(reward, value, next_value, ended, ended, gamma=0.9, n=2),
        monte_carlo_return(reward, next_value, ended, ended, gamma=0.9),
    ):
        torch.testing.assert_close(returns[0, 1], reward[0, 1])
        torch.testing.assert_close(returns[0, 0], reward[0, 0] + 0.9 * reward[0, 1])


def brute_force_n_step(data: Episodes, gamma: float, n: int) -> np.ndarray:
    """Rewards one after the other until there are n of them, or the episode or the rollout ends.

    Then what is worth what is left.
    """
    returns = np.zeros_like(data.reward)
    num_envs, num_steps = returns.shape
    for b in range(num_envs):
        for t in range(num_steps):
            for k in range(n):
                s = t + k
                returns[b, t] += gamma**k * data.reward[b, s]
                if data.end[b, s] != 0 or s == num_steps - 1:
                    returns[b, t] += (
                        0.0 if data.end[b, s] == 1 else gamma ** (k + 1) * data.next_value[b, s]
                    )
                    break
            else:
                returns[b, t] += gamma**n * data.value[b, t + n]
    return returns


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=episodes(), gamma=st.floats(0, 1), n=st.integers(1, 11))
def test_n_step_and_monte_carlo_returns_are_sums_over_the_steps(
    data: Episodes, gamma: float, n: int
) -> None:
    # Nobody may look at what follows a termination, nor at the next value of a step that is
    # followed by another.
    unseen = data.end == 1
    unseen[:, :-1] |= data.end[:, :-1] == 0
    next_value = np.where(unseen, NAN, data.next_value)
    reward, value, next_value, end = map(
        torch.from_numpy, (data.reward, data.value, next_value, data.end)
    )
    returns = n_step_return(reward, value, next_value, end == 1, end == 2, gamma=gamma, n=n)
    np.testing.assert_allclose(
        returns.numpy(), brute_force_n_step(data, gamma, n), rtol=1e-12, atol=1e-10
    )
    returns = monte_carlo_return(reward, next_value, end == 1, end == 2, gamma=gamma)
    np.testing.assert_allclose(
        returns.numpy(),
        brute_force_n_step(data, gamma, data.reward.shape[1]),
        rtol=1e-12,
        atol=1e-10,
    )


def as_collected(data: Episodes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `gae` as a rollout has them.

    Within an episode the next value is the value of the next step.
    """
    next_value = data.next_value.copy()
    next_value[:, :-1] = np.where(data.end[:, :-1] == 2, next_value[:, :-1], data.value[:, 1:])
    reward, value, next_value, end = map(
        torch.from_numpy, (data.reward, data.value, next_value, data.end)
    )
    return reward, value, next_value, end == 1, end == 2


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=episodes(), gamma=st.floats(0, 1))
def test_one_step_is_td_zero_and_all_steps_are_monte_carlo_and_lambda_one(
    data: Episodes, gamma: float
) -> None:
    steps = as_collected(data)
    reward, value, next_value, terminated, truncated = steps
    one, every, more = (
        n_step_return(*steps, gamma=gamma, n=n) for n in (1, value.shape[1], value.shape[1] + 3)
    )
    torch.testing.assert_close(one, reward + gamma * next_value * ~terminated)
    torch.testing.assert_close(one, value + gae(*steps, gamma=gamma, gae_lambda=0.0))
    torch.testing.assert_close(
        every, monte_carlo_return(reward, next_value, terminated, truncated, gamma=gamma)
    )
    assert torch.equal(every, more)
    torch.testing.assert_close(every, value + gae(*steps, gamma=gamma, gae_lambda=1.0))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=episodes(), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_advantage_plus_value_is_the_mixture_of_n_step_returns(
    data: Episodes, gamma: float, gae_lambda: float
) -> None:
    # TD(λ): (1 − λ) Σ_n λ^{n-1} Gⁿ. From n = T on all are the same, and share the weight λ^{T-1}
    # that is left.
    steps = as_collected(data)
    num_steps = data.reward.shape[1]
    weights = [(1 - gae_lambda) * gae_lambda ** (n - 1) for n in range(1, num_steps)] + [
        gae_lambda ** (num_steps - 1)
    ]
    assert sum(weights) == pytest.approx(1)
    mixture = sum(
        weight * n_step_return(*steps, gamma=gamma, n=n)
        for n, weight in enumerate(weights, start=1)
    )
    torch.testing.assert_close(
        steps[1] + gae(*steps, gamma=gamma, gae_lambda=gae_lambda), mixture, rtol=1e-9, atol=1e-9
    )


def test_the_returns_keep_the_dtype_and_leave_their_arguments_alone() -> None:
    reward, value, next_value = (data.float() for data in random_steps(2, 4))
    arguments = [reward, value, next_value, flags(".x..", "...."), flags("....", "..x.")]
    copies = [data.clone() for data in arguments]
    assert n_step_return(*arguments, gamma=0.9, n=2).dtype == torch.float32
    assert monte_carlo_return(reward, *arguments[2:], gamma=0.9).dtype == torch.float32
    assert all(torch.equal(data, copy) for data, copy in zip(arguments, copies, strict=True))


def test_forward_return_by_hand_with_what_it_starts_from() -> None:
    # γ = ½. The first row carries 8 over: 1 + ½·8 = 5, 2 + ½·5 = 4.5, anew 3, 4 + ½·3 = 5.5. The
    # second row starts anew at once.
    running = discounted_forward_return(
        torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4]]),
        flags("..x.", "x..."),
        torch.tensor([8.0, 100.0]),
        gamma=0.5,
    )
    assert running.tolist() == [[5, 4.5, 3, 5.5], [1, 2.5, 4.25, 6.125]]


def test_forward_return_in_two_halves_is_the_whole() -> None:
    reward, _, _ = random_steps(3, 8)
    first, start = (
        flags("...x....", "....x...", "x....x.x"),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
    )
    whole = discounted_forward_return(reward, first, start, gamma=0.9)
    left = discounted_forward_return(reward[:, :4], first[:, :4], start, gamma=0.9)
    right = discounted_forward_return(reward[:, 4:], first[:, 4:], left[:, -1], gamma=0.9)
    torch.testing.assert_close(torch.cat([left, right], dim=1), whole, rtol=1e-12, atol=0)


def test_explained_variance_by_hand() -> None:
    # Errors (0, 0, 3) have the biased variance 2, the targets 8/3: 1 − 2·3/8 = ¼.
    target = torch.tensor([0.0, 2.0, 4.0])
    assert explained_variance(torch.tensor([0.0, 2.0, 1.0]), target) == pytest.approx(0.25)


def test_explained_variance_of_perfect_constant_and_opposite_predictions() -> None:
    target = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    assert explained_variance(target, target) == 1
    assert explained_variance(torch.full_like(target, 7.0), target) == pytest.approx(0, abs=1e-6)
    # A constant error is bias, not variance.
    assert explained_variance(target + 3, target) == pytest.approx(1)
    assert explained_variance(-target, target) == pytest.approx(-3)


@pytest.mark.parametrize("constant", [0.0, 0.5, 0.1, -1e6])
def test_explained_variance_of_a_constant_target_is_not_a_number(constant: float) -> None:
    prediction = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert math.isnan(explained_variance(prediction, torch.full((1000,), constant)))


@pytest.mark.parametrize("constant", [7.3, 123.456])
def test_so_it_is_in_a_rollout_of_many_steps(constant: float) -> None:
    prediction = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert math.isnan(explained_variance(prediction, torch.full((64, 256), constant)))


def test_explained_variance_of_a_target_that_hardly_varies_is_a_number() -> None:
    target = 1000 + 1e-2 * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert explained_variance(target, target) == 1


def test_normalize_by_hand() -> None:
    # The biased deviation of (1, 3) is 1, the unbiased one √2.
    assert normalize(torch.tensor([1.0, 3.0])).tolist() == [-1, 1]
    torch.testing.assert_close(
        normalize(torch.tensor([1.0, 3.0]), unbiased=True), torch.tensor([-1.0, 1.0]) / 2**0.5
    )
    # ε is added to the deviation, not to the variance: 1e-8 / (1e-8 + 1e-8).
    torch.testing.assert_close(normalize(torch.tensor([0.0, 2e-8])), torch.tensor([-0.5, 0.5]))


def test_samples_that_do_not_count_neither_move_the_normalization_nor_stay() -> None:
    advantage = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) * 4 + 2
    weight = flags("x.xx..xx", "........", "xx.x.x.x") * 1.5
    for unbiased in (False, True):
        rows = normalize(advantage, unbiased=unbiased, by_row=True, weight=weight)
        everything = normalize(advantage, unbiased=unbiased, weight=weight)
        counts = weight > 0
        torch.testing.assert_close(
            everything[counts], normalize(advantage[counts], unbiased=unbiased)
        )
        for row, raw, counted in zip(rows, advantage, counts, strict=True):
            if counted.any():
                torch.testing.assert_close(row[counted], normalize(raw[counted], unbiased=unbiased))
        assert not rows[~counts].any() and not everything[~counts].any()


def test_whole_episodes_by_hand() -> None:
    # Rollouts of ten steps: what begins in steps 0 to 5 counts. The first row goes on with an
    # episode of the rollout before; its second one begins in step 5 and ends in step 9. The last
    # row's second episode begins in step 6.
    first = flags("..x..x....", "x....x....", "x.....x...")
    ended = flags(".x..x....x", "....x....x", ".....x...x")
    assert complete_episode_mask(first, ended).tolist() == (
        flags("..xxxxxxxx", "xxxxxxxxxx", "xxxxxx....").tolist()
    )


def test_the_first_episodes_by_hand() -> None:
    # Six begin in the first half: in step 0 those of the second and the third row (1, 2), in step 2
    # of the first (3), in step 4 of the third (4), in step 5 of the first and the second (5, 6).
    first = flags("..x..x....", "x....x....", "x...x.x...")
    ended = flags(".x..x....x", "....x....x", "...x.x...x")
    episodes = (
        flags("..........", "xxxxx.....", ".........."),
        flags("..........", "..........", "xxxx......"),
        flags("..xxx.....", "..........", ".........."),
        flags("..........", "..........", "....xx...."),
        flags(".....xxxxx", "..........", ".........."),
        flags("..........", ".....xxxxx", ".........."),
    )
    for number in range(7):
        expected = sum((episode.int() for episode in episodes[:number]), torch.zeros(3, 10))
        counts = complete_episode_mask(first, ended, at_most=number)
        assert counts.tolist() == expected.bool().tolist()
    assert complete_episode_mask(first, ended, at_most=99).equal(
        complete_episode_mask(first, ended)
    )


def test_an_episode_that_does_not_fit_is_refused() -> None:
    first, ended = flags("x...x.....", "x....x...."), flags("...x......", "....x.....")
    with pytest.raises(ValueError, match=r"longer than 5 steps.*at least twice the longest"):
        complete_episode_mask(first, ended)
    # One that began in the second half of the rollout before: nothing would be learned from.
    first, ended = flags(".......x.."), flags("......x...")
    with pytest.raises(ValueError, match=r"longer than 5 steps.*at least twice the longest"):
        complete_episode_mask(first, ended)


def test_short_episodes_count_as_often_as_they_are_played() -> None:
    # Episodes of 1 or 9 steps, equally likely, and rollouts of 20. Dropping what is unfinished
    # would leave too many short ones.
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 2, (400, 400), generator=generator) * 8 + 1
    ended = torch.zeros(400, 1000, dtype=torch.bool)
    for row, ends in zip(ended, (lengths.cumsum(1) - 1).tolist(), strict=True):
        row[[end for end in ends if end < 1000]] = True
    first = torch.cat([torch.ones(400, 1, dtype=torch.bool), ended[:, :-1]], 1)
    first, ended = (torch.cat(flag.split(20, 1)) for flag in (first, ended))
    short, long = first & ended, first & ~ended  # where they begin
    counts = complete_episode_mask(first, ended)
    share = (short & counts).sum() / (first & counts).sum()
    assert share.item() == pytest.approx(0.5, abs=0.02)
    finished = short.sum() + long[:, :12].sum()
    assert short.sum() / finished > 0.55


def test_normalize_gives_mean_zero_and_biased_variance_one() -> None:
    advantage = normalize(torch.randn(7, 11, generator=torch.Generator().manual_seed(4)) * 30 + 5)
    assert advantage.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantage.var(correction=0).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1000.1, 3e7])
def test_normalize_does_not_blow_constants_up(constant: float) -> None:
    # Rounding may leave a constant a little beside its mean, never more than one deviation.
    for size in (1, 7, 1000):
        assert normalize(torch.full((size,), constant)).abs().max().item() <= 1
