"""What a person sees of a run: speed, time left, plain lines and the live display."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest

from phasicrl.config import AuxConfig, Config, EnvConfig, LogConfig, PPOConfig
from phasicrl.runs import console
from phasicrl.runs.console import Display, open_display
from phasicrl.runs.metrics import METRICS
from tests.helpers import Clock

BATCH = 8 * 16  # environment steps of an iteration of `config()`


def config(
    choice: Any = "plain",
    *,
    aux: AuxConfig | None = None,
    iterations: int = 10,
    ppo: PPOConfig | None = None,
) -> Config:
    return Config(
        name="demo",
        env=EnvConfig(id="procgen:coinrun", num_envs=8),
        ppo=ppo or PPOConfig(num_steps=16, num_minibatches=2),
        aux=aux,
        total_env_steps=iterations * BATCH,
        log=LogConfig(console=choice),
    )


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
    """What was sent, without the codes for colors and the cursor."""
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


@pytest.mark.parametrize("choice", ["plain", "live"])
def test_what_is_prepared_before_the_first_rollout_does_not_count(
    clock: Clock, terminal: FakeTerminal, choice: str
) -> None:
    with shown(config(choice, iterations=10), terminal) as display:
        clock.now += 60  # environments, networks, compilers
        display.progress("rollout", 0)
        clock.now += 1
        display.progress("policy", BATCH)
        display.record({}, BATCH)
        clock.now += 1
        display.progress("rollout", BATCH)
    assert "128 steps/s" in text_of(terminal) and (
        "9 s left" in text_of(terminal) or "8 s left" in text_of(terminal)
    )


def test_time_left_of_ppg_counts_the_auxiliary_phases_to_come() -> None:
    pace = console._Pace(
        config(iterations=12, aux=AuxConfig(every=4, epochs=6, num_minibatches=2)), 0, 0.0
    )
    seconds = {"time/rollout": 1.0, "time/policy": 0.5, "time/auxiliary": 0.0}
    for iteration in range(1, 4):
        pace.iteration(seconds, iteration * BATCH, iteration * 2.0)
    # No phase is measured yet: 6 epochs over 4 iterations at 0.5 s. Two of them, none at the end,
    # and 9 iterations of 2 s.
    assert pace.seconds_left(6.0) == pytest.approx(9 * 2 + 2 * 6 * 4 * 0.5)
    pace.iteration(seconds | {"time/auxiliary": 20.0}, 4 * BATCH, 28.0)
    assert pace.seconds_left(28.0) == pytest.approx(8 * 2 + 1 * 20)


def test_time_left_knows_the_knobs_of_the_auxiliary_phase() -> None:
    aux = AuxConfig(every=4, epochs=3, run_every=2, iterations_per_epoch=2, num_minibatches=2)
    ppo = PPOConfig(num_steps=16, num_minibatches=2, policy_epochs=2, value_epochs=4)
    pace = console._Pace(config(iterations=17, aux=aux, ppo=ppo), 0, 0.0)
    pace.iteration({"time/policy": 2.0, "time/value": 8.0, "time/auxiliary": math.nan}, BATCH, 10.0)
    # A pass with both losses takes 2/2 + 8/4 = 3 s; 3 epochs over 2 iterations; every 8th iteration
    # has one: 2 of 17.
    assert pace.seconds_left(10.0) == pytest.approx(16 * 10 + 2 * 3 * 2 * 3.0)


def test_speed_is_recent() -> None:
    pace = console._Pace(config(iterations=1000), 0, 0.0)
    for iteration in range(1, 101):
        pace.iteration({}, iteration * BATCH, float(iteration))
    for iteration in range(101, 401):
        pace.iteration({}, iteration * BATCH, 100 + (iteration - 100) / 10)
    assert pace.steps_per_second() == pytest.approx(10 * BATCH)


def test_plain_lines_by_hand(clock: Clock, terminal: FakeTerminal) -> None:
    record = {
        "charts/episodic_return_100": 12.345, "charts/episodic_length": 1234.5,
        "losses/entropy": 2.7, "losses/approx_kl": 0.004212, "losses/explained_variance": math.nan,
        "charts/SPS": 3.0,
    }  # fmt: skip
    with shown(config(iterations=20), terminal) as display:
        clock.now += 4
        display.record(record, BATCH)
    assert terminal.getvalue() == (
        "  5.0 %  128/2.56k steps  32 steps/s  return 12.3  length 1,234  entropy 2.70"
        "  kl 0.00421  expl.var -  76 s left\n"
    )


def test_plain_lines_are_two_seconds_apart_and_the_last_is_never_lost(
    clock: Clock, terminal: FakeTerminal
) -> None:
    with shown(config(iterations=100), terminal) as display:
        for iteration in range(1, 24):  # 0.5 s each
            clock.now += 0.5
            display.progress("rollout", iteration * BATCH)
            display.record({}, iteration * BATCH)
    assert [float(line.split("%")[0]) for line in terminal.getvalue().splitlines()] == [
        1,
        5,
        9,
        13,
        17,
        21,
        23,
    ]


def test_plain_lines_are_ascii_and_messages_come_at_once(terminal: FakeTerminal) -> None:
    with shown(config(), terminal) as display:
        display.message("checkpoint saved")
        display.record({"losses/aux/kl_loss": 1e-9}, BATCH)
        out = terminal.getvalue()
        assert out.startswith("checkpoint saved\n") and "aux kl 1.0e-09" in out and out.isascii()


def test_off_is_silent(terminal: FakeTerminal, capsys: pytest.CaptureFixture[str]) -> None:
    with shown(config("off"), terminal) as display:
        display.progress("rollout", 1)
        display.message("hello")
        display.record({}, BATCH)
    assert terminal.getvalue() == capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "_Live"),
        ({"NO_COLOR": "1"}, "_Live"),
        ({"TERM": "dumb"}, "_Lines"),
        ({"CI": "true"}, "_Lines"),
        ({"CI": ""}, "_Live"),
    ],
)
def test_auto_is_live_only_where_somebody_can_watch(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], kind: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert type(open_display(config("auto"), 0, terminal)).__name__ == kind


@pytest.mark.parametrize(
    "stream", [io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")]
)
def test_auto_is_plain_in_files_and_pipes(stream: TextIO) -> None:
    assert isinstance(open_display(config("auto"), 0, stream), console._Lines)


def test_a_terminal_that_cannot_show_the_signs_gets_lines(terminal: FakeTerminal) -> None:
    terminal.encoding = "latin-1"
    assert isinstance(open_display(config("auto"), 0, terminal), console._Lines)


def test_the_metrics_that_are_shown_exist() -> None:
    assert {
        name for display in (console._Lines, console._Live) for _, name in display._SHOWN
    } <= METRICS.keys()


def test_the_choice_of_a_display_is_obeyed(terminal: FakeTerminal) -> None:
    assert isinstance(open_display(config("plain"), 0, terminal), console._Lines)
    assert isinstance(open_display(config("live"), 0, io.StringIO()), console._Live)


def run_live(clock: Clock, terminal: FakeTerminal, settings: Config) -> None:
    """Two iterations, the second with an auxiliary phase, and the beginning of a third."""
    with shown(settings, terminal) as display:
        display.progress("rollout", 0)
        clock.now += 5
        display.progress("policy", BATCH)
        display.record(
            {"charts/episodic_return_100": 21.5, "losses/entropy": 2.0, "time/auxiliary": 0.0},
            BATCH,
        )
        display.message("checkpoint [saved]")
        clock.now += 5
        display.progress("auxiliary 2/6", 2 * BATCH)
        display.record({"losses/aux/kl_loss": 0.004, "time/auxiliary": 2.0}, 2 * BATCH)
        clock.now += 1
        display.progress("rollout", 2 * BATCH + 64)


def test_the_live_display_shows_the_place_and_the_numbers(
    clock: Clock, terminal: FakeTerminal
) -> None:
    run_live(
        clock, terminal, config("live", iterations=5, aux=AuxConfig(every=2, num_minibatches=2))
    )
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
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), (
        "the cursor is shown again"
    )


def test_the_live_display_of_ppo_has_no_auxiliary_phase_and_ends_finished(
    clock: Clock, terminal: FakeTerminal
) -> None:
    with shown(config("auto", iterations=1), terminal) as display:
        display.progress("rollout", BATCH)
        display.record({}, BATCH)
    text = text_of(terminal)
    assert "aux" not in text
    assert "finished  ·  iteration 1/1" in text


def test_a_narrow_terminal_shows_everything_on_more_lines(
    clock: Clock, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run_live(
        clock, terminal, config("live", iterations=5, aux=AuxConfig(every=2, num_minibatches=2))
    )
    text = text_of(terminal)
    assert "50.0 %  320/640 steps  26 steps/s" in text and "aux KL" in text and "expl. var." in text
    assert max(len(line) for line in text.replace("\r", "\n").splitlines()) <= 60


def test_the_live_display_is_drawn_at_most_four_times_a_second(
    clock: Clock, terminal: FakeTerminal
) -> None:
    with shown(config("live"), terminal) as display:
        for step in range(1000):
            clock.now += 0.001
            display.progress("policy", step)
        assert text_of(terminal).count("╭─") <= 5


def test_no_color_only_takes_the_color_away(
    clock: Clock, terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run_live(clock, terminal, config("auto", iterations=4))
    assert "╭─" in text_of(terminal)
    assert not re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", terminal.getvalue())


def test_after_the_last_auxiliary_phase_none_is_announced(
    clock: Clock, terminal: FakeTerminal
) -> None:
    run_live(
        clock, terminal, config("live", iterations=4, aux=AuxConfig(every=2, num_minibatches=2))
    )
    text = text_of(terminal)
    assert "iteration 1/4  ·  1/2 until the auxiliary phase" in text
    assert "iteration 3/4  " in text and "iteration 3/4  ·" not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (100, "100"),
        (999, "999"),
        (1000, "1k"),
        (16_384, "16.4k"),
        (100_000, "100k"),
        (999_999, "1M"),
        (25e6, "25M"),
        (2e9, "2G"),
    ],
)
def test_compact_numbers(number: float, text: str) -> None:
    assert console._compact(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (23.456, "23.5"),
        (-0.0123456, "-0.0123"),
        (1234.6, "1,235"),
        (9.87e-6, "9.9e-06"),
        (math.inf, "inf"),
        (math.nan, "-"),
    ],
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert console._number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (98.0, "98 s"),
        (600.0, "10 min"),
        (7_500.0, "2 h 05 min"),
        (86_399.0, "24 h 00 min"),
        (200_000.0, "2 d 7 h"),
        (172_799.7, "2 d 0 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text
