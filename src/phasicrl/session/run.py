"""A run: all that `algorithm.learn` orders about, and must survive a crash. Kind: state."""

from __future__ import annotations

import copy
import dataclasses
import math
import platform
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from phasicrl.collect import Collector
from phasicrl.config import Config
from phasicrl.distributed import RankError, World
from phasicrl.envs.protocol import VectorEnv
from phasicrl.execution.compute import Compute
from phasicrl.execution.plan import Phase
from phasicrl.host.machine import num_cores, processor, versions
from phasicrl.host.provenance import commit
from phasicrl.host.signals import Preempted, Signals, ToldToEnd
from phasicrl.learner import Learner, Record
from phasicrl.models.agent import Agent
from phasicrl.optimize import DivergedError, MeanAccumulator, diverged
from phasicrl.rollout import AuxiliaryProgress, PhaseBuffer, Rollout
from phasicrl.runs.checkpoint import Chunks, digest_of_tensors, save_checkpoint
from phasicrl.runs.console import duration
from phasicrl.runs.directory import OWN_OBJECTS, RunDirectory
from phasicrl.runs.lock import RunLock
from phasicrl.runs.metrics import MetricsLog
from phasicrl.runs.parts import OLD_POLICY, own_part
from phasicrl.seeding import derive_seed
from phasicrl.session.periodic_evaluation import PeriodicEvaluation


class Snapshot(NamedTuple):
    """The state of a run between two iterations, or between two auxiliary epochs."""

    state: dict[str, Any]
    env_steps: int
    aux_epochs: int | None
    chunks: Chunks


def _copied(tree: Any) -> Any:
    """A copy of what a checkpoint holds; `copy.deepcopy` takes ten times as long for tensors."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_copied(value) for value in tree]
    return copy.deepcopy(tree)


class Run:
    """A training session: a learner, its environments and buffer, a directory, a log and a clock.

    `state_dict` holds all that a checkpoint needs.

    Attributes:
        env_steps: steps of single environments so far, the run's clock.
        record: metrics of the iteration under way.

    Args:
        config: the run's configuration, as it was asked for.
        files: its run directory, which exists.
        learner: what is trained.
        collector: plays its environments.
        buffer: room for one phase.
        log: where its metrics go; of several processes, the first one's.
        lock: on the run directory; the first process has it.
        envs_since: the run's step at which its environments were made; their seeds follow from it.
        own: what the user passed as objects, which the configuration cannot hold, by the names of
            `train`'s arguments.
    """

    def __init__(
        self,
        config: Config,
        files: RunDirectory,
        learner: Learner,
        collector: Collector,
        buffer: PhaseBuffer,
        log: MetricsLog,
        *,
        lock: RunLock | None,
        envs_since: int = 0,
        own: Mapping[str, Any],
    ) -> None:
        self.config, self.files, self._own = config, files, own
        self.learner, self.collector, self.buffer, self.log = learner, collector, buffer, log
        self.env_steps = 0
        self.record: Record = {}
        self.envs_since = envs_since
        before = files.card
        self._steps_on_card: int = before.get("env_steps", 0)
        self._origin: dict[str, Any] = {
            "run": self.world.of_first(before.get("run") or uuid.uuid4().hex),
            "command": before.get("command", sys.argv),
            "resumed": [*before.get("resumed", []), sys.argv] if before else [],
        }
        self._lock = lock
        self._signals = Signals(self.world.ask_to_end)
        self._periodic_evaluation = PeriodicEvaluation(config, files, log, self.world, own)
        self._best_return: float | None = None
        self._snapshot: Snapshot | None = None
        self._seconds_before = 0.0
        self._started = self._iteration_started = time.perf_counter()
        self._last_save = -math.inf
        self._rollout_seconds = 0.0

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.files.path

    @property
    def envs(self) -> VectorEnv:
        """Its environments."""
        return self.collector.envs

    @property
    def agent(self) -> Agent:
        """What is trained."""
        return self.learner.agent

    @property
    def compute(self) -> Compute:
        """How it is executed."""
        return self.learner.compute

    @property
    def world(self) -> World:
        """The processes that train it."""
        return self.compute.world

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
        self.collector.collect(
            rollout, update_obs_norm_before_targets=self.learner.update_obs_norm_before_targets
        )
        self.env_steps += self.config.batch_size
        self._rollout_seconds = time.perf_counter() - self._iteration_started
        return rollout

    def stage(self, name: str) -> None:
        """Tell the display what is going on."""
        self.log.progress(name)

    def log_epoch(self, phase: Phase, epoch: int, means: MeanAccumulator) -> None:
        """Write a row for an epoch that has ended, if that is asked for.

        Args:
            phase: what was trained.
            epoch: its number, from 0.
            means: so far, of the iteration or of the auxiliary phase.
        """
        if not self.config.log.epochs:
            return
        record = self.world.mean_of(means.since_last())
        rates = [group["lr"] for group in self.learner.settings(phase).optimizer.param_groups]
        record["charts/learning_rate"] = rates[0]
        if self.config.ppo.value_learning_rate is not None:
            record["charts/value_learning_rate"] = rates[1]
        place = {"env_steps": self.env_steps, "iteration": self.iteration}
        self.log.epoch(record, **place, kind=phase, epoch=epoch + 1)

    def finish_iteration(self, record: Record) -> None:
        """Log the iteration's metrics, and save if it is time."""
        total = time.perf_counter() - self._iteration_started
        record |= self.collector.episodes.report() | {
            "charts/SPS": self.config.batch_size / total,
            "time/rollout": self._rollout_seconds,
            "time/total": total,
        }
        if self._periodic_evaluation.is_due(self.iteration, self.env_steps):
            record |= self._evaluate()
        place = {"env_steps": self.env_steps, "iteration": self.iteration}
        self.log.write(record, **place, phase=self.learner.phase)
        self.maybe_checkpoint()

    def _evaluate(self) -> Record:
        """Play episodes that are not trained on; keep the weights, if they are the best so far.

        Nothing of what is trained changes: a copy acts, in environments of its own.
        """
        self.stage("evaluation")
        start = time.perf_counter()
        agent = copy.deepcopy(self.agent).cpu().eval()
        precision = self.compute.precision("policy")
        record = self._periodic_evaluation.play(agent, self.env_steps, precision)
        best, reached = self._best_return, record["evaluation/return"]
        if best is None or reached > best:
            try:
                if self.world.is_first:
                    weights = agent.state_dict()
                    self.files.save_weights(weights, env_steps=self.env_steps, which="best")
                best = self._best_return = reached
            except OSError as error:
                self.log.message(f"warning: the best weights could not be saved: {error}")
        record["time/evaluation"] = time.perf_counter() - start
        return record if best is None else record | {"evaluation/best_return": best}

    def maybe_checkpoint(self) -> None:
        """Take a snapshot of the state, and save it if a checkpoint is due.

        A disk that is full does not end a run of one process: the next checkpoint is tried in time.
        """
        self.take_snapshot()
        if not self.world.any(self.world.is_first and self._checkpoint_is_due):
            return
        try:
            self._write_checkpoint()
        except OSError as error:
            if self.world.size > 1:
                raise
            self._last_save = time.perf_counter()
            self.log.message(
                f"warning: no checkpoint at {self.env_steps:,} steps ({error}); training continues"
            )

    @property
    def _checkpoint_is_due(self) -> bool:
        """Whether the clock or the number of iterations asks for a checkpoint."""
        every = self.config.checkpoint
        minutes, iterations = every.every_minutes, every.every_iterations
        if minutes is not None and time.perf_counter() - self._last_save >= 60 * minutes:
            return True
        is_whole = self.buffer.progress is None
        return is_whole and iterations is not None and self.iteration % iterations == 0

    def take_snapshot(self) -> None:
        """Copy the state, so that it can be saved if the next iteration is cut short."""
        progress = self.buffer.progress
        self._snapshot = Snapshot(
            _copied(self.state_dict()),
            self.env_steps,
            None if progress is None else progress.epoch,
            self._buffer_chunks(),
        )

    def finish(self) -> None:
        """Save the final state and the card; a run that was finished before stays as it is."""
        reached = min(self.env_steps, self._steps_on_card)
        if self.world.of_first(reached < self.config.budget):
            self.save()
            self.write_card()

    def save(self) -> None:
        """Save a checkpoint of the state as it is, and the agent's weights.

        Raises:
            ValueError: the weights are not finite. They would take the place of good ones.
            OSError: the disk is full, or takes nothing; what was saved before is still there.
        """
        self.take_snapshot()
        self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        """Write the last snapshot to the disk."""
        assert self._snapshot is not None
        state, env_steps, aux_epochs, chunks = self._snapshot
        weights = state["learner"]["agent"]
        right = [weights[name].isfinite().all() for name, _ in self.agent.named_parameters()]
        if not torch.stack(right).all():
            raise diverged(["the agent's weights"])
        self.world.require_same("their weights", lambda: {"SHA-256": digest_of_tensors(weights)})
        with self.world.together("writing the metrics"):
            self.log.flush()  # no checkpoint may be ahead of its rows
        save_checkpoint(
            self.files.checkpoint_folder,
            own_part(state, self.world) | {"config": self.config.to_json()},
            env_steps=env_steps,
            aux_epochs=aux_epochs,
            keep=self.config.checkpoint.keep,
            chunks=chunks,
            run=self._origin["run"],
            world=self.world,
        )
        with self.world.together("saving the weights"):
            if self.world.is_first:
                self.files.save_weights(weights, env_steps=env_steps)
        self._last_save = time.perf_counter()

    def write_card(self) -> None:
        """Write versions, commit, machine, seed and wall-clock time, as `card.json`."""
        system = {"system": platform.platform(), "processor": processor(), "cores": num_cores()}
        card = {
            **self._origin,
            "seed": self.config.seed,
            "own": [OWN_OBJECTS[name] for name in self._own if self._own[name] is not None],
            "env_steps": self.env_steps,
            "seconds": round(self.seconds, 1),
            "environment": self.envs.name,
            "exact_state": self.envs.exact_state,
            "processes": self.world.size,
            "device": str(self.compute.device),
            "plan": dataclasses.asdict(self.compute.plan),
            "machine": system,
            "versions": versions() | {"torch": torch.__version__},
            "commit": commit(),
        }
        self._steps_on_card = self.env_steps
        if self.world.is_first:
            self.files.write_card(card)

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive, except the phase buffer's tensors.

        Those are chunks of the checkpoint.
        """
        progress = self.buffer.progress
        auxiliary = progress and {
            "epoch": progress.epoch,
            "means": progress.means.state_dict(),
            "record": self.record,
            "seconds": {
                "auxiliary": progress.seconds,
                "rollout": self._rollout_seconds,
                "total": time.perf_counter() - self._iteration_started,
            },
        }
        return {
            "learner": self.learner.state_dict(),
            "action_generator": self.collector.generator.get_state(),
            "episodes": self.collector.episodes.state_dict(),
            "collector": self.collector.state_dict(),
            "envs_since": self.envs_since,
            "num_filled": self.buffer.num_filled,
            "auxiliary": auxiliary,
            "best_return": self._best_return,
            "env_steps": self.env_steps,
            "seconds": self.seconds,
            "log": self.log.state_dict(),
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        chunks: dict[str, dict[str, Tensor]],
        *,
        same_episodes: bool = False,
    ) -> None:
        """Take back `state_dict` and the chunks, but for the environments.

        With `same_episodes` these are where they were.
        """
        self.learner.load_state_dict(state["learner"])
        action_state, generator = state["action_generator"], self.collector.generator
        if len(action_state) == len(generator.get_state()):
            generator.set_state(action_state)
        else:  # of another kind of device
            generator.manual_seed(derive_seed(self.config.seed, "action", state["env_steps"]))
        self.collector.episodes.load_state_dict(state["episodes"], same_episodes=same_episodes)
        self.env_steps, self._seconds_before = state["env_steps"], state["seconds"]
        self._best_return = state["best_return"]
        if (auxiliary := state["auxiliary"]) is not None:
            old_dist_params = chunks[self._old_policy_name]["dist_params"]
            means = MeanAccumulator()
            device, seconds = self.compute.device, auxiliary["seconds"]
            means.load_state_dict(auxiliary["means"], device)
            self.buffer.progress = AuxiliaryProgress(
                old_dist_params.to(device), means, auxiliary["epoch"], seconds=seconds["auxiliary"]
            )
            self._rollout_seconds = seconds["rollout"]
            self._iteration_started = time.perf_counter() - seconds["total"]
            self.record = auxiliary["record"]
        for slot in range(state["num_filled"]):
            rollout, saved = self.buffer.next_rollout(), chunks[self._chunk_name(slot)]
            rollout.load(saved)

    def summary(self) -> dict[str, str]:
        """What the run did, for people: rows of a table."""
        parts = ("rollout", "policy", "value", "auxiliary", "evaluation")
        name, count_of = "charts/episodic_return_100", "charts/num_episodes"
        records = self.files.metrics(name, count_of, *(f"time/{part}" for part in parts))
        returns = [record[name] for record in records if record.get(name) is not None]
        seconds = {part: sum(row.get(f"time/{part}") or 0.0 for row in records) for part in parts}
        total = sum(seconds.values()) or 1.0
        split = [f"{part} {100 * value / total:.0f} %" for part, value in seconds.items() if value]
        rows = {
            "environment steps": f"{self.env_steps:,}",
            "wall-clock time": duration(self.seconds),
            "steps per second": f"{self.env_steps / self.seconds:,.0f}",
            "time split": ", ".join(split),
        }
        if returns:
            finished = list(accumulate(record[count_of] for record in records))
            full = [row[name] for row, n in zip(records, finished, strict=True) if n >= 100]
            if full:
                rows |= {"return after 100 episodes": f"{full[0]:.2f}"}
            rows |= {f"return, last {min(finished[-1], 100):.0f} episodes": f"{returns[-1]:.2f}"}
            if full:
                rows |= {"best mean of 100 episodes": f"{max(full):.2f}"}
        return rows

    def close(self) -> None:
        """Release environments, log files and the run directory, whichever of them fails."""
        with ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.close)
            stack.callback(self.log.close)
            stack.callback(self.envs.close)

    def __enter__(self) -> Self:
        """Use as a context: closed at its end, however it ends.

        Meanwhile signals end it in order (`host.signals`).
        """
        self._signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Close; if the run was cut short, save what its last whole iteration left.

        It says how the run can go on. What is raised has the folder as `run_directory`.
        """
        self._signals.hold()
        told = Preempted(str(error)) if isinstance(error, ToldToEnd) else error
        if told is not None and self.world.is_first:
            vars(told)["run_directory"] = self.directory
        self.world.forget_requests()
        try:
            if isinstance(error, DivergedError) and self.world.is_first:
                self._explain(error)
            if error is not None:
                if not isinstance(error, RankError):
                    self.world.tell_failure(error)
                self._save_on_exit()
        finally:
            with ExitStack() as last:  # each of them, also where a full disk refuses the last rows
                last.callback(self._signals.remove)
                last.callback(self.close)
        if told is not error and told is not None:
            raise told from None

    def _explain(self, error: DivergedError) -> None:
        """Name the first non-finite tensor in the error, and mark the run as diverged."""
        rollout = self.buffer.rollout(max(self.buffer.num_filled - 1, 0))
        tensors = {f"weights.{name}": each for name, each in self.agent.state_dict().items()}
        tensors |= {f"rollout.{name}": each for name, each in rollout.tensors().items()}
        bad = [name for name, each in tensors.items() if not each.isfinite().all()]
        error.add_note(f"first non-finite tensor: {bad[0] if bad else 'a loss or a gradient'}")
        with suppress(OSError):
            self.files.write_card(self.files.card | {"diverged": True})

    def _save_on_exit(self) -> None:
        """Save the last snapshot, and report how the run can be resumed."""
        try:
            if self.world.all_are_here():
                self._write_checkpoint()
        except (OSError, ValueError, RankError) as problem:
            self.log.message(f"warning: the last iteration could not be saved: {problem}")
        saved = self.files.checkpoints
        way = "it has no checkpoint yet"
        if saved:
            way = f"`phasicrl resume {self.directory}` goes on from {saved[-1].name}"
        self.log.message(f"{self.directory} was stopped after {self.env_steps:,} steps; {way}")

    def _buffer_chunks(self) -> Chunks:
        """The rollouts of the phase under way, one chunk each, and in its auxiliary phase π_old.

        They never change, so a checkpoint can link those of the one before. If targets are computed
        anew for an auxiliary phase, it has chunks of its own.
        """
        slots, rollout = range(self.buffer.num_filled), self.buffer.rollout
        chunks: Chunks = {self._chunk_name(slot): rollout(slot).tensors for slot in slots}
        if (progress := self.buffer.progress) is not None:
            dist_params = progress.old_dist_params
            chunks[self._old_policy_name] = lambda: {"dist_params": dist_params}
        return chunks

    @property
    def _old_policy_name(self) -> str:
        """Of the chunk that holds the distribution parameters before the auxiliary phase."""
        return f"{OLD_POLICY}-{self.learner.phase:06d}"

    def _chunk_name(self, slot: int) -> str:
        """A name that no other rollout of this run has, nor this one with other targets."""
        aux, auxiliary_began = self.config.aux, self.buffer.progress is not None
        renewed = auxiliary_began and aux.recompute_targets
        return f"rollout-{self.learner.phase:06d}-{slot:03d}{'-renewed' * renewed}"
