"""Losses, and rules by which a divergence steers a weight or a step size. Kind: pure mathematics.

Imports torch only, takes numbers and never a configuration. Every loss is one per sample, so that
means over minibatches of any cut are exact; `[M]` is the samples of one gradient step. All value
losses are half the squared error (PPG paper, equation 2; OPPG's `vfcoef` 0.5 is a weight of 1 on
it).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def mean(
    values: Float[Tensor, "*M"], weight: Float[Tensor, "*M"] | None = None
) -> Float[Tensor, ""]:
    """Mean over the samples, of which each counts by its weight, if there are weights.

    Weights have a mean of 1 over the batch, not over each minibatch: what minibatches add up to is
    the batch's weighted mean.
    """
    return values.mean() if weight is None else (values * weight).mean()


def surrogate_loss(
    log_prob: Float[Tensor, "*M"],
    old_log_prob: Float[Tensor, "*M"],
    advantage: Float[Tensor, "*M"],
    *,
    clip: float | None,
) -> Float[Tensor, "*M"]:
    """Negative clipped surrogate (PPO paper, equation 7): `max(−A r, −A clip(r, 1−ε, 1+ε))`.

    Without `clip` it is the plain `−A r`.
    """
    ratio = (log_prob - old_log_prob).exp()
    loss = -advantage * ratio
    if clip is None:
        return loss
    return torch.maximum(loss, -advantage * ratio.clamp(1 - clip, 1 + clip))


MOST_WEIGHT = 100.0
"""Largest probability ratio to the policy that drew an action (openai/ppo-ewma, ppo.py:126-128)."""


def decoupled_surrogate_loss(
    log_prob: Float[Tensor, "*M"],
    proximal_log_prob: Float[Tensor, "*M"],
    old_log_prob: Float[Tensor, "*M"],
    advantage: Float[Tensor, "*M"],
    *,
    clip: float | None,
) -> Float[Tensor, "*M"]:
    """The same, clipped around another policy than the one that drew the actions.

    `max(−A r, −A p clip(r / p, 1−ε, 1+ε))` with `r = π / π_old` and `p = π_prox / π_old`
    (arXiv 2110.00641, section 3), in logarithms: ratios of old data can be huge, and so are never
    larger than `MOST_WEIGHT`. With `π_prox = π_old` it is `surrogate_loss`.
    """
    old_log_prob = torch.maximum(old_log_prob, log_prob.detach() - math.log(MOST_WEIGHT))
    loss = -advantage * (log_prob - old_log_prob).exp()
    if clip is None:
        return loss
    bounds = (math.log(1 - clip) if clip < 1 else -math.inf, math.log(1 + clip))
    near = (log_prob - proximal_log_prob).clamp(*bounds) + proximal_log_prob
    return torch.maximum(loss, -advantage * (near - old_log_prob).exp())


def log_prob_loss(
    log_prob: Float[Tensor, "*M"], advantage: Float[Tensor, "*M"]
) -> Float[Tensor, "*M"]:
    """`−A log π(a)`, whose gradient is the policy gradient: REINFORCE and actor-critic.

    As Spinning Up (vpg.py:216). Right for one pass over a rollout only: nothing holds the policy
    near the one that drew the actions.
    """
    return -advantage * log_prob


def sampled_kl_penalty(
    log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"]
) -> Float[Tensor, "*M"]:
    """Half the squared log-ratio of the actions taken: what OPPG penalizes (ppo.py:104).

    It estimates the divergence.
    """
    return 0.5 * (log_prob - old_log_prob).square()


def value_loss(
    value: Float[Tensor, "*M"],
    target: Float[Tensor, "*M"],
    old_value: Float[Tensor, "*M"] | None = None,
    *,
    clip: float | None = None,
) -> Float[Tensor, "*M"]:
    """Half the squared error; with `clip`, the larger of it and that of the clipped value.

    The value is clipped around the rollout's `old_value` (Baselines ppo2/model.py:72-80).
    """
    loss = 0.5 * (value - target).square()
    if clip is None or old_value is None:
        return loss
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, 0.5 * (clipped - target).square())


def approximate_kl(
    log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"]
) -> tuple[Float[Tensor, "*M"], Float[Tensor, "*M"]]:
    """Two per-sample estimates of KL(old ‖ new) from actions of the old policy.

    They are `−log r` (k1) and `(r − 1) − log r` (k3, never negative).
    """
    log_ratio = log_prob - old_log_prob
    return -log_ratio, log_ratio.expm1() - log_ratio


def clipped_fraction(
    log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"], *, clip: float | None
) -> Float[Tensor, "*M"]:
    """1 where the ratio left `[1 − ε, 1 + ε]`, else 0."""
    if clip is None:
        return torch.zeros_like(log_prob)
    return (((log_prob - old_log_prob).exp() - 1).abs() > clip).to(log_prob.dtype)


def joint_auxiliary_loss(
    kl: Float[Tensor, "*M"],
    aux_loss: Float[Tensor, "*M"],
    real_loss: Float[Tensor, "*M"],
    *,
    beta_clone: float,
    value_coef: float,
) -> Float[Tensor, "*M"]:
    """`β KL(π_old ‖ π) + ½ (V_aux − V̂)² + c ½ (V − V̂)²` (PPG paper, equations 3 and 2).

    As OPPG (ppg.py:178-201).

    Args:
        kl: divergence of the policy from what it was before the auxiliary phase.
        aux_loss: value loss of the auxiliary head, which stands on the policy's network.
        real_loss: value loss of the value function itself.
        beta_clone: β.
        value_coef: c; 0 trains no value function in the auxiliary phase: it then gets no gradient,
            rather than a zero one.
    """
    distillation = beta_clone * kl + aux_loss
    return distillation + value_coef * real_loss if value_coef else distillation


def adapted_kl_coef(coef: float, kl: float, *, target: float) -> float:
    """The penalty's weight β for the next iteration (PPO paper, section 4).

    It is halved below `target / 1.5`, doubled above `1.5 target`, and stays within [1e-6, 1e6].
    Beyond, it would change nothing but the number of iterations that it takes to come back, and
    after a thousand halvings it would be 0, from which no doubling leads away. A `kl` that is not a
    number changes nothing.

    Args:
        coef: β of the iteration that is over.
        kl: the divergence that it led to; an estimate below zero counts as small.
        target: the divergence wanted.
    """
    if kl < target / 1.5:
        coef /= 2
    elif kl > 1.5 * target:
        coef *= 2
    return min(max(coef, 1e-6), 1e6)


def adapted_learning_rate(rate: float, kl: float, *, target: float) -> float:
    """The step size for what comes next (rsl_rl ppo.py:246-249).

    It is divided by 1.5 above `2 target`, multiplied by it under `target / 2`. It moves within
    [1e-5, 1e-2]. A rate that was set beyond is not moved further out, and, unlike in rsl_rl, not to
    the nearer bound either, which would raise a small rate just when the divergence is too large. A
    divergence of exactly 0, of a policy that did not move or was not measured, changes nothing; nor
    does a negative estimate, or one that is not a number.

    Args:
        rate: the step size so far.
        kl: the divergence that it led to.
        target: the divergence wanted.
    """
    if kl > 2 * target:
        return max(rate / 1.5, min(rate, 1e-5))
    if 0 < kl < target / 2:
        return min(rate * 1.5, max(rate, 1e-2))
    return rate
