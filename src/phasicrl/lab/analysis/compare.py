"""Runs beside each other and beside published ones, at equal steps: who is where, and how sure.

Kind: effects (reads and writes files).

The score of a run is the mean of a metric over the last tenth of the steps up to a point that all
runs of its environment have come to.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product, zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from phasicrl.config_io import printable
from phasicrl.lab.analysis.plot import (
    STYLE,
    WINDOW,
    Array,
    Curve,
    Task,
    csv_text,
    last_step,
    reference_curves,
    refuse_without_reference,
    run_curves,
    save_figure,
    stem_of,
    steps_text,
)
from phasicrl.lab.analysis.scores import (
    MEASURES,
    PROCGEN_BOUNDS,
    Estimate,
    estimate,
    median_steps,
    normalized,
    number_text,
    performance_profile,
    probability_of_improvement,
    score_matrix,
    steps_to_reach,
)

_GAP = "optimality gap"
Units = Literal["raw", "procgen-easy", "procgen-easy-paper", "procgen-hard"]


class MissedBoundError(RuntimeError):
    """A bound that was asked for does not hold."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Result:
    """An experiment on a task, at a number of steps.

    Attributes:
        label: of the experiment.
        env_id: of the environment.
        distribution: Procgen: the difficulty of the levels; else empty.
        published: whether others have run it.
        steps: environment steps at which it is compared.
        scores: one for each run.
        mean: of the scores.
        reached: for each run, environment steps after which it is at the target; infinity if it
            never is. Empty without a target.
        reaches: the median of them; None without a target.
    """

    label: str
    env_id: str
    distribution: str
    published: bool
    steps: int
    scores: tuple[float, ...]
    mean: Estimate
    reached: tuple[float, ...] = ()
    reaches: Estimate | None = None

    @property
    def task(self) -> Task:
        """What it was compared on."""
        return Task(self.env_id, self.distribution)

    @property
    def num_that_reach(self) -> int:
        """How many runs come to the target."""
        return sum(map(math.isfinite, self.reached))


@dataclass(frozen=True, slots=True)
class Overall:
    """An experiment over all environments.

    Attributes:
        label: of the experiment.
        num_runs: on each environment.
        measures: by name, see `scores.MEASURES`.
        improves: by the label of each other experiment: probability that a run of this one is
            better than one of that on the same environment.
    """

    label: str
    num_runs: int
    measures: Mapping[str, Estimate]
    improves: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_runs` found.

    Attributes:
        metric: that was compared.
        units: of the scores, and of the target.
        results: by task, ours first.
        overall: of the experiments that ran on all tasks.
        missed: bounds that do not hold, in words.
        files: that were written.
        target: that runs were to reach.
        notes: what is not the same of published results and of ours, in words.
    """

    metric: str
    units: Units
    results: tuple[Result, ...]
    overall: tuple[Overall, ...]
    missed: tuple[str, ...]
    files: tuple[Path, ...]
    target: float | None = None
    notes: tuple[str, ...] = ()

    def require_bounds(self) -> None:
        """Do nothing if all bounds hold.

        Raises:
            MissedBoundError: one does not.
        """
        if self.missed:
            raise MissedBoundError("\n".join(self.missed))


def compare_runs(
    runs: Sequence[Path],
    *,
    metric: str = "charts/episodic_return_100",
    at_steps: int | None = None,
    units: Units = "raw",
    target: float | None = None,
    at_least: float | None = None,
    share_of_reference: float | None = None,
    reference: Path | None = None,
    reference_experiments: Sequence[str] = (),
    output: Path | None = None,
) -> Comparison:
    """Compare runs with each other and with published ones, at equal steps, with intervals.

    Args:
        runs: Run directories; one experiment on one environment may have several seeds.
        metric: Which metric; more must be better.
        at_steps: Compare after so many environment steps; none: as far as all have come.
        units: Of scores: as they are, or normalized by Procgen's bounds of chance and of the best,
            as the authors' code has them, or their paper prints them.
        target: Say after how many steps each run reaches this (in `units`).
        at_least: A bound: the mean of each experiment must be at least this (in `units`).
        share_of_reference: A bound: the mean of each experiment must be at least this share of each
            published one's.
        reference: Published results, as for `phasicrl plot`.
        reference_experiments: Its experiments; none: all, if few; of ppg-paper PPG and PPO.
        output: Name of a table of all scores and of images of the performance profile: .csv, .png
            and .svg are put behind it. The profile's numbers go to NAME-profile.csv, the measures
            over all environments to NAME-measures.csv, .png and .svg, the steps to the target to
            NAME-target.csv; none: nothing is written.

    Returns:
        Scores, their means and intervals, measures over all environments, and missed bounds.

    Raises:
        ValueError: runs that are shorter, units that are not a task's, or what `plot_runs` raises.
        FileNotFoundError: no reference file.
    """
    refuse_without_reference(
        reference, share_of_reference=share_of_reference,
        reference_experiments=reference_experiments,
    )  # fmt: skip
    stem = None if output is None else stem_of(output)
    curves = run_curves(runs, metric)
    if reference is not None:
        ends = {curve.task: math.inf for curve in curves}
        curves += reference_curves(reference, metric, ends=ends, experiments=reference_experiments)
    common = {"metric": metric, "at_steps": at_steps, "units": units, "target": target}
    results = (comparison := compare_curves(curves, **common)).results
    missed = [*_too_low(results, at_least), *_too_far_below(results, share_of_reference)]
    files = [] if stem is None else _write(comparison, stem)
    return replace(comparison, missed=tuple(missed), files=tuple(files))


def _write(comparison: Comparison, output: Path) -> list[Path]:
    """Every table and figure of a comparison."""
    files = [_write_scores(comparison, output)]
    if comparison.target is not None:
        files.append(_write_target(comparison, output.with_name(output.name + "-target")))
    files += _draw_profiles(_matrices(comparison.results), output)
    if _have_one_unit(comparison):
        files += _draw_measures(comparison.overall, output.with_name(output.name + "-measures"))
    return files


def compare_curves(
    curves: Sequence[Curve],
    *,
    metric: str,
    at_steps: int | None = None,
    units: Units = "raw",
    target: float | None = None,
) -> Comparison:
    """Compare curves at equal steps. The arguments are those of `compare_runs`.

    Raises:
        ValueError: fewer than one step, curves that have not come so far, or units that are not a
            task's.
    """
    if at_steps is not None and at_steps < 1:
        way = "give at least 1, or leave it out: as far as all have come"
        raise ValueError(f"at_steps is {at_steps}; {way}")
    results = _results([_in_units(curve, units) for curve in curves], at_steps, target)
    overall = _overall(_matrices(results), units)
    notes = _notes(curves, metric, target)
    return Comparison(metric, units, tuple(results), tuple(overall), (), (), target, notes)


def _notes(curves: Sequence[Curve], metric: str, target: float | None) -> tuple[str, ...]:
    """What is not the same of published results and of ours, in words."""
    way = ", sampled actions in training" if metric.startswith("charts/") else ""
    notes = []
    for theirs in (curve for curve in curves if curve.published):
        name = f"{theirs.label} (published)"
        if theirs.kind:
            notes.append(f"{name}: {theirs.kind}; ours: {metric}{way}")
        if target is not None and theirs.is_one_number:
            notes.append(f"{name}: when it reached the target is not known")
        for ours in curves:
            is_pair = ours.task == theirs.task and not ours.published
            known = {theirs.num_levels, ours.num_levels} - {None}
            if is_pair and len(known) > 1:
                said = f"was trained on {theirs.levels}, {ours.label} on {ours.levels}"
                notes.append(f"{name} {said}")
    return tuple(dict.fromkeys(notes))


def _results(curves: Sequence[Curve], at_steps: int | None, target: float | None) -> list[Result]:
    """One for each experiment on each task, by task."""
    results: list[Result] = []
    for task in dict.fromkeys(curve.task for curve in curves):
        of_task = [curve for curve in curves if curve.task == task]
        results += _results_on_one(of_task, at_steps, target)
    return results


def _results_on_one(
    curves: Sequence[Curve], at_steps: int | None, target: float | None
) -> list[Result]:
    """One for each experiment on one task."""
    end = min(curve.steps[-1] for curve in curves)
    at = float(end if at_steps is None else at_steps)
    if at > end:
        short = next(curve for curve in curves if curve.steps[-1] == end)
        raise ValueError(
            f"{short.label} on {short.task} ends at {end:,.0f} steps; at {at:,.0f} there is "
            "nothing to compare: leave at_steps out, or choose fewer"
        )
    results = []
    for curve in curves:
        scores = tuple(map(float, _scores(curve, at)))
        mean = estimate([[score] for score in scores], MEASURES["mean"])
        env_id, distribution = curve.task
        result = Result(curve.label, env_id, distribution, curve.published, int(at), scores, mean)
        if target is not None and not curve.is_one_number:
            reached = _steps_to_reach(curve, target)
            result = replace(result, reached=reached, reaches=median_steps(reached))
        results.append(result)
    return results


def _steps_to_reach(curve: Curve, target: float) -> tuple[float, ...]:
    """For each run, by what it noted itself: lines through few points would arrive elsewhere."""
    points, end = curve.points or [(curve.steps, run) for run in curve.runs], curve.steps[-1]
    return tuple(
        steps_to_reach(steps[steps <= end], values[steps <= end], target)
        for steps, values in points
    )


def _scores(curve: Curve, at: float) -> Array:
    """The mean of each run over the last tenth of the steps up to `at`.

    A curve of few points may have none so late: then what lies between those around it.
    """
    end = last_step(curve.steps, at)
    if curve.steps[0] > end:
        begins = f"begins at {curve.steps[0]:,.0f} steps"
        raise ValueError(f"{curve.label} on {curve.task} {begins}, after {at:,.0f}")
    late = (curve.steps <= end) & (curve.steps > (1 - WINDOW) * at)
    if late.any():
        return curve.runs[:, late].mean(axis=1)
    return np.array([np.interp(at, curve.steps, run) for run in curve.runs])


def _in_units(curve: Curve, units: Units) -> Curve:
    """A curve in units of the task, if that is wanted."""
    if (bounds := bounds_of(curve.task, units)) is None:
        return curve
    points = [(steps, normalized(values, bounds)) for steps, values in curve.points]
    return replace(curve, runs=normalized(curve.runs, bounds), points=points)


def bounds_of(task: Task, units: Units) -> tuple[float, float] | None:
    """The scores of a task that are 0 and 1 in some units; None if these are raw.

    Raises:
        ValueError: they are units of other tasks, or of another difficulty.
    """
    if units == "raw":
        return None
    name, game = units.removeprefix("procgen-"), task.env_id.rpartition(":")[2].lower()
    bounds, difficulty = PROCGEN_BOUNDS[name], name.removesuffix("-paper")
    if game not in bounds:
        raise ValueError(
            f"{task.env_id} has no bounds of Procgen, which units {units} need; choose raw, or "
            f"leave its runs out (there are bounds for {', '.join(sorted(bounds))})"
        )
    if task.distribution not in ("", difficulty):
        fitting = f"procgen-{task.distribution}"
        way = fitting if fitting in get_args(Units) else "raw: there are bounds of easy and hard"
        raise ValueError(
            f"units {units} are of {difficulty} levels, and the runs of {task.env_id} played "
            f"{task.distribution} ones; choose {way}"
        )
    return bounds[game]


def _too_low(results: Sequence[Result], least: float | None) -> list[str]:
    """Which of our means are below a bound, in words."""
    return [
        f"{result.label} on {result.task}: {result.mean.value:.4g}, at least {least:g} was wanted"
        for result in results
        if least is not None and not result.published and result.mean.value < least
    ]


def _too_far_below(results: Sequence[Result], share: float | None) -> list[str]:
    """Which of our means are below a share of a published one's, in words."""
    missed = []
    for ours in results:
        for theirs in results:
            is_pair = ours.task == theirs.task and theirs.published and not ours.published
            if share is None or not is_pair:
                continue
            # Of returns below zero a share is as far below them as it would be below others.
            wanted = theirs.mean.value - (1 - share) * abs(theirs.mean.value)
            if ours.mean.value < wanted:
                missed.append(
                    f"{ours.label} on {ours.task}: {ours.mean.value:.4g}, at least {wanted:.4g} "
                    f"was wanted, {share:g} of {theirs.label}'s {theirs.mean.value:.4g}"
                )
    return missed


def _matrices(results: Sequence[Result]) -> dict[str, Array]:
    """Scores `[R, T]` by experiment: of those on all tasks, as many runs on each."""
    tasks = list(dict.fromkeys(str(result.task) for result in results))
    by_label: dict[str, dict[str, tuple[float, ...]]] = defaultdict(dict)
    for result in results:
        by_label[_shown_label(result)][str(result.task)] = result.scores
    matrices: dict[str, Array] = {}
    for label, scores in by_label.items():
        if scores.keys() == set(tasks):
            fewest = min(map(len, scores.values()))
            matrices[label] = score_matrix({task: scores[task][:fewest] for task in tasks})
    return matrices


def _shown_label(result: Result) -> str:
    """An experiment's name; ours may have the same as a published one."""
    return f"{result.label} (published)" if result.published else result.label


def _overall(matrices: Mapping[str, Array], units: Units) -> list[Overall]:
    """The measures of each experiment, and each beside the others."""
    found = []
    # Raw returns have no 1 that they could lack something to.
    wanted = {name: MEASURES[name] for name in MEASURES if units != "raw" or name != _GAP}
    for label, matrix in matrices.items():
        measures = {name: estimate(matrix, measure) for name, measure in wanted.items()}
        others = ((name, theirs) for name, theirs in matrices.items() if name != label)
        improves = {name: probability_of_improvement(matrix, theirs) for name, theirs in others}
        found.append(Overall(label, len(matrix), measures, improves))
    return found


_ABOUT = ("env_id", "distribution", "experiment", "published")
_COLUMNS = (*_ABOUT, "run", "env_steps", "units", "score", "target", "steps_to_target")
_TARGET_COLUMNS = (
    *_ABOUT, "units", "target", "num_runs", "runs_that_reach_it", "median_steps", "low", "high",
)  # fmt: skip


def _about(result: Result) -> tuple[str | int, ...]:
    """The columns that say which result a row is of."""
    return (*result.task, result.label, int(result.published))


def _write_scores(comparison: Comparison, output: Path) -> Path:
    """A row for each run."""
    units, target = comparison.units, comparison.target
    return _write_table(output, _COLUMNS, (
        (*_about(result), number, result.steps, units, score, target, _whole(reached))
        for result in comparison.results
        for number, (score, reached) in enumerate(
            zip_longest(result.scores, result.reached), start=1
        )
    ))  # fmt: skip


def _write_target(comparison: Comparison, output: Path) -> Path:
    """A row for each experiment on each task: how many runs reach the target, and when."""
    return _write_table(output, _TARGET_COLUMNS, (
        (*_about(result), comparison.units, comparison.target, len(result.reached),
         result.num_that_reach, *map(_whole, (steps.value, steps.low, steps.high)))
        for result in comparison.results
        if (steps := result.reaches) is not None
    ))  # fmt: skip


def _whole(steps: float | None) -> float | None:
    """Steps with all of their digits; infinity, which no number of steps is, as it is."""
    return steps if steps is None or math.isinf(steps) else int(steps)


def _cell(value: Any) -> Any:
    """A cell of a table."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return csv_text(value) if isinstance(value, str) else value


def _write_table(output: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """A CSV file; fractions have six digits."""
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_name(output.name + ".csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow(map(_cell, row))
    return path


def _draw_profiles(matrices: Mapping[str, Array], output: Path) -> list[Path]:
    """For each experiment the share of its runs above each score, over all environments."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not matrices:
        return []
    every = np.concatenate([matrix.ravel() for matrix in matrices.values()])
    levels = np.linspace(every.min(), every.max(), 201)
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.7), layout="constrained")
        panel = figure.subplots()
        rows: list[tuple[str | float, ...]] = []
        for label, matrix in matrices.items():
            share, low, high = performance_profile(matrix, levels)
            profile = zip(levels, share, low, high, strict=True)
            rows += [(label, *map(float, point)) for point in profile]
            (line,) = panel.plot(levels, share, label=f"{label}, {matrix.size} runs")
            panel.fill_between(levels, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
        panel.set_xlabel("score")
        panel.set_ylabel("share of runs above it")
        figure.legend(loc="outside lower center", frameon=False)
    table = output.with_name(output.name + "-profile")
    return [
        _write_table(table, ("experiment", "score", "share_above", "low", "high"), rows),
        *save_figure(figure, output, "performance profiles, 95 % stratified bootstrap band"),
    ]


def _have_one_unit(comparison: Comparison) -> bool:
    """Whether scores may be averaged: raw returns of different environments may not."""
    tasks = {result.task for result in comparison.results}
    return bool(comparison.overall) and (len(tasks) == 1 or comparison.units != "raw")


def _draw_measures(overall: Sequence[Overall], output: Path) -> list[Path]:
    """Each measure with its interval, a panel for each; and how probably one beats another."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = [one.label for one in overall]
    rows = [
        (one.label, name, found.value, found.low, found.high)
        for one in overall
        for name, found in (
            *one.measures.items(),
            *((f"probability of improvement over {other}", p) for other, p in one.improves.items()),
        )
    ]
    with rc_context(STYLE):
        names = list(overall[0].measures)
        figure = Figure(figsize=(2.6 * len(names), 1.2 + 0.3 * len(labels)), layout="constrained")
        panels = figure.subplots(1, len(names), sharey=True)
        for panel, name in zip(panels, names, strict=True):
            for place, one in enumerate(overall):
                value = one.measures[name]
                panel.plot([value.low, value.high], [place, place], linewidth=3, alpha=0.5)
                panel.plot(value.value, place, "o", color=panel.lines[-1].get_color())
            panel.set_title(name)
        panels[0].set_yticks(range(len(labels)), labels)
        panels[0].set_ylim(len(labels) - 0.5, -0.5)
    return [
        _write_table(output, ("experiment", "measure", "value", "low", "high"), rows),
        *save_figure(figure, output, "measures over all environments, 95 % stratified bootstrap"),
    ]


def tables(comparison: Comparison) -> list[Any]:
    """The comparison as tables for a terminal, and the notes under them."""
    from rich.text import Text

    tasks, overall = dict.fromkeys(result.task for result in comparison.results), comparison.overall
    found = [_table_of(comparison, task) for task in tasks]
    if comparison.target is not None:
        found += [_target_table(comparison, task) for task in tasks]
    if len(tasks) > 1 and _have_one_unit(comparison):
        title = "all environments (95 % stratified bootstrap)"
        table = _table(title, "measure", "experiment", "runs on each", "value (95 %)")
        for name, one in product(overall[0].measures, overall):
            shown = _estimate_text(one.measures[name], one.num_runs)
            _add_row(table, name, one.label, one.num_runs, shown)
        found.append(table)
    if len(overall) > 1:
        table = _table("probability of improvement", "of", "is (95 %)", "over")
        for one, other in combinations(overall, 2):  # the other way round it is 1 less this
            text = _estimate_text(one.improves[other.label], max(one.num_runs, other.num_runs))
            _add_row(table, one.label, text, other.label)
        found.append(table)
    return found + [Text(printable(f"note: {note}")) for note in comparison.notes]


def _table_of(comparison: Comparison, task: Task) -> Any:
    """The experiments on one task."""
    of_task = [result for result in comparison.results if result.task == task]
    units = "" if comparison.units == "raw" else f", in units {comparison.units}"
    table = _table(
        f"{task}: {comparison.metric} at {steps_text(of_task[0].steps)} steps{units}",
        "experiment", "runs", "mean (95 %)", "worst", "best",
    )  # fmt: skip
    for result in of_task:
        num_runs = len(result.scores)
        ends = (number_text(score, 4) for score in (min(result.scores), max(result.scores)))
        mean = _estimate_text(result.mean, num_runs)
        _add_row(table, _shown_label(result), num_runs, mean, *ends)
    return table


def _target_table(comparison: Comparison, task: Task) -> Any:
    """When the experiments on one task reach the target."""
    title = f"{task}: median steps to {comparison.target:g} ({comparison.units})"
    table = _table(title, "experiment", "median (95 %)", "reached by")
    for result in comparison.results:
        if result.task == task and (steps := result.reaches) is not None:
            num_that_reach = f"{result.num_that_reach} of {len(result.reached)} runs"
            value, low, high = map(_steps_or_never, (steps.value, steps.low, steps.high))
            interval = f" ({low} to {high})" if len(result.reached) > 1 else " (–)"
            median = value if low == "never" else value + interval
            _add_row(table, _shown_label(result), median, num_that_reach)
    return table


def _estimate_text(found: Estimate, num_runs: int) -> str:
    """The value, and the interval: one run has none."""
    return str(found) if num_runs > 1 else f"{number_text(found.value, 3)} (–)"


def _steps_or_never(steps: float) -> str:
    return steps_text(steps) if math.isfinite(steps) else "never"


def _add_row(table: Any, *cells: object) -> None:
    """Cells as they are: names come from users and from files, and may look like markup."""
    from rich.text import Text

    table.add_row(*(Text(printable(str(cell))) for cell in cells))


def _table(title: str, first: str, *others: str) -> Any:
    """An empty table whose numbers stand on the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left")
    table.add_column(first)
    for column in others:
        # An interval is not broken into lines.
        table.add_column(column, justify="right", no_wrap="95 %" in column)
    return table
