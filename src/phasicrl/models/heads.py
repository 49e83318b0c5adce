"""Action heads and the distributions they make. Kind: state (modules) and pure mathematics (distributions).

Entropy, log-probability and divergence are asked of the distribution that a forward pass returned; the divergence is analytic.
What PPG must keep of the old policy is a tensor: `parameters`, from which `head.distribution` makes the distribution again.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import gymnasium as gym
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from phasicrl.config import Initialisation
from phasicrl.models.init import initialise


class Policy(Protocol):
    """A distribution over actions for every step `[…]`."""

    @property
    def parameters(self) -> Float[Tensor, "*shape P"]:
        """The numbers that define it."""
        ...

    def sample(self, generator: Generator) -> Tensor:
        """Draw an action for every step."""
        ...

    def mode(self) -> Tensor:
        """The most likely action of every step."""
        ...

    def log_prob(self, action: Tensor) -> Float[Tensor, "*shape"]:
        """Log-probability (density) of actions."""
        ...

    def entropy(self) -> Float[Tensor, "*shape"]:
        """Entropy in nats."""
        ...

    def kl_from(self, old: Self) -> Float[Tensor, "*shape"]:
        """KL(old ‖ self) in nats."""
        ...


class CategoricalPolicy:
    """One of A actions, given their normalised log-probabilities."""

    def __init__(self, log_probs: Float[Tensor, "*shape A"]) -> None:
        self.log_probs = log_probs

    @property
    def parameters(self) -> Float[Tensor, "*shape A"]:
        """Normalised log-probabilities."""
        return self.log_probs

    def sample(self, generator: Generator) -> Int[Tensor, "*shape"]:
        """Draw actions: the arg-max of `log p − log e` with e ~ Exp(1) is distributed as p (Gumbel-max)."""
        # Drawn where the generator is, on the CPU, so that a seed gives the same noise on every device.
        noise = torch.empty(self.log_probs.shape, device=generator.device).exponential_(generator=generator)
        return (self.log_probs - noise.log().to(self.log_probs.device)).argmax(-1)

    def mode(self) -> Int[Tensor, "*shape"]:
        """Return the most likely actions."""
        return self.log_probs.argmax(-1)

    def log_prob(self, action: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Look up `log p(a)`."""
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Float[Tensor, "*shape"]:
        """`−Σ p log p`."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl_from(self, old: CategoricalPolicy) -> Float[Tensor, "*shape"]:
        """`Σ p_old (log p_old − log p) + p − p_old`.

        The last two terms add up to zero. With them, value and gradient are zero to the last bit where the policies are the same, not
        merely up to rounding.
        """
        old_probs = old.log_probs.exp()
        return (old_probs * (old.log_probs - self.log_probs) + self.log_probs.exp() - old_probs).sum(-1)


class CategoricalHead(nn.Module):
    """A linear layer to the logits of a `Discrete` action space."""

    def __init__(self, num_features: int, num_actions: int, *, init: Initialisation, scale: float, generator: Generator) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.linear = linear_head(num_features, num_actions, init=init, scale=scale, generator=generator)

    def forward(self, features: Float[Tensor, "*shape D"], action_mask: Bool[Tensor, "*shape A"] | None = None) -> CategoricalPolicy:
        """Make the policy for each step; what the mask does not allow gets probability 0 and no gradient."""
        logits = self.linear(features)
        if action_mask is not None:
            # A large finite number, not −∞: 0 × −∞ would be NaN in the entropy and the divergence.
            logits = torch.where(action_mask, logits, torch.finfo(logits.dtype).min / 4)
        return CategoricalPolicy(logits.log_softmax(-1))

    def distribution(self, parameters: Float[Tensor, "*shape A"]) -> CategoricalPolicy:
        """Make the policy again from its `parameters`."""
        return CategoricalPolicy(parameters)


def make_policy_head(
    space: gym.Space[Any], num_features: int, *, init: Initialisation, scale: float, generator: Generator
) -> CategoricalHead:
    """The head for an action space.

    Raises:
        ValueError: no head for this kind of space.
    """
    if isinstance(space, gym.spaces.Discrete):
        return CategoricalHead(num_features, int(space.n), init=init, scale=scale, generator=generator)
    raise ValueError(f"actions of the kind {space} are not supported; supported: Discrete")


def linear_head(num_features: int, num_outputs: int, *, init: Initialisation, scale: float, generator: Generator) -> nn.Linear:
    """A linear output layer; schemes without a scale of their own give their heads orthogonal weights, as Baselines and CleanRL do."""
    linear = nn.Linear(num_features, num_outputs)
    initialise(linear, "normalized" if init == "normalized" else "orthogonal", scale=scale, generator=generator)
    return linear
