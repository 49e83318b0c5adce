"""The agent: encoder, memory and heads behind one forward contract. Kind: state (a module that remembers nothing between calls)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn

from phasicrl.config import ModelConfig
from phasicrl.models.encoders import ENCODERS
from phasicrl.models.heads import CategoricalHead, CategoricalPolicy, linear_head, make_policy_head
from phasicrl.models.memory import NoMemory

EncoderFactory = Callable[[tuple[int, ...]], nn.Module]
"""A user's own encoder: from the shape of an observation to a module `[N, …] → [N, D]` with an attribute `num_features` (D)."""


@dataclass(frozen=True, slots=True)
class AgentOutput:
    """What the agent says of S sequences of L steps.

    Attributes:
        policy: distribution over actions, `[S, L]`.
        value: V, `[S, L]`.
        aux_value: the auxiliary head's value on the policy's features, `[S, L]`; None without an auxiliary phase.
        state: the memory's state after the last step, `[S, H]`.
    """

    policy: CategoricalPolicy
    value: Float[Tensor, "S L"]
    aux_value: Float[Tensor, "S L"] | None
    state: Float[Tensor, "S H"]


class Agent(nn.Module):
    """Policy, value and auxiliary value over one or two networks (PPG paper, figure 1; OPPG ppg.py:66-155).

    - `separate`: two encoders; the value head stands on the second.
    - `detached`: one encoder; the value head sees its features but sends no gradient back, in either phase: the auxiliary head
      is what trains the encoder on values.
    - `shared`: one encoder for both, gradients and all.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        config: the networks.
        generator: source of the initial weights.
        auxiliary: whether there is an auxiliary value head. It is made last, so that the other weights do not depend on it.
        make_encoder: a user's own encoder, in place of `config.encoder`.

    Raises:
        ValueError: spaces for which there is no encoder or head.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: ModelConfig,
        *,
        generator: Generator,
        auxiliary: bool,
        make_encoder: EncoderFactory | None = None,
    ) -> None:
        super().__init__()
        shape = observation_space.shape
        if not isinstance(observation_space, gym.spaces.Box) or shape is None:
            raise ValueError(f"observations of the kind {observation_space} are not supported; supported: Box (vectors and pictures)")
        self.value_path = config.value_path

        def encoder() -> nn.Module:
            made = make_encoder(shape) if make_encoder else ENCODERS[config.encoder](shape, config, generator=generator)
            if not isinstance(getattr(made, "num_features", None), int):
                raise ValueError(f"the encoder {type(made).__name__} needs an integer attribute num_features: the width of what it returns")
            return made

        def value_head(num_features: int) -> nn.Linear:
            return linear_head(num_features, 1, init=config.init, scale=config.value_head_scale, generator=generator)

        self.encoder = encoder()
        self.value_encoder = encoder() if config.value_path == "separate" else None
        self.memory = NoMemory()
        num_features = int(self.encoder.num_features)  # type: ignore[arg-type]  # nn.Module's attributes are untyped
        self.policy_head: CategoricalHead = make_policy_head(
            action_space, num_features, init=config.init, scale=config.policy_head_scale, generator=generator
        )
        self.value_head = value_head(num_features)
        self.aux_value_head = value_head(num_features) if auxiliary else None

    def initial_state(self, num_sequences: int) -> Float[Tensor, "S H"]:
        """The memory's state before the first step."""
        return torch.zeros(num_sequences, self.memory.state_size, device=self.value_head.weight.device)

    def forward(
        self,
        obs: Shaped[Tensor, "S L *shape"],
        first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
        action_mask: Bool[Tensor, "S L A"] | None = None,
    ) -> AgentOutput:
        """Evaluate S sequences of L steps; acting is the same call with L = 1.

        Args:
            obs: observations in the environment's dtype.
            first: true where the step begins an episode; the memory is reset before it.
            state: the memory's state before the first step.
            action_mask: true where an action is allowed.
        """
        steps = obs.shape[:2]
        flat = obs.flatten(0, 1)
        features, state = self.memory(self.encoder(flat).unflatten(0, steps), first, state)
        policy = self.policy_head(features, action_mask)
        if self.value_encoder is not None:
            value_features = self.value_encoder(flat).unflatten(0, steps)
        else:
            value_features = features.detach() if self.value_path == "detached" else features
        value = self.value_head(value_features).squeeze(-1)
        aux_value = None if self.aux_value_head is None else self.aux_value_head(features).squeeze(-1)
        return AgentOutput(policy, value, aux_value, state)

    def value(self, obs: Shaped[Tensor, "S L *shape"], first: Bool[Tensor, "S L"], state: Float[Tensor, "S H"]) -> Float[Tensor, "S L"]:
        """V alone, without the policy's network where it has one of its own."""
        if self.value_encoder is None:
            return self.forward(obs, first, state).value
        return self.value_head(self.value_encoder(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])).squeeze(-1)

    def policy(
        self,
        obs: Shaped[Tensor, "S L *shape"],
        first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
        action_mask: Bool[Tensor, "S L A"] | None = None,
    ) -> tuple[CategoricalPolicy, Float[Tensor, "S H"]]:
        """The policy alone, without the value's network, and the memory's next state."""
        features, state = self.memory(self.encoder(obs.flatten(0, 1)).unflatten(0, obs.shape[:2]), first, state)
        return self.policy_head(features, action_mask), state
