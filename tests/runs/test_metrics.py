"""The record of a run: means, rows that survive crashes, and sinks."""

import json
import math
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from phasicrl.optimize import MeanAccumulator
from phasicrl.runs import console, metrics
from phasicrl.runs.console import Display
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import MetricsLog
from tests.helpers import Clock
from tests.runs import test_console
from tests.runs.test_console import BATCH

config = partial(test_console.config, console="off")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (metrics, console):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


def write_rows(log: MetricsLog, first: int, last: int, **record: float) -> None:
    for iteration in range(first, last + 1):
        values = {name.replace("__", "/"): value for name, value in record.items()}
        values["charts/SPS"] = float(iteration)
        log.write(values, env_steps=iteration * BATCH, iteration=iteration, phase=0)


def test_names_may_come_in_different_groups() -> None:
    means = MeanAccumulator()
    means.add(("a", "b"), torch.tensor([1.0, 10.0]), weight=1)
    means.add(("a",), torch.tensor([4.0]), weight=2)
    means.add(("c", "a"), torch.tensor([3.0, 7.0]), weight=1)
    assert means.result() == {"a": (1 + 8 + 7) / 4, "b": 10.0, "c": 3.0}


def test_a_tensor_may_be_overwritten_after_it_was_added() -> None:
    means, loss = MeanAccumulator(), torch.tensor([2.0])
    means.add(("a",), loss, weight=1)
    loss.fill_(1000.0)
    assert means.result() == {"a": 2.0}


def test_tensors_with_gradients_keep_their_graph_and_do_not_enter_the_sum() -> None:
    means, weight = MeanAccumulator(), torch.tensor([3.0], requires_grad=True)
    loss = weight * weight
    means.add(("a",), loss, weight=1)
    loss.sum().backward()
    assert weight.grad is not None and weight.grad.item() == 6.0
    with torch.inference_mode():
        means.add(("a",), torch.tensor([1.0]), weight=1)
    means.add(("a",), torch.tensor([2.0]), weight=1)
    assert means.result() == {"a": 4.0}


def test_sums_are_in_double_precision() -> None:
    means = MeanAccumulator()
    means.add(("a",), torch.tensor([1e8]), weight=1)
    for _ in range(1000):
        means.add(("a",), torch.tensor([1.0]), weight=1)
    assert means.result()["a"] * 1001 == pytest.approx(1e8 + 1000, abs=1e-3)


def test_nothing_added_is_an_empty_record_and_no_weight_is_nan() -> None:
    means = MeanAccumulator()
    assert means.result() == {}
    means.add(("a",), torch.tensor([1.0]), weight=0)
    assert math.isnan(means.result()["a"])


def test_a_row_holds_the_place_in_the_run_and_every_metric(tmp_path: Path, clock: Clock) -> None:
    with closing(MetricsLog(tmp_path, config())) as log:
        clock.now += 2.5
        record = {"own/x": 2.0, "losses/entropy": 0.25, "charts/num_episodes": 3}
        log.write(record, env_steps=128, iteration=1, phase=0)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row == record | {"env_steps": 128, "iteration": 1, "phase": 0, "wall_time": 2.5}
    assert list(row)[-3:] == ["charts/num_episodes", "losses/entropy", "own/x"]


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path, config())) as log:
        record: Any = {"losses/entropy": math.nan, "losses/value_loss": math.inf}
        record["losses/policy_loss"] = torch.tensor(-math.inf)
        log.write(record, env_steps=128, iteration=1, phase=0)
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["losses/entropy"] is row["losses/value_loss"] is row["losses/policy_loss"] is None
    assert math.isnan(RunDirectory(tmp_path).metrics()[0]["losses/entropy"])


def test_a_row_is_on_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path, config())) as log:
        write_rows(log, 1, 2)
        assert [row["charts/SPS"] for row in RunDirectory(tmp_path).metrics()] == [1.0, 2.0]


def test_a_resumed_run_has_every_row_once(tmp_path: Path, clock: Clock) -> None:
    with closing(MetricsLog(tmp_path, config())) as log:
        for iteration in range(1, 6):
            clock.now += 10
            write_rows(log, iteration, iteration)
            if iteration == 3:
                kept = log.state_dict()
    clock.now += 10_000  # the pause between the two processes is not part of the run
    with closing(MetricsLog(tmp_path, config(), saved=kept)) as log:
        assert log.state_dict() == kept
        clock.now += 10
        write_rows(log, 4, 4)
    rows = RunDirectory(tmp_path).metrics()
    assert [row["env_steps"] for row in rows] == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    assert [row["wall_time"] for row in rows] == [10, 20, 30, 40]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_of_epochs_may_begin_and_stop_in_any_part_of_a_run(tmp_path: Path) -> None:
    kept: dict[str, Any] | None = None
    for part, asked in enumerate([False, True, False, True]):
        with closing(MetricsLog(tmp_path, config(epochs=asked), saved=kept)) as log:
            log.append("epochs.jsonl", {"env_steps": part}, {})
            kept = log.state_dict()
            log.append("epochs.jsonl", {"env_steps": 99}, {})  # after the checkpoint
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    assert [json.loads(line)["env_steps"] for line in lines] == [1, 3, 99]


@pytest.mark.parametrize(
    "tail", ['{"env_st', '{"env_steps": 384, "iteration": 3}'[:-1], "\0" * 40, "12", ""]
)
def test_a_line_torn_by_a_crash_or_a_copy_is_dropped(tmp_path: Path, tail: str) -> None:
    with closing(MetricsLog(tmp_path, config())) as log:
        write_rows(log, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail) if tail else file.truncate(file.tell() - 5)
    whole = [BATCH, 2 * BATCH] if tail else [BATCH]
    assert len(RunDirectory(tmp_path).metrics()) == len(whole)
    with closing(MetricsLog(tmp_path, config(), saved=log.state_dict())) as log:
        write_rows(log, 3, 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["env_steps"] for line in lines] == [*whole, 3 * BATCH]


def test_a_line_damaged_in_the_middle_is_an_error(tmp_path: Path) -> None:
    row = '{"env_steps": 128, "iteration": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(f"{row}{{\n{row}")
    with pytest.raises(ValueError, match=r"line 2 of .*metrics.jsonl is damaged"):
        RunDirectory(tmp_path).metrics()


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path, config())) as log:
        write_rows(log, 1, 1)
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl"):
        MetricsLog(tmp_path, config())


def test_of_several_processes_those_that_log_nothing_have_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # so that whatever is written would be seen
    with closing(MetricsLog(None, config(console="plain", tensorboard=True, epochs=True))) as log:
        log.show_stage("rollout")
        write_rows(log, 1, 1)
        log.show_message("hello")
        log.flush()
        sizes = log.state_dict()["bytes"]
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir()) and not sizes


def tensorboard_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(run_dir)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_same_names_over_environment_steps(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path, config(tensorboard=True))) as log:
        write_rows(log, 1, 2, losses__aux__kl_loss=0.5, losses__entropy=math.nan)
    assert tensorboard_scalars(tmp_path) == {
        "charts/SPS": [(BATCH, 1.0), (2 * BATCH, 2.0)],
        "losses/aux/kl_loss": [(BATCH, 0.5), (2 * BATCH, 0.5)],
    }


def test_tensorboard_forgets_what_a_resumed_run_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorBoard reads files in the order of their names, which begin with the second.
    clock = Clock()
    module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(module, "time", SimpleNamespace(time=clock))
    with closing(MetricsLog(tmp_path, config(tensorboard=True))) as log:
        write_rows(log, 1, 2)
        kept = log.state_dict()
        write_rows(log, 3, 4)
    clock.now += 1
    with closing(MetricsLog(tmp_path, config(tensorboard=True), saved=kept)) as log:
        log.write({"charts/SPS": 30.0}, env_steps=3 * BATCH, iteration=3, phase=0)
    expected = [(BATCH, 1.0), (2 * BATCH, 2.0), (3 * BATCH, 30.0)]
    assert tensorboard_scalars(tmp_path)["charts/SPS"] == expected


class Interruption(BaseException):
    """A signal, as it comes while the display is drawn."""


@pytest.mark.parametrize("error", [OSError(5, "EIO"), ValueError("closed"), SystemExit(1)])
def test_a_display_that_fails_is_silenced_and_loses_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The terminal is closed: a signal comes, and what the display does for its end fails."""

    def draw(display: Display, stage: str) -> None:
        try:
            if stage == "interrupted":
                raise Interruption
        finally:
            raise error

    monkeypatch.setattr(Display, "show_stage", draw)
    monkeypatch.setattr(console, "discard_output", lambda stream: None)
    with closing(MetricsLog(tmp_path, config(console="plain"))) as log:
        log.show_stage("rollout")
        assert log._display.kind == "off"
        with pytest.raises(Interruption):
            log.show_stage("interrupted")
        try:
            raise Interruption  # one that is handled already is not raised again
        except Interruption:
            log.show_stage("rollout")


def test_wandb_gets_the_same_names_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = mock.MagicMock()
    wandb.init.return_value = wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "run").mkdir()
    settings = config(wandb=True)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with closing(MetricsLog(tmp_path / "run", settings)) as log:
        write_rows(log, 1, 1, losses__entropy=math.inf)
        kept = log.state_dict()
    monkeypatch.setenv("WANDB_PROJECT", "games")
    with closing(MetricsLog(tmp_path / "run", settings, saved=kept)) as log:
        write_rows(log, 2, 2)
    rows = [{"env_steps": n * BATCH, "charts/SPS": float(n)} for n in (1, 2)]
    assert wandb.log.call_args_list == [mock.call(row) for row in rows]
    assert wandb.define_metric.call_args_list[0] == mock.call("*", step_metric="env_steps")
    assert wandb.finish.call_count == 2
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["project"], second["project"]) == ("phasicrl", "games")
    assert (first["group"], first["name"]) == ("demo", "run")
    assert first["config"]["env"]["id"] == "procgen:coinrun"


def test_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'phasicrl\[wandb\]'"):
        MetricsLog(tmp_path, config(wandb=True))


def plain(log: MetricsLog) -> MetricsLog:
    """Return the log, on a display that prints."""
    log._display = Display(config(console="plain"), 0, sys.stdout)
    return log


def test_rows_that_a_full_disk_refuses_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = plain(MetricsLog(tmp_path, config()))
    write_rows(log, 1, 1)
    rows = log._files["metrics.jsonl"]
    whole = rows._file

    class Full:
        name, closed = whole.name, False

        def write(self, data: bytes) -> int:
            if len(data) > 10:  # a few bytes still go in: the row is torn
                return whole.write(data[:3])
            raise OSError(28, "No space left on device")

    rows._file = Full()  # type: ignore[assignment]
    write_rows(log, 2, 3)
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        log.flush()
    rows._file = whole
    write_rows(log, 4, 4)
    state = log.state_dict()
    log.close()
    assert [row["iteration"] for row in RunDirectory(tmp_path).metrics()] == [1, 2, 3, 4]
    assert state["bytes"] == {"metrics.jsonl": (tmp_path / "metrics.jsonl").stat().st_size}
    assert "metrics.jsonl cannot be written" in capsys.readouterr().out


def test_a_failing_sink_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        name, calls = "the sink", 0

        def write(self, values: Any, env_steps: int) -> None:
            self.calls += 1
            raise RuntimeError("no connection")

        def close(self) -> None:
            raise AssertionError("it is off")

    log, sink = plain(MetricsLog(tmp_path, config())), Failing()
    log._sinks.append(sink)  # type: ignore[arg-type]
    write_rows(log, 1, 3)
    log.close()
    assert sink.calls == 1 and len(RunDirectory(tmp_path).metrics()) == 3
    assert capsys.readouterr().out.count("warning: the sink is switched off") == 1
