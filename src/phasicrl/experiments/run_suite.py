"""Train a suite: a row for each run, a figure, and who is better than whom.

Kind: effects (trains, writes files).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasicrl.analysis.compare import Comparison, Units, compare_curves
from phasicrl.analysis.plot import Curve, draw_curves, save_figure
from phasicrl.config import Config
from phasicrl.experiments.evaluate import evaluate
from phasicrl.experiments.suites import Scale, suite_named
from phasicrl.experiments.trials import (
    FIRST_REPORT_SEED,
    ResultTable,
    Row,
    Trial,
    fill_table,
    measure_once,
    over_seeds,
)
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.crash import CRASH_FILE

COLUMNS = (
    "task", "arm", "budget", "seed", "env_steps", "return_100", "greedy_mean", "seconds", "commit",
    "curve",
)  # fmt: skip
"""Of a suite's table; `curve` has the return at each fortieth of the budget."""
_POINTS = 40
_METRIC = "charts/episodic_return_100"


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What a suite found.

    Attributes:
        comparison: of the arms at the end of training.
        files: that were written.
    """

    comparison: Comparison
    files: tuple[Path, ...]


def run_suite(
    name: str,
    *,
    tasks: Sequence[str] = (),
    seeds: Sequence[int] = (),
    total_env_steps: int | None = None,
    scale: Scale = "small",
    jobs: int = 1,
    output_dir: Path = Path("runs/suites"),
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> SuiteResult:
    """Train an experiment of the source documents, and draw what it shows.

    Runs that are there already are not repeated, also those of another suite; what was cut off goes
    on from its last checkpoint.

    Args:
        name: Of the suite: fig2 to fig9, seeds-table, skip-aux, n-aux, mva, tricks, tricks-one-out.
        tasks: Games of Procgen, names with presets (halfcheetah), or ids of environments; none:
            those of the suite.
        seeds: Of the runs; none: as many as were published, from 101 on.
        total_env_steps: Budget of each run; none: the one of its settings.
        scale: As published, or small: a night on two cores.
        jobs: Runs at a time; they share the cores.
        output_dir: Gets the runs, the table and the figure.
        on_trial: told of each run whose row is written.

    Raises:
        ValueError: an unknown suite or task, fewer than one job, or arms that cannot be trained on
            a task; nothing was trained.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; give at least 1")
    suite = suite_named(name)
    seeds = seeds or range(FIRST_REPORT_SEED, FIRST_REPORT_SEED + suite.num_seeds)
    trials: list[Trial] = []
    for task in tasks or suite.tasks(scale):
        base = suite.base(task, scale)
        for arm, config in suite.arms(base):
            budget = total_env_steps or config.total_env_steps
            config = _ready(config, task, budget, jobs, output_dir)
            trials += over_seeds((task, arm, str(budget)), config, seeds)
    stem = output_dir / f"{name}-{scale}"
    table = ResultTable(stem.with_name(stem.name + ".csv"), COLUMNS, ("task", "arm", "budget"))
    output_dir.mkdir(parents=True, exist_ok=True)
    # Seed by seed: what has been trained when it is stopped is a whole comparison.
    trials.sort(key=lambda trial: trial.config.seed)
    for trial in fill_table(table, trials, measure, jobs=jobs):
        on_trial(trial)
    curves = suite_curves(table.rows_of(trials))
    figure = draw_curves(curves, "episodic return, last 100 episodes", f"{name}: {suite.about}")
    images = save_figure(figure, stem, f"suite {name}, {scale}")
    comparison = compare_curves(curves, metric=_METRIC, units=_units(trials))
    return SuiteResult(comparison, (table.path, *images))


def measure(trial: Trial) -> list[Row]:
    """Train, and say in one row what was reached, and on which way."""
    task, arm, budget = trial.label
    about = {"task": task, "arm": arm, "budget": budget, "seed": trial.config.seed}
    return [about | measure_once(trial.config, _reached)]


def suite_curves(rows: Sequence[dict[str, str]]) -> list[Curve]:
    """The curves in a suite's table, by task and arm, over the seeds."""
    grouped: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        grouped.setdefault((row["arm"], row["task"]), []).append(row)
    curves = []
    for (arm, task), members in grouped.items():
        values = np.array([[float(point) for point in row["curve"].split()] for row in members])
        seen = np.isfinite(values).all(axis=0)
        steps = _grid(int(members[0]["budget"]))
        curves.append(Curve(arm, task, steps[seen], values[:, seen]))
    return curves


def _units(trials: Sequence[Trial]) -> Units:
    """Procgen's bounds if there is nothing but its games, else none."""
    envs = [trial.config.env for trial in trials]
    if any(not env.id.startswith("procgen:") for env in envs):
        return "raw"
    return "procgen-hard" if envs[0].distribution == "hard" else "procgen-easy"


def _ready(config: Config, task: str, budget: int, jobs: int, output_dir: Path) -> Config:
    """An arm's configuration for its runs, whose name is the same in every suite."""
    changes: dict[str, Any] = {"total_env_steps": budget, "log.console": "off"}
    if jobs > 1:
        threads = max(1, (os.cpu_count() or 1) // jobs)
        changes |= {"compute.num_threads": threads, "env.num_threads": threads}
    config = config.changed({**changes, "output_dir": str(output_dir / "runs")})
    digest = hashlib.sha256(json.dumps(config.identity(), default=str).encode()).hexdigest()
    return replace(config, name=f"{task.rpartition(':')[2].replace('/', '-')}-{digest[:10]}")


def _grid(budget: int) -> NDArray[np.float64]:
    """The steps at which a curve is kept."""
    return np.linspace(0.0, budget, _POINTS + 1)[1:]


def _reached(directory: Path) -> Row:
    """What a run has come to; one that diverged stays where it was."""
    files = RunDirectory(directory)
    rows = files.metrics(_METRIC, "time/total")
    returns = [(row["env_steps"], row[_METRIC]) for row in rows if _METRIC in row]
    curve = []
    for at in _grid(files.config.total_env_steps):
        seen = [value for steps, value in returns if steps <= at + files.config.batch_size / 2]
        curve.append(seen[-1] if seen else math.nan)
    diverged = (directory / CRASH_FILE).is_file()
    greedy = math.nan if diverged else evaluate(directory, policies=("greedy",))[0].mean_return
    return {
        "env_steps": int(rows[-1]["env_steps"]),
        "return_100": round(returns[-1][1] if returns else math.nan, 3),
        "greedy_mean": round(greedy, 3),
        "seconds": round(sum(row["time/total"] for row in rows), 1),
        "commit": files.card["commit"] or "unknown",
        "curve": " ".join(f"{value:.5g}" for value in curve),
    }
