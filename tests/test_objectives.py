"""Losses and steering rules.

Numbers and gradients by hand, relations between them, and autograd on the formulas as they are
written.
"""

import math

import pytest
import torch
from torch import Generator, Tensor

from phasicrl import objectives


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), of)[0].tolist()


def log_ratio(*ratios: float) -> tuple[Tensor, Tensor]:
    """Return new and old log-probabilities of actions with these probability ratios."""
    old = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    return (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(), old


CLIP, NO_CLIP = torch.tensor(0.2, dtype=torch.float64), torch.tensor(math.inf)


def float64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(("advantage", "ratio", "loss", "slope"), [
    # Good and already likelier than 1 + ε: max(−3, −2.4), nothing more to gain.
    (2.0, 1.5, -2.4, 0.0),
    # Good and less likely: max(−1, −1.6), pulled back up; d(−A r)/d log π = −A r.
    (2.0, 0.5, -1.0, -1.0),
    (-2.0, 1.5, 3.0, 3.0),  # bad and likelier: max(3, 2.4), pushed back down
    # Bad and already less likely than 1 − ε: max(1, 1.6), nothing more to gain.
    (-2.0, 0.5, 1.6, 0.0),
    (2.0, 1.1, -2.2, -2.2),  # inside the range both sides are the plain surrogate
    (-2.0, 0.9, 1.8, 1.8),
])  # fmt: skip
def test_surrogate_by_hand(advantage: float, ratio: float, loss: float, slope: float) -> None:
    log_prob, old = log_ratio(ratio)
    result = objectives.surrogate_loss(log_prob, old, float64(advantage), clip=CLIP)
    assert result.tolist() == pytest.approx([loss])
    assert gradient(result, log_prob) == pytest.approx([slope])


def test_without_clip_the_surrogate_is_plain() -> None:
    log_prob, old = log_ratio(0.1, 0.9, 10.0)
    result = objectives.surrogate_loss(log_prob, old, float64(2.0, -3.0, 1.0), clip=NO_CLIP)
    assert result.tolist() == pytest.approx([-0.2, 2.7, -10.0])
    assert gradient(result, log_prob) == pytest.approx([-0.2, 2.7, -10.0])


def test_log_prob_loss_by_hand() -> None:
    log_prob = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss = objectives.log_prob_loss(log_prob, torch.tensor([2.0, -3.0, 0.0]))
    assert loss.tolist() == [2, -6, 0]
    assert gradient(loss, log_prob) == [-2, 3, 0]


def test_sampled_kl_penalty_by_hand() -> None:
    log_prob = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    penalty = objectives.estimate_kl_k2(log_prob, torch.tensor([-1.4, -1.0, -0.5]))
    assert penalty.tolist() == pytest.approx([0.08, 0.5, 0.0])
    assert gradient(penalty, log_prob) == pytest.approx([0.4, -1.0, 0.0])


def test_plain_value_loss_is_half_the_squared_error() -> None:
    value = torch.tensor([3.0, -1.0], requires_grad=True)
    loss = objectives.value_loss(value, torch.tensor([1.0, 2.0]))
    assert loss.tolist() == [2, 4.5]
    assert gradient(loss, value) == [2, -3]


def test_clipped_value_loss_is_the_larger_of_two_by_hand() -> None:
    # ε = ½ around the old value 1, so that values are clipped to [½, 1½].
    cases = [
        # value, target, loss, gradient
        # max(½·1², ½·2½²): moved towards the target further than allowed, no gradient.
        (3.0, 4.0, 3.125, 0.0),
        (3.0, 0.0, 4.5, 3.0),  # max(½·3², ½·1½²): moved away from the target, pulled back
        (-1.0, -2.0, 3.125, 0.0),  # the same on the lower side: max(½·1², ½·2½²)
        (-1.0, 2.0, 4.5, -3.0),  # max(½·3², ½·1½²)
        (1.25, 0.0, 0.78125, 1.25),  # within the range: ½·1.25²
    ]
    value, target, loss, slope = (torch.tensor(column) for column in zip(*cases, strict=True))
    value.requires_grad_()
    result = objectives.value_loss(value, target, torch.ones(5), clip=0.5)
    assert result.tolist() == loss.tolist()
    assert gradient(result, value) == slope.tolist()


def test_value_loss_is_plain_without_a_range_or_without_old_values() -> None:
    value, target, old = torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([1.0])
    assert objectives.value_loss(value, target, old).tolist() == [0.5]
    assert objectives.value_loss(value, target, clip=0.5).tolist() == [0.5]


def test_approximate_kl_by_hand() -> None:
    k1, k3 = objectives.estimate_kl_k1_and_k3(*log_ratio(2.0, 0.5, 1.0))
    assert k1.tolist() == pytest.approx([-math.log(2), math.log(2), 0])
    assert k3.tolist() == pytest.approx([1 - math.log(2), -0.5 + math.log(2), 0])


def test_k3_is_never_negative() -> None:
    generator = Generator().manual_seed(0)
    for size in (1e-6, 1e-4, 1e-2, 1.0, 5.0):
        difference = torch.randn(1000, generator=generator) * size
        _, k3 = objectives.estimate_kl_k1_and_k3(difference, torch.zeros(1000))
        exact = difference.double().exp() - 1 - difference.double()
        assert k3.min().item() >= 0 and k3.mean().item() == pytest.approx(exact.mean().item(), 0.2)


def test_clipped_fraction_by_hand() -> None:
    log_prob, old = log_ratio(0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0)
    for clip, marked in ((CLIP, [1, 1, 0, 0, 0, 1, 1]), (NO_CLIP, [0] * 7)):
        assert objectives.mark_clipped_ratios(log_prob, old, clip=clip).tolist() == marked


@pytest.mark.parametrize(("kl", "coef"), [
    (4.51, 20.0), (4.5, 10.0), (3.0, 10.0), (2.0, 10.0), (1.99, 5.0), (0.0, 5.0), (-1.0, 5.0),
    (math.inf, 20.0), (math.nan, 10.0),
])  # fmt: skip
def test_kl_coefficient_by_hand(kl: float, coef: float) -> None:
    """The coefficient moves above 1.5 · 3 and below 3 / 1.5."""
    assert objectives.adapt_kl_coef(10.0, kl, target=3.0) == coef


def test_kl_coefficient_stays_where_it_can_come_back_from() -> None:
    coef = 1.0
    for _ in range(2000):  # 1100 halvings would end at 0
        coef = objectives.adapt_kl_coef(coef, 0.0, target=0.01)
    assert coef == 1e-6
    for _ in range(2000):  # and as many doublings at infinity
        coef = objectives.adapt_kl_coef(coef, 1.0, target=0.01)
    assert coef == 1e6
    assert objectives.adapt_kl_coef(coef, 0.0, target=0.01) == 5e5


@pytest.mark.parametrize(("kl", "rate"), [
    (4.01, 2e-3), (4.0, 3e-3), (2.0, 3e-3), (1.0, 3e-3), (0.99, 4.5e-3), (1e-9, 4.5e-3),
    (0.0, 3e-3), (-0.5, 3e-3), (math.inf, 2e-3), (math.nan, 3e-3),
])  # fmt: skip
def test_learning_rate_by_hand(kl: float, rate: float) -> None:
    """The rate moves above 2 · 2 and below 2 / 2, but not at 0: nothing moved or was measured."""
    assert objectives.adapt_learning_rate(3e-3, kl, target=2.0) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("rate", "kl", "times", "end"), [
    (1e-3, 1.0, 50, 1e-5),
    (1e-5, 1e-4, 50, 1e-2),
    (4e-6, 1.0, 1, 4e-6),  # not raised to 1e-5 because the divergence is too large
    (0.05, 1e-4, 1, 0.05),  # not lowered to 1e-2 because it is too small
    (4e-6, 1e-4, 1, 6e-6),
    (0.06, 1.0, 1, 0.04),
])  # fmt: skip
def test_learning_rate_keeps_to_its_bounds(rate: float, kl: float, times: int, end: float) -> None:
    for _ in range(times):
        rate = objectives.adapt_learning_rate(rate, kl, target=0.01)
    assert rate == pytest.approx(end, rel=1e-12)
