"""How a run is executed: the plan, from wishes, machine and measurements. Kind: pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phasicrl.config import ComputeConfig, Config, Precision

Phase = Literal["policy", "value", "aux"]
PHASES: tuple[Phase, ...] = ("policy", "value", "aux")

WORTH_COMPILING = 15_000
"""Gradient steps from which compiling pays even a machine's first run.

It takes ten seconds, and saves about 0.7 ms each.
"""
WORTH_SHARING = 1024
"""Samples of a minibatch of vectors from which a second core pays."""
WORTH_PROBING = 200_000
"""Observations through the network from which a probe of three seconds pays, once per machine."""
USUAL_MICRO_BATCH = 64
"""Images in a micro-batch where nothing was measured: near the best in fp32."""
LARGEST_PROBE = 2048
"""Images that a GPU is timed with: smaller batches would time the launching of kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the choice depends on.

    Attributes:
        device: `cpu`, `cuda:0`.
        num_cores: cores that this process may use.
        has_compiler: whether there is a C++ compiler.
    """

    device: str
    num_cores: int
    has_compiler: bool

    @property
    def on_gpu(self) -> bool:
        """Whether tensors are on a GPU."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a run asks of the machine.

    Attributes:
        has_images: convolutions like all cores and small pieces, dense layers on vectors do not.
        has_memory: whether the networks are recurrent.
        has_aux: whether there is an auxiliary phase.
        num_gradient_steps: of the whole run: compiling must pay.
        minibatch_size: samples of a gradient step: many pay for a second core even with small
            networks.
        num_passes: observations that go through the networks in the whole run.
        can_be_probed: whether the network can be tried on random images.
    """

    has_images: bool
    has_memory: bool = False
    has_aux: bool = False
    num_gradient_steps: int = 0
    minibatch_size: int = 0
    num_passes: int = 0
    can_be_probed: bool = False

    @classmethod
    def of(cls, config: Config, *, has_images: bool, can_be_probed: bool) -> Workload:
        """The workload of a configuration."""
        return cls(
            has_images=has_images,
            has_memory=config.model.memory != "none",
            has_aux=config.has_auxiliary_phase,
            num_gradient_steps=config.num_gradient_steps,
            minibatch_size=config.batch_size // config.ppo.num_minibatches,
            num_passes=config.num_network_passes,
            can_be_probed=can_be_probed,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe of the network found on this machine.

    Attributes:
        micro_batch: images per micro-batch that were fastest, for each precision.
        rate: images per second, forward and backward, with these micro-batches.
        error: of bf16, in multiples of what rounding makes; NaN where it does not run.
    """

    TOLERANCE = 2.0
    WORTH = 1.1

    micro_batch: Mapping[Precision, int]
    rate: Mapping[Precision, float]
    error: float

    @property
    def bf16_is_right(self) -> bool:
        """Whether bf16 gives fp32's numbers, up to twice what rounding makes."""
        return self.error <= self.TOLERANCE

    @property
    def bf16_pays(self) -> bool:
        """Whether bf16 is right, and a tenth faster."""
        return self.bf16_is_right and self.rate["bf16"] > self.WORTH * self.rate["fp32"]

    @property
    def verdict(self) -> str:
        """What is said of bf16, for people."""
        return "right" if self.bf16_is_right else f"wrong here ({off_by(self.error)})"

    def __str__(self) -> str:
        """One line, for people."""
        rates = (
            f"{name} {rate:,.0f} images/s in micro-batches of {self.micro_batch[name]}"
            for name, rate in self.rate.items()
        )
        return f"networks on this machine: {', '.join(rates)}; bf16 is {self.verdict}"


def off_by(error: float) -> str:
    """How wrong bf16 is, for people."""
    return "it does not run" if error != error else f"off by {error:.0f} times what rounding makes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a run is executed; a part of the run's card.

    Nothing in it changes what is computed, up to rounding.

    Attributes:
        device: `cpu`, `cuda:0`.
        num_threads: of PyTorch on the CPU.
        pin_threads: keep them on a core each while they compute.
        take_turns: compute in turns with other runs that would fill the same cores.
        precision: of the encoders, by phase.
        micro_batch: images in a micro-batch, by phase; None is whole minibatches.
        one_call: phases whose gradient steps are one call: compiled on a CPU, a CUDA graph on a
            GPU.
        acts_in_one_call: whether acting is one call, too.
        steps_at_once: steps that go through a network together where no gradient is needed.
        deterministic: allow only deterministic kernels.
        remarks: what was measured and chosen, for people.
    """

    device: str = "cpu"
    num_threads: int = 1
    pin_threads: bool = True
    take_turns: bool = False
    precision: Mapping[Phase, Precision] = field(
        default_factory=lambda: dict.fromkeys(PHASES, "fp32")
    )
    micro_batch: Mapping[Phase, int | None] = field(default_factory=lambda: dict.fromkeys(PHASES))
    one_call: tuple[Phase, ...] = ()
    acts_in_one_call: bool = False
    steps_at_once: int = 65_536
    deterministic: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether tensors are on a GPU."""
        return self.device.startswith("cuda")

    def to_dict(self) -> dict[str, Any]:
        """All of it, for a JSON file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Read back `to_dict`.

        Raises:
            ValueError: these are not the fields of a plan.
        """
        fields = {part.name for part in dataclasses.fields(cls)}
        if set(values) != fields:
            raise ValueError(
                f"this is no plan of this version: its fields are {sorted(values)}; "
                f"expected: {sorted(fields)}"
            )
        lists: dict[str, Any] = {name: tuple(values[name]) for name in ("one_call", "remarks")}
        return cls(**{**values, **lists})


def make_plan(
    config: ComputeConfig, machine: Machine, workload: Workload, findings: Findings | None = None
) -> Plan:
    """Choose how to execute a run.

    Args:
        config: the user's wishes.
        machine: what there is.
        workload: what is asked of it.
        findings: of a probe, where `needs_probe` asked for one.
    """
    asked = _asked_sizes(config)
    one_call = _is_one_call(config, machine, workload)
    precision = _precision(config, findings)

    def size(phase: Phase) -> int | None:
        wish = asked[phase]
        if not workload.has_images or (wish == "auto" and (one_call or machine.on_gpu)):
            return None
        if wish != "auto":
            return wish
        return findings.micro_batch[precision[phase]] if findings else USUAL_MICRO_BATCH

    micro_batch: dict[Phase, int | None] = {phase: size(phase) for phase in PHASES}
    shares = workload.has_images or workload.minibatch_size >= WORTH_SHARING
    num_threads = config.num_threads or (machine.num_cores if shares else 1)
    # Two runs with half of the cores each can go on side by side.
    would_fill = num_threads > 1 and 2 * num_threads > machine.num_cores
    words = _words(micro_batch, precision, workload)
    return Plan(
        device=machine.device,
        num_threads=num_threads,
        pin_threads=config.pin_threads and not machine.on_gpu,
        take_turns=config.take_turns and would_fill and not machine.on_gpu,
        precision=precision,
        micro_batch=micro_batch,
        # What the user wants to go in pieces is no single call.
        one_call=tuple(phase for phase in PHASES if one_call and micro_batch[phase] is None),
        acts_in_one_call=one_call,
        steps_at_once=2048 if workload.has_images else 65_536,
        deterministic=config.deterministic,
        remarks=() if findings is None else (f"{findings}: {words}",),
    )


def needs_probe(config: ComputeConfig, machine: Machine, workload: Workload) -> bool:
    """Whether something is left to be chosen that only a measurement tells.

    The run must be long enough to pay for it.
    """
    if not workload.can_be_probed or workload.num_passes < WORTH_PROBING:
        return False
    whole = _is_one_call(config, machine, workload) or machine.on_gpu
    sizes_are_free = "auto" in _asked_sizes(config).values() and not whole
    return sizes_are_free or (config.aux_precision == "auto" and workload.has_aux)


def probe_size(config: ComputeConfig, machine: Machine, workload: Workload, *, largest: int) -> int:
    """The number of images to probe with: a given micro-batch may be all that there is room for.

    Args:
        config: the user's wishes.
        machine: what there is.
        workload: what is asked of it.
        largest: micro-batch that is tried on a CPU.
    """
    most = LARGEST_PROBE if machine.on_gpu else largest
    most = min(most, workload.minibatch_size or most)
    return min(most, config.micro_batch) if isinstance(config.micro_batch, int) else most


def can_follow(plan: Plan, machine: Machine) -> bool:
    """Whether a plan that was made before can be followed here: on the same kind of device."""
    return plan.on_gpu == machine.on_gpu and (plan.on_gpu or plan.num_threads <= machine.num_cores)


def _asked_sizes(config: ComputeConfig) -> dict[Phase, int | Literal["auto"] | None]:
    """The wished micro-batches by phase."""
    aux = config.micro_batch if config.aux_micro_batch == "auto" else config.aux_micro_batch
    return {"policy": config.micro_batch, "value": config.micro_batch, "aux": aux}


def _is_one_call(config: ComputeConfig, machine: Machine, workload: Workload) -> bool:
    """Whether gradient steps are one call."""
    # Recording takes no time; the lengths of a memory's sequences cannot be recorded.
    if machine.on_gpu:
        return config.compile != "off" and not workload.has_memory
    is_long = workload.num_gradient_steps >= WORTH_COMPILING
    pays = is_long and machine.has_compiler and not workload.has_images
    return config.compile == "on" or (config.compile == "auto" and pays)


def _precision(config: ComputeConfig, findings: Findings | None) -> dict[Phase, Precision]:
    """The precision of each phase."""
    chosen: Precision = "bf16" if findings is not None and findings.bf16_pays else "fp32"
    aux = chosen if config.aux_precision == "auto" else config.aux_precision
    return {"policy": config.policy_precision, "value": config.policy_precision, "aux": aux}


def _words(
    micro_batch: Mapping[Phase, int | None],
    precision: Mapping[Phase, Precision],
    workload: Workload,
) -> str:
    """What was chosen, for people."""
    policy, aux = micro_batch["policy"], micro_batch["aux"]
    words = [f"micro-batches of {policy}"] if policy else []
    if workload.has_aux:
        size = f" in micro-batches of {aux}" if aux != policy else ""
        words.append(f"auxiliary phase in {precision['aux']}{size}")
    return ", ".join(words) or "nothing to choose"
