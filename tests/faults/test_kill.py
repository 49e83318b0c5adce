"""Runs that are killed or interrupted at any time resume as if nothing had happened."""

import errno
import os
import random
import shutil
import signal
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from phasicrl.algorithm import resume, train
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.run import Run
from tests.faults import harness
from tests.faults.conftest import Fault
from tests.helpers import assert_same, mark_long


@cache
def unbroken(kind: str) -> tuple[tuple[dict[str, Any], Any], float]:
    """Run without interruption; return what the run left, and the seconds it took."""
    folder = Path(mkdtemp())
    harness.finish(folder, harness.begin_or_resume, folder, kind)
    result = harness.left(folder), harness.only_run(folder).card["seconds"]
    shutil.rmtree(folder)
    return result


@pytest.mark.parametrize("kind", mark_long(harness.KINDS, "ppg"))
@pytest.mark.fault("F-01", "kill -9 at a random time: the resumed run is the unbroken one", 1, 34)
def test_killed_at_a_random_time(tmp_path: Path, kind: str, fault: Fault) -> None:
    expected, seconds = unbroken(kind)
    draw = random.Random(kind)
    for number in fault:
        folder = tmp_path / str(number)
        for _ in range(2):  # what was resumed is killed as well
            process = harness.start(folder, harness.begin_or_resume, folder, kind)
            process.join(draw.uniform(0, seconds))
            process.kill()
            process.join()
        harness.finish(folder, harness.begin_or_resume, folder, kind)
        harness.assert_unbroken(folder, expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ppg", "lstm"])
@pytest.mark.fault("F-02", "kill -9 before an operation on the disk", 1, 10_000)
def test_killed_before_an_operation_on_the_disk(
    tmp_path: Path, kind: str, fault: Fault, is_full: bool
) -> None:
    expected, _ = unbroken(kind)
    harness.finish(tmp_path / "all", harness.kill_before_operation, tmp_path / "all", kind, 0)
    every = range(1, int((tmp_path / "all" / "operations.txt").read_text()) + 1)
    numbers = every if is_full else random.Random(kind).sample(every, fault.wanted)
    fault.wanted = len(numbers)
    for index in fault:
        folder = tmp_path / str(index)
        process = harness.start(folder, harness.kill_before_operation, folder, kind, numbers[index])
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        harness.finish(folder, harness.begin_or_resume, folder, kind)
        harness.assert_unbroken(folder, expected)
        shutil.rmtree(folder)


@pytest.mark.parametrize("code", mark_long([errno.ENOSPC, errno.EIO], errno.ENOSPC))
@pytest.mark.fault("F-06", "a full or broken disk: training continues, nothing is lost", 4, 10_000)
def test_a_disk_that_refuses_an_operation(
    tmp_path: Path, code: int, fault: Fault, is_full: bool
) -> None:
    """Refused is one operation after the first iteration; the run ends as it would have."""
    config = harness.small(tmp_path / "all", "ppg", total_env_steps=6 * 64)
    counts: list[int] = []
    with harness.at_operation(0, print) as done:
        run = train(config, callbacks=lambda *_: counts.append(len(done)))
    expected = run.agent.state_dict()
    every = range(counts[0] + 1, len(done) + 1)
    numbers = every if is_full else random.Random(0).sample(every, fault.wanted)
    fault.wanted = len(numbers)

    def refuse(name: str) -> None:
        raise OSError(code, os.strerror(code))

    for index in fault:
        folder = tmp_path / str(index)
        try:
            with harness.at_operation(numbers[index], refuse):
                train(harness.small(folder, "ppg", total_env_steps=6 * 64))
        except OSError:  # a file of the log, or the last checkpoint: what is on the disk is whole
            resume(harness.only_run(folder).path)
        assert_same(harness.only_run(folder).load_weights(), expected)
        shutil.rmtree(folder)


def num_checkpoints(folder: Path) -> int:
    return len(RunDirectory(path).checkpoints) if (path := harness.run_directory(folder)) else 0


def train_until_stopped(folder: Path) -> None:
    """Train ten iterations, which ends amid a phase, and wait."""

    def wait(run: Run, _: object) -> None:
        if run.iteration == 10:
            (folder / "waits").touch()
            time.sleep(600)

    train(harness.small(folder, "ppg", **{"checkpoint.every_minutes": None}), callbacks=wait)


def test_sigterm_saves_ends_with_75_and_the_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    expected, _ = unbroken("ppg")
    process = harness.start(tmp_path, train_until_stopped, tmp_path)
    harness.wait_for((tmp_path / "waits").exists)
    process.terminate()
    process.join(120)
    assert process.exitcode == 75
    assert [at.name for at in harness.only_run(tmp_path).checkpoints] == ["step-000000000640"]
    harness.finish(tmp_path, harness.begin_or_resume, tmp_path, "ppg")
    harness.assert_unbroken(tmp_path, expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", harness.KINDS)
@pytest.mark.fault("F-07", "SIGTERM at a random time: a checkpoint, then 75", 1, 17)
def test_a_signal_at_a_random_time(tmp_path: Path, kind: str, fault: Fault) -> None:
    expected, seconds = unbroken(kind)
    draw = random.Random(kind)
    for number in fault:
        for attempt in range(1, 21):  # each time sooner
            folder = tmp_path / f"{number}-{draw.random()}"
            process = harness.start(folder, harness.begin_or_resume, folder, kind)
            harness.wait_for(lambda at=folder: num_checkpoints(at) > 0)
            time.sleep(draw.uniform(0, 0.7 * seconds / attempt))
            process.terminate()
            process.join(60)
            newest = "step-000000000000"  # unless it was still starting, and removed its directory
            if num_checkpoints(folder):
                newest = harness.only_run(folder).checkpoints[-1].name
            if process.exitcode == 75 or "0768" not in newest:
                break  # else it was done before
        else:
            pytest.fail("each time it was done before the signal came")
        said = (folder / "errors.txt").read_text()
        if newest != "step-000000000000":  # else it had not begun to listen, or to train
            assert process.exitcode == 75, (newest, said)
        harness.finish(folder, harness.begin_or_resume, folder, kind)
        harness.assert_unbroken(folder, expected)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up there")
@pytest.mark.parametrize(
    ("sent", "code"), [(["SIGINT"], 130), (["SIGINT", "SIGINT"], 130), (["SIGTERM"], 75)]
)
@pytest.mark.fault(
    "F-08", "SIGINT, two of them, SIGTERM to the whole group: no process is left", 1, 17
)
def test_a_signal_to_a_group(tmp_path: Path, sent: list[str], code: int, fault: Fault) -> None:
    """Environments are processes; everything shared in memory is released, too."""
    expected, seconds = unbroken("ppg")
    draw, shared = random.Random(len(sent)), Path("/dev/shm")
    before = set(shared.glob("*"))
    for number in fault:
        for attempt in range(1, 21):  # each time sooner
            folder = tmp_path / f"{number}-{draw.random()}"
            process = harness.start_group(folder, "ppg")
            harness.wait_for(lambda at=folder: num_checkpoints(at) > 1)
            time.sleep(draw.uniform(0, 0.3 * seconds / attempt))
            for name in sent:
                os.killpg(process.pid, signal.Signals[name])
                time.sleep(draw.uniform(0, 0.02))
            ended = process.wait(60)
            if ended == code or "0768" not in harness.only_run(folder).checkpoints[-1].name:
                break  # else it was done before
        else:
            pytest.fail("each time it was done before the signal came")
        assert ended == code, (folder / "errors.txt").read_text()
        harness.wait_for(lambda leader=process.pid: not harness.session(leader))
        more = set(shared.glob("*")) - before
        harness.wait_for(
            lambda more=more: not harness.left_behind(more),
            instead=lambda more=more: harness.left_behind(more),
        )
        harness.finish(folder, harness.begin_or_resume, folder, "ppg")
        harness.assert_unbroken(folder, expected)
