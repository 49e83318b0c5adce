"""The machine as the phases see it: gradient steps, questions to the networks. Kind: effects."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phasicrl.config import Precision
from phasicrl.distributed import ALONE, World
from phasicrl.execution.compiled import CompiledCall, compile_for_gpu
from phasicrl.execution.device import set_up_threads
from phasicrl.execution.plan import Phase, Plan
from phasicrl.execution.step import CompiledStep, Loss, Noted, StepSettings, update_
from phasicrl.rollout import Minibatch, Samples

S = TypeVar("S", bound=Samples)


class Compute:
    """Carries out a plan. Nothing here changes what is computed, up to rounding.

    Attributes:
        plan: what is carried out.
        device: where tensors are.
        say: told which way was chosen, for people.
        world: the processes that take each step together.
        turn: makes a context in which to use all threads.

    Args:
        plan: how the run is executed.
        world: the processes of the run.
        say: told which way was chosen, for people.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        world: World = ALONE,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.plan, self.world = plan, world
        self.device = torch.device(plan.device)
        self.say = say
        self.turn = set_up_threads(plan)
        self._compiled_steps: dict[Hashable, CompiledStep | None] = {}
        self._compiled_calls: dict[Hashable, Callable[..., Any] | None] = {}
        if plan.deterministic:
            # cuBLAS refuses to be deterministic without.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def precision(self, phase: Phase) -> Precision:
        """Of the encoders in a phase.

        The rollout has the policy phase's, because ratios compare the two.
        """
        return self.plan.precision[phase]

    def upload(self, values: Tensor) -> Tensor:
        """Values from the environments, to the agent; a GPU fetches them while the CPU goes on."""
        if values.device == self.device:  # as at every step on a CPU
            return values
        if values.device.type == "cpu" and self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def wait(self) -> None:
        """Wait until a GPU has done all that it was given.

        Only then does a clock say how long that took.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def pieces(self, samples: S, *, phase: Phase) -> Iterator[tuple[S, float]]:
        """Cut samples into micro-batches, with the share of the whole that each is.

        Their losses, weighted by these, add up to the mean loss.

        Args:
            samples: transitions, or sequences where there is a memory, which are not cut.
            phase: whose size of micro-batches to take.
        """
        images = self.plan.micro_batch[phase]
        size = max(images // samples.first.shape[1], 1) if images else len(samples)
        for start in range(0, len(samples), size):
            piece = samples.take(slice(start, start + size))
            yield piece, len(piece) / len(samples)

    def per_segment(
        self, segments: Samples, function: Callable[[Samples], Tensor], *, phase: Phase = "policy"
    ) -> Tensor:
        """`[S, L, …]`: a function of the networks without gradient, in pieces for the caches."""
        results = []
        num_steps, whole = segments.first.shape[1], segments.has_memory
        at_once = max(1, self.plan.inference_batch_size // num_steps)
        what = "asking the networks about a rollout"
        with self.explaining_memory(what, "fewer env.num_envs", phase=phase, whole=whole):
            for start in range(0, len(segments), at_once):
                some = segments.take(slice(start, start + at_once))
                some = some if some.has_memory else some.as_transitions()
                found = []
                for piece, _ in self.pieces(some, phase=phase):
                    with self.turn():
                        found.append(function(piece))
                found = torch.cat(found)
                results.append(found.reshape(-1, num_steps, *found.shape[2:]))
        return torch.cat(results)

    def evaluate(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        module: nn.Module,
        inputs: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return `function(*inputs)`, which uses a module and needs no gradient, compiled or not.

        Args:
            function: the same every time; a bound method will do.
            module: whose parameters and buffers it reads.
            inputs: of the same shapes every time.
        """
        call = None
        if self.plan.compiled:
            key = (function, tuple((x.shape, x.stride(), x.dtype) for x in inputs))
            if key not in self._compiled_calls:
                self._compiled_calls[key] = self._compile_call(function, module, inputs)
            call = self._compiled_calls[key]
        with self.turn():
            return function(*inputs) if call is None else call(*inputs)

    def gradient_step(self, loss: Loss[S], settings: StepSettings) -> Callable[..., Noted]:
        """What makes steps of gradient descent on the mean loss over minibatches.

        Args:
            loss: what is minimized.
            settings: optimizer and clipping.

        Returns:
            A function of a minibatch, and of what the loss takes besides, 0-d, which may change
            between steps. It raises a MemoryError that names the knob to turn, where a step does
            not fit.
        """
        compiled = self.plan.compiled and not self.plan.micro_batch[settings.phase]
        eager = EagerStep(self, loss, settings, records=compiled and self.plan.on_gpu)
        if not compiled or self.plan.on_gpu:
            return eager
        return OneCallStep(self, eager, self._compiled_steps)

    @contextmanager
    def explaining_memory(
        self, what: str, knob: str, *, phase: Phase = "policy", whole: bool = False
    ) -> Iterator[None]:
        """If what is done meanwhile does not fit into memory, say which knob makes it smaller.

        Args:
            what: is done, for the message.
            knob: and which way to turn it.
            phase: whose micro-batches are another knob.
            whole: smaller micro-batches would not help, as sequences for a memory are not cut.

        Raises:
            MemoryError: in place of PyTorch's error.
        """
        size = self.plan.micro_batch[phase]
        if size and not whole:
            knob += f", or smaller micro-batches (compute.micro_batch is {size})"
        with explaining_memory(what, knob, device=self.device):
            yield

    def _compile_call(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        module: nn.Module,
        inputs: Sequence[Tensor],
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Compile an evaluation and compare its results with those of the eager one.

        Returns None if compiling fails or the results differ.
        """
        start = perf_counter()
        if self.plan.on_gpu:
            recorded = compile_for_gpu(function)
            # Copies: the next call overwrites what a recording returns.
            return lambda *inputs: tuple(output.clone() for output in recorded(*inputs))
        try:
            call = CompiledCall(function, module, inputs)
        except Exception as error:  # of many kinds, and none of them may end a run
            self.say(f"acting runs eagerly: it cannot be compiled ({reason(error)})")
            return None
        for found, expected in zip(call(*inputs), function(*inputs), strict=True):
            if not torch.allclose(found.double(), expected.double(), rtol=1e-3, atol=1e-4):
                self.say("acting runs eagerly: compiled, it gives other numbers here")
                return None
        self.say(f"acting is compiled ({perf_counter() - start:.0f} s)")
        return call


class EagerStep:
    """A step of gradient descent, operation by operation.

    Args:
        compute: cuts minibatches into micro-batches.
        loss: what is minimized.
        settings: optimizer and clipping.
        records: whether the loss and its gradient are recorded as CUDA graphs.
    """

    def __init__(
        self, compute: Compute, loss: Loss[Any], settings: StepSettings, *, records: bool = False
    ) -> None:
        self.compute, self.loss, self.settings = compute, loss, settings
        self._call = compile_for_gpu(loss.__call__) if records else loss
        self.knob = f"a larger {'aux' if settings.phase == 'aux' else 'ppo'}.num_minibatches"

    def __call__(self, minibatch: Minibatch[Any], *coefficients: Tensor) -> Noted:
        """Make the step."""
        settings, phase = self.settings, self.settings.phase
        whole = minibatch.source.has_memory
        with self.compute.explaining_memory("a gradient step", self.knob, phase=phase, whole=whole):
            settings.optimizer.zero_grad(set_to_none=True)
            rows, names = [], ()
            for piece, share in self.compute.pieces(minibatch.gather(), phase=phase):
                with self.compute.turn():
                    value, noted = self._call(piece, *coefficients)
                    (value * share).backward()
                names = tuple(noted)
                rows.append(torch.stack([part.detach() for part in noted.values()]) * share)
            values = torch.cat([sum(rows[1:], rows[0]), update_(settings).reshape(1)])
            return (*names, settings.norm_name), values, minibatch.num_steps


class OneCallStep:
    """The same in one call, for each layout of minibatches.

    It is compared with the eager step before it is used.

    Args:
        compute: says what is done.
        eager: the step, and what takes over where it cannot be one call.
        compiled: what was compiled before, by all that it depends on.
    """

    def __init__(
        self, compute: Compute, eager: EagerStep, compiled: dict[Hashable, CompiledStep | None]
    ) -> None:
        self.compute, self.eager, self._all = compute, eager, compiled
        self._last: tuple[Samples, CompiledStep | None] | None = None

    def __call__(self, minibatch: Minibatch[Any], *coefficients: Tensor) -> Noted:
        """Make the step."""
        phase, whole = self.eager.settings.phase, minibatch.source.has_memory
        knob = self.eager.knob
        with self.compute.explaining_memory("a gradient step", knob, phase=phase, whole=whole):
            if (compiled := self._step_for(minibatch, coefficients)) is None:
                return self.eager(minibatch, *coefficients)
            with self.compute.turn():
                return compiled.names, compiled(minibatch, coefficients), minibatch.num_steps

    def _step_for(
        self, minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...]
    ) -> CompiledStep | None:
        """The compiled step for such minibatches, made when it is first needed.

        None where there cannot be one.
        """
        if self._last is not None and self._last[0] is minibatch.source:
            return self._last[1]  # an epoch's minibatches are cut from one source
        settings, source = self.eager.settings, minibatch.source
        layout = tuple((x.shape[1:], x.stride(), x.dtype) for x in source.tensors().values())
        size = (len(minibatch.index), minibatch.split, len(source))
        key = (self.eager.loss, id(settings.optimizer), settings.max_grad_norm, *size, layout)
        if key not in self._all:
            self._all[key] = self._compile(minibatch, coefficients)
        self._last = (source, self._all[key])
        return self._all[key]

    def _compile(
        self, minibatch: Minibatch[Any], coefficients: tuple[Tensor, ...]
    ) -> CompiledStep | None:
        """Compile the step and compare it with the eager one.

        What fails, or is wrong, is said and runs eagerly.
        """
        compute, phase, start = self.compute, self.eager.settings.phase, perf_counter()
        step, why = None, "elsewhere"
        try:
            step = CompiledStep(self.eager.loss, minibatch, coefficients, self.eager.settings)
        except Exception as error:  # of many kinds, and none of them may end a run
            why = reason(error)
        if compute.world.any(step is None) or step is None:
            compute.say(f"{phase} steps run eagerly: they cannot be compiled ({why})")
            return None
        before = step.snapshot()
        expected = self.eager(minibatch, *coefficients)[1]
        after = step.snapshot()
        step.restore(before)
        found = step(minibatch, coefficients)
        off = step.distances(before, after, step.snapshot())
        step.restore(before)
        is_off = not torch.allclose(found, expected, rtol=1e-2, atol=1e-4) or not off < 0.05
        if compute.world.any(is_off):
            compute.say(
                f"{phase} steps run eagerly: compiled, they "
                f"give other numbers here (off by {off:.1%} of a step)"
            )
            return None
        compute.say(f"{phase} steps are compiled ({perf_counter() - start:.0f} s)")
        return step


@contextmanager
def explaining_memory(what: str, knob: str, *, device: torch.device) -> Iterator[None]:
    """Say what to do when something does not fit into memory.

    Args:
        what: is done, for the message.
        knob: and which way to turn it.
        device: whose memory it is.

    Raises:
        MemoryError: in place of PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        full = f"{what} does not fit into the memory of {device}"
        raise MemoryError(f"{full}; try {knob}: {reason(error)}") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch says by it that memory is full; on a CPU it is a plain error."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
