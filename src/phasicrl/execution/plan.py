"""How a run is executed: device, threads, precision, micro-batches. Kind: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phasicrl.config import Config, Precision

Phase = Literal["policy", "value", "aux"]
PHASES: tuple[Phase, ...] = ("policy", "value", "aux")

WORTH_COMPILING = 15_000
"""Gradient steps from which compiling pays: it takes ten seconds and saves about 0.7 ms a step."""
WORTH_SHARING = 1024
"""Samples of a minibatch of vectors from which a second core pays."""
MICRO_BATCH: Mapping[Precision, int] = {"fp32": 64, "bf16": 128}
"""Images in a micro-batch on a CPU (docs/performance.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a run is executed; recorded in its card. Changes results by rounding only.

    Attributes:
        device: `cpu`, `cuda:0`.
        num_threads: PyTorch threads on a CPU.
        take_turns: whether runs on the same cores compute in turns.
        precision: precision of the encoders, by phase.
        micro_batch: images in a micro-batch, by phase; None is whole minibatches.
        compiled: whether acting and gradient steps without micro-batches are compiled.
        inference_batch_size: steps that go through a network together without gradient.
        deterministic: allow only deterministic kernels.
    """

    device: str = "cpu"
    num_threads: int = 1
    take_turns: bool = False
    precision: Mapping[Phase, Precision] = field(
        default_factory=lambda: dict.fromkeys(PHASES, "fp32")
    )
    micro_batch: Mapping[Phase, int | None] = field(default_factory=lambda: dict.fromkeys(PHASES))
    compiled: bool = False
    inference_batch_size: int = 65_536
    deterministic: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether tensors are on a GPU."""
        return self.device.startswith("cuda")


def make_plan(
    config: Config, device: str, *, num_cores: int, has_compiler: bool, has_images: bool
) -> Plan:
    """Choose how to execute a run, from its configuration and the machine alone.

    Args:
        config: configuration of the run.
        device: `cpu`, `cuda:0`.
        num_cores: cores that this process may use.
        has_compiler: whether there is a C++ compiler.
        has_images: whether there are images among the observations.
    """
    compute, on_gpu = config.compute, device.startswith("cuda")
    if on_gpu:  # CUDA graphs need fixed shapes, which packed sequences do not have
        compiled = compute.compile != "off" and config.model.memory == "none"
    else:  # convolutions spend their time in kernels that compiling does not change
        is_long = config.num_gradient_steps >= WORTH_COMPILING
        pays = is_long and has_compiler and not has_images
        compiled = compute.compile == "on" or (compute.compile == "auto" and pays)
    precision: dict[Phase, Precision] = {
        "policy": compute.policy_precision,
        "value": compute.policy_precision,
        "aux": compute.aux_precision,
    }

    def micro_batch(phase: Phase) -> int | None:
        if not has_images:
            return None
        if compute.micro_batch != "auto":
            return compute.micro_batch
        return None if compiled or on_gpu else MICRO_BATCH[precision[phase]]

    minibatch_size = config.batch_size // config.ppo.num_minibatches
    uses_all_cores = has_images or minibatch_size >= WORTH_SHARING
    num_threads = compute.num_threads or (num_cores if uses_all_cores else 1)
    # Two runs that use half of the cores each compute side by side.
    fills_cores = num_threads > 1 and 2 * num_threads > num_cores
    return Plan(
        device=device,
        num_threads=num_threads,
        take_turns=compute.take_turns and fills_cores and not on_gpu,
        precision=precision,
        micro_batch={phase: micro_batch(phase) for phase in PHASES},
        compiled=compiled,
        inference_batch_size=2048 if has_images else 65_536,
        deterministic=compute.deterministic,
    )
