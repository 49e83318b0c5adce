"""`benchmarks/gpu.py` at the size of a toy on the CPU, and the bundle of packages that it needs."""

import shlex
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from benchmarks import gpu
from phasicrl import cli
from phasicrl.runs.directory import RunDirectory
from tests.helpers import skip_without_envpool
from tools import offline_bundle

ROOT = Path(__file__).parents[1]


def test_steps_run_once_and_a_failed_one_is_skipped_until_its_mark_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comparison without a result is a failure, too; one that cannot be made is named."""
    run: list[str] = []

    def run_command(words: str, log: Path, seconds: float) -> None:
        run.append(shlex.split(words)[0])
        if "phasicrl bench" in words:
            raise subprocess.CalledProcessError(1, words)
        Path(words.split()[-1].removeprefix("--junitxml=")).touch()

    monkeypatch.setattr(gpu, "run_command", run_command)
    monkeypatch.setattr(gpu, "train_until", lambda *_, **__: run.append("train"))
    monkeypatch.setattr(gpu, "find_spec", {}.get)
    for calls in (5, 6):  # an unfinished training continues
        gpu.main(results=tmp_path, toy=True)
        assert len(run) == calls
    assert "mjlab is left out" in capsys.readouterr().out
    assert len(list((tmp_path / "logs").glob("*.failed"))) == 3
    next((tmp_path / "logs").glob("bench*.failed")).unlink()
    gpu.main(results=tmp_path, toy=True)
    assert len(run) == 8


def test_training_stops_after_a_phase_and_continues(tmp_path: Path) -> None:
    skip_without_envpool()
    assert not gpu.train_until(time.monotonic(), "starpilot", tmp_path, toy=True)
    (run,) = (RunDirectory(path.parent) for path in tmp_path.glob("*/config.json"))
    (checkpoint,) = run.checkpoints
    assert not list(checkpoint.glob("rollout*")) and run.metrics()[-1]["env_steps"] == 64
    assert gpu.train_until(time.monotonic() + 600, "starpilot", tmp_path, toy=True)
    assert [row["env_steps"] for row in run.metrics()] == [32, 64, 96, 128]


def test_every_measurement_has_options_that_exist(tmp_path: Path) -> None:
    commands = [words for _, _, words in gpu.steps(tmp_path, tmp_path, toy=False)]
    bench = [shlex.split(words)[3:] for words in commands if "phasicrl bench" in words]
    assert len(bench) > 1
    for words in bench[:-1]:
        assert cli.parse_config(words[: words.index("--seconds")]).compute.device == "cuda"
    for words in commands:
        assert all(Path(word).exists() for word in words.split() if word.endswith(".py"))


def test_a_bundle_has_the_chosen_families_and_all_that_the_package_needs() -> None:
    imports = ("os", "envpool.atari.registration", "envpool.procgen.registration  # noqa")
    entry = "".join(f"import {name}\n" for name in imports)
    kept = "import os\nimport envpool.procgen.registration  # noqa\n"
    assert offline_bundle.filter_imports(entry, ["procgen"]) == kept
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = set(map(offline_bundle.name_of, offline_bundle.PACKAGES)) | {"torch", "numpy"}
    assert set(map(offline_bundle.name_of, project["dependencies"])) - there <= {"pyqt5-qt5"}
