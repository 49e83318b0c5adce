"""A run: everything that `algorithm.learn` orders about, and everything that must survive a crash. Kind: state and its set-up."""

from __future__ import annotations

import math
import platform
import shutil
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor

from phasicrl.collect import Collector
from phasicrl.config import Config, Task, refuse_idle
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.envs.wrappers import HeuristicMask, MaskFunction
from phasicrl.execution.compute import Compute
from phasicrl.execution.device import this_machine
from phasicrl.execution.plan import Machine, Plan, Workload, can_follow, make_plan
from phasicrl.execution.probe import probed_plan
from phasicrl.host import provenance
from phasicrl.host.machine import free_memory, num_cores, package_version, processor
from phasicrl.learner import Learner, Record
from phasicrl.models.agent import Agent, EncoderFactory
from phasicrl.optimize import diverged
from phasicrl.rollout import PhaseBuffer, Rollout
from phasicrl.runs.checkpoint import CheckpointError, Chunks, load_checkpoint, save_checkpoint
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import MetricsLog
from phasicrl.seeding import derive_seed
from phasicrl.spaces import ActionLayout, ObservationLayout, is_image, leaves

EnvFactory = Callable[[], gym.Env]


def _generator(config: Config, purpose: str, device: torch.device | str = "cpu") -> Generator:
    """A stream of randomness of a run."""
    return Generator(device).manual_seed(derive_seed(config.seed, purpose))


class Run:
    """A training session: a learner, its environments and buffer, a directory, a log and a clock.

    `state_dict` holds all that a checkpoint needs.

    Args:
        config: the run's configuration, as it was asked for.
        directory: its run directory, which exists.
        envs: its environments.
        learner: what is trained.
        log: where its metrics go.
        own: what the user passed as objects, `environment`, `encoder` or `mask`: the configuration
            cannot hold it.
    """

    def __init__(
        self, config: Config, directory: Path, envs: VectorEnv, learner: Learner, log: MetricsLog, *, own: tuple[str, ...]
    ) -> None:
        self.config = config
        self.own = own
        self.directory = directory
        self.envs = envs
        self.log = log
        learner.compute.say = log.message
        for remark in learner.compute.plan.remarks:
            log.message(remark)
        self.learner = learner
        self.buffer = _make_buffer(config, envs, learner.agent, learner.compute.device)
        self.collector = Collector(
            envs, learner.agent, generator=_generator(config, "action", learner.compute.device), compute=learner.compute,
            bootstrap_truncation=config.ppo.bootstrap_truncation,
        )  # fmt: skip
        self.env_steps = 0
        self._seconds_before = 0.0
        self._started = self._iteration_started = time.perf_counter()
        self._last_save = -math.inf
        self._rollout_seconds = 0.0

    @property
    def agent(self) -> Agent:
        """What is trained."""
        return self.learner.agent

    @property
    def compute(self) -> Compute:
        """How it is executed."""
        return self.learner.compute

    @property
    def iteration(self) -> int:
        """Policy iterations so far."""
        return self.learner.iteration

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, earlier parts of a resumed one included."""
        return self._seconds_before + time.perf_counter() - self._started

    def collect(self, rollout: Rollout) -> Rollout:
        """Fill the rollout, move the clock, and return the rollout."""
        self._iteration_started = time.perf_counter()
        self.stage("rollout")
        self.collector.collect(rollout, begins_statistics=self.learner.begins_statistics)
        self.env_steps += self.config.batch_size
        self._rollout_seconds = time.perf_counter() - self._iteration_started
        return rollout

    def stage(self, name: str) -> None:
        """Tell the display what is going on."""
        self.log.progress(name, env_steps=self.env_steps)

    def finish_iteration(self, record: Record) -> None:
        """Log the iteration's metrics, and save if it is time."""
        total = time.perf_counter() - self._iteration_started
        record |= self.collector.episodes.report() | {
            "charts/SPS": self.config.batch_size / total,
            "time/rollout": self._rollout_seconds,
            "time/total": total,
        }
        self.log.write(record, env_steps=self.env_steps, iteration=self.iteration, phase=self.learner.phase)
        every = self.config.checkpoint.every_minutes
        if every is not None and time.perf_counter() - self._last_save >= 60 * every:
            self.save()

    def finish(self) -> None:
        """Save the final state and the card."""
        self.save()
        _write_card(self)

    def save(self) -> None:
        """Save a checkpoint and the agent's weights. The clock of `checkpoint.every_minutes` starts when the save is done.

        Raises:
            ValueError: the weights are not finite. They would take the place of good ones.
        """
        if not torch.stack([weights.isfinite().all() for weights in self.agent.parameters()]).all():
            raise diverged(["the agent's weights"])
        self.log.flush()  # no checkpoint may be ahead of its rows
        save_checkpoint(
            RunDirectory(self.directory).checkpoint_folder,
            self.state_dict(),
            env_steps=self.env_steps,
            keep=self.config.checkpoint.keep,
            chunks=self._buffer_chunks(),
        )
        files = RunDirectory(self.directory)
        files.save_weights(self.agent.state_dict(), env_steps=self.env_steps)
        self._last_save = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive, except the phase buffer's rollouts, which are chunks of the checkpoint."""
        return {
            "learner": self.learner.state_dict(),
            "action_generator": self.collector.generator.get_state(),
            "episodes": self.collector.episodes.state_dict(),
            "num_filled": self.buffer.num_filled,
            "env_steps": self.env_steps,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any], chunks: dict[str, dict[str, Tensor]]) -> None:
        """Take back `state_dict` and the chunks."""
        self.learner.load_state_dict(state["learner"])
        action_state, generator = state["action_generator"], self.collector.generator
        if len(action_state) == len(generator.get_state()):
            generator.set_state(action_state)
        else:  # of another kind of device
            generator.manual_seed(derive_seed(self.config.seed, "action", state["env_steps"]))
        self.collector.episodes.load_state_dict(state["episodes"])
        self.env_steps, self._seconds_before = state["env_steps"], state["seconds"]
        for slot in range(state["num_filled"]):
            self.buffer.next_rollout().load(chunks[self._chunk_name(slot)])

    def summary(self) -> dict[str, str]:
        """What the run did, for people: rows of a table."""
        records = RunDirectory(self.directory).metrics()
        returns = [record["charts/episodic_return_100"] for record in records if record.get("charts/episodic_return_100") is not None]
        seconds = {
            part: sum(record.get(f"time/{part}") or 0.0 for record in records) for part in ("rollout", "policy", "value", "auxiliary")
        }
        total = sum(seconds.values()) or 1.0
        rows = {
            "environment steps": f"{self.env_steps:,}",
            "wall-clock time": f"{self.seconds / 60:.1f} min",
            "steps per second": f"{self.env_steps / self.seconds:,.0f}",
            "time split": ", ".join(f"{part} {100 * value / total:.0f} %" for part, value in seconds.items() if value),
        }
        if returns:
            finished = list(accumulate(record["charts/num_episodes"] for record in records))
            first = next((record for record, count in zip(records, finished, strict=True) if count >= 100), records[-1])
            rows |= {
                "return after 100 episodes": f"{first['charts/episodic_return_100']:.2f}",
                "return, last 100 episodes": f"{returns[-1]:.2f}",
                "best mean of 100 episodes": f"{max(returns):.2f}",
            }
        return rows

    def close(self) -> None:
        """Release environments and log files."""
        self.envs.close()
        self.log.close()

    def __enter__(self) -> Self:
        """Use as a context: closed at its end, however it ends."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; if the run was cut short, say how it can go on."""
        if kind is not None:
            saved = RunDirectory(self.directory).checkpoints
            way = f"`phasicrl resume {self.directory}` goes on from {saved[-1].name}" if saved else "it has no checkpoint yet"
            self.log.message(f"{self.directory} was stopped after {self.env_steps:,} steps; {way}")
        self.close()

    def _buffer_chunks(self) -> Chunks:
        """The rollouts of the phase under way, one chunk each: they never change, so a checkpoint can link those of the one before."""
        return {self._chunk_name(slot): self.buffer.rollout(slot).tensors for slot in range(self.buffer.num_filled)}

    def _chunk_name(self, slot: int) -> str:
        """A name that no other rollout of this run has."""
        return f"rollout-{self.learner.phase:06d}-{slot:03d}"


def start_run(
    config: Config,
    *,
    make_env: EnvFactory | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    mask_actions: MaskFunction | None = None,
    plan: Plan | None = None,
    planned_as: Config | None = None,
) -> Run:
    """Make a new run directory and everything a run needs.

    Args:
        config: every knob.
        make_env: see `phasicrl.train`.
        make_vector_env: see `phasicrl.train`.
        make_encoder: see `phasicrl.train`.
        mask_actions: see `phasicrl.train`.
        plan: how to execute it; chosen here unless given.
        planned_as: choose the plan of this configuration instead, whose budget may be another.

    Raises:
        ValueError: a configuration that cannot work here; nothing was started and no directory
            made.
    """
    return _build_run(
        config, None, make_env=make_env, make_vector_env=make_vector_env, make_encoder=make_encoder,
        mask_actions=mask_actions, env_steps=0, plan=plan, planned_as=planned_as,
    )  # fmt: skip


def resume_run(
    directory: Path,
    *,
    make_env: EnvFactory | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    mask_actions: MaskFunction | None = None,
) -> Run:
    """Build the run in `directory` again from its newest whole checkpoint.

    Environments start new episodes, from seeds of their own: the one thing in which a resumed run
    differs from an unbroken one.

    Raises:
        ValueError: not a run directory, or no checkpoint in it can be used.
    """
    files = RunDirectory(directory)
    config = files.config_for(make_env=make_env or make_vector_env, make_encoder=make_encoder, mask_actions=mask_actions)
    if not files.checkpoints:
        raise CheckpointError(f"{directory} has no checkpoint yet; start again with `phasicrl train --from {directory}/config.json`")
    state, chunks, rejected = load_checkpoint(files.checkpoint_folder)
    env_steps = state["env_steps"]
    plan = saved_plan(files)
    if plan is not None and not can_follow(plan, this_machine(config.compute.device)):
        plan = None  # chosen anew: this is another machine
    run = _build_run(
        config, directory, make_env=make_env, make_vector_env=make_vector_env, make_encoder=make_encoder,
        mask_actions=mask_actions, env_steps=env_steps, plan=plan,
    )  # fmt: skip
    try:
        run.load_state_dict(state, chunks)
    except (RuntimeError, ValueError, KeyError) as error:
        run.close()
        raise ValueError(f"the checkpoint does not fit the run that {directory}/config.json describes: {error}") from None
    for sentence in rejected:
        run.log.message(f"warning: {sentence}")
    run.log.message(f"resumed {directory} at {run.env_steps:,} steps; episodes that were under way start anew")
    return run


def saved_plan(files: RunDirectory) -> Plan | None:
    """How a run was executed, by its card; None if it has none of this version."""
    try:
        return Plan.from_dict(files.card["plan"])
    except (KeyError, ValueError):
        return None


def _build_run(
    config: Config,
    directory: Path | None,
    *,
    make_env: EnvFactory | None,
    make_vector_env: MakeVectorEnv | None,
    make_encoder: EncoderFactory | None,
    mask_actions: MaskFunction | None,
    env_steps: int,
    plan: Plan | None = None,
    planned_as: Config | None = None,
) -> Run:
    """Everything a run needs, in an order in which nothing is made before what could refuse it."""
    envs = make_envs(config.env, seed=derive_seed(config.seed, "env", env_steps), make_env=make_env, make_vector_env=make_vector_env)
    made, log = None, None
    try:
        refuse_idle(config, task_of(envs, has_heuristic=mask_actions is not None))
        if mask_actions is not None:
            envs = HeuristicMask(envs, mask_actions, num_steps=config.env.heuristic_mask_steps, env_steps=env_steps)
        machine = this_machine(config.compute.device)
        _check_memory(config, envs, torch.device(machine.device))
        agent = make_agent(config, envs, make_encoder=make_encoder).to(machine.device)
        if plan is None:
            plan = choose_plan(planned_as or config, machine, agent, can_be_probed=make_encoder is None)
        learner = Learner(config, agent, Compute(plan), _generator(config, "shuffle"))
        resumed = directory is not None
        if directory is None:
            directory = made = RunDirectory.make(config).path
        log = MetricsLog(directory, config, resumed_at=env_steps if resumed else None)
        objects = {"environment": make_env or make_vector_env, "encoder": make_encoder, "mask": mask_actions}
        own = tuple(what for what, given in objects.items() if given is not None)
        run = Run(config, directory, envs, learner, log, own=own)
        run.collector.start()
    except BaseException:
        envs.close()
        if log is not None:
            log.close()
        if made is not None:
            shutil.rmtree(made)  # the first reset failed, or a tracker is not installed: nothing was started
        raise
    _write_card(run)
    return run


def choose_plan(config: Config, machine: Machine, agent: Agent, *, can_be_probed: bool) -> Plan:
    """How to execute a run here; a network for images is tried, if that pays.

    Args:
        config: the run's.
        machine: where it runs.
        agent: whose network is tried; it is on the machine's device.
        can_be_probed: whether its encoder takes any image.
    """
    space = agent.reader.layout.space
    has_images = any(is_image(part) for _, part in leaves(space))
    workload = Workload.of(config, has_images=has_images, can_be_probed=can_be_probed and is_image(space))
    if not workload.can_be_probed:
        return make_plan(config.compute, machine, workload)

    def network(obs: Tensor) -> Tensor:
        return agent.encoder(agent.reader(obs))

    return probed_plan(config.compute, machine, workload, network, list(agent.encoder.parameters()), space.shape or ())


def task_of(envs: VectorEnv, *, has_heuristic: bool = False) -> Task:
    """What the spaces of environments say about which knobs have an effect; their back end has been asked by `make_envs`."""
    parts = [part for _, part in leaves(envs.observation_space)]
    numbers = [part for part in parts if not is_image(part)]
    return Task(
        name=envs.name,
        has_masks=True if envs.mask_size else None,
        has_heuristic=has_heuristic,
        has_images=len(numbers) < len(parts),
        has_numbers=bool(numbers),
        has_floats=any(isinstance(part, gym.spaces.Box) for part in numbers),
        has_continuous_actions=any(isinstance(part, gym.spaces.Box) for _, part in leaves(envs.action_space)),
    )


def make_agent(config: Config, envs: VectorEnv, *, make_encoder: EncoderFactory | None = None) -> Agent:
    """The agent for these environments, with initial weights that follow from the seed."""
    init_seed = derive_seed(config.seed, "init")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(init_seed)  # a user's own encoder draws from the global generator; ours does not
        try:
            return Agent(
                envs.observation_space,
                envs.action_space,
                config.model,
                action=config.action,
                obs_norm=config.obs_norm,
                value_norm=config.value_norm,
                generator=Generator().manual_seed(init_seed),
                auxiliary=config.has_auxiliary_phase,
                make_encoder=make_encoder,
            )
        except ValueError as error:
            raise ValueError(f"{envs.name}: {error}") from None


def _make_buffer(config: Config, envs: VectorEnv, agent: Agent, device: torch.device) -> PhaseBuffer:
    """Room for one phase of these environments."""
    return PhaseBuffer(
        config.phase_length,
        config.env.num_envs,
        config.ppo.num_steps,
        obs_shape=agent.reader.layout.shape,
        obs_dtype=_torch_dtype(agent.reader.layout.dtype),
        action_shape=agent.policy_head.action_shape,
        action_dtype=agent.policy_head.action_dtype,
        state_size=agent.state_size,
        num_actions=envs.mask_size or None,
        device=device,
    )


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """PyTorch's name of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _check_memory(config: Config, envs: VectorEnv, device: torch.device) -> None:
    """Refuse a phase buffer that is larger than the memory that is free."""
    obs, action = ObservationLayout(envs.observation_space), ActionLayout(envs.action_space)
    step_bytes = sum(math.prod(layout.shape) * layout.dtype.itemsize for layout in (obs, action)) + envs.mask_size
    needed = PhaseBuffer.num_bytes(config.phase_length, config.env.num_envs, config.ppo.num_steps, step_bytes=step_bytes)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if free is not None and needed > free:
        what = f"{config.phase_length} rollouts of {config.env.num_envs} environments × {config.ppo.num_steps} steps"
        fitting = max(int(free / needed * config.phase_length), 1)
        way_out = f"--aux.every {fitting}, " if config.phase_length > 1 else ""
        raise ValueError(
            f"the phase buffer needs {needed / 2**30:.1f} GiB ({what}), {free / 2**30:.1f} GiB are free on {device}; "
            f"try {way_out}fewer environments (--env.num-envs) or shorter rollouts (--ppo.num-steps)"
        )


def _write_card(run: Run) -> None:
    """Versions, commit, machine, seed and wall-clock time, as `card.json`."""
    packages = ("phasicrl", "torch", "numpy", "gymnasium", "envpool")
    card = {
        "seed": run.config.seed,
        "own": run.own,
        "env_steps": run.env_steps,
        "seconds": round(run.seconds, 1),
        "environment": run.envs.name,
        "exact_state": run.envs.exact_state,
        "device": str(run.compute.device),
        "plan": run.compute.plan.to_dict(),
        "machine": {"system": platform.platform(), "processor": processor(), "cores": num_cores()},
        "versions": {"python": platform.python_version()}
        | {name: package_version(name) for name in packages}
        | {"torch": torch.__version__},
        "commit": provenance.commit(),
        "source": provenance.tree(),
        "command": sys.argv,
    }
    RunDirectory(run.directory).write_card(card)
