"""Rollouts, the buffer of a phase of them, and minibatches. Kind: state (tensors, their order).

Letters: T steps of a rollout, B environments, K rollouts of a phase, S sequences of L steps in a
minibatch, H memory state, P policy parameters. Storage is segment-major, `[B, T, …]`: the steps of
an environment lie side by side, so that a minibatch of whole segments is a few contiguous blocks.
Observations keep their own dtype and are written once, by the collector, in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from phasicrl.config import MinibatchBy
from phasicrl.optimize import MeanAccumulator


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences of steps to train on: tensors `[S, L, …]`.

    The memory state `[S, H]` is that before each sequence.
    """

    obs: Shaped[Tensor, "S L *shape"]
    first: Bool[Tensor, "S L"]
    state: Float[Tensor, "S H"]
    action_mask: Bool[Tensor, "S L A"] | None
    value_target: Float[Tensor, "S L"]

    def __len__(self) -> int:
        """The number of sequences S."""
        return len(self.obs)

    @property
    def has_memory(self) -> bool:
        """Whether the networks remember: then sequences stay whole."""
        return self.state.shape[-1] > 0

    def take(self, index: Tensor | slice) -> Self:
        """The sequences at `index`."""
        return self._map(lambda tensor: tensor[index])

    def as_transitions(self) -> Self:
        """Every step as a sequence of its own, `[S·L, 1, …]`. Copies nothing.

        Without memory the steps are independent.
        """
        width = self.state.shape[-1]
        assert not self.has_memory, f"steps depend on a memory state of width {width}"
        steps = self._map(lambda tensor: tensor.flatten(0, 1).unsqueeze(1))
        return dataclasses.replace(steps, state=self.state.new_zeros(self.first.numel(), 0))

    def random_order(self, *, by: MinibatchBy, generator: Generator) -> Int[Tensor, " M"]:
        """A random order of all segments, or of all transitions."""
        size = len(self) if by == "segments" else self.first.numel()
        return torch.randperm(size, generator=generator).to(self.first.device)

    def minibatches(
        self, num_minibatches: int, order: Int[Tensor, " M"], *, by: MinibatchBy
    ) -> Iterator[Minibatch[Self]]:
        """Deal everything out once, to minibatches of one size, which are not gathered yet.

        Args:
            num_minibatches: how many; it divides the number of segments, or of transitions.
            order: in which they are dealt out.
            by: whole segments stay together, or transitions are shuffled.
        """
        samples = self.as_transitions() if by == "transitions" else self
        size, rest = divmod(len(samples), num_minibatches)
        assert rest == 0, f"{len(samples)} {by} do not divide into {num_minibatches} minibatches"
        split = by == "segments" and not self.has_memory
        for start in range(0, len(samples), size):
            yield Minibatch(samples, order[start : start + size], split)

    def tensors(self) -> dict[str, Tensor]:
        """All that is there, by name."""
        return _tensors_of(self)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor."""
        changed = {name: function(value) for name, value in self.tensors().items()}
        return dataclasses.replace(self, **changed)


S = TypeVar("S", bound=Samples)


@dataclass(frozen=True, slots=True)
class Minibatch(Generic[S]):
    """Some of the samples: which ones, so that gathering them can be part of a compiled step.

    Attributes:
        source: all samples.
        index: the places of the chosen sequences in it, `[M]`.
        split: whether each step is then a sequence of its own.
    """

    source: S
    index: Int[Tensor, " M"]
    split: bool

    @property
    def num_steps(self) -> int:
        """How many steps it has, whatever sequences they are in."""
        return len(self.index) * self.source.first.shape[1]

    def gather(self) -> S:
        """The chosen samples, copied."""
        samples = self.source.take(self.index)
        return samples.as_transitions() if self.split else samples

    def materialize(self) -> Minibatch[S]:
        """The same samples as a source of their own, of one shape for all such minibatches."""
        samples = self.gather()
        return Minibatch(samples, torch.arange(len(samples), device=self.index.device), split=False)


@dataclass(frozen=True, slots=True)
class PolicySamples(Samples):
    """What the policy phase learns from."""

    action: Shaped[Tensor, "S L *action"]
    old_log_prob: Float[Tensor, "S L"]
    old_value: Float[Tensor, "S L"]
    advantage: Float[Tensor, "S L"]
    old_dist_params: Float[Tensor, "S L P"] | None = None
    """Parameters of the policy that an exact KL penalty is taken from: the behavior policy, or the
    proximal one under PPO-EWMA."""
    weight: Float[Tensor, "S L"] | None = None
    """How much each step counts, 1 in the mean over the rollout, where not all count alike."""


@dataclass(frozen=True, slots=True)
class AuxiliarySamples(Samples):
    """What the auxiliary phase learns from."""

    old_dist_params: Float[Tensor, "S L P"]
    """Parameters of the policy before the phase."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of B environments under one policy: views into a slot of the phase buffer.

    Attributes:
        obs: what each action answered to.
        first: the step begins an episode.
        state: the memory's state before the first step.
        action_mask: what was allowed; None if everything always is.
        action: what was done.
        log_prob: log-probability of the action when it was drawn.
        value: V(obs) when the action was drawn.
        reward: as the environment gave it.
        terminated: the episode ended here.
        truncated: the episode was cut here.
        next_value: V of what the step led to: of the final observation where an episode was
            truncated.
        value_target: V̂, filled in when the advantages are known.
        reward_scale: what rewards were divided by when the value function learned that gave `value`
            and `next_value`; one number, for each environment; 0: not known.
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

    def segments(self) -> Samples:
        """What the networks are asked about."""
        return Samples(self.obs, self.first, self.state, self.action_mask, self.value_target)

    def policy_samples(
        self, advantage: Float[Tensor, "B T"], weight: Float[Tensor, "B T"] | None = None
    ) -> PolicySamples:
        """What the policy phase learns from, once the advantages are known."""
        return PolicySamples(
            self.obs, self.first, self.state, self.action_mask, self.value_target,
            self.action, self.log_prob, self.value, advantage, weight=weight,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return _tensors_of(self)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back `tensors`.

        Raises:
            ValueError: they are of another number of environments or steps.
        """
        for name, value in self.tensors().items():
            if (given := tensors[name].shape) != value.shape:
                shapes = f"{tuple(given)}; expected {tuple(value.shape)}"
                raise ValueError(f"{name} of a saved rollout has the shape {shapes}")
            value.copy_(tensors[name])


def _tensors_of(holder: Samples | Rollout) -> dict[str, Tensor]:
    """The fields that are there, by name."""
    return {
        field.name: value
        for field in dataclasses.fields(holder)
        if (value := getattr(holder, field.name)) is not None
    }


@dataclass(slots=True)
class AuxiliaryProgress:
    """Progress of an auxiliary phase, from which it can be resumed at the start of an epoch.

    Attributes:
        old_dist_params: parameters of the policy's distribution before the phase, `[K·B, T, P]`.
        means: of the metrics so far.
        epoch: number of finished epochs.
        seconds: seconds spent until the last start of an epoch.
    """

    old_dist_params: Float[Tensor, "KB T P"]
    means: MeanAccumulator
    epoch: int = 0
    seconds: float = 0.0


class PhaseBuffer:
    """Room for the K rollouts of a phase, allocated once. PPO has K = 1.

    Args:
        num_rollouts: K.
        num_envs: B.
        num_steps: T.
        obs_shape: shape of one observation.
        obs_dtype: its dtype, kept.
        action_shape: shape of one action.
        action_dtype: its dtype, kept.
        state_size: width of the memory's state.
        num_actions: width of the action mask; None without masks.
        device: where it lies.
    """

    def __init__(
        self, num_rollouts: int, num_envs: int, num_steps: int, *,
        obs_shape: tuple[int, ...], obs_dtype: torch.dtype,
        action_shape: tuple[int, ...], action_dtype: torch.dtype,
        state_size: int, num_actions: int | None, device: torch.device,
    ) -> None:  # fmt: skip
        self.num_rollouts = num_rollouts
        self.num_filled = 0
        self.progress: AuxiliaryProgress | None = None

        def allocate(
            *shape: int, dtype: torch.dtype = torch.float32, time: tuple[int, ...] = (num_steps,)
        ) -> Tensor:
            return torch.zeros(num_rollouts, num_envs, *time, *shape, dtype=dtype, device=device)

        self.rollouts = Rollout(
            obs=allocate(*obs_shape, dtype=obs_dtype),
            first=allocate(dtype=torch.bool),
            state=allocate(state_size, time=()),
            action_mask=None if num_actions is None else allocate(num_actions, dtype=torch.bool),
            action=allocate(*action_shape, dtype=action_dtype),
            log_prob=allocate(),
            value=allocate(),
            reward=allocate(),
            terminated=allocate(dtype=torch.bool),
            truncated=allocate(dtype=torch.bool),
            next_value=allocate(),
            value_target=allocate(),
            reward_scale=allocate(time=()),
        )

    @property
    def is_full(self) -> bool:
        """Whether a phase is complete."""
        return self.num_filled == self.num_rollouts

    def next_rollout(self) -> Rollout:
        """The slot to write the next rollout into; it counts as filled."""
        num = self.num_rollouts
        assert not self.is_full, f"all {num} rollouts of the phase are filled; clear it first"
        self.num_filled += 1
        rollout = self.rollout(self.num_filled - 1)
        rollout.reward_scale.zero_()
        return rollout

    def rollout(self, slot: int) -> Rollout:
        """Views of one slot."""
        views = {name: tensor[slot] for name, tensor in self.rollouts.tensors().items()}
        return dataclasses.replace(self.rollouts, **views)

    def clear(self) -> None:
        """Forget the phase; the memory is kept and written over."""
        self.num_filled = 0
        self.progress = None

    def auxiliary_samples(
        self, old_dist_params: Float[Tensor, "KB T P"], *, last: int | None = None
    ) -> AuxiliarySamples:
        """The segments of the phase, or of its last rollouts, `[last·B, T, …]`. Copies nothing.

        With them go the parameters of the policy before the auxiliary phase, of all its segments.
        """
        all_of = self.segments()
        samples = AuxiliarySamples(
            all_of.obs, all_of.first, all_of.state, all_of.action_mask, all_of.value_target,
            old_dist_params,
        )  # fmt: skip
        num_envs = len(samples) // self.num_rollouts
        return samples.take(slice(-(last or self.num_rollouts) * num_envs, None))

    def segments(self) -> Samples:
        """All segments of the phase, `[K·B, T, …]`. Copies nothing."""
        assert self.is_full, f"{self.num_filled} of {self.num_rollouts} rollouts are filled"
        as_one = {name: tensor.flatten(0, 1) for name, tensor in self.rollouts.tensors().items()}
        return dataclasses.replace(self.rollouts, **as_one).segments()
