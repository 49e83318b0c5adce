"""Losses, and rules that adapt coefficients to the KL divergence. Kind: pure mathematics.

Losses are elementwise, of one sample or of M, so that their means over micro-batches of any size
add up exactly. Value losses are half the squared error (PPG paper, equation 2), so that OPPG's
`vfcoef` of 0.5 is a weight of 1 here.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def weighted_mean(
    values: Float[Tensor, "*M"], weight: Float[Tensor, "*M"] | None = None
) -> Float[Tensor, ""]:
    """Return the mean of values `[M]`, weighted if there are weights `[M]`.

    Weights have a mean of 1 over the batch, not over each minibatch, so that the means of equal
    minibatches average to the batch's weighted mean.
    """
    return values.mean() if weight is None else (values * weight).mean()


def surrogate_loss(
    log_prob: Float[Tensor, "*M"],
    old_log_prob: Float[Tensor, "*M"],
    advantage: Float[Tensor, "*M"],
    *,
    clip: Float[Tensor, ""],
) -> Float[Tensor, "*M"]:
    """Return the negative clipped surrogate `max(−A r, −A clip(r, 1−ε, 1+ε))`, `[M]`.

    Source: PPO paper, equation 7. With an infinite `clip`, the loss is `−A r` (equation 6).

    Args:
        log_prob: log-probabilities of the actions under the current policy, `[M]`.
        old_log_prob: log-probabilities under the behavior policy, `[M]`.
        advantage: advantages A, `[M]`.
        clip: clip range ε of the ratio r.
    """
    ratio = (log_prob - old_log_prob).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))


MAX_RATIO = 100.0
"""Maximum probability ratio to the behavior policy (openai/ppo-ewma, ppo.py:126-128)."""


def decoupled_surrogate_loss(
    log_prob: Float[Tensor, "*M"],
    proximal_log_prob: Float[Tensor, "*M"],
    old_log_prob: Float[Tensor, "*M"],
    advantage: Float[Tensor, "*M"],
    *,
    clip: Float[Tensor, ""],
) -> Float[Tensor, "*M"]:
    """Return the surrogate loss of PPO-EWMA, clipped around the proximal policy, `[M]`.

    The loss is `max(−A r, −A p clip(r / p, 1−ε, 1+ε))` with `r = π / π_old` and `p = π_prox /
    π_old`, computed from logarithms. Ratios of old data can be huge, and are limited to
    `MAX_RATIO`. With `π_prox = π_old` the loss equals `surrogate_loss`.

    Source: Hilton et al. 2021 (arXiv 2110.00641), section 3.

    Args:
        log_prob: log-probabilities of the actions under the current policy π, `[M]`.
        proximal_log_prob: log-probabilities under the proximal policy, `[M]`.
        old_log_prob: log-probabilities under the behavior policy, `[M]`.
        advantage: advantages A, `[M]`.
        clip: clip range ε; infinite clips nothing.
    """
    old_log_prob = torch.maximum(old_log_prob, log_prob.detach() - math.log(MAX_RATIO))
    loss = -advantage * (log_prob - old_log_prob).exp()
    bounds = ((1 - clip).clamp(min=0).log(), (1 + clip).log())
    clipped = (log_prob - proximal_log_prob).clamp(*bounds) + proximal_log_prob
    return torch.maximum(loss, -advantage * (clipped - old_log_prob).exp())


def log_prob_loss(
    log_prob: Float[Tensor, "*M"], advantage: Float[Tensor, "*M"]
) -> Float[Tensor, "*M"]:
    """Return the loss `−A log π(a)` of REINFORCE and actor-critic for each sample, `[M]`.

    Its gradient is the policy gradient only for the policy that drew the actions: use one epoch.

    Source: Spinning Up vpg.py:216.
    """
    return -advantage * log_prob


def estimate_kl_k2(
    log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"]
) -> Float[Tensor, "*M"]:
    """Estimate the KL divergence by half the squared log-ratio of each action, `[M]`.

    Source: the penalty of OPPG ppo.py:104.
    """
    return 0.5 * (log_prob - old_log_prob).square()


def value_loss(
    value: Float[Tensor, "*M"],
    target: Float[Tensor, "*M"],
    old_value: Float[Tensor, "*M"] | None = None,
    *,
    clip: float | None = None,
) -> Float[Tensor, "*M"]:
    """Return the value loss, half the squared error, of each sample, `[M]`.

    With `clip`, return the larger of it and the error of the clipped value, which is within ± clip
    of the rollout's `old_value` (Baselines ppo2/model.py:72-80).
    """
    loss = 0.5 * (value - target).square()
    if clip is None or old_value is None:
        return loss
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, 0.5 * (clipped - target).square())


def estimate_kl_k1_and_k3(
    log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"]
) -> tuple[Float[Tensor, "*M"], Float[Tensor, "*M"]]:
    """Estimate KL(old ‖ new) per sample, `[M]`, from actions of the old policy, in two ways.

    Returns:
        `−log r` (k1), and `(r − 1) − log r` (k3), which is never negative.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    log_ratio = log_prob - old_log_prob
    return -log_ratio, log_ratio.expm1() - log_ratio


def mark_clipped_ratios(
    log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"], *, clip: Float[Tensor, ""]
) -> Float[Tensor, "*M"]:
    """Return 1 for each sample whose probability ratio is outside `1 ± ε`, else 0, `[M]`."""
    return (((log_prob - old_log_prob).exp() - 1).abs() > clip).to(log_prob.dtype)


def adapt_kl_coef(coef: float, kl: float, *, target: float) -> float:
    """Adapt the weight β of the KL penalty to the KL of an iteration, and return the new β.

    β is halved below `target / 1.5` and doubled above `1.5 target`, within [1e-6, 1e6], so that it
    neither vanishes nor takes many iterations to recover. With a NaN, β is unchanged.

    Source: PPO paper, section 4.

    Args:
        coef: β of this iteration.
        kl: KL divergence of this iteration; a negative estimate halves β.
        target: target of the KL divergence.
    """
    if kl < target / 1.5:
        coef /= 2
    elif kl > 1.5 * target:
        coef *= 2
    return min(max(coef, 1e-6), 1e6)


def adapt_learning_rate(rate: float, kl: float, *, target: float) -> float:
    """Adapt a learning rate to the KL of a minibatch, and return the new rate.

    The rate is divided by 1.5 above `2 target` and multiplied by 1.5 below `target / 2`, within
    [1e-5, 1e-2]. A rate outside of that never moves further out; unlike in rsl_rl, it is not set to
    the bound, which would raise a small rate when the KL is too large. With a KL of 0 (of a policy
    that did not move), below 0 or NaN, the rate is unchanged.

    Source: rsl_rl ppo.py:246-249.

    Args:
        rate: learning rate so far.
        kl: mean KL divergence of a minibatch.
        target: target of the KL divergence.
    """
    if kl > 2 * target:
        return max(rate / 1.5, min(rate, 1e-5))
    return min(rate * 1.5, max(rate, 1e-2)) if 0 < kl < target / 2 else rate
