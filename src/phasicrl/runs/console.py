"""What a person sees of a run: plain lines, or a display that is drawn anew. Kind: effects."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import TextIO, TypeAlias

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phasicrl.config import Config
from phasicrl.config_io import printable

_REFRESH_SECONDS = 0.25  # of the live display
_LINE_SECONDS = 2.0  # between two plain lines
# Steps per second are measured over this long, or over one iteration if that is longer.
_RECENT_SECONDS = 30.0
# Columns: below the first the display takes more lines, beyond the second it does not grow.
_WIDE, _WIDEST = 80, 100

Values: TypeAlias = Mapping[str, float]


class _Pace:
    """How fast a run is, and how long it will still take.

    Times are arguments, so that it can be checked by hand.
    """

    def __init__(self, config: Config, env_steps: int, now: float) -> None:
        self._config = config
        self.period = config.period if config.has_auxiliary_phase else None
        self.iterations_done = round(env_steps / config.batch_size)
        self.begun = False
        self._marks = deque([(now, env_steps)])
        self._policy_seconds, self._policy_count = 0.0, 0
        self._aux_seconds, self._aux_count = 0.0, 0
        # Summed over iterations: one pass with both losses over one rollout.
        self._epoch_seconds = 0.0

    @property
    def phases_left(self) -> int:
        """Auxiliary phases to come; there is none when the budget is used up."""
        if self.period is None:
            return 0
        total, done = self._config.num_iterations - 1, self.iterations_done
        return max(0, total // self.period - done // self.period)

    def begin(self, now: float) -> None:
        """Note that the first iteration begins: the time before says nothing about the speed."""
        if not self.begun:
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
        self.iterations_done = round(env_steps / self._config.batch_size)
        self._marks.append((now, env_steps))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _RECENT_SECONDS:
            self._marks.popleft()

    def steps_per_second(self) -> float:
        """Over the last iterations, training included; 0 before the first ends."""
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def seconds_left(self, now: float) -> float | None:
        """Until the budget is used up, auxiliary phases still to come included.

        Unknown before the first iteration ends.
        """
        if self._policy_count == 0:
            return None
        iterations_left = max(0, self._config.num_iterations - self.iterations_done)
        seconds = iterations_left * self._policy_seconds / self._policy_count
        aux = self._config.aux
        if aux is not None and self.phases_left:
            if self._aux_count > 0:
                phase = self._aux_seconds / self._aux_count
            else:
                # None was measured: its passes cost what a pass with both losses costs in the
                # policy phase.
                passes = aux.epochs * (aux.iterations_per_epoch or aux.every)
                phase = passes * self._epoch_seconds / self._policy_count
            seconds += self.phases_left * phase
        return max(0.0, seconds - (now - self._marks[-1][0]))

    def texts(self, env_steps: int, now: float) -> list[str]:
        """Per cent, steps, speed and time left (empty while it is unknown), for people."""
        total, left = self._config.budget, self.seconds_left(now)
        return [
            f"{min(100 * env_steps / total, 100):.1f} %",  # the last rollout may go over the budget
            f"{_compact(env_steps)}/{_compact(total)} steps",
            f"{_compact(self.steps_per_second())} steps/s",
            "" if left is None else f"{duration(left)} left",
        ]


class _Silent:
    """No display. Its methods are those of every display."""

    def progress(self, stage: str, env_steps: int) -> None:
        """Note the place in the run."""

    def record(self, values: Values, env_steps: int) -> None:
        """Note the metrics of an iteration."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def close(self) -> None:
        """Show the last state and leave."""


class _Lines:
    """Plain lines, ASCII only, for files, pipes and build servers."""

    _SHOWN = (
        ("return", "charts/episodic_return_100"),
        ("length", "charts/episodic_length"),
        ("entropy", "losses/entropy"),
        ("kl", "losses/approx_kl"),
        ("expl.var", "losses/explained_variance"),
        ("value loss", "losses/value_loss"),
        ("aux kl", "losses/aux/kl_loss"),
        ("evaluation", "evaluation/return"),
        ("gap", "evaluation/gap"),
    )

    def __init__(self, config: Config, env_steps: int, stream: TextIO) -> None:
        self._stream = stream
        self._pace = _Pace(config, env_steps, monotonic())
        self._printed_at = -math.inf
        self._held_back = ""

    def progress(self, stage: str, env_steps: int) -> None:
        """Note the beginning: lines are for whole iterations."""
        self._pace.begin(monotonic())

    def record(self, values: Values, env_steps: int) -> None:
        """Print a line, if the last one is long enough ago."""
        now = monotonic()
        self._pace.iteration(values, env_steps, now)
        percent, steps, speed, left = self._pace.texts(env_steps, now)
        shown = [(label, values[name]) for label, name in self._SHOWN if name in values]
        numbers = [f"{label} {_number(value)}" for label, value in shown]
        line = "  ".join([f"{percent:>7}", steps, speed, *numbers, left])
        if now - self._printed_at < _LINE_SECONDS:
            self._held_back = line
        else:
            self.message(line)
            self._printed_at, self._held_back = now, ""

    def message(self, text: str) -> None:
        """Print a line of text."""
        print(printable(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Print the last iteration's line, if it was held back."""
        if self._held_back:
            self.message(self._held_back)


class _Live:
    """A display that is drawn over and over in the same place, with `rich`.

    It has no thread: `progress` draws, at most four times a second.
    """

    _SHOWN = (
        ("return", "charts/episodic_return_100"),
        ("length", "charts/episodic_length"),
        ("entropy", "losses/entropy"),
        ("KL", "losses/approx_kl"),
        ("expl. var.", "losses/explained_variance"),
        ("value loss", "losses/value_loss"),
    )

    def __init__(self, config: Config, env_steps: int, console: Console) -> None:
        self._config, self._console = config, console
        self._env_steps, self._stage = env_steps, "starting"
        self._values: dict[str, float] = {}
        self._started = monotonic()
        self._pace = _Pace(config, env_steps, self._started)
        self._drawn_at = -math.inf
        self._closed = False
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._image)

    def progress(self, stage: str, env_steps: int) -> None:
        """Note the place in the run, and draw if the last image is old."""
        self._stage, self._env_steps = stage, env_steps
        self._pace.begin(monotonic())
        if monotonic() - self._drawn_at >= _REFRESH_SECONDS:
            self._live.start()  # does nothing from the second time on
            self._live.refresh()
            # After the drawing: a slow terminal must not slow down the training.
            self._drawn_at = monotonic()

    def record(self, values: Values, env_steps: int) -> None:
        """Note the metrics; those of the last auxiliary phase stay until the next."""
        self._values.update(values)
        self._pace.iteration(values, env_steps, monotonic())
        self.progress(self._stage, env_steps)

    def message(self, text: str) -> None:
        """Print a line of text above the display."""
        self._console.print(printable(text), markup=False, highlight=False)

    def close(self) -> None:
        """Draw the last state, leave it on the screen and give the terminal back."""
        self._closed = True
        self._stage = "finished" if self._env_steps >= self._config.budget else "stopped"
        if self._live.is_started:
            self._live.refresh()
            self._live.stop()

    def _image(self) -> Panel:
        config, width = self._config, min(self._console.width, _WIDEST)
        run = f"{config.name} · {config.env.id} · seed {config.seed} "
        title = Text.assemble((" phasicrl ", "bold"), (run, "default"))
        wide = width >= _WIDE
        body = Group(self._bar(wide=wide), self._places(), Text(""), self._table(wide=wide))
        return Panel(
            body,
            title=title,
            title_align="left",
            box=box.ROUNDED,
            border_style="cyan",
            padding=(0, 1),
            width=width,
        )

    def _bar(self, *, wide: bool) -> Table:
        """How far the run is: a bar and numbers; at the end, the time that it has taken."""
        now, total = monotonic(), self._config.budget
        numbers = self._pace.texts(self._env_steps, now)
        if self._closed:
            numbers[-1] = f"in {duration(now - self._started)}"
        bar = ProgressBar(
            total=total,
            completed=min(self._env_steps, total),
            complete_style="cyan",
            finished_style="green",
        )
        grid = Table.grid(padding=(0, 2), expand=True)
        if not wide:
            grid.add_row(bar)
            grid.add_row(Text("  ".join(numbers), no_wrap=True, overflow="ellipsis"))
            return grid
        grid.add_column(ratio=1)
        for _ in numbers:
            grid.add_column(justify="right", no_wrap=True)
        grid.add_row(bar, *numbers)
        return grid

    def _places(self) -> Text:
        pace, total = self._pace, self._config.num_iterations
        done, period = pace.iterations_done, pace.period
        iteration = f"  ·  iteration {min(done + 1, total):,}/{total:,}"
        text = Text.assemble((self._stage, "bold cyan"), (iteration, "default"))
        waits = not self._closed and not self._stage.startswith("auxiliary")
        if period is not None and pace.phases_left and waits:
            text.append(f"  ·  {done % period + 1}/{period} until the auxiliary phase")
        return text

    def _table(self, *, wide: bool) -> Table:
        shown = [*self._SHOWN]
        if self._pace.period is not None:
            shown.append(("aux KL", "losses/aux/kl_loss"))
        columns = len(shown) if wide else 4
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(justify="right", no_wrap=True, ratio=1)
        for start in range(0, len(shown), columns):
            part = shown[start : start + columns]
            grid.add_row(*(label for label, _ in part), style="dim")
            numbers = [_number(self._values.get(name), missing="–") for _, name in part]
            grid.add_row(*numbers, style="bold")
        return grid


Display: TypeAlias = _Silent | _Lines | _Live


def open_display(config: Config, env_steps: int, stream: TextIO) -> Display:
    """The display that `log.console` asks for."""
    choice = config.log.console
    if choice == "off":
        return _Silent()
    if choice == "live" or (choice == "auto" and _is_screen(stream)):
        console = Console(file=stream, force_terminal=True if choice == "live" else None)
        return _Live(config, env_steps, console)
    return _Lines(config, env_steps, stream)


def silence(stream: TextIO) -> Display:
    """The display for a stream whose reader has gone; what others print there goes nowhere."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
    return _Silent()


def _is_screen(stream: TextIO) -> bool:
    """Whether somebody can watch a display there that moves the cursor.

    NO_COLOR is no reason against it: `rich` then draws without color.
    """
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


def duration(seconds: float) -> str:
    """The two largest units: 45 s, 12 min, 1 h 05 min, 2 d 3 h."""
    minutes, hours = round(seconds / 60), round(seconds) // 3600
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 24:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"
