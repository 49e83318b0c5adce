"""Returns and advantages. Kind: pure mathematics; imports torch only.

Tensors are `[B, T]`: B environments, T steps. Terminations and truncations are separate: a
terminated episode has no next value, a truncated one has the value of its final observation.
"""

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
    """Compute advantages `[B, T]` by generalized advantage estimation.

    `δ_t = r_t + γ V(s'_t) − V(s_t)` and `A_t = δ_t + γ λ A_{t+1}`, where `s'_t` is the next
    observation, or the final one of a truncated episode. `V(s'_t)` is 0 after a termination, and
    `A_{t+1}` is 0 after either kind of end.

    Source: Schulman et al. 2016, equation 16.

    Args:
        reward: rewards `[B, T]`, in the units of the values.
        value: V(s_t), `[B, T]`.
        next_value: V(s'_t), `[B, T]`; ignored where `terminated`.
        terminated: whether the episode ended by the environment's rules, `[B, T]`.
        truncated: whether the episode was cut, `[B, T]`.
        gamma: discount factor γ.
        gae_lambda: λ; 0 gives one-step advantages, 1 Monte-Carlo returns minus values.
    """
    delta = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    discount = gamma * gae_lambda * (~(terminated | truncated)).to(delta.dtype)
    return _reverse_discounted_sum(delta, discount)


def _reverse_discounted_sum(
    term: Float[Tensor, "B T"], discount: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Compute `x_t = term_t + discount_t x_{t+1}`, `[B, T]`, with `x_T = 0`.

    A parallel scan takes log₂ T passes instead of T steps (Hillis & Steele 1986): after k passes
    each sum, and each product of discounts, covers 2ᵏ steps.
    """
    span = 1
    while span < term.shape[1]:
        term = term + discount * functional.pad(term[:, span:], (0, span))
        discount = discount * functional.pad(discount[:, span:], (0, span))
        span *= 2
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
    """Compute n-step returns `r_t + γ r_{t+1} + … + γ^{n-1} r_{t+n-1} + γ^n V(s_{t+n})`, `[B, T]`.

    By recursion, `G⁰_t = V(s_t)` and `Gᵏ_t = r_t + γ Gᵏ⁻¹_{t+1}`. The last step of an episode or
    the rollout bootstraps from `next_value`, or from 0 after a termination.

    Source: Sutton & Barto 2018, equation 7.1.

    Args:
        reward: rewards `[B, T]`, in the units of the values.
        value: V(s_t), `[B, T]`, from which earlier steps bootstrap.
        next_value: V(s'_t) as for `gae`, `[B, T]`; used only in the last step and where
            `truncated`.
        terminated: whether the episode ended by the environment's rules, `[B, T]`.
        truncated: whether the episode was cut, `[B, T]`.
        gamma: discount factor γ.
        n: number of rewards before the value; 1 gives TD(0) targets, T or more
            `monte_carlo_return`.
    """
    last = terminated | truncated
    last[:, -1] = True
    last_return = reward + gamma * torch.where(terminated, 0.0, next_value)
    result = value
    for _ in range(min(n, reward.shape[1])):
        # `roll` wraps the first column around into the last, where it is not used.
        result = torch.where(last, last_return, reward + gamma * result.roll(-1, dims=1))
    return result


def monte_carlo_return(
    reward: Float[Tensor, "B T"],
    next_value: Float[Tensor, "B T"],
    terminated: Bool[Tensor, "B T"],
    truncated: Bool[Tensor, "B T"],
    *,
    gamma: float,
) -> Float[Tensor, "B T"]:
    """Compute discounted rewards to the end of the episode, `[B, T]`.

    Episodes cut by a time limit or the end of the rollout bootstrap from `next_value`; the result
    is then the value plus GAE with λ = 1. Without a value function pass zeros: returns of
    unfinished episodes are then too low, which matters little if a rollout has many episodes.

    Source: Williams 1992 (REINFORCE); Spinning Up vpg.py:66-67.

    Args:
        reward: rewards `[B, T]`, in the units of the values.
        next_value: V(s'_t) as for `gae`, `[B, T]`; used only in the last step and where
            `truncated`.
        terminated: whether the episode ended by the environment's rules, `[B, T]`.
        truncated: whether the episode was cut, `[B, T]`.
        gamma: discount factor γ.
    """
    cut = truncated.clone()
    cut[:, -1] = True
    bootstrap = torch.where(cut & ~terminated, next_value, 0.0)
    discount = gamma * (~(terminated | cut)).to(reward.dtype)
    return _reverse_discounted_sum(reward + gamma * bootstrap, discount)


def mark_whole_episodes(
    first: Bool[Tensor, "B T"], ended: Bool[Tensor, "B T"], *, max_episodes: int | None = None
) -> Bool[Tensor, "B T"]:
    """Return a mask `[B, T]` of the steps of episodes that begin by the middle of a rollout.

    Training on these is unbiased; all finished episodes would favor short ones. They are complete,
    since a longer episode raises an error.

    Args:
        first: whether a step is the first of its episode, `[B, T]`.
        ended: whether the episode is terminated or truncated after the step, `[B, T]`.
        max_episodes: maximum number of episodes, in order of their first steps, then of their
            environments.

    Raises:
        ValueError: an episode is longer than half the rollout, so that it is not complete, or none
            begins by the middle.
    """
    half, steps = first.shape[1] // 2, torch.arange(first.shape[1], device=first.device)
    start = torch.where(first, steps, -1).cummax(1).values
    mask = (start >= 0) & (start <= half)
    if (mask[:, -1] & ~ended[:, -1]).any() or not mask.any():
        given = f"ppo.num_steps is {first.shape[1]}, and an episode is longer than {half} steps"
        rule = "at least twice the longest episode for ppo.collect_by episodes"
        raise ValueError(f"{given}; expected {rule}")
    if max_episodes is not None:
        # Number the episodes by their first steps; a step has the number of its episode.
        number = first.T.flatten().cumsum(0).view(first.T.shape).T
        mask &= number.gather(1, start.clamp(min=0)) <= max_episodes
    return mask


def compute_running_return(
    reward: Float[Tensor, "B T"],
    reset_before: Bool[Tensor, "B T"],
    start: Float[Tensor, " B"],
    *,
    gamma: float,
) -> Float[Tensor, "B T"]:
    """Compute the running discounted sum `R_t = r_t + γ R_{t-1}`, `[B, T]`, reset by episodes.

    Source: OPPG reward_normalizer.py:91-105.

    Args:
        reward: unnormalized rewards `[B, T]`.
        reset_before: whether `R_{t-1}` counts as 0, `[B, T]`: at the first step of an episode, so
            that the last reward still belongs to its episode.
        start: sum before the first step, `[B]`.
        gamma: discount factor γ.
    """
    discount = gamma * (~reset_before).to(reward.dtype)
    first = reward[:, :1] + discount[:, :1] * start.unsqueeze(1)
    rewards = torch.cat([first, reward[:, 1:]], dim=1)
    return _reverse_discounted_sum(rewards.flip(1), discount.flip(1)).flip(1)


def explained_variance(value: Float[Tensor, "*shape"], target: Float[Tensor, "*shape"]) -> float:
    """Return `1 − Var(target − value) / Var(target)`: 1 is perfect, 0 no better than a constant.

    NaN if the targets' standard deviation is at most 1 % of their root mean square, as in a solved
    task with equal returns, where the smallest error exceeds their variance. Both have one shape,
    `[…]`.
    """
    if target.var(correction=0) <= 1e-4 * target.square().mean():
        return float("nan")
    return float(1 - (target - value).var(correction=0) / target.var(correction=0))


def normalize_advantages(
    advantage: Float[Tensor, "*shape"],
    *,
    unbiased: bool = False,
    rowwise: bool = False,
    weight: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Normalize advantages `[…]` to mean 0 and variance 1.

    Args:
        advantage: advantages `[…]`.
        unbiased: whether squares are divided by n − 1, as in PyTorch (CleanRL, SB3), or by n, as in
            NumPy (OPPG, Baselines, Spinning Up).
        rowwise: whether each row `[…, n]` is normalized separately.
        weight: weights `[…]` of the samples, 0 or one positive number; None for equal weights.
    """
    axis = -1 if rowwise else None
    if weight is None:
        mean = advantage.mean(axis, keepdim=rowwise)
        variance = advantage.var(axis, correction=int(unbiased), keepdim=rowwise)
        return (advantage - mean) / (variance.sqrt() + 1e-8)
    counts = (weight > 0).to(advantage.dtype)
    n = counts.sum(axis, keepdim=rowwise)
    mean = (advantage * counts).sum(axis, keepdim=rowwise) / n.clamp_min(1)
    squares = ((advantage - mean).square() * counts).sum(axis, keepdim=rowwise)
    deviation = (squares / (n - int(unbiased)).clamp_min(1)).sqrt()
    return counts * (advantage - mean) / (deviation + 1e-8)
