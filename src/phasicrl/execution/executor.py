"""Execution of gradient steps and inference. Kind: effects (threads, compilers, GPU)."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from phasicrl.config import Precision
from phasicrl.distributed import SINGLE_PROCESS, World
from phasicrl.execution.compiled import TensorFunction, compile_for_gpu, compile_inference
from phasicrl.execution.plan import Phase, Plan
from phasicrl.execution.step import AdamSettings, CompiledUpdate, Loss, StepMetrics, clip_and_step_
from phasicrl.execution.turn_lock import CpuTurnLock
from phasicrl.rollout import Minibatch, Samples

S = TypeVar("S", bound=Samples)


class Executor:
    """Execution of gradient steps and inference on the device and with the threads of a plan.

    Attributes:
        device: device of the tensors.
        take_cpu_turn: function that returns a context in which the run may use all its cores.

    Args:
        plan: device, threads, precision, micro-batches.
        world: processes of the run.
        log: function for messages about compilation.
    """

    def __init__(
        self, plan: Plan, *, world: World = SINGLE_PROCESS,
        log: Callable[[str], None] = lambda message: None,
    ) -> None:  # fmt: skip
        self.plan, self.world, self.log = plan, world, log
        self.device = torch.device(plan.device)
        self.take_cpu_turn = CpuTurnLock().take_cpu_turn if plan.take_turns else nullcontext
        self._compiled_steps: dict[Hashable, CompiledUpdate | None] = {}
        self._compiled_calls: dict[Hashable, TensorFunction | None] = {}

    def precision(self, phase: Phase) -> Precision:
        """Return the precision of the encoders in a phase; rollouts use that of `policy`."""
        return self.plan.precision[phase]

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a tensor from the environments to the device, without waiting for the copy."""
        if tensor.device == self.device:
            return tensor
        if tensor.device.type == "cpu" and self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=self.device.type == "cuda")

    def synchronize(self) -> None:
        """Wait until a GPU has finished, so that time can be measured."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def micro_batches(self, samples: S, *, phase: Phase) -> Iterator[tuple[S, float]]:
        """Yield micro-batches of whole sequences, each with its fraction of all samples.

        Losses weighted by these fractions add up to the mean loss.
        """
        images = self.plan.micro_batch[phase]
        size = max(images // samples.first.shape[1], 1) if images else len(samples)
        for start in range(0, len(samples), size):
            piece = samples.take(slice(start, start + size))
            yield piece, len(piece) / len(samples)

    def infer_in_batches(
        self, segments: Samples, function: Callable[[Samples], Tensor], *, phase: Phase = "policy"
    ) -> Tensor:
        """Apply a function to segments `[S, L, …]` in batches; the caller turns off gradients."""
        results, num_steps = [], segments.first.shape[1]
        size = max(1, self.plan.inference_batch_size // num_steps)
        with self.explain_oom("running the networks on a rollout", "fewer env.num_envs"):
            for start in range(0, len(segments), size):
                part = segments.take(slice(start, start + size))
                part = part if part.has_memory else part.as_transitions()
                for piece, _ in self.micro_batches(part, phase=phase):
                    with self.take_cpu_turn():
                        results.append(function(piece))
            output = torch.cat(results)
        return output.reshape(-1, num_steps, *output.shape[2:])

    def call_compiled(
        self, function: TensorFunction, module: nn.Module, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call a function of tensors without microbatches, compiled if `plan.compiled`.

        Args:
            function: function without gradient that uses a module. Each new one is compiled, so
                that every call must pass the same function, or method of the same object.
            module: module whose parameters and buffers are used.
            inputs: tensors; each new combination of their shapes is compiled.
        """
        call = None
        if self.plan.compiled:
            key = (function, tuple((x.shape, x.stride(), x.dtype) for x in inputs))
            if key not in self._compiled_calls:
                self._compiled_calls[key] = self._try_compile(function, module, inputs)
            call = self._compiled_calls[key]
        with self.take_cpu_turn():
            return function(*inputs) if call is None else call(*inputs)

    def _try_compile(
        self, function: TensorFunction, module: nn.Module, inputs: Sequence[Tensor]
    ) -> TensorFunction | None:
        """Compile a function; return None if that fails, or its results differ from eager ones."""
        if self.plan.on_gpu:
            compiled = compile_for_gpu(function)
            # Copy the outputs, because the next call overwrites them.
            return lambda *inputs: tuple(output.clone() for output in compiled(*inputs))
        start = perf_counter()
        try:
            with _undo_changes(module.buffers()):
                call = compile_inference(function, module, inputs)
        except Exception as error:  # of any type; compilation must not end a run
            self.log(f"acting runs eagerly: it cannot be compiled ({_first_line(error)})")
            return None
        results = []
        for each in (call, function):
            with _undo_changes(module.buffers()):
                results.append(each(*inputs))
        for actual, expected in zip(*results, strict=True):
            pair = actual.double(), expected.double()
            close = torch.allclose(*pair, rtol=1e-3, atol=1e-4, equal_nan=True)
            # Bytes may be those of several floats, which rounding changes.
            if actual.dtype != torch.uint8 and not close:
                self.log("acting runs eagerly: the compiled code returns other numbers here")
                return None
        self.log(f"acting is compiled ({perf_counter() - start:.0f} s)")
        return call

    def make_gradient_step(self, loss: Loss[S], settings: AdamSettings) -> "EagerGradientStep":
        """Make a function that makes a gradient step on the mean loss of a minibatch.

        Args:
            loss: loss to minimize.
            settings: optimizer and clipping.

        Returns:
            A function of a minibatch and the loss's coefficients, 0-d. It raises a MemoryError if
            out of memory.
        """
        is_whole = not self.plan.micro_batch[settings.phase]
        if self.plan.compiled and is_whole and not self.plan.on_gpu:
            return CompiledGradientStep(self, loss, settings)
        return EagerGradientStep(self, loss, settings)

    @contextmanager
    def explain_oom(self, what: str, remedy: str) -> Iterator[None]:
        """Turn PyTorch's out-of-memory error into one that names options to change.

        Raises:
            MemoryError: memory is exhausted; the message names the options.
        """
        try:
            yield
        except RuntimeError as error:
            is_oom = isinstance(error, torch.OutOfMemoryError)
            if not is_oom and "can't allocate memory" not in str(error):  # on a CPU
                raise
            if any(self.plan.micro_batch.values()):
                remedy += " or a smaller compute.micro_batch"
            text = f"{what} does not fit into the memory of {self.device}"
            raise MemoryError(f"{text}; try {remedy}: {_first_line(error)}") from error


class EagerGradientStep:
    """Gradient step, eager except for a compiled loss on a GPU.

    Args:
        executor: source of micro-batches.
        loss: loss to minimize.
        settings: optimizer and clipping.
    """

    def __init__(self, executor: Executor, loss: Loss[Any], settings: AdamSettings) -> None:
        self.executor, self.loss, self.settings, plan = executor, loss, settings, executor.plan
        # With CUDA graphs, the second micro-batch would overwrite the gradient of the first.
        uses_graphs = plan.compiled and plan.on_gpu and not plan.micro_batch[settings.phase]
        self._loss = compile_for_gpu(loss.__call__) if uses_graphs else loss
        self._remedy = f"a larger {'aux' if settings.phase == 'aux' else 'ppo'}.num_minibatches"

    def __call__(self, minibatch: Minibatch[Any], *coefficients: Tensor) -> StepMetrics:
        """Make a gradient step on a minibatch, and return its metrics."""
        executor, settings, rows, terms = self.executor, self.settings, [], {}
        with executor.explain_oom("a gradient step", self._remedy):
            settings.optimizer.zero_grad(set_to_none=True)
            # Accumulate the gradients of the micro-batches, then clip them and step.
            for piece, share in executor.micro_batches(minibatch.gather(), phase=settings.phase):
                with executor.take_cpu_turn():
                    value, terms = self._loss(piece, *coefficients)
                    (value * share).backward()
                rows.append(torch.stack([term.detach() for term in terms.values()]) * share)
            values = torch.cat([sum(rows[1:], rows[0]), clip_and_step_(settings).reshape(1)])
            return (*terms, settings.grad_norm_name), values, minibatch.num_steps


class CompiledGradientStep(EagerGradientStep):
    """Gradient step that is compiled for each size of minibatch, and checked against an eager step.

    The executor caches compiled steps by what they depend on; None: use the eager step.
    """

    _last_source_and_update: tuple[Samples, CompiledUpdate | None] | None = None

    def __call__(self, minibatch: Minibatch[Any], *coefficients: Tensor) -> StepMetrics:
        """Make a gradient step on a minibatch, and return its metrics."""
        source, updates = minibatch.source, self.executor._compiled_steps
        # All minibatches of an epoch have one source.
        if self._last_source_and_update is None or self._last_source_and_update[0] is not source:
            layout = tuple((x.shape[1:], x.stride(), x.dtype) for x in source.tensors().values())
            size = (len(minibatch.index), minibatch.as_steps, len(source))
            settings = self.settings
            key = (self.loss, id(settings.optimizer), settings.max_grad_norm, *size, layout)
            update = updates.get(key)
            if key not in updates or (update is not None and not update.bind()):
                update = updates[key] = self._compile_and_compare(minibatch, coefficients)
            self._last_source_and_update = source, update
        if (update := self._last_source_and_update[1]) is None:
            return super().__call__(minibatch, *coefficients)
        with self.executor.take_cpu_turn():
            return update.names, update(minibatch, coefficients), minibatch.num_steps

    def _compile_and_compare(
        self, minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...]
    ) -> CompiledUpdate | None:
        """Compile the step; return None if that fails, or its results differ from eager ones."""
        executor, start, update, reason = self.executor, perf_counter(), None, "on another process"
        steps = f"{self.settings.phase} steps"
        try:
            with _undo_changes(self.loss.agent.buffers()):
                update = CompiledUpdate(self.loss, minibatch, coefficients, self.settings)
        except Exception as error:  # of any type; compilation must not end a run
            reason = _first_line(error)
        if executor.world.all_reduce_any(update is None) or update is None:
            executor.log(f"{steps} run eagerly: they cannot be compiled ({reason})")
            return None
        before = tree_map(torch.clone, update.state)
        changed = [*tree_leaves(update.state), *self.loss.agent.buffers()]
        with _undo_changes(changed):
            expected = super().__call__(minibatch, *coefficients)[1]
            eager = tree_map(torch.clone, update.state)
        with _undo_changes(changed):
            actual = update(minibatch, coefficients)
            # Difference of parameters, first and second moments, as a share of the eager step.
            difference = max(_euclidean_distance(x, y) / max(_euclidean_distance(x, z), 1e-12)
                for x, y, z in zip(eager[:3], update.state, before, strict=False))  # fmt: skip
        is_close = torch.allclose(actual, expected, rtol=1e-2, atol=1e-4) and difference < 0.05
        if executor.world.all_reduce_any(not is_close):
            executor.log(f"{steps} run eagerly: compiled ones differ by {difference:.1%} of a step")
            return None
        executor.log(f"{steps} are compiled ({perf_counter() - start:.0f} s)")
        return update


@contextmanager
def _undo_changes(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore tensors, and the state of the random generator, at the end of a block."""
    before = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for tensor, value in before:
            tensor.copy_(value)


def _euclidean_distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the Euclidean distance of two lists of vectors."""
    return float((torch.cat([*left]) - torch.cat([*right])).norm())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
