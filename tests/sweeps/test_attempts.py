"""Claims: one owner at a time, whatever dies when."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from phasicrl.sweeps import attempts
from phasicrl.sweeps.attempts import (
    Claim,
    Watch,
    all_attempts,
    attempt_at,
    started,
    this_machine,
)
from tests.faults.harness import wait_for
from tests.helpers import Clock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / attempts.ATTEMPTS).mkdir()
    return tmp_path


def test_one_of_several_gets_a_trial(folder: Path) -> None:
    claim = Claim(attempt_at(folder, "a", 1))
    with pytest.raises(FileExistsError):
        Claim(attempt_at(folder, "a", 1))
    assert Watch().state(all_attempts(folder)["a"]) == ("running", 0)
    claim.end("failed", error="no memory")
    assert Watch().state(all_attempts(folder)["a"]) == ("failed", 1)
    Claim(attempt_at(folder, "a", 2)).end("failed")
    Claim(attempt_at(folder, "a", 3)).end("released")
    assert Watch().state(all_attempts(folder)["a"]) == ("pending", 2)
    Claim(attempt_at(folder, "a", 4)).end("done", diverged=True)
    assert Watch().state(all_attempts(folder)["a"]) == ("done", 2)
    assert all_attempts(folder)["a"][-1].read()["diverged"] is True
    assert Watch().state([]) == ("pending", 0)


def written(folder: Path, **about: object) -> attempts.Attempt:
    attempt = attempt_at(folder, "a", 1)
    attempt.write({"machine": this_machine(), "pid": os.getpid(), "host": "x"} | about)
    return attempt


def test_a_process_of_this_machine_is_asked_for_by_number_and_beginning(folder: Path) -> None:
    attempt = written(folder, started=started(os.getpid()))
    assert Watch().state([attempt]) == ("running", 0)
    written(folder, started="1")  # the number was given to another process since
    assert Watch().state([attempt]) == ("pending", 0)
    ended = subprocess.Popen(["true"])
    wait_for(lambda: started(ended.pid) is None)  # though nobody has asked for its end yet
    ended.wait()


def test_another_machine_s_owner_must_renew_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is not looked at, which may be an hour wrong."""
    clock = Clock()
    monkeypatch.setattr(attempts.time, "monotonic", clock)
    attempt, watch = written(folder, machine="another", started="1"), Watch(lease=60)
    os.utime(attempt.path, (1, 1))
    assert watch.state([attempt]) == ("running", 0) and not watch.has_seen_alive(attempt)
    clock.now += 59
    os.utime(attempt.path, (2, 2))
    assert watch.state([attempt]) == ("running", 0) and watch.has_seen_alive(attempt)
    clock.now += 60
    assert watch.state([attempt]) == ("running", 0)
    clock.now += 1
    assert watch.state([attempt]) == ("pending", 0)


def test_a_file_whose_owner_has_not_written_it_yet_is_a_claim(folder: Path) -> None:
    attempt = attempt_at(folder, "a", 1)
    attempt.path.touch()
    assert Watch().state([attempt]) == ("running", 0)
