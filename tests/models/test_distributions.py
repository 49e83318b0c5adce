"""Distributions against SciPy, integrals and sums written out."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Generator, Tensor

from phasicrl.models import distributions
from phasicrl.models.distributions import Categorical, Normal, TanhNormal

S, L, A = 3, 4, 5
F64 = torch.float64


def normal(mean: Any, std: Any) -> Any:
    return scipy.stats.norm(mean, std)  # whose stubs say that it is discrete


def random_logits(*shape: int, seed: int = 0, size: float = 2.0, dtype: Any = F64) -> Tensor:
    return size * torch.randn(*shape, dtype=dtype, generator=Generator().manual_seed(seed))


def policy_of(logits: Tensor) -> Categorical:
    return Categorical(logits.log_softmax(-1))


def probabilities(logits: Tensor) -> np.ndarray:
    exponentials = np.exp(logits.numpy())
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_numbers_of_discrete_policies_are_scipys() -> None:
    new, old = random_logits(S, L, A, seed=1), random_logits(S, L, A, seed=2)
    p, q = probabilities(old), probabilities(new)
    policy, entropy = policy_of(new), scipy.stats.entropy(q, axis=-1)
    # KL(old ‖ new): the old policy comes first.
    divergence = scipy.stats.entropy(p, q, axis=-1)
    np.testing.assert_allclose(policy.entropy(), entropy, rtol=1e-12)
    np.testing.assert_allclose(policy.kl_from(policy_of(old)), divergence, rtol=1e-12)
    action = torch.randint(0, A, (S, L), generator=Generator().manual_seed(1))
    expected = np.log(np.take_along_axis(q, action.numpy()[..., None], -1))[..., 0]
    np.testing.assert_allclose(policy.log_prob(action), expected, rtol=1e-12)


def test_the_divergences_gradient_is_the_difference_of_the_probabilities() -> None:
    # ∂ KL(p ‖ q) / ∂ logits of q = q − p.
    new, old = random_logits(S, L, A, seed=1).requires_grad_(), random_logits(S, L, A, seed=2)
    (gradient,) = torch.autograd.grad(policy_of(new).kl_from(policy_of(old)).sum(), new)
    torch.testing.assert_close(gradient, new.detach().softmax(-1) - old.softmax(-1))


def test_probabilities_add_up_to_one_however_large_the_logits() -> None:
    policy = policy_of(torch.tensor([[1000.0, 0.0, -1000.0], [1e30, 1e30, 0.0]]))
    torch.testing.assert_close(policy.log_probs.exp().sum(-1), torch.ones(2))
    assert policy.entropy().tolist() == pytest.approx([0, math.log(2)])


def test_actions_are_drawn_by_their_probabilities() -> None:
    probs, number = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]), 20_000
    action = Categorical(probs.log().expand(number, 2, 4)).sample(Generator().manual_seed(0))
    assert action.shape == (number, 2) and action.dtype == torch.int64
    pairs = torch.bincount(action[:, 0] * 4 + action[:, 1], minlength=16).reshape(4, 4).numpy()
    for counts, expected in zip((pairs.sum(1), pairs.sum(0)), probs.double().numpy(), strict=True):
        expected = number * expected / expected.sum()
        assert scipy.stats.chisquare(counts, expected).pvalue > 0.01
    # The two columns are drawn independently of each other.
    assert float(np.asarray(scipy.stats.chi2_contingency(pairs)[1])) > 0.01


def test_draws_follow_from_the_generator_and_continue_in_it() -> None:
    policy, generator = policy_of(random_logits(S, L, A)), Generator().manual_seed(0)
    first, second = policy.sample(generator), policy.sample(generator)
    assert torch.equal(first, policy.sample(Generator().manual_seed(0)))
    assert not torch.equal(first, second)


def test_mode_is_the_most_likely_action() -> None:
    assert policy_of(torch.tensor([[0.1, 3.0, 2.0], [5.0, -1.0, 4.9]])).mode().tolist() == [1, 0]


@pytest.mark.parametrize("step", [1e-7, 1e-5, 1e-3, 1e-1, 1.0])
def test_the_divergence_is_never_negative_beyond_rounding(step: float) -> None:
    for dtype, least in ((torch.float32, -3e-7), (torch.float64, -1e-15)):
        logits = random_logits(5000, A, dtype=torch.float32).to(dtype)
        change = random_logits(5000, A, seed=1, dtype=torch.float32, size=step).to(dtype)
        assert policy_of(logits + change).kl_from(policy_of(logits)).min().item() > least


MEAN = torch.tensor([[-1.5, 0.0, 0.3], [2.0, -0.4, 3.0]], dtype=F64)
STD = torch.tensor([[0.1, 1.0, 2.5], [0.7, 0.02, 0.4]], dtype=F64)


def test_normal_log_probability_and_entropy_are_scipys() -> None:
    action = MEAN + torch.tensor([-2.0, 0.5, 3.0]) * STD
    reference, policy = normal(MEAN.numpy(), STD.numpy()), Normal(MEAN, STD)
    log_prob, entropy = reference.logpdf(action.numpy()), np.asarray(reference.entropy())
    np.testing.assert_allclose(policy.log_prob(action).numpy(), log_prob, rtol=1e-12)
    np.testing.assert_allclose(policy.entropy().numpy(), entropy, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Normal, TanhNormal])
def test_normal_divergence_is_the_mean_difference_of_log_probs(kind: type[Normal]) -> None:
    # The tanh is one to one, so it changes both log-probabilities by the same number.
    old, new = kind(MEAN[0], STD[0]), kind(MEAN[0] + 0.1, 1.5 * STD[0])
    action = kind(MEAN[0].expand(100_000, 3), STD[0]).sample(Generator().manual_seed(0))
    difference = (old.log_prob(action) - new.log_prob(action)).numpy()
    error = difference.std(0) / math.sqrt(len(difference))
    found, swapped = new.kl_from(old).numpy(), old.kl_from(new).numpy()
    assert (np.abs(difference.mean(0) - found) < 4 * error).all()
    assert (np.abs(difference.mean(0) - swapped) > 4 * error).all()  # the old policy comes first


@pytest.mark.parametrize("step", [1e-5, 1e-3, 1e-1])
def test_small_normal_divergences_survive_single_precision(step: float) -> None:
    numbers: Any = {"dtype": torch.float32}
    mean, log_std = random_logits(5000, **numbers), random_logits(5000, seed=1, size=0.5, **numbers)
    change = random_logits(5000, seed=2, size=step, **numbers)
    old, new = Normal(mean, log_std.exp()), Normal(mean, (log_std + change).exp())
    exact = Normal(mean.double(), new.std.double()).kl_from(Normal(mean.double(), old.std.double()))
    assert exact.min() >= 0
    torch.testing.assert_close(new.kl_from(old).double(), exact, rtol=1e-6, atol=2e-6 * step)


def test_normal_divergence_is_the_integral() -> None:
    p, q = normal(0.3, 0.5), normal(-0.2, 0.8)
    integral = scipy.integrate.quad(lambda u: p.pdf(u) * (p.logpdf(u) - q.logpdf(u)), -6, 6)[0]
    numbers = torch.tensor([[0.3, 0.5], [-0.2, 0.8]], dtype=F64)
    old, new = (Normal(*pair) for pair in numbers)
    assert new.kl_from(old).item() == pytest.approx(integral, rel=1e-8)


def test_normal_draws_are_normal_and_independent() -> None:
    policy = Normal(MEAN[0].float().expand(10_000, 3), STD[0].float())
    action = policy.sample(Generator().manual_seed(0)).numpy()
    for column, mean, std in zip(action.T, MEAN[0].tolist(), STD[0].tolist(), strict=True):
        assert scipy.stats.kstest(column, "norm", (mean, std)).pvalue > 0.01
    assert np.abs(np.corrcoef(action.T) - np.eye(3)).max() < 0.03
    assert np.abs(np.corrcoef(action[1:, 0], action[:-1, 0])[0, 1]) < 0.03


def test_the_squashs_correction_is_exact_where_the_tanh_has_rounded_to_one() -> None:
    def correction(u: Tensor) -> Tensor:
        one = torch.ones_like(u)
        return Normal(u, one).log_prob(u) - TanhNormal(u, one).log_prob(u)

    moderate = torch.tensor([-5.0, -1.0, 0.0, 0.3, 4.0], dtype=F64)
    slope = 1 - moderate.tanh() ** 2
    torch.testing.assert_close(correction(moderate), slope.log(), rtol=1e-9, atol=1e-12)
    large = torch.tensor([-1000.0, -30.0, -10.5, 10.5, 30.0, 1000.0], dtype=F64)
    # log sech², for either sign
    exact = 2 * math.log(2) - 2 * large.abs() - 2 * (-2 * large.abs()).exp().log1p()
    torch.testing.assert_close(correction(large), exact, rtol=1e-13, atol=0)
    torch.testing.assert_close(correction(large.float()), exact.float())


def log_slope(u: np.ndarray) -> np.ndarray:
    return 2 * (np.log(2) - np.abs(u) - np.log1p(np.exp(-2 * np.abs(u))))


@pytest.mark.parametrize(
    ("greatest", "tolerance"), [(1.5, 3e-7), (2.0, 1e-6), (3.0, 1e-4), (5.0, 3e-3)]
)
def test_the_squashed_entropy_is_near_to_the_integral(greatest: float, tolerance: float) -> None:
    mean, std = np.meshgrid(np.linspace(-3, 3, 25), np.geomspace(0.01, greatest, 25))
    grid = np.linspace(-9, 9, 1201)
    weights = scipy.stats.norm.pdf(grid)
    slopes = log_slope(mean[..., None] + std[..., None] * grid)
    expected = normal(mean, std).entropy() + slopes @ (weights / weights.sum())
    entropy = TanhNormal(torch.from_numpy(mean), torch.from_numpy(std)).entropy()
    np.testing.assert_allclose(entropy.numpy(), expected, rtol=0, atol=tolerance)


def test_what_a_gpu_keeps_for_the_entropy_serves_training_too() -> None:
    """An evaluation in inference mode may be the first to ask.

    A gradient step could not save tensors of that mode.
    """
    where = torch.device("meta"), torch.float32
    distributions._trapezoid.cache_clear()
    with torch.inference_mode():
        made = distributions._trapezoid(*where)
    assert distributions._trapezoid(*where) is made
    assert not any(part.is_inference() for part in made)
