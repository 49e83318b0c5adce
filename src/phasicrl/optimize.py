"""Gradient clipping, Adam, means of metrics. Kind: pure; names that end in `_` write in place.

Eager and compiled steps use the same functions. Several processes average their gradients before
clipping.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Adam

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
"""Names of what Adam keeps of a parameter."""


class AdamState(NamedTuple):
    """Adam's state: running means of gradients and of their squares, and numbers of steps."""

    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


def clip_gradients(
    gradient_groups: Sequence[Sequence[Tensor]], max_norm: float | None, *, foreach: bool
) -> tuple[list[list[Tensor]], Tensor]:
    """Scale the gradients of each network so that their norm is at most `max_norm`.

    Networks have separate norms, so that a large value loss does not shrink the policy's step.

    Args:
        gradient_groups: gradients of each network, empty if it is not trained; at least one
            is trained.
        max_norm: maximum norm; None clips nothing.
        foreach: whether to compute the norm by a kernel for many tensors, or by an operation per
            tensor, which can be compiled.

    Returns:
        The gradients of trained networks, and the norm of all of them before clipping, 0-d.
    """
    clipped, norms = [], []
    for network in filter(None, gradient_groups):
        gradients = list(network)
        if foreach:
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
        else:
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        if max_norm is not None:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            gradients = list(torch._foreach_mul(gradients, factor))
        clipped.append(gradients)
        norms.append(norm)
    return clipped, norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def eager_adam_step_(
    optimizer: Adam, parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, apply_if: Tensor
) -> None:
    """Make one eager step of Adam for some parameters, in place.

    Args:
        optimizer: optimizer whose groups have `lr`, `betas`, `eps` and perhaps `eps_hat`, see
            `adam_`.
        parameters: some of the optimizer's parameters.
        gradients: gradient of each parameter.
        apply_if: whether to apply the step, 0-d bool; false for gradients that are not finite.
    """
    gradient_of = dict(zip(map(id, parameters), gradients, strict=True))
    for group in optimizer.param_groups:
        if members := [p for p in group["params"] if id(p) in gradient_of]:
            grads = [gradient_of[id(parameter)] for parameter in members]
            state = get_adam_state(optimizer, members)
            adam_(members, grads, state, group, rate=group["lr"], apply_if=apply_if, fused=True)


def get_adam_state(optimizer: Adam, parameters: Sequence[Tensor]) -> AdamState:
    """Return Adam's state of the given parameters; where there is none, create zeros."""
    for parameter in parameters:
        if parameter not in optimizer.state:
            state = optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)}
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    states = [optimizer.state[parameter] for parameter in parameters]
    return AdamState(*([state[name] for state in states] for name in ADAM_STATE))


def load_state_(optimizer: Adam, state: dict[str, Any]) -> None:
    """Load an optimizer's state, but not its options.

    The moments get the memory layout and device of the parameters. Loaded moments are contiguous,
    weights of convolutions are channels_last, and the fused Adam ignores strides: it would update a
    weight with the moment of another one. PyTorch loads the number of steps to the CPU, but Adam on
    a GPU needs it there.
    """
    optimizer.load_state_dict(state | {"param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
            else:
                moments[name] = value.to(parameter.device)


@torch.no_grad()
def adam_(
    parameters: list[Tensor], gradients: list[Tensor], state: AdamState, options: Mapping[str, Any],
    *, rate: float | Tensor, apply_if: Tensor, fused: bool,
) -> None:  # fmt: skip
    """Make one step of Adam in place, as PyTorch's fused kernel does.

    Source: Kingma & Ba 2015, algorithm 1; torch/optim/adam.py.

    Args:
        parameters: parameters to move.
        gradients: gradients of the loss.
        state: moments and step counts, 0-d or a vector of equal ones, updated in place.
        options: `betas`; `eps`, added to the root of the second moment; `eps_hat`, whether `eps` is
            added before the bias of the second moment is corrected (TensorFlow) or after (PyTorch).
        rate: learning rate, 0-d.
        apply_if: whether to apply the step, 0-d bool.
        fused: whether to use PyTorch's fused Adam, or plain operations for a compiler. The fused
            one has one ε, and is not used if parameters with `eps_hat` differ in their number of
            steps.
    """
    (beta1, beta2), eps = options["betas"], options["eps"]
    first, second, steps = state
    eps_hat = options.get("eps_hat", False)
    counts = {float(step) for step in steps} if fused and eps_hat else set[float]()
    if fused and len(counts) < 2:
        if counts:  # the kernel adds ε after the correction, so correct ε as well
            eps = eps / math.sqrt(1 - beta2 ** (1 + counts.pop()))
        # The kernel ignores strides, and a convolution may give its gradient in another layout.
        gradients = [
            gradient if gradient.stride() == parameter.stride()
            else torch.empty_like(parameter).copy_(gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]  # fmt: skip
        # A list, because the host would read a single tensor.
        torch._foreach_add_(steps, [apply_if.to(steps[0].dtype)] * len(steps))
        torch._fused_adam_(
            parameters, gradients, first, second, [], steps,
            lr=rate, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps,
            amsgrad=False, maximize=False, found_inf=(~apply_if).to(torch.float),
        )  # fmt: skip
        return
    columns = zip(parameters, gradients, first, second, steps, strict=True)
    for parameter, gradient, mean, mean_square, step in columns:
        new_mean = mean.lerp(gradient, 1 - beta1)
        new_square = (mean_square * beta2).addcmul(gradient, gradient, value=1 - beta2)
        count = step.flatten()[0].double() + 1  # 1 − 0.999 in single precision has three digits
        size = (rate / (1 - beta1**count)).to(parameter.dtype)
        root = (1 - beta2**count).sqrt().to(parameter.dtype)
        spread = (new_square.sqrt() + eps) / root if eps_hat else new_square.sqrt() / root + eps
        moved = parameter - size * new_mean / spread
        changed = (parameter, mean, mean_square, step)
        for old, new in zip(changed, (moved, new_mean, new_square, step + 1), strict=True):
            old.copy_(torch.where(apply_if, new, old))


class MeanAccumulator:
    """Means of metrics weighted by samples, summed on their device and read once at the end."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, ...], tuple[Tensor, float]] = {}
        self._before: dict[str, tuple[float, float]] = {}

    def add(self, names: tuple[str, ...], values: Float[Tensor, " n"], weight: float) -> None:
        """Add the means `[n]` of named metrics over `weight` samples."""
        with torch.inference_mode():  # one kernel for all names
            if names not in self._parts:
                self._parts[names] = torch.zeros_like(values, dtype=torch.float64), 0.0
            sums, weights = self._parts[names]
            self._parts[names] = sums.add_(values, alpha=weight), weights + weight

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the sum of each metric and its number of samples, to save in a checkpoint."""
        return [
            {"names": list(names), "sums": sums, "weight": weight}
            for names, (sums, weight) in self._parts.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """Restore the result of `state_dict`, on a device."""
        for part in state:
            self._parts[tuple(part["names"])] = part["sums"].to(device), part["weight"]
        self._before = self._get_sums_and_weights()

    def pop_means(self) -> dict[str, float]:
        """Return the mean of each metric since the last call, or since `load_state_dict`."""
        recent_means: dict[str, float] = {}
        for name, (total, weight) in self._get_sums_and_weights().items():
            total_before, weight_before = self._before.get(name, (0.0, 0.0))
            if weight > weight_before:
                recent_means[name] = (total - total_before) / (weight - weight_before)
            self._before[name] = total, weight
        return recent_means

    def result(self) -> dict[str, float]:
        """Return the mean of each metric, in alphabetical order; NaN where all weights are 0."""
        items = self._get_sums_and_weights().items()
        return {name: total / weight if weight else math.nan for name, (total, weight) in items}

    def _get_sums_and_weights(self) -> dict[str, tuple[float, float]]:
        """Return the sum and the weight of each metric, in alphabetical order."""
        sums_and_weights: dict[str, tuple[float, float]] = {}
        for names, (sums, weight) in self._parts.items():
            for name, value in zip(names, sums.tolist(), strict=True):
                total, weights = sums_and_weights.get(name, (0.0, 0.0))
                sums_and_weights[name] = total + value, weights + weight
        return dict(sorted(sums_and_weights.items()))


class DivergedError(ValueError):
    """Divergence of the training: losses, gradients or weights are not finite."""

    exit_code = 3


def make_diverged_error(names: Sequence[str]) -> DivergedError:
    """Make the error that names the metrics or weights that are not finite."""
    return DivergedError(
        f"training has diverged: not every number of {' and '.join(names)} is finite. "
        "Start again with a lower ppo.learning_rate, with clipped gradients "
        "(ppo.max_grad_norm 0.5), or with normalized rewards (reward_norm.per rollout)"
    )
