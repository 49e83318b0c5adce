"""Action heads: from features to distributions over actions. Kind: state (modules)."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Bool, Float, Num
from torch import Generator, Tensor, nn
from torch.nn import functional

from phasicrl.config import ActionConfig, ModelConfig
from phasicrl.models.distributions import Categorical, JointPolicy, Normal, Policy, TanhNormal
from phasicrl.models.init import Initializer
from phasicrl.spaces import choices, leaves


class PolicyHead(nn.Module):
    """A linear layer to the distribution over the actions of a space.

    An action is a vector of K components: the scalars of `leaves(space)`, in order. Only that of a
    plain `Discrete` space is a scalar. For continuous components it is what was drawn, before any
    squashing: log-probabilities of stored actions are exact, however near to the bounds.
    `env_action` makes of it what the environment gets.

    The layer's outputs are the logits, components of equal width together so that these are one
    tensor however many there are; the means of the continuous components; and, where `action.std`
    depends on features, as many numbers that deviations are made of. `dist_params` are in the same
    order: log-probabilities, means, deviations.

    Deviations by `action.std`, in units of the draw:
    - `parameter`: exp(log_std), trained, from `std_value` on (CleanRL, SB3).
    - `softplus`: softplus(x) / softplus(0) · `std_value` + `min_std` (Acme networks.py:332-346),
      about `std_value` at first.
    - `softplus_tanh`: the same of tanh(x): from 0.45 to 1.89 times `std_value`, so that it cannot
      explode (source 004, "final tanh activation", with `mean` tanh).
    - `exp`: exp(x) · `std_value` + `min_std`, likewise.
    - `fixed`: `std_value`.
    - `range`: `std_value` · (high − low) of the interval that the policy acts in: with `rescale` or
      `tanh` that is [−1, 1], of length 2.

    Attributes:
        widths: options of each component of an action; 0 where it is continuous.
        action_shape: `()` for a plain `Discrete` space, else `(K,)`.
        action_dtype: int64, or float32 if a component is continuous (the others are then integers
            stored as floats).
        mask_size: options of all discrete components, the width of an action mask.
        num_dist_params: P.
        order: places `[K]` of the components in an action: by width, continuous ones last.
        option_order: places `[M]` of the logits in a mask.
        mask_order: places `[M]` of a mask's options among the logits.
        bounds: lowest and highest values `[2, n]` of the continuous components.
        fixed_std: deviations `[n]` that are not trained.

    Raises:
        ValueError: a space has no finite bounds where they are needed.
    """

    def __init__(
        self,
        space: gym.Space[Any],
        num_features: int,
        model: ModelConfig,
        action: ActionConfig,
        generator: Generator,
    ) -> None:
        super().__init__()
        parts = [leaf for _, leaf in leaves(space)]
        boxes = [part for part in parts if isinstance(part, gym.spaces.Box)]
        for box in boxes:
            _check_bounds(box, action)
        self.action, self.stretches = action, action.rescale or action.squash == "tanh"
        of_parts = [choices(part) or [0] * math.prod(part.shape or ()) for part in parts]
        self.widths = widths = list(chain(*of_parts))
        kinds = sorted(set(widths), key=lambda width: (width == 0, width))
        order = [place for kind in kinds for place, width in enumerate(widths) if width == kind]
        options = torch.arange(sum(widths)).split(widths)
        # A part of the joint policy for every width, the continuous ones last; a group is a number
        # of components of one width.
        self.part_sizes = [widths.count(kind) for kind in kinds]
        self.groups = [(widths.count(width), width) for width in kinds if width]
        self.num_continuous = n = widths.count(0)
        self.mask_size = sum(widths)
        self.num_dist_params = self.mask_size + 2 * n
        self.action_shape: tuple[int, ...] = (len(widths),)
        if isinstance(space, gym.spaces.Discrete):
            self.action_shape = ()
        self.action_dtype = torch.float32 if n else torch.int64
        low, high = bounds = _bounds(boxes)
        unit = (2 if self.stretches else high - low) if action.std == "range" else 1
        # These follow from space and configuration: they move along, and are not saved.
        self.order = nn.Buffer(torch.tensor(order), persistent=False)
        option_order = torch.cat([options[place] for place in order])
        self.option_order = nn.Buffer(option_order, persistent=False)
        self.mask_order = nn.Buffer(option_order.argsort(), persistent=False)
        self.bounds = nn.Buffer(bounds, persistent=False)
        fixed_std = torch.full((n,), action.std_value) * unit
        self.fixed_std = nn.Buffer(fixed_std, persistent=False)
        self.log_std = None
        if action.std == "parameter" and n:
            self.log_std = nn.Parameter(torch.full((n,), math.log(action.std_value)))
        from_features = action.std in ("softplus", "softplus_tanh", "exp")
        num_outputs = self.mask_size + n * (1 + from_features)
        linear = nn.Linear(num_features, num_outputs)
        self.linear = Initializer(model.heads, generator)(linear, model.policy_head_scale)

    def forward(
        self,
        features: Float[Tensor, "*shape D"],
        action_mask: Bool[Tensor, "*shape M"] | None = None,
    ) -> Policy:
        """Make the policy of each step.

        What the mask does not allow gets probability 0 and no gradient.
        """
        outputs = self.linear(features)
        logits = outputs[..., : self.mask_size]
        if action_mask is not None:
            # A large finite number, not −∞: 0 × −∞ would be NaN in the entropy and the divergence.
            allowed = action_mask.index_select(-1, self.option_order)
            logits = torch.where(allowed, logits, torch.finfo(logits.dtype).min / 4)
        log_probs = [group.log_softmax(-1).flatten(-2) for group in self._by_width(logits)]
        mean_and_std = self._mean_and_std(outputs[..., self.mask_size :])
        return self.distribution(torch.cat([*log_probs, *mean_and_std], -1))

    def distribution(self, dist_params: Float[Tensor, "*shape P"]) -> Policy:
        """Make the policy again from its `dist_params`."""
        if not self.action_shape:
            return Categorical(dist_params)
        n = self.num_continuous
        log_probs, mean, std = dist_params.split([self.mask_size, n, n], -1)
        normal = TanhNormal if self.action.squash == "tanh" else Normal
        parts = [*map(Categorical, self._by_width(log_probs)), *([normal(mean, std)] if n else [])]
        return JointPolicy(dist_params, parts, self.order.split(self.part_sizes))

    def describe(
        self, dist_params: Float[Tensor, "*shape P"]
    ) -> tuple[Float[Tensor, "*shape M"], Float[Tensor, "*shape n"], Float[Tensor, "*shape n"]]:
        """Return log-probabilities in the order of a mask, means and standard deviations."""
        n = self.num_continuous
        log_probs, mean, std = dist_params.split([self.mask_size, n, n], -1)
        return log_probs.index_select(-1, self.mask_order), mean, std

    def env_action(self, action: Num[Tensor, "*shape K"]) -> Num[Tensor, "*shape K"]:
        """What the environment gets for stored actions.

        Discrete components stay as they are, continuous ones are squashed and stretched:
        - `none`: the draw. `clip`: the draw, clipped to [low, high]; its log-probability and
          entropy stay those of the draw, as in CleanRL and SB3. `tanh`: the draw's tanh, stretched;
          log-probability and entropy are the tanh's, in [−1, 1].
        - With `rescale` the draw (clipped to [−1, 1] by `clip`) is stretched linearly: −1 to low, 1
          to high.
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
            # Exact at both ends: rounding does not lead outside.
            value = torch.lerp(low, high, (value + 1) / 2)
        return action.index_copy(-1, places, value)

    def _by_width(self, options: Float[Tensor, "*shape M"]) -> list[Float[Tensor, "*shape k A"]]:
        """Logits or log-probabilities of discrete components, those of equal width in a tensor."""
        pieces = options.split([number * width for number, width in self.groups], -1)
        pairs = zip(pieces, self.groups, strict=True)
        return [piece.unflatten(-1, group) for piece, group in pairs]

    def _mean_and_std(self, outputs: Float[Tensor, "*shape m"]) -> list[Float[Tensor, "*shape n"]]:
        """The normal distributions' parameters, from the layer's outputs for them."""
        config, n = self.action, self.num_continuous
        mean = outputs[..., :n].tanh() if config.mean == "tanh" else outputs[..., :n]
        if config.std in ("softplus", "softplus_tanh"):
            unit, raw = config.std_value / math.log(2), outputs[..., n:]
            raw = raw.tanh() if config.std == "softplus_tanh" else raw
            std = functional.softplus(raw) * unit + config.min_std
        elif config.std == "exp":
            std = outputs[..., n:].exp() * config.std_value + config.min_std
        else:
            std = self.fixed_std if self.log_std is None else self.log_std.exp()
        return [mean, std.expand_as(mean)]


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
            f"actions of the kind {box} have no bounds that are finite and apart, "
            f"which {' and '.join(needed_by)} cannot do without; take action.std parameter, "
            "action.squash none and no action.rescale, or give the action space such bounds"
        )


def _bounds(boxes: list[gym.spaces.Box]) -> Float[Tensor, "2 n"]:
    """The lowest and highest values of all components of the spaces."""
    pairs = (torch.from_numpy(np.stack([box.low, box.high])) for box in boxes)
    return torch.cat([torch.empty(2, 0), *(pair.float().reshape(2, -1) for pair in pairs)], -1)
