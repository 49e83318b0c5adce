"""Distributions against SciPy and sums written out, and what masks and equal policies promise exactly."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import scipy.stats
import torch
from torch import Generator, Tensor

from phasicrl.models.heads import CategoricalHead, CategoricalPolicy, make_policy_head

S, L, A, D = 3, 4, 5, 6
MASK = torch.tensor([True, False, True, True, False])


def random_logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, size: float = 2.0) -> Tensor:
    return size * torch.randn(*shape, dtype=dtype, generator=Generator().manual_seed(seed))


def policy_of(logits: Tensor) -> CategoricalPolicy:
    return CategoricalPolicy(logits.log_softmax(-1))


def make_head(scale: float = 2.0) -> CategoricalHead:
    return CategoricalHead(D, A, init="normalized", scale=scale, generator=Generator().manual_seed(0))


def features(seed: int = 0) -> Tensor:
    return torch.randn(S, L, D, generator=Generator().manual_seed(seed))


def probabilities(logits: Tensor) -> np.ndarray:
    exponentials = np.exp(logits.numpy())
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_log_prob_is_that_of_the_action_taken() -> None:
    logits = random_logits(S, L, A)
    action = torch.randint(0, A, (S, L), generator=Generator().manual_seed(1))
    result = policy_of(logits).log_prob(action)
    for index in np.ndindex(S, L):
        expected = scipy.stats.rv_discrete(values=(range(A), probabilities(logits)[index])).logpmf(action[index].item())
        assert result[index].item() == pytest.approx(expected)


def test_entropy_and_divergence_are_scipys() -> None:
    new, old = random_logits(S, L, A, seed=1), random_logits(S, L, A, seed=2)
    entropy = scipy.stats.entropy(probabilities(new), axis=-1)
    divergence = scipy.stats.entropy(probabilities(old), probabilities(new), axis=-1)  # KL(old ‖ new): the old policy comes first
    np.testing.assert_allclose(policy_of(new).entropy().numpy(), entropy, rtol=1e-12)
    np.testing.assert_allclose(policy_of(new).kl_from(policy_of(old)).numpy(), divergence, rtol=1e-12)


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
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    number = 20_000
    action = CategoricalPolicy(probs.log().float().expand(number, 2, 4)).sample(Generator().manual_seed(0))
    assert action.shape == (number, 2)
    assert action.dtype == torch.int64
    counts = torch.nn.functional.one_hot(action, 4).sum(0)
    for row in range(2):
        assert scipy.stats.chisquare(counts[row].numpy(), number * probs[row].numpy()).pvalue > 0.01
    # The two columns are drawn independently of each other.
    pairs = torch.bincount(action[:, 0] * 4 + action[:, 1], minlength=16).reshape(4, 4)
    assert float(np.asarray(scipy.stats.chi2_contingency(pairs.numpy())[1])) > 0.01


def test_draws_follow_from_the_generator_and_go_on_in_it() -> None:
    policy, generator = policy_of(random_logits(S, L, A)), Generator().manual_seed(0)
    first, second = policy.sample(generator), policy.sample(generator)
    assert torch.equal(first, policy.sample(Generator().manual_seed(0)))
    assert not torch.equal(first, second)


def test_mode_is_the_most_likely_action() -> None:
    assert policy_of(torch.tensor([[0.1, 3.0, 2.0], [5.0, -1.0, 4.9]])).mode().tolist() == [1, 0]


def test_equal_policies_have_exactly_no_divergence_and_no_gradient() -> None:
    head = make_head()
    policy = head(features())
    old = head.distribution(policy.parameters.detach().clone())
    divergence = policy.kl_from(old)
    assert divergence.tolist() == [[0.0] * L] * S
    divergence.mean().backward()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("step", [1e-7, 1e-5, 1e-3, 1e-1, 1.0])
def test_the_divergence_is_never_negative_beyond_rounding(step: float) -> None:
    logits, change = random_logits(5000, A, dtype=torch.float32), random_logits(5000, A, seed=1, dtype=torch.float32, size=step)
    assert policy_of(logits + change).kl_from(policy_of(logits)).min().item() > -3e-7
    logits, change = logits.double(), change.double()
    assert policy_of(logits + change).kl_from(policy_of(logits)).min().item() > -1e-15


def test_masked_actions_have_no_probability_and_are_never_drawn() -> None:
    policy = make_head()(features(), MASK.expand(S, L, A))
    assert not policy.log_probs.exp()[..., ~MASK].any()
    torch.testing.assert_close(policy.log_probs.exp()[..., MASK].sum(-1), torch.ones(S, L))
    generator = Generator().manual_seed(0)
    drawn = torch.stack([policy.sample(generator) for _ in range(500)])
    assert set(drawn.unique().tolist()) == {0, 2, 3}
    assert MASK[policy.mode()].all()


def test_a_mask_leaves_the_distribution_over_what_is_allowed() -> None:
    head = make_head()
    masked, free = head(features(), MASK.expand(S, L, A)), head(features())
    old = head(features(1), MASK.expand(S, L, A))
    p, q = (policy.log_probs.detach().double().exp()[..., MASK].numpy() for policy in (old, masked))
    torch.testing.assert_close(masked.log_probs[..., MASK], free.log_probs[..., MASK].log_softmax(-1))
    np.testing.assert_allclose(masked.entropy().detach().numpy(), scipy.stats.entropy(q, axis=-1), rtol=1e-4)
    np.testing.assert_allclose(masked.kl_from(old).detach().numpy(), scipy.stats.entropy(p, q, axis=-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of", ["log_prob", "entropy", "kl_from"])
def test_masked_actions_get_no_gradient(of: str) -> None:
    head = make_head()
    mask = MASK.expand(S, L, A)
    policy = head(features(), mask)
    if of == "log_prob":
        loss = policy.log_prob(torch.full((S, L), 2))
    elif of == "entropy":
        loss = policy.entropy()
    else:
        loss = policy.kl_from(head.distribution(head(features(1), mask).parameters.detach()))
    loss.sum().backward()
    for gradient in (head.linear.weight.grad, head.linear.bias.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert not gradient[~MASK].any()
        assert (gradient[MASK] != 0).all()


def test_masks_hold_for_their_own_step_only() -> None:
    mask = torch.ones(S, L, A, dtype=torch.bool)
    mask[1, 2] = torch.tensor([False, False, False, True, False])
    head = make_head()
    policy, free = head(features(), mask), head(features())
    assert policy.log_prob(torch.full((S, L), 3))[1, 2] == 0  # a single allowed action is certain
    assert policy.entropy()[1, 2] == 0
    others = mask.all(-1)
    assert torch.equal(policy.log_probs[others], free.log_probs[others])


def test_a_policy_is_made_again_exactly_from_its_parameters() -> None:
    head = make_head()
    for mask in (None, MASK.expand(S, L, A)):
        policy = head(features(), mask)
        again = head.distribution(policy.parameters.clone())
        action = policy.sample(Generator().manual_seed(1))
        assert torch.equal(again.log_prob(action), policy.log_prob(action))
        assert torch.equal(again.entropy(), policy.entropy())
        assert torch.equal(again.sample(Generator().manual_seed(1)), action)
        assert policy.parameters.shape == (S, L, A)


def test_the_head_follows_the_action_space() -> None:
    head = make_policy_head(gym.spaces.Discrete(7), D, init="normalized", scale=0.1, generator=Generator().manual_seed(0))
    assert head.num_actions == 7
    assert head(features()).log_probs.shape == (S, L, 7)


@pytest.mark.parametrize("space", [gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Dict()])
def test_other_action_spaces_are_refused_with_what_is_supported(space: gym.Space[object]) -> None:
    with pytest.raises(ValueError, match=r"are not supported; supported: Discrete"):
        make_policy_head(space, D, init="normalized", scale=0.1, generator=Generator())
