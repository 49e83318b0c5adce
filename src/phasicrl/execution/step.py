"""Gradient step on a minibatch, eager or compiled. Kind: effects (updates parameters).

Both use the functions of `optimize.py`: gradients, their mean over processes, clipping, Adam.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
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
        clip_groups: parameters that are clipped separately: those of each optimizer group, or all.
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


class _FlatParameters:
    """Parameters and their moments of Adam as views of vectors, which need fewer operations.

    Each starts at a multiple of 16 elements, aligned as PyTorch aligns tensors.

    Args:
        parameters: dense parameters of one optimizer group and dtype, with equal step counts.
        optimizer: optimizer that has their moments and step counts.

    Attributes:
        vectors: parameters, first and second moments, and step counts.
    """

    def __init__(self, parameters: list[nn.Parameter], optimizer: Adam) -> None:
        self.parameters, self._optimizer = parameters, optimizer
        *self._starts, size = accumulate((-(-x.numel() // 16) * 16 for x in parameters), initial=0)
        zeros = parameters[0].detach().new_zeros
        self.vectors = [*(zeros(size) for _ in range(3)), torch.zeros(len(parameters))]
        self._addresses = [x.data_ptr() for vector in self.vectors[:2] for x in self.split(vector)]

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector with the shapes and strides of the parameters."""
        places = zip(self.parameters, self._starts, strict=True)
        return [vector.as_strided(x.shape, x.stride(), start) for x, start in places]

    def join(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the vector of the parameters' gradients, with zeros in between."""
        strides = (x.stride() for x in self.parameters)
        axes = (sorted(range(len(x)), key=x.__getitem__, reverse=True) for x in strides)
        rows = (x.permute(order).flatten() for x, order in zip(gradients, axes, strict=True))
        return torch.cat([functional.pad(row, (0, -len(row) % 16)) for row in rows])

    @torch.no_grad()
    def bind(self) -> bool:
        """Move parameters and moments into the vectors; return whether the step counts are equal.

        They are not after another update has trained some of the parameters.
        """
        moments = optimize.get_adam_state(self._optimizer, self.parameters)
        if [x.data_ptr() for x in (*self.parameters, *moments.first)] != self._addresses:
            views = zip(*map(self.split, self.vectors[:3]), self.vectors[3], strict=True)
            for old, new in zip(zip(self.parameters, *moments, strict=True), views, strict=True):
                torch._foreach_copy_(list(new), list(old))
                old[0].data = new[0]
                self._optimizer.state[old[0]] = dict(zip(optimize.ADAM_STATE, new[1:], strict=True))
        return len(set(self.vectors[3].tolist())) == 1


class _StepInputs(NamedTuple):
    """Inputs of a compiled step, in the order of its arguments; some are written to."""

    vectors: list[list[Tensor]]
    rates: Tensor
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
        state: vectors of parameters, of first and of second moments, and of step counts.
        names: names of the values that a step returns.

    Raises:
        Exception: the step cannot be traced or compiled; of many types.
    """

    def __init__(
        self, loss: Loss[Any], minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...],
        settings: AdamSettings,
    ) -> None:  # fmt: skip
        self._loss, self._settings, self._example = loss, settings, minibatch
        named = {name: x for name, x in loss.agent.named_parameters() if x.requires_grad}
        value, _ = loss(minibatch.gather(), *coefficients)
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), gradients, strict=True)
        trained = {x: name for (name, x), gradient in pairs if gradient is not None}
        optimize.get_adam_state(optimizer := settings.optimizer, [*trained])
        self._groups = optimizer.param_groups
        # A vector has one step count and dtype.
        members = defaultdict[tuple[int, float, torch.dtype], list[nn.Parameter]](list)
        for number, group in enumerate(self._groups):
            for parameter in (x for x in group["params"] if x in trained):
                step = float(optimizer.state[parameter]["step"])
                members[number, step, parameter.dtype].append(parameter)
        self._group_numbers = [number for number, *_ in members]
        self._flat_params = [_FlatParameters(each, optimizer) for each in members.values()]
        self.bind()
        self.state = [*zip(*(x.vectors for x in self._flat_params), strict=True)]
        tensors = chain(loss.agent.named_parameters(), loss.agent.named_buffers())
        untrained = {name: tensor for name, tensor in tensors if tensor not in trained}
        self._names = [*(trained[x] for x in chain(*members.values())), *untrained]
        self._rates = torch.zeros(len(self._groups), device=value.device)
        self.names: tuple[str, ...] = ()
        # Copy the minibatch's tensors, because aliases would be traced as one input.
        source = [tensor.clone() for tensor in minibatch.source.tensors().values()]
        example = _StepInputs(
            [x.vectors for x in self._flat_params], self._rates, list(untrained.values()),
            list(coefficients), minibatch.index.clone(), source,
        )  # fmt: skip
        self._fixed = pytree.tree_leaves(example[:3])
        self._call = self._compile(example)

    def bind(self) -> bool:
        """Move the parameters into the vectors; return False if step counts need other vectors."""
        return all([flat.bind() for flat in self._flat_params])

    def __call__(self, minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...]) -> Tensor:
        """Make a gradient step on a minibatch, and return the values of `names`, `[n]`."""
        self._rates.copy_(torch.tensor([group["lr"] for group in self._groups]))
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
        second = make(apply_gradients, [*flat, *(torch.zeros_like(x[0]) for x in example.vectors)])

        def run_accumulated_step(tensors: list[Tensor]) -> Tensor:
            results = [first(*piece) for piece in split_minibatch(tensors)]
            *gradients, terms = (torch.stack(x).mean(0) for x in zip(*results, strict=True))
            if mean is not None:
                mean(gradients)
            return torch.cat([terms, second(*tensors, *gradients)])

        return run_accumulated_step

    def _compute_gradients(self, inputs: _StepInputs) -> tuple[Tensor, ...]:
        """Return the gradient of each vector, and behind them the terms of the loss, `[n]`."""
        base = self._example
        named = dict(zip(base.source.tensors(), inputs.source, strict=True))
        batch = Minibatch(replace(base.source, **named), inputs.index, base.as_steps)
        with torch.enable_grad():
            pairs = zip(self._flat_params, inputs.vectors, strict=True)
            views = chain(*(flat.split(vectors[0]) for flat, vectors in pairs))
            leaves = [view.detach().requires_grad_() for view in views]
            tensors = dict(zip(self._names, [*leaves, *inputs.untrained], strict=True))
            with compiled.replace_params(self._loss.agent, tensors):
                value, terms = self._loss(batch.gather(), *inputs.coefficients)
            gradients = iter(torch.autograd.grad(value, leaves))
        joined = [x.join([*islice(gradients, len(x.parameters))]) for x in self._flat_params]
        self.names = (*terms, self._settings.grad_norm_name)
        return (*joined, torch.stack([term.detach() for term in terms.values()]))

    def _clip_and_step(self, inputs: _StepInputs, gradients: list[Tensor]) -> Tensor:
        """Clip the gradients, step, and return the norm before clipping, 0-d."""
        # One clip group per optimizer group, or one for all.
        groups = defaultdict[int, list[Tensor]](list)
        for number, gradient in zip(self._group_numbers, gradients, strict=True):
            groups[min(number, len(self._settings.clip_groups) - 1)].append(gradient)
        max_norm = self._settings.max_grad_norm
        scaled, norm = optimize.clip_gradients([*groups.values()], max_norm, foreach=False)
        updates = zip(self._group_numbers, inputs.vectors, chain(*scaled), strict=True)
        for number, (vector, *moments), gradient in updates:
            optimize.adam_([vector], [gradient], optimize.AdamState(*([x] for x in moments)),
                           self._groups[number], rate=inputs.rates[number],
                           apply_if=norm.isfinite(), fused=False)  # fmt: skip
        return norm
