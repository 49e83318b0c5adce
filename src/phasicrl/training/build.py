"""Construction of new and resumed runs. Kind: effects (makes environments, files)."""

import dataclasses
import math
import shlex
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.backends.cpu import get_cpu_capability

from phasicrl.collect import Collector
from phasicrl.config import Config, ScheduleFunction
from phasicrl.distributed import SINGLE_PROCESS, RankError, World
from phasicrl.envs.checks import CLIP_REMEDY, MakeEnv
from phasicrl.envs.make import get_time_limit, make_envs
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.envs.tensor import TensorVectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.envs.wrappers import HeuristicMask, MaskFunction
from phasicrl.execution.compiled import has_compiler
from phasicrl.execution.device import resolve_device, use_threads, use_torch_settings
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan, has_large_minibatches, make_plan
from phasicrl.learner import Learner
from phasicrl.models.agent import Agent, EncoderFactory, HeadFactory
from phasicrl.presets import PRESETS, differences
from phasicrl.rollout import PhaseBuffer
from phasicrl.runs.directory import WEIGHTS_FILE, RunDirectory, get_user_objects
from phasicrl.runs.lock import LOCK_FILE, RunLock
from phasicrl.runs.metrics import MetricsLog
from phasicrl.runs.parts import read_newest_state
from phasicrl.seeding import derive_seed
from phasicrl.spaces import describe_spaces, is_image, leaves
from phasicrl.system.machine import find_commit, get_versions, num_cores
from phasicrl.system.signals import SignalHandler
from phasicrl.training.fused import FusedCollector
from phasicrl.training.run import Callbacks, OnIteration, Run, describe_function, describe_objects
from phasicrl.training.unused import find_unused_options
from phasicrl.training.warm_start import load_matching_weights

FILE_WAIT_SECONDS = 10.0
"""Maximum time for a new file to appear on all machines of a network file system."""


class EvaluationObjects(TypedDict, total=False):
    """Custom environments and networks, see `phasicrl.train`."""

    make_env: MakeEnv | None
    make_vector_env: MakeVectorEnv | None
    make_encoder: EncoderFactory | None
    make_head: HeadFactory | None


class UserObjects(EvaluationObjects, total=False):
    """Custom objects of a run, see `phasicrl.train`."""

    mask_actions: MaskFunction | None
    callbacks: Callbacks | OnIteration | None
    schedule: ScheduleFunction | None


def start_run(
    config: Config, *, resume: Literal["never", "auto"] = "never", world: World = SINGLE_PROCESS,
    **user: Unpack[UserObjects],
) -> Run:  # fmt: skip
    """Make a new run, or resume one, ready to train; a failure leaves no new directory.

    Args:
        config: options of the run.
        resume: `never`, or `auto`: resume the newest run of this experiment, seed and length with a
            checkpoint, else make one; `restore_run` takes a directory.
        world: processes of the run.
        user: custom objects, see `phasicrl.train`.

    Raises:
        ValueError: the configuration cannot work.
    """
    objects = get_user_objects(user)
    if resume not in ("never", "auto"):
        rule = "never or auto. phasicrl.resume(RUN, total_env_steps=…) continues a run"
        raise ValueError(f"resume is {resume!r}; expected {rule}")
    maker = objects["make_env"] or objects["make_vector_env"]
    if maker and config.env.id in {preset.config.env.id for preset in PRESETS.values()}:
        name = describe_function(maker).replace(":", ".")  # it is not that of the preset
        config = config.with_updates({"env.id": name})
    for module in config.modules:
        import_module(module)
    runs = RunDirectory.find_matching_runs(config) if resume == "auto" else []
    if runs := [files for files in runs if files.checkpoints]:
        given = {"output_dir", "imports", "compute.num_threads", "env.num_threads"}  # of each call
        if world.is_first and (changed := differences(config, runs[-1].config).keys() - given):
            text = f"config.json holds, not the given {', '.join(sorted(changed))}"
            warnings.warn(text, stacklevel=2)
        return restore_run(runs[-1].path, world=world, **user)
    world.check_same("what they start", lambda: {"this": "a new run"})
    with ExitStack() as undo, ExitStack() as resources:  # logs are closed before their removal
        signals = resources.enter_context(SignalHandler(world.request_end))

        def make_directory() -> RunDirectory:
            path = Path()
            with world.sync_errors("making the run directory"):
                if world.is_first:
                    path = RunDirectory.make(config).path
                    undo.callback(shutil.rmtree, path)
                    RunDirectory(path).write_config(config)
                    resources.enter_context(closing(RunLock(path)))
            return RunDirectory(world.broadcast_object(path))

        run, _ = _build_run(config, objects, world, signals, resources, make_directory, None)
        run.write_card()
        run.back_up_state()
        periods = config.checkpoint.every_minutes, config.checkpoint.every_iterations
        if periods != (None, None):  # the first iteration may fail
            run.save()
        undo.pop_all()
        run.resources = resources.pop_all()
    return run


def restore_run(
    run_dir: str | Path, *, accept_config_changes: bool = False,
    total_env_steps: int | None = None, world: World = SINGLE_PROCESS, **user: Unpack[UserObjects],
) -> Run:  # fmt: skip
    """Restore the run in a directory from its newest usable checkpoint, ready to train on.

    Environments replay their current episodes; on a CPU, the resumed run is then equal, bit by bit,
    to an uninterrupted one. Environments with `restore_method` `none` start new episodes, which is
    logged.

    Args:
        run_dir: run directory.
        accept_config_changes: whether changes of config.json are accepted, see `phasicrl.resume`.
        total_env_steps: new length of the run, which is written to config.json; None keeps it.
        world: processes of the run; their number may differ from before.
        user: custom objects, see `phasicrl.train`.

    Raises:
        ValueError: the directory is not a run directory, is in use by another process, has no
            usable checkpoint, or its configuration was changed.
    """
    files, objects = RunDirectory(Path(run_dir)), get_user_objects(user)
    if (files.path / WEIGHTS_FILE).is_file() and not files.checkpoints:
        path = shlex.quote(str(files.path))
        remedy = f"To train from it: `phasicrl train --from {path} --init-from {path}`"
        raise ValueError(f"{files.path} is an agent; expected a run with checkpoints. {remedy}")
    world.check_same("what they start", lambda: {"this": f"a resumed run, {files.path}"})
    config = files.load_config(**objects)
    with ExitStack() as resources:
        signals = resources.enter_context(SignalHandler(world.request_end))
        with world.sync_errors("opening the run directory"):
            if world.is_first:
                resources.enter_context(closing(RunLock(files.path)))
        part, rejections, saved_by = read_newest_state(files, world)
        state, env_steps = part.state, part.state["env_steps"]
        if total_env_steps is not None:
            config = config.with_updates({"total_env_steps": total_env_steps})
            if config.total_env_steps <= env_steps:
                given = f"total_env_steps is {config.total_env_steps:,}"
                raise ValueError(f"{given}; expected more than the {env_steps:,} that are done")
        own = describe_objects(objects)
        changes = files.check_changes(state["config"], config, own, accept=accept_config_changes)
        is_over = min(env_steps, files.card.get("env_steps") or 0) >= config.budget
        if is_over:  # nothing is written
            config = config.with_updates({"log.tensorboard": False, "log.wandb": False})
            objects["callbacks"] = None
            state["log"]["bytes"] = {x.name: x.stat().st_size for x in files.path.glob("*.jsonl")}
        run, remarks = _build_run(config, objects, world, signals, resources, lambda: files, state)
        try:
            run.load_state_dict(*part, same_episodes=[not remark for remark in remarks])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{files.path} has a checkpoint that does not fit config.json"
            raise ValueError(f"{text}; expected the file as saved. Restore it ({error})") from None
        if not is_over:  # only now: a failed start leaves both as they are
            with world.sync_errors("writing card.json and config.json"):
                run.write_card()
                if world.is_first and total_env_steps is not None:
                    files.write_config(config)
        run.back_up_state()
        run.resources = resources.pop_all()
    for sentence in rejections:
        run.metrics_log.show_message(f"warning: {sentence}")
    remark = next(filter(None, remarks), "") + _describe_changes_and_rates(run, changes, saved_by)
    resumed = f"resumed {files.path} at {env_steps:,} steps{remark}"
    finished = f"{files.path} is already finished after {env_steps:,} steps; nothing is written"
    run.metrics_log.show_message(finished if is_over else resumed)
    return run


def _describe_changes_and_rates(run: Run, changes: list[str], saved_by: int) -> str:
    """Describe the changes of a resumed run, of options and processes, and its current rates."""
    learner, text = run.learner, "".join(f"; {change}" for change in changes)
    if saved_by != run.world.size:
        text = f"; the number of processes was {saved_by} and is {run.world.size}{text}"
    if changes and (progress := run.env_steps / run.config.budget) < 1:
        now = learner.config.with_scheduled_values(learner.schedule, progress).values()
        for path in ("ppo.learning_rate", "ppo.value_learning_rate"):
            now[path] = now[path] and now[path] * learner.lr_multiplier
        is_unused = now["aux.epochs"] == 0 or now["aux.optimizer"] != "own"
        before = learner.config.values() | {"ppo.learning_rate": None}
        for path, value in now.items():
            if value != before[path] and not (is_unused and path == "aux.learning_rate"):
                text += f"; {path} continues at {math.inf if value is None else value:.3g}"
    return text


def _make_or_restore_envs(
    config: Config, user: dict[str, Any], world: World, state: dict[str, Any] | None
) -> tuple[VectorEnv, int, Tensor | None, str]:
    """Make the environments of a new run, or restore those of a checkpoint.

    Returns:
        The environments, the environment steps at their creation, their observations if they were
        restored, and a remark for the log if they start new episodes.
    """
    if state is None:
        return _make_envs(config, user, world), 0, None, ""
    now, made_at_step, reason = state["env_steps"], state["envs_since"], "they cannot be restored"
    if state["collector"] is not None:
        envs = _make_envs(config, user, world, made_at_step=made_at_step, env_steps=now)
        try:
            return envs, made_at_step, envs.load_state_dict(state["collector"]["envs"]), ""
        except (EnvError, ValueError, KeyError) as error:
            envs.close()
            reason = str(error)
    envs = _make_envs(config, user, world, made_at_step=now, env_steps=now)
    return envs, now, None, f"; environments start new episodes: {reason}"


def _make_envs(
    config: Config, user: dict[str, Any], world: World, *, made_at_step: int = 0, env_steps: int = 0
) -> VectorEnv:
    """Make the environments of this process, with the heuristic masks of `mask_actions`."""
    share, mask_actions = world.local_slice(config.env.num_envs), user["mask_actions"]
    envs = make_envs(
        config.env, seed=derive_seed(config.seed, "env", made_at_step), first_index=share.start,
        num_envs=share.stop - share.start, steps_before=made_at_step // config.env.num_envs,
        make_env=user["make_env"], make_vector_env=user["make_vector_env"],
    )  # fmt: skip
    if mask_actions is None:
        return envs
    # The wrapper counts the steps of these environments.
    steps = math.ceil(config.env.heuristic_mask_steps / world.size)
    return HeuristicMask(envs, mask_actions, mask_steps=steps, steps_before=env_steps // world.size)


def _build_run(
    config: Config, user: dict[str, Any], world: World, signals: SignalHandler,
    resources: ExitStack, make_directory: Callable[[], RunDirectory], state: dict[str, Any] | None,
) -> tuple[Run, list[str]]:  # fmt: skip
    """Make a run; what may reject the configuration is made first.

    Args:
        config: options of the run.
        user: custom objects, see `phasicrl.train`.
        world: processes of the run.
        signals: signal handlers of the run.
        resources: stack that closes everything at the end of the run.
        make_directory: function that returns the run directory, locked by rank 0.
        state: state of the run to resume; None for a new one.

    Returns:
        The run with initial state, and each rank's remark if its environments start new episodes.
    """
    world.check_same("configuration", config.values)
    world.check_same("versions", lambda: get_versions() | {"commit": find_commit()})
    check_divisible_by_ranks(config, world)
    with world.sync_errors("making the environments"):
        envs, made_at, obs, remark = _make_or_restore_envs(config, user, world, state)
        resources.enter_context(closing(envs))
        if state:
            make_directory().check_spaces(describe_spaces(envs))
    plan = _make_plan(config, world, envs)
    with world.sync_errors("preparing the run"):
        agent = make_agent(config, envs, user).to(plan.device)
        messages = [] if state else _make_warnings(config, envs, user, plan)
        readings = {str(each.reading) for each in agent.modules() if hasattr(each, "reading")}
        messages += [f"images are read as {each} (model.image_layout)" for each in sorted(readings)]
        if config.init_from and state is None:
            messages += load_matching_weights(agent, config.init_from)
        resources.enter_context(use_torch_settings(plan, config.seed, world.rank))
    files = make_directory()
    with world.sync_errors("opening the run directory"):
        _check_directory_is_shared(files, world)
        _check_evaluation_envs(config, files, envs)
        log = MetricsLog(files.path if world.is_first else None, config, state and state["log"])
        resources.enter_context(closing(log))
    for message in messages:
        log.show_message(message)
    weights = {name: each.cpu() for name, each in agent.state_dict().items()}
    agent.load_state_dict(world.broadcast_object(weights))
    executor = Executor(plan, log=log.show_message, world=world)
    is_pure = isinstance(envs, TensorVectorEnv) and envs.is_pure and envs.device == executor.device
    # All processes share the noise of actions, but each shuffles its minibatches differently.
    collector = (FusedCollector if is_pure and plan.compiled else Collector)(
        envs, agent, generator=Generator().manual_seed(derive_seed(config.seed, "action")),
        executor=executor, bootstrap_truncation=config.ppo.bootstrap_truncation,
    )  # fmt: skip
    others = [] if world.is_first else [world.rank]
    shuffle = Generator().manual_seed(derive_seed(config.seed, "shuffle", *others))
    run = Run(
        config, files, Learner(config, agent, executor, shuffle, user["schedule"]), collector,
        _make_buffer(config, envs, agent), log, signals=signals, envs_made_at=made_at, user=user,
    )  # fmt: skip
    with world.sync_errors("starting the environments"):
        if obs is None or state is None:
            collector.reset()
        else:
            collector.load_state_dict(state["collector"], obs)
    return run, world.all_gather_object(remark)


class RunPreview(NamedTuple):
    """Agent, environment and warnings of a run before it starts.

    Attributes:
        agent: agent with its initial weights.
        has_masks: true if the environments give action masks.
        max_episode_steps: maximum length of an episode; None without one, or if it is unknown.
        warnings: messages that the run would begin with.
    """

    agent: Agent
    has_masks: bool
    max_episode_steps: int | None
    warnings: list[str]


def preview_run(config: Config) -> RunPreview:
    """Make an environment and the agent of a configuration, as a run of it would.

    Raises:
        ValueError: the configuration cannot be trained.
    """
    with closing(make_envs(config.env, num_envs=1, seed=0)) as envs:
        agent = make_agent(config, envs)
        notes = load_matching_weights(agent, config.init_from)[1:] if config.init_from else []
        notes += _make_warnings(config, envs, get_user_objects({}))
        return RunPreview(agent, bool(envs.mask_size), get_time_limit(config.env), notes)


def check_divisible_by_ranks(config: Config, world: World) -> None:
    """Check that each process gets equally many environments and equal minibatches.

    Raises:
        ValueError: a number is not divisible.
    """
    num_envs, rest = divmod(config.env.num_envs, world.size)
    if rest:
        rule = f"a multiple of the {world.size} processes"
        raise ValueError(f"env.num_envs is {config.env.num_envs}; expected {rule}")
    try:
        config.with_updates({"env.num_envs": num_envs, "ppo.advantage_norm": "none"})
    except ValueError as error:
        raise ValueError(f"in each process of {world.size}: {error}") from None


def _check_directory_is_shared(files: RunDirectory, world: World) -> None:
    """Check that rank 0's run directory is on a file system that this process shares.

    Raises:
        RankError: the directory is missing here, or is another one of that name.
    """
    marker = files.path / LOCK_FILE
    expected = world.broadcast_object(marker.read_text("utf-8") if world.is_first else "")
    until = time.monotonic() + FILE_WAIT_SECONDS
    while not (marker.is_file() and marker.read_text("utf-8") == expected):
        if time.monotonic() > until:
            given = f"output_dir is {files.path.parent}, and rank {world.rank} does not see"
            rule = "a folder that all machines share"
            raise RankError(f"{given} the run directory of rank 0 in it; expected {rule}")
        time.sleep(0.1)


def _check_evaluation_envs(config: Config, files: RunDirectory, training_envs: VectorEnv) -> None:
    """Check that the environments of `evaluation.env_ids` have the spaces of the training."""
    for env_id in config.evaluation.env_ids:
        env = dataclasses.replace(config.env, id=env_id, num_envs=1)
        with closing(make_envs(env, seed=0)) as others:
            files.check_spaces(describe_spaces(others), describe_spaces(training_envs), env_id)


def _make_buffer(config: Config, envs: VectorEnv, agent: Agent) -> PhaseBuffer:
    """Make the buffer of a phase, on the agent's device."""
    layout, head, ppo = agent.reader.layout, agent.policy_head, config.ppo
    bootstraps = ppo.baseline and ppo.bootstrap_truncation
    needs_final_obs = bootstraps and ppo.truncation_value == "final_obs"
    return PhaseBuffer(
        config.rollouts_per_phase, envs.num_envs, config.ppo.num_steps,
        obs_shape=layout.shape, obs_dtype=getattr(torch, layout.dtype.name),
        action_shape=head.action_shape, action_dtype=head.action_dtype,
        state_size=agent.state_size, mask_size=envs.mask_size or None,
        has_weights=needs_final_obs and not envs.has_final_obs, device=head.order.device,
    )  # fmt: skip


def _make_plan(config: Config, world: World, envs: VectorEnv) -> Plan:
    """Return the plan of rank 0, with the device and the cores of this process."""
    has_images = any(is_image(part) for _, part in leaves(envs.observation_space))
    with world.sync_errors("finding the device"):
        device = resolve_device(config.compute.device, has_large_minibatches(config, has_images))
    plan = world.broadcast_object(make_plan(
        config, device, num_cores=num_cores(), has_compiler=has_compiler(), has_images=has_images
    ))  # fmt: skip
    if world.size == 1:
        return plan
    threads = min(plan.num_threads, num_cores())
    # Processes of one run wait for each other in every step, so that turns would deadlock.
    return dataclasses.replace(plan, device=device, num_threads=threads, take_turns=False)


def _make_warnings(
    config: Config, envs: VectorEnv, user: dict[str, Any], plan: Plan | None = None
) -> list[str]:
    """Return warnings about options without effect, actions, time limits, phases and bf16.

    The plan of a run is of this machine, on which a configuration is perhaps not trained: None.
    """
    custom = "own" if user["make_env"] else "vector" if user["make_vector_env"] else None
    backend = custom or envs.name.partition(":")[0]
    unused = find_unused_options(config, envs, backend)
    messages = [
        f"warning: {', '.join(x for x in unused if unused[x] == what)}: no effect without {what}"
        for what in dict.fromkeys(unused.values())
    ]
    boxes = [part for _, part in leaves(envs.action_space) if isinstance(part, gym.spaces.Box)]
    bounded = [box for box in boxes if np.isfinite([box.low, box.high]).any()]
    if bounded and config.action.squash == "none":
        messages.append(f"actions may leave {bounded[0]} (action.squash none); {CLIP_REMEDY}")
    far = [box for box in boxes if (box.low > 0).any() or (box.high < 0).any()]
    if far and config.action.squash != "tanh" and not config.action.rescale:
        messages.append(f"warning: actions begin at 0, outside {far[0]}; expected action.rescale")
    if config.ppo.truncation_value == "rsl_rl":
        text = "warning: ppo.truncation_value is rsl_rl, which biases values at time limits"
        messages.append(f"{text}; expected final_obs, unless rsl_rl's numbers are reproduced")
    if config.has_auxiliary_phase and config.num_iterations <= config.aux_phase_interval:
        text = f"warning: no auxiliary phase in {config.num_iterations} iterations; expected more "
        messages.append(f"{text}than {config.aux_phase_interval}. Raise total_env_steps")
    is_bf16_on_cpu = plan and "bf16" in plan.precision.values() and not plan.on_gpu
    if is_bf16_on_cpu and get_cpu_capability() == "AVX2":
        text = "warning: bf16 is slower than fp32 on a processor without AVX-512"
        messages.append(f"{text}; expected compute.policy_precision and compute.aux_precision fp32")
    return messages


def make_agent(config: Config, envs: VectorEnv, objects: Mapping[str, Any] = {}) -> Agent:
    """Make the agent on the CPU, with initial weights from the run's seed.

    Args:
        config: options of the run.
        envs: environments, for their spaces.
        objects: custom objects by name, of which `make_encoder` and `make_head` are used.
    """
    init_seed = derive_seed(config.seed, "init")
    with torch.random.fork_rng(devices=[]), use_threads(1):
        torch.manual_seed(init_seed)  # custom networks draw from the global generator
        try:
            for name in ("make_encoder", "make_head"):
                if isinstance(objects.get(name), nn.Module):
                    raise ValueError(f"{name} is a network; expected a function that makes one")
            return Agent(
                envs.observation_space, envs.action_space, config.model, action=config.action,
                obs_norm=config.obs_norm, value_norm=config.value_norm,
                generator=Generator().manual_seed(init_seed), auxiliary=config.has_auxiliary_phase,
                make_encoder=objects.get("make_encoder"), make_head=objects.get("make_head"),
            )  # fmt: skip
        except TypeError as error:
            error.add_note("the calls are make_encoder(space), make_head(name, size, num_outputs)")
            raise
        except ValueError as error:
            raise ValueError(f"{envs.name}: {error}") from error.__cause__
