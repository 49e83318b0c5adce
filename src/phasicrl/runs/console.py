"""Progress of a run: a bar on a terminal, plain lines elsewhere. Kind: effects."""

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from time import monotonic
from typing import IO, TextIO, TypeAlias

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from phasicrl.config import Config
from phasicrl.config_io import escape_control_chars

_BAR_SECONDS, _LINE_SECONDS = 0.25, 2.0
"""Minimum seconds between two updates of the bar, and between two plain lines."""
_SPEED_SECONDS = 3600.0
"""Period for the mean speed, longer than the slowest auxiliary phase."""
_COLUMNS = (
    ("return", "charts/episodic_return_100"), ("length", "charts/episodic_length"),
    ("entropy", "losses/entropy"), ("kl", "losses/approx_kl"),
    ("expl.var", "losses/explained_variance"), ("value loss", "losses/value_loss"),
    ("aux kl", "losses/aux/kl_loss"), ("evaluation", "evaluation/return"),
    ("gap", "evaluation/gap"),
)  # fmt: skip

Values: TypeAlias = Mapping[str, float]


class _Bar(Progress):
    """Progress bar with a line of metrics below."""

    metrics = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the progress bar and the line of metrics."""
        return [*super().get_renderables(), self.metrics]


class Display:
    """Display of a run's progress.

    Args:
        config: options of the run; `log.console` selects the kind of display.
        env_steps: environment steps before the first iteration.
        stream: text stream to write to; None or a closed stream shows nothing.
    """

    def __init__(self, config: Config, env_steps: int, stream: TextIO | None) -> None:
        self.kind = "off" if getattr(stream, "closed", stream is None) else config.log.console
        console = Console(file=stream, force_terminal=True if self.kind == "live" else None)
        if self.kind == "auto":
            is_watched = console.is_interactive and console.file.isatty()
            self.kind = "live" if is_watched and not os.environ.get("CI") else "plain"
        more = (x if "/" in x else f"own/{x}" for x in config.log.console_metrics)  # as in run.log
        self._columns = (*_COLUMNS, *((name, name) for name in more))
        self._values, self._line, self._shown_at = dict[str, float](), "", -math.inf
        self._bar = _Bar(
            "{task.description}", BarColumn(None), "{task.percentage:.1f} %",
            "{task.completed:,.0f}/{task.total:,.0f} steps", "{task.fields[speed]} steps/s",
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console, auto_refresh=False, expand=True, disable=self.kind != "live",
            speed_estimate_period=_SPEED_SECONDS, get_time=monotonic,
        )  # fmt: skip
        self._bar.add_task("", start=False, total=config.budget, completed=env_steps, speed="-")
        self._task = self._bar.tasks[0]

    def show_stage(self, stage: str) -> None:
        """Show the stage of the iteration; the first call starts the clock."""
        if not self._task.started:
            self._bar.start_task(self._task.id)
            self._bar.advance(self._task.id, 0)  # the sample from which the speed is measured
        self._bar.update(self._task.id, description=stage)
        if self.kind == "live" and monotonic() - self._shown_at >= _BAR_SECONDS:
            self._bar.start()  # does nothing from the second time on
            self._bar.refresh()
            self._shown_at = monotonic()

    def show_metrics(self, values: Values, env_steps: int) -> None:
        """Show an iteration's metrics; those it lacks keep their previous values."""
        self._values.update(values)
        pairs = ((label, self._values.get(name)) for label, name in self._columns)
        metrics = "  ".join(f"{label} {_format(x)}" for label, x in pairs if x is not None)
        if (env_steps, metrics) == (self._task.completed, self._bar.metrics):
            return  # such as for the metrics of `on_end` that have no column
        self._bar.update(self._task.id, completed=env_steps)
        speed = f"{self._task.speed or 0:,.0f}"
        self._bar.update(self._task.id, speed=speed)
        self._bar.metrics = metrics
        left = self._task.time_remaining
        self._line = "  ".join([
            f"{self._task.percentage:5.1f} %", f"{env_steps:,}/{self._task.total:,.0f} steps",
            f"{speed} steps/s", metrics, "" if left is None else f"{format_duration(left)} left",
        ])  # fmt: skip
        if monotonic() - self._shown_at >= _LINE_SECONDS:
            self._print_line()

    def _print_line(self) -> None:
        """Print the metrics of the last iteration if they were not printed yet."""
        if self.kind == "plain" and self._line:
            self.show_message(self._line)
            self._line, self._shown_at = "", monotonic()

    def show_message(self, text: str) -> None:
        """Print a line of text, above the progress bar if there is one."""
        if self.kind != "off":
            console = self._bar.console
            shown = escape_control_chars(text).encode(console.encoding, "backslashreplace")
            line = shown.decode(console.encoding)
            console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Show the last state and restore the terminal."""
        self._print_line()
        description = "finished" if self._task.finished else "stopped"
        self._bar.update(self._task.id, description=description)
        if self._bar.live.is_started:
            self._bar.stop()

    def silence(self) -> None:
        """Stop all output, because its reader, such as `head`, has closed it."""
        self.kind = "off"
        discard_output(self._bar.console.file)


def discard_output(stream: IO[str]) -> None:
    """Discard all further output to a stream whose reading end is closed."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


def _format(value: float) -> str:
    """Format a metric with three digits, as an integer from 1,000 on, or as - if undefined."""
    return "-" if value != value else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format a time in seconds, such as `0:45:10` or `2 days, 7:33:20`."""
    return str(timedelta(seconds=min(round(seconds), 10**13)))
