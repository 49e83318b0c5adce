"""How a run comes into being: new or from a checkpoint.

Kind: effects (makes environments, files).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor

from phasicrl.collect import Collector
from phasicrl.config import Backend, Config
from phasicrl.config_io import check_types
from phasicrl.distributed import ALONE, World
from phasicrl.envs.make import make_envs, resolve
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.envs.wrappers import HeuristicMask, MaskFunction
from phasicrl.execution.compute import Compute
from phasicrl.execution.device import this_machine
from phasicrl.execution.plan import make_plan
from phasicrl.host.machine import free_memory
from phasicrl.learner import Learner
from phasicrl.models.agent import Agent, EncoderFactory
from phasicrl.rollout import PhaseBuffer
from phasicrl.runs.checkpoint import CheckpointError
from phasicrl.runs.directory import OWN_OBJECTS, RunDirectory
from phasicrl.runs.lock import RunLock
from phasicrl.runs.metrics import MetricsLog
from phasicrl.runs.parts import load_part
from phasicrl.seeding import derive_seed
from phasicrl.session.agreement import plan_here, require_same_start, require_shared, require_shares
from phasicrl.session.run import Run
from phasicrl.session.unused import unused_options
from phasicrl.session.warm_start import take_over
from phasicrl.spaces import is_image, leaves

EnvFactory = Callable[[], gym.Env]


class UserObjects(TypedDict, total=False):
    """What a user brings as objects, see `phasicrl.train`."""

    make_env: EnvFactory | None
    make_vector_env: MakeVectorEnv | None
    make_encoder: EncoderFactory | None
    mask_actions: MaskFunction | None


def start_run(
    config: Config,
    *,
    resume: Literal["never", "auto"] = "never",
    world: World = ALONE,
    **own: Unpack[UserObjects],
) -> Run:
    """Make a new run directory and everything a run needs.

    Args:
        config: every option.
        resume: `auto` resumes the newest run of this experiment, seed and length instead, if there
            is one.
        world: the processes that train it together.
        own: what the user brings as objects.

    Raises:
        ValueError: a configuration that cannot work here; nothing was started and no directory
            made.
    """
    check_types(config)
    for module in config.imports:
        import_module(module)
    begun = [files for files in RunDirectory.of(config) if files.checkpoints]
    if resume == "auto" and begun:
        return resume_run(begun[-1].path, world=world, **own)
    world.require_same("what they begin", lambda: {"this": "a new run"})
    run, _ = _build_run(config, _all_objects(own), world)
    with ExitStack() as stack:
        stack.enter_context(closing(run))
        run.take_snapshot()
        # So that there is something to go on from, whatever happens in the first iteration.
        if config.checkpoint.while_training:
            run.save()
        stack.pop_all()
    return run


def resume_run(
    directory: Path,
    *,
    accept_config_changes: bool = False,
    world: World = ALONE,
    **own: Unpack[UserObjects],
) -> Run:
    """Build the run in `directory` again from its newest whole checkpoint.

    Environments play the episodes under way once more: on a CPU, the resumed run is the unbroken
    one to the bit. Those that cannot (`exact_state`) start new ones, and the log says so.

    Args:
        directory: of the run.
        accept_config_changes: see `phasicrl.resume`.
        world: the processes that train it together, perhaps more or fewer than before.
        own: what the user brings as objects.

    Raises:
        ValueError: not a run directory, another process trains it, no checkpoint in it can be used,
            or its configuration has changed.
    """
    files, objects = RunDirectory(directory), _all_objects(own)
    world.require_same("what they begin", lambda: {"this": f"to go on with {directory}"})
    config = files.config_for(**objects)
    if not files.checkpoints:
        again = f"`phasicrl train --from {directory}/config.json`"
        raise CheckpointError(f"{directory} has no checkpoint yet; start again with {again}")
    with ExitStack() as stack:
        with world.together("opening the run directory"):
            lock = stack.enter_context(closing(RunLock(directory))) if world.is_first else None
        (state, chunks), rejected, saved_by = load_part(files, world)
        if not accept_config_changes:
            files.refuse_changes(state["config"])
        is_over = _is_over(config, files, state)
        run, remark = _build_run(config, objects, world, resumed=files, state=state, lock=lock)
        stack.pop_all()
        stack.enter_context(closing(run))
        _load_state(run, state, chunks, same_episodes=not remark)
        stack.pop_all()
    for sentence in rejected:
        run.log.message(f"warning: {sentence}")
    if saved_by != world.size:
        remark += f"; {saved_by} processes had trained it, now it is {world.size}"
    said = f"resumed {directory} at {run.env_steps:,} steps{remark}"
    if is_over:
        said = f"{directory} is finished already, after {run.env_steps:,} steps: nothing is written"
    run.log.message(said)
    return run


def _all_objects(own: UserObjects) -> dict[str, Any]:
    """What the user brings, None where that is nothing."""
    return {**dict.fromkeys(OWN_OBJECTS), **own}


def _load_state(
    run: Run, state: dict[str, Any], chunks: dict[str, dict[str, Tensor]], *, same_episodes: bool
) -> None:
    """Give a run what its checkpoint holds.

    Raises:
        ValueError: it does not fit.
    """
    try:
        run.load_state_dict(state, chunks, same_episodes=same_episodes)
    except (RuntimeError, ValueError, KeyError) as error:
        described = f"the run that {run.directory}/config.json describes"
        raise ValueError(f"the checkpoint does not fit {described}: {error}") from None
    run.take_snapshot()


class _Opened(NamedTuple):
    """Environments; what they show, if they were brought back; what to say if they could not."""

    envs: VectorEnv
    since: int
    obs: Tensor | None = None
    remark: str = ""


def _open_envs(
    config: Config, own: dict[str, Any], world: World, state: dict[str, Any] | None
) -> _Opened:
    """The environments of a new run, or those of a checkpoint, as exactly as they can be had."""
    if state is None:
        return _Opened(_make_envs(config, own, world), 0)
    now, since = state["env_steps"], state["envs_since"]
    reason = "these environments cannot be brought back"
    if state["collector"] is not None:
        envs = _make_envs(config, own, world, since=since, env_steps=now)
        try:
            return _Opened(envs, since, envs.load_state_dict(state["collector"]["envs"]))
        except (EnvError, ValueError, KeyError) as error:
            envs.close()
            reason = str(error)
    remark = f"; episodes that were under way start anew: {reason}"
    envs = _make_envs(config, own, world, since=now, env_steps=now)
    return _Opened(envs, now, remark=remark)


def _make_envs(
    config: Config, own: dict[str, Any], world: World, *, since: int = 0, env_steps: int = 0
) -> VectorEnv:
    """Make this process's environments, with the user's masks."""
    seed, mask_actions = derive_seed(config.seed, "env", since), own["mask_actions"]
    makers = {name: own[name] for name in ("make_env", "make_vector_env")}
    share = world.own(config.env.num_envs)
    which = {"num_envs": share.stop - share.start, "first_env": share.start}
    envs = make_envs(config.env, seed=seed, **which, **makers)
    if mask_actions is None:
        return envs
    # It counts the steps of these environments.
    num_steps, done = config.env.heuristic_mask_steps / world.size, env_steps // world.size
    return HeuristicMask(envs, mask_actions, num_steps=math.ceil(num_steps), env_steps=done)


def _build_run(
    config: Config,
    own: dict[str, Any],
    world: World,
    *,
    resumed: RunDirectory | None = None,
    state: dict[str, Any] | None = None,
    lock: RunLock | None = None,
) -> tuple[Run, str]:
    """Everything a run needs, in an order in which nothing is made before what could refuse it.

    Args:
        config: every knob.
        own: what the user brought, by the names of `train`'s arguments.
        world: the processes that train it together.
        resumed: the run directory that there is already.
        state: of its checkpoint.
        lock: on it.

    Returns:
        The run, without the state; and what to say if its environments start anew.
    """
    require_same_start(config, world)
    require_shares(config, world)
    with ExitStack() as undo:  # whatever fails, nothing was started
        with world.together("preparing the run"):
            machine = this_machine(config.compute.device)
            opened = _open_envs(config, own, world, state)
            envs = undo.enter_context(closing(opened.envs))
            agent = make_agent(config, envs, make_encoder=own["make_encoder"]).to(machine.device)
            _check_memory(config, envs, agent, torch.device(machine.device))
            taken = [] if resumed or not config.init_from else take_over(agent, config.init_from)
        has_images = any(is_image(part) for _, part in leaves(envs.observation_space))
        plan = make_plan(config, machine, has_images=has_images)
        plan = plan_here(world.of_first(plan), machine, world)
        files, lock, log = _open_directory(config, world, undo, resumed, lock, state)
        for remark in taken + ([] if resumed else _unused_options(config, envs, own)):
            log.message(remark)
        world.copy_first_(list(agent.state_dict().values()))
        compute = Compute(plan, say=log.message, world=world)
        collector = _make_collector(config, envs, agent, compute)
        shuffle = _generator(config, "shuffle", *([] if world.is_first else [world.rank]))
        learner = Learner(config, agent, compute, shuffle)
        parts = (files, learner, collector, _make_buffer(config, envs, agent, compute.device), log)
        run = Run(config, *parts, lock=lock, envs_since=opened.since, own=own)
        with world.together("starting the environments"):
            if opened.obs is None or state is None:
                collector.start()
            else:
                collector.load_state_dict(state["collector"], opened.obs)
        if not _is_over(config, resumed, state):
            run.write_card()
        undo.pop_all()
    return run, opened.remark


def _open_directory(
    config: Config,
    world: World,
    undo: ExitStack,
    resumed: RunDirectory | None,
    lock: RunLock | None,
    state: dict[str, Any] | None,
) -> tuple[RunDirectory, RunLock | None, MetricsLog]:
    """The run directory, which the first process makes, locks and writes its metrics into."""
    files = resumed
    if _is_over(config, resumed, state):
        config = replace(config, log=replace(config.log, tensorboard=False, wandb=False))
    with world.together("making the run directory"):
        if world.is_first and files is None:
            files = RunDirectory.make(config)
            undo.callback(shutil.rmtree, files.path)
        if world.is_first and files is not None and lock is None:
            lock = undo.enter_context(closing(RunLock(files.path)))
    files = RunDirectory(Path(world.of_first(str(files and files.path))))
    with world.together("opening the run directory"):
        require_shared(files, world)
        log = MetricsLog(
            files.path if world.is_first else None, config, kept=state and state["log"]
        )
        undo.enter_context(closing(log))
    return files, lock, log


def _is_over(config: Config, resumed: RunDirectory | None, state: dict[str, Any] | None) -> bool:
    """Whether nothing is left to train of a resumed run, nor to write: its card is written last."""
    if resumed is None or state is None:
        return False
    return min(state["env_steps"], resumed.card.get("env_steps", 0)) >= config.budget


def _unused_options(config: Config, envs: VectorEnv, own: dict[str, Any]) -> list[str]:
    """Return a warning for each thing without which options have no effect."""
    backend: Backend = "own" if own["make_env"] else "vector"
    if not (own["make_env"] or own["make_vector_env"]):
        backend = resolve(config.env.id)[0]
    unused = unused_options(config, envs, backend)
    return [
        f"warning: {', '.join(path for path in unused if unused[path] == what)}: "
        f"no effect without {what}"
        for what in dict.fromkeys(unused.values())
    ]


def make_agent(
    config: Config, envs: VectorEnv, *, make_encoder: EncoderFactory | None = None
) -> Agent:
    """The agent for these environments, with initial weights that follow from the seed."""
    init_seed = derive_seed(config.seed, "init")
    with torch.random.fork_rng(devices=[]):
        # A user's own encoder draws from the global generator; ours does not.
        torch.manual_seed(init_seed)
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


def _make_collector(config: Config, envs: VectorEnv, agent: Agent, compute: Compute) -> Collector:
    """What plays these environments; all processes draw the same noise for its actions."""
    return Collector(
        envs,
        agent,
        generator=_generator(config, "action", device=compute.device),
        compute=compute,
        bootstrap_truncation=config.ppo.bootstrap_truncation,
    )


def _make_buffer(
    config: Config, envs: VectorEnv, agent: Agent, device: torch.device
) -> PhaseBuffer:
    """Room for one phase of these environments, which may be a part of the run's."""
    return PhaseBuffer(
        config.phase_length,
        envs.num_envs,
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


def _check_memory(config: Config, envs: VectorEnv, agent: Agent, device: torch.device) -> None:
    """Compare the size of the phase buffer with the free memory.

    Raises:
        ValueError: the buffer is larger.
    """
    rollouts = _make_buffer(config, envs, agent, torch.device("meta")).rollouts
    needed = sum(tensor.nbytes for tensor in rollouts.tensors().values())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"the phase buffer needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free "
            f"on {device}; lower aux.every ({config.phase_length} rollouts), env.num_envs or "
            "ppo.num_steps"
        )


def _generator(
    config: Config, purpose: str, *others: int, device: torch.device | str = "cpu"
) -> Generator:
    """A stream of randomness of a run."""
    return Generator(device).manual_seed(derive_seed(config.seed, purpose, *others))
