"""Interrupted runs keep the state after their last whole iteration, and resume from it."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from phasicrl.algorithm import learn, resume, train
from phasicrl.config import CheckpointConfig, Config
from phasicrl.envs.protocol import EnvError
from phasicrl.runs import metrics
from phasicrl.runs.directory import WEIGHTS_FILE, RunDirectory
from phasicrl.system.signals import PreemptedExit, TerminationRequested, exit_on_preemption
from phasicrl.training import build
from phasicrl.training.build import start_run
from phasicrl.training.run import Run
from tests.corridor import Corridor, corridor
from tests.faults.harness import wait_for
from tests.helpers import TRAIN, Clock, assert_same, open_run, stop_at, tiny, tiny_aux

AT_THE_END = CheckpointConfig(every_minutes=None)
"""Setting without timed checkpoints, so that the test's event causes each."""


def weights_after(config: Config, iterations: int) -> dict[str, torch.Tensor]:
    """Return the weights of the same run in another folder, stopped in order."""
    config = replace(config, output_dir=f"{config.output_dir}/other")
    return train(config, make_env=corridor, callbacks=stop_at(iterations)).files.load_weights()


class Struck(Corridor):
    """Environment that calls a function in its third rollout of eight steps."""

    steps, strike = 0, staticmethod(lambda: None)

    def step(self, action: Any) -> Any:
        type(self).steps += 1
        if type(self).steps == 4 * 8 * 2 + 5:
            self.strike()
        return super().step(action)


@pytest.mark.parametrize("aux", [None, tiny_aux(every=3)])
def test_an_environment_that_fails_costs_no_finished_iteration(tmp_path: Path, aux: Any) -> None:
    config = tiny(tmp_path, aux=aux, checkpoint=AT_THE_END, total_env_steps=224)
    make_env = type("Breaking", (Struck,), {"strike": Mock(side_effect=RuntimeError("broken"))})
    with pytest.raises(EnvError, match="broken"), start_run(config, make_env=make_env) as run:
        learn(run)
    assert [path.name for path in run.files.checkpoints] == ["step-000000000064"]
    assert_same(run.files.load_weights(), weights_after(config, 2))
    assert resume(run.directory, make_env=corridor).env_steps == 224
    assert [row["env_steps"] for row in run.files.metrics()] == [32 * n for n in range(1, 8)]


@pytest.fixture(autouse=True)
def _reset_signals() -> Iterator[None]:
    """Reset signals, which `nohup make test &` would have this process ignore."""
    usual = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL)
    usual |= {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("where", ["policy", "rollout"])
def test_a_signal_in_the_middle_of_an_iteration_leaves_the_one_before(
    tmp_path: Path, number: signal.Signals, where: str
) -> None:
    config = tiny(tmp_path, aux=tiny_aux(every=3), checkpoint=AT_THE_END, total_env_steps=224)
    expected: type[BaseException] = KeyboardInterrupt if number == signal.SIGINT else PreemptedExit
    before = signal.getsignal(number)
    with pytest.raises(expected) as caught, start_run(config, make_env=corridor) as run:
        stage = run.show

        def strike(name: str) -> None:
            stage(name)
            if run.env_steps >= 64 and name == where:
                os.kill(os.getpid(), number)

        run.show = strike  # type: ignore[method-assign]
        learn(run)
    if isinstance(caught.value, PreemptedExit):
        assert caught.value.code == 75 and str(caught.value) == number.name
    assert signal.getsignal(number) is before, "what the program had is there again"
    saved = 64 if where == "rollout" else 32
    assert [path.name for path in run.files.checkpoints] == [f"step-{saved:012d}"]
    assert_same(run.files.load_weights(), weights_after(config, saved // 32))


def test_signals_are_given_back_though_the_disk_takes_no_last_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's handler would swallow later signals."""

    def full(rows: metrics._RowFile) -> None:
        raise OSError(28, "No space left on device")

    before, run = signal.getsignal(signal.SIGTERM), open_run(tiny(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"), run:
        patch.setattr(metrics._RowFile, "flush", full)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_in_the_middle_of_an_environments_step_is_no_fault_of_it(tmp_path: Path) -> None:
    """The signal ends whatever else raises."""
    config, strike = tiny(tmp_path, checkpoint=AT_THE_END), partial(signal.raise_signal, 15)
    make_env = type("Signaled", (Struck,), {"strike": staticmethod(strike)})
    with pytest.raises(PreemptedExit) as caught, start_run(config, make_env=make_env) as run:
        learn(run)
    assert caught.value.code == 75
    assert [path.name for path in run.files.checkpoints] == ["step-000000000064"]


def test_a_signal_that_was_lost_in_a_destructor_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("phasicrl.system.signals.time", SimpleNamespace(monotonic=clock))
    with pytest.raises(PreemptedExit), start_run(tiny(tmp_path), make_env=corridor) as run:
        for _ in range(2):
            with contextlib.suppress(TerminationRequested):
                os.kill(os.getpid(), signal.SIGTERM)
                pytest.fail("it was not heard")
            os.kill(os.getpid(), signal.SIGTERM)  # at once: of the same kind
            clock.now += 1
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.env_steps == 0


def test_a_key_that_arrives_twice_does_not_cut_the_save_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal and a parent may both send the signal; a later one does end the save."""
    ended: list[int] = []
    clock = Clock()
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("phasicrl.system.signals.time", SimpleNamespace(monotonic=clock))
    save = Run._write_backup_as_checkpoint

    def interrupted_save(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert not ended
        clock.now += 1
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [130]
        save(run)

    with pytest.raises(KeyboardInterrupt), start_run(tiny(tmp_path), make_env=corridor):
        monkeypatch.setattr(Run, "_write_backup_as_checkpoint", interrupted_save)
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]


def test_a_signal_that_the_program_handles_is_left_to_it(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with start_run(tiny(tmp_path), make_env=corridor) as run:
            os.kill(os.getpid(), signal.SIGUSR1)
            learn(run)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1] and run.env_steps == 128


@pytest.mark.long
def test_a_terminated_process_has_its_exit_code_and_can_be_resumed(tmp_path: Path) -> None:
    """A scheduler sees exit code 75 after SIGTERM, and the same run resumes."""
    words = f"--output-dir {tmp_path} --log.console off --total-env-steps 10_000_000"
    words += " --compute.compile off --checkpoint.every-minutes none"
    rows = tmp_path.glob
    with subprocess.Popen([*TRAIN, *words.split()], stderr=subprocess.PIPE) as process:
        # A row is written before what would be saved of its iteration is kept.
        wait_for(lambda: sum(x.read_text().count("\n") for x in rows("*/metrics.jsonl")) > 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
    (path,) = tmp_path.iterdir()
    files = RunDirectory(path)
    steps = int(files.checkpoints[-1].name.removeprefix("step-"))
    assert steps >= 3 * 1024 and steps in {int(row["env_steps"]) for row in files.metrics()}


def test_a_full_disk_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk takes nothing while the second and third checkpoint after the first are saved."""
    plain, saved = os.replace, list[str]()

    def full(source: Any, target: Any) -> None:
        saved.append(str(target)) if "step-" in str(target) else None
        if "step-" in str(target) and len(saved) in (3, 4):
            raise OSError(28, "No space left on device", str(target))
        plain(source, target)

    monkeypatch.setattr(os, "replace", full)
    every = CheckpointConfig(every_minutes=0.0, keep=100)
    config = tiny(tmp_path, checkpoint=every, total_env_steps=192)
    run = train(config.with_updates({"log.console": "plain"}), make_env=corridor)
    assert [int(path.name[5:17]) for path in run.files.checkpoints] == [0, 32, 128, 160, 192]
    assert not list(run.files.checkpoint_folder.glob(".*"))
    out = capsys.readouterr().out
    assert "warning: no checkpoint at 64 steps" in out and "No space left on device" in out


def test_flipped_bits_in_the_weights_file_are_seen(tmp_path: Path) -> None:
    files = train(tiny(tmp_path), make_env=corridor).files
    whole = (files.path / WEIGHTS_FILE).read_bytes()
    for at in random.Random(0).sample(range(8 * len(whole)), 100):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        (files.path / WEIGHTS_FILE).write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match="is damaged"):
            files.load_weights()
    (files.path / WEIGHTS_FILE).write_bytes(whole)
    assert files.load_weights()


def test_the_card_of_a_resumed_run_keeps_the_command_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["phasicrl", "train", "first"])
    run = train(tiny(tmp_path), make_env=corridor, callbacks=lambda *_: "stop")
    before = run.files.card
    monkeypatch.setattr(sys, "argv", ["phasicrl", "resume", "second"])
    resume(run.directory, make_env=corridor)
    card = run.files.card
    assert card["command"] == ["phasicrl", "train", "first"] and card["run"] == before["run"]
    assert card["resumed"] == [["phasicrl", "resume", "second"]]


@pytest.mark.parametrize(
    "where", [(build, "Agent"), (RunDirectory, "write_config"), (Run, "write_card"), (Run, "save")]
)
@pytest.mark.parametrize("error", [OSError("no space left"), signal.SIGTERM])
def test_a_run_that_fails_at_its_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str],
    error: OSError | signal.Signals,
) -> None:  # fmt: skip
    """Neither a directory without a checkpoint nor open files, environments and handlers."""
    (owner, name), opened, closed = where, [], []

    class Watched(Corridor):
        def __init__(self) -> None:
            super().__init__()
            opened.append(self)

        def close(self) -> None:
            closed.append(self)

    def fail(*_: Any, **__: Any) -> None:
        if isinstance(error, OSError):
            raise error
        signal.raise_signal(error)

    monkeypatch.setattr(owner, name, fail)
    config = tiny(tmp_path, checkpoint=CheckpointConfig(every_minutes=60))
    with pytest.raises((OSError, PreemptedExit)) as caught:
        start_run(config, make_env=Watched)
    assert isinstance(caught.value, OSError) or caught.value.code == 75
    assert not list(tmp_path.iterdir())
    assert opened and opened == closed


def test_a_second_signal_at_shutdown_gives_the_same_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second signal comes after the run has saved and restored its program's handlers."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with pytest.raises(PreemptedExit) as caught, exit_on_preemption():
        train(tiny(tmp_path), make_env=corridor, callbacks=lambda *_: signal.raise_signal(15))
    assert caught.value.code == 75 and not codes
    assert len(RunDirectory(vars(caught.value)["run_directory"]).checkpoints) == 1
    signal.raise_signal(signal.SIGTERM)
    assert codes == [75]
