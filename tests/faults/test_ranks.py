"""Several processes train one run, and one of them fails: all end, all go on, nothing is lost."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import gymnasium as gym
import pytest
import torch
from torch import distributed as dist

from phasicrl.algorithm import resume, train
from phasicrl.cli import main
from phasicrl.execution.executor import EagerGradientStep
from phasicrl.runs import checkpoint
from phasicrl.runs.checkpoint import list_checkpoints, load_rank_state, read_manifest
from phasicrl.runs.directory import RunDirectory
from phasicrl.training import build
from phasicrl.training.run import Run
from tests.faults.conftest import Fault
from tests.faults.harness import (
    assert_unbroken,
    left,
    only_run,
    run_directory,
    session,
    small,
    wait_for,
)
from tests.helpers import assert_same, mark_long
from tests.ranks import ended, run_ranks, start_ranks

KIND, STEPS = "lstm", 8 * 64


@contextmanager
def exiting() -> Iterator[None]:
    """Say what failed, and end with the exit code that the command line would give."""
    try:
        yield
    except Exception as error:
        print(error, flush=True, file=sys.stderr)
        is_users = isinstance(error, ValueError | OSError)
        raise SystemExit(getattr(error, "exit_code", 2 if is_users else 1)) from None


def begin_or_resume(folder: Path, changes: dict[str, Any]) -> None:
    """Do what `train … --resume auto` does."""
    path = run_directory(folder)
    with exiting():
        if path is not None and RunDirectory(path).checkpoints:
            resume(path)
        else:
            if path is not None and os.environ["RANK"] == "0":
                shutil.rmtree(path)  # killed before there was anything to go on from
            few = {"compute.rank_timeout": 20.0, "total_env_steps": STEPS}
            train(small(folder, KIND, **few | changes))


def start(folder: Path, size: int = 2, **changes: Any) -> list[BaseProcess]:
    """Begin a run in so many processes, or go on with it."""
    return start_ranks(folder, size, begin_or_resume, folder, changes)


def finish(folder: Path, size: int = 2) -> None:
    """Go on to the end."""
    run_ranks(folder, size, begin_or_resume, folder, {})


def said(folder: Path) -> list[str]:
    """Return each process's stderr."""
    return [path.read_text() for path in sorted(folder.glob("errors-*.txt"))]


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint."""
    path = run_directory(folder)
    return next(reversed(list_checkpoints(path / "checkpoints")), None) if path else None


def is_amid_a_phase(checkpoint: Path | None) -> bool:
    """Return true if the checkpoint is within a phase of two rollouts, after the first phase."""
    name = checkpoint.name.removeprefix("step-") if checkpoint else ""
    return name.isdigit() and int(name) >= 192 and int(name) % 128 == 64


@cache
def unbroken() -> tuple[tuple[dict[str, Any], Any], Any, float]:
    """Run two processes without a fault; return what both left, the second's part, and seconds."""
    folder = Path(mkdtemp())
    finish(folder)
    return left(folder), second(folder), only_run(folder).card["seconds"]


def second(folder: Path) -> Any:
    """Return the second process's part of the newest checkpoint."""
    return load_rank_state(only_run(folder).checkpoints[-1], rank=1)


def tree(part: Any) -> dict[str, Any]:
    """Return what a process has saved, without its time and folder."""
    found = dict(part.state) | {"chunks": part.chunks}
    del found["seconds"], found["config"]
    return found


def assert_as_unbroken(folder: Path) -> None:
    """Check that both processes ended as without a fault, to the bit."""
    expected, of_second, _ = unbroken()
    assert_unbroken(folder, expected)
    assert_same(tree(of_second), tree(second(folder)))


@pytest.mark.fault("F-03", "one of two processes is killed: started again, both go on", 1, 50)
def test_one_is_killed_at_a_random_time(tmp_path: Path, fault: Fault) -> None:
    *_, seconds = unbroken()
    draw = random.Random(9)
    for number in fault:
        folder = tmp_path / str(number)
        processes = start(folder)
        processes[0].join(draw.uniform(0, seconds))
        killed = draw.randrange(2)
        processes[killed].kill()
        codes = ended(processes)
        assert codes[1 - killed] in (0, 6), (codes, said(folder))
        finish(folder)
        assert_as_unbroken(folder)


COMMAND = (
    "--nproc-per-node 2 --max-restarts 3 -m phasicrl train classic-ppo --resume auto "
    "--env.id gymnasium:CartPole-v1 --env.num-envs 4 --ppo.num-steps 16 --model.memory lstm "
    "--ppo.minibatch-by segments --ppo.num-minibatches 2 "
    f"--total-env-steps {STEPS} --checkpoint.every-minutes 0 --log.console off --log.no-tensorboard"
)


def start_torchrun(folder: Path) -> subprocess.Popen[bytes]:
    """Begin a run as the page of several processes says."""
    folder.mkdir(parents=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with (folder / "errors-0.txt").open("wb") as errors:
        words, cwd = COMMAND.split(), Path(__file__).parents[2]
        words = [*launch, *words, "--output-dir", str(folder)]
        return subprocess.Popen(words, cwd=cwd, stderr=errors, start_new_session=True)


def process_of(launcher: subprocess.Popen[bytes], rank: int) -> int | None:
    """Return the process of a rank; None while there is none."""
    for pid in session(launcher.pid):
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return pid
    return None


@pytest.mark.long
@pytest.mark.fault("F-03", "torchrun itself starts all again after one was killed", 1, 10)
def test_torchrun_starts_them_again(tmp_path: Path, fault: Fault) -> None:
    assert start_torchrun(tmp_path / "unbroken").wait(120) == 0
    expected, draw = left(tmp_path / "unbroken"), random.Random(6)
    of_second = second(tmp_path / "unbroken")
    for number in fault:
        folder = tmp_path / str(number)
        launcher = start_torchrun(folder)
        wait_for(lambda at=folder: newest(at))
        time.sleep(draw.uniform(0, 2))
        if (pid := process_of(launcher, number % 2)) is not None:
            os.kill(pid, signal.SIGKILL)
        assert launcher.wait(120) == 0, said(folder)
        assert len(list(folder.glob("*/config.json"))) == 1
        assert_unbroken(folder, expected)
        assert_same(tree(of_second), tree(second(folder)))


@pytest.mark.fault("F-03", "one of two processes hangs: the other ends", 1, 5)
def test_one_hangs(tmp_path: Path, fault: Fault, is_full: bool) -> None:
    if not is_full:
        pytest.skip("two deadlines have to pass: make test-faults")
    for number in fault:
        folder = tmp_path / str(number)
        processes = start(folder)
        wait_for(lambda at=folder: newest(at))
        hanging = processes[number % 2]
        assert hanging.pid is not None
        os.kill(hanging.pid, signal.SIGSTOP)
        processes[1 - number % 2].join(60)
        hanging.kill()
        assert processes[1 - number % 2].exitcode == 6, said(folder)
        ended(processes, seconds=0.1)
        finish(folder)
        assert_as_unbroken(folder)


@pytest.mark.long
@pytest.mark.fault("F-03", "SIGTERM to one of two processes: both save and end with 75", 1, 20)
def test_a_signal_to_one_rank_ends_all(tmp_path: Path, fault: Fault) -> None:
    *_, seconds = unbroken()
    draw = random.Random(4)
    for number in fault:
        folder = tmp_path / str(number)
        processes = start(folder)
        wait_for(lambda at=folder: (path := newest(at)) and not path.name.endswith("0000"))
        time.sleep(draw.uniform(0, 0.3 * seconds))
        processes[number % 2].terminate()
        codes = ended(processes)
        assert codes in ([75, 75], [0, 0]), (codes, said(folder))
        finish(folder)
        assert_as_unbroken(folder)


def begin_with_full_disk(folder: Path, changes: dict[str, Any], full: int) -> None:
    """Train, while one process cannot write its part from the sixth checkpoint on."""
    plain, calls = checkpoint._write_rank_state, []

    def write(*args: Any) -> Any:
        calls.append(args)
        if os.environ["RANK"] == str(full) and len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device", str(args[1]))
        return plain(*args)

    checkpoint._write_rank_state = write
    begin_or_resume(folder, changes)


@pytest.mark.long
@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.fault("F-03", "the disk of one of two processes is full: both end, and say so", 1, 1)
def test_the_disk_of_one_is_full(tmp_path: Path, full: int, fault: Fault, is_full: bool) -> None:
    if full == 0 and not is_full:
        pytest.skip("one change is enough, but for make test-faults")
    for _ in fault:
        codes = ended(start_ranks(tmp_path, 2, begin_with_full_disk, tmp_path, {}, full))
        assert codes[full] == 2 and codes[1 - full] == 6, (codes, said(tmp_path))
        words = said(tmp_path)
        assert "No space left on device" in words[full]
        assert f"saving a checkpoint failed on rank {full} of 2" in words[1 - full]
        assert not list((newest(tmp_path) or tmp_path).parent.glob(".*.tmp"))
        finish(tmp_path)
        assert_as_unbroken(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 4)])
@pytest.mark.fault("F-03", "another number of processes continues, with a message", 1, 1)
def test_another_number_of_ranks_resumes(
    tmp_path: Path, before: int, now: int, fault: Fault, is_full: bool
) -> None:
    """The rollouts of the phase are divided again, and environments start new episodes."""
    if not is_full and (before, now) != (2, 1):
        pytest.skip("one change is enough, but for make test-faults")
    for _ in fault:
        processes = start(tmp_path, before, **{"ppo.num_minibatches": 1, "aux.num_minibatches": 1})
        wait_for(lambda: is_amid_a_phase(newest(tmp_path)))
        for process in processes:
            process.kill()
        ended(processes)
        finish(tmp_path, now)
        files = only_run(tmp_path)
        assert files.card["processes"] == now and files.card["env_steps"] == STEPS
        assert [row["env_steps"] for row in files.metrics()] == list(range(64, STEPS + 1, 64))


class Failing(gym.Wrapper[Any, Any, Any, Any]):
    """Environment that sends signals to its process, and fails two steps later."""

    steps = 0
    failing: ClassVar[set[str]] = set()
    told: ClassVar[set[str]] = set()

    def step(self, action: Any) -> Any:
        Failing.steps += 1
        if Failing.steps == 165 and os.environ["RANK"] in Failing.told:
            os.kill(os.getpid(), signal.SIGTERM)
        if Failing.steps == 167 and os.environ["RANK"] in Failing.failing:
            raise RuntimeError("the simulator has lost its license")
        return super().step(action)


def train_failing(folder: Path, failing: set[str], told: set[str]) -> None:
    """Train with environments that fail in some processes while others get a signal."""
    Failing.failing, Failing.told = failing, told
    config = small(folder, "ppo", **{"compute.rank_timeout": 20.0, "checkpoint.every_minutes": 60})
    with exiting():
        train(config, make_env=lambda: Failing(gym.make("CartPole-v1")))


@pytest.mark.long
@pytest.mark.parametrize(("failing", "told"), [({"1"}, {"0"}), ({"0", "1"}, {"0", "1"})])
def test_a_failure_after_a_signal_is_saved_and_reported(
    tmp_path: Path, failing: set[str], told: set[str], is_full: bool
) -> None:
    """The request is still open when the failure comes: it may not end the saving."""
    if len(failing) == 1 and not is_full:
        pytest.skip("one change is enough, but for make test-faults")
    assert 75 not in ended(start_ranks(tmp_path, 2, train_failing, tmp_path, failing, told))
    assert all("simulator has lost its license" in words for words in said(tmp_path))
    assert only_run(tmp_path).checkpoints[-1].name.endswith("000000000320")


def train_alike(folder: Path, kind: str) -> None:
    """Train a run of which the fifth iteration fails in all processes alike."""

    def on_iteration(run: Run, _: object) -> None:
        if run.iteration == 4 and kind == "diverges":
            torch.nn.init.constant_(run.agent.value_head.bias, 1e30)

    config = small(folder, "ppo", **{"compute.rank_timeout": 20.0, "checkpoint.every_minutes": 60})
    schedule = (lambda share: {"ppo.clip": 0.2 - 0.7 * share}) if kind == "schedule" else None
    with exiting():
        train(config, callbacks=on_iteration, schedule=schedule)


@pytest.mark.parametrize(("kind", "code"), [("diverges", 3), *mark_long([("schedule", 2)])])
def test_an_error_of_all_keeps_the_last_iteration(tmp_path: Path, kind: str, code: int) -> None:
    assert ended(start_ranks(tmp_path, 2, train_alike, tmp_path, kind)) == [code, code]
    assert only_run(tmp_path).checkpoints[-1].name == "step-000000000256"


def train_and_call(folder: Path, error: type[BaseException]) -> None:
    """Train with a callback that fails in one process."""

    def on_iteration(run: Run, _: object) -> None:
        if run.iteration == 3 and run.world.rank == 1:
            raise error("full")

    with exiting():
        train(small(folder, "ppo", **{"compute.rank_timeout": 20.0}), callbacks=on_iteration)


@pytest.mark.long
@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_a_function_of_the_users_that_fails_in_one_ends_all(tmp_path: Path, error: Any) -> None:
    assert ended(start_ranks(tmp_path, 2, train_and_call, tmp_path, error)) == [6, 1]
    assert f"on_iteration failed on rank 1 of 2: {error.__name__}: " in said(tmp_path)[0]
    assert only_run(tmp_path).checkpoints[-1].name == "step-000000000192"


def train_with_one_license(folder: Path) -> None:
    """Train where one process cannot make its environments."""
    name = {"0": "CartPole-v1"}.get(os.environ["RANK"], "Licensed-v0")
    config = small(folder, "ppo", **{"compute.rank_timeout": 20.0})
    with exiting():
        train(config, make_env=lambda: gym.make(name))


def test_an_environment_that_one_cannot_make_ends_all(tmp_path: Path) -> None:
    assert ended(start_ranks(tmp_path, 2, train_with_one_license, tmp_path)) == [6, 4]
    assert "environments failed on rank 1 of 2: EnvError: " in said(tmp_path)[0]


def begin_otherwise(folder: Path) -> None:
    """Do what `--resume auto` does where one process does not see the run."""
    config = small(folder, "ppo", **{"compute.rank_timeout": 20.0})
    with exiting():
        if os.environ["RANK"] == "0":
            resume(only_run(folder).path)
        else:
            train(config)


def test_one_rank_resumes_and_the_other_starts(tmp_path: Path) -> None:
    train(small(tmp_path, "ppo"), callbacks=lambda *_: "stop")
    assert ended(start_ranks(tmp_path, 2, begin_otherwise, tmp_path)) == [6, 6]
    for words in said(tmp_path):
        assert "differ in what they start" in words and "'a new run' on rank 1" in words


def train_with(folder: Path, words: list[list[str]]) -> None:
    """Run the command line with other words in each process."""
    own = words[int(os.environ["RANK"]) % len(words)]
    common = ["train", "classic-ppo", "--log.no-tensorboard", "--total-env-steps", "2000"]
    raise SystemExit(main([*common, "--output-dir", str(folder / "runs"), *own]))


@pytest.mark.parametrize(("words", "code", "expected"), [
    ([[], ["--ppo.clip", "0.3"]], 6, "differ in configuration: ppo.clip is 0.2 on rank 0"),
    ([["--env.num-envs", "3"]], 2, "env.num_envs is 3; expected a multiple of the 2"),
    ([[], ["--output-dir", "elsewhere"]], 6, "differ in configuration: output_dir"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, words: list[list[str]], code: int, expected: str
) -> None:
    codes = ended(start_ranks(tmp_path, 2, train_with, tmp_path, words))
    assert codes == [code, code], said(tmp_path)
    assert all(expected in text for text in said(tmp_path))
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_others_who_do_not_come_are_waited_for_so_long(tmp_path: Path) -> None:
    first = start_ranks(tmp_path, 2, begin_or_resume, tmp_path, {"compute.rank_timeout": 2.0})
    first[1].kill()
    assert ended(first)[0] == 6
    assert "not all 2 processes connected within 2 s" in said(tmp_path)[0]


def train_elsewhere(folder: Path) -> None:
    """Train with a file that only the first process sees, as on machines that share no folder."""
    build.FILE_WAIT_SECONDS = 0.3
    build.LOCK_FILE = build.LOCK_FILE if os.environ["RANK"] == "0" else "missing"
    with exiting():
        train(small(folder, "ppo", **{"compute.rank_timeout": 20.0}))


def test_a_folder_that_the_processes_do_not_share_is_seen_by_all(tmp_path: Path) -> None:
    assert ended(start_ranks(tmp_path, 2, train_elsewhere, tmp_path)) == [6, 6]
    for words in said(tmp_path):
        assert "rank 1 does not see the run directory" in words
        assert "expected a folder that all machines share" in words


def train_in_a_group(folder: Path) -> None:
    """Train in a program that has a process group, and uses it afterwards."""
    dist.init_process_group("gloo")
    train(small(folder, KIND, **{"compute.rank_timeout": 20.0}))
    number = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(number)
    assert number.item() == 3.0
    dist.destroy_process_group()


@pytest.mark.long
def test_a_process_group_of_the_program_is_left_as_it_was(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, train_in_a_group, tmp_path)
    assert len(read_manifest(only_run(tmp_path).checkpoints[-1])["files"]) == 2


def train_out_of_memory(folder: Path) -> None:
    """Train, with a gradient step that fails in one process between two exchanges."""
    plain, calls = EagerGradientStep.__call__, []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 20 and os.environ["RANK"] == "1":
            raise MemoryError("a step does not fit")
        return plain(*args, **kwargs)

    EagerGradientStep.__call__ = fail
    with exiting():
        train(small(folder, "ppo", **{"compute.rank_timeout": 10.0, "compute.compile": "off"}))


@pytest.mark.long
def test_a_process_that_fails_between_exchanges_ends_all(tmp_path: Path) -> None:
    assert ended(start_ranks(tmp_path, 2, train_out_of_memory, tmp_path)) == [6, 1]
    assert "lost the connection" in said(tmp_path)[0] and "does not fit" in said(tmp_path)[1]
