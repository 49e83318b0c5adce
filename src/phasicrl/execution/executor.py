"""Execution of gradient steps and inference. Kind: effects (threads, compilers, GPU)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phasicrl.config import Precision
from phasicrl.distributed import SINGLE_PROCESS, World
from phasicrl.execution.compiled import compile_for_gpu, compile_inference
from phasicrl.execution.core_lock import CoreLock
from phasicrl.execution.plan import Phase, Plan
from phasicrl.execution.step import CompiledUpdate, Loss, StepMetrics, StepSettings, update_
from phasicrl.rollout import Minibatch, Samples

S = TypeVar("S", bound=Samples)


class Executor:
    """Executes a plan, which changes results by rounding only.

    Attributes:
        device: device of the tensors.
        turn: makes a context in which to use all threads.

    Args:
        plan: how the run is executed.
        world: processes of the run.
        log: called with messages about what was compiled.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        world: World = SINGLE_PROCESS,
        log: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.plan, self.world, self.log = plan, world, log
        self.device = torch.device(plan.device)
        self.turn = CoreLock().turn if plan.take_turns else nullcontext
        self._compiled_steps: dict[Hashable, CompiledUpdate | None] = {}
        self._compiled_calls: dict[Hashable, Callable[..., Any] | None] = {}

    def precision(self, phase: Phase) -> Precision:
        """Return the precision of the encoders in a phase.

        The rollout has the policy phase's, because ratios compare the two.
        """
        return self.plan.precision[phase]

    def upload(self, values: Tensor) -> Tensor:
        """Copy values from the environments to the device, without waiting for a GPU."""
        if values.device.type == "cpu" and self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def wait(self) -> None:
        """Wait until a GPU has finished, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def micro_batches(self, samples: S, *, phase: Phase) -> Iterator[tuple[S, float]]:
        """Yield micro-batches with their shares of the whole.

        Their losses, weighted by these shares, add up to the mean loss. Sequences are not cut.
        """
        images = self.plan.micro_batch[phase]
        size = max(images // samples.first.shape[1], 1) if images else len(samples)
        for start in range(0, len(samples), size):
            piece = samples.take(slice(start, start + size))
            yield piece, len(piece) / len(samples)

    def infer(
        self, segments: Samples, function: Callable[[Samples], Tensor], *, phase: Phase = "policy"
    ) -> Tensor:
        """Apply a function of the networks without gradient to segments in parts, `[S, L, …]`."""
        results, num_steps = [], segments.first.shape[1]
        size = max(1, self.plan.inference_batch_size // num_steps)
        with self.explain_oom("running the networks on a rollout", "fewer env.num_envs"):
            for start in range(0, len(segments), size):
                part, outputs = segments.take(slice(start, start + size)), []
                part = part if part.has_memory else part.as_transitions()
                for piece, _ in self.micro_batches(part, phase=phase):
                    with self.turn():
                        outputs.append(function(piece))
                output = torch.cat(outputs)
                results.append(output.reshape(-1, num_steps, *output.shape[2:]))
        return torch.cat(results)

    def run_inference(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        module: nn.Module,
        inputs: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return `function(*inputs)`, compiled if the plan says so.

        Args:
            function: the same function at each call, which uses a module and needs no gradient.
            module: module whose parameters and buffers it reads.
            inputs: tensors of the same shapes at each call.
        """
        call = None
        if self.plan.compiled:
            key = (function, tuple((x.shape, x.stride(), x.dtype) for x in inputs))
            if key not in self._compiled_calls:
                self._compiled_calls[key] = self._compile_call(function, module, inputs)
            call = self._compiled_calls[key]
        with self.turn():
            return function(*inputs) if call is None else call(*inputs)

    def _compile_call(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        module: nn.Module,
        inputs: Sequence[Tensor],
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Compile a function; returns None if that fails or its results differ."""
        if self.plan.on_gpu:
            recorded = compile_for_gpu(function)
            # Copies: the next call overwrites what a recording returns.
            return lambda *inputs: tuple(output.clone() for output in recorded(*inputs))
        start = perf_counter()
        try:
            call = compile_inference(function, module, inputs)
        except Exception as error:  # of many kinds, and none of them may end a run
            self.log(f"acting runs eagerly: it cannot be compiled ({_first_line(error)})")
            return None
        for found, expected in zip(call(*inputs), function(*inputs), strict=True):
            if not torch.allclose(found.double(), expected.double(), rtol=1e-3, atol=1e-4):
                self.log("acting runs eagerly: the compiled code returns other numbers here")
                return None
        self.log(f"acting is compiled ({perf_counter() - start:.0f} s)")
        return call

    def gradient_step(self, loss: Loss[S], settings: StepSettings) -> EagerStep:
        """Return a function that makes a step on the mean loss of a minibatch.

        Args:
            loss: loss to minimize.
            settings: optimizer and clipping.

        Returns:
            A function of a minibatch and of the loss's coefficients, 0-d, which may change between
            steps. It raises a MemoryError if a step does not fit.
        """
        if self.plan.compiled and not self.plan.on_gpu:
            return CompiledStep(self, loss, settings, self._compiled_steps)
        return EagerStep(self, loss, settings)

    @contextmanager
    def explain_oom(self, what: str, remedy: str) -> Iterator[None]:
        """Turn PyTorch's out-of-memory error into one that names options to change.

        Raises:
            MemoryError: out of memory.
        """
        try:
            yield
        except RuntimeError as error:
            is_oom = isinstance(error, torch.OutOfMemoryError)
            if not is_oom and "can't allocate memory" not in str(error):  # on a CPU
                raise
            if any(self.plan.micro_batch.values()):
                remedy += " or a smaller compute.micro_batch"
            full = f"{what} does not fit into the memory of {self.device}"
            raise MemoryError(f"{full}; try {remedy}: {_first_line(error)}") from error


class EagerStep:
    """A step of gradient descent, operation by operation.

    Args:
        executor: cuts minibatches into micro-batches.
        loss: loss to minimize.
        settings: optimizer and clipping.
    """

    def __init__(self, executor: Executor, loss: Loss[Any], settings: StepSettings) -> None:
        self.executor, self.loss, self.settings = executor, loss, settings
        records = executor.plan.compiled and executor.plan.on_gpu
        self._loss = compile_for_gpu(loss.__call__) if records else loss
        self._remedy = f"a larger {'aux' if settings.phase == 'aux' else 'ppo'}.num_minibatches"

    def __call__(self, minibatch: Minibatch[Any], *coefficients: Tensor) -> StepMetrics:
        """Make the step."""
        executor, settings, rows, terms = self.executor, self.settings, [], {}
        with executor.explain_oom("a gradient step", self._remedy):
            settings.optimizer.zero_grad(set_to_none=True)
            # Accumulate the gradients of the micro-batches, then clip them and step.
            for piece, share in executor.micro_batches(minibatch.gather(), phase=settings.phase):
                with executor.turn():
                    value, terms = self._loss(piece, *coefficients)
                    (value * share).backward()
                rows.append(torch.stack([term.detach() for term in terms.values()]) * share)
            values = torch.cat([sum(rows[1:], rows[0]), update_(settings).reshape(1)])
            return (*terms, settings.norm_name), values, minibatch.num_steps


class CompiledStep(EagerStep):
    """A step compiled for each layout of minibatches, and compared with the eager step first.

    Args:
        executor: logs what was compiled.
        loss: loss to minimize.
        settings: optimizer and clipping.
        updates: compiled steps by everything they depend on; None where there can be none.
    """

    def __init__(
        self,
        executor: Executor,
        loss: Loss[Any],
        settings: StepSettings,
        updates: dict[Hashable, CompiledUpdate | None],
    ) -> None:
        super().__init__(executor, loss, settings)
        self._updates = updates
        self._last: tuple[Samples, CompiledUpdate | None] | None = None

    def __call__(self, minibatch: Minibatch[Any], *coefficients: Tensor) -> StepMetrics:
        """Make the step."""
        source = minibatch.source
        # An epoch's minibatches come from one source.
        if self._last is None or self._last[0] is not source:
            layout = tuple((x.shape[1:], x.stride(), x.dtype) for x in source.tensors().values())
            size = (len(minibatch.index), minibatch.split, len(source))
            settings = self.settings
            key = (self.loss, id(settings.optimizer), settings.max_grad_norm, *size, layout)
            if key not in self._updates:
                self._updates[key] = self._compile(minibatch, coefficients)
            self._last = source, self._updates[key]
        if (update := self._last[1]) is None:
            return super().__call__(minibatch, *coefficients)
        with self.executor.turn():
            return update.names, update(minibatch, coefficients), minibatch.num_steps

    def _compile(
        self, minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...]
    ) -> CompiledUpdate | None:
        """Compile the step; returns None if that fails or its results differ on any process."""
        executor, start, update, why = self.executor, perf_counter(), None, "on another process"
        steps = f"{self.settings.phase} steps"
        try:
            update = CompiledUpdate(self.loss, minibatch, coefficients, self.settings)
        except Exception as error:  # of many kinds, and none of them may end a run
            why = _first_line(error)
        if executor.world.any_rank(update is None) or update is None:
            executor.log(f"{steps} run eagerly: they cannot be compiled ({why})")
            return None
        state = update.state
        before = _copy(state)
        expected = super().__call__(minibatch, *coefficients)[1]
        eager = _copy(state)
        _restore_(state, before)
        found = update(minibatch, coefficients)
        # The difference of parameters, first and second moments, as a share of the eager step.
        off = max(_distance(x, y) / max(_distance(x, z), 1e-12)
                  for x, y, z in zip(eager[:3], state, before, strict=False))  # fmt: skip
        _restore_(state, before)
        is_off = not torch.allclose(found, expected, rtol=1e-2, atol=1e-4) or not off < 0.05
        if executor.world.any_rank(is_off):
            executor.log(
                f"{steps} run eagerly: the compiled code returns other numbers here "
                f"(off by {off:.1%} of a step)"
            )
            return None
        executor.log(f"{steps} are compiled ({perf_counter() - start:.0f} s)")
        return update


def _copy(state: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.detach().clone() for tensor in tensors] for tensors in state]


@torch.no_grad()
def _restore_(state: Sequence[Sequence[Tensor]], saved: Sequence[Sequence[Tensor]]) -> None:
    for tensors, values in zip(state, saved, strict=True):
        torch._foreach_copy_(list(tensors), list(values))


@torch.no_grad()
def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the Euclidean distance of two lists of tensors."""
    pairs = zip(left, right, strict=True)
    return math.sqrt(sum(float((x - y).square().sum()) for x, y in pairs))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
