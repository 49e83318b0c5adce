"""Run: everything that `algorithm.learn` uses and a checkpoint holds. Kind: state."""

import copy
import dataclasses
import math
import platform
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from phasicrl.collect import Collector
from phasicrl.config import Config
from phasicrl.distributed import RankError
from phasicrl.envs.protocol import LIMIT_HINT
from phasicrl.episodes import Episode
from phasicrl.execution.plan import Phase
from phasicrl.learner import Learner, Record
from phasicrl.optimize import DivergedError, MeanAccumulator, make_diverged_error
from phasicrl.rollout import AuxiliaryProgress, PhaseBuffer, Rollout
from phasicrl.runs.checkpoint import ChunkMakers, hash_tensors, save_checkpoint
from phasicrl.runs.console import format_duration
from phasicrl.runs.directory import EPOCHS_FILE, RunDirectory
from phasicrl.runs.metrics import METRICS, MetricsLog
from phasicrl.runs.parts import OLD_POLICY_PREFIX
from phasicrl.spaces import describe_spaces
from phasicrl.system.machine import find_commit, get_versions, num_cores, processor
from phasicrl.system.signals import SignalHandler
from phasicrl.training.evaluation import LONG_EPISODE_STEPS, PeriodicEvaluation


def describe_function(function: Any) -> str:
    """Return the module and name of a function, as `MODULE:FUNCTION`."""
    function = getattr(function, "func", function)  # of a `functools.partial`
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}:{name}"


def describe_objects(user: Mapping[str, Any]) -> dict[str, str]:
    """Describe the custom objects that are given, besides callbacks, by `describe_function`."""
    given = {name: each for name, each in user.items() if each is not None and name != "callbacks"}
    return {name: describe_function(each) for name, each in given.items()}


class Callbacks:
    """Base class of callbacks of a run, whose methods do nothing.

    Override some of them, and pass an instance to `phasicrl.train`. Every process of a run calls
    them; `run.log` works in all. After an error in one, the run is saved with its last iteration.

    Raises:
        TypeError: a subclass has a method `on_…` that nothing calls.
    """

    def __init_subclass__(cls) -> None:
        for name in dir(cls):
            is_method = name.startswith("on_") and callable(getattr(cls, name))
            if is_method and not hasattr(Callbacks, name):
                known = "on_start, on_episode, on_iteration or on_end"
                raise TypeError(f"{cls.__name__}.{name} is never called; expected {known}")

    def on_start(self, run: "Run", /) -> None:
        """Run before the first iteration of a new or resumed run."""

    def on_episode(self, run: "Run", episode: Episode, /) -> Literal["stop"] | None:
        """Run at the end of an iteration for each episode that ended in it; may return "stop"."""

    def on_iteration(self, run: "Run", record: Record, /) -> Literal["stop"] | None:
        """Run after each iteration, with its metrics; "stop" saves and ends the run."""

    def on_end(self, run: "Run", /) -> None:
        """Run after the last iteration, also after "stop", before the final state is saved."""


OnIteration = Callable[["Run", Record], Literal["stop"] | None]
"""Function in place of `Callbacks` that is used as their `on_iteration`."""


class Run(AbstractContextManager["Run"]):
    """Learner with environments, buffer, directory, log and clock.

    As a context manager, the run is closed at the end; after an error, its last complete iteration
    is saved.

    Attributes:
        env_steps: environment steps so far, over all environments and processes.
        record: metrics of the current iteration.
        directory: path of the run directory.
        agent: networks of the learner.
        envs: environments of this process.
        world: processes of the run.
        callbacks: callbacks of the user.

    Args:
        config: options of the run.
        run_directory: run directory.
        learner: agent, optimizers and normalizers.
        collector: collector of rollouts.
        buffer: rollouts of one phase.
        log: log of the metrics.
        signals: signal handlers, which ignore signals while the run is saved.
        envs_made_at: environment steps at the creation of the environments, for their seeds.
        user: custom objects by the names of `train`'s arguments.
    """

    def __init__(
        self, config: Config, run_directory: RunDirectory, learner: Learner, collector: Collector,
        buffer: PhaseBuffer, log: MetricsLog, *, signals: SignalHandler, envs_made_at: int,
        user: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.config, self.files, self.user = config, run_directory, {**user}
        callback: Any = self.user.pop("callbacks")
        self.callbacks = callback if isinstance(callback, Callbacks) else Callbacks()
        if callback is not None and callback is not self.callbacks:
            if not callable(callback) or isinstance(callback, type):
                raise ValueError(f"callbacks is {callback!r}; expected a Callbacks() or a function")
            vars(self.callbacks)["on_iteration"] = callback
        self.learner, self.collector, self.buffer = learner, collector, buffer
        self.metrics_log, self.show, self._pending_metrics = log, log.show_stage, Record()
        self.directory, self.agent, self.envs = run_directory.path, learner.agent, collector.envs
        self.executor, self.world = learner.executor, learner.executor.world
        self.resources = ExitStack()  # closed with the run
        self.env_steps = 0
        self.record: Record = {}
        self.envs_made_at = envs_made_at
        before = run_directory.card
        self._steps_on_card: int = before.get("env_steps") or 0
        self._origin: dict[str, Any] = {
            "run": self.world.broadcast_object(uuid.uuid4().hex),
            "command": before.get("command", sys.argv),
            "resumed": [*(before.get("resumed") or []), sys.argv] if before else [],
        }
        self._signals = signals
        self._periodic_evaluation = PeriodicEvaluation(config, run_directory, log, self.world, user)
        self._best_return: float | None = None
        self._backup: tuple[dict[str, Any], ChunkMakers] | None = None
        self._seconds_before = 0.0
        self._started = self._iteration_started = time.perf_counter()
        self._last_save = -math.inf
        self._rollout_seconds = 0.0

    @property
    def iteration(self) -> int:
        """Number of iterations (rollout and policy phase) since the start of the run."""
        return self.learner.iteration

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, including the time before it was resumed."""
        return self._seconds_before + time.perf_counter() - self._started

    def call_callback(self, name: Literal["on_start", "on_end"]) -> None:
        """Call a method of the callbacks that returns nothing.

        Raises:
            ValueError: it returned something.
        """
        with self.world.sync_errors(name):
            if (answer := getattr(self.callbacks, name)(self)) is not None:
                raise ValueError(f"{name} returned {answer!r}; expected None")

    def collect(self, rollout: Rollout) -> Rollout:
        """Fill a rollout, count its environment steps, and return the rollout."""
        self._iteration_started = time.perf_counter()
        self.show("rollout")
        before_values = self.learner.updates_obs_norm_before_values
        self.collector.collect(rollout, updates_obs_norm_before_values=before_values)
        self.env_steps += self.config.batch_size
        self._rollout_seconds = time.perf_counter() - self._iteration_started
        return rollout

    def log_epoch(self, phase: Phase, epoch: int, accumulator: MeanAccumulator) -> None:
        """Append the means of a finished epoch to `epochs.jsonl` if `log.epochs` is on.

        Args:
            phase: phase that was trained.
            epoch: index of the epoch.
            accumulator: means of the phase, of which those since the last call are written.
        """
        if self.config.log.epochs:
            record = self.world.average_record(accumulator.pop_means())
            head = {"env_steps": self.env_steps, "iteration": self.iteration, "kind": phase}
            self.metrics_log.append(EPOCHS_FILE, head | {"epoch": epoch + 1}, record)

    def log(self, values: Mapping[str, Any]) -> None:
        """Add metrics of your own, such as `{"own/level": 3}`, to those of the current iteration.

        `finish_iteration` writes them to the log. A name without a slash gets `own/` before it.

        Raises:
            ValueError: a value is no number, a name is no text or a built-in metric's, or there are
                no names.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"metrics are {values!r}; expected numbers by name, as in a dict")
        for name, value in values.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"metric is {name!r}; expected its name, a text")
            if name in METRICS:
                free_name = f"own/{name.rpartition('/')[-1]}"
                raise ValueError(f"metric is {name!r}; expected a free name. Call it {free_name}")
            try:
                number = math.fsum([value])  # unlike float, it takes no text
                self._pending_metrics[name if "/" in name else f"own/{name}"] = number
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{name} is {value!r}; expected a number") from None

    def finish_iteration(self, record: Record) -> bool:
        """End an iteration: evaluate if due, call the callbacks, log, and save if due.

        Returns:
            Whether to stop: a callback returned "stop", or `stop_at_return` is reached.

        Raises:
            ValueError: a callback returned something else.
        """
        total = time.perf_counter() - self._iteration_started
        finished = list(self.collector.episodes.finished)
        # Without a rollout, this ends the auxiliary phase that the end of the run had left out.
        if is_first_time := self._rollout_seconds > 0:
            record |= self.collector.episodes.pop_metrics() | {
                "charts/SPS": self.config.batch_size / total,
                "time/rollout": self._rollout_seconds,
                "time/total": total,
            }
        if self._periodic_evaluation.is_due(self.iteration, self.env_steps):
            record |= self._evaluate()
        limit = min(LONG_EPISODE_STEPS * self.config.env.num_envs, self.config.budget)
        is_reached = self.env_steps - self.config.batch_size < limit <= self.env_steps
        if is_reached and math.isnan(self.collector.episodes.recent_mean_return):
            text = f"warning: no episode has ended in {self.env_steps:,} steps"
            self.metrics_log.show_message(f"{text}; if none can, set a time limit ({LIMIT_HINT})")
        self._pending_metrics |= record
        known = set(record)
        try:
            with self.world.sync_errors("on_episode or on_iteration"):
                answers: list[Any] = [self.callbacks.on_episode(self, each) for each in finished]
                if is_first_time:
                    answers.append(self.callbacks.on_iteration(self, record))
                if wrong := [x for x in answers if x is not None and str(x) != "stop"]:
                    raise ValueError(f"a callback returned {wrong[0]!r}; expected 'stop' or None")
                self.log({name: record[name] for name in record if name not in known})
        finally:  # whatever the callbacks do, the iteration is complete
            self._write_metrics()
            self.back_up_and_maybe_save()
        goal, mean = self.config.stop_at_return, self.collector.episodes.recent_mean_return
        if is_solved := goal is not None and self.collector.episodes.is_full and mean >= goal:
            self.metrics_log.show_message(f"stop_at_return {goal:g} is reached: {mean:g}")
        return self.world.all_reduce_any(is_solved or any(answers))

    def _write_metrics(self) -> None:
        """Write the row of metrics, with those of the user so far, unless it is empty."""
        place = {"env_steps": self.env_steps, "iteration": self.iteration}
        if self._pending_metrics:
            self.metrics_log.write(self._pending_metrics, **place, phase=self.learner.phase_number)
        self._pending_metrics = {}

    def _evaluate(self) -> Record:
        """Evaluate a copy of the agent, and save its weights if they are the best so far."""
        self.show("evaluation")
        start = time.perf_counter()
        # Results that a network of the user keeps have a graph, and cannot be copied.
        kept = tree_leaves([vars(module) for module in self.agent.modules()])
        results = {id(x): x.detach() for x in kept if isinstance(x, Tensor) and x.grad_fn}
        agent = copy.deepcopy(self.agent, results).cpu().eval()
        with torch.random.fork_rng(devices=[]):  # networks and environments may draw
            record = self._periodic_evaluation.evaluate(agent, self.env_steps)
        if self._best_return is None or record["evaluation/return"] > self._best_return:
            try:
                if self.world.is_first:
                    weights = agent.state_dict()
                    self.files.save_weights(weights, env_steps=self.env_steps, which="best")
                self._best_return = record["evaluation/return"]
            except OSError as error:
                self.metrics_log.show_message(f"warning: the best weights are not saved: {error}")
        if self._best_return is not None:
            record["evaluation/best_return"] = self._best_return
        return record | {"time/evaluation": time.perf_counter() - start}

    def back_up_and_maybe_save(self) -> None:
        """Back up the state, and save it if a checkpoint is due.

        In a run of one process, a full disk causes a warning only.
        """
        self.back_up_state()
        every = self.config.checkpoint
        minutes, count = every.every_minutes, every.every_iterations
        is_due = minutes is not None and time.perf_counter() - self._last_save >= 60 * minutes
        is_due |= count is not None and not self.buffer.aux_progress and self.iteration % count == 0
        if not self.world.all_reduce_any(self.world.is_first and is_due):
            return
        try:
            self._write_backup_as_checkpoint()
        except OSError as error:
            if self.world.size > 1:
                raise
            self._last_save = time.perf_counter()
            text = f"no checkpoint at {self.env_steps:,} steps ({error}); training continues"
            self.metrics_log.show_message(f"warning: {text}")

    def back_up_state(self) -> None:
        """Copy the state, so that it can be saved if the next iteration fails."""
        state = tree_map_only(Tensor, torch.clone, self.state_dict())
        slots, rollout = range(self.buffer.num_filled), self.buffer.rollout
        # Rollouts whose targets were recomputed have other names.
        chunks: ChunkMakers = {self._slot_chunk_name(slot): rollout(slot).tensors for slot in slots}
        if (progress := self.buffer.aux_progress) is not None:
            chunks[self._old_policy_chunk_name] = lambda: {"dist_params": progress.old_dist_params}
        self._backup = state, chunks

    def finish(self) -> None:
        """Call `on_end`, save the final state and `card.json`, unless already finished."""
        env_steps = min(self.env_steps, self._steps_on_card)
        if self.world.broadcast_object(env_steps < self.config.budget):
            self.call_callback("on_end")
            self.save(is_end=True)
            self._steps_on_card = self.env_steps
            self.write_card()

    def save(self, *, is_end: bool = False) -> None:
        """Save a checkpoint of the current state, and the agent's weights.

        Args:
            is_end: whether it replaces the checkpoint from before `on_end`.

        Raises:
            ValueError: the weights are not finite.
            OSError: the disk is full; earlier checkpoints are unchanged.
        """
        self._write_metrics()  # a checkpoint refers to the size of the log
        self.back_up_state()
        self._write_backup_as_checkpoint(is_end)

    def _write_backup_as_checkpoint(self, is_end: bool = False) -> None:
        """Write the last backup as a checkpoint."""
        assert self._backup is not None
        state, chunk_makers = self._backup
        weights, env_steps = state["learner"]["agent"], state["env_steps"]
        is_full = state["num_filled"] == self.config.rollouts_per_phase  # in a phase, or before one
        aux_epoch = (state["auxiliary"] or {"epoch": 0})["epoch"] if is_full else None
        trained = {name: weights[name] for name, _ in self.agent.named_parameters()}
        if not all(tensor.isfinite().all() for tensor in trained.values()):
            raise make_diverged_error(["the agent's weights"])
        # Other buffers, as of a user's batch normalization, differ between processes.
        statistics = ("reader.", "value_normalizer.")
        equal = trained | {name: x for name, x in weights.items() if name.startswith(statistics)}
        self.world.check_same("their weights", lambda: {"SHA-256": hash_tensors(equal)})
        if not self.world.is_first:  # the rest of the learner is equal in all
            state = state | {"learner": {"generator": state["learner"]["generator"]}}
        with self.world.sync_errors("writing the metrics"):
            self.metrics_log.flush()  # before the checkpoint, which refers to the size of the log
        save_checkpoint(
            self.files.checkpoint_folder,
            state | {"config": self.config.to_json()},
            env_steps=env_steps, aux_epoch=aux_epoch, is_end=is_end, chunk_makers=chunk_makers,
            keep=self.config.checkpoint.keep, run_id=self._origin["run"], world=self.world,
        )  # fmt: skip
        with self.world.sync_errors("saving the weights"):
            if self.world.is_first:
                self.files.save_weights(weights, env_steps=env_steps)
        self._last_save = time.perf_counter()

    def write_card(self) -> None:
        """Write versions, commit, machine, seed and wall-clock time to `card.json`."""
        if not self.world.is_first:
            return
        self.files.write_card({
            **self._origin,
            "seed": self.config.seed,
            "own": describe_objects(self.user),
            "env_steps": self._steps_on_card,
            "total_env_steps": self.config.total_env_steps,
            "seconds": round(self.seconds, 1),
            "environment": self.envs.name,
            "spaces": describe_spaces(self.envs),
            "exact_state": self.envs.restore_method,
            "processes": self.world.size,
            "device": str(self.executor.device),
            "plan": dataclasses.asdict(self.executor.plan),
            "machine": dict(system=platform.platform(), processor=processor(), cores=num_cores()),
            "versions": get_versions() | {"torch": torch.__version__},
            "commit": find_commit(),
        })  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the run's state for a checkpoint, without the rollouts, which are its chunks."""
        progress = self.buffer.aux_progress
        auxiliary = progress and {
            "epoch": progress.epoch,
            "means": progress.accumulator.state_dict(),
            "record": self.record,
            "seconds": progress.seconds,
            "rollout_seconds": self._rollout_seconds,
            "total_seconds": time.perf_counter() - self._iteration_started,
        }
        return {
            "learner": self.learner.state_dict(),
            "action_generator": self.collector.generator.get_state(),
            "torch_generator": torch.get_rng_state(),
            "episodes": self.collector.episodes.state_dict(),
            "collector": self.collector.state_dict(),
            "envs_since": self.envs_made_at,
            "num_filled": self.buffer.num_filled,
            "auxiliary": auxiliary,
            "best_return": self._best_return,
            "env_steps": self.env_steps,
            "seconds": self.seconds,
            "log": self.metrics_log.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], chunks: dict[str, dict[str, Tensor]], *,
        same_episodes: Sequence[bool],
    ) -> None:  # fmt: skip
        """Restore the run from its `state_dict` and its chunks, but not the environments.

        Args:
            state: result of `state_dict`; it holds the run's id as well.
            chunks: tensors that a checkpoint has in files of their own, by the chunk's name:
                rollouts of the phase and, in an auxiliary phase, π_old.
            same_episodes: whether each rank's environments were restored to the same episodes.

        Raises:
            ValueError: the rollouts are not those of a phase of the configuration.
        """
        self.learner.load_state_dict(state["learner"])
        filled, every = state["num_filled"], self.config.rollouts_per_phase
        if filled > every or filled % every != self.iteration % every:
            rule = f"{self.iteration % every} in iteration {self.iteration}, with aux.every {every}"
            raise ValueError(f"number of rollouts is {filled}; expected {rule}")
        self.collector.generator.set_state(state["action_generator"])
        torch.set_rng_state(state.get("torch_generator", torch.get_rng_state()))
        self.collector.episodes.load_state_dict(state["episodes"], same_episodes=same_episodes)
        self._origin["run"] = state["run"]
        self.env_steps, self._seconds_before = state["env_steps"], state["seconds"]
        self._steps_on_card = min(self._steps_on_card, self.env_steps)  # `finish` has yet to follow
        self._best_return = state["best_return"]
        if (auxiliary := state["auxiliary"]) is not None:
            device, accumulator = self.executor.device, MeanAccumulator()
            accumulator.load_state_dict(auxiliary["means"], device)
            self.buffer.aux_progress = AuxiliaryProgress(
                chunks[self._old_policy_chunk_name]["dist_params"].to(device), accumulator,
                auxiliary["epoch"], seconds=auxiliary["seconds"],
            )  # fmt: skip
            self._rollout_seconds = auxiliary["rollout_seconds"]
            self._iteration_started = time.perf_counter() - auxiliary["total_seconds"]
            self.record = auxiliary["record"]
        for slot in range(state["num_filled"]):
            self.buffer.next_rollout().load_tensors(chunks[self._slot_chunk_name(slot)])

    def format_results(self) -> dict[str, str]:
        """Return the results of the run so far, such as steps per second, as text by name."""
        parts = ("rollout", "policy", "value", "auxiliary", "evaluation")
        name, count = "charts/episodic_return_100", "charts/num_episodes"
        names = name, count, *(f"time/{part}" for part in parts)
        records = self.files.metrics(*names) if self.files.last_rows(2) else []
        seconds = {part: sum(row.get(f"time/{part}") or 0.0 for row in records) for part in parts}
        total = sum(seconds.values()) or 1.0
        split = [f"{part} {100 * value / total:.0f} %" for part, value in seconds.items() if value]
        rows = {
            "environment steps": f"{self.env_steps:,}",
            "wall-clock time": format_duration(self.seconds),
            "steps per second": f"{self.env_steps / self.seconds:,.0f}",
            "time split": ", ".join(split),
        }
        if returns := [row[name] for row in records if name in row]:
            episodes = min(sum(row[count] for row in records), 100)
            rows[f"return, last {episodes:.0f} episodes"] = f"{returns[-1]:.2f}"
        return rows

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Close the run; after an error, save its last backup first.

        Environments, log and run directory are released, PyTorch's settings and signals restored.
        The error gets an attribute `run_directory`.
        """
        self._signals.ignore_further()
        with self.resources:  # among them `SignalHandler`, which raises PreemptedExit
            if error is None:
                return
            self.world.request_end(None)  # the run is ending already
            if self.world.is_first:
                vars(error)["run_directory"] = self.directory
                if isinstance(error, DivergedError):
                    self._record_divergence(error)
            self._save_on_exit()
            raise error

    def _record_divergence(self, error: DivergedError) -> None:
        """Add the name of the first non-finite tensor, and mark the run as diverged."""
        rollout = self.buffer.rollout(max(self.buffer.num_filled - 1, 0))
        weights = self.agent.state_dict().items()  # the reader's bounds may be infinite
        tensors = {f"weights.{name}": each for name, each in weights if "reader." not in name}
        tensors |= {f"rollout.{name}": each for name, each in rollout.tensors().items()}
        bad = [name for name, each in tensors.items() if not each.isfinite().all()]
        error.add_note(f"first non-finite tensor: {bad[0] if bad else 'a loss or a gradient'}")
        with suppress(OSError):
            self.files.write_card(self.files.card | {"diverged": True})

    def _save_on_exit(self) -> None:
        """Save the last backup, and log how to resume the run."""
        try:
            if self.world.size == 1 or self.world.has_shared_error:
                self._write_backup_as_checkpoint()
        except (OSError, ValueError, RankError) as problem:
            self.metrics_log.show_message(f"warning: the last iteration is not saved: {problem}")
        saved, hint = self.files.checkpoints, "it has no checkpoint yet"
        if saved:
            call = f"phasicrl resume {shlex.quote(str(self.directory))}{self.config.import_flags}"
            objects = describe_objects(self.user)
            maker = objects.get("make_env") or objects.get("make_vector_env") or ""
            if len(objects) == 1 and re.fullmatch(r"(?!__main__)[\w.]+:[\w.]+", maker):
                call += f" --make-env {shlex.quote(maker)}"
            elif objects:
                given = ", ".join(f"{name}=…" for name in objects)
                call = f"phasicrl.resume({str(self.directory)!r}, {given})"
            hint = f"`{call}` continues from its last checkpoint, {saved[-1].name}"
        text = f"{self.directory} was stopped after {self.env_steps:,} steps"
        self.metrics_log.show_message(f"{text}; {hint}")

    @property
    def _old_policy_chunk_name(self) -> str:
        """Name of the chunk with the distribution parameters before the auxiliary phase."""
        return f"{OLD_POLICY_PREFIX}-{self.learner.phase_number:06d}"

    def _slot_chunk_name(self, slot: int) -> str:
        """Return the name of a rollout's chunk, unique in the run."""
        is_recomputed = self.buffer.aux_progress is not None and self.config.aux.recompute_targets
        return f"rollout-{self.learner.phase_number:06d}-{slot:03d}{'-renewed' * is_recomputed}"
