"""The programs of benchmarks/ whose commands the pages show, each in a small form.

They write the files that they say, and rows name their commit. `versus.py`, `agreement.py` and
`gpu.py`, which need other code bases, have tests of their own.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from phasicrl import cli
from phasicrl.host.provenance import commit
from phasicrl.lab.export.package import release
from tests.test_pages_run import small_presets
from tests.test_results import rows_of

__all__ = ["small_presets"]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_presets")]

ROOT = Path(__file__).parents[1]
SHORT = "--total-env-steps 64 --env.num-envs 4 --ppo.num-steps 16 --model.hidden-sizes 8"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The program that a test is named after; it finds its neighbors, as when it is started."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(request.node.name.removeprefix("test_"))


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Start a program as from a terminal."""
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *map(str, words)])
    script.main()


def rows(path: Path) -> list[dict[str, str]]:
    """Of a table, in which every row has the commit of this code."""
    found = rows_of(path)
    made = (commit() or "unknown").removesuffix("-dirty")
    assert found and {row["commit"].removesuffix("-dirty") for row in found} == {made}
    return found


def values(found: Sequence[dict[str, str]], column: str) -> set[str]:
    return {row[column] for row in found}


def test_learning(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "acrobot.csv"
    words = (
        "acrobot-ppo", f"acrobot-ppg:--name none --reward-norm.per none {SHORT} --aux.every 2",
        "--threshold", "-80", "--seeds", "2", "--runs", tmp_path / "runs",
    )  # fmt: skip
    run(script, monkeypatch, table, *words)
    found = rows(table)
    assert values(found, "seed") == {"101", "102"} and len(found) == 4
    run(script, monkeypatch, table, *words)
    assert rows(table) == found  # nothing is made twice


def test_agents(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def played(*args: object, **options: object) -> object:
        return release(*args, **options, episodes=2)  # type: ignore[arg-type]

    monkeypatch.setattr(script, "release", played)
    folders = ("--runs", tmp_path / "runs", "--output", tmp_path / "agents",
               "--films", tmp_path)  # fmt: skip
    run(script, monkeypatch, "cartpole-ppg", "--seeds", "2", *folders)
    (package,) = (tmp_path / "agents").iterdir()
    assert json.loads((package / "config.json").read_text())["name"] == "cartpole-ppg"
    film = (tmp_path / "cartpole-ppg.mp4").stat()
    run(script, monkeypatch, "cartpole-ppg", *folders)  # its package is there already
    assert (tmp_path / "cartpole-ppg.mp4").stat() == film


def test_precision(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, figure = tmp_path / "precision.csv.gz", tmp_path / "precision.png"
    few = ("--games", "starpilot", "--seeds", "1", "--jobs", "1", "--fields",
           "--total-env-steps 512")  # fmt: skip
    run(script, monkeypatch, table, figure, *few)
    found = rows(table)
    assert values(found, "setting") == set(script.SETTINGS)
    assert "512" in values(found, "env_steps") and figure.stat().st_size > 10_000


def test_levels(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, figure = tmp_path / "levels.csv", tmp_path / "levels.png"
    short = ("--total-env-steps 512 --env.num-envs 4 --ppo.num-steps 16 "
             "--evaluation.every-iterations 4 --evaluation.episodes 2")  # fmt: skip
    run(script, monkeypatch, table, figure, "--levels", 2, 3, "--seeds", 1, "--fields", short)
    found = rows(table)
    assert values(found, "levels") == {"2", "3"} and figure.stat().st_size > 10_000
    for row in found:
        ours, all_levels, gap = (float(row[name]) for name in script.METRICS)
        assert gap == pytest.approx(ours - all_levels, abs=1e-3)


def test_batch_invariance(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        script.TASKS, "CartPole", "--env.id envpool:CartPole-v1 --total-env-steps 2560"
    )
    monkeypatch.setattr(script, "SIZES", (1, 8))
    table, figure = tmp_path / "invariance.csv.gz", tmp_path / "invariance.png"
    run(script, monkeypatch, table, figure, "--seeds", "111", "--tasks", "CartPole", "--jobs", "1")
    found = rows(table)
    assert values(found, "divided_by") == {"1", "8"}
    assert values(found, "arm") == set(script.ARMS) and figure.stat().st_size > 10_000


def test_trading(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = script.EXAMPLE["config"].with_updates({"total_env_steps": 4096})
    monkeypatch.setitem(script.EXAMPLE, "config", short)
    table = tmp_path / "trading.csv"
    run(script, monkeypatch, table, "--seeds", "1", "--runs", tmp_path / "runs")
    assert values(rows(table), "arm") == set(script.ARMS)


def test_encoder(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**script.USUAL, "size": 16}
    monkeypatch.setattr(script, "CASES", (small, {**small, "precision": "bf16"}))
    table = tmp_path / "encoder.csv"
    run(script, monkeypatch, table, "--repeats", "1", "--threads", "1")
    found = rows(table)
    assert [(row["precision"], row["name"]) for row in found] == [
        ("fp32", "rate"), ("bf16", "features"), ("bf16", "gradients"), ("bf16", "rate"),
    ]  # fmt: skip
    errors = [float(row["value"]) for row in found if row["name"] != "rate"]
    assert all(0 < error < 0.1 for error in errors)


def test_memory(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, monkeypatch, tmp_path / "memory.json")
    found = json.loads((tmp_path / "memory.json").read_text())
    # Four rollouts of 4 environments and 16 steps, of which all but the images is little.
    images = 4 * 4 * 16 * 64 * 64 * 3
    assert images < found["buffer"] < 1.2 * images
    peaks = [found[f"after {what}"] for what in
             ("start-up", "the policy phase", "the auxiliary phase", "a checkpoint")]  # fmt: skip
    assert peaks[0] > 0 and peaks == sorted(peaks)
    assert found["beyond the buffer"] == pytest.approx(peaks[-1] - found["buffer"], rel=0.01)


def test_draw_trace(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, figure = tmp_path / "trace.json", tmp_path / "trace.png"
    words = ("--seconds", "0.2", "--compute.compile", "off", "--trace", str(trace),
             "--ppo.policy-epochs", "4", "--ppo.value-epochs", "4",
             "--output", str(tmp_path / "bench.json"))  # fmt: skip
    assert cli.main(["bench", "procgen-ppo", *words]) == 0
    kernels = tmp_path / "kernels.csv.gz"
    run(script, monkeypatch, kernels, figure, "--trace", str(trace))
    assert figure.stat().st_size > 10_000
    spans = script.read_kernels(kernels)
    (length,) = spans.pop("iteration")[:, 1]
    convolutions = sum(spans[kind][:, 1].sum() for kind in script.KINDS if "convolutions" in kind)
    assert 0 < convolutions < length
    assert len(rows(kernels)) > 100
    figure.unlink()
    run(script, monkeypatch, kernels, figure)
    assert figure.stat().st_size > 10_000


@pytest.mark.timeout(900)  # two processes that wait for each other: slow beside other work
def test_scaling(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "scaling.csv"
    few = ("--presets", "cartpole-ppo", "--rounds", "1")
    run(script, monkeypatch, table, *few)
    one, two = sorted(rows(table), key=lambda row: row["processes"])
    assert (one["processes"], two["processes"]) == ("1", "2")
    assert float(one["message"]) == 0 < float(two["message"]) and one["bytes"] == two["bytes"]
    for row in (one, two):
        assert 0 < float(row["exchanges"]) + 1e-9 < float(row["seconds"])


def test_scaling_model(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = ROOT / "benchmarks" / "results"
    figure = tmp_path / "model.png"
    measured = (results / "scaling.csv", results / "batch_invariance.csv.gz")
    run(script, monkeypatch, *measured, figure)
    assert figure.stat().st_size > 10_000


def test_compare_reference(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ROOT / "benchmarks" / "results" / "baselines"
    runs = sorted(path.parent for path in results.glob("*/metrics.jsonl"))
    output = tmp_path / "baselines"
    words = ("--reference", results / "published.csv.gz", "--output", output)
    run(script, monkeypatch, *runs, *words)
    for suffix in (".csv", ".png"):
        assert output.with_suffix(suffix).stat().st_size > 1_000
    ours = ROOT / "docs" / "figures" / "baselines.csv"
    assert output.with_suffix(".csv").read_text() == ours.read_text()


def test_every_command_of_python_on_the_pages_is_of_a_program_that_is_tried() -> None:
    elsewhere = {"agreement", "gpu", "versus"}
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    shown: set[str] = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for line in path.read_text().splitlines():
            shown |= set(re.findall(r"benchmarks/(\w+)\.py", line))
    assert shown and shown <= here | elsewhere


def test_large(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "TRAIN", {"vectors": f"train cartpole-ppo {SHORT}"})
    monkeypatch.setattr(script, "RUNS", 2)
    monkeypatch.setattr(script, "ROWS", 5)
    run(script, monkeypatch, tmp_path / "large.csv", "--repeats", "1")
    found = rows(tmp_path / "large.csv")
    assert [row["what"] for row in found] == ["vectors", "curves"]
    assert all(float(row["seconds"]) > 0 and float(row["gigabytes"]) > 0.05 for row in found)
    monkeypatch.setattr(script, "TRAIN", {"vectors": "train cartpole-ppo --no-such-flag"})
    with pytest.raises(ChildProcessError, match="no-such-flag ended with 2"):
        run(script, monkeypatch, tmp_path / "large.csv", "--repeats", "1")
