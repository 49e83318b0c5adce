"""Action heads and the distributions they make. Kind: state (modules) and pure mathematics (distributions).

Entropy, log-probability and divergence are asked of the distribution that a forward pass returned; the divergence is analytic.
What PPG must keep of the old policy is a tensor: `parameters`, from which `head.distribution` makes the distribution again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol, Self, runtime_checkable

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Generator, Tensor, nn
from torch.nn import functional

from phasicrl.config import ActionConfig, Initialisation, ModelConfig
from phasicrl.models.init import initialise
from phasicrl.spaces import SUPPORTED_ACTIONS, choices, leaves

POINTS = torch.linspace(-5.5, 5.5, 32, dtype=torch.float64)
"""Where the trapezoidal rule of `TanhNormal.entropy` looks, in standard deviations from the mean."""
WEIGHTS = (-0.5 * POINTS**2).softmax(0)
"""The standard normal density there, as weights that add up to 1."""


class Distribution(Protocol):
    """A distribution for every entry of `[…]`."""

    @property
    def noise_shape(self) -> torch.Size:
        """Shape of the noise of one draw."""
        ...

    def noise(self, generator: Generator) -> Float[Tensor, "*shape N"]:
        """The randomness of one draw for every entry, from where the generator is: the same numbers whatever the device."""
        ...

    def draw(self, noise: Float[Tensor, "*shape N"]) -> Tensor:
        """The action that this noise makes, for every entry; no gradient goes through it."""
        ...

    def mode(self) -> Tensor:
        """The most likely action of every entry."""
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


@runtime_checkable  # beartype asks, in the tests
class Policy(Distribution, Protocol):
    """A distribution over actions for every step `[…]`."""

    @property
    def parameters(self) -> Float[Tensor, "*shape P"]:
        """The numbers that define it."""
        ...

    @property
    def mean_std(self) -> Float[Tensor, "*shape"] | None:
        """Standard deviation, averaged over the continuous components; None if there are none."""
        ...

    def sample(self, generator: Generator) -> Tensor:
        """Draw an action for every entry: `draw(noise(generator))`."""
        ...


class CategoricalPolicy:
    """One of A actions, given their normalised log-probabilities."""

    mean_std = None

    def __init__(self, log_probs: Float[Tensor, "*shape A"]) -> None:
        self.log_probs = log_probs

    @property
    def parameters(self) -> Float[Tensor, "*shape A"]:
        """Normalised log-probabilities."""
        return self.log_probs

    def sample(self, generator: Generator) -> Int[Tensor, "*shape"]:
        """Draw actions."""
        return self.draw(self.noise(generator))

    @property
    def noise_shape(self) -> torch.Size:
        """That of the log-probabilities."""
        return self.log_probs.shape

    def noise(self, generator: Generator) -> Float[Tensor, "*shape A"]:
        """`log e` with e ~ Exp(1), for each option."""
        return torch.empty(self.log_probs.shape, device=generator.device).exponential_(generator=generator).log()

    def draw(self, noise: Float[Tensor, "*shape A"]) -> Int[Tensor, "*shape"]:
        """The arg-max of `log p − log e`, which is distributed as p (Gumbel-max)."""
        return (self.log_probs - noise.to(self.log_probs.device)).argmax(-1)

    def mode(self) -> Int[Tensor, "*shape"]:
        """Return the most likely actions."""
        return self.log_probs.argmax(-1)

    def log_prob(self, action: Num[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Look up `log p(a)`; a mixed action holds its integers as floats."""
        return self.log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

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


class Normal:
    """A normal distribution of one continuous component for every entry of `[…]`."""

    def __init__(self, mean: Float[Tensor, "*shape"], std: Float[Tensor, "*shape"]) -> None:
        self.mean, self.std = mean, std

    def sample(self, generator: Generator) -> Float[Tensor, "*shape"]:
        """Draw numbers."""
        return self.draw(self.noise(generator))

    @property
    def noise_shape(self) -> torch.Size:
        """That of the means."""
        return self.mean.shape

    def noise(self, generator: Generator) -> Float[Tensor, "*shape"]:
        """ε ~ N(0, 1)."""
        return torch.randn(self.mean.shape, generator=generator, device=generator.device, dtype=self.mean.dtype)

    def draw(self, noise: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`mean + std·ε`."""
        return (self.mean + self.std * noise.to(self.mean.device)).detach()

    def mode(self) -> Float[Tensor, "*shape"]:
        """Return the mean."""
        return self.mean

    def log_prob(self, action: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`−z²/2 − log std − log(2π)/2` with `z = (a − mean) / std`."""
        return -0.5 * ((action - self.mean) / self.std) ** 2 - self.std.log() - 0.5 * math.log(2 * math.pi)

    def entropy(self) -> Float[Tensor, "*shape"]:
        """`log std + log(2πe)/2`."""
        return self.std.log() + 0.5 * math.log(2 * math.pi * math.e)

    def kl_from(self, old: Normal) -> Float[Tensor, "*shape"]:
        """`(e^2r − 1 − 2r)/2 + ((mean − mean_old)/std)²/2` with `r = log(std_old/std)`.

        Written in r, value and gradient are zero to the last bit where the policies are the same: the derivatives of the first two
        terms are both exactly 1 there.
        """
        twice = 2 * (old.std / self.std).log()
        return 0.5 * (twice.expm1() - twice) + 0.5 * ((self.mean - old.mean) / self.std) ** 2


class TanhNormal(Normal):
    """The distribution of `tanh(u)` in [−1, 1] with u normal, in terms of u: actions are stored, and asked about, before the tanh.

    The divergence is that of the normal distributions, since the tanh is one to one. The mode is that of u, as deterministic evaluation
    wants it: its tanh is the median.
    """

    def log_prob(self, action: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Log-density of `tanh(u)`: that of u less `log |d tanh(u) / du|`."""
        return super().log_prob(action) - _log_slope(action)

    def entropy(self) -> Float[Tensor, "*shape"]:
        """Entropy of u plus `E[log |d tanh(u) / du|]`, which has no closed form: by the trapezoidal rule, the same at every call.

        For means within ±3 it is off by less than 3e-7 up to std = 1.5, 1e-6 up to 2 and 1e-4 up to 3 (3e-3 at 5). The poles of the
        integrand at ±iπ/2 slow a Gauss-Hermite rule of as many points down: 2e-4 at std = 2, 3e-3 at 3.
        """
        points, weights = _quadrature(self.mean)
        return super().entropy() + _log_slope(self.mean.unsqueeze(-1) + self.std.unsqueeze(-1) * points) @ weights


_on_gpu: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}


def _quadrature(like: Tensor) -> tuple[Tensor, Tensor]:
    """Points and weights of the rule, where and as `like` is. A GPU keeps them: to send them each time is to wait each time."""
    if like.device.type == "cpu":
        return POINTS.to(like.dtype), WEIGHTS.to(like.dtype)
    key = (like.device, like.dtype)
    if key not in _on_gpu:
        with torch.inference_mode(False):  # an evaluation may ask first, and a gradient step saves what it multiplies by
            _on_gpu[key] = (POINTS.to(key[0], key[1]), WEIGHTS.to(key[0], key[1]))
    return _on_gpu[key]


def _log_slope(u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`log(1 − tanh(u)²) = 2 (log 2 − u − softplus(−2u))`, which stays finite and exact where the tanh has rounded to ±1."""
    return 2 * (math.log(2) - u + functional.logsigmoid(2 * u))  # torch's softplus is cut off at 20, its logsigmoid is not


class JointPolicy:
    """Independent components: log-probability, entropy and divergence are sums over them.

    Args:
        parameters: what it was made of, `[…, P]`.
        parts: distributions of components of one kind each, `[…, k]`.
        places: where each part's components are in an action, `[k]`.
    """

    def __init__(self, parameters: Float[Tensor, "*shape P"], parts: Sequence[Distribution], places: Sequence[Int[Tensor, " k"]]) -> None:
        self.parameters, self.parts, self.places = parameters, parts, places

    @property
    def mean_std(self) -> Float[Tensor, "*shape"] | None:
        """Standard deviation (before a squash), averaged over the continuous components; None if there are none."""
        return next((part.std.mean(-1) for part in self.parts if isinstance(part, Normal)), None)

    def sample(self, generator: Generator) -> Num[Tensor, "*shape K"]:
        """Draw actions."""
        return self.draw(self.noise(generator))

    @property
    def noise_shape(self) -> torch.Size:
        """Width: a number for each option and each continuous component."""
        width = sum(part.noise_shape[self.parameters.dim() - 1 :].numel() for part in self.parts)
        return torch.Size((*self.parameters.shape[:-1], width))

    def noise(self, generator: Generator) -> Float[Tensor, "*shape N"]:
        """The parts' noise, drawn in turn, side by side: a number for each option and each continuous component."""
        return torch.cat([part.noise(generator).flatten(self.parameters.dim() - 1) for part in self.parts], -1)

    def draw(self, noise: Float[Tensor, "*shape N"]) -> Num[Tensor, "*shape K"]:
        """The parts' draws, each where it belongs."""
        shapes = [part.noise_shape[self.parameters.dim() - 1 :] for part in self.parts]
        pieces = noise.split([shape.numel() for shape in shapes], -1)
        return self._action([part.draw(piece.unflatten(-1, shape)) for part, piece, shape in zip(self.parts, pieces, shapes, strict=True)])

    def mode(self) -> Num[Tensor, "*shape K"]:
        """Return each component's mode."""
        return self._action([part.mode() for part in self.parts])

    def log_prob(self, action: Num[Tensor, "*shape K"]) -> Float[Tensor, "*shape"]:
        """`Σ log p(a_k)`."""
        pieces = (action.index_select(-1, places) for places in self.places)
        return _total(part.log_prob(piece) for part, piece in zip(self.parts, pieces, strict=True))

    def entropy(self) -> Float[Tensor, "*shape"]:
        """`Σ H_k`."""
        return _total(part.entropy() for part in self.parts)

    def kl_from(self, old: JointPolicy) -> Float[Tensor, "*shape"]:
        """`Σ KL_k`."""
        return _total(part.kl_from(old_part) for part, old_part in zip(self.parts, old.parts, strict=True))

    def _action(self, pieces: list[Tensor]) -> Num[Tensor, "*shape K"]:
        """The parts' components where they belong in an action; integers next to floats become floats."""
        components = torch.cat(pieces, -1)
        return torch.empty_like(components).index_copy(-1, torch.cat(list(self.places)), components)


def _total(components: Iterable[Float[Tensor, "*shape k"]]) -> Float[Tensor, "*shape"]:
    """The sum over all components of all parts."""
    return torch.cat(list(components), -1).sum(-1)


class PolicyHead(nn.Module):
    """A linear layer to the distribution over the actions of a space; made by `make_policy_head`.

    An action is a vector of K components: the scalars of `leaves(space)`, in order. Only that of a plain `Discrete` space is a scalar.
    For continuous components it is what was drawn, before any squashing: log-probabilities of stored actions are exact, however near
    to the bounds. `env_action` makes of it what the environment gets.

    The layer's outputs are the logits, components of equal width together so that these are one tensor however many there are; the
    means of the continuous components; and, where `action.std` depends on features, as many numbers that deviations are made of.
    `parameters` are in the same order: log-probabilities, means, deviations.

    Deviations by `action.std`, in units of the draw:
    - `parameter`: exp(log_std), trained, from `std_value` on (CleanRL, SB3).
    - `softplus`: softplus(x) / softplus(0) · `std_value` + `min_std` (Acme networks.py:332-346), about `std_value` at first.
    - `exp`: exp(x) · `std_value` + `min_std`, likewise.
    - `fixed`: `std_value`.
    - `range`: `std_value` · (high − low) of the interval that the policy acts in: with `rescale` or `tanh` that is [−1, 1], of length 2.

    Attributes:
        action_shape: `()` for a plain `Discrete` space, else `(K,)`.
        action_dtype: int64, or float32 if a component is continuous (the others are then integers stored as floats).
        mask_size: options of all discrete components, the width of an action mask.
        num_parameters: P.
    """

    order: Int[Tensor, " K"]
    """Places of the components in an action: by width, continuous ones last."""
    option_order: Int[Tensor, " M"]
    """Places of the logits in a mask."""
    bounds: Float[Tensor, "2 n"]
    """Lowest and highest values of the continuous components."""
    fixed_std: Float[Tensor, " n"]

    def __init__(self, space: gym.Space[Any], num_features: int, model: ModelConfig, action: ActionConfig, *, generator: Generator) -> None:
        super().__init__()
        self.action, self.stretches = action, action.rescale or action.squash == "tanh"
        # Options of each component of an action; 0 where it is continuous.
        widths = [width for _, leaf in leaves(space) for width in choices(leaf) or [0] * math.prod(leaf.shape or ())]
        kinds = sorted(set(widths), key=lambda width: (width == 0, width))
        order = [place for kind in kinds for place, width in enumerate(widths) if width == kind]
        first_option = list(accumulate(widths, initial=0))
        options = [first_option[place] + option for place in order for option in range(widths[place])]
        # A part of the joint policy for every width, the continuous ones last; a group is a number of components of one width.
        self.part_sizes = [widths.count(kind) for kind in kinds]
        self.groups = [(widths.count(width), width) for width in kinds if width]
        self.num_continuous = n = widths.count(0)
        self.mask_size = sum(widths)
        self.num_parameters = self.mask_size + 2 * n
        self.action_shape: tuple[int, ...] = () if isinstance(space, gym.spaces.Discrete) else (len(widths),)
        self.action_dtype = torch.float32 if n else torch.int64
        low, high = bounds = _bounds([leaf for _, leaf in leaves(space) if isinstance(leaf, gym.spaces.Box)])
        unit = (2 if self.stretches else high - low) if action.std == "range" else 1
        constants = {"order": torch.tensor(order), "option_order": torch.tensor(options, dtype=torch.int64), "bounds": bounds}
        for name, values in {**constants, "fixed_std": torch.full((n,), action.std_value) * unit}.items():
            self.register_buffer(name, values, persistent=False)  # follows from space and configuration: moves along, is not saved
        trained = action.std == "parameter" and n > 0
        self.log_std = nn.Parameter(torch.full((n,), math.log(action.std_value))) if trained else None
        num_outputs = self.mask_size + n * (2 if action.std in ("softplus", "exp") else 1)
        self.linear = linear_head(num_features, num_outputs, init=model.heads, scale=model.policy_head_scale, generator=generator)

    def forward(self, features: Float[Tensor, "*shape D"], action_mask: Bool[Tensor, "*shape M"] | None = None) -> Policy:
        """Make the policy for each step; what the mask does not allow gets probability 0 and no gradient."""
        outputs = self.linear(features)
        logits = outputs[..., : self.mask_size]
        if action_mask is not None:
            # A large finite number, not −∞: 0 × −∞ would be NaN in the entropy and the divergence.
            logits = torch.where(action_mask.index_select(-1, self.option_order), logits, torch.finfo(logits.dtype).min / 4)
        log_probs = [group.log_softmax(-1).flatten(-2) for group in self._by_width(logits)]
        return self.distribution(torch.cat([*log_probs, *self._mean_and_std(outputs[..., self.mask_size :])], -1))

    def distribution(self, parameters: Float[Tensor, "*shape P"]) -> Policy:
        """Make the policy again from its `parameters`."""
        if not self.action_shape:
            return CategoricalPolicy(parameters)
        n = self.num_continuous
        log_probs, mean, std = parameters.split([self.mask_size, n, n], -1)
        normal = TanhNormal if self.action.squash == "tanh" else Normal
        parts = [*map(CategoricalPolicy, self._by_width(log_probs)), *([normal(mean, std)] if n else [])]
        return JointPolicy(parameters, parts, self.order.split(self.part_sizes))

    def env_action(self, action: Num[Tensor, "*shape K"]) -> Num[Tensor, "*shape K"]:
        """What the environment gets for stored actions: discrete components as they are, continuous ones squashed and stretched.

        - `none`: the draw. `clip`: the draw, clipped to [low, high]; its log-probability and entropy stay those of the draw, as in CleanRL
          and SB3. `tanh`: the draw's tanh, stretched; log-probability and entropy are the tanh's, in [−1, 1].
        - With `rescale` the draw (clipped to [−1, 1] by `clip`) is stretched linearly: −1 to low, 1 to high.
        """
        if not self.num_continuous:
            return action
        places, (low, high) = self.order[-self.num_continuous :], self.bounds
        value = action.index_select(-1, places)
        if self.action.squash == "tanh":
            value = value.tanh()
        elif self.action.squash == "clip":
            value = value.clamp(-1, 1) if self.stretches else value.clamp(low, high)
        if self.stretches:
            value = torch.lerp(low, high, (value + 1) / 2)  # exact at both ends: rounding does not lead outside
        return action.index_copy(-1, places, value)

    def _by_width(self, options: Float[Tensor, "*shape M"]) -> list[Float[Tensor, "*shape k A"]]:
        """Logits or log-probabilities of the discrete components, those of equal width in one tensor."""
        pieces = options.split([number * width for number, width in self.groups], -1)
        return [piece.unflatten(-1, group) for piece, group in zip(pieces, self.groups, strict=True)]

    def _mean_and_std(self, outputs: Float[Tensor, "*shape m"]) -> tuple[Float[Tensor, "*shape n"], Float[Tensor, "*shape n"]]:
        """The normal distributions' parameters, from the layer's outputs for them."""
        config, n = self.action, self.num_continuous
        mean = outputs[..., :n].tanh() if config.mean == "tanh" else outputs[..., :n]
        if config.std == "softplus":
            std = functional.softplus(outputs[..., n:]) * (config.std_value / math.log(2)) + config.min_std
        elif config.std == "exp":
            std = outputs[..., n:].exp() * config.std_value + config.min_std
        else:
            std = self.fixed_std if self.log_std is None else self.log_std.exp()
        return mean, std.expand_as(mean)


def make_policy_head(
    space: gym.Space[Any], num_features: int, model: ModelConfig, action: ActionConfig, *, generator: Generator
) -> PolicyHead:
    """The head for an action space.

    Raises:
        ValueError: no head for this kind of space, or no finite bounds where they are needed.
    """
    parts = [leaf for _, leaf in leaves(space)]
    for part in parts or [space]:
        if isinstance(part, gym.spaces.Box) and part.dtype.kind == "f":
            _check_bounds(part, action)
        elif not isinstance(part, (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)):
            raise ValueError(f"actions of the kind {part} are not supported; supported: {SUPPORTED_ACTIONS}")
    return PolicyHead(space, num_features, model, action, generator=generator)


def _check_bounds(box: gym.spaces.Box, action: ActionConfig) -> None:
    """Refuse bounds that the configuration cannot work with."""
    needs = {
        "action.std range": action.std == "range",
        f"action.squash {action.squash}": action.squash != "none",
        "action.rescale": action.rescale,
    }
    needed_by = [name for name, needed in needs.items() if needed]
    low, high = _bounds([box])
    # Of a range of 0, `range` would make a deviation of 0.
    usable = (high - low).isfinite() & ((high > low) | (action.std != "range"))
    if needed_by and not usable.all():
        raise ValueError(
            f"actions of the kind {box} have no bounds that are finite and apart, which {' and '.join(needed_by)} cannot do without; "
            "take action.std parameter, action.squash none and no action.rescale, or give the action space such bounds"
        )


def _bounds(boxes: list[gym.spaces.Box]) -> Float[Tensor, "2 n"]:
    """The lowest and highest values of all components of the spaces."""
    pairs = (torch.tensor(np.stack([box.low, box.high]), dtype=torch.float32).reshape(2, -1) for box in boxes)
    return torch.cat([torch.empty(2, 0), *pairs], -1)


def linear_head(num_features: int, num_outputs: int, *, init: Initialisation, scale: float, generator: Generator) -> nn.Linear:
    """A linear output layer with weights by a scheme."""
    linear = nn.Linear(num_features, num_outputs)
    initialise(linear, init, scale=scale, generator=generator)
    return linear
