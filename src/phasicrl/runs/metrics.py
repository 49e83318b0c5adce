"""Log of metrics: metrics.jsonl, TensorBoard, W&B, console. Kind: effects.

There is one record per iteration, with the same names everywhere. Metrics are means over the data
that they describe, weighted by samples.
"""

import csv
import dataclasses
import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from phasicrl.config import Config
from phasicrl.runs.console import Display, Values
from phasicrl.runs.directory import EPOCHS_FILE, METRICS_FILE
from phasicrl.system.machine import import_optional

METRICS: dict[str, str] = {
    "charts/episodic_return": "Mean undiscounted return of finished episodes (reward units).",
    "charts/episodic_return_100": "Mean of the last 100 returns, at first of fewer (reward units).",
    "charts/episodic_length": "Mean length of finished episodes (environment steps).",
    "charts/env_restarts": "Environments that were recreated after a failure (count).",
    "charts/num_episodes": "Episodes that finished in the iteration (count).",
    "charts/SPS": "Environment steps per second of the iteration, training included (1/s).",
    "charts/learned_fraction": "Fraction of steps to train on, if some are left out (0 to 1).",
    "charts/learning_rate": "Step size of the policy phase in the iteration (no unit).",
    "charts/value_learning_rate": "Step size of the value network, where it has its own (no unit).",
    "charts/clip": "Clip range ε in the iteration, where it has a schedule (no unit).",
    "charts/entropy_coef": "Weight of the entropy bonus, where it has a schedule (no unit).",
    "losses/policy_loss": "Negative surrogate without the entropy bonus (units of advantages).",
    "losses/value_loss": "Half the squared error of values (units of value heads, squared).",
    "losses/entropy": "Entropy of the policy (nats).",
    "losses/old_approx_kl": "KL of the new from the rollout policy, k1: mean of −log ratio (nats).",
    "losses/approx_kl": "KL of the new from the rollout policy, k3: ratio − 1 − log ratio (nats).",
    "losses/epoch_kl": "KL from the rollout policy after the last epoch, if needed (nats).",
    "losses/kl_penalty": "Weight of the penalty on the divergence, where it is adapted (no unit).",
    "losses/action_std": "Mean deviation of continuous actions (units before a squash).",
    "losses/clipfrac": "Fraction of samples whose ratio is outside the clip range (0 to 1).",
    "losses/explained_variance": "Explained share of the targets' variance (null if negligible).",
    "losses/aux/kl_loss": "Auxiliary phase: KL from the policy before the phase (nats).",
    "losses/aux/aux_value_loss": "`losses/value_loss` of the auxiliary head (same units).",
    "losses/aux/real_value_loss": "Auxiliary phase: `losses/value_loss` (same units).",
    "gradients/policy_norm": "Global norm of the gradient in policy steps, unclipped (no unit).",
    "gradients/value_norm": "Global norm of the gradient in value steps, unclipped (no unit).",
    "gradients/aux_norm": "Auxiliary phase: global norm of the gradient, unclipped (no unit).",
    "time/rollout": "Time of the iteration spent on stepping environments and acting (seconds).",
    "time/policy": "Time of the iteration spent on epochs with the policy loss (seconds).",
    "time/value": "Time of the iteration spent on epochs with the value loss alone (seconds).",
    "time/auxiliary": "Time of the iteration spent on the auxiliary phase (seconds).",
    "time/evaluation": "Time of the evaluation after the iteration (seconds).",
    "time/total": "Time of the iteration, before evaluation and callbacks (seconds).",
    "procgen/level_complete": "Procgen: fraction of episodes with a complete level (0 to 1).",
    "procgen/num_levels_seen": "Procgen: distinct levels begun since the start of the run (count).",
    "rewards/scale": "Standard deviation by which rewards are divided (reward units).",
    "rewards/clipped_fraction": "Fraction of the normalized rewards that were clipped (0 to 1).",
    "observations/clipped_fraction": "Fraction of observed numbers that were clipped (0 to 1).",
    "network/dormant_fraction": "Fraction of features below 0.025 times the mean size (0 to 1).",
    "evaluation/return": "Mean return of the episodes that are not trained on (reward units).",
    "evaluation/length": "Mean length of these episodes (environment steps).",
    "evaluation/train_return": "Mean return on training levels of Procgen (reward units).",
    "evaluation/gap": "`evaluation/train_return` minus `evaluation/return` (reward units).",
    "evaluation/best_return": "The best `evaluation/return` of the run so far (reward units).",
}
"""Meaning and unit of every metric, by name."""
_STEP_SERIES = ("reward", "return", "entropy", "std_", "mean_", "action_")
"""Prefixes of the columns of a table of steps that are written as time series."""


class MetricsLog:
    """Log of a run's metrics to its files, TensorBoard, Weights & Biases and the console.

    Args:
        run_dir: run directory; None logs nothing, as in all processes but rank 0.
        config: options of the run.
        saved: `state_dict` of the checkpoint to resume from; later rows are cut off.

    Raises:
        FileExistsError: the directory holds metrics of another run.
        ModuleNotFoundError: `log.wandb` is on, and Weights & Biases is not installed.
    """

    def __init__(
        self, run_dir: Path | None, config: Config, saved: dict[str, Any] | None = None
    ) -> None:
        self._state = {"env_steps": 0, "seconds": 0.0, "bytes": {}} | (saved or {})
        self._earlier_seconds: float = self._state["seconds"]
        self._files: dict[str, _RowFile] = {}
        self._sinks: list[_TensorBoard | _WandB] = []
        stream = None if run_dir is None else sys.stdout
        self._display = Display(config, self._state["env_steps"], stream)
        with ExitStack() as undo:
            undo.callback(self._call_display, lambda display: display.close())
            if run_dir is not None:
                for name in (METRICS_FILE, EPOCHS_FILE)[: 1 + config.log.epochs]:
                    size = None if saved is None else saved["bytes"].get(name, 0)
                    self._files[name] = undo.enter_context(closing(_RowFile(run_dir / name, size)))
                undo.callback(self._call_sinks, lambda sink: sink.close())
                if config.log.wandb:
                    self._sinks.append(_WandB(run_dir, config))
                if config.log.tensorboard:
                    self._sinks.append(_TensorBoard(run_dir, self._state["env_steps"] + 1))
            self._resources = undo.pop_all()
        # The clock starts last: opening the sinks takes seconds.
        self._started = monotonic()

    def show_stage(self, stage: str) -> None:
        """Show the stage of the iteration, such as `rollout` or `auxiliary 2/6`."""
        self._call_display(lambda display: display.show_stage(stage))

    def write(self, record: Values, *, env_steps: int, iteration: int, phase: int) -> None:
        """Write the metrics of one iteration to every sink.

        Raises:
            ValueError: the run directory was removed.
        """
        self._state["env_steps"] = env_steps
        head = {"env_steps": env_steps, "iteration": iteration, "phase": phase}
        values = self.append(METRICS_FILE, head, record)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._call_sinks(lambda sink: sink.write(finite, env_steps))
        self._call_display(lambda display: display.show_metrics(values, env_steps))

    def append(self, name: str, head: dict[str, Any], record: Values) -> Values:
        """Append a row to a file, with null for NaN and infinity; return the values in order.

        Args:
            name: name of the file, `metrics.jsonl` or `epochs.jsonl`.
            head: first fields of the row.
            record: metrics.
        """
        values = {name: float(record[name]) for name in {**METRICS, **record} if name in record}
        if (file := self._files.get(name)) is not None:
            seconds = round(self._earlier_seconds + monotonic() - self._started, 3)
            self._state["seconds"] = seconds
            finite = {metric: x if math.isfinite(x) else None for metric, x in values.items()}
            try:
                file.write(json.dumps(head | {"wall_time": seconds} | finite).encode() + b"\n")
            except OSError as error:
                self.show_message(f"warning: {name} cannot be written yet ({error})")
        return values

    def write_step_table_to_tensorboard(self, steps: Path, *, env_steps: int) -> None:
        """Write every step of an episode to TensorBoard, as a run within this one.

        Args:
            steps: CSV table of the steps, with a column `step`.
            env_steps: environment steps of the run so far.
        """
        self._call_sinks(lambda s: isinstance(s, _TensorBoard) and s.add_table(steps, env_steps))

    def _call_sinks(self, function: "Callable[[_TensorBoard | _WandB], object]") -> None:
        """Call a function with each sink, and switch off a failed sink."""
        for sink in [*self._sinks]:
            try:
                function(sink)
            except Exception as error:  # of any type; logging must not end a run
                self._sinks.remove(sink)
                self.show_message(f"warning: {sink.name} is switched off, it failed: {error!r}")

    def show_message(self, text: str) -> None:
        """Print a line of text on the console, above the progress bar if there is one."""
        self._call_display(lambda display: display.show_message(text))

    def _call_display(self, function: Callable[[Display], None]) -> None:
        """Call a function with the display, and silence a display whose stream is closed.

        The exception of a signal that the display's error has replaced is raised again.
        """
        outer = sys.exception()
        try:
            function(self._display)
        except (OSError, ValueError, SystemExit) as error:  # rich exits on a broken pipe
            self._display.silence()
            cause = error.__context__
            while cause is not None and cause is not outer:
                if not isinstance(cause, Exception | SystemExit):
                    raise cause from None
                cause = cause.__context__

    def flush(self) -> None:
        """Write all rows to the disk.

        Raises:
            OSError: the disk is full.
            ValueError: the run directory was removed.
        """
        for file in self._files.values():
            file.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the log to save: environment steps, seconds, size of each file."""
        sizes = {name: file.size for name, file in self._files.items()}
        return self._state | {"bytes": self._state["bytes"] | sizes}

    def close(self) -> None:
        """Close files, writers and display; further calls do nothing.

        Raises:
            OSError: the last rows cannot be written.
        """
        self._resources.close()


class _RowFile:
    """File to append rows to; rows that do not fit on a full disk wait for the next write.

    Args:
        path: path of the file.
        size: size at the checkpoint, to which the file is truncated; None for a new run.

    Attributes:
        size: size of all rows in bytes, including waiting ones.
    """

    def __init__(self, path: Path, size: int | None) -> None:
        self._path, self._waiting = path, b""
        self._file = path.open("xb" if size is None else "ab", buffering=0)
        self.size = path.read_bytes()[:size].rfind(b"\n") + 1  # a copy may end within a row
        if self.size < path.stat().st_size:
            self._file.truncate(self.size)

    def write(self, row: bytes) -> None:
        """Append a row, without a buffer in this process.

        Raises:
            OSError: the disk is full; the row is written with the next one.
            ValueError: the run directory was removed.
        """
        if not self._path.exists():
            text = f"the run directory {self._path.parent} was removed, moved or unmounted"
            raise ValueError(f"{text}; expected one that stays. Restore it and resume the run")
        self._waiting += row
        self.size += len(row)
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def flush(self) -> None:
        """Write waiting rows, and wait until all rows are on the disk.

        Raises:
            OSError: the disk is full.
            ValueError: the run directory was removed.
        """
        if not self._file.closed:  # a run that has ended may be saved again
            try:
                self.write(b"")
                os.fsync(self._file.fileno())
            except OSError as error:
                error.filename = self._file.name
                raise

    def close(self) -> None:
        """Flush and close the file."""
        with self._file, suppress(ValueError):  # the run directory was removed
            self.flush()


class _TensorBoard:
    """Writer of TensorBoard events into a directory.

    Args:
        folder: directory.
        first_step: step from which on TensorBoard hides the events of earlier processes.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
        from torch.utils.tensorboard.writer import SummaryWriter

        self._summary, self._folder = Summary, folder
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, values: Values, step: int) -> None:
        """Write one TensorBoard event with all values, ten times faster than with `add_scalar`."""
        scalar = self._summary.Value
        scalars = [scalar(tag=name, simple_value=value) for name, value in values.items()]
        self._writer._get_file_writer().add_summary(self._summary(value=scalars), step)

    def add_table(self, steps_file: Path, env_steps: int) -> None:
        """Write a CSV table of an episode's steps as time series, in a folder of the episode.

        TensorBoard shows the folder as a run; an earlier one is replaced.
        """
        folder = self._folder / "episodes" / f"{env_steps:012d}"
        shutil.rmtree(folder, ignore_errors=True)
        with closing(_TensorBoard(folder, 1)) as writer, steps_file.open(newline="") as file:
            for row in csv.DictReader(file):
                series = {f"episode/{x}": float(row[x]) for x in row if x.startswith(_STEP_SERIES)}
                writer.write(series, int(row["step"]))

    def close(self) -> None:
        """Write remaining events, and close the file."""
        self._writer.close()


class _WandB:
    """Writer to Weights & Biases; a resumed run continues with the id in its directory."""

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, config: Config) -> None:
        wandb = import_optional("wandb", "log.wandb needs Weights & Biases", "wandb")
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "phasicrl"), group=config.name,
            id=id_file.read_text(encoding="utf-8").strip(), resume="allow", name=run_dir.name,
            config=dataclasses.asdict(config), dir=str(run_dir),
        )  # fmt: skip
        # W&B's steps cannot go back as those of a resumed run do, but a metric's steps can.
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, values: Values, env_steps: int) -> None:
        """Send the metrics of an iteration to Weights & Biases."""
        self._run.log({"env_steps": env_steps, **values})

    def close(self) -> None:
        """Send remaining rows, and end the run at Weights & Biases."""
        self._run.finish()
