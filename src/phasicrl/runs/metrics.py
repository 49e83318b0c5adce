"""One record per iteration → metrics.jsonl, TensorBoard, W&B, console. Kind: effects.

The table of metric names is data. Means are over the data that they describe, weighted by samples,
never the last minibatch. Every sink has the same names.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any

from phasicrl.config import Config
from phasicrl.config_io import nearest_name
from phasicrl.host.machine import optional_module
from phasicrl.runs.console import Display, Values, open_display, silence
from phasicrl.runs.directory import EPOCHS_FILE, METRICS_FILE, read_row

METRICS: dict[str, str] = {
    "charts/episodic_return": "Mean undiscounted return of finished episodes (reward units).",
    "charts/episodic_return_100": "Mean return of the last 100 finished episodes (reward units).",
    "charts/episodic_length": "Mean length of finished episodes (environment steps).",
    "charts/env_restarts": "Environments that were made anew after a fault (count).",
    "charts/num_episodes": "Episodes that finished in the iteration (count).",
    "charts/SPS": "Environment steps per second of the iteration, training included (1/s).",
    "charts/learned_fraction": (
        "Share of the steps that were learned from, where `ppo.collect_by` is episodes (0 to 1)."
    ),
    "charts/learning_rate": "Step size of the policy phase in the iteration (no unit).",
    "charts/value_learning_rate": "Step size of the value network, where it has its own (no unit).",
    "losses/policy_loss": (
        "Negative surrogate of `ppo.objective`, clipped by `ppo.clip`, without the entropy bonus "
        "(units of the advantages, normalized as `ppo.advantage_norm` says)."
    ),
    "losses/value_loss": (
        "Half the squared error of the value network against its targets (squared reward units; "
        "of the targets' variance, if they are normalized)."
    ),
    "losses/entropy": "Entropy of the policy (nats).",
    "losses/old_approx_kl": "KL of the new from the rollout policy, k1: mean of −log ratio (nats).",
    "losses/approx_kl": "The same by estimator k3: mean of ratio − 1 − log ratio (nats).",
    "losses/epoch_kl": (
        "The same (by `ppo.epoch_kl`), measured after the last policy epoch of the iteration, "
        "where something is steered by it (nats)."
    ),
    "losses/kl_penalty": "Weight of the penalty on the divergence, where it is adapted (no unit).",
    "losses/action_std": (
        "Mean standard deviation of the normal distributions that continuous actions are drawn "
        "from (units before `action.squash` and `action.rescale`)."
    ),
    "losses/clipfrac": "Fraction of samples whose ratio is outside the clip range (0 to 1).",
    "losses/explained_variance": (
        "Share of the value targets' variance that the rollout's values explain "
        "(at most 1; 0 is a constant)."
    ),
    "losses/aux/kl_loss": "Auxiliary phase: KL from the policy before the phase (nats).",
    "losses/aux/aux_value_loss": (
        "Auxiliary phase: half the squared error of the policy network's value head "
        "(units of `losses/value_loss`)."
    ),
    "losses/aux/real_value_loss": (
        "Auxiliary phase: half the squared error of the value network (units of "
        "`losses/value_loss`)."
    ),
    "gradients/policy_norm": "Global norm of the gradient in policy passes, unclipped (no unit).",
    "gradients/value_norm": "Global norm of the gradient in value passes, unclipped (no unit).",
    "gradients/aux_norm": "Auxiliary phase: global norm of the gradient, unclipped (no unit).",
    "time/rollout": "Time of the iteration spent on stepping environments and acting (seconds).",
    "time/policy": "Time of the iteration spent on passes with the policy loss (seconds).",
    "time/value": "Time of the iteration spent on passes with the value loss alone (seconds).",
    "time/auxiliary": "Time of the iteration spent on the auxiliary phase (seconds).",
    "time/evaluation": "Time of the evaluation after the iteration (seconds).",
    "time/total": "Time of the whole iteration (seconds).",
    "procgen/level_complete": "Procgen: share of finished episodes with a complete level (0 to 1).",
    "procgen/num_levels_seen": "Procgen: distinct levels begun since the start of the run (count).",
    "rewards/scale": "Standard deviation by which rewards are divided (reward units).",
    "rewards/clipped_fraction": "Fraction of the normalized rewards that were clipped (0 to 1).",
    "observations/clipped_fraction": (
        "Fraction of the normalized observed numbers that were clipped, about 30 times in a run "
        "(0 to 1)."
    ),
    "network/dormant_fraction": (
        "Share of the policy network's features whose mean size is at most 0.025 of the mean "
        "feature's, about 30 times in a run (0 to 1)."
    ),
    "evaluation/return": "Mean return of the episodes that are not trained on (reward units).",
    "evaluation/length": "Mean length of these episodes (environment steps).",
    "evaluation/train_return": (
        "With `evaluation.levels both`: the same on the levels of the training (reward units)."
    ),
    "evaluation/gap": "`evaluation/train_return` minus `evaluation/return` (reward units).",
    "evaluation/best_return": "The best `evaluation/return` of the run so far (reward units).",
}
"""Every metric: its name, and what it means with its unit."""

_FSYNC_SECONDS = 10.0


class MetricsLog:
    """Where a run's numbers go.

    Use it as a context manager: the display leaves the terminal as it found it.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        *,
        resumed_at: int | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        """Open the files of `run_dir` and the display.

        Args:
            run_dir: folder of the run; made if it is not there.
            config: the run's settings; `config.log` says where the numbers go.
            resumed_at: environment steps of the checkpoint that the run goes on from. Later rows
                are cut off, so that none appears twice.
            kept: `state_dict` of the log when that checkpoint was made.

        Raises:
            FileExistsError: the folder holds metrics of an earlier run, and this one does not
                resume it.
            ModuleNotFoundError: `log.wandb` is on and Weights & Biases is not installed.
        """
        self._sinks: list[_TensorBoard | _WandB] = []
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file, notices = _Rows.open(run_dir / METRICS_FILE, resumed_at, kept)
        self._earlier_seconds = self._file.seconds
        self._epochs: _Rows | None = None
        try:
            if config.log.epochs:
                of_epochs = (kept or {}).get("epochs")
                self._epochs, more = _Rows.open(run_dir / EPOCHS_FILE, resumed_at, of_epochs)
                notices += more
            notices += self._open_sinks(run_dir, config, resumed_at)
        except BaseException:
            for file in self._files:
                file.close()
            raise
        # The clocks start last: opening the sinks takes seconds that say nothing about the speed of
        # the run.
        self._started = self._synced = monotonic()
        self._display = open_display(config, resumed_at or 0, sys.stdout)
        for notice in notices:
            self.message(notice)

    @property
    def _files(self) -> list[_Rows]:
        """The files of rows."""
        return [self._file] if self._epochs is None else [self._file, self._epochs]

    def _open_sinks(self, run_dir: Path, config: Config, resumed_at: int | None) -> list[str]:
        """Open what the settings ask for; returns what the user must be told."""
        if config.log.wandb:
            self._sinks.append(_WandB(run_dir, config))
        if config.log.tensorboard:
            try:
                self._sinks.append(_TensorBoard(run_dir, resumed_at))
            except ImportError:
                remedy = "pip install 'phasicrl[tensorboard]', or switch log.tensorboard off"
                return [f"no TensorBoard events, it is not installed: {remedy}"]
        return []

    def progress(self, stage: str, *, env_steps: int) -> None:
        """Tell the display where the run is: `rollout`, `policy`, `auxiliary 2/6`.

        Nearly free; call it as often as you like.
        """
        self._show(lambda display: display.progress(stage, env_steps))

    def write(self, record: Values, *, env_steps: int, iteration: int, phase: int) -> None:
        """Write the metrics of one iteration to every sink. NaN and infinity are written as null.

        Raises:
            ValueError: a name that is not in `METRICS`.
        """
        values = _checked(record)
        head = {"env_steps": int(env_steps), "iteration": int(iteration), "phase": int(phase)}
        self._append(self._file, head, values)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._tell(lambda sink: sink.write(finite, env_steps))
        self._show(lambda display: display.record(values, env_steps))

    def epoch(
        self, record: Values, *, env_steps: int, iteration: int, kind: str, epoch: int
    ) -> None:
        """Write the metrics of one epoch, where `log.epochs` asks for them.

        Args:
            record: means over the epoch.
            env_steps: of the run so far.
            iteration: that the epoch belongs to.
            kind: policy (and value, where they are joint), value, or aux.
            epoch: its number in the policy phase or the auxiliary phase, from 1.
        """
        if self._epochs is not None:
            head = {"env_steps": env_steps, "iteration": iteration, "kind": kind, "epoch": epoch}
            self._append(self._epochs, head, _checked(record))

    def _append(self, file: _Rows, head: dict[str, Any], values: Values) -> None:
        """Write a row; NaN and infinity as null."""
        seconds = round(self._earlier_seconds + monotonic() - self._started, 3)
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            row = head | {"wall_time": seconds} | known
            file.write(json.dumps(row, allow_nan=False), seconds)
            if monotonic() - self._synced > _FSYNC_SECONDS:
                self.flush()
        except OSError as error:
            self._synced = monotonic()
            name = METRICS_FILE if file is self._file else EPOCHS_FILE
            self.message(f"warning: {name} cannot be written ({error}); rows wait for that")

    def episode(self, steps: Path, *, env_steps: int) -> None:
        """Draw every step of an episode in TensorBoard, as a run of its own inside this one.

        Args:
            steps: the table, CSV with a column `step` (`session.step_table`).
            env_steps: of the run, when the episode was played.
        """
        self._tell(lambda sink: isinstance(sink, _TensorBoard) and sink.episode(steps, env_steps))

    def _tell(self, what: Callable[[_TensorBoard | _WandB], object]) -> None:
        """Tell every sink; one that fails is switched off."""
        for sink in [*self._sinks]:
            try:
                what(sink)
            except Exception as error:  # whatever it is, it is no reason to lose the run
                self._sinks.remove(sink)
                self.message(f"warning: {sink.name} is switched off, it failed: {error!r}")

    def message(self, text: str) -> None:
        """Show a line of text, above the live display if there is one."""
        self._show(lambda display: display.message(text))

    def _show(self, what: Callable[[Display], None]) -> None:
        """Show something; where nobody reads it (`| head -1`), the run goes on silently."""
        try:
            what(self._display)
        except (OSError, SystemExit):  # rich makes the second of a broken pipe
            self._display = silence(sys.stdout)

    def flush(self) -> None:
        """Put the rows on the disk.

        Call it before a checkpoint, so that no crash leaves one that is ahead of its rows.
        """
        if not self._file.closed:
            for file in self._files:
                file.flush()
            self._synced = monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Length and digest of the files of rows: a resumed run sees what was changed."""
        epochs = {} if self._epochs is None else {"epochs": self._epochs.state_dict()}
        return self._file.state_dict() | epochs

    def close(self) -> None:
        """Close everything; calling it again does nothing.

        Raises:
            OSError: the last rows cannot be written.
        """
        if not self._file.closed:
            with ExitStack() as stack:
                for sink in self._sinks:
                    stack.callback(sink.close)
                for file in self._files:
                    stack.callback(file.close)
                stack.callback(self.flush)
                stack.callback(self._show, lambda display: display.close())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(record: Values) -> Values:
    """The metrics in the order of their table.

    Raises:
        ValueError: a name that is not in `METRICS`.
    """
    if unknown := record.keys() - METRICS.keys():
        name = min(unknown)
        raise ValueError(
            f"metric {name!r} has no description{nearest_name(name, METRICS)}; "
            "add it to METRICS in metrics.py"
        )
    return {name: float(record[name]) for name in METRICS if name in record}


class NoLog:
    """The log of a process whose numbers another one of the run writes down."""

    def progress(self, stage: str, *, env_steps: int) -> None:
        """See `MetricsLog`."""

    def write(self, record: Values, *, env_steps: int, iteration: int, phase: int) -> None:
        """See `MetricsLog`."""

    def epoch(
        self, record: Values, *, env_steps: int, iteration: int, kind: str, epoch: int
    ) -> None:
        """See `MetricsLog`."""

    def episode(self, steps: Path, *, env_steps: int) -> None:
        """See `MetricsLog`."""

    def message(self, text: str) -> None:
        """See `MetricsLog`."""

    def flush(self) -> None:
        """See `MetricsLog`."""

    def state_dict(self) -> dict[str, Any]:
        """See `MetricsLog`."""
        return {}

    def close(self) -> None:
        """See `MetricsLog`."""


class _Rows:
    """The file of rows: appended to, with a digest of all of it. What a full disk refuses waits."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._digest = hashlib.sha256()
        self._bytes = 0
        self.seconds = 0.0
        """Wall-clock time of the run at the last row."""

    @classmethod
    def open(
        cls, path: Path, resumed_at: int | None, kept: dict[str, Any] | None
    ) -> tuple[_Rows, list[str]]:
        """Open the file; a resumed run's is cut to the rows up to its checkpoint.

        Returns:
            The rows, and what the user must be told: the file is not what it was when the
            checkpoint was made.
        """
        if resumed_at is None:
            if path.exists() and path.stat().st_size > 0:
                raise FileExistsError(
                    f"{path} holds the metrics of an earlier run; "
                    "resume that run, or give this one a folder of its own"
                )
            return cls(path), []
        rows = cls(path)
        if kept is not None and rows._take_back(path, kept):
            return rows, []
        rows.close()
        rows, remark = cls._sorted_out(path, resumed_at)
        return rows, [remark] if kept is not None else []

    def _take_back(self, path: Path, kept: dict[str, Any]) -> bool:
        """Cut the file to the length that was kept; False if its digest is another then."""
        digest, left = hashlib.sha256(), kept["bytes"]
        with path.open("rb") as file:
            while left and (part := file.read(min(left, 2**20))):
                digest.update(part)
                left -= len(part)
        if left or digest.hexdigest() != kept["sha256"]:
            return False
        if path.stat().st_size > kept["bytes"]:
            os.truncate(path, kept["bytes"])
        self._digest = digest
        self._bytes, self.seconds = kept["bytes"], kept["seconds"]
        self.flush()
        return True

    @classmethod
    def _sorted_out(cls, path: Path, resumed_at: int) -> tuple[_Rows, str]:
        """Keep the lines that can be read as rows up to the checkpoint."""
        shorter = path.with_name(path.name + ".tmp")
        shorter.unlink(missing_ok=True)
        rows, good, damaged = cls(shorter), 0, 0
        with path.open(encoding="utf-8", errors="replace") as lines:  # a gigabyte, perhaps
            for line in lines:
                row = read_row(line)
                damaged += row is None
                if row is not None and row["env_steps"] <= resumed_at:
                    rows.write(line.rstrip("\n"), float(row.get("wall_time", 0.0)))
                    good += 1
        rows.flush()
        shorter.replace(path)
        return rows, (
            f"warning: {path} is not what it was when the checkpoint was made; "
            f"{good} rows are kept as they are, {damaged} damaged lines are left out"
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._file.closed

    def write(self, line: str, seconds: float) -> None:
        """Append a row: the end of this process does not lose it.

        Raises:
            OSError: the disk is full, or takes nothing; the row is tried again with the next.
        """
        data = f"{line}\n".encode()
        self._digest.update(data)
        self._bytes += len(data)
        self.seconds = seconds
        self._waiting += data
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def flush(self) -> None:
        """Wait until the rows are on the disk.

        Raises:
            OSError: the disk is full, or takes nothing.
        """
        try:
            self._write_waiting()
            os.fsync(self._file.fileno())
        except OSError as error:
            error.filename = self._file.name
            raise

    def state_dict(self) -> dict[str, Any]:
        """Length, digest and seconds, as they are."""
        digest = self._digest.hexdigest()
        return {"bytes": self._bytes, "sha256": digest, "seconds": self.seconds}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _TensorBoard:
    """TensorBoard events in the run directory."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, resumed_at: int | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
        from torch.utils.tensorboard.writer import SummaryWriter

        self._summary, self._directory = Summary, run_dir
        # TensorBoard hides events from `purge_step` on that an earlier process wrote.
        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(run_dir), purge_step=purge_step)

    def write(self, values: Values, env_steps: int) -> None:
        """One event with all metrics: a tenth of the time of an `add_scalar` for each."""
        self._write(self._writer, values, env_steps)

    def episode(self, steps: Path, env_steps: int) -> None:
        """Series over the steps of an episode, in a folder of its own; a resumed run's replaces it.

        TensorBoard shows the folder as a run beside the others, so that evaluations lie over each
        other.
        """
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = self._directory / "episodes" / f"{env_steps:012d}"
        shutil.rmtree(folder, ignore_errors=True)
        with closing(SummaryWriter(str(folder))) as writer, steps.open(newline="") as file:
            for row in csv.DictReader(file):
                named = {f"episode/{name}": float(row[name]) for name in row if _is_series(name)}
                self._write(writer, named, int(row["step"]))

    def _write(self, writer: Any, values: Values, step: int) -> None:
        """One event."""
        scalar = self._summary.Value
        scalars = [scalar(tag=name, simple_value=value) for name, value in values.items()]
        writer._get_file_writer().add_summary(self._summary(value=scalars), step)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()


def _is_series(column: str) -> bool:
    """Whether a column of a table of steps is drawn over them."""
    named = ("reward", "return", "entropy")
    return column in named or column.startswith(("std_", "mean_", "action_"))


class _WandB:
    """Weights & Biases.

    The id of the run is kept in the run directory, so that a resumed run goes on in the same place.
    """

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, config: Config) -> None:
        wandb = optional_module("wandb", "log.wandb needs Weights & Biases", "track")
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
        self._run: Any = wandb.init(
            project=config.log.wandb_project,
            entity=config.log.wandb_entity,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            name=run_dir.name,
            group=config.name,
            config=dataclasses.asdict(config),
            dir=str(run_dir),
        )
        # W&B refuses steps that go back, which a resumed run's do; with an axis of its own it takes
        # them.
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, values: Values, env_steps: int) -> None:
        """One row with all metrics."""
        self._run.log({"env_steps": env_steps, **values})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
