"""Two processes never write into one run directory."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phasicrl.algorithm import resume, train
from phasicrl.runs.lock import LOCK_FILE, RunLock
from phasicrl.training.build import restore_run
from tests.helpers import corridor, tiny

HOLD = """
import sys, pathlib
from phasicrl.runs.lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print('held', flush=True)
sys.stdin.read()
"""


def test_a_directory_that_another_process_holds_is_refused_with_its_name(tmp_path: Path) -> None:
    words, pipe = [sys.executable, "-c", HOLD, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        named = rf"{tmp_path} is in use by process {holder.pid} on .* since 20"
        with pytest.raises(ValueError, match=named):
            RunLock(tmp_path)
        holder.kill()  # which lets nobody clean up
        holder.wait()
        RunLock(tmp_path).close()


def test_a_process_that_only_looks_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLock(tmp_path).close()
    looking = (tmp_path / LOCK_FILE).open()
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `RunLock.is_held`, for a moment
    monkeypatch.setattr(time, "sleep", lambda _: looking.close())
    RunLock(tmp_path).close()


def test_a_run_that_trains_cannot_be_resumed(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    rows = (run.directory / "metrics.jsonl").read_bytes()
    named = pytest.raises(ValueError, match=f"in use by process {os.getpid()} ")
    with restore_run(run.directory, make_env=corridor), named:
        resume(run.directory, make_env=corridor)
    assert (run.directory / "metrics.jsonl").read_bytes() == rows
    resume(run.directory, make_env=corridor)  # it is free again


def test_a_resume_that_fails_lets_go(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    for path in (run.directory / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match="no usable checkpoint"):
            resume(run.directory, make_env=corridor)
