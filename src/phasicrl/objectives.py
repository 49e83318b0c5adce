"""Losses. Kind: pure mathematics; imports torch only, takes numbers and never a configuration.

Every function returns one loss per sample, so that means over minibatches of any cut are exact; `[M]` is the samples of one
gradient step. All value losses are half the squared error (PPG paper, equation 2; OPPG's `vfcoef` 0.5 is a weight of 1 on it).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def surrogate_loss(
    log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"], advantage: Float[Tensor, "*M"], *, clip: float | None
) -> Float[Tensor, "*M"]:
    """Negative clipped surrogate (PPO paper, equation 7): `max(−A r, −A clip(r, 1−ε, 1+ε))`; the plain `−A r` without `clip`."""
    ratio = (log_prob - old_log_prob).exp()
    loss = -advantage * ratio
    if clip is None:
        return loss
    return torch.maximum(loss, -advantage * ratio.clamp(1 - clip, 1 + clip))


def sampled_kl_penalty(log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"]) -> Float[Tensor, "*M"]:
    """Half the squared log-ratio of the actions taken: the estimate of the divergence that OPPG penalises (ppo.py:104)."""
    return 0.5 * (log_prob - old_log_prob).square()


def value_loss(
    value: Float[Tensor, "*M"], target: Float[Tensor, "*M"], old_value: Float[Tensor, "*M"] | None = None, *, clip: float | None = None
) -> Float[Tensor, "*M"]:
    """Half the squared error; with `clip`, the larger of it and that of the value clipped around the rollout's `old_value` (Baselines ppo2/model.py:72-80)."""
    loss = 0.5 * (value - target).square()
    if clip is None or old_value is None:
        return loss
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, 0.5 * (clipped - target).square())


def approximate_kl(log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"]) -> tuple[Float[Tensor, "*M"], Float[Tensor, "*M"]]:
    """Two per-sample estimates of KL(old ‖ new) from actions of the old policy: `−log r` (k1) and `(r − 1) − log r` (k3, never negative)."""
    log_ratio = log_prob - old_log_prob
    return -log_ratio, log_ratio.expm1() - log_ratio


def clipped_fraction(log_prob: Float[Tensor, "*M"], old_log_prob: Float[Tensor, "*M"], *, clip: float | None) -> Float[Tensor, "*M"]:
    """1 where the ratio left `[1 − ε, 1 + ε]`, else 0."""
    if clip is None:
        return torch.zeros_like(log_prob)
    return (((log_prob - old_log_prob).exp() - 1).abs() > clip).to(log_prob.dtype)


def joint_auxiliary_loss(
    kl: Float[Tensor, "*M"], aux_loss: Float[Tensor, "*M"], real_loss: Float[Tensor, "*M"], *, beta_clone: float, value_coef: float
) -> Float[Tensor, "*M"]:
    """`β KL(π_old ‖ π) + ½ (V_aux − V̂)² + c ½ (V − V̂)²` (PPG paper, equations 3 and 2; OPPG ppg.py:178-201).

    Args:
        kl: divergence of the policy from what it was before the auxiliary phase.
        aux_loss: value loss of the auxiliary head, which stands on the policy's network.
        real_loss: value loss of the value function itself.
        beta_clone: β.
        value_coef: c; 0 trains no value function in the auxiliary phase: it then gets no gradient, rather than a zero one.
    """
    distillation = beta_clone * kl + aux_loss
    return distillation + value_coef * real_loss if value_coef else distillation
