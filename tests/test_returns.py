"""Returns and advantages: numbers by hand, relations, and slow sums in float64 as the judges."""

import math
from typing import Any, NamedTuple

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasicrl.returns import (
    compute_running_return,
    explained_variance,
    gae,
    mark_whole_episodes,
    monte_carlo_return,
    n_step_return,
)
from phasicrl.returns import normalize_advantages as normalize

NAN = float("nan")


def flags(*rows: str) -> Tensor:
    """Return flags, such as (False, False, True) for `"..x"`."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


# The first row terminates in step 1 and is truncated in step 3, in an observation of value 20; the
# second has no ends.
STEPS = {
    "reward": torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5]]),
    "value": torch.tensor([[2.0, 4, 6, 8, 10], [2, 4, 6, 8, 10]]),
    "next_value": torch.tensor([[4, NAN, 8, 20, 12], [4, 6, 8, 10, 12]]),
    "terminated": flags(".x...", "....."),
    "truncated": flags("...x.", "....."),
}


def test_gae_by_hand_with_a_termination_and_a_truncation() -> None:
    # γ = λ = ½, so γλ = ¼.
    #   δ0 = 1 + ½·4 − 2 = 1     δ1 = 2 − 4 = −2     δ2 = 3 + ½·8 − 6 = 1     δ3 = 4 + ½·20 − 8 = 6
    # δ4 = 5 + ½·12 − 10 = 1
    #   A4 = 1     A3 = 6     A2 = 1 + ¼·6 = 2.5     A1 = −2     A0 = 1 + ¼·(−2) = 0.5
    # In the second row δ = 1 in every step, and A_t = 1 + ¼ A_{t+1}.
    advantage = gae(**STEPS, gamma=0.5, gae_lambda=0.5)
    assert advantage.tolist() == [[0.5, -2, 2.5, 6, 1], [1.33203125, 1.328125, 1.3125, 1.25, 1]]


class Episodes(NamedTuple):
    """Random steps, `[B, T]` float64; `end` is 1 for a termination, 2 for a truncation, else 0."""

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
    """Sum `(γλ)^k δ_{t+k}` up to the step that ends the episode, or the rollout."""
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


def tensors(data: Episodes, next_value: np.ndarray) -> tuple[Tensor, ...]:
    """Return the arguments of `gae`."""
    reward, value, after, end = map(torch.from_numpy, (*data[:2], next_value, data.end))
    return reward, value, after, end == 1, end == 2


EXACT: Any = {"rtol": 1e-12, "atol": 1e-10}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=episodes(), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_gae_is_a_sum_of_errors(data: Episodes, gamma: float, gae_lambda: float) -> None:
    # What follows a termination must not be used.
    steps = tensors(data, np.where(data.end == 1, NAN, data.next_value))
    advantage = gae(*steps, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(advantage, brute_force_gae(data, gamma, gae_lambda), **EXACT)


def test_n_step_returns_by_hand_with_a_termination_and_a_truncation() -> None:
    # γ = ½.
    #   n = 1: 1 + ½·4 = 3     2     3 + ½·8 = 7     4 + ½·20 = 14     5 + ½·12 = 11
    #   n = 2: 1 + ½·2 = 2     2     3 + ½·14 = 10   14                11
    #   second row, n = 2: 1 + ½·(2 + ½·6) = 3.5     2 + ½·(3 + ½·8) = 5.5     7.5     4 + ½·(5 +
    # ½·12) = 9.5     11
    #   second row, n = 3: 1 + ½·5.5 = 3.75     2 + ½·7.5 = 5.75     3 + ½·9.5 = 7.75     9.5     11
    one, two, three = (n_step_return(**STEPS, gamma=0.5, n=n).tolist() for n in (1, 2, 3))
    assert one == [[3, 2, 7, 14, 11], [3, 5, 7, 9, 11]]
    assert two == [[2, 2, 10, 14, 11], [3.5, 5.5, 7.5, 9.5, 11]]
    assert three == [[2, 2, 10, 14, 11], [3.75, 5.75, 7.75, 9.5, 11]]


def test_a_termination_in_a_truncated_step_has_nothing_after_it() -> None:
    reward, value, next_value = torch.rand(3, 1, 3, generator=torch.Generator().manual_seed(0))
    ended = flags(".x.")
    for returns in (
        n_step_return(reward, value, next_value, ended, ended, gamma=0.9, n=2),
        monte_carlo_return(reward, next_value, ended, ended, gamma=0.9),
    ):
        torch.testing.assert_close(returns[0, 1], reward[0, 1])
        torch.testing.assert_close(returns[0, 0], reward[0, 0] + 0.9 * reward[0, 1])


def brute_force_n_step(data: Episodes, gamma: float, n: int) -> np.ndarray:
    """Add up rewards until there are n of them, or the episode or the rollout ends.

    Then add the value of what is left.
    """
    returns = np.zeros_like(data.reward)
    num_envs, num_steps = returns.shape
    for b in range(num_envs):
        for t in range(num_steps):
            for k in range(n):
                s = t + k
                returns[b, t] += gamma**k * data.reward[b, s]
                if data.end[b, s] != 0 or s == num_steps - 1:
                    after = 0.0 if data.end[b, s] == 1 else data.next_value[b, s]
                    returns[b, t] += gamma ** (k + 1) * after
                    break
            else:
                returns[b, t] += gamma**n * data.value[b, t + n]
    return returns


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=episodes(), gamma=st.floats(0, 1), n=st.integers(1, 11))
def test_n_step_and_monte_carlo_returns_are_sums(data: Episodes, gamma: float, n: int) -> None:
    # What follows a termination must not be used, nor the next value of a step that is followed by
    # another.
    unseen = data.end == 1
    unseen[:, :-1] |= data.end[:, :-1] == 0
    steps = tensors(data, np.where(unseen, NAN, data.next_value))
    returns = n_step_return(*steps, gamma=gamma, n=n)
    np.testing.assert_allclose(returns, brute_force_n_step(data, gamma, n), **EXACT)
    returns, every = monte_carlo_return(steps[0], *steps[2:], gamma=gamma), data.reward.shape[1]
    np.testing.assert_allclose(returns, brute_force_n_step(data, gamma, every), **EXACT)


def test_returns_keep_the_dtype_and_leave_their_arguments_alone() -> None:
    copies = {name: tensor.clone() for name, tensor in STEPS.items()}
    without_value = {name: tensor for name, tensor in STEPS.items() if name != "value"}
    for returns in (
        gae(**STEPS, gamma=0.9, gae_lambda=0.9),
        n_step_return(**STEPS, gamma=0.9, n=2),
        monte_carlo_return(**without_value, gamma=0.9),
    ):
        assert returns.dtype == torch.float32
    assert all(STEPS[name].equal(x) or name == "next_value" for name, x in copies.items())


def test_running_return_by_hand_with_what_it_starts_from() -> None:
    # γ = ½. The first row carries 8 over: 1 + ½·8 = 5, 2 + ½·5 = 4.5, reset 3, 4 + ½·3 = 5.5. The
    # second row is reset at once.
    reward, start = torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4]]), torch.tensor([8.0, 100.0])
    running = compute_running_return(reward, flags("..x.", "x..."), start, gamma=0.5)
    assert running.tolist() == [[5, 4.5, 3, 5.5], [1, 2.5, 4.25, 6.125]]


def test_explained_variance_by_hand() -> None:
    # Errors (0, 0, 3) have the biased variance 2, the targets 8/3: 1 − 2·3/8 = ¼.
    target = torch.tensor([0.0, 2.0, 4.0])
    assert explained_variance(torch.tensor([0.0, 2.0, 1.0]), target) == pytest.approx(0.25)
    # A constant error is bias, not variance; a constant explains nothing; the opposite is worse.
    assert explained_variance(target, target) == explained_variance(target + 3, target) == 1
    assert explained_variance(torch.full_like(target, 7.0), target) == pytest.approx(0, abs=1e-6)
    assert explained_variance(-target, target) == pytest.approx(-3)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6, 7.3, 123.456])
def test_explained_variance_of_a_constant_target_is_not_a_number(constant: float) -> None:
    """In a rollout of many steps too."""
    prediction = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for size in (4, 64):
        target = torch.full((size, 256), constant)
        assert math.isnan(explained_variance(prediction[:size], target))


@pytest.mark.parametrize("mean", [1.0, -300.0])
def test_explained_variance_is_of_targets_that_deviate_by_over_one_percent(mean: float) -> None:
    deviation = torch.tensor([0.99, -0.99]) * abs(mean)  # errors 100 times as large
    assert math.isnan(explained_variance(mean + deviation, mean + 0.01 * deviation))
    deviation = torch.tensor([1.01, -1.01]) * abs(mean)
    explained = explained_variance(mean + deviation, mean + 0.01 * deviation)
    assert explained == pytest.approx(1 - 99**2, rel=1e-3)


def test_normalize_by_hand() -> None:
    # The biased deviation of (1, 3) is 1, the unbiased one √2.
    pair = torch.tensor([1.0, 3.0])
    assert normalize(pair).tolist() == [-1, 1]
    torch.testing.assert_close(normalize(pair, unbiased=True), torch.tensor([-1.0, 1.0]) / 2**0.5)
    # ε is added to the deviation, not to the variance: 1e-8 / (1e-8 + 1e-8).
    torch.testing.assert_close(normalize(torch.tensor([0.0, 2e-8])), torch.tensor([-0.5, 0.5]))


def test_samples_that_do_not_count_neither_move_the_normalization_nor_stay() -> None:
    advantage = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) * 4 + 2
    weight = flags("x.xx..xx", "........", "xx.x.x.x") * 1.5
    for unbiased in (False, True):
        rows = normalize(advantage, unbiased=unbiased, rowwise=True, weight=weight)
        everything = normalize(advantage, unbiased=unbiased, weight=weight)
        counts = weight > 0
        expected = normalize(advantage[counts], unbiased=unbiased)
        torch.testing.assert_close(everything[counts], expected)
        for row, raw, counted in zip(rows, advantage, counts, strict=True):
            if counted.any():
                torch.testing.assert_close(row[counted], normalize(raw[counted], unbiased=unbiased))
        assert not rows[~counts].any() and not everything[~counts].any()


def test_whole_episodes_by_hand() -> None:
    # Rollouts of ten steps: what begins in steps 0 to 5 counts. The first row continues an
    # episode of the rollout before; its second one begins in step 5 and ends in step 9. The last
    # row's second episode begins in step 6.
    first = flags("..x..x....", "x....x....", "x.....x...")
    ended = flags(".x..x....x", "....x....x", ".....x...x")
    assert mark_whole_episodes(first, ended).tolist() == (
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
        counts = mark_whole_episodes(first, ended, max_episodes=number)
        assert counts.tolist() == expected.bool().tolist()
    assert mark_whole_episodes(first, ended, max_episodes=99).equal(counts)


@pytest.mark.parametrize(("first", "ended"), [
    (flags("x...x.....", "x....x...."), flags("...x......", "....x.....")),
    # One that began in the second half of the rollout before: nothing would be learned from.
    (flags(".......x.."), flags("......x...")),
])  # fmt: skip
def test_an_episode_that_does_not_fit_is_refused(first: Tensor, ended: Tensor) -> None:
    with pytest.raises(ValueError, match=r"ppo\.num_steps"):
        mark_whole_episodes(first, ended)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1000.1, 3e7])
def test_normalize_does_not_blow_constants_up(constant: float) -> None:
    # Rounding may leave a constant a little beside its mean, never more than one deviation.
    for size in (1, 7, 1000):
        assert normalize(torch.full((size,), constant)).abs().max().item() <= 1
