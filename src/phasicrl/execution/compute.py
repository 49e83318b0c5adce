"""How a gradient step is executed: device, threads, micro-batches. Kind: effects. Nothing here changes what is computed, up to rounding."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from phasicrl.config import ComputeConfig
from phasicrl.execution.compiled import Borrowed, adam_, can_fuse, capture, fuse, scale, total_norm
from phasicrl.execution.pooling import MaxPool
from phasicrl.execution.precision import Precision, encoders_in
from phasicrl.execution.probe import MICRO_BATCHES, TOLERANCE, Findings, bf16_error, is_out_of_memory, off_by, probe_once
from phasicrl.execution.turns import Turns
from phasicrl.host.machine import Team, num_cores, thread_ids, usable_cores
from phasicrl.rollout import Minibatch, Samples

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of glibc's malloc.h
_GRAIN = 32_768  # numbers that a thread gets at least (ATen/TensorIterator.h)
WORTH_COMPILING = 15_000
"""Gradient steps from which compiling them pays even a machine's first run: ten seconds, later two or three, for about 0.7 ms each."""
WORTH_SHARING = 1024
"""Samples of a minibatch of vectors from which a second core pays."""
WORTH_COMPILING_POOLS = 2_000_000
"""Observations through the network from which half a minute of compiling max-pools pays, once per machine."""
WORTH_PROBING = 200_000
"""Observations through the network from which a probe of three seconds pays, once per machine."""
USUAL_MICRO_BATCH = 64
"""Pictures in a piece where nothing was measured: near the best in fp32 (docs/performance.md)."""
SIZE_FIELDS = {"micro_batch": "policy", "aux_micro_batch": "aux"}
PRECISION_FIELDS = {"compute.policy_precision": "policy", "compute.aux_precision": "aux"}
"""Which phase a knob is for."""
S = TypeVar("S", bound=Samples)


def _as_asked_for(config: ComputeConfig, kind: str) -> ComputeConfig:
    """The choices as the user made them, if a run settled them on another kind of device."""
    if not config.settled or config.settled[0] == kind:
        return config
    return dataclasses.replace(config, settled=(), **dict.fromkeys(config.settled[1:], "auto"))


def is_worth_compiling(num_gradient_steps: int) -> bool:
    """Whether so many gradient steps on vectors are worth compiling, on a machine that can."""
    return num_gradient_steps >= WORTH_COMPILING and can_fuse()


class Loss(Protocol[S]):
    """What a gradient step minimises. Equal losses do the same: compiled steps are kept by them."""

    @property
    def module(self) -> nn.Module:
        """Whose parameters it depends on."""
        ...

    def prepare(self, samples: S) -> S:
        """What must see the whole minibatch, before it is cut into pieces."""
        ...

    def __call__(self, samples: S, *weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over samples, and what to note, 0-d."""
        ...


class StepSettings(NamedTuple):
    """How gradients become a step.

    Attributes:
        name: of the phase, `policy`, `value` or `aux`; also the gradient's in the metrics.
        networks: parameters by network, each clipped by its own norm.
        optimizer: makes the step.
        max_grad_norm: what gradients are clipped to; None is off.
    """

    name: str
    networks: Sequence[Sequence[nn.Parameter]]
    optimizer: Optimizer
    max_grad_norm: float | None

    @property
    def norm_name(self) -> str:
        """What the gradient's norm is called in the metrics."""
        return f"gradients/{self.name}_norm"


class Compute:
    """The machine as the phases see it.

    Attributes:
        device: where tensors are.
        precision: of each phase, by its name: `policy`, `value`, `aux`.
        micro_batch: pictures in a piece, likewise; None is whole minibatches.
        compiles_pools: whether max-pools are compiled.
        remarks: what `settle` chose and saw, as lines for people.
        steps_at_once: how many steps go through a network together where no gradient is needed.
        say: told which way was chosen, for people.

    Args:
        config: the user's choices.
        pictures: whether observations are pictures: convolutions like all cores and small pieces, dense layers on vectors do not.
        num_gradient_steps: of the whole run: compiling must pay.
        minibatch_size: samples of a gradient step: many of them pay for a second core even with small networks.
        has_memory: whether the networks are recurrent.

    Raises:
        ValueError: the device does not exist here.
    """

    def __init__(
        self, config: ComputeConfig, *, pictures: bool, num_gradient_steps: int = 0, minibatch_size: int = 0, has_memory: bool = False
    ) -> None:
        self.device = _device(config.device)
        on_cpu = self.device.type == "cpu"
        config = _as_asked_for(config, self.device.type)
        self.config, self.pictures, self._minibatch_size, self._has_memory = config, pictures, minibatch_size, has_memory
        aux_size = config.micro_batch if config.aux_micro_batch == "auto" else config.aux_micro_batch
        asked: dict[str, Any] = {"policy": config.micro_batch, "value": config.micro_batch, "aux": aux_size}
        # What the user wants to go in pieces is no single call.
        self._in_pieces = {phase for phase, size in asked.items() if pictures and isinstance(size, int)}
        self._free = {phase for phase, size in asked.items() if size == "auto"}
        usual = USUAL_MICRO_BATCH if on_cpu else None
        self.micro_batch = {phase: (usual if size == "auto" else size) if pictures else None for phase, size in asked.items()}
        aux: Precision = "bf16" if config.aux_precision == "bf16" else "fp32"
        self.precision: dict[str, Precision] = {"policy": config.policy_precision, "value": config.policy_precision, "aux": aux}
        self.findings: Findings | None = None
        self.remarks: list[str] = []
        self.num_threads = config.num_threads or (num_cores() if pictures or minibatch_size >= WORTH_SHARING else 1)
        self.steps_at_once = 2048 if pictures else 65_536
        pays = is_worth_compiling(num_gradient_steps) and not pictures
        # Recording on a GPU takes no time; compiling for a CPU does.
        self.fuses = config.compile == "on" or (config.compile == "auto" and pays) or (config.compile in ("auto", "pools") and not on_cpu)
        if has_memory and not on_cpu:  # the lengths of its sequences are looked at, which cannot be recorded
            self.fuses = False
        self._records = not on_cpu
        self.compiles_pools = config.compile == "pools" and on_cpu
        self._one_call = "compiled" if on_cpu else "recorded as a CUDA graph"
        self._fused: dict[Hashable, FusedStep | None] = {}
        self._last_fused: tuple[Loss[Any], Samples, FusedStep | None] | None = None
        self._fused_calls: dict[Hashable, FusedCall | None] = {}
        self.say: Callable[[str], None] = lambda sentence: None
        # Two runs with half of the cores each can go on side by side.
        takes_turns = on_cpu and config.take_turns and self.num_threads > 1 and 2 * self.num_threads > num_cores()
        self._turns = Turns() if takes_turns else None
        self._team = Team(set())
        if on_cpu:
            torch.set_num_threads(self.num_threads)
            keep_memory()
            # Fewer are left to the system, and those that OpenMP has bound to it.
            if config.pin_threads and 1 < self.num_threads == len(usable_cores()) == len(os.sched_getaffinity(0)):
                self._team = Team(set(_team(self.num_threads)))
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without
            torch.use_deterministic_algorithms(True)

    def settle(
        self, network: Callable[[Tensor], Tensor], encoder: nn.Module, shape: tuple[int, ...], *, has_aux: bool, num_passes: int
    ) -> ComputeConfig:
        """Choose what was left to be chosen, by a probe of the network if it pays; returns the configuration with what was chosen, to be kept with the run.

        Args:
            network: features of observations.
            encoder: whose parameters and max-pools it uses.
            shape: of a picture.
            has_aux: whether there is an auxiliary phase, whose precision matters.
            num_passes: observations that will go through the network.
        """
        config, whole = self.config, self.fuses or self._records
        self.micro_batch |= dict.fromkeys(self._free) if whole else {}
        free_precision = config.aux_precision == "auto" and has_aux
        # A GPU is timed with what it is given: small batches would time the launching of kernels. A given number may be all that there is room for.
        most = min(2048 if self._records else max(MICRO_BATCHES), self._minibatch_size or 2048)
        most = min(most, self.micro_batch["policy"] or most) if "policy" in self._in_pieces else most
        parameters = list(encoder.parameters())

        def noise(number: int) -> Tensor:
            return torch.randint(256, (number, *shape), dtype=torch.uint8, generator=Generator().manual_seed(0)).to(self.device)

        with self.naming_the_knob("trying the networks", "a small number for compute.micro_batch"):
            if num_passes >= WORTH_PROBING and (free_precision or (self._free and not whole)):
                tried = config.compile == "auto" and not self._records and num_passes >= WORTH_COMPILING_POOLS and can_fuse()
                pools = [module for module in encoder.modules() if isinstance(module, MaxPool) and module.can_be_compiled] if tried else []
                self.findings = found = probe_once(network, parameters, noise(most), pools=pools, num_threads=self.num_threads)
                if free_precision:
                    self.precision["aux"] = "bf16" if found.bf16_pays else "fp32"
                self.micro_batch |= {phase: found.micro_batch[self.precision[phase]] for phase in self._free if not whole}
                self.compiles_pools |= found.compiling_pays(self.precision["aux" if has_aux else "policy"])  # where most passes are
                self.remarks.append(f"{found}: {self._choices(has_aux=has_aux)}")
            used = [name for name, phase in PRECISION_FIELDS.items() if self.precision[phase] == "bf16" and (has_aux or phase == "policy")]
            if used:  # by hand, if it is wrong; looked at in short runs too
                error = self.findings.error if self.findings else bf16_error(network, parameters, noise(min(most, MICRO_BATCHES[0])))
                if not error <= TOLERANCE:
                    self.remarks.append(f"bf16 is wrong on this machine ({off_by(error)}), and used because of {' and '.join(used)}")
        chosen: dict[str, Any] = {}
        if self.findings is not None or whole:
            chosen = {name: self.micro_batch[phase] for name, phase in SIZE_FIELDS.items() if phase in self._free}
        if self.findings is not None and free_precision:
            chosen["aux_precision"] = self.precision["aux"]
        if self.compiles_pools and config.compile == "auto":
            chosen["compile"] = "pools"
        return dataclasses.replace(config, **chosen, settled=(self.device.type, *config.settled[1:], *chosen)) if chosen else config

    def _choices(self, *, has_aux: bool) -> str:
        """What was settled, for people."""
        words = [f"micro-batches of {self.micro_batch['policy']}"] if self.micro_batch["policy"] else []
        if has_aux:
            size = f" in micro-batches of {self.micro_batch['aux']}" if self.micro_batch["aux"] != self.micro_batch["policy"] else ""
            words.append(f"auxiliary phase in {self.precision['aux']}{size}")
        words += ["compiled max-pools"] if self.compiles_pools else []
        return ", ".join(words) or "nothing to choose"

    def prepare(self, agent: nn.Module) -> None:
        """Let the agent's max-pools be compiled, if that was chosen."""
        for module in agent.modules():
            if isinstance(module, MaxPool):
                module.compiled = self.compiles_pools

    def acting(self) -> AbstractContextManager[object]:
        """The precision of the rollout, which is the policy phase's; for everything that is not a gradient step."""
        return encoders_in(self.precision["policy"])

    def pieces(self, samples: S, *, phase: str) -> Iterator[tuple[S, float]]:
        """Cut samples into micro-batches, with the share of the whole that each is: their weighted losses add up to the mean loss.

        Args:
            samples: of transitions, or of sequences where there is a memory, which are not cut.
            phase: whose size of micro-batches to take.
        """
        pictures = self.micro_batch[phase]
        size = max(pictures // samples.first.shape[1], 1) if pictures else len(samples)
        for start in range(0, len(samples), size):
            piece = samples.take(slice(start, start + size))
            yield piece, len(piece) / len(samples)

    def upload(self, values: Tensor) -> Tensor:
        """Values from the environments where the agent is: as they are if they are there; a GPU fetches them while the CPU goes on."""
        if values.device.type == "cpu" and self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def per_segment(self, segments: Samples, function: Callable[[Samples], Tensor], *, phase: str = "policy") -> Tensor:
        """`[S, L, …]`: a function of a module's, asked in the phase's precision and in pieces that fit the caches; needs no gradient."""
        results = []
        num_steps = segments.first.shape[1]
        at_once = max(1, self.steps_at_once // num_steps)
        with (
            self.naming_the_knob("asking the networks about a rollout", "fewer env.num_envs", phase=phase),
            encoders_in(self.precision[phase]),
        ):
            for start in range(0, len(segments), at_once):
                some = segments.take(slice(start, start + at_once))
                some = some if some.state.shape[-1] else some.as_transitions()
                found = []
                for piece, _ in self.pieces(some, phase=phase):
                    with self.turn():
                        found.append(function(piece))
                found = torch.cat(found)
                results.append(found.reshape(-1, num_steps, *found.shape[2:]))
        return torch.cat(results)

    def gradient_step(
        self, loss: Loss[S], minibatch: Minibatch[S], *weights: Tensor, settings: StepSettings
    ) -> tuple[tuple[str, ...], Tensor, float]:
        """One step of gradient descent on the mean loss over a minibatch.

        The gradient of each network is clipped by its own norm, so that a large value loss does not shrink the policy's step.
        Parameters that the loss does not reach have no gradient, rather than a zero one, so that Adam leaves them alone. A gradient that is
        not finite makes no step; the norm that is returned says so.

        Args:
            loss: what is minimised.
            minibatch: over what.
            weights: what the loss takes besides, 0-d, and may change between steps.
            settings: optimiser and clipping.

        Returns:
            The names of what the loss noted, and of the gradient's norm before clipping; their values `[n]`; the number of samples.

        Raises:
            MemoryError: it does not fit; the message names the knob that makes it smaller.
        """
        knob = f"a larger {'aux' if settings.name == 'aux' else 'ppo'}.num_minibatches"
        phase = settings.name
        with self.naming_the_knob("a gradient step", knob, phase=phase), encoders_in(self.precision[phase]):
            number = len(minibatch.index)
            if self.fuses and phase not in self._in_pieces:
                if self._records:  # what is recorded reads from where it read before: from a copy of the minibatch
                    minibatch = minibatch.gathered()
                if (fused := self._fused_step(loss, minibatch, weights, settings)) is not None:
                    with self.turn():
                        return fused.names, fused(minibatch, weights), number
            return *self._eager_step(loss, minibatch, weights, settings), number

    def evaluate(self, function: Callable[..., tuple[Tensor, ...]], module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`function(*inputs)`, which uses a module and needs no gradient, in the precision of acting; one compiled call, if steps are.

        Args:
            function: the same every time; a bound method will do.
            module: whose parameters and buffers it reads.
            inputs: of the same shapes every time.
        """
        with self.acting():
            call = self._fused_call(function, module, inputs) if self.fuses else None
            with self.turn():
                return function(*inputs) if call is None else call(inputs)

    def _fused_call(self, function: Callable[..., tuple[Tensor, ...]], module: nn.Module, inputs: Sequence[Tensor]) -> FusedCall | None:
        """The compiled evaluation for such inputs, made when it is first needed; None where there cannot be one."""
        key = (function, tuple((x.shape, x.stride(), x.dtype) for x in inputs))
        if key not in self._fused_calls:
            self._fused_calls[key] = self._try_to_fuse_call(function, module, inputs)
        return self._fused_calls[key]

    def wait(self) -> None:
        """Wait until a GPU has done all that it was given: only then does a clock say how long that took."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context in which to use all threads: each has a core of its own, and other runs that would fill the same cores wait."""
        with nullcontext() if self._turns is None else self._turns.turn(), self._team.at_work():
            yield

    @contextmanager
    def naming_the_knob(self, what: str, knob: str, *, phase: str = "policy") -> Iterator[None]:
        """If what is done meanwhile does not fit into memory, say which knob makes it smaller.

        Args:
            what: is done, for the message.
            knob: and which way to turn it.
            phase: whose micro-batches are another knob, unless they are whole sequences.

        Raises:
            MemoryError: in place of PyTorch's error.
        """
        try:
            yield
        except RuntimeError as error:  # on the CPU it is a plain one
            if not is_out_of_memory(error):
                raise
            size, name = self.micro_batch[phase], "aux_micro_batch" if phase == "aux" else "micro_batch"
            piece = f", or smaller micro-batches (compute.{name} is {size})" if size and not self._has_memory else ""
            raise MemoryError(f"{what} does not fit into the memory of {self.device}; try {knob}{piece}: {_reason(error)}") from error

    def _eager_step(
        self, loss: Loss[S], minibatch: Minibatch[S], weights: tuple[Tensor, ...], settings: StepSettings
    ) -> tuple[tuple[str, ...], Tensor]:
        """The step, eagerly."""
        settings.optimizer.zero_grad(set_to_none=True)
        samples = loss.prepare(minibatch.gather())
        rows, names = [], ()
        for piece, share in self.pieces(samples, phase=settings.name):
            with self.turn():
                value, noted = loss(piece, *weights)
                (value * share).backward()
            names = tuple(noted)
            rows.append(torch.stack([part.detach() for part in noted.values()]) * share)
        norms = []
        for parameters in settings.networks:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not gradients:
                continue
            norms.append(nn.utils.get_total_norm(gradients))
            if settings.max_grad_norm is not None:
                torch._foreach_mul_(gradients, (settings.max_grad_norm / (norms[-1] + 1e-6)).clamp(max=1.0))
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        # As GradScaler tells it: Adam leaves everything as it is. To look here would wait for a GPU; the phase's means are looked at.
        if settings.optimizer.defaults.get("fused"):
            settings.optimizer.found_inf = norm.isfinite().logical_not().to(torch.float)  # pyright: ignore[reportAttributeAccessIssue]
        settings.optimizer.step()
        return (*names, settings.norm_name), torch.cat([sum(rows[1:], rows[0]), norm.reshape(1)])

    def _fused_step(self, loss: Loss[S], minibatch: Minibatch[S], weights: tuple[Tensor, ...], settings: StepSettings) -> FusedStep | None:
        """The compiled step for such minibatches, made when it is first needed; None where there cannot be one."""
        if self._last_fused is not None and self._last_fused[0] is loss and self._last_fused[1] is minibatch.source:
            return self._last_fused[2]  # an epoch's minibatches are cut from one source for one loss
        layout = tuple((x.shape[1:], x.stride(), x.dtype) for x in minibatch.source.tensors().values())
        key = (loss, id(settings.optimizer), settings.max_grad_norm, len(minibatch.index), minibatch.split, len(minibatch.source), layout)
        if key not in self._fused:
            self._fused[key] = self._try_to_fuse(loss, minibatch, weights, settings)
        self._last_fused = (loss, minibatch.source, self._fused[key])
        return self._fused[key]

    def _try_to_fuse_call(
        self, function: Callable[..., tuple[Tensor, ...]], module: nn.Module, inputs: Sequence[Tensor]
    ) -> FusedCall | None:
        """Compile an evaluation and compare it with the eager one; see `_try_to_fuse`."""
        start = perf_counter()
        try:
            call = FusedCall(function, module, inputs)
        except Exception as error:  # see below
            self.say(f"acting runs eagerly: it cannot be {self._one_call} ({_reason(error)})")
            return None
        for found, expected in zip(call(inputs), function(*inputs), strict=True):
            if not torch.allclose(found.double(), expected.double(), rtol=1e-3, atol=1e-4):
                self.say(f"acting runs eagerly: {self._one_call}, it gives other numbers here")
                return None
        self.say(f"acting is {self._one_call} ({perf_counter() - start:.0f} s)")
        return call

    def _try_to_fuse(self, loss: Loss[S], minibatch: Minibatch[S], weights: tuple[Tensor, ...], settings: StepSettings) -> FusedStep | None:
        """Compile the step and compare it with the eager one; what fails, or is wrong, is said and left to eager execution."""
        start = perf_counter()
        try:
            fused = FusedStep(loss, minibatch, weights, settings, at_once=self._records)
        except Exception as error:  # tracing and compiling fail in many ways, and none of them may end a run
            self.say(f"{settings.name} steps run eagerly: they cannot be {self._one_call} ({_reason(error)})")
            return None
        before = fused.snapshot()
        _, expected = self._eager_step(loss, minibatch, weights, settings)
        after = fused.snapshot()
        fused.restore(before)
        found = fused(minibatch, weights)
        compiled = fused.snapshot()
        fused.restore(before)
        count = len(fused.parameters)
        off = max(
            _distance(compiled[part], after[part]) / max(_distance(before[part], after[part]), 1e-12)
            for part in (slice(count), slice(count, 2 * count), slice(2 * count, 3 * count))
        )
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-4) or not off < 0.05:
            self.say(f"{settings.name} steps run eagerly: {self._one_call}, they give other numbers here (off by {off:.1%} of a step)")
            return None
        self.say(f"{settings.name} steps are {self._one_call} ({perf_counter() - start:.0f} s)")
        return fused


class FusedStep:
    """A gradient step in one call: gathering, forward, loss, backward, clipping and Adam.

    Args:
        loss: what is minimised.
        minibatch: one like those to come: as many samples, of a source of the same layout.
        weights: like those to come.
        settings: optimiser and clipping.
        at_once: clip and step all parameters by kernels that take them together; where each is compiled, one by one is faster.

    Attributes:
        parameters: those that the loss reaches.
        names: what the step notes.

    Raises:
        Exception: of many kinds, where that cannot be traced or compiled.
    """

    def __init__(
        self, loss: Loss[S], minibatch: Minibatch[S], weights: tuple[Tensor, ...], settings: StepSettings, *, at_once: bool
    ) -> None:
        named = dict(loss.module.named_parameters())
        reached = _reached(loss, minibatch, weights, list(named.values()))
        names = [name for name, there in zip(named, reached, strict=True) if there]
        self.parameters = [named[name] for name in names]
        self._rest = {name: tensor for name, tensor in chain(named.items(), loss.module.named_buffers()) if name not in names}
        self._groups = settings.optimizer.param_groups
        group_of = {parameter: index for index, group in enumerate(self._groups) for parameter in group["params"]}
        groups = [group_of[parameter] for parameter in self.parameters]
        state = [_state_of(parameter, settings.optimizer) for parameter in self.parameters]
        self._moments = [[of_one[name] for of_one in state] for name in ("exp_avg", "exp_avg_sq", "step")]
        self._rates = [torch.tensor(float(group["lr"]), device=self.parameters[0].device) for group in self._groups]
        place = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        members_of = ([place[id(p)] for p in network if id(p) in place] for network in settings.networks)
        networks = [members for members in members_of if members]
        borrowed, like, fields, split = Borrowed(loss.module), minibatch.source, tuple(minibatch.source.tensors()), minibatch.split
        counts = [len(names)] * 4 + [len(self._rates), len(self._rest), len(weights), 1, len(fields)]
        self.names: tuple[str, ...] = ()
        self._source: tuple[Samples, list[Tensor]] | None = None
        self._everything = [*self.parameters, *chain(*self._moments), *self._rates, *self._rest.values()]

        def step(*inputs: Tensor) -> Tensor:
            parts = iter(inputs)
            parameters, first, second, steps, rates, rest, weights, (index,), source = (list(islice(parts, count)) for count in counts)
            samples = dataclasses.replace(like, **dict(zip(fields, source, strict=True)))
            with torch.enable_grad():
                leaves = [parameter.detach().requires_grad_() for parameter in parameters]
                tensors = dict(zip(names, leaves, strict=True)) | dict(zip(self._rest, rest, strict=True))
                value, noted = borrowed.call(tensors, lambda: loss(loss.prepare(Minibatch(samples, index, split).gather()), *weights))
                gradients = list(torch.autograd.grad(value, leaves))
            norms = []
            for members in networks:
                of_network = [gradients[i] for i in members]
                norms.append(total_norm(of_network, at_once=at_once))
                if settings.max_grad_norm is not None:
                    scaled = scale(of_network, (settings.max_grad_norm / (norms[-1] + 1e-6)).clamp(max=1.0), at_once=at_once)
                    for i, gradient in zip(members, scaled, strict=True):
                        gradients[i] = gradient
            norm = torch.stack(norms).square().sum().sqrt()
            for group in sorted(set(groups)):
                members = [i for i, its_group in enumerate(groups) if its_group == group]
                mine = ([tensors[i] for i in members] for tensors in (parameters, gradients, first, second, steps))
                options = self._groups[group]
                adam_(*mine, rate=rates[group], betas=options["betas"], eps=options["eps"], only_if=norm.isfinite(), at_once=at_once)
            self.names = (*noted, settings.norm_name)
            return torch.stack([*(part.detach() for part in noted.values()), norm])

        # No two inputs may be one tensor here by chance, as they would stay one in the compiled code.
        source = [tensor.clone() for tensor in minibatch.source.tensors().values()]
        before = self.snapshot()
        inputs = [tensor.detach() for tensor in self._inputs(minibatch.index.clone(), source, weights)]
        try:
            self._call = _as_one_call(step, inputs, num_kept=len(self._everything))
        finally:  # recording makes steps before it fails or not
            self.restore(before)

    def __call__(self, minibatch: Minibatch[S], weights: tuple[Tensor, ...]) -> Tensor:
        """Make the step; returns the values of `names`."""
        for rate, group in zip(self._rates, self._groups, strict=True):
            rate.fill_(group["lr"])
        with torch.no_grad():
            if self._source is None or self._source[0] is not minibatch.source:
                self._source = (minibatch.source, list(minibatch.source.tensors().values()))
            return self._call(*self._inputs(minibatch.index, self._source[1], weights))

    def snapshot(self) -> list[Tensor]:
        """Copies of all that a step changes: parameters and moments."""
        return [tensor.detach().clone() for tensor in chain(self.parameters, *self._moments)]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Take back `snapshot`."""
        with torch.no_grad():
            for tensor, before in zip(chain(self.parameters, *self._moments), snapshot, strict=True):
                tensor.copy_(before)

    def _inputs(self, index: Tensor, source: Iterable[Tensor], weights: tuple[Tensor, ...]) -> list[Tensor]:
        """Everything that the compiled code reads or writes, in the order in which it does."""
        return [*self._everything, *weights, index, *source]


def diverged(what: Sequence[str]) -> ValueError:
    """The error for a run whose numbers are no longer finite: what they are, and what to do."""
    return ValueError(
        f"training has diverged: not every number of {' and '.join(what)} is finite; start again with a lower ppo.learning_rate, with "
        "clipped gradients (ppo.max_grad_norm 0.5), or with normalized rewards (reward_norm)"
    )


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The root of the sum of squared differences."""
    return math.sqrt(sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True)))


class FusedCall:
    """An evaluation in one call.

    Args:
        function: of tensors; uses a module and needs no gradient.
        module: whose tensors it reads.
        inputs: like those to come.

    Raises:
        Exception: of many kinds, where that cannot be traced or compiled.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], module: nn.Module, inputs: Sequence[Tensor]) -> None:
        tensors = dict(chain(module.named_parameters(), module.named_buffers()))
        names, borrowed = list(tensors), Borrowed(module)

        def call(*everything: Tensor) -> tuple[Tensor, ...]:
            own, given = everything[: len(names)], everything[len(names) :]
            return borrowed.call(dict(zip(names, own, strict=True)), lambda: function(*given))

        self._own = [tensor.detach() for tensor in tensors.values()]
        with torch.inference_mode(False):
            self._call = _as_one_call(call, [*self._own, *(tensor.clone() for tensor in inputs)], num_kept=len(self._own))

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Evaluate."""
        return self._call(*self._own, *inputs)


def _as_one_call(function: Callable[..., Any], inputs: Sequence[Tensor], *, num_kept: int) -> Callable[..., Any]:
    """Compile for a CPU, record on a GPU; the first `num_kept` inputs are the same tensors in every call."""
    return fuse(function, inputs) if inputs[0].device.type == "cpu" else capture(function, inputs, num_kept=num_kept)


def _state_of(parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Tensor]:
    """What Adam remembers of a parameter, begun as it would (torch/optim/adam.py:166-181).

    Raises:
        ValueError: the optimiser is another, or does more than the compiled step would.
    """
    group = next(group for group in optimizer.param_groups if any(parameter is member for member in group["params"]))
    more = [option for option in ("weight_decay", "amsgrad", "maximize") if group.get(option)]
    if type(optimizer) is not torch.optim.Adam or optimizer._optimizer_step_pre_hooks or more:
        raise ValueError(f"the optimiser is not PyTorch's Adam as it is{': it has ' + ', '.join(more) if more else ''}")
    if parameter not in optimizer.state:
        zeros = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | zeros
    return optimizer.state[parameter]


def _reached(loss: Loss[S], minibatch: Minibatch[S], weights: tuple[Tensor, ...], parameters: Sequence[Tensor]) -> list[bool]:
    """Which parameters the loss depends on."""
    value, _ = loss(loss.prepare(minibatch.gather()), *weights)
    return [gradient is not None for gradient in torch.autograd.grad(value, parameters, allow_unused=True)]


@functools.cache
def _team(num_threads: int) -> frozenset[int]:
    """The threads that libgomp makes for PyTorch beside the one that calls, made now; those that were there before cannot be told from others."""
    before = thread_ids()
    torch.zeros(num_threads * _GRAIN).add_(1.0)
    return frozenset(thread_ids() - before)


def keep_memory() -> None:
    """Ask glibc to keep freed memory instead of giving it back to the system after every layer.

    PyTorch's CPU allocator has no cache of its own, so that each activation would be mapped, faulted in and unmapped again: a fifth
    of the IMPALA network's time with pieces of 64 pictures, more than half of it with 2,048 (docs/performance.md). Other C libraries do without.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _device(name: str) -> torch.device:
    """The device of that name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"compute.device is {name!r}, which does not work here ({reason}); `auto` takes what is there") from None
    return device
