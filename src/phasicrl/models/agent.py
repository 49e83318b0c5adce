"""The agent: encoder, memory and heads behind one forward contract.

Kind: state (a module that remembers nothing between calls).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn

from phasicrl.config import ActionConfig, ModelConfig, ObsNormConfig, Precision, ValueNormConfig
from phasicrl.models.distributions import Policy
from phasicrl.models.encoders import ObservationReader, encoder_for, in_precision
from phasicrl.models.heads import PolicyHead
from phasicrl.models.init import Initializer
from phasicrl.models.memory import Memory, make_memory
from phasicrl.normalize import ValueNormalizer

EncoderFactory = Callable[[gym.Space[Any]], nn.Module]
"""A user's own encoder: from the space of observations to a module that maps `[N, …]` to `[N, D]`.

The module has an attribute `num_features` (D). For `Dict` and `Tuple` spaces it gets a dict or a
tuple of tensors."""


@dataclass(frozen=True, slots=True)
class AgentOutput:
    """What the agent says of S sequences of L steps.

    Attributes:
        policy: distribution over actions, `[S, L]`.
        value: V, `[S, L]`.
        aux_value: the auxiliary head's value on the policy's features, `[S, L]`; None without an
            auxiliary phase.
        state: the memory's state after the last step, `[S, H]`.
    """

    policy: Policy
    value: Float[Tensor, "S L"]
    aux_value: Float[Tensor, "S L"] | None
    state: Float[Tensor, "S H"]


class Agent(nn.Module):
    """Policy, value and auxiliary value over one or two networks.

    See figure 1 of the PPG paper, and OPPG ppg.py:66-155.
    The encoders run in the precision that is asked for, memory and heads in fp32.

    - `separate`: two networks of encoder and memory; the value head stands on the second.
    - `detached`: one network; the value head sends no gradient into it, in either phase. Only the
      auxiliary head trains the network on values.
    - `shared_in_aux`: one network; the value head's gradient reaches it in the auxiliary phase
      only (figure 7 of the paper).
    - `shared`: one network, which the value head's gradient reaches in both phases.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        config: the networks.
        action: the distribution of continuous actions.
        obs_norm: normalization of observed numbers.
        value_norm: normalization of values.
        generator: source of the initial weights.
        auxiliary: whether there is an auxiliary value head. It is made last, so that the other
            weights do not depend on it.
        make_encoder: makes a user's own encoder, in place of `config.encoder`.

    Raises:
        ValueError: spaces for which there is no encoder or head.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: ModelConfig,
        *,
        action: ActionConfig = ActionConfig(),
        obs_norm: ObsNormConfig = ObsNormConfig(),
        value_norm: ValueNormConfig = ValueNormConfig(),
        generator: Generator,
        auxiliary: bool,
        make_encoder: EncoderFactory | None = None,
    ) -> None:
        super().__init__()
        self.value_path = config.value_path
        self.reader = ObservationReader(observation_space, obs_norm)

        def encoder(config: ModelConfig) -> nn.Module:
            if make_encoder is None:
                return encoder_for(observation_space, config, generator)
            made = make_encoder(observation_space)
            if not isinstance(getattr(made, "num_features", None), int):
                needed = "an integer attribute num_features: the width of what it returns"
                raise ValueError(f"the encoder {type(made).__name__} needs {needed}")
            return made

        def memory(encoder: nn.Module) -> Memory:
            num_inputs: Any = encoder.num_features
            return make_memory(num_inputs, config, generator)

        def value_head(memory: Memory) -> nn.Linear:
            linear = nn.Linear(memory.num_features, 1)
            return Initializer(config.heads, generator)(linear, config.value_head_scale)

        value_config = replace(config, activation=config.value_activation or config.activation)
        self.encoder = encoder(config)
        self.value_encoder = encoder(value_config) if config.value_path == "separate" else None
        self.memory = memory(self.encoder)
        self.value_memory = None if self.value_encoder is None else memory(self.value_encoder)
        self.policy_head = PolicyHead(
            action_space, self.memory.num_features, config, action, generator
        )
        self.value_head = value_head(self.value_memory or self.memory)
        self.aux_value_head = value_head(self.memory) if auxiliary else None
        self.value_normalizer: ValueNormalizer | None = None
        if value_norm.statistics != "none":
            statistics, decay = value_norm.statistics, value_norm.decay
            self.value_normalizer = ValueNormalizer(statistics=statistics, decay=decay)

    @property
    def state_size(self) -> int:
        """Width H of the memory's state: the policy network's, then a separate value network's."""
        return sum(memory.state_size for memory in (self.memory, self.value_memory) if memory)

    def initial_state(self, num_sequences: int) -> Float[Tensor, "S H"]:
        """The memory's state before the first step."""
        return torch.zeros(num_sequences, self.state_size, device=self.value_head.weight.device)

    def networks(self) -> list[list[nn.Parameter]]:
        """The parameters by network, each of which has its learning rate.

        All of them, or the policy's and the value function's where these are two.
        """
        if self.value_path != "separate":
            return [list(self.parameters())]
        policy, value = [], []
        for name, parameter in self.named_parameters():
            is_of_value = name.startswith(("value_encoder.", "value_memory.", "value_head."))
            (value if is_of_value else policy).append(parameter)
        return [policy, value]

    def forward(
        self,
        obs: Shaped[Tensor, "S L *shape"],
        first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
        action_mask: Bool[Tensor, "S L A"] | None = None,
        *,
        precision: Precision = "fp32",
        in_aux_phase: bool = False,
    ) -> AgentOutput:
        """Evaluate S sequences of L steps; acting is the same call with L = 1.

        Args:
            obs: observations as they are stored.
            first: true where the step begins an episode; the memory is reset before it.
            state: the memory's state before the first step.
            action_mask: true where an action is allowed.
            precision: of the encoders.
            in_aux_phase: whether the call computes the auxiliary loss.
        """
        inputs = self.reader(obs.flatten(0, 1))
        return self.after_reading(
            inputs, first, state, action_mask, precision=precision, in_aux_phase=in_aux_phase
        )

    def after_reading(
        self,
        inputs: Any,
        first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
        action_mask: Bool[Tensor, "S L A"] | None = None,
        *,
        precision: Precision = "fp32",
        in_aux_phase: bool = False,
    ) -> AgentOutput:
        """The same for observations that the reader has read, `[S·L, …]`."""
        ask = partial(self._follow, inputs, first, state, precision)
        features, policy_state = ask(self.encoder, self.memory)
        if self.value_encoder is not None and self.value_memory is not None:
            value_features, value_state = ask(self.value_encoder, self.value_memory)
        else:
            value_state = state[:, self.memory.state_size :]
            reached = self.value_path == "shared" or (
                self.value_path == "shared_in_aux" and in_aux_phase
            )
            value_features = features if reached else features.detach()
        policy = self.policy_head(features, action_mask)
        value = self._value(self.value_head, value_features)
        aux_head = self.aux_value_head
        aux_value = None if aux_head is None else self._value(aux_head, features)
        state = torch.cat([policy_state, value_state], dim=-1)
        return AgentOutput(policy, value, aux_value, state)

    def value(
        self,
        obs: Shaped[Tensor, "S L *shape"],
        first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
        *,
        precision: Precision = "fp32",
    ) -> Float[Tensor, "S L"]:
        """V alone, without the policy's network where it has one of its own."""
        if self.value_encoder is None or self.value_memory is None:
            return self.forward(obs, first, state, precision=precision).value
        inputs, memory = self.reader(obs.flatten(0, 1)), self.value_memory
        features, _ = self._follow(inputs, first, state, precision, self.value_encoder, memory)
        return self._value(self.value_head, features)

    def policy(
        self,
        obs: Shaped[Tensor, "S L *shape"],
        first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
        action_mask: Bool[Tensor, "S L A"] | None = None,
        *,
        precision: Precision = "fp32",
    ) -> tuple[Policy, Float[Tensor, "S H"]]:
        """The policy alone, without the value's network, and the memory's next state.

        A value network's part of the state stays as it is.
        """
        inputs = self.reader(obs.flatten(0, 1))
        features, own = self._follow(inputs, first, state, precision, self.encoder, self.memory)
        state = torch.cat([own, state[:, self.memory.state_size :]], dim=-1)
        return self.policy_head(features, action_mask), state

    @torch.no_grad()
    def update_value_statistics(self, target: Float[Tensor, "..."]) -> bool:
        """Take value targets into the statistics; returns whether values now mean something else.

        From the second call on this is Pop-Art (van Hasselt et al. 2016, "Learning values across
        many orders of magnitude", equation 9). A head says `o`, which means `σ o + μ`. When the
        statistics move from (μ, σ) to (μ', σ'), the head's last layer is rescaled to `w' = σ w /
        σ'` and `b' = (σ b + μ − μ') / σ'`. So every value stays what it was, up to rounding.
        Without that each move shifts all values, the next targets bootstrap from the shifted ones,
        these move the statistics further, and values run away.

        The first call leaves the heads as they are, because they have learned nothing that could be
        kept. Their output now means the first targets' mean and deviation. Were the values of 0
        kept, then a head would begin `μ / σ` deviations away from all targets, which is 10⁴ and
        more where these hardly vary. This call alone returns true.

        Adam's moments stay as they are. They are averages of past gradients, which are in the old
        units by a factor σ/σ' (its square below the heads). Adam forgets them within 1 / (1 − β₂)
        steps, and σ'/σ is near 1 soon: the k-th of k equal batches moves it by about 1/k.
        """
        if (normalizer := self.value_normalizer) is None:
            return False
        is_first = normalizer.moments.is_empty
        old_mean, old_std = normalizer.mean.double(), normalizer.std.double()
        normalizer.update(target)
        if is_first:
            return True
        mean, std = normalizer.mean.double(), normalizer.std.double()
        for head in (self.value_head, self.aux_value_head):
            if head is not None:
                # In place: compiled steps and optimizers hold these tensors.
                head.weight.copy_(head.weight.double() * (old_std / std))
                head.bias.copy_((head.bias.double() * old_std + old_mean - mean) / std)
        return False

    def in_value_units(self, value: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Values, targets or their differences in the units of the value heads.

        They are divided by the targets' deviation, if values are normalized.
        """
        return value if self.value_normalizer is None else value / self.value_normalizer.std

    def _follow(
        self,
        inputs: Any,
        first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
        precision: Precision,
        encoder: nn.Module,
        memory: Memory,
    ) -> tuple[Float[Tensor, "S L D"], Float[Tensor, "S K"]]:
        """What a network's encoder and memory make of observations, and its next state."""
        split = self.memory.state_size
        own_state = state[:, :split] if memory is self.memory else state[:, split:]
        with in_precision(precision, first.device):
            features = encoder(inputs).float()
        return memory(features.unflatten(0, first.shape), first, own_state)

    def _value(self, head: nn.Module, features: Float[Tensor, "S L D"]) -> Float[Tensor, "S L"]:
        """What a value head says, in units of the rewards learned from."""
        value = head(features).squeeze(-1)
        return value if self.value_normalizer is None else self.value_normalizer.denormalize(value)
