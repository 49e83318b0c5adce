"""One step of gradient descent on a minibatch, eagerly or in one call.

Kind: effects (moves parameters).

Both ways use the functions of `optimize.py`: gradients, perhaps their mean over processes,
clipping, Adam.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils import _pytree as pytree

from phasicrl import optimize
from phasicrl.config import Precision
from phasicrl.execution import compiled
from phasicrl.execution.plan import Phase
from phasicrl.rollout import Minibatch, Samples

S = TypeVar("S", bound=Samples)
In = TypeVar("In", bound=Samples, contravariant=True)
Noted = tuple[tuple[str, ...], Tensor, float]
"""What a step says: names, their values `[n]`, and the number of samples.

The names are of what the loss noted and of the gradient's norm.
"""
MeanOverRanks = Callable[[Sequence[Tensor]], None]
"""Replaces gradients by their means over all processes, in place."""


class Loss(Protocol[In]):
    """What a gradient step minimizes. Equal losses do the same: compiled steps are kept by them."""

    @property
    def module(self) -> nn.Module:
        """Whose parameters it depends on."""
        ...

    @property
    def precision(self) -> Precision:
        """Of the encoders."""
        ...

    def __call__(self, samples: In, *coefficients: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over samples, and what to note under its full name, 0-d."""
        ...


@dataclass(frozen=True, eq=False)
class StepSettings:
    """How gradients become a step.

    Attributes:
        phase: `policy`, `value` or `aux`; also the gradient's in the metrics.
        networks: parameters by network, each clipped by its own norm.
        optimizer: makes the step.
        max_grad_norm: what gradients are clipped to; None is off.
        mean: over processes; None on one.
    """

    phase: Phase
    networks: Sequence[Sequence[nn.Parameter]]
    optimizer: Adam
    max_grad_norm: float | None
    mean: MeanOverRanks | None = None

    @property
    def norm_name(self) -> str:
        """What the gradient's norm is called in the metrics."""
        return {
            "policy": "gradients/policy_norm",
            "value": "gradients/value_norm",
            "aux": "gradients/aux_norm",
        }[self.phase]


def update_(settings: StepSettings) -> Tensor:
    """Step with the gradients that the parameters have; returns their norm before clipping, 0-d.

    Parameters that the loss does not reach have no gradient, rather than a zero one, so that Adam
    leaves them alone. A gradient that is not finite makes no step: to look here would wait for a
    GPU, so that the phase looks at its means.
    """
    reached = [[p for p in network if p.grad is not None] for network in settings.networks]
    reached = [network for network in reached if network]
    if settings.mean is not None:
        settings.mean([p.grad for network in reached for p in network if p.grad is not None])
    gradients = [[p.grad for p in network if p.grad is not None] for network in reached]
    clipped, norm = optimize.clip(gradients, settings.max_grad_norm, at_once=True)
    parameters, right = list(chain(*reached)), norm.isfinite()
    optimize.step_(settings.optimizer, parameters, list(chain(*clipped)), only_if=right)
    return norm


class _Inputs(NamedTuple):
    """Everything that a compiled step reads or writes, in the order in which its code has it."""

    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]
    rates: list[Tensor]
    rest: dict[str, Tensor]
    coefficients: list[Tensor]
    index: Tensor
    source: dict[str, Tensor]

    def flat(self) -> list[Tensor]:
        """All tensors in one list."""
        moments = chain(self.first, self.second, self.steps)
        kept = chain(self.parameters, moments, self.rates, self.rest.values())
        return [*kept, *self.coefficients, self.index, *self.source.values()]


class CompiledStep:
    """A gradient step in one call, or in two where a mean comes between.

    That is gathering, forward, loss, backward, clipping and Adam.

    Args:
        loss: what is minimized.
        minibatch: one like those to come: as many samples, of a source of the same layout.
        coefficients: like those to come.
        settings: optimizer and clipping.

    Attributes:
        parameters: those that the loss reaches.
        names: what the step notes.

    Raises:
        Exception: of many kinds, where that cannot be traced or compiled.
    """

    def __init__(
        self,
        loss: Loss[S],
        minibatch: Minibatch[S],
        coefficients: tuple[Tensor, ...],
        settings: StepSettings,
    ) -> None:
        self._loss, self._settings = loss, settings
        self._groups = settings.optimizer.param_groups
        named = dict(loss.module.named_parameters())
        reached = _reached(loss, minibatch, coefficients, list(named.values()))
        self._names = [name for name, there in zip(named, reached, strict=True) if there]
        self.parameters = [named[name] for name in self._names]
        everything = chain(named.items(), loss.module.named_buffers())
        rest = {name: x for name, x in everything if name not in self._names}
        states = [optimize.moments(settings.optimizer, parameter) for parameter in self.parameters]
        first, second, steps = (
            [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        self._moments = (first, second, steps)
        rates = [float(group["lr"]) for group in self._groups]
        self._rates = [torch.tensor(rate, device=self.parameters[0].device) for rate in rates]
        place = {id(parameter): i for i, parameter in enumerate(self.parameters)}

        def places(parameters: Sequence[Tensor]) -> list[int]:
            return [place[id(p)] for p in parameters if id(p) in place]

        self._members = [sorted(places(group["params"])) for group in self._groups]
        self._networks = [found for part in settings.networks if (found := places(part))]
        self._functional = compiled.Functional(loss.module)
        self._split, self._like = minibatch.split, minibatch.source
        self.names: tuple[str, ...] = ()
        self._source: tuple[Samples, list[Tensor]] | None = None
        self._kept = [*self.parameters, *chain(*self._moments), *self._rates, *rest.values()]

        # No two inputs may be one tensor here by chance, as they would stay one in the compiled
        # code.
        source = {name: tensor.clone() for name, tensor in minibatch.source.tensors().items()}
        parameters: list[Tensor] = [*self.parameters]
        given = (list(coefficients), minibatch.index.clone(), source)
        example = _Inputs(parameters, first, second, steps, self._rates, rest, *given)
        self._call = self._compile(example)

    def __call__(self, minibatch: Minibatch[S], coefficients: tuple[Tensor, ...]) -> Tensor:
        """Make the step; returns the values of `names`."""
        for rate, group in zip(self._rates, self._groups, strict=True):
            rate.fill_(group["lr"])
        with torch.no_grad():
            if self._source is None or self._source[0] is not minibatch.source:
                self._source = (minibatch.source, list(minibatch.source.tensors().values()))
            return self._call([*self._kept, *coefficients, minibatch.index, *self._source[1]])

    def snapshot(self) -> list[Tensor]:
        """Copies of all that a step changes: parameters and moments."""
        return [tensor.detach().clone() for tensor in chain(self.parameters, *self._moments)]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Take back `snapshot`."""
        now = chain(self.parameters, *self._moments)
        with torch.no_grad():
            for tensor, before in zip(now, snapshot, strict=True):
                tensor.copy_(before)

    def distances(self, before: list[Tensor], one: list[Tensor], other: list[Tensor]) -> float:
        """How far two snapshots are apart, as a share of how far they are from `before`.

        It is the worst of parameters and each moment.
        """
        count = len(self.parameters)
        parts = (slice(count), slice(count, 2 * count), slice(2 * count, 3 * count))
        return max(
            _distance(one[part], other[part]) / max(_distance(before[part], one[part]), 1e-12)
            for part in parts
        )

    def _compile(self, example: _Inputs) -> Callable[[list[Tensor]], Tensor]:
        """The code for inputs like these."""
        flat = [tensor.detach() for tensor in example.flat()]
        spec, mean, count = (
            pytree.tree_structure(example),
            self._settings.mean,
            len(self.parameters),
        )

        def inputs(tensors: Sequence[Tensor]) -> _Inputs:
            return pytree.tree_unflatten(list(tensors), spec)

        def both(*tensors: Tensor) -> Tensor:
            gradients, noted = self._gradients(inputs(tensors))
            return torch.cat([noted, self._update(inputs(tensors), gradients).reshape(1)])

        if mean is None:
            call = compiled.compile_(both, flat)
            return lambda tensors: call(*tensors)

        def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
            gradients, noted = self._gradients(inputs(tensors))
            return (*gradients, noted)

        def update(*tensors: Tensor) -> Tensor:
            return self._update(inputs(tensors[: len(flat)]), list(tensors[len(flat) :])).reshape(1)

        first = compiled.compile_(backward, flat)
        zeros = [torch.zeros_like(parameter) for parameter in flat[:count]]
        second = compiled.compile_(update, [*flat, *zeros])

        def call_both(tensors: list[Tensor]) -> Tensor:
            *gradients, noted = first(*tensors)
            mean(gradients)
            return torch.cat([noted, second(*tensors, *gradients)])

        return call_both

    def _gradients(self, inputs: _Inputs) -> tuple[list[Tensor], Tensor]:
        """The gradient of each parameter, and what the loss notes, `[n]`."""
        samples = dataclasses.replace(self._like, **inputs.source)
        with torch.enable_grad():
            leaves = [parameter.detach().requires_grad_() for parameter in inputs.parameters]
            tensors = dict(zip(self._names, leaves, strict=True)) | inputs.rest

            def mean_loss() -> tuple[Tensor, dict[str, Tensor]]:
                minibatch = Minibatch(samples, inputs.index, self._split).gather()
                return self._loss(minibatch, *inputs.coefficients)

            value, noted = self._functional.call(tensors, mean_loss)
            gradients = list(torch.autograd.grad(value, leaves))
        self.names = (*noted, self._settings.norm_name)
        return gradients, torch.stack([part.detach() for part in noted.values()])

    def _update(self, inputs: _Inputs, gradients: list[Tensor]) -> Tensor:
        """Clip and step; returns the norm before clipping, 0-d."""
        by_network = [[gradients[i] for i in members] for members in self._networks]
        # One by one: compiled, that is faster than kernels that take all parameters together.
        scaled, norm = optimize.clip(by_network, self._settings.max_grad_norm, at_once=False)
        for members, of_network in zip(self._networks, scaled, strict=True):
            for i, gradient in zip(members, of_network, strict=True):
                gradients[i] = gradient
        for number, members in enumerate(self._members):
            if members:
                lists = (inputs.parameters, gradients, inputs.first, inputs.second, inputs.steps)
                group = self._groups[number]
                optimize.adam_(
                    *([tensors[i] for i in members] for tensors in lists),
                    rate=inputs.rates[number],
                    betas=group["betas"],
                    eps=group["eps"],
                    eps_hat=group.get("eps_hat", False),
                    only_if=norm.isfinite(),
                    at_once=False,
                )
        return norm


def _reached(
    loss: Loss[S],
    minibatch: Minibatch[S],
    coefficients: tuple[Tensor, ...],
    parameters: Sequence[Tensor],
) -> list[bool]:
    """Which parameters the loss depends on."""
    value, _ = loss(minibatch.gather(), *coefficients)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    return [gradient is not None for gradient in gradients]


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The root of the sum of squared differences."""
    return math.sqrt(sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True)))
