"""A run's console: plain lines, the live display, or nothing."""

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TextIO, cast

import pytest

from phasicrl.config import Config, EnvConfig, LogConfig, PPOConfig
from phasicrl.runs import console
from phasicrl.runs.console import Display
from tests.helpers import Clock

BATCH = 8 * 16  # environment steps of an iteration of `config()`


def config(console: Any = "plain", *, iterations: int = 10, **log: Any) -> Config:
    return Config(
        name="demo", env=EnvConfig(id="procgen:coinrun", num_envs=8),
        ppo=PPOConfig(num_steps=16, num_minibatches=2), total_env_steps=iterations * BATCH,
        log=LogConfig(**{"console": console, "tensorboard": False, **log}),
    )  # fmt: skip


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
    """Return the printed text, without the codes for colors and the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


@contextmanager
def shown(settings: Config, stream: TextIO, env_steps: int = 0) -> Iterator[Display]:
    """Open a display, and close it at the end."""
    display = Display(settings, env_steps, stream)
    yield display
    display.close()


def test_plain_lines_by_hand(clock: Clock) -> None:
    record = {
        "charts/episodic_return_100": 12.345, "charts/episodic_length": 1234.5,
        "losses/entropy": 2.75, "losses/approx_kl": 0.004212, "losses/explained_variance": math.nan,
        "losses/value_loss": -9.87e-6, "charts/SPS": 3.0, "own/lines": 7.0, "own/others": 8.0,
    }  # fmt: skip
    stream = io.StringIO()
    settings = config(iterations=20).with_updates({"log.console_metrics": ("own/lines", "others")})
    with shown(settings, stream, env_steps=BATCH) as display:
        clock.now += 60  # environments, networks, compilers: they say nothing about the speed
        display.show_stage("rollout")
        clock.now += 4
        display.show_metrics(record, 2 * BATCH)
        display.show_metrics({"own/at the end": 1.0}, 2 * BATCH)  # which has no column
    assert stream.getvalue() == (
        " 10.0 %  256/2,560 steps  32 steps/s  return 12.3  length 1,234  entropy 2.75"
        "  kl 0.00421  expl.var -  value loss -9.87e-06  own/lines 7  own/others 8  0:01:12 left\n"
    )


def test_plain_lines_are_two_seconds_apart_and_the_last_is_never_lost(clock: Clock) -> None:
    stream = io.StringIO()
    with shown(config(iterations=100), stream) as display:
        for iteration in range(1, 24):  # 0.5 s each
            clock.now += 0.5
            display.show_stage("rollout")
            display.show_metrics({}, iteration * BATCH)
    percents = [float(line.split("%")[0]) for line in stream.getvalue().splitlines()]
    assert percents == [1, 5, 9, 13, 17, 21, 23]


@pytest.mark.parametrize(("choice", "environment", "expected"), [
    ("auto", {}, True), ("auto", {"NO_COLOR": "1"}, True), ("auto", {"CI": ""}, True),
    ("auto", {"TERM": "dumb"}, False), ("auto", {"CI": "true"}, False), ("plain", {}, False),
    ("off", {}, False),
])  # fmt: skip
def test_a_terminal_gets_the_live_display_where_somebody_can_watch(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch, choice: str,
    environment: dict[str, str], expected: bool,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with shown(config(choice), terminal) as display:
        display.show_stage("rollout")
    assert ("\x1b[?25l" in terminal.getvalue()) == expected, "the cursor is hidden"


def test_files_and_pipes_get_plain_text_in_their_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    written = io.BytesIO()
    with shown(config("auto"), io.TextIOWrapper(written, encoding="ascii")) as display:
        display.show_stage("rollout")
        display.show_message("runs/Größe [a] :x:" + 100 * "y" + "\x1b[31m")
        assert written.getvalue() == b"runs/Gr\\xf6\\xdfe [a] :x:" + 100 * b"y" + b"\\x1b[31m\n"
        display.show_metrics({"losses/aux/kl_loss": 1e-9}, BATCH)
        assert b"aux kl 1e-09" in written.getvalue() and b"\x1b" not in written.getvalue()


@pytest.mark.parametrize("choice", ["auto", "live", "plain", "off"])
def test_nothing_is_shown_where_there_is_no_stream(choice: str) -> None:
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    for stream in (None, closed, cast(Any, SimpleNamespace(write=len, flush=list))):
        display = Display(config(choice), 0, stream)
        display.show_stage("rollout")
        display.show_message("hello")
        display.show_metrics({}, BATCH)
        display.close()


def run_live(clock: Clock, terminal: FakeTerminal, settings: Config) -> None:
    """Show two iterations, the second with an auxiliary phase, and the start of a third."""
    with shown(settings, terminal) as display:
        display.show_stage("rollout")
        clock.now += 5
        display.show_metrics({"charts/episodic_return_100": 21.5}, BATCH)
        display.show_stage("rollout")
        display.show_message("checkpoint [saved]")
        clock.now += 5
        display.show_stage("auxiliary 2/6")
        display.show_metrics({"losses/aux/kl_loss": 0.004}, 2 * BATCH)
        clock.now += 1
        display.show_stage("rollout")


def test_the_live_display_shows_stage_and_metrics(clock: Clock, terminal: FakeTerminal) -> None:
    run_live(clock, terminal, config("auto", iterations=5))
    text = text_of(terminal)
    assert "checkpoint [saved]" in text and "auxiliary 2/6" in text
    assert re.search(r"rollout .*20\.0 % +128/640 steps +26 steps/s +0:00:20", text)
    assert re.search(r"stopped .*40\.0 % +256/640 steps +26 steps/s +0:00:15", text)
    assert "return 21.5  aux kl 0.004" in text
    sent = terminal.getvalue()
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l"), "the cursor is shown again"


def test_the_live_display_ends_finished_when_the_budget_is_used_up(
    clock: Clock, terminal: FakeTerminal
) -> None:
    run_live(clock, terminal, config("live", iterations=2))
    assert "finished" in text_of(terminal) and "stopped" not in text_of(terminal)


def test_the_live_display_is_drawn_at_most_four_times_a_second(
    clock: Clock, terminal: FakeTerminal
) -> None:
    with shown(config("live"), terminal) as display:
        for _ in range(1000):
            clock.now += 0.001
            display.show_stage("policy")
    assert 2 <= text_of(terminal).count("policy") <= 5
