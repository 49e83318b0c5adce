"""Runs that would fill the same cores compute in turns, and none waits for ever."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from phasicrl.execution import device, turns
from phasicrl.execution.plan import Plan
from phasicrl.execution.turns import Turns
from tests.faults.harness import wait_for
from tests.helpers import Clock


def test_one_at_a_time_and_none_twice_before_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 1000.0)
    mine, other, probe, order = Turns(tmp_path), Turns(tmp_path), Turns(tmp_path), []

    def compute_once() -> None:
        with other.turn():
            order.append("other")

    def is_waiting() -> bool:
        """Try the lock that the next run holds, for a moment."""
        is_free = turns._lock(probe._next, 0.0)
        if is_free:
            fcntl.flock(probe._next, fcntl.LOCK_UN)
        return not is_free

    thread = threading.Thread(target=compute_once)
    with mine.turn():
        thread.start()
        wait_for(is_waiting)
        order.append("mine")
    with mine.turn():
        order.append("mine")
    thread.join()
    assert order == ["mine", "other", "mine"]


def test_who_was_stopped_in_its_turn_is_waited_for_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    wait = SimpleNamespace(monotonic=clock, sleep=clock.wait)
    monkeypatch.setattr(turns, "time", wait)
    patience, impatience = turns.PATIENCE, turns.IMPATIENCE
    stopped, mine, third = Turns(tmp_path), Turns(tmp_path), Turns(tmp_path)

    def seconds(waiting: Turns) -> float:
        start = clock.now
        with waiting.turn():
            return clock.now - start

    with stopped.turn():
        assert seconds(mine) > patience
        assert seconds(mine) < 0.01 and seconds(mine) < 0.01
        clock.now += impatience
        assert seconds(mine) > patience, "now and then it is asked again"
    assert seconds(mine) < 0.01
    with stopped.turn():
        assert seconds(mine) > patience, "once it has had a turn, it waits again"
    with mine.turn():
        assert seconds(third) > patience, "and others wait for it"


def test_without_a_folder_all_compute_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = Turns(tmp_path / "file"), Turns(tmp_path / "file")
    with first.turn(), second.turn():
        pass


@pytest.mark.parametrize("takes", [False, True])
def test_a_run_takes_turns_if_its_plan_says_so(
    takes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Turns] = []
    monkeypatch.setattr(device, "Turns", lambda: made.append(Turns(tmp_path)) or made[-1])
    monkeypatch.setattr(device.torch, "set_num_threads", lambda number: None)
    with device.set_up_threads(Plan(take_turns=takes))():
        assert bool(made) == takes
