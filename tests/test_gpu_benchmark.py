"""`benchmarks/gpu.py` at the size of a toy on the CPU.

Every kind of step, interrupted and taken up again on another machine.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from phasicrl import cli
from phasicrl.config import Config
from phasicrl.lab import bench
from phasicrl.runs.directory import RunDirectory
from tests.helpers import skip_without_envpool
from tools import offline_bundle

ROOT = Path(__file__).parents[1]
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_gpu" name="good[cuda]" time="1.5"/>
<testcase classname="tests.test_gpu" name="bad[cuda]" time="0.5">
<failure message="assert 1 == 2">more</failure></testcase>
<testcase classname="tests.test_gpu" name="absent[cuda]" time="0">
<skipped message="no envpool"/></testcase></testsuite></testsuites>"""
REPORT = ROOT / "benchmarks" / "results" / "bench" / "procgen-ppg-single.json"
REFERENCE = "step,low,mean,high\n32,2.4,2.5,2.6\n64,2.4,2.5,2.6\n160,2.4,2.5,2.6\n"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which imports its neighbor."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


class Commands:
    """In place of processes.

    The programs' own parsers and functions, and what pytest would have written.
    """

    def __init__(self, versus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versus, self.monkeypatch = versus, monkeypatch
        self.done: list[str] = []

    def __call__(
        self, words: Sequence[str], *, seconds: float, log: Path, accept: Sequence[int] = (0,)
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("what it said\n")
        program, rest = (
            ("versus", list(words[2:]))
            if words[1].endswith("versus.py")
            else (words[2], list(words[3:]))
        )
        self.done.append(program)
        if program == "pytest":
            Path(
                next(word for word in rest if word.startswith("--junitxml=")).partition("=")[2]
            ).write_text(JUNIT)
            assert accept == (0, 1)
            return
        with redirect_stdout(io.StringIO()):
            if program == "phasicrl":
                assert cli.main(rest) == 0
            else:
                self.monkeypatch.setattr(sys, "argv", ["versus.py", *rest])
                self.versus.main()


@pytest.fixture
def commands(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Measurements of long ago, and contestants that do not train."""

    def measured(
        config: Config, *, seconds: float = 30.0, trace: Path | None = None
    ) -> SimpleNamespace:
        if trace is not None:
            trace.write_bytes(b"kernels")
        return SimpleNamespace(to_json=REPORT.read_text)

    versus = importlib.import_module("versus")
    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr(bench, "print_report", lambda report: None)
    monkeypatch.setattr(versus, "machine", lambda options: {"commit": "abc"})
    monkeypatch.setattr(
        versus, "run", lambda *_, seed: {"rate": 10.0 * seed, "seconds_to_threshold": 1.0}
    )
    return Commands(versus, monkeypatch)


def unpacked(archive: Path, folder: Path) -> Path:
    """What `cat FILE.* | tar xz -C FOLDER` makes."""
    parts = sorted(archive.parent.glob(f"{archive.name}.*"))
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as packed:
        packed.extractall(folder, filter="data")
    return folder


def test_every_kind_of_step_is_done_once_and_leaves_its_result(
    gpu: ModuleType, commands: Commands, tmp_path: Path
) -> None:
    skip_without_envpool()
    (tmp_path / "published.csv").write_text(REFERENCE)
    results, archive = tmp_path / "results", tmp_path / "gpu.tar.gz"
    words = [
        "--toy",
        "--results",
        str(results),
        "--commit",
        "abc",
        "--cleanrl",
        str(tmp_path),
        "--archive",
        str(archive),
    ]
    words += ["--reference", str(tmp_path / "published.csv")]
    gpu.main(words, run=commands)
    assert commands.done == [
        "pytest",
        "phasicrl",
        "phasicrl",
        "phasicrl",
        "versus",
        "phasicrl",
        "phasicrl",
    ]
    tests = json.loads((results / "tests.json").read_text())
    assert (tests["passed"], tests["failed"], tests["skipped"]) == (1, 1, 1)
    assert (
        tests["failures"] == {"tests.test_gpu::bad[cuda]": "assert 1 == 2"}
        and tests["about"]["commit"] == "abc"
    )
    with (results / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["preset"], row["precision"], row["way"]) for row in rows) == [
        ("procgen-ppg", "fp32", "eager"), ("procgen-ppg", "fp32", "recorded"),
        ("procgen-ppg-single", "fp32", "eager"), ("procgen-ppg-single", "fp32", "recorded"),
    ]  # fmt: skip
    assert all(
        float(row["whole_loop"]) > 0 and row["device"] == "cpu" and row["torch"] for row in rows
    )
    assert (
        (results / "runs" / "trace.json.gz").stat().st_size
        == json.loads((results / "trace.json").read_text())["bytes"]
        > 0
    )
    beside = json.loads((results / "procgen-toy-1.json").read_text())
    assert {run["contestant"] for run in beside["runs"]} == {"CleanRL ppo_procgen.py", "phasicrl"}
    assert beside["about"]["device"] == "cpu"
    trained = json.loads((results / "train-starpilot.json").read_text())
    assert trained["done"] and trained["env_steps"] == trained["budget"] == 160
    with (results / "train" / "starpilot" / "curve.csv").open() as file:
        assert {row["published"] for row in csv.DictReader(file)} == {"0", "1"}
    assert not (results / "attempts.json").read_text().strip("{}\n ")
    gpu.main(words, run=commands)
    assert len(commands.done) == 7, "nothing is done twice"
    copied = unpacked(archive, tmp_path / "copy")
    kept = {str(path.relative_to(copied)) for path in copied.rglob("*")}
    assert {"bench.csv", "tests.json", "train/starpilot/metrics.jsonl"} <= kept
    assert not any("checkpoints" in path or "venvs" in path for path in kept)
    assert sum(path.endswith("agent.safetensors") for path in kept) == 1


def session(gpu: ModuleType, results: Path, *, seconds: float, archive: Path | None = None) -> Any:
    return gpu.Session(results, gpu.TOY, time.monotonic() + seconds, "abc", archive=archive)


def test_training_stops_after_a_phase_and_goes_on_on_another_machine(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_envpool()
    monkeypatch.setattr(gpu, "PART", 20_000)
    here = tmp_path
    for number, (reached, done) in enumerate([(64, False), (128, False), (160, True)]):
        here, archive = tmp_path / f"machine{number}", tmp_path / f"{number}.tar.gz"
        if number:
            unpacked(tmp_path / f"{number - 1}.tar.gz", here)
        now = session(gpu, here, seconds=60.0 if done else 0.0, archive=archive)
        (step,) = (step for step in gpu.all_steps(now) if step.name == "train-starpilot")
        gpu.do(now, step)
        result = now.result("train-starpilot")
        assert (result["env_steps"], result["done"], gpu.is_done(now, step)) == (
            reached,
            done,
            done,
        )
        assert [piece["to"] for piece in result["pieces"]] == [64, 128, 160][: number + 1]
        sizes = [part.stat().st_size for part in tmp_path.glob(f"{number}.tar.gz.*")]
        assert len(sizes) > 1 and max(sizes) <= 20_000
        if not done:
            (checkpoint,) = here.glob("runs/train/starpilot/*/checkpoints/*")
            assert sorted(path.name for path in checkpoint.iterdir()) == [
                "manifest.json",
                "state.json",
                "tensors.safetensors",
            ], "no rollout is in it"
    (run,) = here.glob("runs/train/starpilot/*")
    for folder in (run, here / "train" / "starpilot"):
        assert [row["env_steps"] for row in RunDirectory(folder).metrics()] == [
            32 * (number + 1) for number in range(5)
        ]


def test_a_run_that_never_came_to_a_checkpoint_starts_anew(gpu: ModuleType, tmp_path: Path) -> None:
    skip_without_envpool()
    dead = tmp_path / "runs" / "train" / "starpilot" / "dead"
    dead.mkdir(parents=True)
    (dead / "config.json").write_text("{}")
    assert gpu.train(session(gpu, tmp_path, seconds=-100.0), "starpilot")["env_steps"] == 0, (
        "a call that is far over its time ends at once"
    )
    assert (
        gpu.train(session(gpu, tmp_path, seconds=60.0), "starpilot")["env_steps"] == 160
        and not dead.exists()
    )


def test_a_step_that_fails_twice_is_left_out_until_it_is_asked_for(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fail(words: Sequence[str], **_: Any) -> None:
        asked.append(words)
        raise gpu.StepError("exit code 1: no kernel image is available\nmore")

    for expected in (5, 10, 10):
        gpu.main(
            ["--toy", "--results", str(tmp_path), "--commit", "abc", "--only", "bench"], run=fail
        )
        assert len(asked) == expected
    assert (
        "failed 2 times: StepError: exit code 1: no kernel image is available"
        in capsys.readouterr().out
    )
    gpu.main(
        ["--toy", "--results", str(tmp_path), "--commit", "abc", "--only", "bench", "--again"],
        run=fail,
    )
    assert len(asked) == 15


def test_nothing_is_begun_that_does_not_fit(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(gpu, "do", lambda session, step: done.append(step.piece))
    for seconds in (10, 70, 130):
        now = gpu.Session(tmp_path, gpu.Sizes(), time.monotonic() + seconds, "abc")
        gpu.call(now, only=gpu.PIECES, again=False)
        done.append("/")
    assert [list(dict.fromkeys(call.split())) for call in " ".join(done).split("/")] == [
        [],
        ["bench"],
        ["tests", "bench", "train"],
        [],
    ]


def test_what_is_measured_at_full_size(gpu: ModuleType) -> None:
    """Three presets, two precisions, recorded and eager, 64 and 256 environments.

    Every field exists and has an effect.
    """
    sizes = gpu.Sizes()
    names = [step.name for step in gpu.bench_steps(sizes)]
    assert len(set(names)) == len(names) == 24 and names[0] == "bench/procgen-ppg-fp32-recorded-64"
    for preset in gpu.PRESETS:
        words = gpu.bench_words(sizes, preset, "bf16", "recorded", 256)
        config = cli.parse_config(words[: words.index("--seconds")])
        assert (
            config.env.num_envs,
            config.compute.policy_precision,
            config.compute.compile,
            config.compute.device,
        ) == (256, "bf16", "on", "cuda")
        assert config.aux is None or config.compute.aux_precision == "bf16"
    config = gpu.training(sizes, "bossfight", Path("folder"))
    assert (config.env.id, config.budget, config.checkpoint.every_minutes) == (
        "procgen:bossfight",
        25_000_000,
        None,
    )


def test_the_order_gives_most_first(gpu: ModuleType, tmp_path: Path) -> None:
    now = gpu.Session(tmp_path, gpu.Sizes(), 0.0, "abc")
    steps = gpu.all_steps(now)
    order = [step.name if step.piece == "train" else step.piece for step in steps]
    shown = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert shown == [
        "tests",
        "bench",
        "versus",
        "train-starpilot",
        "bench",
        "versus",
        "train-bigfish",
        "train-bossfight",
    ]
    assert order.count("bench") == 25 and order.count("versus") == 6


def test_a_command_that_takes_too_long_or_fails_is_told(gpu: ModuleType, tmp_path: Path) -> None:
    log, fifo = tmp_path / "log", tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(gpu.StepError, match="longer than 2 s"):
        gpu.run_command(["sh", "-c", f"sleep 600 > {fifo} & wait"], seconds=2.0, log=log)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "returns once the command's own child is killed, too"
    os.close(reader)
    with pytest.raises(gpu.StepError, match=r"(?s)exit code 3.*why"):
        gpu.run_command(
            [sys.executable, "-c", "print('why'); raise SystemExit(3)"], seconds=60, log=log
        )
    gpu.run_command(
        [sys.executable, "-c", "import phasicrl.config; raise SystemExit(1)"],
        seconds=60,
        log=log,
        accept=(0, 1),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(gpu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no GPU .* --toy"):
        gpu.main(["--results", str(tmp_path), "--commit", "abc"])


def test_cleanrl_gets_this_python_and_its_packages(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its packages").mkdir()
    (tmp_path / "its packages" / "gym.py").write_text("version = '0.23.1'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "its packages"))
    python = gpu.peers(tmp_path) / "cleanrl" / "bin" / "python"
    monkeypatch.delenv("PYTHONPATH")
    gpu.run_command(
        [str(python), "-c", "import gym; assert gym.version == '0.23.1'"],
        seconds=60,
        log=tmp_path / "log",
    )


def test_a_bundle_has_the_families_that_were_asked_for(tmp_path: Path) -> None:
    imports = ("os", "envpool.atari.registration", "envpool.procgen.registration  # noqa")
    entry = "".join(f"import {name}\n" for name in imports)
    names = [
        "envpool/entry.py",
        "envpool/atari/a.so",
        "envpool/procgen/p.so",
        "envpool/python/api.py",
        "envpool.libs/libQt.so",
        "tyro/__init__.py",
    ]
    names += [
        "envpool_assets/__init__.py",
        "envpool_assets/atari/rom",
        "envpool_assets/procgen/image.png",
    ]
    with zipfile.ZipFile(tmp_path / "all.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, entry if name == offline_bundle.ENTRY else "x")
    source = tmp_path / "gym-0.23.1"
    for name in ("gym/__init__.py", "tests/__init__.py", "docs/page.md"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    with tarfile.open(tmp_path / "gym-0.23.1.tar.gz", "w:gz") as packed:
        packed.add(source, "gym-0.23.1")
    site = tmp_path / "site"
    site.mkdir()
    for archive in ("all.whl", "gym-0.23.1.tar.gz"):
        offline_bundle.unpack(tmp_path / archive, site, ["procgen"])
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert found == {*names, "gym/__init__.py"} - {"envpool/atari/a.so", "envpool_assets/atari/rom"}
    assert (
        offline_bundle.entry_of(entry, ["procgen"])
        == "import os\nimport envpool.procgen.registration  # noqa\n"
    )


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("gym==0.23.1", "gym"),
        ("dm_tree", "dm-tree"),
        ("envpool-assets>=0.4,<0.5", "envpool-assets"),
    ],
)
def test_the_name_in_a_requirement(requirement: str, name: str) -> None:
    assert offline_bundle.name_of(requirement) == name


def test_the_bundle_has_everything_that_the_package_needs() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        offline_bundle.name_of(name)
        for name in [*project["dependencies"], *project["optional-dependencies"]["envpool"]]
    }
    assert needed - {"torch", "numpy"} <= {
        offline_bundle.name_of(name) for name in offline_bundle.PACKAGES
    }
