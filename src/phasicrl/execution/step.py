"""Gradient step on a minibatch, eager or compiled. Kind: effects (updates parameters).

Both use the functions of `optimize.py`: gradients, their mean over processes, clipping, Adam.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils import _pytree as pytree

from phasicrl import optimize
from phasicrl.execution import compiled
from phasicrl.execution.plan import Phase
from phasicrl.rollout import Minibatch, Samples

_PIECE_STEPS = 8192
"""Steps of a piece of a minibatch whose activations fit into the caches."""
In = TypeVar("In", bound=Samples, contravariant=True)
StepMetrics = tuple[tuple[str, ...], Tensor, float]
"""Names of the loss terms and the gradient norm, their values `[n]`, and number of samples."""


class Loss(Protocol[In]):
    """Loss function. Equal ones share one compiled gradient step."""

    @property
    def agent(self) -> nn.Module:
        """Agent whose parameters are trained."""
        ...

    def __call__(self, samples: In, *coefficients: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean over the samples, and its terms by the names of their metrics, 0-d."""
        ...


@dataclass(frozen=True, eq=False)
class AdamSettings:
    """Settings of a gradient step: clipping, optimizer and mean over processes.

    Attributes:
        phase: phase of the step, and of its gradient norm in the metrics.
        clip_groups: groups of parameters, which are clipped separately.
        optimizer: optimizer of the parameters.
        max_grad_norm: maximum gradient norm; None clips nothing.
        average_gradients: function that replaces gradients by their means over all processes, in
            place; None for one process.
    """

    phase: Phase
    clip_groups: Sequence[Sequence[nn.Parameter]]
    optimizer: Adam
    max_grad_norm: float | None
    average_gradients: Callable[[Sequence[Tensor]], None] | None = None

    @property
    def grad_norm_name(self) -> str:
        """Name of the gradient norm in the metrics."""
        return f"gradients/{self.phase}_norm"


def clip_and_step_(settings: AdamSettings) -> Tensor:
    """Clip the parameters' gradients, step, and return the norm before clipping, 0-d.

    Parameters without gradient are unchanged. Gradients that are not finite make no step, and are
    reported by the phase, because a check here would wait for a GPU.
    """
    trained = [[p for p in group if p.grad is not None] for group in settings.clip_groups]
    gradients = [[p.grad for p in group if p.grad is not None] for group in trained]
    if settings.average_gradients is not None:
        settings.average_gradients(list(chain(*gradients)))
    clipped, norm = optimize.clip_gradients(gradients, settings.max_grad_norm, foreach=True)
    parameters, steps = list(chain(*trained)), list(chain(*clipped))
    optimize.eager_adam_step_(settings.optimizer, parameters, steps, apply_if=norm.isfinite())
    return norm


class _StepInputs(NamedTuple):
    """Inputs of a compiled step, in the order of its arguments; some are written to."""

    parameters: list[Tensor]
    moments: optimize.AdamState
    rates: list[Tensor]
    untrained: list[Tensor]
    coefficients: list[Tensor]
    index: Tensor
    source: list[Tensor]


class CompiledUpdate:
    """Compiled gradient step: gathering, forward, loss, backward, clipping and Adam.

    With several processes, or pieces of a large minibatch, it is two compiled calls, and gradients
    are averaged between them.

    Args:
        loss: loss to minimize.
        minibatch: example; all tensors of later ones have its shapes, dtypes and strides.
        coefficients: example of the loss's coefficients.
        settings: optimizer and clipping.

    Attributes:
        state: trained parameters, their first and second moments and step counts.
        names: names of the values that a step returns.

    Raises:
        Exception: the step cannot be traced or compiled; of many types.
    """

    def __init__(
        self, loss: Loss[Any], minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...],
        settings: AdamSettings,
    ) -> None:  # fmt: skip
        self._loss, self._settings, self._example = loss, settings, minibatch
        named = dict(loss.agent.named_parameters())
        value, _ = loss(minibatch.gather(), *coefficients)
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), gradients, strict=True)
        trained = dict(item for item, gradient in pairs if gradient is not None)
        parameters = list[Tensor](trained.values())
        moments = optimize.get_adam_state(settings.optimizer, parameters)
        self.state = (parameters, *moments)
        tensors = chain(named.items(), loss.agent.named_buffers())
        untrained = {name: tensor for name, tensor in tensors if name not in trained}
        self._names = [*trained, *untrained]
        self._groups = settings.optimizer.param_groups
        self._rates = [torch.tensor(float(group["lr"]), device=value.device)
                       for group in self._groups]  # fmt: skip
        index_of = {id(parameter): i for i, parameter in enumerate(parameters)}

        def find_trained_indices(members: Sequence[Tensor]) -> list[int]:
            return [index_of[id(p)] for p in members if id(p) in index_of]

        self._members = [sorted(find_trained_indices(group["params"])) for group in self._groups]
        self._clip_group_indices = [find_trained_indices(x) for x in settings.clip_groups]
        self.names: tuple[str, ...] = ()
        # Copy the minibatch's tensors, because aliases would be traced as one input.
        source = [tensor.clone() for tensor in minibatch.source.tensors().values()]
        example = _StepInputs(
            parameters, moments, self._rates, list(untrained.values()), list(coefficients),
            minibatch.index.clone(), source,
        )  # fmt: skip
        self._fixed = pytree.tree_leaves(example[:4])
        self._call = self._compile(example)

    def __call__(self, minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...]) -> Tensor:
        """Make a gradient step on a minibatch, and return the values of `names`, `[n]`."""
        for rate, group in zip(self._rates, self._groups, strict=True):
            rate.fill_(group["lr"])
        source = minibatch.source.tensors().values()
        with torch.no_grad():
            return self._call([*self._fixed, *coefficients, minibatch.index, *source])

    def _compile(self, example: _StepInputs) -> Callable[[list[Tensor]], Tensor]:
        """Compile the step for inputs like the example."""
        leaves, spec = pytree.tree_flatten(example)
        flat, mean = [tensor.detach() for tensor in leaves], self._settings.average_gradients
        # The KL divergence begins at zero, where its gradient would be the rounding of tanh.
        make = partial(compiled.compile_for_shapes, fast_tanh=self._settings.phase != "aux")

        def unflatten(tensors: Sequence[Tensor]) -> _StepInputs:
            return pytree.tree_unflatten(list(tensors[: len(flat)]), spec)

        def compute_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            return self._compute_gradients(unflatten(tensors))

        def apply_gradients(*tensors: Tensor) -> Tensor:
            return self._clip_and_step(unflatten(tensors), list(tensors[len(flat) :])).reshape(1)

        def run_step(*tensors: Tensor) -> Tensor:
            *gradients, terms = compute_gradients(*tensors)
            return torch.cat([terms, apply_gradients(*tensors, *gradients)])

        # Pieces of equal size, a power of two in number, whose activations fit into the caches.
        most = max(self._example.num_steps // _PIECE_STEPS, 1)
        num_pieces = math.gcd(len(example.index), 1 << most.bit_length() - 1)
        if mean is None and num_pieces == 1:
            call = make(run_step, flat)
            return lambda tensors: call(*tensors)
        place = len(flat) - len(example.source) - 1  # of the index

        def split_minibatch(tensors: list[Tensor]) -> list[list[Tensor]]:
            pieces = tensors[place].chunk(num_pieces)
            return [[*tensors[:place], piece, *tensors[place + 1 :]] for piece in pieces]

        first = make(compute_gradients, split_minibatch(flat)[0])
        second = make(apply_gradients, [*flat, *map(torch.zeros_like, example.parameters)])

        def run_accumulated_step(tensors: list[Tensor]) -> Tensor:
            results = [first(*piece) for piece in split_minibatch(tensors)]
            *gradients, terms = (torch.stack(x).mean(0) for x in zip(*results, strict=True))
            if mean is not None:
                mean(gradients)
            return torch.cat([terms, second(*tensors, *gradients)])

        return run_accumulated_step

    def _compute_gradients(self, inputs: _StepInputs) -> tuple[Tensor, ...]:
        """Return the gradient of each parameter, and behind them the terms of the loss, `[n]`."""
        base = self._example
        named = dict(zip(base.source.tensors(), inputs.source, strict=True))
        batch = Minibatch(dataclasses.replace(base.source, **named), inputs.index, base.as_steps)
        with torch.enable_grad():
            leaves = [parameter.detach().requires_grad_() for parameter in inputs.parameters]
            tensors = dict(zip(self._names, [*leaves, *inputs.untrained], strict=True))
            value, terms = compiled.call_with_params(
                self._loss.agent, tensors, lambda: self._loss(batch.gather(), *inputs.coefficients)
            )
            gradients = torch.autograd.grad(value, leaves)
        self.names = (*terms, self._settings.grad_norm_name)
        return (*gradients, torch.stack([term.detach() for term in terms.values()]))

    def _clip_and_step(self, inputs: _StepInputs, gradients: list[Tensor]) -> Tensor:
        """Clip the gradients, step, and return the norm before clipping, 0-d."""
        groups = [[gradients[i] for i in members] for members in self._clip_group_indices]
        # Parameter by parameter: faster in compiled code than kernels for many tensors.
        # A flat vector would save 5 to 12 % of a step of 64 × 64 networks, but checkpoints, acting
        # and each optimizer would have to share its storage.
        scaled, norm = optimize.clip_gradients(groups, self._settings.max_grad_norm, foreach=False)
        for i, gradient in zip(chain(*self._clip_group_indices), chain(*scaled), strict=True):
            gradients[i] = gradient
        for rate, group, members in zip(inputs.rates, self._groups, self._members, strict=True):
            lists = (inputs.parameters, gradients, *inputs.moments)
            parameters, clipped, *moments = ([each[i] for i in members] for each in lists)
            optimize.adam_(
                parameters, clipped, optimize.AdamState(*moments), group, rate=rate,
                apply_if=norm.isfinite(), fused=False,
            )  # fmt: skip
        return norm
