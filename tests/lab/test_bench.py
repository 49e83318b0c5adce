"""Reports of `bench`: relations that hold on every machine."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from phasicrl import algorithm, cli
from phasicrl.config import ComputeConfig, Config, ModelConfig
from phasicrl.lab import bench
from phasicrl.lab.bench import measure_speed
from phasicrl.system.machine import find_commit
from phasicrl.training.build import start_run
from tests.helpers import corridor, tiny, tiny_aux


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten measurements, whose results do not depend on their duration."""
    monkeypatch.setattr(bench, "_PASS_SECONDS", 0.01)


def make_config(tmp_path: Path, **options: Any) -> Config:
    """Return `tiny` without compilation, which takes seconds and changes no relation."""
    return tiny(tmp_path, compute=ComputeConfig(device="cpu", compile="off"), **options)


@pytest.mark.parametrize("phases", [False, True])
def test_parts_passes_and_operations(tmp_path: Path, phases: bool) -> None:
    config = make_config(tmp_path, aux=tiny_aux(every=4, epochs=3) if phases else None)
    model = ModelConfig(encoder="mlp", hidden_sizes=(16, 8), value_path="separate")
    changes = {"model": model, "ppo.policy_epochs": 2, "ppo.value_epochs": 2}
    report = measure_speed(config.with_updates(changes), seconds=0.01, make_env=corridor)
    assert sum(report.split.values()) == pytest.approx(1)
    assert ("auxiliary" in report.split) == phases
    assert all(0 <= share < 1 for share in report.split.values())
    assert report.passes == {"forward and backward": 2 + (3 if phases else 0), "forward": 1}
    # Multiply-adds of a step: the layers of both networks, whose heads have two actions and one
    # value, and an auxiliary head.
    num_inputs, trunk = 2, 16 * 8
    forward = 2 * (num_inputs * 16 + trunk) + 8 * (2 + phases) + 8
    # Backward: each layer twice, for its weights and its input, of which the first needs only the
    # former.
    backward = 2 * (forward - num_inputs * 16)
    expected = 2 * (report.passes["forward and backward"] * (forward + backward) + forward)
    assert report.gflops_per_step * 1e9 == pytest.approx(expected)
    rates = {rate.name: rate for rate in report.rates}
    assert set(rates) == {"whole loop", "rollout", "update", "networks alone"}
    assert all(0 < rate.low <= rate.per_second <= rate.high for rate in rates.values())
    assert report.get_speed("whole loop") < min(map(report.get_speed, ("rollout", "update")))
    assert report.config.total_env_steps == config.total_env_steps
    assert any("phases of 2 iterations instead of 4" in note for note in report.notes) == phases
    assert not list(tmp_path.iterdir()), "a measurement leaves nothing behind"


@pytest.mark.long
@pytest.mark.parametrize(("aux", "every", "passes"), [
    ({"every": 8, "iterations_per_epoch": 4, "epochs": 3}, 2, 1.5),  # half of the data a pass
    ({"every": 8, "iterations_per_epoch": 6, "epochs": 2}, 4, 1.5),
    ({"every": 3, "iterations_per_epoch": 2, "epochs": 3}, 3, 2.0),
    ({"every": 4, "run_every": 2, "epochs": 4}, 2, 2.0),
])  # fmt: skip
def test_cut_phases_have_the_same_work_for_a_step(
    tmp_path: Path, aux: dict[str, int], every: int, passes: float
) -> None:
    config = make_config(tmp_path, aux=tiny_aux(num_minibatches=1, **aux))
    report = measure_speed(config, seconds=0.01, make_env=corridor)
    assert report.config.aux.every == every
    assert report.passes == {"forward and backward": 1 + passes, "forward": 1}
    assert report.split["auxiliary"] > 0


def test_options_without_a_place_in_measurements_are_off(tmp_path: Path) -> None:
    """Checkpoints, rows of epochs, displays, evaluations, a return to stop at."""
    config = make_config(tmp_path).with_updates({
        "checkpoint.every_iterations": 1, "log.epochs": True, "log.wandb": True,
        "evaluation.every_iterations": 1, "stop_at_return": -9.0,
    })  # fmt: skip
    config = measure_speed(config, seconds=0.01, make_env=corridor).config
    assert config.checkpoint.every_minutes is None and config.log.console == "off"
    assert not (config.log.epochs or config.log.wandb or config.log.tensorboard)
    assert config.evaluation.every_iterations is None and config.stop_at_return is None


@pytest.mark.long
def test_a_trace_has_an_auxiliary_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every second phase, the trace covers two."""
    phases: list[int] = []
    plain = algorithm.auxiliary_phase

    def count(learner: Any, *args: Any, **more: Any) -> Any:
        phases.append(learner.iteration)
        return plain(learner, *args, **more)

    monkeypatch.setattr(algorithm, "auxiliary_phase", count)
    config = tiny(tmp_path, aux=tiny_aux(every=2, run_every=2), total_env_steps=1024)
    with start_run(config, make_env=corridor) as run:
        bench._profile_phase(run, tmp_path / "traces" / "trace.json")
    assert len(phases) == 1 and (tmp_path / "traces" / "trace.json").is_file()


@pytest.mark.long
def test_the_command_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, trace = tmp_path / "bench.json", tmp_path / "trace.json"
    words = ["bench", "cartpole-ppo", "--env.num-envs=2", "--ppo.num-steps=16"]
    words += ["--ppo.num-minibatches=2", "--seconds=0.01", f"--output={output}", f"--trace={trace}"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    kernels = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::addmm", "aten::tanh"} <= kernels and "kernels of one phase" in printed
    assert "whole loop" in printed and "networks alone" in printed
    saved = json.loads(output.read_text())
    assert saved["config"]["env"]["num_envs"] == 2 and saved["share_of_limit"] > 0
    assert saved["machine"]["torch"] and saved["machine"]["commit"] == find_commit()


def test_a_folder_as_output_is_refused_before_the_measurement(tmp_path: Path) -> None:
    assert cli.main(["bench", "quickstart", "--seconds=3600", f"--output={tmp_path}"]) == 2
    assert cli.main(["bench", "quickstart", "--seconds=0", f"--output={tmp_path}/a.json"]) == 2
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_a_duration_is_positive_and_finite(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"seconds is {seconds}"):
        measure_speed(tiny(tmp_path), seconds=seconds)
