"""Learning curves of runs: one curve for each experiment and environment, over its seeds.

Kind: effects (reads files).

Runs are one experiment if their `Config.identity` is equal. The x axis is environment steps.
"""

import hashlib
import json
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phasicrl import Config
from phasicrl.config import format_value
from phasicrl.envs.protocol import LIMIT_HINT
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.bootstrap import bootstrap_band

Array: TypeAlias = NDArray[np.float64]
Points: TypeAlias = tuple[Array, Array]
"""Steps and values of one run."""
ONE_NUMBER_NOTE = "one number"
"""Beginning of the value note of published results without learning curves."""
INTERVAL_NOTE = "95 % bootstrap interval of the mean"
_MAX_POINTS = 1_000
_MAX_CUT = 0.1
"""Largest fraction of the longest run that a curve may lack without a warning."""


class Task(NamedTuple):
    """Environment of curves; each difficulty of a Procgen game is a task."""

    env_id: str
    difficulty: str = ""
    """Difficulty of the levels; empty outside Procgen."""

    def __str__(self) -> str:
        return f"{self.env_id} ({self.difficulty})" if self.difficulty else self.env_id


@dataclass(frozen=True, eq=False)
class Curve:
    """Learning curves of an experiment's runs, on a common grid of steps.

    Attributes:
        label: name of the experiment.
        task: environment of the runs.
        steps: environment steps.
        values: runs × steps.
        is_published: true for results of others.
        num_levels: number of Procgen levels in training; 0 is all, None is unknown.
        value_note: description of published values other than returns in training.
        run_points: recorded steps and values of each run; empty if `values` has all of them.
        band_edges: lower and upper edge of a band from a file.
        experiment: name of the experiment that the label may leave out, see `label_configs`.
    """

    label: str
    task: Task
    steps: Array
    values: Array
    is_published: bool = False
    num_levels: int | None = None
    value_note: str = ""
    run_points: Sequence[Points] = ()
    band_edges: tuple[Array, Array] | None = None
    experiment: str = ""

    @property
    def is_one_number(self) -> bool:
        """True for a published final result without its learning curve."""
        is_noted = self.value_note.startswith(ONE_NUMBER_NOTE)
        return self.is_published and (is_noted or len(self.steps) == 1)

    @property
    def mean(self) -> Array:
        """Mean over runs at each step."""
        return self.values.mean(axis=0)

    @property
    def band_description(self) -> str:
        """Legend text for the shaded band, its kind of interval; empty without a band."""
        if self.band_edges is not None:
            return "low to high"
        if len(self.values) > 2 and not self.is_published and np.isfinite(self.values).all():
            return INTERVAL_NOTE
        return "minimum to maximum" if len(self.values) > 1 else ""

    @cached_property
    def band(self) -> tuple[Array, Array]:
        """Lower and upper edge of the shaded band at each step, see `band_description`."""
        if self.band_edges is not None:
            return self.band_edges
        if self.band_description == INTERVAL_NOTE:
            return bootstrap_band(self.values)
        return self.values.min(axis=0), self.values.max(axis=0)

    @property
    def runs_description(self) -> str:
        """Text of a legend: number of runs, or what a published number is."""
        runs = "one run" if len(self.values) == 1 else f"{len(self.values)} runs"
        if self.band_edges is not None:
            return "reference"
        levels = f", {self.num_levels} levels" * bool(self.num_levels)
        return (f"published: {self.value_note or runs}" if self.is_published else runs) + levels


class LabeledRun(NamedTuple):
    """Run with the label of its experiment among others.

    Attributes:
        config: configuration of the run.
        task: environment of the run.
        experiment: name of the configuration; a sweep's trials have it without their digest.
        label: see `label_configs`.
    """

    config: Config
    task: Task
    experiment: str
    label: str


def expand_sweeps(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories with data; for a sweep, those of its trials.

    A warning names runs and trials without data, and runs whose configuration cannot be read, such
    as those of a version with other options.

    Args:
        paths: absolute paths of run directories and of sweeps.

    Raises:
        ValueError: `paths` is empty, a folder is not a run directory, or no run has data and a
            configuration that can be read.
    """
    if not paths:
        raise ValueError("no runs are given; expected at least one run directory")
    found: list[Path] = []
    empty: list[str] = []
    for path in dict.fromkeys(paths):
        trials = [file.parent for file in sorted(path.glob("*/trial.json"))]
        for folder in trials or [path]:
            runs = sorted(folder.glob("runs/*")) if trials else [folder]
            # A folder that is not a run is refused when it is read, unless a trial has it: it is of
            # a process that was killed at its start.
            runs = [run for run in runs if RunDirectory(run).last_rows(2)
                    or not (trials or RunDirectory(run).has_config)]  # fmt: skip
            found += runs
            empty += [] if runs else [str(folder)]
    if empty:
        others = f" and {len(empty) - 1} others" * (len(empty) > 1)
        text = f"no iteration was finished in {empty[0]}{others}"
        if not found:
            raise ValueError(f"{text}; expected a run with data")
        warnings.warn(f"{text}: left out", stacklevel=2)
    errors_by_run: dict[Path, ValueError] = {}
    for run in found:
        try:
            _ = RunDirectory(run).config
        except ValueError as error:
            errors_by_run[run] = error
    for run, error in errors_by_run.items():
        if len(errors_by_run) == len(found) or not RunDirectory(run).has_config:
            raise error
        warnings.warn(f"{error}: left out", stacklevel=2)
    return [run for run in found if run not in errors_by_run]


def read_curves(paths: Sequence[Path], metric: str, *, smooth_steps: int = 0) -> list[Curve]:
    """Read the curves of runs, in the order of their experiments.

    Runs in which no episode has ended have no returns: they are left out where others of their
    experiment have returns, and there is a warning.

    Args:
        paths: run directories, and directories of sweeps; runs without data for `metric` are left
            out with a warning.
        metric: name of the metric.
        smooth_steps: see `smooth`.

    Raises:
        ValueError: `paths` is empty, a folder is not a run directory, no run has data for `metric`,
            or runs of one experiment share no steps.
    """
    found = [RunDirectory.find(path) for path in paths]
    runs = expand_sweeps([files.path.resolve() for files in found])
    points = {run: smooth(_read_points(run, metric), smooth_steps) for run in runs}
    lacking = [run for run in points if not len(points[run][0])]
    if len(lacking) == len(points):
        present = {name for run in runs for row in RunDirectory(run).metrics() for name in row
                   if "/" in name and math.isfinite(row[name])}  # fmt: skip
        raise ValueError(f"metric is {metric}; expected one of {', '.join(sorted(present))}")
    if lacking:
        names = ", ".join(map(str, lacking))
        warnings.warn(f"{metric} is missing in {names}: left out", stacklevel=2)
    labeled_runs = label_runs([run for run in points if run not in lacking])
    groups: dict[tuple[Task, str], list[Path]] = defaultdict(list)
    for run, each in labeled_runs.items():
        groups[each.task, each.label].append(run)
    curves = []
    for (task, label), members in groups.items():
        series = [points[run] for run in members]
        ended = [each for each in series if not np.isnan(each[1]).all()]
        name, series = label if ended else f"{label} (no episode ended)", ended or series
        counts = Counter(labeled_runs[run].config.seed for run in members)
        if repeated := [str(seed) for seed, count in counts.items() if count > 1]:
            several = f"{label} on {task} has several runs of seed {', '.join(repeated)}"
            warnings.warn(f"{several}; keep one of each: its interval is too narrow", stacklevel=2)
        steps, values = align(series, label)
        longest = max(recorded[-1] for recorded, _ in series)
        if steps[-1] < (1 - _MAX_CUT) * longest:
            cut = f"{label} on {task} is cut at {steps[-1]:,.0f} steps"
            warnings.warn(f"{cut}; its longest run has {longest:,.0f}", stacklevel=2)
        first = labeled_runs[members[0]]
        levels = first.config.env.num_levels if task.difficulty else None
        curves.append(Curve(name, task, steps, values, num_levels=levels, run_points=series,
                            experiment=first.experiment))  # fmt: skip
    return curves


def get_shared_experiment(curves: Sequence[Curve]) -> str:
    """Return the name that all experiments share and their labels leave out; empty without one."""
    names = {curve.experiment for curve in curves if not curve.is_published}
    is_shared = len(names) == 1 and names.isdisjoint(curve.label for curve in curves)
    return names.pop() if is_shared else ""


def make_task(env_id: str, config: Config) -> Task:
    """Return the task of a run from its environment's id and its configuration."""
    return Task(env_id, config.env.distribution if env_id.startswith("procgen:") else "")


def smooth(points: Points, window: int) -> Points:
    """Average the values in `(step − window, step]` at each step."""
    steps, values = points
    if window == 0:
        return points
    firsts = np.searchsorted(steps, steps - window, side="right")
    # Not from differences of one cumulative sum, whose rounding a large value would ruin.
    return steps, np.array([values[first : i + 1].mean() for i, first in enumerate(firsts)])


def align(series: Sequence[Points], name: str) -> Points:
    """Interpolate runs on one grid, from the latest first step to the earliest last step."""
    start, end = max(steps[0] for steps, _ in series), min(steps[-1] for steps, _ in series)
    if start > end:
        given = f"{name} has a run that ends at {end:,.0f} and one that begins at {start:,.0f}"
        raise ValueError(f"{given}; expected common steps. Leave one of them out")
    grid = np.unique(np.concatenate([steps for steps, _ in series]))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > _MAX_POINTS:
        grid = grid[np.linspace(0, len(grid) - 1, _MAX_POINTS).round().astype(int)]
    return grid, np.stack([np.interp(grid, steps, values) for steps, values in series])


def extract_points(rows: Sequence[Mapping[str, float]], metric: str) -> Points:
    """Return the steps and values of a metric in the rows where the metric is finite."""
    pairs = [(row["env_steps"], row.get(metric, math.nan)) for row in rows]
    finite = [pair for pair in pairs if math.isfinite(pair[1])]
    steps, values = np.array(finite, np.float64).reshape(-1, 2).T
    return steps, values


def _read_points(run: Path, metric: str) -> Points:
    """Read the steps and values of a run's metric; NaN for returns if no episode has ended."""
    rows = RunDirectory(run).metrics(metric)
    points = extract_points(rows, metric)
    returns = ("charts/episodic_return", "charts/episodic_return_100", "charts/episodic_length")
    if not len(points[0]) and metric in returns:
        steps = np.array([row["env_steps"] for row in rows], np.float64)
        text = f"{run}: no episode has ended in {steps[-1]:,.0f} steps"
        warnings.warn(f"{text}; set a time limit ({LIMIT_HINT})", stacklevel=2)
        return steps, np.full(len(steps), np.nan)
    return points


def format_setting(path: str, value: Any) -> str:
    """Format an option and its value, to float32's seven digits: `clip 0.1`, `lr 3e-4`."""
    if isinstance(value, float):
        value = float(f"{value:.7g}")
        if 0 < abs(value) < 0.01:
            value = np.format_float_scientific(value, trim="-", exp_digits=1)
    return f"{path.removeprefix('ppo.').replace('learning_rate', 'lr')} {format_value(value)}"


def make_digest(config: Config) -> str:
    """Make ten hexadecimal digits that tell the settings of a configuration from others."""
    # Without options at their defaults, so that a version with more options finds its runs.
    usual = Config().identity()
    changed = {path: value for path, value in config.identity().items() if value != usual.get(path)}
    text = json.dumps(changed, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def get_experiment_name(config: Config) -> str:
    """Return the name of a configuration, without the digest of a sweep's run."""
    return config.name.removesuffix(f"-{make_digest(config)}")


def label_configs(
    configs_by_run: Mapping[Path, Config], tasks_by_run: Mapping[Path, Task]
) -> dict[Path, str]:
    """Label the experiment of each run by name, unless all share it, and by options that differ.

    Options are compared between runs of one name and task; options that differ are shown on all
    tasks. Runs of a name are sorted by the values of these options.
    """
    names = {run: get_experiment_name(config) for run, config in configs_by_run.items()}
    options = {run: config.identity() for run, config in configs_by_run.items()}
    every = dict.fromkeys(path for settings in options.values() for path in settings)
    values_by_option: dict[tuple[str, Task, str], set[str]] = defaultdict(set)
    for run, name in names.items():
        for path in every.keys() - {"env.id", "env.distribution"}:
            values_by_option[name, tasks_by_run[run], path].add(repr(options[run].get(path)))
    differing = {(name, path) for (name, _, path), x in values_by_option.items() if len(x) > 1}

    def get_run_sort_key(run: Path) -> Any:
        values = (options[run].get(path, ()) for path in every if (names[run], path) in differing)
        return [*names.values()].index(names[run]), [*map(_get_value_sort_key, values)]

    label_by_run: dict[Path, str] = {}
    for run in sorted(names, key=get_run_sort_key):
        name = names[run]
        parts = [format_setting(path, value) for path, value in options[run].items()
                 if (name, path) in differing]  # fmt: skip
        if len({*names.values()}) > 1 or not parts:
            parts = [name, *parts]
        label_by_run[run] = ", ".join(parts)
    return label_by_run


def _get_value_sort_key(value: Any) -> Any:
    """Return a key that sorts numbers and lists of numbers by value, then all else by its text."""
    numbers = value if isinstance(value, tuple) else (value,)
    return (0, numbers) if all(isinstance(x, int | float) for x in numbers) else (1, str(value))


def label_runs(runs: Sequence[Path]) -> dict[Path, LabeledRun]:
    """Read the experiments of runs, labeled and sorted as by `label_configs`."""
    configs = {run: RunDirectory(run).config for run in runs}
    tasks = {run: make_task(RunDirectory(run).env_id, config) for run, config in configs.items()}
    return {run: LabeledRun(configs[run], tasks[run], get_experiment_name(configs[run]), label)
            for run, label in label_configs(configs, tasks).items()}  # fmt: skip
