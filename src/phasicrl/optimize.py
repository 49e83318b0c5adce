"""Gradient clipping, Adam, means of metrics. Kind: pure, but for names that end in `_`.

Those write into their arguments. Eager and compiled steps use the same functions. Several
processes average their gradients before the clipping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Adam


def clip(
    networks: Sequence[Sequence[Tensor]], max_norm: float | None, *, at_once: bool
) -> tuple[list[list[Tensor]], Tensor]:
    """Scale the gradients of each network so that their norm is at most `max_norm`.

    Each network has its own norm, so that a large value loss does not shrink the policy's step.

    Args:
        networks: gradients of each network; none is empty.
        max_norm: None is off.
        at_once: by kernels that take many tensors; else by one for each, which a compiler fuses.

    Returns:
        The gradients, and the norm of all of them before, 0-d.
    """
    clipped, norms = [], []
    for gradients in networks:
        norms.append(_norm(gradients, at_once=at_once))
        if max_norm is None:
            clipped.append(list(gradients))
            continue
        factor = (max_norm / (norms[-1] + 1e-6)).clamp(max=1.0)
        if at_once:
            clipped.append(list(torch._foreach_mul(list(gradients), factor)))
        else:
            clipped.append([gradient * factor for gradient in gradients])
    return clipped, norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def _norm(tensors: Sequence[Tensor], *, at_once: bool) -> Tensor:
    """The norm of all numbers together, 0-d."""
    if at_once:
        return torch.stack(torch._foreach_norm(list(tensors))).norm()
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def step_(
    optimizer: Adam, parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, only_if: Tensor
) -> None:
    """One step of Adam with these gradients, eagerly.

    Other parameters stay as they are, and so do their moments.

    Args:
        optimizer: its groups have `lr`, `betas`, `eps`, and `eps_hat` where ε is added before the
            bias is corrected.
        parameters: some of the optimizer's.
        gradients: one for each.
        only_if: nothing changes unless this is true, 0-d: a gradient that is not finite would spoil
            everything for good.
    """
    of = dict(zip(map(id, parameters), gradients, strict=True))
    for group in optimizer.param_groups:
        members = [parameter for parameter in group["params"] if id(parameter) in of]
        if members:
            theirs = [of[id(parameter)] for parameter in members]
            states = [moments(optimizer, parameter) for parameter in members]
            names = ("exp_avg", "exp_avg_sq", "step")
            columns = [[state[name] for state in states] for name in names]
            adam_(
                members, theirs, *columns, rate=group["lr"], betas=group["betas"], eps=group["eps"],
                eps_hat=group.get("eps_hat", False), only_if=only_if, at_once=True,
            )  # fmt: skip


def moments(optimizer: Adam, parameter: Tensor) -> dict[str, Tensor]:
    """What Adam remembers of a parameter, begun as PyTorch does (torch/optim/adam.py:166-181)."""
    if parameter not in optimizer.state:
        state = optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return optimizer.state[parameter]


def restore_layout_(optimizer: Adam) -> None:
    """Lay an optimizer's moments out in memory as its parameters are, and put all where these are.

    PyTorch leaves the number of steps where the file was read, and Adam on a GPU wants it there
    (`Optimizer._process_value_according_to_param_policy`). A file holds moments in plain order, the
    weights of convolutions are channels_last, and the fused Adam walks both without a look at their
    strides: it would move each weight by the moment of another.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)
            elif isinstance(value, Tensor):
                state[name] = value.to(parameter.device)


@torch.no_grad()
def adam_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    *,
    rate: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    eps_hat: bool = False,
    only_if: Tensor,
    at_once: bool,
) -> None:
    """One step of Adam in place, as PyTorch's fused kernel does it.

    Source: Kingma & Ba 2015, algorithm 1; torch/optim/adam.py.

    Args:
        parameters: are moved.
        gradients: of the loss.
        first: running means of gradients.
        second: running means of squared gradients.
        steps: number of steps before this one, 0-d.
        rate: step size, 0-d.
        betas: decays of the two means.
        eps: is added to the root of the second mean.
        eps_hat: add it before the second mean's bias is corrected (TensorFlow), not after
            (PyTorch).
        only_if: nothing changes unless this is true, 0-d.
        at_once: by PyTorch's kernel, else in plain operations, which a compiler fuses. The kernel
            has one ε: with `eps_hat` it is not used for parameters of different numbers of steps.
    """
    beta1, beta2 = betas
    counts = {float(step) for step in steps} if at_once and eps_hat else set[float]()
    if at_once and len(counts) < 2:
        if counts:  # the kernel adds ε after the correction: this ε is then the same
            eps = eps / math.sqrt(1 - beta2 ** (1 + counts.pop()))
        # The kernel ignores strides: in another layout, weights would get the steps of others.
        gradients = list(map(_laid_out_as, parameters, gradients))
        # A list of them: one tensor would be read by the host.
        torch._foreach_add_(steps, [only_if.to(steps[0].dtype)] * len(steps))
        torch._fused_adam_(
            parameters, gradients, first, second, [], steps,
            lr=rate, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps,
            amsgrad=False, maximize=False, found_inf=(~only_if).to(torch.float),
        )  # fmt: skip
        return
    columns = zip(parameters, gradients, first, second, steps, strict=True)
    for parameter, gradient, mean, mean_square, step in columns:
        new_mean = mean.lerp(gradient, 1 - beta1)
        new_square = (mean_square * beta2).addcmul(gradient, gradient, value=1 - beta2)
        count = step.double() + 1  # 1 − 0.999 in single precision has three digits
        size = (rate / (1 - beta1**count)).to(parameter.dtype)
        root = (1 - beta2**count).sqrt().to(parameter.dtype)
        spread = (new_square.sqrt() + eps) / root if eps_hat else new_square.sqrt() / root + eps
        moved = parameter - size * new_mean / spread
        stays = (parameter, mean, mean_square, step)
        for old, new in zip(stays, (moved, new_mean, new_square, step + 1), strict=True):
            old.copy_(torch.where(only_if, new, old))


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, in memory as the parameter is.

    A convolution may give it in another order than channels_last.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


class MeanAccumulator:
    """Means weighted by samples, summed on their device and read once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._weights: dict[tuple[str, ...], float] = {}
        self._before: dict[tuple[str, ...], tuple[Tensor | float, float]] = {}

    def add(self, names: tuple[str, ...], values: Float[Tensor, " n"], weight: float) -> None:
        """Add means over `weight` samples, one for each name."""
        shape = tuple(values.shape)
        assert shape == (len(names),), f"{len(names)} names, {names}, but values of shape {shape}"
        with torch.inference_mode():  # one kernel, however many names
            if names not in self._sums:
                self._sums[names] = torch.zeros_like(values, dtype=torch.float64)
                self._weights[names] = 0.0
            self._sums[names].add_(values, alpha=weight)
        self._weights[names] += weight

    def state_dict(self) -> list[dict[str, Any]]:
        """Return everything that a checkpoint must hold."""
        return [
            {"names": list(names), "sums": sums, "weight": self._weights[names]}
            for names, sums in self._sums.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """Restore `state_dict` on a device."""
        self._sums = {tuple(part["names"]): part["sums"].to(device) for part in state}
        self._weights = {tuple(part["names"]): part["weight"] for part in state}
        self._remember()

    def since_last(self) -> dict[str, float]:
        """Return the means of what was added since the last call or `load_state_dict`."""
        recent = MeanAccumulator()
        for names, sums in self._sums.items():
            before, weight = self._before.get(names, (0.0, 0.0))
            if self._weights[names] > weight:
                recent._sums[names] = sums - before
                recent._weights[names] = self._weights[names] - weight
        self._remember()
        return recent.result()

    def _remember(self) -> None:
        """Store what was added so far."""
        self._before = {names: (sums.clone(), self._weights[names])
                        for names, sums in self._sums.items()}  # fmt: skip

    def result(self) -> dict[str, float]:
        """Return the mean of every name, in alphabetical order; NaN where all weights are 0."""
        sums: dict[str, tuple[float, float]] = {}
        for names, tensor in self._sums.items():
            totals = cast(list[float], tensor.tolist())  # pyright: ignore[reportUnknownMemberType]
            for name, total in zip(names, totals, strict=True):
                before, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (before + total, weights + self._weights[names])
        return {
            name: total / weights if weights else math.nan
            for name, (total, weights) in sorted(sums.items())
        }


class DivergedError(ValueError):
    """Training has left the finite numbers."""

    exit_code = 3


def diverged(what: Sequence[str]) -> DivergedError:
    """The error for a run whose numbers are no longer finite: what they are, and what to do."""
    return DivergedError(
        f"training has diverged: not every number of {' and '.join(what)} is finite; "
        "start again with a lower ppo.learning_rate, with clipped gradients "
        "(ppo.max_grad_norm 0.5), or with normalized rewards (reward_norm)"
    )
