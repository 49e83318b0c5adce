"""Rollouts, the buffer of a phase, and minibatches. Kind: state (tensors, their order).

Letters: T steps of a rollout, B environments, K rollouts of a phase, S sequences of L steps in a
minibatch, H memory state, P policy parameters. Storage is segment-major, `[B, T, …]`: the steps of
an environment are contiguous, so that a minibatch of whole segments is a few contiguous blocks.
Observations keep their dtype and are written once, in place, by the collector.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Generic, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from phasicrl.config import MinibatchUnit
from phasicrl.optimize import MeanAccumulator


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Base class of dataclasses of tensors."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with a function applied to every tensor."""
        changed = {name: function(value) for name, value in self.tensors().items()}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class Samples(_Tensors):
    """Sequences of steps to train on: tensors `[S, L, …]`.

    The memory state `[S, H]` is the one before each sequence.
    """

    obs: Shaped[Tensor, "S L *shape"]
    first: Bool[Tensor, "S L"]
    state: Float[Tensor, "S H"]
    action_mask: Bool[Tensor, "S L A"] | None
    value_target: Float[Tensor, "S L"]

    def __len__(self) -> int:
        """Return the number of sequences S."""
        return len(self.obs)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the networks: observations, first steps of episodes and memory states."""
        return self.obs, self.first, self.state

    @property
    def has_memory(self) -> bool:
        """Return whether the networks have a memory, which needs whole sequences."""
        return self.state.shape[-1] > 0

    def take(self, index: Tensor | slice) -> Self:
        """Return the sequences at `index`."""
        return self.map(lambda tensor: tensor[index])

    def as_transitions(self) -> Self:
        """Return each step as a sequence of length 1, `[S·L, 1, …]`, without copying.

        The agent must have no memory, on which steps would depend.
        """
        assert not self.has_memory, f"steps depend on a memory of width {self.state.shape[-1]}"
        steps = self.map(lambda tensor: tensor.flatten(0, 1).unsqueeze(1))
        return replace(steps, state=self.state.new_zeros(self.first.numel(), 0))

    def random_order(self, *, unit: MinibatchUnit, generator: Generator) -> Int[Tensor, " M"]:
        """Return a random permutation `[M]` of the indices of all segments, or all transitions."""
        size = len(self) if unit == "segments" else self.first.numel()
        return torch.randperm(size, generator=generator).to(self.first.device)

    def minibatches(
        self, num_minibatches: int, order: Int[Tensor, " M"], *, unit: MinibatchUnit
    ) -> Iterator["Minibatch[Self]"]:
        """Split the samples into minibatches of one size, which hold indices instead of copies.

        Args:
            num_minibatches: number of minibatches, a divisor of the number of segments or
                transitions.
            order: permutation of all M units from `random_order`, `[M]`.
            unit: unit that is shuffled: whole segments, or transitions.
        """
        samples = self.as_transitions() if unit == "transitions" else self
        size, rest = divmod(len(samples), num_minibatches)
        assert rest == 0, f"{len(samples)} {unit} do not divide into {num_minibatches} minibatches"
        as_steps = unit == "segments" and not self.has_memory
        for start in range(0, len(samples), size):
            yield Minibatch(samples, order[start : start + size], as_steps)


S = TypeVar("S", bound=Samples)


@dataclass(frozen=True, slots=True)
class Minibatch(Generic[S]):
    """Minibatch as indices into its source, so that a compiled step can select the samples.

    Attributes:
        source: samples that the indices select from.
        index: indices of the sequences of the minibatch, `[M]`.
        as_steps: whether `gather` splits them into steps, `[M·L, 1, …]`.
    """

    source: S
    index: Int[Tensor, " M"]
    as_steps: bool

    @property
    def num_steps(self) -> int:
        """Number of steps over all sequences of the minibatch."""
        return len(self.index) * self.source.first.shape[1]

    def gather(self) -> S:
        """Copy the selected samples, `[M, L, …]`, or `[M·L, 1, …]` if `as_steps`."""
        samples = self.source.take(self.index)
        return samples.as_transitions() if self.as_steps else samples


@dataclass(frozen=True, slots=True)
class PolicySamples(Samples):
    """Samples of the policy phase, with actions, advantages and the old policy's outputs."""

    action: Shaped[Tensor, "S L *action"]
    old_log_prob: Float[Tensor, "S L"]
    old_value: Float[Tensor, "S L"]
    advantage: Float[Tensor, "S L"]
    old_dist_params: Float[Tensor, "S L P"] | None = None
    """Parameters of the policy that an exact KL penalty refers to: the behavior policy, or the
    proximal policy of PPO-EWMA."""
    weight: Float[Tensor, "S L"] | None = None
    """Weight of each step, with a mean of 1 over the rollout; None for equal weights."""


@dataclass(frozen=True, slots=True)
class AuxiliarySamples(Samples):
    """Samples of the auxiliary phase, with the policy's distributions before it."""

    old_dist_params: Float[Tensor, "S L P"]
    """Parameters of the policy before the phase."""
    weight: Float[Tensor, "S L"] | None = None
    """Weight of each step in the value losses, 0 where the target is unknown; None if all count."""


@dataclass(frozen=True, slots=True)
class Rollout(_Tensors):
    """T steps of B environments under one policy: views into a slot of the phase buffer.

    Attributes:
        obs: observations s_t before the actions.
        first: whether a step is the first of its episode.
        state: memory state before the first step.
        action_mask: allowed actions; None if all always are.
        action: actions a_t as the policy drew them.
        log_prob: log-probabilities of the actions under the behavior policy.
        value: V(s_t) when the action was drawn, or as recomputed since.
        reward: environment rewards, before clipping and normalization.
        terminated: whether the episode ended with the step.
        truncated: whether the episode was cut after the step.
        next_value: V of the next observation; of the final observation of a truncated episode.
        value_target: value targets V̂, filled in by `compute_targets`, or recomputed since.
        reward_scale: divisor of the rewards that the collected `value` and `next_value` were
            trained on, equal in all environments; 0 if unknown.
        weight: 0 where an episode was cut and its final observation is unknown, else 1; None if
            final observations are known. `truncated` is then also true one step earlier, where such
            an episode ends for the returns.
    """

    obs: Shaped[Tensor, "B T *shape"]
    first: Bool[Tensor, "B T"]
    state: Float[Tensor, "B H"]
    action_mask: Bool[Tensor, "B T A"] | None
    action: Shaped[Tensor, "B T *action"]
    log_prob: Float[Tensor, "B T"]
    value: Float[Tensor, "B T"]
    reward: Float[Tensor, "B T"]
    terminated: Bool[Tensor, "B T"]
    truncated: Bool[Tensor, "B T"]
    next_value: Float[Tensor, "B T"]
    value_target: Float[Tensor, "B T"]
    reward_scale: Float[Tensor, " B"]
    weight: Float[Tensor, "B T"] | None = None

    def as_segments(self) -> Samples:
        """Return the rollout's B segments of T steps: inputs of the networks and value targets."""
        return Samples(self.obs, self.first, self.state, self.action_mask, self.value_target)

    def policy_samples(
        self, advantage: Float[Tensor, "B T"], weight: Float[Tensor, "B T"] | None = None
    ) -> PolicySamples:
        """Return the policy phase's samples with advantages and weights by step."""
        return PolicySamples(
            self.obs, self.first, self.state, self.action_mask, self.value_target,
            self.action, self.log_prob, self.value, advantage, weight=weight,
        )  # fmt: skip

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy saved tensors into the rollout.

        Raises:
            ValueError: the number of environments or steps differs.
        """
        for name, value in self.tensors().items():
            if (given := tensors[name].shape) != value.shape:
                saved = f"{name} of a saved rollout has shape {tuple(given)}"
                raise ValueError(f"{saved}; expected {tuple(value.shape)}")
            value.copy_(tensors[name])


@dataclass(slots=True)
class AuxiliaryProgress:
    """Progress of an auxiliary phase, from which it can be resumed at the start of an epoch.

    Attributes:
        old_dist_params: parameters of the policy's distribution before the phase, `[K·B, T, P]`.
        accumulator: means of the metrics so far.
        epoch: number of finished epochs.
        seconds: seconds of the phase until its latest epoch began.
    """

    old_dist_params: Float[Tensor, "KB T P"]
    accumulator: MeanAccumulator
    epoch: int = 0
    seconds: float = 0.0


class PhaseBuffer:
    """Buffer of the K rollouts of a phase, allocated once. PPO has K = 1.

    Args:
        num_rollouts: K.
        num_envs: B.
        num_steps: T.
        obs_shape: shape of one observation.
        obs_dtype: dtype of observations.
        action_shape: shape of one action.
        action_dtype: dtype of actions.
        state_size: width of the memory's state.
        mask_size: width of the action mask; None without masks.
        has_weights: whether steps have weights, see `Rollout`.
        device: device of the tensors.
    """

    def __init__(
        self, num_rollouts: int, num_envs: int, num_steps: int, *,
        obs_shape: tuple[int, ...], obs_dtype: torch.dtype,
        action_shape: tuple[int, ...], action_dtype: torch.dtype,
        state_size: int, mask_size: int | None, has_weights: bool = False, device: torch.device,
    ) -> None:  # fmt: skip
        self.num_rollouts = num_rollouts
        self.num_filled = 0
        self.aux_progress: AuxiliaryProgress | None = None

        def zeros(
            *shape: int, dtype: torch.dtype = torch.float32, steps: tuple[int, ...] = (num_steps,)
        ) -> Tensor:
            return torch.zeros(num_rollouts, num_envs, *steps, *shape, dtype=dtype, device=device)

        self.rollouts = Rollout(
            obs=zeros(*obs_shape, dtype=obs_dtype),
            first=zeros(dtype=torch.bool),
            state=zeros(state_size, steps=()),
            action_mask=None if mask_size is None else zeros(mask_size, dtype=torch.bool),
            action=zeros(*action_shape, dtype=action_dtype),
            log_prob=zeros(),
            value=zeros(),
            reward=zeros(),
            terminated=zeros(dtype=torch.bool),
            truncated=zeros(dtype=torch.bool),
            next_value=zeros(),
            value_target=zeros(),
            reward_scale=zeros(steps=()),
            weight=zeros() if has_weights else None,
        )

    @property
    def is_full(self) -> bool:
        """Return whether all rollouts of the phase are filled."""
        return self.num_filled == self.num_rollouts

    def next_rollout(self) -> Rollout:
        """Return the slot for the next rollout, and count it as filled."""
        assert not self.is_full, f"all {self.num_rollouts} rollouts are filled; clear them first"
        self.num_filled += 1
        rollout = self.rollout(self.num_filled - 1)
        rollout.reward_scale.zero_()
        return rollout

    def rollout(self, slot: int) -> Rollout:
        """Return the rollout in one slot, as views."""
        return self.rollouts.map(lambda tensor: tensor[slot])

    def clear(self) -> None:
        """Mark all slots as free; later rollouts overwrite them."""
        self.num_filled, self.aux_progress = 0, None

    def auxiliary_samples(
        self, old_dist_params: Float[Tensor, "KB T P"], *, num_last: int | None = None
    ) -> AuxiliarySamples:
        """Return the samples of all K rollouts, or of the last `num_last`, as views `[K'·B, T, …]`.

        `old_dist_params` are those of all K rollouts, by the policy before the auxiliary phase.
        """
        phase, weight = self.as_segments(), self.rollouts.weight
        samples = AuxiliarySamples(
            phase.obs, phase.first, phase.state, phase.action_mask, phase.value_target,
            old_dist_params, None if weight is None else weight.flatten(0, 1),
        )  # fmt: skip
        num_envs = len(samples) // self.num_rollouts
        return samples.take(slice(-(num_last or self.num_rollouts) * num_envs, None))

    def as_segments(self) -> Samples:
        """Return all segments of the phase as views, `[K·B, T, …]`."""
        assert self.is_full, f"{self.num_filled} of {self.num_rollouts} rollouts are filled"
        return self.rollouts.map(lambda tensor: tensor.flatten(0, 1)).as_segments()
