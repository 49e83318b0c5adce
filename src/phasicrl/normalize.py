"""Running statistics and what is scaled by them. Kind: state (modules: the statistics are part of what is saved)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from phasicrl.returns import discounted_forward_return


class RunningMoments(nn.Module):
    """Mean and variance of everything seen so far, merged batch by batch in parallel form (Chan et al. 1979), in float64."""

    count: Tensor
    mean: Tensor
    sum_of_squares: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "mean", "sum_of_squares"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def update(self, batch: Float[Tensor, "*shape"]) -> None:
        """Merge a batch in."""
        batch = batch.double()
        count, mean = float(batch.numel()), batch.mean()
        total = self.count + count
        delta = mean - self.mean
        self.sum_of_squares += (batch - mean).square().sum() + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.count.copy_(total)

    @property
    def variance(self) -> Float[Tensor, ""]:
        """Biased variance; 0 before the first batch."""
        return self.sum_of_squares / self.count.clamp(min=1)


class RewardNormalizer(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return, so that returns have about unit variance.

    As OPPG reward_normalizer.py: no mean is subtracted; rewards enter the statistics before they are scaled by them; the running
    return of an environment starts anew with each episode, after the reward of the old one's last step.

    Args:
        num_envs: B; each environment has a running return of its own.
        gamma: discount of the running return.
        clip: normalised rewards are clipped to ± this.
        per_step: update and scale step by step (Baselines vec_normalize.py:26-34, Gym's NormalizeReward), not a rollout at a time.
    """

    running_return: Tensor

    def __init__(self, num_envs: int, *, gamma: float, clip: float, per_step: bool = False) -> None:
        super().__init__()
        self.gamma = gamma
        self.clip = clip
        self.per_step = per_step
        self.moments = RunningMoments()
        self.register_buffer("running_return", torch.zeros(num_envs, dtype=torch.float64))

    @property
    def scale(self) -> Float[Tensor, ""]:
        """What rewards are divided by."""
        return (self.moments.variance + 1e-8).sqrt()

    def forward(self, reward: Float[Tensor, "B T"], first: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Take a rollout's rewards into the statistics, then scale and clip them; `first` marks steps that begin an episode."""
        returns = discounted_forward_return(reward.double(), first, self.running_return, gamma=self.gamma)
        self.running_return.copy_(returns[:, -1])
        num_steps = 1 if self.per_step else reward.shape[1]
        scaled = []
        for part, part_returns in zip(reward.split(num_steps, dim=1), returns.split(num_steps, dim=1), strict=True):
            self.moments.update(part_returns)
            scaled.append(part / self.scale.to(reward.dtype))
        return torch.cat(scaled, dim=1).clamp(-self.clip, self.clip)
