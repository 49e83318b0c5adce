"""Runs in processes of their own, to be killed: starting them, comparing what they leave."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from phasicrl.algorithm import resume, train
from phasicrl.config import CheckpointConfig, Config, EnvConfig
from phasicrl.runs.checkpoint import load_checkpoint
from phasicrl.runs.directory import RunDirectory
from tests.helpers import OBS_NORM, assert_same, rows_of, tiny, tiny_aux

_SERVER = multiprocessing.get_context("forkserver")
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppg": {"aux": tiny_aux(every=3, epochs=3)},
    "lstm": {"aux": tiny_aux(every=2), "model.memory": "lstm", "model.memory_size": 8,
             "ppo.minibatch_by": "segments", "obs_norm": OBS_NORM},
}  # fmt: skip
"""Kinds of runs: differences from a small PPO on CartPole."""


def small(folder: Path, kind: str, **changes: Any) -> Config:
    """Return the configuration of a run of 12 iterations with a checkpoint after each."""
    config = replace(
        tiny(folder, total_env_steps=12 * 64),
        env=EnvConfig(id="gymnasium:CartPole-v1", num_envs=4),
        checkpoint=CheckpointConfig(every_minutes=0.0),
    )
    return config.with_updates({"ppo.num_steps": 16} | KINDS[kind] | changes)


def run_directory(folder: Path) -> Path | None:
    """Return the run's directory in a folder, or None before it is there."""
    return next((path.parent for path in folder.glob("*/config.json")), None)


def only_run(folder: Path) -> RunDirectory:
    """Return the run in a folder."""
    path = run_directory(folder)
    assert path is not None, "no run"
    return RunDirectory(path)


def begin_or_resume(folder: Path, kind: str, **changes: Any) -> None:
    """Resume the run if there is a checkpoint, else start one, as a user's script does."""
    path = run_directory(folder)
    if path is not None and not RunDirectory(path).checkpoints:
        shutil.rmtree(path)
        path = None
    if path is None:
        train(small(folder, kind, **changes))
    else:
        resume(path)


def start_group(folder: Path, kind: str) -> subprocess.Popen[bytes]:
    """Start a program that is a group of processes: its environments are in some of their own.

    One that is interrupted ends with 130, as the command line does.
    """
    code = f"""if True:
        import pathlib, sys
        from tests.faults.harness import begin_or_resume
        try:
            how = {{"env.vectorization": "async"}}
            begin_or_resume(pathlib.Path({str(folder)!r}), {kind!r}, **how)
        except KeyboardInterrupt:
            sys.exit(130)
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "errors.txt").open("wb") as errors:
        words, cwd = [sys.executable, "-c", code], Path(__file__).parents[2]
        return subprocess.Popen(words, cwd=cwd, stderr=errors, start_new_session=True)


def session(leader: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, after_name = path.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        state, _, _, its_session, *_ = after_name.split()
        if int(its_session) == leader and state != "Z":
            members.append(int(path.parent.name))
    return members


def _child(task: Callable[..., None], args: tuple[Any, ...], errors: Path) -> None:
    torch.set_num_threads(1)
    sys.stderr = errors.open("a", buffering=1)
    task(*args)


def start(folder: Path, task: Callable[..., None], *args: Any) -> BaseProcess:
    """Start `task` in a new process, with its stderr in `errors.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    process = _SERVER.Process(target=_child, args=(task, args, folder / "errors.txt"))
    process.start()
    return process


def finish(folder: Path, task: Callable[..., None], *args: Any, seconds: float = 120.0) -> None:
    """Run `task` in a new process to its end, without an error."""
    process = start(folder, task, *args)
    process.join(seconds)
    code, said = process.exitcode, (folder / "errors.txt").read_text()
    process.kill()
    assert code == 0, f"exit code {code}; {said[-2000:]}"


def left_behind(files: Iterable[Path]) -> list[Path]:
    """Return the files that a program forgot to release: they exist, and no process holds them.

    A file that a process holds belongs to another test, which runs beside this one.
    """
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text().splitlines()
            held.update(line.split()[-1] for line in maps if "/dev/" in line)
            held.update(os.readlink(link) for link in (process / "fd").iterdir())
        except OSError:  # it has ended
            continue
    return [path for path in files if path.exists() and str(path) not in held]


def wait_for(
    what: Callable[[], Any], seconds: float = 100.0, instead: Callable[[], Any] | None = None
) -> Any:
    """Return the first true value of `what`; a failure shows the result of `instead`."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"it did not come; {instead and instead()}"
        time.sleep(0.002)
    return value


def left(folder: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Return the last checkpoint's state of a finished run, and its rows without times."""
    files = only_run(folder)
    (state, chunks), rejections = load_checkpoint(files.checkpoint_folder, run_id=files.card["run"])
    assert not rejections and not list(files.checkpoint_folder.glob(".*")), "something is left over"
    assert state.pop("env_steps") == Config.from_json(state.pop("config")).total_env_steps
    del state["seconds"], state["log"]
    state |= {"chunks": chunks, "weights": files.load_weights()}
    return state, rows_of(files)


def assert_unbroken(folder: Path, unbroken: tuple[dict[str, Any], Any]) -> None:
    """Check that a run ended with the state and rows of the unbroken one, to the bit."""
    state, rows = left(folder)
    assert_same(unbroken[0], state)
    assert_same(unbroken[1], rows)


WRITES = ("replace", "rename", "fsync", "link", "mkdir", "unlink", "rmdir")
"""Functions of `os` that change what is on a disk; files that are opened for writing count too."""


@contextmanager
def at_operation(number: int, strike: Callable[[str], None]) -> Iterator[list[str]]:
    """Call `strike` before this operation on the disk (from 1); yields the operations so far."""
    done: list[str] = []

    def audit(name: str, plain: Callable[..., Any], args: tuple[Any, ...], options: Any) -> Any:
        done.append(name)
        if len(done) == number:
            strike(name)
        return plain(*args, **options)

    def spy(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: audit(name, plain, args, options)

    import builtins
    import io

    plain_open = builtins.open

    def open_(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wax+"):
            return audit("open", plain_open, (file, mode, *args), options)
        return plain_open(file, mode, *args, **options)

    before = {name: getattr(os, name) for name in WRITES}
    try:
        for name, plain in before.items():
            setattr(os, name, spy(name, plain))
        builtins.open = io.open = open_  # type: ignore[assignment]
        yield done
    finally:
        builtins.open = io.open = plain_open
        for name, plain in before.items():
            setattr(os, name, plain)


def kill_before_operation(folder: Path, kind: str, number: int) -> None:
    """Train and die before the operation of that number; else write how many there were."""
    with at_operation(number, lambda _: os.kill(os.getpid(), signal.SIGKILL)) as done:
        begin_or_resume(folder, kind)
    (folder / "operations.txt").write_text(str(len(done)))
