"""Plan of a run's execution: device, threads, precision, micro-batches. Kind: pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phasicrl.config import Config, Precision

Phase = Literal["policy", "value", "aux"]
PHASES: tuple[Phase, ...] = ("policy", "value", "aux")

MIN_COMPILE_STEPS = 15_000
"""Minimum gradient steps for compiling, which takes 10 s and saves 0.7 ms a step; on a GPU 30 s."""
MIN_THREAD_SAMPLES = 1024
"""Minimum samples in a minibatch of vectors for several threads, or for a GPU."""
CPU_MICRO_BATCH_BY_PRECISION: Mapping[Precision, int] = {"fp32": 64, "bf16": 128}
"""Images in a micro-batch on a CPU (docs/performance.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a run's execution, recorded in its card. Results depend on it by rounding only.

    Attributes:
        device: `cpu`, `cuda:0`.
        num_threads: PyTorch threads on a CPU.
        take_turns: whether runs on the same cores compute alternately, see `CpuTurnLock`.
        precision: precision of the encoders, by phase.
        micro_batch: images in a micro-batch, by phase; None for whole minibatches.
        compiled: whether acting, steps of pure simulators, and gradient steps without micro-batches
            are compiled.
        inference_batch_size: maximum number of steps in one pass without gradient.
        deterministic: whether only deterministic kernels are allowed.
    """

    device: str = "cpu"
    num_threads: int = 1
    take_turns: bool = False
    precision: dict[Phase, Precision] = field(default_factory=lambda: dict.fromkeys(PHASES, "fp32"))
    micro_batch: Mapping[Phase, int | None] = field(default_factory=lambda: dict.fromkeys(PHASES))
    compiled: bool = False
    inference_batch_size: int = 65_536
    deterministic: bool = False

    @property
    def on_gpu(self) -> bool:
        """Return whether the run's device is a GPU."""
        return self.device.startswith("cuda")


def has_large_minibatches(config: Config, has_images: bool) -> bool:
    """Return whether a minibatch is large enough for several threads, or for a GPU."""
    return has_images or config.batch_size // config.ppo.num_minibatches >= MIN_THREAD_SAMPLES


def make_plan(
    config: Config, device: str, *, num_cores: int, has_compiler: bool, has_images: bool
) -> Plan:
    """Choose threads, precision, micro-batches and compilation for a configuration and a machine.

    Args:
        config: configuration of the run.
        device: `cpu`, `cuda:0`.
        num_cores: number of cores that this process may use.
        has_compiler: whether a C++ compiler is installed.
        has_images: whether observations contain images.
    """
    compute, on_gpu = config.compute, device.startswith("cuda")
    # Compiling does not make a CPU's convolutions faster.
    can_help = has_compiler and (on_gpu or not has_images)
    is_useful = can_help and config.num_gradient_steps >= MIN_COMPILE_STEPS
    compiled = compute.compile == "on" or (compute.compile == "auto" and is_useful)
    if on_gpu and config.model.memory != "none":
        compiled = False  # CUDA graphs need fixed shapes, which packed sequences do not have
    precisions: dict[Phase, Precision] = dict.fromkeys(PHASES, compute.policy_precision)
    precisions["aux"] = compute.aux_precision
    fixed = None if compute.micro_batch == "auto" or not has_images else compute.micro_batch
    micro_batch: dict[Phase, int | None] = dict.fromkeys(PHASES, fixed)
    if compute.micro_batch == "auto" and has_images and not (compiled or on_gpu):
        micro_batch = {x: CPU_MICRO_BATCH_BY_PRECISION[precisions[x]] for x in PHASES}
    usual_threads = num_cores if has_large_minibatches(config, has_images) else 1
    num_threads = compute.num_threads or usual_threads
    # Two runs that each use half of the cores can compute at the same time.
    fills_cores = num_threads > 1 and 2 * num_threads > num_cores
    return Plan(
        device=device,
        num_threads=num_threads,
        take_turns=compute.take_turns and fills_cores and not on_gpu,
        precision=precisions,
        micro_batch=micro_batch,
        compiled=compiled,
        inference_batch_size=2048 if has_images else 65_536,
        deterministic=compute.deterministic,
    )
