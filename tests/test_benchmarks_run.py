"""The programs of benchmarks/ whose commands the pages show, each in a small form.

`versus.py`, `agreement.py` and `gpu.py`, which need other code bases, have tests of their own.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tyro
from matplotlib.figure import Figure

from phasicrl.lab.export.package import release
from phasicrl.system.machine import find_commit
from tests.test_pages_run import small_presets
from tests.test_results import rows_of
from tools.figures import FIGURES, FOLDER

__all__ = ["small_presets"]
long = pytest.mark.long
pytestmark = pytest.mark.usefixtures("small_presets")

ROOT = Path(__file__).parents[1]
SHORT = "--total-env-steps 64 --env.num-envs 4 --ppo.num-steps 16 --model.hidden-sizes 8"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """Return the program that a test is named after."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(request.node.name.removeprefix("test_"))


def run(script: ModuleType, *words: object) -> None:
    """Start a program as from a terminal."""
    tyro.cli(script.main, args=list(map(str, words)))


def columns(path: Path, *names: str) -> list[set[str]]:
    """Return some columns of a table, in which every row has the commit of this code."""
    rows = rows_of(path)
    made = (find_commit() or "unknown").removesuffix("-dirty")
    assert {row["commit"].removesuffix("-dirty") for row in rows} == {made}
    return [{row[name] for row in rows} for name in names]


@long
def test_learning(script: ModuleType, tmp_path: Path) -> None:
    table = tmp_path / "acrobot.csv"
    ppg = f"acrobot-ppg:--name none --reward-norm.per none {SHORT} --aux.every 2"
    presets = ("acrobot-ppo", ppg)
    words = (table, *presets, "--threshold", "-80", "--seeds", "2", "--runs", tmp_path / "runs")
    run(script, *words)
    assert columns(table, "seed") == [{"101", "102"}]
    found = rows_of(table)
    run(script, *words)
    assert rows_of(table) == found and len(found) == 4  # no run is repeated


@long
def test_before_after(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "TASKS", {"small": f"cartpole-ppo {SHORT} --total-env-steps 256"})
    program, table = Path(sys.executable).with_name("phasicrl"), tmp_path / "speed.csv"
    run(script, table, "--before", program, "--rounds", "2")
    checkouts = [row["checkout"] for row in rows_of(table)]
    assert checkouts == ["before", "after", "after", "before"]  # in alternating order
    assert columns(table, "task", "round") == [{"small"}, {"1", "2"}]
    assert all(float(row["steps_per_second"]) > 0 for row in rows_of(table))


@long
def test_agents(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def release_fast(*args: object, **options: object) -> object:
        return release(*args, **options, episodes=2)  # type: ignore[arg-type]

    monkeypatch.setattr(script, "release", release_fast)
    folders = ("--runs", tmp_path / "runs", "--output", tmp_path / "agents", "--films", tmp_path)
    run(script, "cartpole-ppg", "--seeds", "2", *folders)
    (package,) = (tmp_path / "agents").iterdir()
    assert json.loads((package / "config.json").read_text())["name"] == "cartpole-ppg"
    film = (tmp_path / "cartpole-ppg.mp4").stat()
    run(script, "cartpole-ppg", *folders)  # its package is there
    assert (tmp_path / "cartpole-ppg.mp4").stat() == film


@long
def test_batch_invariance(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "--env.id envpool:CartPole-v1 --total-env-steps 2560"
    monkeypatch.setattr(script, "TASKS", {"CartPole": short})
    monkeypatch.setattr(script, "DIVISORS", (1, 8))
    table, figure = tmp_path / "invariance.csv.gz", tmp_path / "invariance.png"
    run(script, table, figure, "--seeds", 111, "--tasks", "CartPole", "--jobs", 1)
    assert columns(table, "divided_by", "arm") == [{"1", "8"}, set(script.ARMS)]
    assert figure.is_file()


@long
def test_trading(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = script.EXAMPLE["config"].with_updates({"total_env_steps": 4096})
    monkeypatch.setitem(script.EXAMPLE, "config", short)
    run(script, tmp_path / "trading.csv", "--seeds", "1", "--runs", tmp_path / "runs")
    assert columns(tmp_path / "trading.csv", "arm") == [set(script.ARMS)]


@long
def test_encoder(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**script.USUAL, "size": 16}
    monkeypatch.setattr(script, "CASES", (small, {**small, "precision": "bf16"}))
    run(script, tmp_path / "encoder.csv", "--repeats", "1")
    columns(tmp_path / "encoder.csv")
    found = rows_of(tmp_path / "encoder.csv")
    rows = {(row["precision"], row["name"]): row["value"] for row in found}
    assert all(float(rows[kind, "rate"]) > 0 for kind in ("fp32", "bf16"))
    assert all(0 < float(rows["bf16", name]) < 0.1 for name in ("features", "gradients"))


@long
def test_memory(script: ModuleType, tmp_path: Path) -> None:
    run(script, tmp_path / "memory.json")
    found = json.loads((tmp_path / "memory.json").read_text())
    # Four rollouts of 4 environments and 16 steps, of which all but the images is little.
    images = 4 * 4 * 16 * 64 * 64 * 3
    assert images < found["buffer"] < 1.2 * images
    stages = ("start-up", "the policy phase", "the auxiliary phase", "a checkpoint")
    peaks = [found[f"after {stage}"] for stage in stages]
    assert peaks[0] > 0 and peaks == sorted(peaks)


@long
def test_scaling(script: ModuleType, tmp_path: Path) -> None:
    run(script, tmp_path / "scaling.csv", "--presets", "cartpole-ppo", "--rounds", "1")
    columns(tmp_path / "scaling.csv")
    one, two = sorted(rows_of(tmp_path / "scaling.csv"), key=lambda row: row["processes"])
    assert (one["processes"], two["processes"]) == ("1", "2")
    assert float(one["message"]) == 0 < float(two["message"]) and one["bytes"] == two["bytes"]
    assert all(0 <= float(row["exchanges"]) < float(row["seconds"]) for row in (one, two))


@long
def test_time_limits(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = "no final observation"
    monkeypatch.setattr(script, "ARMS", {arm: script.ARMS[arm]})
    monkeypatch.setattr(script, "CONFIG", script.CONFIG.with_updates({"total_env_steps": 1024}))
    run(script, tmp_path / "time_limits.csv", "--seeds", "2")
    found = columns(tmp_path / "time_limits.csv", "task", "arm", "seed")
    assert found == [{"limit", "both"}, {arm}, {"101", "102"}]


def record_simulators(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Record the classes that the program trains on."""
    kinds, train = list[type](), script.train

    def record(config: Any, make_vector_env: type, **others: Any) -> Any:
        kinds.append(make_vector_env)
        return train(config, make_vector_env=make_vector_env, **others)

    monkeypatch.setattr(script, "train", record)
    return kinds


def assert_importable(kinds: list[type]) -> None:
    """Check that `torch.compile` finds the methods of a class by its module."""
    assert kinds
    assert all(getattr(sys.modules[each.__module__], each.__name__) is each for each in kinds)


@long
def test_simulators(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, arm = record_simulators(script, monkeypatch), ("CartPole", "PPO")
    file, kind, preset, _ = script.ARMS[arm]
    monkeypatch.setattr(script, "ARMS", {arm: (file, kind, preset, {"total_env_steps": 2048})})
    figure = tmp_path / "curves.png"
    run(script, tmp_path / "simulators.csv", "--seeds", "2", "--figure", str(figure))
    assert columns(tmp_path / "simulators.csv", "task", "seed") == [{"CartPole"}, {"101", "102"}]
    rows = rows_of(tmp_path / "simulators.csv")
    assert max(int(row["env_steps"]) for row in rows) == 2048 and figure.stat().st_size
    run(script, tmp_path / "simulators.csv", "--seeds", "2")  # adds nothing
    assert rows_of(tmp_path / "simulators.csv") == rows
    assert_importable(kinds)


@long
def test_steps_per_call(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = record_simulators(script, monkeypatch)
    run(script, tmp_path / "steps.csv", "--rounds", "1", "--sizes", "1", "2", "--num-envs", "4")
    assert columns(tmp_path / "steps.csv", "num_envs", "steps_per_call") == [{"4"}, {"1", "2"}]
    assert_importable(kinds)


@long
def test_mjlab_cartpole(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"env.id": "gymnasium:Pendulum-v1", "env.num_envs": 4, "ppo.num_steps": 8,
               "model.policy_obs": None, "model.value_obs": None,
               "compute.compile": "off", "output_dir": str(tmp_path)}  # fmt: skip
    monkeypatch.setattr(script, "CONFIG", script.CONFIG.with_updates(changes))
    monkeypatch.setattr(script, "NUM_ENVS", 4)
    monkeypatch.setattr(script, "NUM_STEPS", 8)
    monkeypatch.setattr(script, "train_rsl_rl", script.train_ours)  # mjlab has its own environment
    table = tmp_path / "mjlab.csv"
    run(script, table, "--seeds", "2", "--iterations", "3")
    names = ("trainer", "seed", "env_steps")
    assert columns(table, *names) == [{"phasicrl", "rsl_rl"}, {"101", "102"}, {"32", "64", "96"}]
    # Pendulum's rewards: from -16.3 to 0
    assert all(-17 < float(row["reward"]) < 0 for row in rows_of(table))


@long
def test_large(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "TRAIN", {"vectors": f"train cartpole-ppo {SHORT}"})
    monkeypatch.setattr(script, "RUNS", 2)
    monkeypatch.setattr(script, "ROWS", 5)
    run(script, tmp_path / "large.csv", "--repeats", "1")
    assert columns(tmp_path / "large.csv", "what") == [{"vectors", "curves"}]
    for row in rows_of(tmp_path / "large.csv"):
        assert float(row["seconds"]) > 0 and float(row["gigabytes"]) > 0.05


def on_pages(pattern: str) -> set[str]:
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    return {found for page in pages for found in re.findall(pattern, page.read_text())}


def test_every_program_on_the_pages_has_a_test() -> None:
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    here |= {"agreement", "compare_reference", "gpu", "versus"}
    shown = on_pages(r"benchmarks/(\w+)\.py")
    assert shown and shown <= here


def test_every_figure_has_its_command_and_its_place_on_a_page() -> None:
    there = {path.name for path in FOLDER.glob("*.png")}
    assert there == FIGURES.keys() == on_pages(r"figures/([\w-]+\.png)\)")


@pytest.mark.long
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_six_lines_a_panel_at_most(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, save = list[Figure](), Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: (
        drawn.append(figure), save(figure, *args, **options)
    ))  # fmt: skip
    FIGURES[name](tmp_path / name)
    assert drawn and (tmp_path / name).stat().st_size > 10_000
    for figure in drawn:
        for panel in figure.axes:  # a line without points is there for the legend only
            assert sum(np.size(line.get_xdata()) > 0 for line in panel.lines) <= 6


@pytest.mark.long
def test_the_table_of_published_runs_is_made_from_the_committed_runs(tmp_path: Path) -> None:
    FIGURES["baselines.png"](tmp_path / "baselines.png")
    assert (tmp_path / "baselines.csv").read_text() == (FOLDER / "baselines.csv").read_text()
