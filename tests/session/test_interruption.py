"""What cuts a run short leaves the state after its last whole iteration, from which it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phasicrl.algorithm import learn, resume, train
from phasicrl.config import CheckpointConfig, Config
from phasicrl.envs.protocol import EnvError
from phasicrl.host.signals import Preempted, TerminationRequested, exiting_preempted
from phasicrl.runs import metrics
from phasicrl.runs.directory import WEIGHTS_FILE, RunDirectory
from phasicrl.session.build import start_run
from phasicrl.session.run import Run
from tests.helpers import TRAIN, Clock, Corridor, corridor, open_run, tiny, tiny_aux

AT_THE_END = CheckpointConfig(every_minutes=None)
"""So that whatever is saved before is saved because of what happened."""


def state_after(config: Config, iterations: int) -> dict[str, torch.Tensor]:
    """Weights of the same run, stopped in order."""
    run = train(
        config,
        make_env=corridor,
        on_iteration=lambda run, _: "stop" if run.iteration == iterations else None,
    )
    return RunDirectory(run.directory).weights()


class Breaking(Corridor):
    """Raises in its 3rd rollout of eight steps."""

    steps = 0

    def step(self, action: Any) -> Any:
        type(self).steps += 1
        if type(self).steps > 4 * 8 * 2 + 5:
            raise RuntimeError("broken")
        return super().step(action)


@pytest.mark.parametrize("aux", [None, tiny_aux(every=3)])
def test_an_environment_that_fails_costs_no_finished_iteration(tmp_path: Path, aux: Any) -> None:
    config = tiny(tmp_path, aux=aux, checkpoint=AT_THE_END, total_env_steps=224)
    Breaking.steps = 0
    with pytest.raises(EnvError, match="broken"), start_run(config, make_env=Breaking) as run:
        learn(run)
    files = RunDirectory(run.directory)
    assert [path.name for path in files.checkpoints] == ["step-000000000064"]
    expected = state_after(replace(config, output_dir=str(tmp_path / "other")), 2)
    assert all(torch.equal(weights, expected[name]) for name, weights in files.weights().items())
    again = resume(run.directory, make_env=corridor)
    assert again.env_steps == 224 and [row["env_steps"] for row in files.metrics()] == [
        32 * n for n in range(1, 8)
    ]


@pytest.fixture(autouse=True)
def _nobody_ignores_signals() -> Iterator[None]:
    """As `nohup make test &` would: what is ignored is left to whoever ignores it."""
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
    expected: type[BaseException] = KeyboardInterrupt if number == signal.SIGINT else Preempted
    before = signal.getsignal(number)
    with pytest.raises(expected) as caught, start_run(config, make_env=corridor) as run:
        stage = run.stage

        def strike(name: str) -> None:
            stage(name)
            if run.env_steps >= 64 and name == where:
                os.kill(os.getpid(), number)

        run.stage = strike  # type: ignore[method-assign]
        learn(run)
    assert number == signal.SIGINT or (
        isinstance(caught.value, Preempted)
        and caught.value.code == 75
        and str(caught.value) == number.name
    )
    assert signal.getsignal(number) is before, "what the program had is there again"
    files = RunDirectory(run.directory)
    saved = 64 if where == "rollout" else 32
    assert [path.name for path in files.checkpoints] == [f"step-{saved:012d}"]
    expected_weights = state_after(replace(config, output_dir=str(tmp_path / "other")), saved // 32)
    assert all(
        torch.equal(weights, expected_weights[name]) for name, weights in files.weights().items()
    )


def test_signals_are_given_back_though_the_disk_takes_no_last_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones would be swallowed else: the run's handler lets them wait."""

    def full(rows: metrics._Rows) -> None:
        raise OSError(28, "No space left on device")

    before = signal.getsignal(signal.SIGTERM)
    run = open_run(tiny(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"), run:
        patch.setattr(metrics._Rows, "flush", full)
    assert signal.getsignal(signal.SIGTERM) is before


class Signaled(Corridor):
    """The signal comes while it steps, in its third rollout; it ends whatever else raises."""

    steps = 0

    def step(self, action: Any) -> Any:
        type(self).steps += 1
        if type(self).steps == 4 * 8 * 2 + 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)


def test_a_signal_in_the_middle_of_an_environments_step_is_no_fault_of_it(tmp_path: Path) -> None:
    Signaled.steps = 0
    config = tiny(tmp_path, checkpoint=AT_THE_END)
    with pytest.raises(Preempted) as caught, start_run(config, make_env=Signaled) as run:
        learn(run)
    assert caught.value.code == 75
    assert [path.name for path in RunDirectory(run.directory).checkpoints] == ["step-000000000064"]


def test_a_signal_that_was_lost_in_a_destructor_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("phasicrl.host.signals.time", SimpleNamespace(monotonic=clock))
    with pytest.raises(Preempted), start_run(tiny(tmp_path), make_env=corridor) as run:
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
    """From the terminal, and from a parent that passes it on; a later one does end it at once."""
    ended: list[int] = []
    clock = Clock()
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("phasicrl.host.signals.time", SimpleNamespace(monotonic=clock))
    save = Run._write_checkpoint

    def interrupted_save(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert not ended
        clock.now += 1
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [130]
        save(run)

    with pytest.raises(KeyboardInterrupt), start_run(tiny(tmp_path), make_env=corridor):
        monkeypatch.setattr(Run, "_write_checkpoint", interrupted_save)
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
def test_a_process_that_is_told_to_end_says_so_by_its_exit_code_and_can_go_on(
    tmp_path: Path,
) -> None:
    """As a scheduler sees it: SIGTERM, 75, and the same run goes on."""
    words = [*TRAIN, "--output-dir", str(tmp_path), "--log.console", "off"]
    words += ["--total-env-steps", "10_000_000", "--compute.compile", "off"]
    words += ["--checkpoint.every-minutes", "none"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        # A row is written before what would be saved of its iteration is kept.
        while sum(path.read_text().count("\n") for path in tmp_path.glob("*/metrics.jsonl")) < 4:
            assert time.monotonic() < deadline, "it does not train"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
    (path,) = tmp_path.iterdir()
    files = RunDirectory(path)
    steps = int(files.checkpoints[-1].name.removeprefix("step-"))
    assert steps >= 3 * 1024 and steps in {int(row["env_steps"]) for row in files.metrics()}


class Full:
    """A disk that takes nothing for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes: range) -> None:
        self.count, self.writes = 0, writes
        plain = os.replace

        def replace_(source: Any, target: Any) -> None:
            if "step-" in str(target):
                self.count += 1
                if self.count in self.writes:
                    raise OSError(28, "No space left on device", str(target))
            plain(source, target)

        monkeypatch.setattr(os, "replace", replace_)


def test_a_full_disk_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(
        tmp_path, checkpoint=CheckpointConfig(every_minutes=0.0, keep=100), total_env_steps=192
    )
    config = replace(config, log=replace(config.log, console="plain"))
    Full(monkeypatch, range(3, 5))  # the first checkpoint is the one before the first iteration
    run = train(config, make_env=corridor)
    assert [int(path.name[5:]) for path in RunDirectory(run.directory).checkpoints] == [
        0, 32, 128, 160, 192,
    ]  # fmt: skip
    assert not list((run.directory / "checkpoints").glob(".*"))
    out = capsys.readouterr().out
    assert "warning: no checkpoint at 64 steps" in out and "No space left on device" in out


@pytest.mark.parametrize(
    "change",
    [{"ppo.clip": 0.1}, {"seed": 4}, {"reward_norm.per": "none"}, {"total_env_steps": 256}],
)
def test_a_configuration_that_changed_is_shown_and_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    (run.directory / "config.json").write_text(run.config.with_updates(change).to_json())
    ((path, value),) = change.items()
    with pytest.raises(
        ValueError, match=rf"config\.json has changed .*{path} was .*accept-config-changes"
    ):
        resume(run.directory, make_env=corridor)
    if path != "reward_norm":  # its statistics have no place then
        again = resume(run.directory, make_env=corridor, accept_config_changes=True)
        assert again.config.values()[path] == value


def test_what_does_not_touch_the_result_may_change(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    (run.directory / "config.json").write_text(
        run.config.with_updates({"checkpoint.keep": 9, "log.console": "plain"}).to_json()
    )
    assert resume(run.directory, make_env=corridor).config.checkpoint.keep == 9


def test_flipped_bits_in_the_weights_file_are_seen(tmp_path: Path) -> None:
    files = RunDirectory(train(tiny(tmp_path), make_env=corridor).directory)
    whole = (files.path / WEIGHTS_FILE).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        at = int(torch.randint(8 * len(whole), (), generator=generator))
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        (files.path / WEIGHTS_FILE).write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match="is damaged"):
            files.weights()
    (files.path / WEIGHTS_FILE).write_bytes(whole)
    assert files.weights()


def test_the_card_of_a_resumed_run_keeps_the_command_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["phasicrl", "train", "first"])
    run = train(tiny(tmp_path), make_env=corridor, on_iteration=lambda *_: "stop")
    before = RunDirectory(run.directory).card
    monkeypatch.setattr(sys, "argv", ["phasicrl", "resume", "second"])
    resume(run.directory, make_env=corridor)
    card = json.loads((run.directory / "card.json").read_text())
    assert card["command"] == ["phasicrl", "train", "first"] and card["resumed"] == [
        ["phasicrl", "resume", "second"]
    ]
    assert card["run"] == before["run"]


@pytest.mark.parametrize(
    "where", [(RunDirectory, "write_config"), (Run, "write_card"), (Run, "save")]
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

    def fail(*_: Any) -> None:
        if isinstance(error, OSError):
            raise error
        signal.raise_signal(error)

    monkeypatch.setattr(owner, name, fail)
    config = tiny(tmp_path, checkpoint=CheckpointConfig(every_minutes=60))
    with pytest.raises((OSError, Preempted)) as caught:
        start_run(config, make_env=Watched)
    assert isinstance(caught.value, OSError) or caught.value.code == 75
    assert not list(tmp_path.iterdir())
    assert opened and opened == closed


def test_a_second_signal_at_shutdown_gives_the_same_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the run has saved and restored the handlers of its program."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with pytest.raises(Preempted) as caught, exiting_preempted():
        train(tiny(tmp_path), make_env=corridor, on_iteration=lambda *_: signal.raise_signal(15))
    assert caught.value.code == 75 and not codes
    assert len(RunDirectory(vars(caught.value)["run_directory"]).checkpoints) == 1
    signal.raise_signal(signal.SIGTERM)
    assert codes == [75]
