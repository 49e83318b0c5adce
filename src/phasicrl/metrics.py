"""One record per iteration → metrics.jsonl, TensorBoard, W&B, console; the table of metric names is data. Kind: effects.

Means are over the data that they describe, weighted by samples, never the last minibatch. Every sink has the same names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol, TextIO, TypeAlias

import torch
from torch import Tensor

from phasicrl.config import Config, nearest_name

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

METRICS: dict[str, str] = {
    "charts/episodic_return": "Mean undiscounted return of all episodes that finished in the iteration (reward units).",
    "charts/episodic_return_100": "Mean undiscounted return of the last 100 finished episodes (reward units).",
    "charts/episodic_length": "Mean length of all episodes that finished in the iteration (environment steps).",
    "charts/num_episodes": "Episodes that finished in the iteration (count).",
    "charts/SPS": "Environment steps per second of the iteration, training included (1/s).",
    "charts/learning_rate": "Step size of the policy phase in the iteration (no unit).",
    "losses/policy_loss": "Policy loss: the negative clipped surrogate, without the entropy bonus (units of the normalised advantage).",
    "losses/value_loss": "Half the squared error of the value network against its targets (squared reward units).",
    "losses/entropy": "Entropy of the policy (nats).",
    "losses/old_approx_kl": "KL divergence of the new from the rollout's policy, estimator k1: mean of −log ratio (nats).",
    "losses/approx_kl": "KL divergence of the new from the rollout's policy, estimator k3: mean of ratio − 1 − log ratio (nats).",
    "losses/clipfrac": "Fraction of samples whose probability ratio lies outside the clip range (0 to 1).",
    "losses/explained_variance": "Share of the value targets' variance that the rollout's values explain (at most 1; 0 is a constant).",
    "losses/aux/kl_loss": "Auxiliary phase: KL divergence from the policy before the phase (nats).",
    "losses/aux/aux_value_loss": "Auxiliary phase: half the squared error of the policy network's value head (squared reward units).",
    "losses/aux/real_value_loss": "Auxiliary phase: half the squared error of the value network (squared reward units).",
    "gradients/policy_norm": "Global norm of the gradient in policy passes, before clipping (no unit).",
    "gradients/value_norm": "Global norm of the gradient in value passes, before clipping (no unit).",
    "gradients/aux_norm": "Auxiliary phase: global norm of the gradient, before clipping (no unit).",
    "time/rollout": "Time of the iteration spent on stepping environments and acting (seconds).",
    "time/policy": "Time of the iteration spent on passes with the policy loss (seconds).",
    "time/value": "Time of the iteration spent on passes with the value loss alone (seconds).",
    "time/auxiliary": "Time of the iteration spent on the auxiliary phase (seconds).",
    "time/total": "Time of the whole iteration (seconds).",
    "procgen/level_complete": "Procgen: fraction of the episodes finished in the iteration that completed their level (0 to 1).",
    "procgen/num_levels_seen": "Procgen: distinct levels begun since the start of the run (count).",
    "rewards/scale": "Standard deviation by which rewards are divided (reward units).",
    "rewards/clipped_fraction": "Fraction of the iteration's normalised rewards that were clipped (0 to 1).",
}
"""Every metric: its name, and what it means with its unit."""

METRICS_FILE = "metrics.jsonl"

_REFRESH_SECONDS = 0.25  # of the live display
_LINE_SECONDS = 2.0  # between two plain lines
_RECENT_SECONDS = 30.0  # steps per second are measured over this long, or over one iteration if that is longer
_FSYNC_SECONDS = 10.0
_WIDE, _WIDEST = 80, 100  # columns: below the first the display takes more lines, beyond the second it does not grow

Values: TypeAlias = Mapping[str, float]


class MeanAccumulator:
    """Means weighted by samples. Tensors are added up on their device and read once, at the end."""

    def __init__(self) -> None:
        """Begin with nothing added."""
        self._tensor_sums: dict[tuple[str, ...], Tensor] = {}
        self._tensor_weights: dict[tuple[str, ...], float] = {}
        self._float_sums: dict[str, tuple[float, float]] = {}

    def add(self, values: Mapping[str, Tensor | float], weight: float) -> None:
        """Add means over `weight` samples. Tensors are copied at once: they may be overwritten afterwards (CUDA graphs)."""
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        for name, value in values.items():
            if name not in tensors:
                total, weights = self._float_sums.get(name, (0.0, 0.0))
                self._float_sums[name] = (total + float(value) * weight, weights + weight)
        if tensors:
            self._add_tensors(tensors, weight)

    def _add_tensors(self, tensors: dict[str, Tensor], weight: float) -> None:
        """Two kernels, however many names: one copies, one adds."""
        names = tuple(tensors)
        with torch.inference_mode():
            stacked = torch.stack(list(tensors.values()))
            assert stacked.ndim == 1, f"metrics are 0-d tensors; {names} have the shape {tuple(stacked.shape[1:])}"
            if names not in self._tensor_sums:
                self._tensor_sums[names] = torch.zeros_like(stacked, dtype=torch.float64)
                self._tensor_weights[names] = 0.0
            self._tensor_sums[names].add_(stacked, alpha=weight)
        self._tensor_weights[names] += weight

    def result(self, all_reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """The mean of every name that was added, in alphabetical order; NaN where all weights are zero.

        Args:
            all_reduce: returns the sum over ranks of a float64 vector on the CPU; all ranks must have added the same names.
        """
        sums = dict(self._float_sums)
        for names, tensor in self._tensor_sums.items():
            for name, total in zip(names, tensor.tolist(), strict=True):
                before, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (before + total, weights + self._tensor_weights[names])
        ordered = sorted(sums)
        if all_reduce is not None and ordered:
            table = torch.tensor([sums[name] for name in ordered], dtype=torch.float64)
            sums = dict(zip(ordered, all_reduce(table.flatten()).reshape(-1, 2).tolist(), strict=True))
        return {name: sums[name][0] / sums[name][1] if sums[name][1] else math.nan for name in ordered}


class MetricsLog:
    """Where a run's numbers go. Use it as a context manager: the display leaves the terminal as it found it."""

    def __init__(self, run_dir: Path, config: Config, *, resumed_at: int | None = None, active: bool = True) -> None:
        """Open the files of `run_dir` and the display.

        Args:
            run_dir: folder of the run; made if it is not there.
            config: the run's settings; `config.log` says where the numbers go.
            resumed_at: environment steps of the checkpoint that the run goes on from. Later rows are cut off, so that none appears twice.
            active: off on all ranks but the first: nothing is written or shown.

        Raises:
            FileExistsError: the folder holds metrics of an earlier run, and this one does not resume it.
            ModuleNotFoundError: `log.wandb` is on and Weights & Biases is not installed.
        """
        self._active = active
        self._sinks: list[_Sink] = []
        self._display: _Display = _Silent()
        if not active:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file, self._earlier_seconds = _open_rows(run_dir / METRICS_FILE, resumed_at)
        try:
            notice = self._open_sinks(run_dir, config, resumed_at)
        except BaseException:
            self._file.close()
            raise
        # The clocks start last: opening the sinks takes seconds that say nothing about the speed of the run.
        self._started = self._synced = monotonic()
        self._display = _open_display(config, resumed_at or 0, sys.stdout)
        if notice:
            self.message(notice)

    def _open_sinks(self, run_dir: Path, config: Config, resumed_at: int | None) -> str:
        """Open what the settings ask for; returns what the user must be told."""
        if config.log.wandb:
            self._sinks.append(_WandB(run_dir, config))
        if config.log.tensorboard:
            try:
                self._sinks.append(_TensorBoard(run_dir, resumed_at))
            except ImportError:
                return "no TensorBoard events, it is not installed: pip install 'phasicrl[tensorboard]', or switch log.tensorboard off"
        return ""

    def progress(self, stage: str, *, env_steps: int) -> None:
        """Tell the display where the run is: `rollout`, `policy`, `auxiliary 2/6`. Nearly free; call it as often as you like."""
        self._display.progress(stage, env_steps)

    def write(self, record: Values, *, env_steps: int, iteration: int, phase: int) -> None:
        """Write the metrics of one iteration to every sink. NaN and infinity are written as null.

        Raises:
            ValueError: a name that is not in `METRICS`.
        """
        unknown = record.keys() - METRICS.keys()
        if unknown:
            name = min(unknown)
            raise ValueError(f"metric {name!r} has no description{nearest_name(name, METRICS)}; add it to METRICS in metrics.py")
        if not self._active:
            return
        values = {name: float(record[name]) for name in METRICS if name in record}
        seconds = round(self._earlier_seconds + monotonic() - self._started, 3)
        head = {"env_steps": int(env_steps), "iteration": int(iteration), "phase": int(phase), "wall_time": seconds}
        row = head | {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        if monotonic() - self._synced > _FSYNC_SECONDS:
            self.flush()
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for sink in self._sinks:
            sink.write(finite, env_steps)
        self._display.record(values, env_steps)

    def message(self, text: str) -> None:
        """Show a line of text, above the live display if there is one."""
        self._display.message(text)

    def flush(self) -> None:
        """Put the rows on the disk; call it before a checkpoint, so that no crash leaves a checkpoint that is ahead of its rows."""
        if self._active and not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._synced = monotonic()

    def close(self) -> None:
        """Close everything; calling it again does nothing."""
        if self._active and not self._file.closed:
            self._display.close()
            self.flush()
            self._file.close()
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> MetricsLog:
        """The log itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close everything."""
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl`, in order; null is NaN, and a last line torn by a crash is left out.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: a line before the last is damaged.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} has no {METRICS_FILE}: it is not a run directory, or its first iteration is not finished")
    rows = [row for _, row in _read_lines(path)]
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def _read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line with what it says."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or "env_steps" not in row:
                raise ValueError("no object with env_steps")
        except ValueError as error:  # json.JSONDecodeError is one
            if number < len(lines):
                raise ValueError(f"line {number} of {path} is damaged ({error}); remove that line, or restore the file") from None
            break  # torn: the process died while it wrote
        rows.append((line, row))
    return rows


def _open_rows(path: Path, resumed_at: int | None) -> tuple[IO[str], float]:
    """Open the rows' file for appending; also the seconds that the run had taken by its last row."""
    seconds = 0.0
    if resumed_at is None:
        if path.exists() and path.stat().st_size > 0:
            raise FileExistsError(f"{path} holds the metrics of an earlier run; resume that run, or give this one a folder of its own")
    elif path.exists():
        rows = [(line, row) for line, row in _read_lines(path) if row["env_steps"] <= resumed_at]
        seconds = float(rows[-1][1].get("wall_time", 0.0)) if rows else 0.0
        shorter = path.with_name(path.name + ".tmp")
        with shorter.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line, _ in rows)
            file.flush()
            os.fsync(file.fileno())
        shorter.replace(path)
    return path.open("a", encoding="utf-8"), seconds


# ---------------------------------------------------------------------------------------------------------------- sinks


class _Sink(Protocol):
    """Another place where the metrics go."""

    def write(self, values: Values, env_steps: int) -> None:
        """Write finite numbers."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


class _TensorBoard:
    """TensorBoard events in the run directory."""

    def __init__(self, run_dir: Path, resumed_at: int | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from torch.utils.tensorboard.writer import SummaryWriter

        self._summary = Summary
        # TensorBoard hides events from `purge_step` on that an earlier process wrote.
        self._writer = SummaryWriter(str(run_dir), purge_step=None if resumed_at is None else resumed_at + 1)

    def write(self, values: Values, env_steps: int) -> None:
        """One event with all metrics: a tenth of the time of an `add_scalar` for each."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer._get_file_writer().add_summary(self._summary(value=scalars), env_steps)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()


class _WandB:
    """Weights & Biases. The id of the run is kept in the run directory, so that a resumed run goes on in the same place."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise ModuleNotFoundError("log.wandb needs Weights & Biases: pip install 'phasicrl[track]'") from None

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex, encoding="utf-8")
        self._run: Any = wandb.init(
            project=config.log.wandb_project, id=id_file.read_text(encoding="utf-8").strip(), resume="allow", name=run_dir.name,
            group=config.name, config=dataclasses.asdict(config), dir=str(run_dir),
        )  # fmt: skip
        # W&B refuses steps that go back, which a resumed run's do; with an axis of its own it takes them.
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, values: Values, env_steps: int) -> None:
        """One row with all metrics."""
        self._run.log({"env_steps": env_steps, **values})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


# -------------------------------------------------------------------------------------------------------------- display


class _Pace:
    """How fast a run is, and how long it will still take. Times are arguments, so that it can be checked by hand."""

    def __init__(self, config: Config, env_steps: int, now: float) -> None:
        self._config = config
        aux = config.aux if config.aux is not None and config.aux.epochs > 0 else None
        self.period = aux.every * aux.run_every if aux is not None else None
        self._marks = deque([(now, env_steps)])
        self.begun = False
        self._done = self._iterations(env_steps)
        self._policy_seconds, self._policy_count = 0.0, 0
        self._aux_seconds, self._aux_count = 0.0, 0
        self._epoch_seconds = 0.0  # summed over iterations: one pass with both losses over one rollout

    def _iterations(self, env_steps: int) -> int:
        return round(env_steps / self._config.batch_size)

    @property
    def iterations_done(self) -> int:
        """Iterations that are finished since the beginning of the run."""
        return self._done

    @property
    def phases_left(self) -> int:
        """Auxiliary phases to come; there is none when the budget is used up."""
        if self.period is None:
            return 0
        return max(0, (self._config.num_iterations - 1) // self.period - self._done // self.period)

    def begin(self, now: float) -> None:
        """Note that the first iteration begins: what was prepared before says nothing about the speed."""
        self._marks[0] = (now, self._marks[0][1])
        self.begun = True

    def iteration(self, values: Values, env_steps: int, now: float) -> None:
        """Note the end of an iteration."""
        self.begun = True
        auxiliary = _finite(values.get("time/auxiliary"))
        self._policy_seconds += max(0.0, now - self._marks[-1][0] - auxiliary)
        self._policy_count += 1
        if auxiliary > 0:
            self._aux_seconds, self._aux_count = self._aux_seconds + auxiliary, self._aux_count + 1
        ppo = self._config.ppo
        self._epoch_seconds += _finite(values.get("time/policy")) / ppo.policy_epochs
        self._epoch_seconds += _finite(values.get("time/value")) / max(1, ppo.value_epochs)
        self._done = self._iterations(env_steps)
        self._marks.append((now, env_steps))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RECENT_SECONDS:
            self._marks.popleft()

    def steps_per_second(self) -> float:
        """Over the last iterations, training included; 0 before the first ends."""
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def seconds_left(self, now: float) -> float | None:
        """Until the budget is used up, auxiliary phases still to come included; unknown before the first iteration ends."""
        if self._policy_count == 0:
            return None
        total = self._config.num_iterations
        seconds = max(0, total - self._done) * self._policy_seconds / self._policy_count
        seconds += self.phases_left * self._aux_phase_seconds() if self.phases_left else 0.0
        return max(0.0, seconds - (now - self._marks[-1][0]))

    def _aux_phase_seconds(self) -> float:
        """Mean of the auxiliary phases so far. Before the first: its passes cost what a pass with both losses costs in the policy phase."""
        aux = self._config.aux
        if self._aux_count > 0 or aux is None:
            return self._aux_seconds / max(1, self._aux_count)
        return aux.epochs * (aux.iterations_per_epoch or aux.every) * self._epoch_seconds / self._policy_count


class _Display(Protocol):
    """What a person sees."""

    def progress(self, stage: str, env_steps: int) -> None:
        """Note the place in the run."""
        ...

    def record(self, values: Values, env_steps: int) -> None:
        """Note the metrics of an iteration."""
        ...

    def message(self, text: str) -> None:
        """Show a line of text."""
        ...

    def close(self) -> None:
        """Show the last state and leave."""
        ...


class _Silent:
    """No display."""

    def progress(self, stage: str, env_steps: int) -> None:
        """Do nothing."""

    def record(self, values: Values, env_steps: int) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Lines:
    """Plain lines, ASCII only, for files, pipes and build servers."""

    _SHOWN = (
        ("return", "charts/episodic_return_100"), ("length", "charts/episodic_length"), ("entropy", "losses/entropy"),
        ("kl", "losses/approx_kl"), ("expl.var", "losses/explained_variance"), ("value loss", "losses/value_loss"),
        ("aux kl", "losses/aux/kl_loss"),
    )  # fmt: skip

    def __init__(self, config: Config, env_steps: int, stream: IO[str]) -> None:
        self._config, self._stream = config, stream
        self._pace = _Pace(config, env_steps, monotonic())
        self._printed_at: float | None = None
        self._unprinted: str | None = None

    def progress(self, stage: str, env_steps: int) -> None:
        """Note the beginning: lines are for whole iterations."""
        if not self._pace.begun:
            self._pace.begin(monotonic())

    def record(self, values: Values, env_steps: int) -> None:
        """Print a line, if the last one is long enough ago."""
        now = monotonic()
        self._pace.iteration(values, env_steps, now)
        self._unprinted = self._line(values, env_steps, now)
        if self._printed_at is None or now - self._printed_at >= _LINE_SECONDS:
            self._print(now)

    def _print(self, now: float) -> None:
        self.message(self._unprinted or "")
        self._printed_at, self._unprinted = now, None

    def _line(self, values: Values, env_steps: int, now: float) -> str:
        total = self._config.total_env_steps
        left = self._pace.seconds_left(now)
        fields = [
            f"{100 * env_steps / total:5.1f} %",
            f"{_compact(env_steps)}/{_compact(total)} steps",
            f"{_compact(self._pace.steps_per_second())} steps/s",
            *(f"{label} {_number(values[name])}" for label, name in self._SHOWN if name in values),
            *([f"{_duration(left)} left"] if left is not None else []),
        ]
        return "  ".join(fields)

    def message(self, text: str) -> None:
        """Print a line of text."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Print the last iteration's line, if it was held back."""
        if self._unprinted is not None:
            self._print(monotonic())


class _Live:
    """A display that is drawn over and over in the same place, with `rich`. It has no thread: `progress` draws, at most four times a second."""

    _SHOWN = (
        ("return", "charts/episodic_return_100"), ("length", "charts/episodic_length"), ("entropy", "losses/entropy"),
        ("KL", "losses/approx_kl"), ("expl. var.", "losses/explained_variance"), ("value loss", "losses/value_loss"),
    )  # fmt: skip

    def __init__(self, config: Config, env_steps: int, console: Console) -> None:
        from rich.live import Live

        self._config, self._console = config, console
        self._env_steps, self._stage = env_steps, "starting"
        self._values: dict[str, float] = {}
        self._started = monotonic()
        self._pace = _Pace(config, env_steps, self._started)
        self._drawn_at = -math.inf
        self._closed = False
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._picture)

    def progress(self, stage: str, env_steps: int) -> None:
        """Note the place in the run, and draw if the last picture is old."""
        self._stage, self._env_steps = stage, env_steps
        if not self._pace.begun:
            self._pace.begin(monotonic())
        if monotonic() - self._drawn_at >= _REFRESH_SECONDS:
            self._draw()

    def record(self, values: Values, env_steps: int) -> None:
        """Note the metrics; those of the last auxiliary phase stay until the next."""
        self._values.update(values)
        self._pace.iteration(values, env_steps, monotonic())
        self.progress(self._stage, env_steps)

    def message(self, text: str) -> None:
        """Print a line of text above the display."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw the last state, leave it on the screen and give the terminal back."""
        self._closed = True
        self._stage = "finished" if self._env_steps >= self._config.total_env_steps else "stopped"
        if self._live.is_started:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.refresh()
        self._drawn_at = monotonic()  # after the drawing: a slow terminal must not slow down the training

    def _picture(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        config = self._config
        title = Text.assemble((" phasicrl ", "bold"), (f"{config.name} · {config.env.id} · seed {config.seed} ", "default"))
        body = Group(self._bar(), self._places(), Text(""), self._table())
        return Panel(body, title=title, title_align="left", box=box.ROUNDED, border_style="cyan", padding=(0, 1), width=self._width())

    def _width(self) -> int:
        return min(self._console.width, _WIDEST)

    def _bar(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = self._config.total_env_steps
        numbers = [
            f"{100 * self._env_steps / total:.1f} %",
            f"{_compact(self._env_steps)}/{_compact(total)} steps",
            f"{_compact(self._pace.steps_per_second())} steps/s",
            self._time(),
        ]
        bar = ProgressBar(total=total, completed=min(self._env_steps, total), complete_style="cyan", finished_style="green")
        grid = Table.grid(padding=(0, 2), expand=True)
        if self._width() < _WIDE:
            grid.add_row(bar)
            return Group(grid, Text("  ".join(numbers), no_wrap=True, overflow="ellipsis"))
        grid.add_column(ratio=1)
        for _ in numbers:
            grid.add_column(justify="right", no_wrap=True)
        grid.add_row(bar, *numbers)
        return grid

    def _time(self) -> str:
        """Time left; at the end, time taken."""
        now = monotonic()
        if self._closed:
            return f"in {_duration(now - self._started)}"
        left = self._pace.seconds_left(now)
        return f"{_duration(left)} left" if left is not None else ""

    def _places(self) -> RenderableType:
        from rich.text import Text

        done, total = self._pace.iterations_done, self._config.num_iterations
        text = Text.assemble((self._stage, "bold cyan"), (f"  ·  iteration {min(done + 1, total):,}/{total:,}", "default"))
        period = self._pace.period
        if period is not None and self._pace.phases_left and not self._closed and not self._stage.startswith("auxiliary"):
            text.append(f"  ·  {done % period + 1}/{period} until the auxiliary phase")
        return text

    def _table(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        shown = self._SHOWN + ((("aux KL", "losses/aux/kl_loss"),) if self._pace.period is not None else ())
        columns = len(shown) if self._width() >= _WIDE else 4
        tables = []
        for start in range(0, len(shown), columns):
            table = Table(box=None, expand=True, padding=0, pad_edge=False, header_style="dim")
            part = shown[start : start + columns]
            cells = [(label, _number(self._values.get(name), missing="–")) for label, name in part] + [("", "")] * (columns - len(part))
            for label, _ in cells:
                table.add_column(label, justify="right", no_wrap=True, ratio=1)
            table.add_row(*(number for _, number in cells), style="bold")
            tables.append(table)
        return Group(*tables)


def _open_display(config: Config, env_steps: int, stream: TextIO) -> _Display:
    """The display that `log.console` asks for."""
    choice = config.log.console
    if choice == "off":
        return _Silent()
    if choice == "live" or (choice == "auto" and _is_screen(stream)):
        from rich.console import Console

        return _Live(config, env_steps, Console(file=stream, force_terminal=True if choice == "live" else None))
    return _Lines(config, env_steps, stream)


def _is_screen(stream: TextIO) -> bool:
    """Whether somebody can watch a display there that moves the cursor. NO_COLOR is no reason against it: `rich` then draws without colour."""
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    unicode = (stream.encoding or "").lower().replace("-", "").startswith("utf")
    return stream.isatty() and not dumb and not os.environ.get("CI") and unicode


def _finite(value: float | None) -> float:
    """`value`, or 0 if it is missing or not a number."""
    return value if value is not None and math.isfinite(value) else 0.0


def _compact(number: float) -> str:
    """4 digits at most: 512, 16.4k, 1.25M, 25M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * 0.9995:
            text = _number(number / size)
            return (text.rstrip("0").rstrip(".") if "." in text else text) + unit
    return f"{number:.0f}"


def _number(value: float | None, missing: str = "-") -> str:
    """Three significant digits, thousands separated; very small numbers with an exponent."""
    if value is None or math.isnan(value):
        return missing
    if value == 0 or math.isinf(value):
        return f"{value:.0f}"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}"


def _duration(seconds: float) -> str:
    """The two largest units: 45 s, 12 min, 1 h 05 min, 2 d 3 h."""
    minutes, hours, days = round(seconds / 60), round(seconds) // 3600, timedelta(seconds=seconds).days
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if days < 1:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{days} d {hours % 24} h"
