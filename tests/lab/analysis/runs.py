"""Run directories with given curves, and references, for the tests of this folder."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phasicrl.config import Config, EnvConfig
from phasicrl.lab.analysis import references
from phasicrl.lab.experiments.trials import prepare_trial_config

RETURN = "charts/episodic_return_100"
HARD = EnvConfig(id="procgen:starpilot", distribution="hard")


def make_run(
    folder: Path, points: Sequence[tuple[int, float | None]], *, metric: str = RETURN,
    env: str | EnvConfig = "procgen:starpilot", **settings: Any,
) -> Path:  # fmt: skip
    """Make a run directory, in `runs` that of a trial, with one value of a metric in each row."""
    folder.mkdir(parents=True)
    env = EnvConfig(id=env) if isinstance(env, str) else env
    config = Config(**{"name": "demo", **settings}, env=env)
    if folder.parent.name == "runs":
        config = prepare_trial_config(config, config.name, folder.parents[1])
    (folder / "config.json").write_text(config.to_json())
    rows = [
        {"env_steps": steps, "iteration": i, "phase": 0, "wall_time": float(i), metric: value}
        for i, (steps, value) in enumerate(points)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_runs(tmp_path: Path, *curves: Sequence[float], **settings: Any) -> list[Path]:
    """Make a run for each curve, with seeds 1, 2, … and rows at 100, 200, … steps."""
    points = [[(100 * i, value) for i, value in enumerate(curve, start=1)] for curve in curves]
    numbered = [*enumerate(points, start=1)]
    return [make_run(tmp_path / f"run{i}", each, seed=i, **settings) for i, each in numbered]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def publish(monkeypatch: pytest.MonkeyPatch, *rows: str, columns: str = "") -> Path:
    """Add a reference to the package: rows of experiment,run,game,step,episodic_return.

    Levels are easy, unless `columns` names further ones in which the rows have others.
    """
    header = f"experiment,run,game,step,episodic_return{columns}"
    usual = {"split": "train", "distribution": "easy", "num_levels": "0"}
    table = [usual | row for row in csv.DictReader(io.StringIO("\n".join([header, *rows])))]
    packaged = references._read_table
    read = lambda name: table if name == "made" else packaged(name)  # noqa: E731
    monkeypatch.setattr(references, "_read_table", read)
    monkeypatch.setattr(references, "REFERENCE_NAMES", (*references.REFERENCE_NAMES, "made"))
    return Path("made")


def own_curve(path: Path, *rows: str, header: str = "step,low,mean,high") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path
