"""Running statistics and what is scaled by them. Kind: state (modules, whose buffers are saved)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from phasicrl.config import Statistics
from phasicrl.distributed import SINGLE_PROCESS, World
from phasicrl.returns import discounted_forward_return


class RunningMoments(nn.Module):
    """Mean and variance of everything seen so far, in float64.

    They are merged batch by batch in parallel form (Chan et al. 1979).

    Args:
        shape: of one sample; each of its components has a mean and a variance of its own.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64))
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.sum_of_squares = nn.Buffer(torch.zeros(shape, dtype=torch.float64))

    def update(self, batch: Float[Tensor, "..."], world: World = SINGLE_PROCESS) -> None:
        """Merge a batch `[*N, *shape]` in, over all leading axes; a single sample has none.

        Of several processes each has a part of the batch, of one size.
        """
        count, mean, sum_of_squares = _batch_moments(batch, self.mean.shape, world)
        total = self.count + count
        delta = mean - self.mean
        self.sum_of_squares += sum_of_squares + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.count.copy_(total)

    def update_by_steps(self, samples: Float[Tensor, "B T"]) -> Float[Tensor, " T"]:
        """Merge T batches of B numbers in, one after the other; returns the variance after each.

        It is the biased one. The same as `update` for each, by running sums of the distances from
        one point, which is near all of them.
        """
        point = torch.where(self.count > 0, self.mean, samples.mean())
        away = samples - point
        batches = torch.arange(1, samples.shape[1] + 1, device=samples.device)
        counts = self.count + len(samples) * batches
        # T numbers each, added up on the CPU: a GPU's `cumsum` of floats has no deterministic
        # kernel, which `compute.deterministic` asks for.
        sums, squares = (
            total.cpu().cumsum(0).to(away.device) for total in (away.sum(0), away.square().sum(0))
        )
        squares = self.sum_of_squares + squares
        sums_of_squares = (squares - sums.square() / counts).clamp(min=0)
        self.count.copy_(counts[-1])
        self.mean.copy_(point + sums[-1] / counts[-1])
        self.sum_of_squares.copy_(sums_of_squares[-1])
        return sums_of_squares / counts

    @property
    def is_empty(self) -> bool:
        """Whether there was no batch yet. It waits for a GPU, to look at a tensor's value."""
        return bool(self.count == 0)

    @property
    def variance(self) -> Float[Tensor, "*shape"]:
        """Biased variance; 0 before the first batch."""
        return self.sum_of_squares / self.count.clamp(min=1)


class EmaMoments(nn.Module):
    """Mean and variance of a mixture of all batches so far, in float64.

    In it each batch counts `decay` times as much as the one after it. The k-th batch moves the
    moments by its share of the mixture, `w = (1 − d) / (1 − dᵏ)`: 1 for the first, near 1/k while k
    is small, 1 − d in the long run. (A constant 1 − d after the first would at d = .999 leave the
    first batch, of an untrained policy, more than a third of the weight for a thousand batches.)
    The variance is the mixture's, by the law of total variance: that within batches and that
    between their means, so that a mean on the move widens it:

        mean ← (1 − w) mean + w m        variance ← (1 − w) variance + w v + w (1 − w) (m − mean)²

    with the batch's mean m and biased variance v, and the mean before the batch on the right. A
    running average of deviations lacks the last term, is too small besides (Jensen), and is 0 for
    batches of one sample.

    Args:
        decay: d, at least 0 and below 1; 0 keeps the latest batch alone.
        shape: of one sample; each of its components has a mean and a variance of its own.
    """

    def __init__(self, decay: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.decay = decay
        self.weight = nn.Buffer(torch.zeros((), dtype=torch.float64))  # 1 − dᵏ
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.variance = nn.Buffer(torch.zeros(shape, dtype=torch.float64))

    @property
    def is_empty(self) -> bool:
        """Whether there was no batch yet. It waits for a GPU, to look at a tensor's value."""
        return bool(self.weight == 0)

    def update(self, batch: Float[Tensor, "..."], world: World = SINGLE_PROCESS) -> None:
        """Mix a batch `[*N, *shape]` in, which counts as one whatever its size.

        A single sample has no leading axes. Of several processes each has a part of the batch, of
        one size.
        """
        count, mean, sum_of_squares = _batch_moments(batch, self.mean.shape, world)
        self.weight.mul_(self.decay).add_(1 - self.decay)
        share = (1 - self.decay) / self.weight
        delta = mean - self.mean
        widened = self.variance + share * delta.square()
        self.variance.copy_((1 - share) * widened + share * sum_of_squares / count)
        self.mean += share * delta


Moments = RunningMoments | EmaMoments
"""Either kind: `update(batch)`, and `mean` and `variance`, float64 tensors of the shape given.

Both are 0 before the first batch.
"""


def make_moments(statistics: Statistics, *, decay: float, shape: tuple[int, ...] = ()) -> Moments:
    """Moments of everything (`moments`), or of a past whose weight falls by `decay` (`ema`)."""
    return EmaMoments(decay, shape) if statistics == "ema" else RunningMoments(shape)


def _batch_moments(
    batch: Float[Tensor, "..."], shape: torch.Size, world: World
) -> tuple[float, Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Number of samples in a batch `[*N, *shape]`, their mean and their sum of squares, in float64.

    The squares are of the distances from the mean. The parts of all processes are merged in
    parallel form (Chan et al. 1979).
    """
    num_axes = batch.dim() - len(shape)
    fits, given = batch.shape[num_axes:] == shape, tuple(batch.shape)
    assert fits, f"a batch of shape {given}, but samples have the shape {tuple(shape)}"
    # So that there always is an axis to merge: to a reduction, none means all.
    batch = batch.double().unsqueeze(0)
    axes = tuple(range(num_axes + 1))
    mean = batch.mean(axes)
    count, sum_of_squares = batch.numel() / mean.numel(), (batch - mean).square().sum(axes)
    means, sums = world.all_gather_cat(mean[None]), world.all_gather_cat(sum_of_squares[None])
    mean = means.mean(0)
    between = count * (means - mean).square().sum(0)
    return world.size * count, mean, sums.sum(0) + between


def _deviation(variance: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """What to divide by: at least 1e-4, so that rounding errors alone are not blown up."""
    return (variance + 1e-8).sqrt()


class RewardNormalizer(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return.

    Returns then have about unit variance. As OPPG reward_normalizer.py: no mean is subtracted;
    rewards enter the statistics before they are scaled by them; the running return of an
    environment starts anew where it is told to.

    Args:
        num_envs: B; each environment has a running return of its own.
        gamma: discount of the running return.
        clip: normalized rewards are clipped to ± this.
        per_step: update and scale step by step (Baselines vec_normalize.py:26-34, Gym's
            NormalizeReward), not a rollout at a time.
    """

    def __init__(self, num_envs: int, *, gamma: float, clip: float, per_step: bool = False) -> None:
        super().__init__()
        self.gamma, self.clip, self.per_step = gamma, clip, per_step
        self.moments = RunningMoments()
        self.running_return = nn.Buffer(torch.zeros(num_envs, dtype=torch.float64))

    @property
    def scale(self) -> Float[Tensor, ""]:
        """What rewards are divided by."""
        return _deviation(self.moments.variance)

    def forward(
        self, reward: Float[Tensor, "B T"], reset_before: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Take a rollout's rewards into the statistics, then scale and clip them.

        Args:
            reward: of T steps.
            reset_before: steps before which the running return is dropped: those that begin an
                episode; or those that terminate one, as in Gymnasium from 0.27 on: the reward of
                such a step then goes into the next episode, and a time limit is passed over.
        """
        start, gamma = self.running_return, self.gamma
        returns = discounted_forward_return(reward.double(), reset_before, start, gamma=gamma)
        self.running_return.copy_(returns[:, -1])
        if self.per_step:
            scale = _deviation(self.moments.update_by_steps(returns))
        else:
            self.moments.update(returns)
            scale = self.scale
        return self.scaled(reward, scale)

    def scaled(self, reward: Tensor, scale: Tensor | None = None) -> Tensor:
        """Divide rewards by a scale, or the one of now, and clip them."""
        scale = self.scale if scale is None else scale
        return (reward / scale.to(reward.dtype)).clamp(-self.clip, self.clip)


class ObservationNormalizer(nn.Module):
    """Shifts and scales each component of an observation to mean 0 and variance 1, and clips it.

    As Baselines (vec_normalize.py:36-40). Unlike there, the statistics move only when `update` is
    called: a policy must not change while it is acting, and not at all in an evaluation. They are
    buffers, so part of the agent's weights.

    A component that has never varied comes out as 0. Should it later differ by x, then 10⁴ x comes
    out, as 1e-8 is all the variance there is; the clip keeps that to ± clip. With the next update
    the divisor is about √p x, p being the share of such samples.

    Args:
        size: D, the number of components.
        statistics: of everything seen so far, or exponentially weighted; see `make_moments`.
        decay: of the exponential weights.
        clip: normalized components are clipped to ± this.
    """

    def __init__(self, size: int, *, statistics: Statistics, decay: float, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.moments = make_moments(statistics, decay=decay, shape=(size,))
        # Acting needs these in float32: three kernels, also before there are statistics.
        self.shift, self.scale = nn.Buffer(torch.zeros(size)), nn.Buffer(torch.ones(size))
        self.low = nn.Buffer(torch.full((size,), -torch.inf))
        self.high = nn.Buffer(torch.full((size,), torch.inf))

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """`(x − mean) / √(variance + 1e-8)`, clipped, in float32; x before the first update."""
        return ((x.float() - self.shift) / self.scale).clamp(self.low, self.high)

    def update(self, x: Float[Tensor, "*N D"], world: World = SINGLE_PROCESS) -> None:
        """Take observations into the statistics, before normalization."""
        self.moments.update(x, world)
        self.shift.copy_(self.moments.mean)
        self.scale.copy_(_deviation(self.moments.variance))
        self.low.fill_(-self.clip)
        self.high.fill_(self.clip)


class ValueNormalizer(nn.Module):
    """Units in which value heads predict: mean and deviation of the value targets so far.

    Values leave the agent through `denormalize`; the loss compares the head's own output with
    `(target − mean) / std`. An update changes what an output means, so the heads have to be
    rescaled with it: `Agent.update_value_statistics` does both.

    Args:
        statistics: of everything seen so far, or exponentially weighted; see `make_moments`.
        decay: of the exponential weights.
    """

    def __init__(self, *, statistics: Statistics, decay: float) -> None:
        super().__init__()
        self.moments = make_moments(statistics, decay=decay)
        self.mean, self.std = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))

    def update(self, target: Float[Tensor, "..."]) -> None:
        """Take value targets, in the rewards' units, into the statistics.

        `std` stays at 1e-4 or above: targets that do not vary, as before any reward is found, have
        the deviation 0 or that of rounding errors, and divided by it they would be infinite, or
        noise of size 1 that the value head learns.
        """
        self.moments.update(target)
        self.mean.copy_(self.moments.mean)
        self.std.copy_(_deviation(self.moments.variance))

    def denormalize(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """A value head's output in the rewards' units."""
        return x * self.std + self.mean
