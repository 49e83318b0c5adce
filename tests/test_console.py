"""What a person sees of a run: speed, time left, plain lines and the live display."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from phasicrl import console
from phasicrl.config import AuxConfig, Config, ConsoleChoice, EnvConfig, LogConfig, PPOConfig
from phasicrl.console import Display, open_display
from phasicrl.metrics import METRICS

BATCH = 8 * 16  # environment steps of an iteration of `config()`


def config(choice: ConsoleChoice = "plain", *, aux: AuxConfig | None = None, iterations: int = 10, ppo: PPOConfig | None = None) -> Config:
    return Config(
        name="demo",
        env=EnvConfig(id="procgen:coinrun", num_envs=8),
        ppo=ppo or PPOConfig(num_steps=16, num_minibatches=2),
        aux=aux,
        total_env_steps=iterations * BATCH,
        log=LogConfig(console=choice),
    )


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "monotonic", clock)
    return clock


class FakeTerminal(io.StringIO):
    """A terminal that remembers everything that was sent to it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return FakeTerminal()


def text_of(terminal: io.StringIO) -> str:
    """What was sent, without the codes for colours and the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


@contextmanager
def shown(settings: Config, stream: TextIO) -> Iterator[Display]:
    """A display that is closed at the end."""
    display = open_display(settings, 0, stream)
    yield display
    display.close()


def test_time_left_and_speed_of_ppo_by_hand() -> None:
    pace = console._Pace(config(iterations=10), 0, 0.0)
    assert pace.seconds_left(1.0) is None and pace.steps_per_second() == 0.0
    pace.iteration({}, BATCH, 4.0)
    pace.iteration({}, 2 * BATCH, 10.0)
    assert pace.steps_per_second() == 2 * BATCH / 10
    assert pace.seconds_left(10.0) == 8 * 5.0  # 8 iterations to come, 5 s each on average
    assert pace.seconds_left(13.0) == 37.0
    assert pace.seconds_left(1000.0) == 0.0
    pace.iteration({}, 10 * BATCH, 11.0)
    assert pace.seconds_left(11.0) == 0.0


@pytest.mark.parametrize("console", ["plain", "live"])
def test_what_is_prepared_before_the_first_rollout_does_not_count(
    tmp_path: Path, clock: Clock, terminal: FakeTerminal, console: str
) -> None:
    with MetricsLog(tmp_path, config(console=console, iterations=10)) as log:
        clock.now += 60  # environments, networks, compilers
        log.progress("rollout", env_steps=0)
        clock.now += 1
        log.progress("policy", env_steps=BATCH)
        write_rows(log, 1, 1)
        clock.now += 1
        log.progress("rollout", env_steps=BATCH)
    assert "128 steps/s" in text_of(terminal) and ("9 s left" in text_of(terminal) or "8 s left" in text_of(terminal))


def test_time_left_of_ppg_counts_the_auxiliary_phases_to_come() -> None:
    pace = console._Pace(config(iterations=12, aux=AuxConfig(every=4, epochs=6, num_minibatches=2)), 0, 0.0)
    seconds = {"time/rollout": 1.0, "time/policy": 0.5, "time/auxiliary": 0.0}
    for iteration in range(1, 4):
        pace.iteration(seconds, iteration * BATCH, iteration * 2.0)
    # No phase is measured yet: 6 epochs over 4 iterations at 0.5 s. Two of them, none at the end, and 9 iterations of 2 s.
    assert pace.seconds_left(6.0) == pytest.approx(9 * 2 + 2 * 6 * 4 * 0.5)
    pace.iteration(seconds | {"time/auxiliary": 20.0}, 4 * BATCH, 28.0)
    assert pace.seconds_left(28.0) == pytest.approx(8 * 2 + 1 * 20)


def test_time_left_knows_the_knobs_of_the_auxiliary_phase() -> None:
    aux = AuxConfig(every=4, epochs=3, run_every=2, iterations_per_epoch=2, num_minibatches=2)
    ppo = PPOConfig(num_steps=16, num_minibatches=2, policy_epochs=2, value_epochs=4)
    pace = console._Pace(config(iterations=17, aux=aux, ppo=ppo), 0, 0.0)
    pace.iteration({"time/policy": 2.0, "time/value": 8.0, "time/auxiliary": math.nan}, BATCH, 10.0)
    # A pass with both losses takes 2/2 + 8/4 = 3 s; 3 epochs over 2 iterations; every 8th iteration has one: 2 of 17.
    assert pace.seconds_left(10.0) == pytest.approx(16 * 10 + 2 * 3 * 2 * 3.0)


def test_speed_is_recent() -> None:
    pace = console._Pace(config(iterations=1000), 0, 0.0)
    for iteration in range(1, 101):
        pace.iteration({}, iteration * BATCH, float(iteration))
    for iteration in range(101, 401):
        pace.iteration({}, iteration * BATCH, 100 + (iteration - 100) / 10)
    assert pace.steps_per_second() == pytest.approx(10 * BATCH)


def test_plain_lines_by_hand(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "charts/episodic_return_100": 12.345, "charts/episodic_length": 1234.5, "losses/entropy": 2.7, "losses/approx_kl": 0.004212,
        "losses/explained_variance": math.nan, "charts/SPS": 3.0,
    }  # fmt: skip
    with MetricsLog(tmp_path, config(console="plain", iterations=20)) as log:
        clock.now += 4
        log.write(record, env_steps=BATCH, iteration=1, phase=0)
    line = "  5.0 %  128/2.56k steps  32 steps/s  return 12.3  length 1,234  entropy 2.70  kl 0.00421  expl.var -  76 s left\n"
    assert capsys.readouterr().out == line


def test_plain_lines_are_two_seconds_apart_and_the_last_is_never_lost(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsLog(tmp_path, config(console="plain", iterations=100)) as log:
        for iteration in range(1, 24):  # 0.5 s each
            clock.now += 0.5
            log.progress("rollout", env_steps=iteration * BATCH)
            write_rows(log, iteration, iteration)
    shown = [float(line.split("%")[0]) for line in capsys.readouterr().out.splitlines()]
    assert shown == [1, 5, 9, 13, 17, 21, 23]


def test_plain_lines_are_ascii_and_messages_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(tmp_path, config(console="plain")) as log:
        log.message("checkpoint saved")
        write_rows(log, 1, 1, losses__aux__kl_loss=1e-9)
        out = capsys.readouterr().out
        assert out.startswith("checkpoint saved\n") and "aux kl 1.0e-09" in out and out.isascii()


def test_off_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(tmp_path, config(console="off")) as log:
        log.progress("rollout", env_steps=1)
        log.message("hello")
        write_rows(log, 1, 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environment", "kind"),
    [({}, "_Live"), ({"NO_COLOR": "1"}, "_Live"), ({"TERM": "dumb"}, "_Lines"), ({"CI": "true"}, "_Lines"), ({"CI": ""}, "_Live")],
)
def test_auto_is_live_only_where_somebody_can_watch(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], kind: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert type(open_display(config(console="auto"), 0, terminal)).__name__ == kind


@pytest.mark.parametrize("stream", [io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")])
def test_auto_is_plain_in_files_and_pipes(stream: TextIO) -> None:
    assert isinstance(open_display(config(console="auto"), 0, stream), console._Lines)


def test_a_terminal_that_cannot_show_the_signs_gets_lines(terminal: FakeTerminal) -> None:
    terminal.encoding = "latin-1"
    assert isinstance(open_display(config(console="auto"), 0, terminal), console._Lines)


def test_the_choice_of_a_display_is_obeyed(terminal: FakeTerminal) -> None:
    assert isinstance(open_display(config(console="plain"), 0, terminal), console._Lines)
    assert isinstance(open_display(config(console="live"), 0, io.StringIO()), console._Live)


def run_live(tmp_path: Path, clock: Clock, settings: Config) -> None:
    """Two iterations, the second with an auxiliary phase, and the beginning of a third."""
    with MetricsLog(tmp_path, settings) as log:
        log.progress("rollout", env_steps=0)
        clock.now += 5
        log.progress("policy", env_steps=BATCH)
        write_rows(log, 1, 1, charts__episodic_return_100=21.5, losses__entropy=2.0, time__auxiliary=0.0)
        log.message("checkpoint [saved]")
        clock.now += 5
        log.progress("auxiliary 2/6", env_steps=2 * BATCH)
        write_rows(log, 2, 2, losses__aux__kl_loss=0.004, time__auxiliary=2.0)
        clock.now += 1
        log.progress("rollout", env_steps=2 * BATCH + 64)


def test_the_live_display_shows_the_place_and_the_numbers(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    run_live(tmp_path, clock, config(console="live", iterations=5, aux=AuxConfig(every=2, num_minibatches=2)))
    text = text_of(terminal)
    frames = text.split("╭─")
    assert "demo · procgen:coinrun · seed 1" in frames[1]
    assert "rollout  ·  iteration 1/5  ·  1/2 until the auxiliary phase" in frames[1]
    assert "auxiliary 2/6  ·  iteration 2/5 " in text
    assert "rollout  ·  iteration 3/5  ·  1/2 until the auxiliary phase" in text
    assert re.search(r"50\.0 %  320/640 steps  26 steps/s  13 s left", text), (
        "3 iterations of 4 s and a phase of 2 s, less the second that passed"
    )
    for label in ("return", "length", "entropy", "KL", "expl. var.", "value loss", "aux KL"):
        assert label in frames[-1]
    assert re.search(r"21\.5 +– +2\.00 +– +– +– +0\.00400", frames[-1])
    assert "checkpoint [saved]" in text
    assert "stopped  ·  iteration 3/5" in frames[-1] and "in 11 s" in frames[-1]
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), "the cursor is shown again"


def test_the_live_display_of_ppo_has_no_auxiliary_phase_and_ends_finished(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    with MetricsLog(tmp_path, config(console="auto", iterations=1)) as log:
        log.progress("rollout", env_steps=BATCH)
        write_rows(log, 1, 1)
    text = text_of(terminal)
    assert "aux" not in text
    assert "finished  ·  iteration 1/1" in text


def test_a_narrow_terminal_shows_everything_on_more_lines(
    tmp_path: Path, clock: Clock, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run_live(tmp_path, clock, config(console="live", iterations=5, aux=AuxConfig(every=2, num_minibatches=2)))
    text = text_of(terminal)
    assert "50.0 %  320/640 steps  26 steps/s" in text and "aux KL" in text and "expl. var." in text
    assert max(len(line) for line in text.replace("\r", "\n").splitlines()) <= 60


def test_the_live_display_is_drawn_at_most_four_times_a_second(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    with MetricsLog(tmp_path, config(console="live")) as log:
        for step in range(1000):
            clock.now += 0.001
            log.progress("policy", env_steps=step)
        assert text_of(terminal).count("╭─") <= 5


def test_no_colour_only_takes_the_colour_away(
    tmp_path: Path, clock: Clock, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run_live(tmp_path, clock, config(console="auto", iterations=4))
    assert "╭─" in text_of(terminal)
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", terminal.getvalue())


def test_after_the_last_auxiliary_phase_none_is_announced(tmp_path: Path, clock: Clock, terminal: FakeTerminal) -> None:
    run_live(tmp_path, clock, config(console="live", iterations=4, aux=AuxConfig(every=2, num_minibatches=2)))
    text = text_of(terminal)
    assert "iteration 1/4  ·  1/2 until the auxiliary phase" in text
    assert "iteration 3/4  " in text and "iteration 3/4  ·" not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (100, "100"), (999, "999"), (1000, "1k"), (16_384, "16.4k"), (100_000, "100k"), (999_999, "1M"), (25e6, "25M"), (2e9, "2G")],
)
def test_compact_numbers(number: float, text: str) -> None:
    assert console._compact(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (23.456, "23.5"), (-0.0123456, "-0.0123"), (1234.6, "1,235"), (9.87e-6, "9.9e-06"), (math.inf, "inf"), (math.nan, "-")],
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert console._number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (98.0, "98 s"), (600.0, "10 min"), (7_500.0, "2 h 05 min"), (86_399.0, "24 h 00 min"), (200_000.0, "2 d 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert console._duration(seconds) == text
