"""Claims: one owner at a time, whatever dies when."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phasicrl.sweeps import attempts
from phasicrl.sweeps.attempts import (
    TAKEN_OVER,
    Claim,
    Watch,
    all_attempts,
    attempt_at,
    started,
    this_machine,
)
from tests.faults.harness import wait_for
from tests.helpers import Clock

TRIALS = [f"t{number}" for number in range(6)]

WORKER = """
import fcntl, os, sys, time
from pathlib import Path
from phasicrl.sweeps.attempts import Claim, Watch, all_attempts, attempt_at
folder, trials, watch = Path(sys.argv[1]), sys.argv[2:], Watch()
while True:
    found = all_attempts(folder)
    left = [t for t in trials if watch.state(found.get(t, []))[0] != "done"]
    if not left:
        break
    for trial in left:
        before = found.get(trial, [])
        if watch.state(before)[0] != "pending":
            continue
        number = before[-1].number + 1 if before else 1
        try:
            claim = Claim(attempt_at(folder, trial, number))
        except FileExistsError:
            continue
        with (folder / f"{trial}.held").open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another one trains it
            held.write(f"{os.getpid()}\\n")
            held.flush()
            time.sleep(0.15)
        claim.end("done")
    time.sleep(0.01)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / attempts.ATTEMPTS).mkdir()
    return tmp_path


def start(folder: Path, code: str, *words: str) -> subprocess.Popen[bytes]:
    with (folder / "errors.txt").open("ab") as errors:
        return subprocess.Popen([sys.executable, "-c", code, str(folder), *words], stderr=errors)


def owners(folder: Path) -> list[int]:
    """Processes that have a trial now."""
    found = []
    for of in all_attempts(folder).values():
        about = of[-1].read()
        if about and "outcome" not in about:
            found.append(about["pid"])
    return found


def test_no_trial_has_two_owners_and_none_is_lost_when_processes_are_killed(folder: Path) -> None:
    """A lock of the system's, which nothing here relies on, is the witness."""
    pick, kills = random.Random(0), 0
    processes = [start(folder, WORKER, *TRIALS) for _ in range(4)]
    while kills < 5:
        victims = wait_for(
            lambda: [p for p in processes if p.poll() is None and p.pid in owners(folder)]
        )
        victim = pick.choice(victims)
        victim.kill()
        victim.wait()
        kills += 1
        processes.append(start(folder, WORKER, *TRIALS))
    assert {process.wait(60) for process in processes} == {0, -signal.SIGKILL}
    assert (folder / "errors.txt").read_text() == ""
    for trial, of in all_attempts(folder).items():
        assert [attempt.number for attempt in of] == list(range(1, len(of) + 1))
        ends = [attempt.read().get("outcome") for attempt in of]
        assert ends[-1] == "done" and "done" not in ends[:-1], (trial, ends)
    assert set(all_attempts(folder)) == set(TRIALS)


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


def test_an_owner_renews_its_claim_and_ends_when_it_was_taken_for_dead(folder: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from phasicrl.sweeps.attempts import Claim, attempt_at
Claim(attempt_at(Path(sys.argv[1]), "a", 1), lease=0.4)
time.sleep(60)
"""
    process, attempt = start(folder, code), attempt_at(folder, "a", 1)
    wait_for(attempt.path.exists)
    wait_for(lambda: attempt.read().get("pid") == process.pid)
    before = attempt.path.stat().st_mtime_ns
    wait_for(lambda: attempt.path.stat().st_mtime_ns > before)
    assert json.loads(attempt.path.read_text())["pid"] == process.pid
    attempt.successor.path.touch()
    begun = time.monotonic()
    assert process.wait(30) == TAKEN_OVER and time.monotonic() - begun < 10
