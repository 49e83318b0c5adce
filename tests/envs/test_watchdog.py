"""Environments of this process that hang end it with exit code 4; a stopped process is no hang."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from phasicrl.algorithm import resume
from phasicrl.envs import watchdog
from phasicrl.envs.protocol import EnvError
from phasicrl.envs.watchdog import EnvWatchdog
from phasicrl.runs.directory import RunDirectory
from tests.helpers import Corridor

ROOT = Path(__file__).parents[2]


class Ended(BaseException):
    """Exception in place of the end of the process."""


def test_only_a_call_that_lasts_for_its_seconds_is_a_hang(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The watchdog counts ticks, not the clock: an hour of Ctrl-Z is one tick."""
    made: list[EnvWatchdog] = []

    def life() -> Iterator[object]:
        yield  # nothing is called
        for _ in range(5):
            made[0].current_call = "step()", 3.0  # the same call again is another one
            yield from range(3)
            made[0].current_call = None
            yield
        made[0].current_call = "reset()", 3.0
        yield from range(4)

    class HandSet(threading.Event):
        """Event whose timeouts come on request, however late."""

        ticks = life()

        def wait(self, timeout: float | None = None) -> bool:
            return next(self.ticks, "closed") == "closed"

    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(threading, "Event", HandSet)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    dog = EnvWatchdog("mine")
    made[:] = [dog]
    with pytest.raises(Ended, match="4"):
        dog._exit_on_hang()
    assert "mine: reset() has not returned within 3.0 s; it hangs" in capfd.readouterr().err


def test_a_call_that_begins_during_a_tick_has_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reset, step = ("reset()", 5.0), ("step()", 2.0)
    seen = iter([[reset], [reset], [reset], [reset, step], [step], [None]])
    now: list[Any] = [None]

    def wait(timeout: float) -> bool:
        now[:] = next(seen, [])
        return not now

    class Changing(EnvWatchdog):
        @property
        def current_call(self) -> Any:
            return now.pop(0) if len(now) > 1 else now[0]

        @current_call.setter
        def current_call(self, call: Any) -> None: ...

    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: pytest.fail("no call took its time"))
    dog = Changing("mine")
    monkeypatch.setattr(dog._closed, "wait", wait)
    dog._exit_on_hang()


HANGS = """
import ctypes, os, sys, threading
from pathlib import Path
from types import SimpleNamespace
from phasicrl.algorithm import learn
from phasicrl.config import CheckpointConfig
from phasicrl.envs import watchdog
from phasicrl.training.build import start_run
from tests.helpers import Corridor, tiny

hangs = threading.Event()

class Ticks(threading.Event):
    def wait(self, timeout=None):  # a second passes at once, and only while it hangs
        hangs.wait()
        return self.is_set()

watchdog.threading = SimpleNamespace(Event=Ticks, Thread=threading.Thread)

class Stuck(Corridor):
    num_steps = 0

    def step(self, action):
        Stuck.num_steps += 1
        if Stuck.num_steps > 2 * 32 + 5:
            mutex = ctypes.create_string_buffer(64)
            hangs.set()
            for _ in range(2):  # the second waits for the first, signals or not
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return super().step(action)

if "nothing can be printed" in sys.argv:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
every = CheckpointConfig(every_minutes=None, every_iterations=1)
with start_run(tiny(Path(sys.argv[1]), checkpoint=every), make_env=Stuck) as run:
    learn(run)
"""


@pytest.mark.long
@pytest.mark.parametrize("printed", ["all can be printed", "nothing can be printed"])
def test_a_call_into_c_that_never_returns_ends_the_process(tmp_path: Path, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path), printed],
        capture_output=True, text=True, timeout=100,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == EnvError.exit_code == 4
    if printed == "all can be printed":
        assert all(words in done.stderr for words in ("step() has not returned", "in learn"))
    (run,) = tmp_path.iterdir()
    assert [path.name for path in RunDirectory(run).checkpoints][-1] == "step-000000000064"
    assert resume(run, make_env=Corridor).env_steps > 64
