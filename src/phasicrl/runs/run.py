"""A run: everything that `algorithm.learn` orders about, and everything that must survive a crash. Kind: state and its set-up."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Generator, Tensor
from torch.optim import Adam

from phasicrl.collect import Collector
from phasicrl.config import Config, Task, refuse_idle, refuse_unasked_import
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.envs.wrappers import HeuristicMask, MaskFunction
from phasicrl.execution.compute import Compute, diverged
from phasicrl.host import provenance
from phasicrl.host.machine import free_memory, num_cores, package_version, processor
from phasicrl.models.agent import Agent, EncoderFactory
from phasicrl.normalize import RewardNormalizer
from phasicrl.objectives import adapted_kl_coef, adapted_learning_rate
from phasicrl.phases import Record, compute_targets, revalue
from phasicrl.rollout import PhaseBuffer, PolicySamples, Rollout
from phasicrl.runs.checkpoint import CheckpointError, Chunks, checkpoints, flush, load_checkpoint, save_checkpoint
from phasicrl.runs.metrics import MetricsLog, read_metrics
from phasicrl.spaces import ActionLayout, ObservationLayout, is_picture, leaves

PURPOSES = ("init", "action", "shuffle", "env", "evaluation")
"""Uses of randomness, each with a stream of its own. Only ever append: a stream follows from its place."""

EnvFactory = Callable[[], gym.Env]


def derive_seed(seed: int, purpose: str, *extra: int) -> int:
    """The seed of one stream of randomness of a run; `extra` tells apart streams of one purpose."""
    sequence = np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *extra))
    return int(sequence.generate_state(1, np.uint32)[0] >> 1)  # 31 bits: what every back end accepts


class Run:
    """State of a run. `state_dict` holds all of it that a checkpoint needs.

    Args:
        config: the run's configuration.
        directory: its run directory, which exists.
        envs: its environments.
        agent: the agent, on the compute's device.
        compute: how gradient steps are executed.
        log: where its metrics go.
        own: what the user passed as objects, `environment`, `encoder` or `mask`: the configuration cannot hold it.
    """

    def __init__(
        self, config: Config, directory: Path, envs: VectorEnv, agent: Agent, compute: Compute, log: MetricsLog, *, own: tuple[str, ...]
    ) -> None:
        self.config = config
        self.own = own
        self.directory = directory
        self.envs = envs
        self.agent = agent
        self.compute = compute
        self.log = log
        compute.say = log.message
        for remark in compute.remarks:
            log.message(remark)
        self.generators = {"action": Generator(compute.device), "shuffle": Generator()}
        for purpose, generator in self.generators.items():
            generator.manual_seed(derive_seed(config.seed, purpose))
        self.optimizers = _make_optimizers(config, agent)
        self.reward_normalizer = _make_reward_normalizer(config, compute.device)
        self.buffer = _make_buffer(config, envs, agent, compute.device)
        self.collector = Collector(
            envs, agent, generator=self.generators["action"], compute=compute, bootstrap_truncation=config.ppo.bootstrap_truncation
        )
        self.kl_penalty = config.ppo.kl_penalty
        self.rate_factor = 1.0
        self.iteration = 0
        self.env_steps = 0
        self._seconds_before = 0.0
        self._started = self._iteration_started = time.perf_counter()
        self._last_save = -math.inf
        self._rollout_seconds = 0.0
        self._reward_record: Record = {}

    @property
    def phase(self) -> int:
        """Number of the phase that the iteration under way belongs to, from 1."""
        return max(self.iteration - 1, 0) // self.config.phase_length + 1

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, earlier parts of a resumed one included."""
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def _begins_statistics(self) -> bool:
        """Whether this iteration's observations enter their statistics before anything is learned from them: in the first one, if so wished."""
        norm = self.config.obs_norm
        return norm is not None and norm.from_first_rollout and self.iteration <= 1

    def start_iteration(self) -> None:
        """Count the iteration and set the learning rates, which are a function of progress alone."""
        self.iteration += 1
        self._iteration_started = time.perf_counter()
        for name, optimizer in self.optimizers.items():
            for network, group in enumerate(optimizer.param_groups):
                group["lr"] = self._learning_rate(name, network)

    def collect(self, rollout: Rollout) -> None:
        """Fill the rollout and move the clock."""
        start = time.perf_counter()
        self.stage("rollout")
        self.collector.collect(rollout, begins_statistics=self._begins_statistics)
        self.env_steps += self.config.batch_size
        self._rollout_seconds = time.perf_counter() - start

    def learning_reward(self, rollout: Rollout) -> Tensor:
        """The rewards to learn from: clipped, normalised by statistics that include this rollout, or as they came."""
        clip = self.config.ppo.reward_clip
        reward = rollout.reward if clip is None else rollout.reward.clamp(-clip, clip)
        if self.reward_normalizer is None:
            return reward
        by_termination = self.config.reward_norm is not None and self.config.reward_norm.reset_at == "termination"
        reward = self.reward_normalizer(reward, rollout.terminated if by_termination else rollout.first)
        self._reward_record = {
            "rewards/scale": float(self.reward_normalizer.scale),
            "rewards/clipped_fraction": float((reward.abs() >= self.reward_normalizer.clip).float().mean()),
        }
        return reward

    def targets(self, rollout: Rollout, reward: Tensor) -> tuple[PolicySamples, Record]:
        """Compute advantages and value targets, and take the targets into the statistics that values are normalized by, if they are.

        The first targets give the value heads their units. What the heads have said of this rollout is then read in these units, too,
        and the targets are computed once more from that: values, targets and what is learned have one meaning from the start.
        """
        samples, record = compute_targets(rollout, reward, self.config.ppo)
        if self.agent.update_value_statistics(rollout.value_target):
            assert self.agent.value_normalizer is not None
            for value in (rollout.value, rollout.next_value):
                value.copy_(self.agent.value_normalizer.denormalize(value))
            samples, record = compute_targets(rollout, reward, self.config.ppo)
        return samples, record

    def renewal(self, rollout: Rollout, reward: Tensor) -> Callable[[], PolicySamples] | None:
        """What makes the samples anew before each epoch, if advantages are to be recomputed."""

        def renew() -> PolicySamples:
            revalue(self.agent, rollout, compute=self.compute)
            return compute_targets(rollout, reward, self.config.ppo)[0]

        return renew if self.config.ppo.recompute_advantages else None

    def update_statistics(self, rollout: Rollout) -> None:
        """Take a rollout's observations into the statistics that they are normalized by, unless `collect` has done so."""
        if not self._begins_statistics:
            self.agent.reader.update(rollout.obs)

    def auxiliary_phase_is_due(self) -> bool:
        """Whether a full buffer is to be distilled: every k-th time, and not when the budget is used up (OPPG ppg.py:259)."""
        aux = self.config.aux
        if aux is None or aux.epochs == 0 or self.env_steps >= self.config.budget:
            return False
        return self.phase % aux.run_every == 0

    def stage(self, name: str) -> None:
        """Tell the display what is going on."""
        self.log.progress(name, env_steps=self.env_steps)

    def finish_iteration(self, record: Record) -> None:
        """Log the iteration's metrics, and save if it is time."""
        total = time.perf_counter() - self._iteration_started
        rates = [self._learning_rate("policy", network, env_steps=self.env_steps - self.config.batch_size) for network in (0, 1)]
        if "losses/epoch_kl" in record:
            record |= self._follow_kl(record["losses/epoch_kl"])
        record |= self.collector.episodes.report() | {
            "charts/SPS": self.config.batch_size / total,
            "charts/learning_rate": rates[0],
            "time/rollout": self._rollout_seconds,
            "time/total": total,
        }
        if self.config.ppo.value_learning_rate is not None:
            record["charts/value_learning_rate"] = rates[1]
        record |= self._reward_record
        self.log.write(record, env_steps=self.env_steps, iteration=self.iteration, phase=self.phase)
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
            self.directory / "checkpoints",
            self.state_dict(),
            env_steps=self.env_steps,
            keep=self.config.checkpoint.keep,
            chunks=self._buffer_chunks(),
        )
        save_agent(self.directory, self.agent, env_steps=self.env_steps)
        self._last_save = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive, except the phase buffer's rollouts, which are chunks of the checkpoint."""
        return {
            "agent": self.agent.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "reward_normalizer": None if self.reward_normalizer is None else self.reward_normalizer.state_dict(),
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
            "episodes": self.collector.episodes.state_dict(),
            "num_filled": self.buffer.num_filled,
            "kl_penalty": self.kl_penalty,
            "rate_factor": self.rate_factor,
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any], chunks: dict[str, dict[str, Tensor]]) -> None:
        """Take back `state_dict` and the chunks."""
        self.agent.load_state_dict(state["agent"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
            _restore_layout(optimizer)
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_state_dict(state["reward_normalizer"])
        for name, generator in self.generators.items():
            if len(state["generators"][name]) == len(generator.get_state()):
                generator.set_state(state["generators"][name])
            else:  # of another kind of device
                generator.manual_seed(derive_seed(self.config.seed, name, state["env_steps"]))
        self.collector.episodes.load_state_dict(state["episodes"])
        self.kl_penalty, self.rate_factor = state["kl_penalty"], state["rate_factor"]
        self.iteration, self.env_steps = state["iteration"], state["env_steps"]
        self._seconds_before = state["seconds"]
        for slot in range(state["num_filled"]):
            self.buffer.next_rollout().load(chunks[self._chunk_name(slot)])

    def summary(self) -> dict[str, str]:
        """What the run did, for people: rows of a table."""
        records = read_metrics(self.directory)
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
            saved = checkpoints(self.directory / "checkpoints")
            way = f"`phasicrl resume {self.directory}` goes on from {saved[-1].name}" if saved else "it has no checkpoint yet"
            self.log.message(f"{self.directory} was stopped after {self.env_steps:,} steps; {way}")
        self.close()

    def _follow_kl(self, kl: float) -> Record:
        """Adapt what is steered by the divergence of an iteration's last epoch."""
        ppo, record = self.config.ppo, {}
        if ppo.kl_penalty_target is not None:
            record["losses/kl_penalty"] = self.kl_penalty
            self.kl_penalty = adapted_kl_coef(self.kl_penalty, kl, target=ppo.kl_penalty_target)
        if ppo.schedule == "adaptive_kl":
            rate = adapted_learning_rate(ppo.learning_rate * self.rate_factor, kl, target=ppo.schedule_kl)
            self.rate_factor = rate / ppo.learning_rate
        return record

    def _learning_rate(self, name: str, network: int = 0, *, env_steps: int | None = None) -> float:
        """Step size of one optimiser for one of the agent's networks at a point of the clock (now, unless given)."""
        config = self.config
        rate = (config.ppo.learning_rate, config.ppo.value_learning_rate or config.ppo.learning_rate)[network]
        if name == "aux" and config.aux is not None and config.aux.optimizer == "own":
            rate = config.aux.learning_rate
        if config.ppo.schedule == "linear":
            return rate * (1 - (self.env_steps if env_steps is None else env_steps) / config.budget)
        return rate * self.rate_factor

    def _buffer_chunks(self) -> Chunks:
        """The rollouts of the phase under way, one chunk each: they never change, so a checkpoint can link those of the one before."""
        return {self._chunk_name(slot): self.buffer.rollout(slot).tensors for slot in range(self.buffer.num_filled)}

    def _chunk_name(self, slot: int) -> str:
        """A name that no other rollout of this run has."""
        return f"rollout-{self.phase:06d}-{slot:03d}"


def start_run(
    config: Config,
    *,
    make_env: EnvFactory | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    mask_actions: MaskFunction | None = None,
) -> Run:
    """Make a new run directory and everything a run needs.

    Raises:
        ValueError: a configuration that cannot work here; nothing was started and no directory made.
    """
    return _build_run(config, None, make_env=make_env, make_vector_env=make_vector_env, make_encoder=make_encoder, mask_actions=mask_actions, env_steps=0)


def resume_run(
    directory: Path,
    *,
    make_env: EnvFactory | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    mask_actions: MaskFunction | None = None,
) -> Run:
    """Build the run in `directory` again from its newest whole checkpoint.

    Environments start new episodes, from seeds of their own: the one thing in which a resumed run differs from an unbroken one.

    Raises:
        ValueError: not a run directory, or no checkpoint in it can be used.
    """
    config = load_config(directory, own_env=bool(make_env or make_vector_env), own_encoder=make_encoder is not None)
    if not checkpoints(directory / "checkpoints"):
        raise CheckpointError(f"{directory} has no checkpoint yet; start again with `phasicrl train --from {directory}/config.json`")
    state, chunks, rejected = load_checkpoint(directory / "checkpoints")
    env_steps = state["env_steps"]
    if "mask" in _own(directory) and mask_actions is None:
        raise ValueError(f"{directory} was trained with a mask of its user's own; call this from Python with mask_actions=…")
    run = _build_run(
        config, directory, make_env=make_env, make_vector_env=make_vector_env, make_encoder=make_encoder,
        mask_actions=mask_actions, env_steps=env_steps,
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


def load_config(directory: Path, *, own_env: bool, own_encoder: bool) -> Config:
    """The configuration of a run directory, for somebody who brings an environment or encoder of their own, or does not.

    Raises:
        ValueError: not a run directory, or one of a run whose own environment or encoder is missing here.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a run directory: it has no config.json")
    for what, argument, given in (("environment", "make_env=… or make_vector_env", own_env), ("encoder", "make_encoder", own_encoder)):
        if what in _own(directory) and not given:
            raise ValueError(f"{directory} was trained with an {what} of its user's own; call this from Python with {argument}=…")
    try:
        config = Config.from_json(path.read_text())
        refuse_unasked_import(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def _own(directory: Path) -> list[str]:
    """What its user passed to a run as objects, by the card."""
    card = directory / "card.json"
    return json.loads(card.read_text())["own"] if card.is_file() else []


def save_agent(directory: Path, agent: Agent, *, env_steps: int) -> None:
    """Write the agent's weights to `agent.safetensors`, replacing the file at once, never in part."""
    temporary = directory / ".agent.safetensors.tmp"
    save_file({name: tensor.cpu().contiguous() for name, tensor in agent.state_dict().items()}, temporary, {"env_steps": str(env_steps)})
    flush(temporary)
    os.replace(temporary, directory / "agent.safetensors")


def _build_run(
    config: Config,
    directory: Path | None,
    *,
    make_env: EnvFactory | None,
    make_vector_env: MakeVectorEnv | None,
    make_encoder: EncoderFactory | None,
    mask_actions: MaskFunction | None,
    env_steps: int,
) -> Run:
    """Everything a run needs, in an order in which nothing is made before what could refuse it."""
    envs = make_envs(config.env, seed=derive_seed(config.seed, "env", env_steps), make_env=make_env, make_vector_env=make_vector_env)
    made, log = None, None
    try:
        refuse_idle(config, task_of(envs, has_heuristic=mask_actions is not None))
        if mask_actions is not None:
            envs = HeuristicMask(envs, mask_actions, num_steps=config.env.heuristic_mask_steps, env_steps=env_steps)
        pictures = any(is_picture(part) for _, part in leaves(envs.observation_space))
        compute = Compute(
            config.compute, pictures=pictures, num_gradient_steps=config.num_gradient_steps,
            minibatch_size=config.batch_size // config.ppo.num_minibatches, has_memory=config.model.memory != "none",
        )  # fmt: skip
        _check_memory(config, envs, compute.device)
        agent = make_agent(config, envs, make_encoder=make_encoder).to(compute.device)
        if is_picture(envs.observation_space) and make_encoder is None:
            settled = compute.settle(
                lambda obs: agent.encoder(agent.reader(obs)), agent.encoder, envs.observation_space.shape or (),
                has_aux=config.has_auxiliary_phase, num_passes=config.num_network_passes,
            )  # fmt: skip
            config = dataclasses.replace(config, compute=settled)
        compute.prepare(agent)
        resumed = directory is not None
        if directory is None:
            directory = made = _make_directory(config)
            (directory / "config.json").write_text(config.to_json() + "\n")
        log = MetricsLog(directory, config, resumed_at=env_steps if resumed else None)
        objects = {"environment": make_env or make_vector_env, "encoder": make_encoder, "mask": mask_actions}
        own = tuple(what for what, given in objects.items() if given is not None)
        run = Run(config, directory, envs, agent, compute, log, own=own)
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


def task_of(envs: VectorEnv, *, has_heuristic: bool = False) -> Task:
    """What the spaces of environments say about which knobs have an effect; their back end has been asked by `make_envs`."""
    parts = [part for _, part in leaves(envs.observation_space)]
    numbers = [part for part in parts if not is_picture(part)]
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


def _make_optimizers(config: Config, agent: Agent) -> dict[str, Adam]:
    """An Adam over all parameters for each kind of step: `policy`, `value` if its epochs are counted apart, `aux` if it has its own."""

    def adam() -> Adam:
        groups = [{"params": parameters} for parameters in agent.networks()]
        optimizer = Adam(groups, lr=config.ppo.learning_rate, eps=config.ppo.adam_eps, fused=True)
        if config.ppo.adam_eps_hat:
            optimizer.register_step_pre_hook(partial(_set_epsilon_hat, config.ppo.adam_eps))
        return optimizer

    optimizers = {"policy": adam()}
    if (False, True) in config.ppo.passes:
        optimizers["value"] = adam()
    if config.aux is not None and config.has_auxiliary_phase:
        optimizers["aux"] = adam() if config.aux.optimizer == "own" else optimizers["policy"]
    return optimizers


def _set_epsilon_hat(eps_hat: float, optimizer: Adam, *_: Any) -> None:
    """Choose PyTorch's ε so that the next step is that of ε̂, which is added before the second moment's bias is corrected."""
    for group in optimizer.param_groups:
        step = 1 + max((float(optimizer.state[p]["step"]) for p in group["params"] if p in optimizer.state), default=0.0)
        group["eps"] = eps_hat / math.sqrt(1 - group["betas"][1] ** step)


def _restore_layout(optimizer: Adam) -> None:
    """Lay an optimiser's moments out in memory as its parameters are.

    A file holds them in plain order, the weights of convolutions are channels_last, and PyTorch's fused Adam walks both without a
    look at their strides: it would move each weight by the moment of another.
    """
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)


def _make_reward_normalizer(config: Config, device: torch.device) -> RewardNormalizer | None:
    """The reward normaliser, if rewards are normalised."""
    if config.reward_norm is None:
        return None
    norm = config.reward_norm
    return RewardNormalizer(config.env.num_envs, gamma=config.reward_gamma, clip=norm.clip, per_step=norm.per == "step").to(device)


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


def _make_directory(config: Config) -> Path:
    """A new folder under `output_dir`, named after experiment, environment, seed and time."""
    env = config.env.id.rpartition(":")[2].replace("/", "-")
    stem = f"{config.name}_{env}_s{config.seed}_{datetime.now():%Y%m%d-%H%M%S}"
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        directory = Path(config.output_dir) / (stem + suffix)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            if not directory.is_dir():
                raise ValueError(f"output_dir {config.output_dir!r} is a file; give a folder") from None
        except OSError as error:
            raise ValueError(f"cannot make the run directory {directory}: {error.strerror}; choose another --output-dir") from None
        else:
            return directory
    raise ValueError(f"{config.output_dir} holds a thousand runs named {stem} already")


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
        "num_threads": run.compute.num_threads,
        "machine": {"system": platform.platform(), "processor": processor(), "cores": num_cores()},
        "versions": {"python": platform.python_version()}
        | {name: package_version(name) for name in packages}
        | {"torch": torch.__version__},
        "commit": provenance.commit(),
        "source": provenance.tree(),
        "command": sys.argv,
    }
    (run.directory / "card.json").write_text(json.dumps(card, indent=2) + "\n")
