"""Policy head: features to distributions over actions. Kind: state (modules)."""

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn
from torch.nn import functional

from phasicrl.config import ActionConfig
from phasicrl.models.distributions import Categorical, JointPolicy, Normal, Policy, TanhNormal
from phasicrl.spaces import ActionLayout, leaves


class PolicyHead(nn.Module):
    """Layer from features to the distribution over the actions of a space.

    An action is a vector of K components, the numbers of `leaves(space)` in order; a scalar for a
    plain `Discrete` space. Continuous components are stored as drawn, before any squash, so that
    their log-probabilities are exact even near the bounds. `env_action` converts them.

    The layer's outputs are the logits, with components of equal width next to each other; the means
    of the continuous components; and, if `action.std` depends on features, a number for each
    standard deviation. `dist_params` have the same order: log-probabilities, means, standard
    deviations.

    Standard deviations by `action.std`, before a squash; trained ones are clamped to `min_std` and
    `max_std`, without effect on their gradient:
    - `parameter`: exp(log_std), trained, initially `std_value` (CleanRL, SB3).
    - `softplus`: softplus(x) / softplus(0) · `std_value` + `min_std` (Acme networks.py:332-346),
      initially about `std_value` + `min_std`.
    - `softplus_tanh`: as `softplus`, of tanh(x): within 0.45 and 1.89 times `std_value` (source
      004, "final tanh activation", with `mean` tanh).
    - `exp`: exp(x) · `std_value` + `min_std`.
    - `fixed`: `std_value`.
    - `range`: `std_value` · (high − low) of the policy's interval, which is [−1, 1] with `rescale`
      or `tanh`.

    Attributes:
        num_choices: number of choices of each component of an action; 0 for a continuous one.
        action_shape: `()` for a plain `Discrete` space, else `(K,)`.
        action_dtype: int64, or float32 if a component is continuous.
        mask_size: number of choices of all discrete components, the width of an action mask.
        num_dist_params: number of parameters P of the distribution.
        order: columns `[K]` of an action sorted by width, continuous ones last.
        option_order: columns `[M]` of a mask in the order of the logits.
        mask_order: columns `[M]` of the logits in the order of a mask.
        bounds: lowest and highest values `[2, n]` of the continuous components.
        fixed_std: standard deviations `[n]` that are not trained.

    Args:
        space: action space of one environment.
        action: options of continuous actions.
        make_layer: function of the number of outputs that makes the layer.

    Raises:
        ValueError: a space lacks finite bounds where they are required.
    """

    def __init__(
        self, space: gym.Space[Any], action: ActionConfig, make_layer: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        boxes = [part for _, part in leaves(space) if isinstance(part, gym.spaces.Box)]
        for box in boxes:
            _check_bounds(box, action)
        self.action, self.rescales = action, action.rescale or action.squash == "tanh"
        layout = ActionLayout(space)
        self.num_choices = widths = layout.num_choices.tolist()
        kinds = sorted(set(widths), key=lambda width: (width == 0, width))
        order = [column for kind in kinds for column, width in enumerate(widths) if width == kind]
        options = torch.arange(sum(widths)).split(widths)
        # The joint policy has a part for each width, continuous components last; a group is the
        # number of components of a width, and the width.
        self.part_sizes = [widths.count(kind) for kind in kinds]
        self.groups = [(widths.count(width), width) for width in kinds if width]
        self.num_continuous = n = widths.count(0)
        self.mask_size = sum(widths)
        self.num_dist_params = self.mask_size + 2 * n
        self.action_shape, self.action_dtype = layout.shape, torch.float32 if n else torch.int64
        low, high = bounds = _stack_bounds(boxes)
        unit = (2 if self.rescales else high - low) if action.std == "range" else 1
        # These follow from space and options, and are not saved.
        self.order = nn.Buffer(torch.tensor(order), persistent=False)
        option_order = torch.cat([options[column] for column in order])
        self.option_order = nn.Buffer(option_order, persistent=False)
        self.mask_order = nn.Buffer(option_order.argsort(), persistent=False)
        self.bounds = nn.Buffer(bounds, persistent=False)
        self.fixed_std = nn.Buffer(torch.full((n,), action.std_value) * unit, persistent=False)
        self.log_std = None
        if action.std == "parameter" and n:
            self.log_std = nn.Parameter(torch.full((n,), math.log(action.std_value)))
        from_features = action.std in ("softplus", "softplus_tanh", "exp")
        self.linear: Any = make_layer(self.mask_size + n * (1 + from_features))

    def forward(
        self,
        features: Float[Tensor, "*shape D"],
        action_mask: Bool[Tensor, "*shape M"] | None = None,
    ) -> Policy:
        """Build the action distributions `[…]` from features; masked choices have probability 0."""
        outputs = self.linear(features)
        logits = outputs[..., : self.mask_size]
        if action_mask is not None:
            # A finite number, because 0 × −∞ would be NaN in the entropy and the KL divergence.
            allowed = action_mask.index_select(-1, self.option_order)
            logits = torch.where(allowed, logits, torch.finfo(logits.dtype).min / 4)
        log_probs = [group.log_softmax(-1).flatten(-2) for group in self._split(logits)]
        normals = self._mean_and_std(outputs[..., self.mask_size :]) if self.num_continuous else []
        return self.distribution(torch.cat([*log_probs, *normals], -1))

    def distribution(self, dist_params: Float[Tensor, "*shape P"]) -> Policy:
        """Build the action distributions `[…]` from their parameters `[…, P]`."""
        if not self.action_shape:
            return Categorical(dist_params)
        n = self.num_continuous
        log_probs, mean, std = dist_params.split([self.mask_size, n, n], -1)
        normal = TanhNormal if self.action.squash == "tanh" else Normal
        parts = [*map(Categorical, self._split(log_probs)), *([normal(mean, std)] if n else [])]
        return JointPolicy(dist_params, parts, self.order.split(self.part_sizes))

    def split_log_probs_means_stds(
        self, dist_params: Float[Tensor, "*shape P"]
    ) -> tuple[Float[Tensor, "*shape M"], Float[Tensor, "*shape n"], Float[Tensor, "*shape n"]]:
        """Split parameters into log-probabilities in mask order, means and standard deviations."""
        n = self.num_continuous
        log_probs, mean, std = dist_params.split([self.mask_size, n, n], -1)
        return log_probs.index_select(-1, self.mask_order), mean, std

    def env_action(self, action: Num[Tensor, "*shape K"]) -> Num[Tensor, "*shape K"]:
        """Convert stored actions to environment actions, `[…, K]`.

        Continuous components are converted by `action.squash`:
        - `none`: unchanged.
        - `clip`: clipped to [low, high], where one may be infinite; log-probability and entropy are
          those of the unclipped action, as in CleanRL and SB3.
        - `tanh`: tanh, rescaled; log-probability and entropy are those of the tanh in [−1, 1].

        `action.rescale` maps [−1, 1] linearly to [low, high]; `clip` then clips to [−1, 1].
        """
        if not self.num_continuous:
            return action
        columns, (low, high) = self.order[-self.num_continuous :], self.bounds
        value = action.index_select(-1, columns)
        if self.action.squash == "tanh":
            value = value.tanh()
        elif self.action.squash == "clip":
            value = value.clamp(-1, 1) if self.rescales else value.clamp(low, high)
        if self.rescales:
            # `lerp` is exact at both ends, so that rounding never exceeds the bounds.
            value = torch.lerp(low, high, (value + 1) / 2)
        return action.index_copy(-1, columns, value)

    def _split(self, options: Float[Tensor, "*shape M"]) -> list[Float[Tensor, "*shape k A"]]:
        """Split logits or log-probabilities into tensors of components of equal width."""
        sizes = [number * width for number, width in self.groups]
        # `torch.export` writes a split without parts, and cannot read it.
        pairs = zip(options.split(sizes, -1) if sizes else (), self.groups, strict=True)
        return [piece.unflatten(-1, group) for piece, group in pairs]

    def _mean_and_std(self, outputs: Float[Tensor, "*shape m"]) -> list[Float[Tensor, "*shape n"]]:
        """Compute the means and standard deviations `[…, n]` of the continuous components."""
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
        if config.std not in ("fixed", "range"):
            passed = std - std.detach()  # so that a bounded std can come back
            passed = passed if config.max_std is None else passed.nan_to_num()  # of ∞ − ∞
            std = std.detach().clamp(config.min_std, config.max_std) + passed
        return [mean, std.expand_as(mean)]


def _check_bounds(box: gym.spaces.Box, action: ActionConfig) -> None:
    """Check that a space has the bounds that the options require.

    Raises:
        ValueError: the bounds are not finite (for `clip` one of them is enough), or for `range`
            equal.
    """
    needs = {
        "action.std range": action.std == "range",
        "action.squash tanh": action.squash == "tanh",
        "action.squash clip": action.squash == "clip" and not _stack_bounds([box]).isfinite().any(),
        "action.rescale": action.rescale,
    }
    needed_by = [name for name, needed in needs.items() if needed]
    low, high = _stack_bounds([box])
    # With `range`, an interval of length 0 would have a standard deviation of 0.
    usable = (high - low).isfinite() & ((high > low) | (action.std != "range"))
    if needed_by and not usable.all():
        rule = f"finite bounds (low < high for action.std range) for {' and '.join(needed_by)}"
        way = "use action.std parameter, action.squash none and no action.rescale"
        raise ValueError(f"action_space is {box}; expected {rule}. Give it such bounds, or {way}")


def _stack_bounds(boxes: list[gym.spaces.Box]) -> Float[Tensor, "2 n"]:
    """Return the lowest and highest float32 values of all components, within exact bounds.

    If no float32 is within, as in an interval of length 0, it is the one nearest to `low`, which
    `ActionLayout` replaces by `low`.
    """
    pairs = (np.stack([box.low, box.high], dtype=np.float64).reshape(2, -1) for box in boxes)
    exact = torch.from_numpy(np.concatenate([np.empty((2, 0)), *pairs], -1))
    nearest, inward = exact.float(), torch.tensor([[math.inf], [-math.inf]])
    inside = torch.where((nearest - exact) * inward < 0, nearest.nextafter(inward), nearest)
    return torch.where(inside[0] > inside[1], nearest[0], inside)
