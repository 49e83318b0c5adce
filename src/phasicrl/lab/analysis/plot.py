"""Learning curves of runs, beside published ones: PNG, SVG and the CSV behind them.

Kind: effects (writes files).

One curve is the mean over the runs of one experiment, see `Config.identity`. The x axis is always
environment steps.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phasicrl.config import Config
from phasicrl.config_io import nearest_name
from phasicrl.lab.analysis import references
from phasicrl.lab.analysis.references import HEADLINES, KINDS, ONE_NUMBER, REFERENCES
from phasicrl.runs.directory import RunDirectory, each_once
from phasicrl.runs.metrics import METRICS
from phasicrl.session.bootstrap import bootstrap_band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array: TypeAlias = NDArray[np.float64]
Points: TypeAlias = tuple[Array, Array]  # steps and values
Looks: TypeAlias = dict[tuple[str, bool], dict[str, Any]]  # of lines, by (label, published)

RETURNS = (
    "charts/episodic_return", "charts/episodic_return_100", "evaluation/return",
    "evaluation/train_return",
)  # fmt: skip
"""Metrics that references of the package hold."""

_COLUMNS = (
    "metric", "env_id", "distribution", "num_levels", "curve", "published", "num_runs", "band",
    "env_steps", "mean", "low", "high",
)  # fmt: skip
"""Of the table that is written."""
_FILE_COLUMNS = ("step", "low", "mean", "high")
"""Of a reference that is a file of the user's."""
# Of Okabe and Ito: told apart by all eyes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ((0, (4, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1, 1.5)))
_MOST_POINTS = 1_000
_MOST_REFERENCES = 6
_NEAR = 1.02
_ENDINGS = (".png", ".svg", ".csv")
_MOST_CUT = 0.1  # of the longest run's steps, without a note
WINDOW = 0.1
"""Share of the steps, the last ones, over which a score is the mean."""
_LETTERS_PER_INCH, _INCHES_PER_LINE = 12, 0.18  # of a legend
_TITLE_LETTERS_PER_INCH, _INCHES_PER_TITLE_LINE = 10, 0.22  # of a title
_AXIS_LABELS = {
    "charts/episodic_return": "episodic return",
    "charts/episodic_return_100": "episodic return, last 100 episodes",
    "charts/SPS": "environment steps per second",
    "losses/old_approx_kl": "KL divergence, k1 (nats)",
    "losses/approx_kl": "KL divergence, k3 (nats)",
    "losses/clipfrac": "fraction of clipped samples",
    "losses/entropy": "entropy of the policy (nats)",
    "losses/action_std": "deviation of actions",
    "losses/aux/kl_loss": "KL divergence in the auxiliary phase (nats)",
    "losses/aux/aux_value_loss": "value loss of the policy's network",
    "losses/aux/real_value_loss": "value loss of the value network",
    "gradients/policy_norm": "norm of the policy's gradient",
    "gradients/value_norm": "norm of the value's gradient",
    "gradients/aux_norm": "norm of the gradient",
    "rewards/clipped_fraction": "fraction of clipped rewards",
    "observations/clipped_fraction": "fraction of clipped observations",
    "network/dormant_fraction": "fraction of dormant features",
    "evaluation/return": "return of evaluations",
    "evaluation/train_return": "return of evaluations on the training's levels",
}


class Task(NamedTuple):
    """What curves are compared on: each difficulty of a game of Procgen is a task of its own."""

    env_id: str
    distribution: str = ""
    """Procgen: the difficulty of the levels; empty: another environment, or nobody said it."""

    def __str__(self) -> str:
        return f"{self.env_id} ({self.distribution})" if self.distribution else self.env_id

    @classmethod
    def read(cls, text: str) -> Task:
        """The task that `str` calls so."""
        env_id, _, distribution = text.removesuffix(")").partition(" (")
        return cls(env_id, distribution)


class Line(NamedTuple):
    """A published curve of a game."""

    experiment: str
    distribution: str
    """Procgen: the difficulty of the levels; else empty."""
    num_levels: int | None
    """Procgen: of the training; 0 is all. Else None."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Runs on one grid of steps: their mean is the line, what they spread over is the band."""

    label: str
    env_id: str
    steps: Array
    runs: Array
    """Runs × steps."""
    noun: str = "seed"
    published: bool = False
    distribution: str = ""
    """Procgen: the difficulty of the levels."""
    num_levels: int | None = None
    """Procgen: how many levels there were in training; 0 is all, None: nobody said it."""
    kind: str = ""
    """What the values of a published one are, if no returns of training."""
    points: Sequence[Points] = ()
    """Of each run, before they were put on one grid; empty: they are on it by themselves."""
    edges: tuple[Array, Array] | None = None
    """Lower and upper edge of a band that was read from a file."""

    @property
    def task(self) -> Task:
        """What it is compared on."""
        return Task(self.env_id, self.distribution)

    @property
    def levels(self) -> str:
        """How many levels there were in training, in words."""
        return f"{self.num_levels} levels" if self.num_levels else "all levels"

    @property
    def is_one_number(self) -> bool:
        """Whether it is a published result that does not say what was reached before."""
        return self.published and (len(self.steps) == 1 or self.kind.startswith(ONE_NUMBER))

    @property
    def mean(self) -> Array:
        """Mean over runs at each step."""
        return self.runs.mean(axis=0)

    @property
    def band_name(self) -> str:
        """What the band is; empty if there is none."""
        if self.edges is not None:
            return "low to high"
        if len(self.runs) > 2 and not self.published:
            return "95 % bootstrap interval of the mean"
        return "minimum to maximum" if len(self.runs) > 1 else ""

    @cached_property
    def band(self) -> tuple[Array, Array]:
        """Lower and upper edge."""
        if self.edges is not None:
            return self.edges
        if len(self.runs) > 2 and not self.published:
            return bootstrap_band(self.runs)
        return self.runs.min(axis=0), self.runs.max(axis=0)

    @property
    def about(self) -> str:
        """Over how many runs the curve is, and what its band is."""
        count = len(self.runs)
        band = f", band: {self.band_name}" if self.band_name else ""
        if self.edges is not None:
            return f"reference{band}"
        if self.published:
            runs = f"{count} run{'s' if count > 1 else ''}"
            return f"published ({self.kind or runs}){band}"
        return f"mean of {count} {self.noun}s{band}" if count > 1 else f"one {self.noun}"


def plot_runs(
    runs: Sequence[Path],
    *,
    output: Path = Path("curves"),
    metric: str = "charts/episodic_return_100",
    smooth_steps: int = 0,
    reference: Path | None = None,
    reference_experiments: Sequence[str] = (),
    target: float | None = None,
    title: str | None = None,
) -> list[Path]:
    """Draw learning curves of runs over seeds, with published curves beside them if wanted.

    There is one panel for each environment, and one curve for each experiment.

    Args:
        runs: Run directories; one experiment on one environment is one curve over its seeds.
        output: Name of the image; .png, .svg and .csv are put behind it.
        metric: Which metric.
        smooth_steps: Average over so many environment steps up to each point; 0: as recorded.
        reference: Published returns: ppg-paper, baselines-easy, baselines-easy-200,
            baselines-final, procgen-easy-25m, zoo, tianshou, slm-lab, cleanrl; or a curve of
            your own, a CSV file with the columns step, low, mean, high. Published returns of a
            game of Procgen stand beside runs of the same difficulty only.
        reference_experiments: Its experiments; none: all, if few; of ppg-paper PPG and PPO.
        target: A value of the metric at which a dotted line is drawn.
        title: Over the figure.

    Returns:
        The files written.

    Raises:
        ValueError: an unknown metric, a folder that is not a run directory, runs without data for
            the metric, a reference without that metric, game, experiment or column, experiments
            of a reference that is not given, or an output that ends like a file of another kind.
        FileNotFoundError: no reference file.
        ModuleNotFoundError: matplotlib is not installed.
    """
    _refuse_metric(metric, smooth_steps)
    refuse_without_reference(reference, reference_experiments=reference_experiments)
    stem = stem_of(output)
    curves = run_curves(runs, metric, smooth_steps=smooth_steps)
    if reference is not None:
        last = [(curve.task, float(curve.steps[-1])) for curve in curves]
        ends = {task: max(end for other, end in last if other == task) for task, _ in last}
        curves += reference_curves(
            reference, metric, ends=ends, experiments=reference_experiments,
            smooth_steps=smooth_steps,
        )  # fmt: skip
    figure = draw_curves(curves, axis_label(metric, smooth_steps), title, target)
    stem.parent.mkdir(parents=True, exist_ok=True)
    about = f"{metric} of {', '.join(map(str, runs))}"
    images = save_figure(figure, stem, f"{about}; published: {reference}" if reference else about)
    return [*images, _write_csv(curves, metric, stem.with_name(stem.name + ".csv"))]


def _refuse_metric(metric: str, smooth_steps: int) -> None:
    """Refuse a metric that there is not, and steps to average over below zero."""
    if metric not in METRICS:
        nearest = nearest_name(metric, METRICS)
        raise ValueError(f"there is no metric {metric!r}{nearest}; accepted: {', '.join(METRICS)}")
    if smooth_steps < 0:
        wanted = "give the environment steps to average over, or 0 for none"
        raise ValueError(f"smooth_steps is {smooth_steps}; {wanted}")


def run_curves(runs: Sequence[Path], metric: str, *, smooth_steps: int = 0) -> list[Curve]:
    """The curves of run directories, in the order in which their experiments first come.

    Raises:
        ValueError: no runs, a folder that is not a run directory, runs without data for `metric`,
            or runs of one experiment that share no steps.
    """
    if not runs:
        way = "name at least one run directory: `phasicrl plot RUN …`"
        raise ValueError(f"there are no runs to plot; {way}")
    configs = {run: RunDirectory(run).config for run in each_once(runs)}
    tasks = {run: task_of(RunDirectory(run).env_id, config) for run, config in configs.items()}
    labels = _labels(configs, tasks)
    groups: dict[tuple[Task, str], list[Path]] = defaultdict(list)
    for run in configs:
        groups[tasks[run], labels[run]].append(run)
    curves = []
    for (task, label), members in groups.items():
        points = [smoothed(_read_series(run, metric), smooth_steps) for run in members]
        counts = Counter(configs[run].seed for run in members)
        several = [seed for seed, count in counts.items() if count > 1]
        if several:
            said = f"{label} on {task} has several runs of seed {', '.join(map(str, several))}"
            way = "give one of each, or the interval says less than it seems to"
            warnings.warn(f"{said}: {way}", stacklevel=2)
        noun = "run" if several else "seed"
        curve = Curve(label, task.env_id, *_align(points, label), noun, points=points)
        end, last = curve.steps[-1], max(steps[-1] for steps, _ in points)
        if end < (1 - _MOST_CUT) * last:
            where = f"at {end:,.0f} steps, where its shortest run ends (its longest: {last:,.0f})"
            warnings.warn(f"{label} on {task} is cut {where}", stacklevel=2)
        if task.distribution:
            levels = configs[members[0]].env.num_levels
            curve = replace(curve, distribution=task.distribution, num_levels=levels)
        curves.append(curve)
    return curves


def refuse_without_reference(reference: Path | None, **settings: object) -> None:
    """Refuse settings of a reference if none is given."""
    given = [name for name, value in settings.items() if value not in (None, (), [])]
    if reference is None and given:
        what = "given without a reference; give reference too, or leave this out"
        raise ValueError(f"{' and '.join(given)} {what}")


def task_of(env_id: str, config: Config) -> Task:
    """What a run is compared on, by its environment's id and its configuration."""
    return Task(env_id, config.env.distribution if env_id.startswith("procgen:") else "")


def reference_curves(
    reference: Path,
    metric: str,
    *,
    ends: Mapping[Task, float],
    experiments: Sequence[str] = (),
    smooth_steps: int = 0,
) -> list[Curve]:
    """Read the curve of a file, or published curves, one for each task and experiment.

    What was published for another difficulty of Procgen's levels is left out, with a warning.

    Args:
        reference: a name in `REFERENCES`, or a CSV file, see `plot_runs`.
        metric: of published returns, one of `RETURNS`.
        ends: tasks, and the steps up to which their curves are wanted.
        experiments: none: those in `HEADLINES`; of others all, if they are few.
        smooth_steps: see `plot_runs`; of published returns.

    Raises:
        ValueError: the file lacks a column; or the published returns lack a game or an
            experiment, are of too many experiments to draw them all, or of another metric or of
            the difficulty of no task.
        FileNotFoundError: no such file.
    """
    if (name := str(reference)) not in REFERENCES:
        return [_read_curve(reference, ends)]
    if metric not in RETURNS:
        raise ValueError(f"metric is {metric!r}; {name} has returns: {', '.join(RETURNS)}")
    curves, unfit = [], []
    for task, end in ends.items():
        held = _published_runs(name, task, metric)
        chosen = _choose_lines(name, task, held, experiments or HEADLINES.get(name, ()))
        unfit += _what_does_not_fit(name, task, chosen)
        fitting = [line for line in chosen if line.distribution == task.distribution]
        for line in fitting:
            points = [smoothed(run, smooth_steps) for run in held[line]]
            steps, values = _align(points, f"experiment {line.experiment} of {name}")
            seen = _until(name, task, steps, end)
            label = line.experiment
            if sum(other.experiment == label for other in fitting) > 1:
                label += f", {line.num_levels} levels" if line.num_levels else ", all levels"
            curves.append(Curve(
                label, task.env_id, steps[seen], values[:, seen], "run", True,
                line.distribution, line.num_levels, KINDS.get(name, ""), points,
            ))  # fmt: skip
    if not curves:
        raise ValueError("there is nothing to compare with: " + "\n".join(unfit))
    for said in unfit:
        warnings.warn(f"what does not fit is left out: {said}", stacklevel=2)
    return curves


def _read_curve(path: Path, ends: Mapping[Task, float]) -> Curve:
    """Read a reference that is a file of the user's."""
    if not path.is_file():
        way = f"give a CSV file, or one of {', '.join(REFERENCES)}"
        raise FileNotFoundError(f"there is no reference file {path}; {way}")
    if len(ends) > 1:
        raise ValueError(f"{path} is one curve; give runs of one environment beside it")
    ((task, end),) = ends.items()
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for column in _FILE_COLUMNS:
            if column not in (reader.fieldnames or ()):
                needed = ", ".join(_FILE_COLUMNS)
                raise ValueError(f"{path} has no column {column}; a reference has {needed}")
        rows = sorted([float(row[name] or "nan") for name in _FILE_COLUMNS] for row in reader)
    steps, low, mean, high = np.array(rows).reshape(-1, len(_FILE_COLUMNS)).T
    seen = _until(str(path), task, steps, end)
    return Curve(
        path.stem, task.env_id, steps[seen], mean[None, seen], published=True,
        distribution=task.distribution, edges=(low[seen], high[seen]),
    )  # fmt: skip


def _until(name: str, task: Task, steps: Array, end: float) -> NDArray[np.bool_]:
    """Where a reference has steps that count beside runs of a task."""
    seen = steps <= last_step(steps, end)
    if not seen.any():
        begins = f"begins at {steps[0]:,.0f} steps" if len(steps) else "has no rows"
        raise ValueError(
            f"{name} {begins} and the runs of {task.env_id} end at "
            f"{end:,.0f}: there is nothing to compare yet"
        )
    return seen


def _published_rows(name: str) -> list[dict[str, str]]:
    """Read the table of a reference that the package carries."""
    path = references.FOLDER / f"{name}.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _published_runs(name: str, task: Task, metric: str) -> dict[Line, list[Points]]:
    """Read the published runs of a task's game; on unseen levels if the metric is of those."""
    rows = _published_rows(name)
    game, wanted = _game(task.env_id), "test" if metric == "evaluation/return" else "train"
    found: dict[Line, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for row in rows:
        if row["game"] == game:
            levels = int(row["num_levels"]) if row["num_levels"] else None
            splits = found.setdefault(Line(row["experiment"], row["distribution"], levels), {})
            run = splits.setdefault(row["split"], {}).setdefault(row["run"], [])
            run.append((float(row["step"]), float(row["episodic_return"])))
    if not found:
        present = sorted({row["game"] for row in rows})
        near = nearest_name(game, present)
        raise ValueError(f"{name} has no game {game!r}{near}; it has: {', '.join(present)}")
    if any(line.num_levels and wanted not in splits for line, splits in found.items()):
        what = f"returns on levels of the training, {metric} on unseen levels"
        warnings.warn(f"of {game} {name} has {what}", stacklevel=3)
    return {
        line: [_sorted(pairs) for pairs in splits.get(wanted, splits["train"]).values()]
        for line, splits in found.items()
    }


def _what_does_not_fit(name: str, task: Task, lines: Collection[Line]) -> list[str]:
    """Which published curves are of another difficulty than a task, and what has the task's."""
    unfit = [line for line in lines if line.distribution != task.distribution]
    if not unfit:
        return []
    theirs = ", ".join(dict.fromkeys(line.experiment for line in unfit))
    levels = " and ".join(dict.fromkeys(line.distribution for line in unfit))
    game = _game(task.env_id)
    said = (
        f"{theirs} of {name}: {levels} levels of {game}; "
        f"the runs of {task.env_id}: {task.distribution} levels"
    )
    if len(unfit) == len(lines):
        others = [
            other
            for other in REFERENCES
            if any((row["game"], row["distribution"]) == (game, task.distribution)
                   for row in _published_rows(other))
        ]  # fmt: skip
        known = f"--reference {' or '.join(others)}" if others else "no reference of the package"
        said += f". With {task.distribution} levels there is {known}"
    return [said]


def stem_of(output: Path) -> Path:
    """The name that endings are put behind, if one of them was given with it.

    Raises:
        ValueError: the name of a file of another kind.
    """
    if (ending := output.suffix) not in _ENDINGS and ending[1:].isalpha():
        what = f"images end with {_ENDINGS[0]} and {_ENDINGS[1]}, tables with {_ENDINGS[2]}"
        raise ValueError(f"{output}: {what}; give a name without {ending}")
    return output.with_suffix("") if output.suffix in _ENDINGS else output


def last_step(steps: Array, end: float) -> float:
    """The last step of a curve that counts, beside runs that ended at another.

    A published number that stands alone, far from others, is for a budget, which whole rollouts do
    not come to exactly: it counts for runs that end a little before it.
    """
    is_late = (steps > (1 - WINDOW) * end) & (steps <= end)
    following = steps[steps > end]
    if is_late.any() or not len(following) or following[0] > end * _NEAR:
        return end
    return float(following[0])


def _game(env_id: str) -> str:
    """The name of an environment's game or task, without back end and version."""
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2].lower())


def _choose_lines(
    name: str, task: Task, lines: Collection[Line], wanted: Sequence[str]
) -> list[Line]:
    """The published curves of a game that are meant, also those that do not fit the task.

    Without names all of them, if those that fit are few.
    """
    present = list(dict.fromkeys(line.experiment for line in lines))
    game, known = _game(task.env_id), ", ".join(present)
    for experiment in wanted:
        if experiment not in present:
            what = f"no experiment {experiment!r} for {game}{nearest_name(experiment, present)}"
            raise ValueError(f"{name} has {what}; it has: {known}")
    if wanted:
        return [line for each in wanted for line in lines if line.experiment == each]
    fitting = {line.experiment for line in lines if line.distribution == task.distribution}
    if len(fitting) > _MOST_REFERENCES:
        what = f"{len(fitting)} experiments for {game}, too many to draw"
        raise ValueError(f"{name} holds {what}; choose from: {known}")
    return list(lines)


def _read_series(run: Path, metric: str) -> Points:
    """Steps and values of the rows that have a number."""
    rows = RunDirectory(run).metrics(metric)
    pairs = [(row["env_steps"], row.get(metric, math.nan)) for row in rows]
    known = [pair for pair in pairs if math.isfinite(pair[1])]
    if not known:
        rows = RunDirectory(run).metrics()
        held = ((name, row[name]) for row in rows for name in METRICS.keys() & row)
        others = ", ".join(sorted({name for name, value in held if math.isfinite(value)}))
        raise ValueError(f"{run} has no {metric!r} in its {len(rows)} iterations; it has: {others}")
    steps, values = np.array(known, dtype=np.float64).T
    return steps, values


def _labels(configs: dict[Path, Config], tasks: Mapping[Path, Task]) -> dict[Path, str]:
    """Name of each run's experiment.

    Runs of one name that differ in more than the seed on some task also get what they differ in, on
    all tasks.
    """
    knobs: dict[Path, dict[str, str]] = {}
    for run, config in configs.items():
        values = config.identity().items()
        knobs[run] = {knob: "off" if value is None else str(value) for knob, value in values}
        for knob in ("env.id", "env.distribution"):
            knobs[run].pop(knob, None)  # curves are apart by task anyway
    everything = {knob for other in knobs.values() for knob in other}
    # Values by name, task and knob.
    seen: dict[tuple[str, Task], dict[str, set[str | None]]] = defaultdict(lambda: defaultdict(set))
    for run, config in configs.items():
        for knob in everything:
            seen[config.name, tasks[run]][knob].add(knobs[run].get(knob))
    shown: dict[str, set[str]] = defaultdict(set)
    for (name, _), values in seen.items():
        shown[name] |= _telling(values)
    return {
        run: ", ".join(
            [config.name, *(f"{knob} {knobs[run][knob]}" for knob in knobs[run]
                            if knob in shown[config.name])]
        )
        for run, config in configs.items()
    }  # fmt: skip


def _telling(values: Mapping[str, set[str | None]]) -> set[str]:
    """The knobs with several values, which tell the runs apart.

    Where a group is off in some runs, "aux on" says it: a knob that has one value in all the others
    would only repeat it.
    """
    differing = {knob for knob, held in values.items() if len(held) > 1}
    return {
        knob
        for knob in differing
        if knob.rpartition(".")[0] not in differing or len(values[knob] - {None}) > 1
    }


def _sorted(pairs: list[tuple[float, float]]) -> Points:
    """Steps and values, by step."""
    steps, values = np.array(sorted(pairs)).T
    return steps, values


def smoothed(points: Points, window: int) -> Points:
    """Mean over the values in `(step − window, step]`."""
    steps, values = points
    if window == 0:
        return points
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.searchsorted(steps, steps - window, side="right")
    after = np.arange(1, len(steps) + 1)
    return steps, (sums[after] - sums[first]) / (after - first)


def _align(series: list[Points], owner: str) -> Points:
    """Put runs on one grid of steps by interpolation, from the last begin to the first end."""
    start, end = max(steps[0] for steps, _ in series), min(steps[-1] for steps, _ in series)
    if start > end:
        ends = f"one ends at {end:,.0f}, before another's first number at {start:,.0f}"
        raise ValueError(f"the runs of {owner} have no steps in common: {ends}")
    grid = np.unique(np.concatenate([steps for steps, _ in series]))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > _MOST_POINTS:
        grid = grid[np.linspace(0, len(grid) - 1, _MOST_POINTS).round().astype(int)]
    return grid, np.stack([np.interp(grid, steps, values) for steps, values in series])


def csv_text(text: str) -> str:
    """A text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _write_csv(curves: list[Curve], metric: str, path: Path) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for curve in curves:
            task, label = map(csv_text, curve.task), csv_text(curve.label)
            about = (metric, *task, curve.num_levels, label, int(curve.published))
            band = (len(curve.runs), curve.band_name)
            for step, mean, low, high in zip(curve.steps, curve.mean, *curve.band, strict=True):
                edges = (low, high) if curve.band_name else ("", "")
                writer.writerow([*about, *band, int(step), mean, *edges])
    return path


def draw_curves(
    curves: list[Curve], y_label: str, title: str | None, target: float | None = None
) -> Figure:
    """Draw one panel for each task, and one legend for all; a dotted line is at the target.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.lines import Line2D
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'phasicrl[plot]'") from None

    tasks = list(dict.fromkeys(curve.task for curve in curves))
    columns = len(tasks) if len(tasks) <= 3 else min(4, math.ceil(math.sqrt(len(tasks))))
    rows = math.ceil(len(tasks) / columns)
    width, height = (6.4, 3.7) if len(tasks) == 1 else (max(6.4, 3.2 * columns), 2.5 * rows + 0.3)
    legend, about, legend_columns = _legend(curves, int(_LETTERS_PER_INCH * width))
    lines = sum(text.count("\n") + 1 for text in legend.values())
    num_lines = math.ceil(lines / legend_columns) + len(about.splitlines())
    letters = int(_TITLE_LETTERS_PER_INCH * width)
    heading = [textwrap.fill(line, letters) for line in (title or "").splitlines()]
    above = _INCHES_PER_TITLE_LINE * len("\n".join(heading).splitlines())
    total_height = above + height + _INCHES_PER_LINE * num_lines
    looks = _looks(list(legend))
    with rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
        figure = Figure(figsize=(width, total_height), layout=layout)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for index, task in enumerate(tasks):
            panel = panels[index]
            _draw_panel(panel, [curve for curve in curves if curve.task == task], looks)
            panel.set_title(str(task))
            if target is not None:
                panel.axhline(target, color="#666666", linewidth=1, linestyle=":", zorder=1)
            panel.set_xlabel("environment steps" if index + columns >= len(tasks) else "")
        for panel in panels[len(tasks) :]:
            panel.set_axis_off()
        middle = 1 - (above + 0.5 * height) / total_height  # of the panels
        figure.supylabel(y_label, y=middle, fontsize=STYLE["axes.labelsize"])
        if heading:
            figure.suptitle("\n".join(heading))
        figure.legend(  # below all panels: it says too much to fit into one
            handles=[Line2D([], [], label=text, **looks[key]) for key, text in legend.items()],
            title=about, ncols=legend_columns, loc="outside lower center", frameon=False,
            handlelength=3,
        )  # fmt: skip
    return figure


def _legend(curves: list[Curve], letters: int) -> tuple[dict[tuple[str, bool], str], str, int]:
    """The legend's texts, what is said once for all of them, and in how many columns they fit.

    Args:
        curves: that are drawn.
        letters: that fit into a line.
    """
    texts = legend_texts(curves)
    abouts = {key: text.removeprefix(f"{key[0]}: ") for key, text in texts.items()}
    about = Counter(abouts.values()).most_common(1)[0][0]
    bands = {f", band: {curve.band_name}" for curve in curves if curve.band_name}
    said = [band for band in bands if band in about]
    band, mean = (said[0], "mean of ") if len(said) == 1 else ("", "")
    rows = {
        key: key[0] if text == about else f"{key[0]}: {text.replace(band, '').removeprefix(mean)}"
        for key, text in abouts.items()
    }
    if sum(rows[key] != texts[key] for key in texts) < 2:  # it would be said for one of them
        return {key: textwrap.fill(text, letters) for key, text in texts.items()}, "", 1
    longest = max(map(len, rows.values()))
    columns = max(1, min(len(texts), (letters + 9) // (longest + 9)))  # 9: a line and a gap
    filled = {key: textwrap.fill(text, letters) for key, text in rows.items()}
    return filled, textwrap.fill(about, letters), columns


def legend_texts(curves: list[Curve]) -> dict[tuple[str, bool], str]:
    """Legend by (label, published): what its curves are, and where if that differs.

    If curves learned on different numbers of levels, it says on how many.
    """
    abouts: dict[tuple[str, bool], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    levels_differ = len({curve.num_levels for curve in curves} - {None}) > 1
    for curve in curves:
        is_said = levels_differ and curve.num_levels is not None
        about = f"{curve.about}, trained on {curve.levels}" if is_said else curve.about
        abouts[curve.label, curve.published][about].append(str(curve.task).rpartition(":")[2])
    texts = {}
    for key, where in abouts.items():
        parts = [f"{about} ({', '.join(games)})" for about, games in where.items()]
        texts[key] = f"{key[0]}: {'; '.join(parts if len(where) > 1 else where)}"
    return texts


STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 10, "legend.fontsize": 9,
    "figure.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#E5E5E5", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.edgecolor": "#666666", "xtick.color": "#333333", "ytick.color": "#333333",
    "svg.hashsalt": "phasicrl",
}  # fmt: skip


def _looks(keys: list[tuple[str, bool]]) -> Looks:
    """Color and dashes by (label, published), the same in every panel.

    Ours are solid. Published ones are dashed, and the first is gray.
    """
    ours = cycle(product(("-", *_DASHES), COLORS))
    num_ours = sum(not published for _, published in keys)
    unused = ("#4D4D4D", *(COLORS[num_ours:] or COLORS))
    theirs = zip(cycle(_DASHES), cycle(unused), strict=False)
    looks: Looks = {}
    for key in keys:
        dashes, color = next(theirs if key[1] else ours)
        width = 1.4 if key[1] else 1.8
        looks[key] = {"color": color, "linestyle": dashes, "linewidth": width}
    return looks


def _draw_panel(panel: Axes, curves: list[Curve], looks: Looks) -> None:
    for curve in curves:
        look = looks[curve.label, curve.published]
        color = look["color"]
        marker = {"marker": "o", "markersize": 4} if len(curve.steps) == 1 else {}
        panel.plot(curve.steps, curve.mean, zorder=2 if curve.published else 3, **look, **marker)
        if curve.band_name:
            panel.fill_between(
                curve.steps, *curve.band, color=color, alpha=0.18, linewidth=0, zorder=1
            )
            panel.plot(curve.steps, curve.runs.T, linewidth=0.6, alpha=0.4, color=color, zorder=1.5)
    panel.locator_params(axis="x", nbins=6)
    panel.xaxis.set_major_formatter(lambda step, _: steps_text(step))
    panel.margins(x=0.01)
    panel.set_xlim(left=0)


def steps_text(steps: float) -> str:
    """A number of steps as on an axis: 0, 500, 20k, 2.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(steps) >= size:
            return f"{steps / size:.10g}{unit}"
    return f"{steps:.10g}"


def axis_label(metric: str, smooth_steps: int) -> str:
    """What a metric is called beside an axis."""
    label = _AXIS_LABELS.get(metric, metric.rpartition("/")[2].replace("_", " "))
    return f"{label}\n(mean over {steps_text(smooth_steps)} steps)" if smooth_steps else label


def save_figure(figure: Figure, stem: Path, about: str) -> list[Path]:
    """Write a figure as PNG and SVG; the same data gives the same files, fit for version control.

    Returns:
        The images, whose names are the stem's with their endings behind it.
    """
    from matplotlib import rc_context

    png, svg = (stem.with_name(stem.name + ending) for ending in (".png", ".svg"))
    with rc_context(STYLE):
        figure.savefig(png, dpi=200, metadata={"Software": "phasicrl", "Description": about})
        figure.savefig(svg, metadata={"Creator": "phasicrl", "Description": about, "Date": None})
    return [png, svg]
