"""Speed of training on this machine, and where the time goes.

Kind: effects (trains, in a folder that is deleted).
"""

import math
import resource
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from phasicrl import Config
from phasicrl.algorithm import learn
from phasicrl.training.build import start_run

_PASS_SECONDS = 0.3
"""Duration of the repetition of each pass through the networks, in seconds."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured rate, in environment steps per second.

    Attributes:
        name: timed part of the training.
        per_second: median.
        low: slowest repetition.
        high: fastest repetition.
    """

    name: str
    per_second: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `measure_speed`.

    Attributes:
        config: measured configuration.
        machine: processor, versions, commit, plan.
        rates: rates of the whole loop, its rollout, its update, and the bare networks.
        split: fraction of the loop's time that each part takes.
        passes: number of passes of each step's observation through the networks, by kind.
        gflops_per_step: floating-point operations of the networks per environment step, in 10⁹.
        peak_memory: peak memory of the process, in bytes.
        peak_gpu_memory: peak memory of tensors on the GPU, in bytes; 0 without one.
        buffer: memory of the phase buffer, in bytes.
        notes: changes of the configuration or its execution; the most expensive kernels.
    """

    config: Config
    machine: dict[str, Any]
    rates: tuple[Rate, ...]
    split: dict[str, float]
    passes: dict[str, float]
    gflops_per_step: float
    peak_memory: int
    peak_gpu_memory: int
    buffer: int
    notes: tuple[str, ...]

    def get_speed(self, name: str) -> float:
        """Return the median of the rate called `name`, in environment steps per second."""
        return next(rate.per_second for rate in self.rates if rate.name == name)

    @property
    def share_of_network_speed(self) -> float:
        """Rate `whole loop` divided by the rate `networks alone`."""
        return self.get_speed("whole loop") / self.get_speed("networks alone")

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers and the configuration for a JSON file."""
        return asdict(self) | {"share_of_limit": self.share_of_network_speed}


def measure_speed(
    config: Config, *, seconds: float = 30.0, trace: Path | None = None, **user_objects: Any
) -> Report:
    """Measure the training speed on this machine, and where the time goes.

    PPG's phases are cut to the fewest iterations with the same work per step, but at least two.

    Args:
        config: configuration to measure; its budget, displays, checkpoints and evaluations are off.
        seconds: Duration of the measurement after a warm-up; at least three iterations (of PPG
            phases).
        trace: File for a trace of every kernel of one more phase, for chrome://tracing and
            ui.perfetto.dev.
        user_objects: custom environments and networks, see `train`.

    Raises:
        ValueError: `seconds` is not positive and finite, or the configuration cannot work here.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}; expected a positive number, such as 30")
    notes: list[str] = []
    config = _make_bench_config(config, notes.append)
    with tempfile.TemporaryDirectory() as folder:
        endless = config.with_updates({"output_dir": folder, "total_env_steps": 10**12})
        with start_run(endless, **user_objects) as run:
            run.executor.log = notes.append
            rates, split = _measure_loop(run, seconds)
            limit, passes, flops = _measure_networks(run)
            if trace is not None:
                notes.append(_profile_phase(run, trace))
            card = run.files.card
            machine = card["machine"] | card["versions"] | card["plan"] | {"commit": card["commit"]}
            if run.executor.plan.on_gpu:
                machine["device"] = torch.cuda.get_device_name(run.executor.device)
            return Report(
                config, machine, (*rates, limit), split, passes, flops / 1e9,
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                torch.cuda.max_memory_allocated(),
                sum(stored.nbytes for stored in run.buffer.rollouts.tensors().values()),
                tuple(notes),
            )  # fmt: skip


def _make_bench_config(config: Config, log: Callable[[str], None]) -> Config:
    """Return the configuration with short phases, without displays, checkpoints and goals."""
    default, aux = Config(), config.aux
    changes: dict[str, Any] = {
        "log": replace(default.log, console="off", tensorboard=False),
        "checkpoint": replace(default.checkpoint, every_minutes=None),
        "evaluation": default.evaluation, "stop_at_return": None,
    }  # fmt: skip
    if config.has_auxiliary_phase:
        # The fewest iterations with as many passes over each step as in the whole phase.
        used = aux.iterations_per_epoch
        every = max(aux.every // math.gcd(aux.every, used or aux.every), 2)
        if every < aux.every:
            changes["aux.every"] = every
            changes["aux.iterations_per_epoch"] = used and used * every // aux.every
            log(f"phases of {every} iterations instead of {aux.every}: the same work per step")
    return config.with_updates(changes)


def _measure_loop(run: Any, seconds: float) -> tuple[list[Rate], dict[str, float]]:
    """Train whole periods; return rates of the loop and its halves, and the split of time."""
    length, parts = run.config.aux_phase_interval, ("rollout", "policy", "value", "auxiliary")
    period_seconds: list[list[float]] = []  # seconds in total, and of each part
    records: list[Mapping[str, float]] = []
    period_start = start = perf_counter()

    def record_period(_: object, record: Mapping[str, float]) -> Literal["stop"] | None:
        nonlocal period_start, start
        records.append(record)
        if len(records) < length:
            return None
        times = [sum(row.get(f"time/{part}", 0.0) for row in records) for part in parts]
        now = perf_counter()
        period_seconds.append([now - period_start, *times])
        period_start = now
        start = now if len(period_seconds) == 1 else start  # the first period warms up
        records.clear()
        return "stop" if len(period_seconds) >= 4 and now - start >= seconds else None

    run.callbacks.on_iteration = record_period
    learn(run)
    steps = run.config.batch_size * length
    whole, rollout, *updates = zip(*period_seconds[1:], strict=True)
    shares = [sum(times) / sum(whole) for times in (rollout, *updates)]
    split = {part: share for part, share in zip(parts, shares, strict=True) if share}
    rates = [
        _summarize_rates("whole loop", [steps / x for x in whole]),
        _summarize_rates("rollout", [steps / x for x in rollout]),
        _summarize_rates("update", [steps / sum(times) for times in zip(*updates, strict=True)]),
    ]
    return rates, split | {"everything else": 1 - sum(shares)}


def _profile_phase(run: Any, path: Path) -> str:
    """Record the kernels of one period; return a table of the most expensive ones."""
    last = run.iteration + run.config.aux_phase_interval
    with torch.profiler.profile() as profile:
        run.callbacks.on_iteration = lambda run, _: "stop" if run.iteration == last else None
        learn(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    order = f"self_{run.executor.device.type}_time_total"
    table = profile.key_averages().table(sort_by=order, row_limit=8, max_name_column_width=40)
    return f"kernels of one phase, all: {path}\n{table}"


class _NetworkPass(NamedTuple):
    """A kind of pass through the networks, and its number per observation."""

    runs_policy: bool
    runs_value: bool
    backward: bool = True
    phase: Literal["policy", "aux"] = "policy"
    per_step: float = 1.0


def _list_passes(run: Any) -> list[_NetworkPass]:
    """Return the passes of acting and of all epochs, without those that only measure."""
    config, aux = run.config, run.config.aux
    acting = _NetworkPass(True, True, backward=False)
    per_step = aux.epochs * (aux.iterations_per_epoch or aux.every) / config.aux_phase_interval
    auxiliary = _NetworkPass(True, True, phase="aux", per_step=per_step)
    passes = [_NetworkPass(*kind) for kind in config.ppo.epoch_kinds]
    return [*passes, acting, *[auxiliary] * config.has_auxiliary_phase]


def _measure_networks(run: Any) -> tuple[Rate, dict[str, float], float]:
    """Time the bare forward and backward passes of a step, eagerly.

    Returns:
        Rate, number of passes of each kind, and FLOP per step.
    """
    agent, rollout = run.agent, run.buffer.rollout(0)
    segments = rollout.policy_samples(rollout.value_target)
    samples = segments if segments.has_memory else segments.as_transitions()
    minibatch = samples.take(slice(0, len(samples) // run.config.ppo.num_minibatches))
    passes = _list_passes(run)
    batches = [next(run.executor.micro_batches(minibatch, phase=each.phase))[0] for each in passes]

    def run_network_pass(network_pass: _NetworkPass, batch: Any) -> None:
        inputs = (batch.obs, batch.first, batch.state)
        precision = run.executor.precision(network_pass.phase)
        with torch.set_grad_enabled(network_pass.backward):
            if not network_pass.runs_policy:
                outputs = [agent.value(*inputs, precision=precision)]
            elif not network_pass.runs_value:
                policy, _ = agent.policy(*inputs, batch.action_mask, precision=precision)
                outputs = [policy.dist_params]
            else:
                output = agent(*inputs, batch.action_mask, precision=precision)
                outputs = [output.policy.dist_params, output.value]
                outputs += [] if output.aux_value is None else [output.aux_value]
        if network_pass.backward:
            sum(tensor.sum() for tensor in outputs).backward()  # type: ignore[union-attr]
            agent.zero_grad(set_to_none=True)

    flops = 0.0
    for network_pass, batch in zip(passes, batches, strict=True):  # a warm-up, too
        with FlopCounterMode(display=False) as counter:
            run_network_pass(network_pass, batch)
        flops += network_pass.per_step * counter.get_total_flops() / batch.first.numel()

    def time_pass_per_step(network_pass: _NetworkPass, batch: Any) -> float:
        run.executor.synchronize()
        start, calls = perf_counter(), 0
        while perf_counter() - start < _PASS_SECONDS or not calls:
            run_network_pass(network_pass, batch)
            calls += 1
        run.executor.synchronize()
        return network_pass.per_step * (perf_counter() - start) / calls / batch.first.numel()

    rounds = [sum(map(time_pass_per_step, passes, batches)) for _ in range(3)]
    counts = {"forward and backward": sum(x.per_step for x in passes if x.backward), "forward": 1.0}
    return _summarize_rates("networks alone", [1 / seconds for seconds in rounds]), counts, flops


def _summarize_rates(name: str, values: Sequence[float]) -> Rate:
    return Rate(name, statistics.median(values), min(values), max(values))


def print_report(report: Report) -> None:
    """Print the report as text."""
    env = report.config.env
    print(f"{report.config.name} on {env.id}, {env.num_envs} environments")
    print("steps per second (slowest to fastest)")
    for rate in report.rates:
        print(f"  {rate.name:14} {rate.per_second:11,.0f} ({rate.low:,.0f} to {rate.high:,.0f})")
    print("time:", ", ".join(f"{part} {share:.0%}" for part, share in report.split.items()))
    passes = " and ".join(f"{number:g} × {kind}" for kind, number in report.passes.items())
    gflops = report.gflops_per_step * report.get_speed("whole loop")
    print(
        f"networks: {passes}, {report.gflops_per_step * 1e3:,.1f} MFLOP a step, {gflops:,.1f} "
        f"GFLOP/s; the whole loop runs at {report.share_of_network_speed:.0%} of the networks alone"
    )
    gigabytes = (x / 1e9 for x in (report.peak_memory, report.peak_gpu_memory, report.buffer))
    print("memory: peak {:.2f} GB, GPU {:.2f} GB, phase buffer {:.2f} GB".format(*gigabytes))
    print(*report.notes, sep="\n")
