"""How fast this machine trains a configuration, and where the time goes.

Kind: effects (trains, in a folder that is deleted).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.flop_counter import FlopCounterMode

from phasicrl.algorithm import learn
from phasicrl.config import AuxConfig, CheckpointConfig, Config, EvaluationConfig, LogConfig
from phasicrl.envs.make import make_envs
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.execution.plan import Phase
from phasicrl.host.machine import describe, peak_memory
from phasicrl.host.provenance import commit
from phasicrl.phases import Record
from phasicrl.rollout import PolicySamples
from phasicrl.seeding import derive_seed
from phasicrl.session.build import EnvFactory, start_run
from phasicrl.session.run import Run


@dataclass(frozen=True, slots=True)
class Rate:
    """How often something was done in a second.

    Attributes:
        name: what.
        per_second: median.
        low: slowest repetition.
        high: fastest repetition.
        unit: of what there are so many in a second.
    """

    name: str
    per_second: float
    low: float
    high: float
    unit: str = "environment steps"


@dataclass(frozen=True, slots=True)
class Report:
    """What `measure` found.

    Attributes:
        config: what was trained.
        machine: processor, versions, commit, threads.
        rates: what was timed.
        split: share of a whole loop's time, by part.
        passes: how often each step goes through the network: forward, and forward and backward.
        gflops_per_step: floating-point operations of the networks for one environment step, in 10⁹.
        peak_memory: most memory that the process has held, in bytes.
        peak_gpu_memory: most memory of the GPU that tensors took, in bytes; 0 without one.
        buffer: memory of the phase buffer, in bytes.
        notes: what was chosen or scaled.
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

    def rate(self, name: str) -> float:
        """Median of the rate of that name."""
        return next(rate.per_second for rate in self.rates if rate.name == name)

    @property
    def share_of_limit(self) -> float:
        """The whole loop's rate as a part of what the networks alone would allow."""
        return self.rate("whole loop") / self.rate("networks alone")

    def to_json(self) -> str:
        """All of it."""
        values = dataclasses.asdict(self) | {
            "config": json.loads(self.config.to_json()),
            "share_of_limit": self.share_of_limit,
        }
        return json.dumps(values, indent=2)


def measure(
    config: Config,
    *,
    seconds: float = 30.0,
    make_env: EnvFactory | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    trace: Path | None = None,
) -> Report:
    """Measure how fast this machine trains, and where the time goes.

    PPG's phases are cut to as few iterations as have the same work per step, two if its passes are
    over everything.

    Args:
        config: what to train; its budget, displays, checkpoints and evaluations are ignored.
        seconds: How long the whole loop is measured, after it has warmed up; at least three
            iterations (with PPG phases).
        make_env: makes one of your own Gymnasium environments, as for `train`.
        make_vector_env: makes a vector environment of your own, as for `train`.
        trace: Gets every kernel up to and with one more auxiliary phase, if there is one;
            chrome://tracing and ui.perfetto.dev show it.

    Raises:
        ValueError: `seconds` is no length of time, or a configuration that cannot work here.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}; give a number above zero, for example 30")
    notes: list[str] = []
    config = _measured(config, notes.append)
    with tempfile.TemporaryDirectory() as folder:
        endless = config.changed({"output_dir": folder, "total_env_steps": 10**12})
        own = {"make_env": make_env, "make_vector_env": make_vector_env}
        with start_run(endless, **own) as run:
            run.compute.say = notes.append
            loops = _whole_loops(run, seconds)
            rates = [*_rates(run, loops), _environments(run, **own), _acting(run)]
            limit, passes, flops = _networks(run)
            if trace is not None:
                notes.extend(_write_trace(run, trace))
            on_gpu = torch.cuda.is_initialized()
            return Report(
                config=config,
                machine=_machine(run),
                rates=(*rates, limit),
                split=_split(loops),
                passes=passes,
                gflops_per_step=flops / 1e9,
                peak_memory=peak_memory(),
                peak_gpu_memory=torch.cuda.max_memory_allocated() if on_gpu else 0,
                buffer=sum(stored.nbytes for stored in run.buffer.rollouts.tensors().values()),
                notes=tuple(notes),
            )


def _measured(config: Config, say: Callable[[str], None]) -> Config:
    """The configuration without what is not measured, and with phases that are short."""
    changes: dict[str, Any] = {
        "log": LogConfig(console="off", tensorboard=False),
        "checkpoint": CheckpointConfig(every_minutes=None),
        "evaluation": EvaluationConfig(),
    }
    if config.aux is not None and (every := _shortest_phase(config.aux)) < config.aux.every:
        whole, used = config.aux.every, config.aux.iterations_per_epoch
        changes["aux.every"] = every
        changes["aux.iterations_per_epoch"] = used and used * every // whole
        say(f"phases of {every} iterations instead of {whole}: the same work per step")
    return config.changed(changes)


def _shortest_phase(aux: AuxConfig) -> int:
    """Fewest iterations of a phase, two at least, with as many passes over a step as this one's."""
    return max(aux.every // math.gcd(aux.every, aux.iterations_per_epoch or aux.every), 2)


class _Loop(NamedTuple):
    """One period: the seconds that it took, all in all, and its iterations' records."""

    seconds: float
    records: list[Record]

    def spent(self, *parts: str) -> float:
        """Seconds in these parts."""
        return sum(record.get(f"time/{part}", 0.0) for record in self.records for part in parts)


def _whole_loops(run: Run, seconds: float) -> list[_Loop]:
    """Periods after the first one."""
    records: list[Record] = []
    times: list[float] = []
    length = run.config.period

    def note(_: Run, record: Record) -> Literal["stop"] | None:
        records.append(record)
        times.append(perf_counter())
        enough = len(records) >= 4 * length and times[-1] - times[length - 1] >= seconds
        return "stop" if enough and len(records) % length == 0 else None

    learn(run, note)
    return [
        _Loop(times[last] - times[last - length], records[last - length + 1 : last + 1])
        for last in range(2 * length - 1, len(times), length)
    ]


def _rates(run: Run, loops: list[_Loop]) -> list[Rate]:
    """Of the whole loop, and of its two halves."""
    steps = run.config.batch_size * run.config.period
    update = ("policy", "value", "auxiliary")
    return [
        _rate("whole loop", [steps / loop.seconds for loop in loops]),
        _rate("rollout", [steps / loop.spent("rollout") for loop in loops]),
        _rate("update", [steps / loop.spent(*update) for loop in loops]),
    ]


def _write_trace(run: Run, path: Path) -> list[str]:
    """Record the kernels of one period; returns what took most of the time, as lines."""
    last = run.iteration + run.config.period
    with torch.profiler.profile() as profile:
        learn(run, lambda run, _: "stop" if run.iteration == last else None)
    profile.export_chrome_trace(str(path))
    on_gpu = run.compute.device.type == "cuda"
    time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    spent = {event.key: getattr(event, time) for event in profile.key_averages()}
    total = sum(spent.values())
    most = sorted(spent, key=lambda key: -spent[key])[:8]
    lines = (f"{spent[key] / total:6.1%}  {key}" for key in most)
    return [f"kernels of one phase, all: {path}", *lines]


def _split(loops: list[_Loop]) -> dict[str, float]:
    """Share of each part in the time of all loops."""
    total = sum(loop.seconds for loop in loops)
    split: dict[str, float] = {}
    for part in ("rollout", "policy", "value", "auxiliary"):
        if share := sum(loop.spent(part) for loop in loops) / total:
            split[part] = share
    return split | {"everything else": 1 - sum(split.values())}


def _environments(run: Run, **own: Any) -> Rate:
    """The environments alone, with random actions.

    They are drawn beforehand. Where masks must be kept to, they are drawn before each step, and
    that is not counted.
    """
    envs = make_envs(run.config.env, seed=derive_seed(run.config.seed, "env", 1), **own)
    head, generator = run.agent.policy_head, Generator(run.compute.device).manual_seed(0)
    features = torch.zeros(envs.num_envs, head.linear.in_features, device=run.compute.device)

    @torch.inference_mode()
    def draw() -> Tensor:
        mask = None if envs.action_mask is None else run.compute.upload(envs.action_mask)
        policy = head(features, mask)
        return head.env_action(policy.sample(generator)).to(envs.device)

    def hundred() -> float:
        spent = 0.0
        for number in range(100):
            action = draw() if actions is None else actions[number % len(actions)]
            start = perf_counter()
            envs.step(action)
            spent += perf_counter() - start
        return spent

    try:
        envs.reset()
        actions = None if envs.mask_size else [draw() for _ in range(16)]
        hundred()
        found = []
        for _ in range(5):
            spent, calls = 0.0, 0
            while spent < 0.5:
                spent, calls = spent + hundred(), calls + 1
            found.append(100 * envs.num_envs * calls / spent)
        return _rate("environments alone", found)
    finally:
        envs.close()


def _acting(run: Run) -> Rate:
    """The agent alone, answering to one vector of observations again and again."""
    rollout = run.buffer.rollout(0)

    @torch.inference_mode()
    def ten() -> None:
        for _ in range(10):
            run.collector.act(rollout, 0)

    return _timed(run, "acting alone", ten, 10 * run.config.env.num_envs)


class _Pass(NamedTuple):
    """One kind of pass through the networks, and how often a step's observation takes it."""

    kind: str
    backward: bool
    phase: Phase
    times: float


def _passes(run: Run) -> list[_Pass]:
    """All that a step's observation takes."""
    ppo, aux = run.config.ppo, run.config.aux
    names = {(True, True): "policy and value", (True, False): "policy", (False, True): "value"}
    passes = [_Pass(names[kind], True, "policy", 1.0) for kind in ppo.epoch_schedule]
    passes.append(_Pass("policy and value", False, "policy", 1.0))  # acting
    if ppo.recompute_advantages:
        passes.append(_Pass("value", False, "value", len(ppo.epoch_schedule) - 1))
    with_policy, proximal = sum(policy for policy, _ in ppo.epoch_schedule), run.learner.proximal
    looks = [ppo.uses_kl, proximal is not None]  # by every epoch, or minibatch
    once = ppo.kl_penalty > 0 and ppo.kl_estimate == "exact" and proximal is None  # π_old
    if any(looks) or once:
        passes.append(_Pass("policy", False, "policy", sum(looks) * with_policy + once))
    if aux is not None and run.config.has_auxiliary_phase:
        passes.append(_Pass("policy and value", True, "aux", run.config.aux_passes))
        passes.append(_Pass("policy", False, "aux", 1 / aux.run_every))
        if aux.recompute_targets:
            passes.append(_Pass("value", False, "value", 1 / aux.run_every))
    return passes


def _networks(run: Run) -> tuple[Rate, dict[str, float], float]:
    """Bare forward and backward passes, as many as a step needs, not as one call.

    Returns:
        Their rate, how many of each kind there are, and FLOP per step.
    """
    config, agent = run.config, run.agent
    rollout = run.buffer.rollout(0)
    segments = rollout.policy_samples(rollout.value_target)
    samples = segments if segments.has_memory else segments.as_transitions()
    minibatch = samples.take(slice(0, len(samples) // config.ppo.num_minibatches))

    def outputs(kind: str, piece: PolicySamples, phase: Phase) -> Tensor:
        conditions, precision = (piece.obs, piece.first, piece.state), run.compute.precision(phase)
        if kind == "value":
            return agent.value(*conditions, precision=precision).sum()
        if kind == "policy":
            policy, _ = agent.policy(*conditions, piece.action_mask, precision=precision)
            return policy.dist_params.sum()
        output = agent(*conditions, piece.action_mask, precision=precision)
        aux = 0.0 if output.aux_value is None else output.aux_value.sum()
        return output.policy.dist_params.sum() + output.value.sum() + aux

    def once(each: _Pass, piece: PolicySamples) -> None:
        with torch.set_grad_enabled(each.backward):
            result = outputs(each.kind, piece, each.phase)
        if each.backward:
            result.backward()
            agent.zero_grad(set_to_none=True)

    seconds, flops = 0.0, 0.0
    counts, spread = {"forward and backward": 0.0, "forward": 0.0}, []
    for each in _passes(run):
        piece = next(run.compute.pieces(minibatch, phase=each.phase))[0]
        number, one = piece.first.numel(), partial(once, each, piece)
        with FlopCounterMode(display=False) as counter:
            one()
        flops += each.times * counter.get_total_flops() / number
        timed = _timed(run, each.kind, one, number, repeat=3, seconds=0.3)
        seconds += each.times / timed.per_second
        counts["forward and backward" if each.backward else "forward"] += each.times
        spread.append(timed.high / timed.low)
    rate, width = 1 / seconds, statistics.median(spread) ** 0.5
    return Rate("networks alone", rate, rate / width, rate * width), counts, flops


def _timed(
    run: Run,
    name: str,
    call: Callable[[], None],
    number: int,
    *,
    repeat: int = 5,
    seconds: float = 0.5,
) -> Rate:
    """How many a second, if a call does so many.

    One call warms up; then come repetitions of at least so many seconds each.
    """
    call()
    found = []
    for _ in range(repeat):
        run.compute.wait()
        start, calls = perf_counter(), 0
        while perf_counter() - start < seconds or not calls:
            call()
            calls += 1
        run.compute.wait()
        found.append(number * calls / (perf_counter() - start))
    return _rate(name, found)


def _rate(name: str, found: list[float]) -> Rate:
    return Rate(name, statistics.median(found), min(found), max(found))


def _machine(run: Run) -> dict[str, Any]:
    """What decides about speed."""
    plan, device = run.compute.plan, run.compute.device
    return {
        **describe(),
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads of PyTorch": plan.num_threads,
        "threads of the environments": run.config.env.num_threads,
        "precision": dict(plan.precision),
        "micro-batch": dict(plan.micro_batch),
        "compiled": plan.compiled,
    }


def print_report(report: Report) -> None:
    """The report as a table, for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    config, console = report.config, Console(highlight=False)
    title = f"{config.name} on {config.env.id}, {config.env.num_envs} environments"
    table = Table("", title=Text(title, "table.title"), title_justify="left")
    for column in ("steps per second", "slowest to fastest"):
        table.add_column(column, justify="right")
    for rate in report.rates:
        table.add_row(rate.name, f"{rate.per_second:,.0f}", f"{rate.low:,.0f} to {rate.high:,.0f}")
    console.print(table)
    parts = (f"{part} {share:.0%}" for part, share in report.split.items())
    console.print("time: " + ", ".join(parts))
    passes = " and ".join(f"{number:g} × {kind}" for kind, number in report.passes.items())
    gflops = report.gflops_per_step
    console.print(
        f"networks: {passes}, {gflops * 1e3:,.1f} MFLOP a step, "
        f"{gflops * report.rate('whole loop'):,.1f} GFLOP/s; the whole loop runs at "
        f"{report.share_of_limit:.0%} of the networks alone, not as one call"
    )
    of_gpu = report.peak_gpu_memory / 1e9
    on_gpu = f" and {of_gpu:.2f} GB of the GPU" if of_gpu else ""
    most, buffer = report.peak_memory / 1e9, report.buffer / 1e9
    held = f"memory: {most:.2f} GB{on_gpu} at most"
    console.print(f"{held}, of which the phase buffer {buffer:.2f} GB")
    for note in report.notes:
        console.print(note, markup=False)
