"""Returns and advantages. Kind: pure mathematics; imports torch only.

Time runs along the last axis: everything is `[B, T]`, B environments of T steps. Inside these
functions there is no `done`: a termination has nothing after it, a truncation has the value of the
observation in which the episode was cut.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional


def gae(
    reward: Float[Tensor, "B T"],
    value: Float[Tensor, "B T"],
    next_value: Float[Tensor, "B T"],
    terminated: Bool[Tensor, "B T"],
    truncated: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "B T"]:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16).

    `δ_t = r_t + γ V(s'_t) − V(s_t)` and `A_t = δ_t + γ λ A_{t+1}`, where `s'_t` is what the step
    led to: `next_value` holds the value of the final observation where an episode was truncated,
    else of the next one. A termination has no next value; the sum stops at both kinds of end.

    Args:
        reward: rewards, in the units in which the values are.
        value: V(s_t).
        next_value: V(s'_t); ignored where `terminated`.
        terminated: the episode ended by the environment's rules.
        truncated: the episode was cut.
        gamma: discount γ.
        gae_lambda: λ; 0 gives one-step advantages, 1 Monte-Carlo returns minus values.
    """
    delta = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    keep = gamma * gae_lambda * (~(terminated | truncated)).to(delta.dtype)
    return _reverse_discounted_sum(delta, keep)


def _reverse_discounted_sum(
    term: Float[Tensor, "B T"], keep: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """`x_t = term_t + keep_t x_{t+1}`, with nothing after the last.

    It takes log₂ T passes over everything instead of T over one step, by doubling (Hillis & Steele
    1986): after k passes each sum reaches 2ᵏ steps ahead, and so does the product of what is kept.
    """
    reach = 1
    while reach < term.shape[1]:
        term = term + keep * functional.pad(term[:, reach:], (0, reach))
        keep = keep * functional.pad(keep[:, reach:], (0, reach))
        reach *= 2
    return term


def n_step_return(
    reward: Float[Tensor, "B T"],
    value: Float[Tensor, "B T"],
    next_value: Float[Tensor, "B T"],
    terminated: Bool[Tensor, "B T"],
    truncated: Bool[Tensor, "B T"],
    *,
    gamma: float,
    n: int,
) -> Float[Tensor, "B T"]:
    """`r_t + γ r_{t+1} + … + γ^{n-1} r_{t+n-1} + γ^n V(s_{t+n})`, shorter before an end.

    That is equation 7.1 of Sutton & Barto 2018. By recursion over the number of steps: `G⁰_t =
    V(s_t)` and `Gᵏ_t = r_t + γ Gᵏ⁻¹_{t+1}`, each for all steps at once. Where an episode or the
    rollout ends, only what the last step led to follows: nothing after a termination, else its
    `next_value`.

    Args:
        reward: rewards, in the units in which the values are.
        value: V(s_t); that of an episode's later steps is what the earlier ones are bootstrapped
            from.
        next_value: V(s'_t) as in `gae`; looked at only where an episode was truncated, and in the
            last step.
        terminated: the episode ended by the environment's rules.
        truncated: the episode was cut.
        gamma: discount γ.
        n: rewards before the value; 1 gives TD(0) targets, T or more the same as
            `monte_carlo_return`.
    """
    cut = terminated | truncated
    cut[:, -1] = True
    at_cut = reward + gamma * torch.where(terminated, 0.0, next_value)
    result = value
    for _ in range(min(n, reward.shape[1])):
        # What rolls over the edge lands on a cut.
        result = torch.where(cut, at_cut, reward + gamma * result.roll(-1, dims=1))
    return result


def monte_carlo_return(
    reward: Float[Tensor, "B T"],
    next_value: Float[Tensor, "B T"],
    terminated: Bool[Tensor, "B T"],
    truncated: Bool[Tensor, "B T"],
    *,
    gamma: float,
) -> Float[Tensor, "B T"]:
    """Discounted rewards to go, to the end of the episode (REINFORCE; Spinning Up vpg.py:66-67).

    An episode that a time limit or the rollout's end cuts off is bootstrapped from `next_value`:
    the sum is then what GAE with λ = 1 adds to the value. Without a value function pass zeros: an
    unfinished episode then counts as if nothing more had been earned, so its returns are too low,
    the more so the later the step; rollouts of many episodes keep that share small.

    Args:
        reward: rewards, in the units in which the values are.
        next_value: V(s'_t) as in `gae`; looked at only where an episode was truncated, and in the
            last step.
        terminated: the episode ended by the environment's rules.
        truncated: the episode was cut.
        gamma: discount γ.
    """
    cut = truncated.clone()
    cut[:, -1] = True
    after_cut = torch.where(cut & ~terminated, next_value, 0.0)
    keep = gamma * (~(terminated | cut)).to(reward.dtype)
    return _reverse_discounted_sum(reward + gamma * after_cut, keep)


def complete_episode_mask(
    first: Bool[Tensor, "B T"], ended: Bool[Tensor, "B T"], *, at_most: int | None = None
) -> Bool[Tensor, "B T"]:
    """Which steps belong to an episode that begins in the first half of the rollout.

    All of such an episode is there. Nothing that happens in an episode decides whether it counts,
    so that short ones do not count more often than they are played, as they would if the unfinished
    ones were dropped.

    Args:
        first: the step begins an episode.
        ended: the episode ends with the step.
        at_most: so many episodes, in the order in which they begin; those that begin at the same
            step in the order of their environments.

    Raises:
        ValueError: one of them is longer than half a rollout, and does not end in it; or none
            begins there, which is so only after one that is longer.
    """
    half = first.shape[1] // 2
    place = torch.arange(first.shape[1], device=first.device)
    begin = torch.where(first, place, -1).cummax(1).values
    counts = (begin >= 0) & (begin <= half)
    if (counts[:, -1] & ~ended[:, -1]).any() or not counts.any():
        raise ValueError(
            f"an episode is longer than {half} steps, half a rollout; with ppo.collect_by episodes "
            "give ppo.num_steps of at least twice the longest episode"
        )
    if at_most is not None:
        # How many have begun, with each; a step has the number of its episode's beginning.
        number = first.T.flatten().cumsum(0).view(first.T.shape).T
        counts &= number.gather(1, begin.clamp(min=0)) <= at_most
    return counts


def discounted_forward_return(
    reward: Float[Tensor, "B T"],
    reset_before: Bool[Tensor, "B T"],
    start: Float[Tensor, " B"],
    *,
    gamma: float,
) -> Float[Tensor, "B T"]:
    """Running discounted sum `R_t = r_t + γ R_{t-1}`, without `R_{t-1}` where it starts anew.

    Args:
        reward: unnormalized rewards.
        reset_before: where the sum before the step is dropped: at the first step of an episode, so
            that the reward of an episode's last step still belongs to it (OPPG
            reward_normalizer.py:91-105).
        start: the sum after the step before the first one here.
        gamma: discount γ.
    """
    keep = gamma * (~reset_before).to(reward.dtype)
    first = reward[:, :1] + keep[:, :1] * start.unsqueeze(1)
    return _reverse_discounted_sum(
        torch.cat([first, reward[:, 1:]], dim=1).flip(1), keep.flip(1)
    ).flip(1)


def explained_variance(value: Float[Tensor, "*shape"], target: Float[Tensor, "*shape"]) -> float:
    """`1 − Var(target − value) / Var(target)`: 1 is perfect, 0 no better than a constant.

    NaN for a constant target.
    """
    # Not by the variance: rounding leaves some even of equal numbers.
    if target.max() == target.min():
        return float("nan")
    return float(1 - (target - value).var(correction=0) / target.var(correction=0))


def normalize(
    advantage: Float[Tensor, "*shape"],
    *,
    unbiased: bool = False,
    eps: float = 1e-8,
    by_row: bool = False,
    weight: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Shift and scale to mean 0 and variance 1.

    Args:
        advantage: n samples.
        unbiased: squares are divided by n − 1, as by PyTorch (CleanRL, SB3); else by n, as by NumPy
            (OPPG, Baselines, Spinning Up).
        eps: added to the deviation.
        by_row: each row `[…, n]` by itself.
        weight: 0 where a sample does not count, one other number elsewhere; None: all count.
    """
    axis = -1 if by_row else None
    if weight is None:
        mean = advantage.mean(axis, keepdim=by_row)
        variance = advantage.var(axis, correction=int(unbiased), keepdim=by_row)
        return (advantage - mean) / (variance.sqrt() + eps)
    counts = (weight > 0).to(advantage.dtype)
    n = counts.sum(axis, keepdim=by_row)
    mean = (advantage * counts).sum(axis, keepdim=by_row) / n.clamp_min(1)
    squares = ((advantage - mean).square() * counts).sum(axis, keepdim=by_row)
    deviation = (squares / (n - int(unbiased)).clamp_min(1)).sqrt()
    return counts * (advantage - mean) / (deviation + eps)
