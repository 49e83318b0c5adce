"""Runs that would fill the same cores compute in turns, and none waits for ever."""

import fcntl
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from phasicrl.execution import turn_lock
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan
from phasicrl.execution.turn_lock import BACKOFF_SECONDS, TIMEOUT_SECONDS, CpuTurnLock
from tests.faults.harness import wait_for
from tests.helpers import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turn_lock, "time", SimpleNamespace(monotonic=clock, sleep=clock.wait))
    return clock


def test_one_at_a_time_and_none_twice_before_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_lock, "TIMEOUT_SECONDS", 1000.0)
    mine, other, order = CpuTurnLock(tmp_path), CpuTurnLock(tmp_path), []

    def compute_once() -> None:
        with other.take_cpu_turn():
            order.append("other")

    def is_waiting() -> bool:
        """Try the lock that the next run holds, for a moment."""
        with next(tmp_path.glob("*.next")).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    thread = threading.Thread(target=compute_once)
    with mine.take_cpu_turn():
        thread.start()
        wait_for(is_waiting)
        order.append("mine")
    with mine.take_cpu_turn():
        order.append("mine")
    thread.join()
    assert order == ["mine", "other", "mine"]


def test_a_run_stopped_in_its_turn_delays_others_two_seconds_of_every_thirty(
    tmp_path: Path, clock: Clock
) -> None:
    stopped, mine, third = CpuTurnLock(tmp_path), CpuTurnLock(tmp_path), CpuTurnLock(tmp_path)

    def seconds(waiting: CpuTurnLock) -> float:
        start = clock.now
        with waiting.take_cpu_turn():
            return clock.now - start

    with stopped.take_cpu_turn():
        assert seconds(mine) > TIMEOUT_SECONDS
        assert seconds(mine) < 0.01 and seconds(mine) < 0.01
        clock.now += BACKOFF_SECONDS
        assert seconds(mine) > TIMEOUT_SECONDS, "then it waits again"
    assert seconds(mine) < 0.01
    with stopped.take_cpu_turn():
        assert seconds(mine) > TIMEOUT_SECONDS, "once it has had a turn, it waits again"
    with mine.take_cpu_turn():
        assert seconds(third) > TIMEOUT_SECONDS, "and others wait for it"


def test_without_a_folder_of_its_user_no_run_waits(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    for folder in (tmp_path / "file", tmp_path):
        first, second = CpuTurnLock(folder), CpuTurnLock(folder)
        start = clock.now
        with first.take_cpu_turn(), second.take_cpu_turn():
            assert clock.now == start


def test_a_run_takes_turns_if_its_plan_says_so() -> None:
    assert Executor(Plan()).take_cpu_turn is nullcontext
    assert isinstance(Executor(Plan(take_turns=True)).take_cpu_turn.__self__, CpuTurnLock)  # type: ignore
