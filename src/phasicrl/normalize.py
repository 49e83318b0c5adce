"""Running statistics and normalizers. Kind: state (modules whose buffers are saved)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from phasicrl.config import Statistics
from phasicrl.distributed import SINGLE_PROCESS, World
from phasicrl.returns import compute_running_return


class RunningMoments(nn.Module):
    """Running mean and variance of all samples so far, in float64.

    Batches are merged by the parallel algorithm of Chan et al. 1979.

    Args:
        shape: shape of one sample; each component has its mean and variance.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64))
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.sum_of_squares = nn.Buffer(torch.zeros(shape, dtype=torch.float64))

    def update(self, batch: Float[Tensor, "..."], world: World = SINGLE_PROCESS) -> None:
        """Update mean and variance with a batch `[*N, *shape]`, or a single sample `[*shape]`.

        All processes must pass parts of one size.
        """
        count, mean, sum_of_squares = _count_mean_and_sum_of_squares(batch, self.mean.shape, world)
        total, delta = self.count + count, mean - self.mean
        self.sum_of_squares += sum_of_squares + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.count.copy_(total)

    def update_per_step(self, samples: Float[Tensor, "B T"]) -> Float[Tensor, " T"]:
        """Update with T batches of B numbers; return the biased variance after each batch, `[T]`.

        The result equals T calls of `update`. Cumulative sums of samples minus a number near them
        are fast, and avoid cancellation.
        """
        point = torch.where(self.count > 0, self.mean, samples.mean())
        difference = samples - point
        batches = torch.arange(1, samples.shape[1] + 1, device=samples.device)
        counts = self.count + len(samples) * batches
        # Sum on the CPU: a GPU's `cumsum` of floats has no deterministic kernel, which
        # `compute.deterministic` requires.
        totals = (difference.sum(0), difference.square().sum(0))
        sums, squares = (total.cpu().cumsum(0).to(samples.device) for total in totals)
        squares = self.sum_of_squares + squares
        sums_of_squares = (squares - sums.square() / counts).clamp(min=0)
        self.count.copy_(counts[-1])
        self.mean.copy_(point + sums[-1] / counts[-1])
        self.sum_of_squares.copy_(sums_of_squares[-1])
        return sums_of_squares / counts

    @property
    def variance(self) -> Float[Tensor, "*shape"]:
        """Biased variance of all samples so far; 0 before the first batch."""
        return self.sum_of_squares / self.count.clamp(min=1)


class EmaMoments(nn.Module):
    """Exponentially weighted mean and variance of all batches so far, in float64.

    Each batch has `decay` times the weight of the next one. The k-th batch moves the moments by its
    fraction of all weights, `w = (1 − d) / (1 − dᵏ)`: 1 for the first, about 1/k for small k, 1 − d
    in the long run. (With a constant 1 − d at d = 0.999, the first batch would keep more than a
    third of the weight for a thousand batches.) The variance includes that between the batches'
    means, by the law of total variance:

        mean ← (1 − w) mean + w m        variance ← (1 − w) variance + w v + w (1 − w) (m − mean)²

    where m and v are the batch's mean and biased variance, and `mean` on the right is the old one.

    Args:
        decay: d, at least 0 and below 1; 0 uses the latest batch only.
        shape: shape of one sample; each component has its mean and variance.
    """

    def __init__(self, decay: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.decay = decay
        self.weight = nn.Buffer(torch.zeros((), dtype=torch.float64))  # 1 − dᵏ
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.variance = nn.Buffer(torch.zeros(shape, dtype=torch.float64))

    def update(self, batch: Float[Tensor, "..."], world: World = SINGLE_PROCESS) -> None:
        """Update mean and variance with a batch `[*N, *shape]`, or a single sample `[*shape]`.

        Batches of all sizes have equal weights. All processes must pass parts of one size.
        """
        count, mean, sum_of_squares = _count_mean_and_sum_of_squares(batch, self.mean.shape, world)
        self.weight.mul_(self.decay).add_(1 - self.decay)
        share, delta = (1 - self.decay) / self.weight, mean - self.mean
        widened = self.variance + share * delta.square()
        self.variance.copy_((1 - share) * widened + share * sum_of_squares / count)
        self.mean += share * delta


Moments = RunningMoments | EmaMoments
"""Either kind of running statistics; mean and variance are 0 before the first batch."""


def make_moments(statistics: Statistics, *, decay: float, shape: tuple[int, ...] = ()) -> Moments:
    """Make running mean and variance: of all samples (`moments`), or weighted (`ema`)."""
    return EmaMoments(decay, shape) if statistics == "ema" else RunningMoments(shape)


def _count_mean_and_sum_of_squares(
    batch: Float[Tensor, "..."], shape: torch.Size, world: World
) -> tuple[float, Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return number of samples, mean and sum of squared deviations of a batch `[*N, *shape]`.

    The parts of all processes are merged by the parallel algorithm of Chan et al. 1979, in float64.
    """
    num_axes = batch.dim() - len(shape)
    fits, given = batch.shape[num_axes:] == shape, tuple(batch.shape)
    assert fits, f"a batch of shape {given}, but samples have the shape {tuple(shape)}"
    # Add an axis: a reduction over no axes would reduce all of them.
    batch, axes = batch.double().unsqueeze(0), tuple(range(num_axes + 1))
    mean = batch.mean(axes)
    count = batch.numel() / mean.numel()
    sum_of_squares = (batch - mean).square().sum(axes)
    means, sums = world.all_gather_cat(mean[None]), world.all_gather_cat(sum_of_squares[None])
    mean = means.mean(0)
    return world.size * count, mean, sums.sum(0) + count * (means - mean).square().sum(0)


def _to_divisor(variance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the root of a variance, at least 1e-4 so that rounding errors are not amplified."""
    return (variance + 1e-8).sqrt()


class RewardNormalizer(nn.Module):
    """Division of rewards by the running standard deviation of the discounted return.

    Returns then have about unit variance. No mean is subtracted, and rewards update the statistics
    before they are divided (OPPG reward_normalizer.py).

    Args:
        num_envs: B; each environment has its running return.
        gamma: discount factor of the running return.
        clip: bound of normalized rewards, ± clip.
        per_step: whether statistics are updated at each step (Baselines vec_normalize.py:26-34,
            Gym's NormalizeReward) instead of once per rollout.
    """

    def __init__(self, num_envs: int, *, gamma: float, clip: float, per_step: bool = False) -> None:
        super().__init__()
        self.gamma, self.clip, self.per_step = gamma, clip, per_step
        self.moments = RunningMoments()
        self.running_return = nn.Buffer(torch.zeros(num_envs, dtype=torch.float64))

    @property
    def scale(self) -> Float[Tensor, ""]:
        """Divisor of the rewards, 0-d: the standard deviation of running returns, at least 1e-4."""
        return _to_divisor(self.moments.variance)

    def forward(
        self, reward: Float[Tensor, "B T"], reset_before: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Update the statistics with a rollout's rewards, then divide and clip the rewards.

        Args:
            reward: rewards `[B, T]`.
            reset_before: steps `[B, T]` before which the running return is reset: the first steps
                of episodes; or their terminations, as in Gymnasium since 0.27, where the last
                reward counts for the next episode and time limits are ignored.
        """
        start, gamma = self.running_return, self.gamma
        returns = compute_running_return(reward.double(), reset_before, start, gamma=gamma)
        self.running_return.copy_(returns[:, -1])
        if self.per_step:
            scale = _to_divisor(self.moments.update_per_step(returns))
        else:
            self.moments.update(returns)
            scale = self.scale
        return self.scale_reward(reward, scale)

    def scale_reward(self, reward: Tensor, scale: Tensor) -> Tensor:
        """Divide rewards `[…]` by a scale, and clip them."""
        return (reward / scale.to(reward.dtype)).clamp(-self.clip, self.clip)


class ObservationNormalizer(nn.Module):
    """Normalization of each component of an observation to mean 0 and variance 1, with a clip.

    The statistics change only in `update`, because a policy must not change while it acts or is
    evaluated (unlike Baselines vec_normalize.py:36-40). They are buffers, part of the agent's
    weights.

    A component without variance becomes 0, and up to ± clip once it differs from its mean.

    Args:
        size: number of components D.
        statistics: kind of running statistics, see `make_moments`.
        decay: decay of the exponential weights.
        clip: bound of normalized components, ± clip.
    """

    def __init__(self, size: int, *, statistics: Statistics, decay: float, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.moments = make_moments(statistics, decay=decay, shape=(size,))
        # Float32 copies for acting: three kernels, with or without statistics.
        self.shift, self.scale = nn.Buffer(torch.zeros(size)), nn.Buffer(torch.ones(size))
        self.low = nn.Buffer(torch.full((size,), -torch.inf))
        self.high = nn.Buffer(torch.full((size,), torch.inf))

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Return `(x − mean) / √(variance + 1e-8)`, clipped, in float32; x before any update."""
        return ((x.float() - self.shift) / self.scale).clamp(self.low, self.high)

    def update(self, x: Float[Tensor, "*N D"], world: World = SINGLE_PROCESS) -> None:
        """Update the statistics with raw observations `[…, D]`."""
        self.moments.update(x, world)
        self.shift.copy_(self.moments.mean)
        self.scale.copy_(_to_divisor(self.moments.variance))
        self.low.fill_(-self.clip)
        self.high.fill_(self.clip)


class ValueNormalizer(nn.Module):
    """Mean and standard deviation of the value targets, the units of the value heads' outputs.

    An update changes what an output means, so that the heads have to be rescaled:
    `Agent.update_value_statistics` does both.

    Args:
        statistics: kind of running statistics, see `make_moments`.
        decay: decay of the exponential weights.
    """

    def __init__(self, *, statistics: Statistics, decay: float) -> None:
        super().__init__()
        self.moments = make_moments(statistics, decay=decay)
        self.mean, self.std = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))

    def update(self, target: Float[Tensor, "..."]) -> None:
        """Update the statistics with value targets `[…]` in the rewards' units.

        `std` is at least 1e-4: constant targets, as before any reward, have a deviation of 0 or of
        rounding errors, which the value head would learn as noise of size 1.
        """
        self.moments.update(target)
        self.mean.copy_(self.moments.mean)
        self.std.copy_(_to_divisor(self.moments.variance))

    def denormalize(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Convert a value head's output `[…]` to the rewards' units."""
        return x * self.std + self.mean
