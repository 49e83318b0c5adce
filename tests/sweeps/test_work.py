"""Work: what is left is trained once, what fails is tried again, what is stopped goes on."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import gymnasium as gym
import pytest

from phasicrl.algorithm import train
from phasicrl.host.signals import Preempted
from phasicrl.runs.directory import RunDirectory
from phasicrl.sweeps import submit, work
from phasicrl.sweeps.attempts import all_attempts
from phasicrl.sweeps.search import Space, create_search
from phasicrl.sweeps.sweep import Sweep, configs_of, create_sweep
from phasicrl.sweeps.work import FailedTrialsError, Worker, work_on_sweep
from tests.faults.harness import differences, small, wait_for
from tests.helpers import rows_of

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from phasicrl.sweeps.attempts import TAKEN, Claim, attempt_at
folder, trial, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if os.environ.get("BROKEN"):
    sys.exit(1)
try:
    claim = Claim(attempt_at(folder, trial, number))
except FileExistsError:
    sys.exit(TAKEN)
def save(*_):
    claim.end("released", saved=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
with (folder / "seen.txt").open("a") as file:
    file.write(f"{trial} {os.environ.get('CUDA_VISIBLE_DEVICES')} {' '.join(sys.argv[4:])}\\n")
time.sleep(float(os.environ.get("SECONDS", "0")))
end = os.environ.get("END", "done")
if end == "killed":
    os.kill(os.getpid(), 9)
if end.isdigit():
    os._exit(int(end))
claim.end("failed" if end == "failed" and number < 3 else "done")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of three trials, whose program only says that it was there."""
    monkeypatch.setattr(work, "PROGRAM", (sys.executable, "-c", PROGRAM))
    monkeypatch.setattr(work, "_SCAN", 0.2)
    create_sweep(tmp_path / "sweep", [("a", small(tmp_path, "ppo"))], seeds=(1, 2, 3))
    return tmp_path / "sweep"


def outcomes(folder: Path) -> list[list[str | None]]:
    """What came of each attempt at each trial."""
    found = sorted(all_attempts(folder).items())
    return [[attempt.read().get("outcome") for attempt in of] for _, of in found]


def seen(folder: Path) -> list[str]:
    return (folder / "seen.txt").read_text().splitlines()


def test_each_trial_is_trained_once(folder: Path) -> None:
    told: list[tuple[str, str]] = []
    work_on_sweep(folder, jobs=2, on_trial=lambda *words: told.append(words))
    assert outcomes(folder) == [["done"]] * 3 and len(seen(folder)) == 3
    assert sorted(told) == [(trial.id, "done") for trial in Sweep(folder).trials()]
    work_on_sweep(folder)
    assert len(seen(folder)) == 3


def test_what_fails_is_tried_again_as_often_as_was_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("END", "failed")
    with pytest.raises(FailedTrialsError, match="3 trials failed more than 1 times"):
        work_on_sweep(folder, retries=1)
    assert outcomes(folder) == [["failed", "failed"]] * 3
    work_on_sweep(folder, retries=2)
    assert outcomes(folder) == [["failed", "failed", "done"]] * 3


@pytest.mark.parametrize(
    ("end", "code"), [("killed", -9), *((str(code), code) for code in (1, 2, 3, 4, 5, 6))]
)
def test_a_process_that_ended_without_a_word_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int
) -> None:
    """Killed, or by itself with a code of a run's: 4 where an environment hangs for good."""
    monkeypatch.setenv("END", end)
    with pytest.raises(FailedTrialsError):
        work_on_sweep(folder, retries=0, jobs=3)
    assert outcomes(folder) == [["failed"]] * 3
    errors = {of[0].read()["error"] for of in all_attempts(folder).values()}
    assert errors == {f"it ended with {code}"}


def test_a_trial_that_another_worker_got_first_is_left_to_it(folder: Path) -> None:
    told: list[str] = []
    worker = Worker(folder, on_trial=lambda id, outcome: told.append(id))
    trial, attempt = next(worker._left())
    attempt.path.touch()  # between our look and our claim
    worker._children.append(worker._start(trial, attempt))
    wait_for(worker._reap)
    assert not told and attempt.path.read_text() == ""
    assert trial.id not in {left.id for left, _ in worker._left()}


def test_gpus_are_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS", "0.4")
    work_on_sweep(folder, gpus=("4,7",), per_gpu=2, cores=8)
    shares = Counter(line.split()[1] for line in seen(folder))
    assert shares == {"4": 2, "7": 1}, "all at once, first one on each"
    assert all("--jobs 4" in line and "--cores 8" in line for line in seen(folder))


def test_trials_import_what_the_command_line_was_told_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "ASKED_IMPORTS", ["my.envs"])
    work_on_sweep(folder)
    assert len(seen(folder)) == 3
    assert all(line.endswith("--import my.envs") for line in seen(folder))


def test_the_jobs_of_a_cluster_import_what_its_command_line_was_told_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    jobs: list[submit.ClusterJob] = []
    with monkeypatch.context() as here:
        here.setattr(submit, "ASKED_IMPORTS", ["mine"])
        here.setattr(submit, "_submit", lambda job, *_: jobs.append(job))
        submit.submit_sweep(folder)
    try:
        pickle.loads(pickle.dumps(jobs[0]))()  # in a process that knows nothing of it
        assert "mine" in sys.modules
    finally:
        sys.modules.pop("mine", None)
    assert len(seen(folder)) == 3
    assert all(line.endswith("--import mine") for line in seen(folder))


def test_the_trials_of_a_search_import_what_was_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "yours"):
        (tmp_path / f"{name}.py").write_text(
            "import gymnasium as gym\n"
            "from gymnasium.envs.classic_control import CartPoleEnv\n"
            f"gym.register('{name}-v0', CartPoleEnv)\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    ids = ("gymnasium:mine:mine-v0", "gymnasium:yours:yours-v0", "gymnasium:CartPole-v1")
    search = tmp_path / "search"
    try:
        create_search(search, small(tmp_path, "ppo"), {"env.id": Space(ids)}, trials=1)
        with monkeypatch.context() as without:
            without.delitem(sys.modules, "yours")  # as in a process that did not ask for it
            with pytest.raises(ValueError, match="if you trust it, add --import yours"):
                work_on_sweep(search)
        work_on_sweep(search)
        (line,) = seen(search)
        assert line.endswith("--import mine --import yours")
    finally:
        for name in ("mine", "yours"):
            sys.modules.pop(name, None)
            gym.registry.pop(f"{name}-v0", None)


def test_numbers_that_cannot_be_are_refused(folder: Path) -> None:
    for wrong, says in (
        ({"jobs": 0}, "jobs is 0; give at least 1"),
        ({"gpus": ("0",), "per_gpu": 0}, "per_gpu is 0; give at least 1"),
        ({"retries": -1}, "retries is -1; give 0 or more"),
        ({"gpus": ("0",), "jobs": 2}, "jobs is 2, but with gpus"),
    ):
        with pytest.raises(ValueError, match=says):
            Worker(folder, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not the folder of a sweep"):
        work_on_sweep(folder.parent)


def test_a_program_that_cannot_start_ends_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(RuntimeError, match=r"cannot be started; .*001.txt says why"):
        work_on_sweep(folder)


def test_told_to_end_it_releases_what_is_under_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS", "60")

    def tell() -> None:
        wait_for(lambda: (folder / "seen.txt").exists() and len(seen(folder)) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    with pytest.raises(Preempted):
        work_on_sweep(folder, jobs=2)
    teller.join()
    assert outcomes(folder) == [["released"]] * 2
    assert all(of[0].read()["saved"] for of in all_attempts(folder).values()), "in order"
    monkeypatch.setenv("SECONDS", "0")
    work_on_sweep(folder)
    assert outcomes(folder) == [["released", "done"]] * 2 + [["done"]]


def test_a_signal_that_comes_in_a_destructor_is_not_lost(folder: Path) -> None:
    class Tell:
        def __del__(self) -> None:  # Python passes over exceptions that are raised in here
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        work_on_sweep(folder, on_trial=lambda id, outcome: Tell() and None)
    assert outcomes(folder)[0] == ["done"] and len(seen(folder)) < 3


def test_who_does_not_wait_leaves_when_others_are_alive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS", "600")
    worker = Worker(folder, jobs=3)
    worker._start_trials()
    try:
        wait_for(lambda: (folder / "seen.txt").exists() and len(seen(folder)) == 3)
        work_on_sweep(folder, wait=False)
        assert outcomes(folder) == [[None]] * 3
    finally:
        worker.stop()


def begin(folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "phasicrl", "sweep", "work", str(folder)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_workers_lose_nothing_and_the_runs_are_the_unbroken_ones(tmp_path: Path) -> None:
    """One worker is killed, the process that trains for another; a third trains on."""
    folder = tmp_path / "sweep"
    config = small(folder, "ppo", total_env_steps=150 * 64)
    create_sweep(folder, [("a", config)], seeds=(1, 2))
    workers = [begin(folder) for _ in range(2)]

    def running() -> dict[int, int]:
        """By seed the process of each trial that has got somewhere."""
        found = {}
        for trial in Sweep(folder).trials():
            of, (run,) = all_attempts(folder).get(trial.id, []), Sweep(folder).runs(trial)
            if of and run is not None and len(run.last_rows(15)) == 15:
                found[trial.seeds[0]] = of[-1].read()["pid"]
        return found

    pids = wait_for(lambda: running() if len(running()) == 2 else None, 60)
    parents = {seed: parent_of(pid) for seed, pid in pids.items()}
    os.kill(parents[1], signal.SIGKILL)  # the process that trains ends in order
    os.kill(pids[2], signal.SIGKILL)  # and here its worker tries again
    workers.append(begin(folder))
    assert sorted(worker.wait(120) for worker in workers) == [-signal.SIGKILL, 0, 0]
    for trial in Sweep(folder).trials():
        ends = [attempt.read().get("outcome") for attempt in all_attempts(folder)[trial.id]]
        assert ends in (["released", "done"], ["failed", "done"]), ends
        (run,) = Sweep(folder).runs(trial)
        (asked,) = configs_of(trial, folder)
        assert run is not None and len(RunDirectory.of(asked)) == 1 and len(run.card["resumed"]) > 0
        whole = train(asked.changed({"output_dir": str(tmp_path / "whole")}))
        unbroken = RunDirectory(whole.directory)
        assert not list(differences(unbroken.weights(), run.weights()))
        assert not list(differences(rows_of(unbroken), rows_of(run)))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
