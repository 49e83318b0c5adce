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
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phasicrl.analysis.plot import (
    STYLE,
    WINDOW,
    Array,
    Curve,
    last_step,
    reference_curves,
    run_curves,
    save_figure,
    stem_of,
    steps_text,
)
from phasicrl.analysis.scores import (
    MEASURES,
    PROCGEN_BOUNDS,
    Estimate,
    estimate,
    normalized,
    performance_profile,
    probability_of_improvement,
    score_matrix,
    steps_to_reach,
)
from phasicrl.config_io import printable

_GAP = "optimality gap"
Units = Literal["raw", "procgen-easy", "procgen-easy-paper", "procgen-hard"]


class MissedBoundError(RuntimeError):
    """A bound that was asked for does not hold."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Result:
    """An experiment on an environment, at a number of steps.

    Attributes:
        label: of the experiment.
        env_id: of the environment.
        published: whether others have run it.
        steps: environment steps at which it is compared.
        scores: one for each run.
        mean: of the scores.
        reaches: steps after which the mean curve is at the target; infinity if it never is, None
            without a target.
    """

    label: str
    env_id: str
    published: bool
    steps: int
    scores: tuple[float, ...]
    mean: Estimate
    reaches: float | None


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
        units: of the scores.
        results: by environment, ours first.
        overall: of the experiments that ran on all environments.
        missed: bounds that do not hold, in words.
        files: that were written.
    """

    metric: str
    units: Units
    results: tuple[Result, ...]
    overall: tuple[Overall, ...]
    missed: tuple[str, ...]
    files: tuple[Path, ...]

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
    reference_game: str | None = None,
    reference_split: str = "train",
    output: Path | None = None,
) -> Comparison:
    """Compare runs with each other and with published ones, at equal steps, with intervals.

    Args:
        runs: Run directories; one experiment on one environment may have several seeds.
        metric: Which metric; more must be better.
        at_steps: Compare after so many environment steps; none: as far as all have come.
        units: Of scores: as they are, or normalized by Procgen's bounds of chance and of the best,
            as the authors' code has them, or their paper prints them.
        target: Say after how many steps the mean reaches this (in the metric's own units).
        at_least: A bound: the mean of each experiment must be at least this (in `units`).
        share_of_reference: A bound: the mean of each experiment must be at least this share of each
            published one's.
        reference: Published results, as for `phasicrl plot`.
        reference_experiments: Its experiments; none: all, if few; of ppg-paper PPG and PPO.
        reference_game: The game in that file, if it is not the environment's name.
        reference_split: Which rows of that file, if it has a column `split`.
        output: Name of a table of all scores and of images of the performance profile: .csv, .png
            and .svg are put behind it. The profile's numbers go to NAME-profile.csv, the measures
            over all environments to NAME-measures.csv, .png and .svg; none: nothing is written.

    Returns:
        Scores, their means and intervals, measures over all environments, and missed bounds.

    Raises:
        ValueError: runs that have not come so far, a game without bounds, a bound on a reference
            that was not given, or what `plot_runs` raises.
        FileNotFoundError: no reference file.
    """
    if share_of_reference is not None and reference is None:
        raise ValueError("a share of the reference is asked for, but no reference is given")
    curves = run_curves(runs, metric)
    if reference is not None:
        ends = {curve.env_id: math.inf for curve in curves}
        curves += reference_curves(
            reference, metric, ends=ends, game=reference_game, experiments=reference_experiments,
            split=reference_split,
        )  # fmt: skip
    common = {"metric": metric, "at_steps": at_steps, "units": units, "target": target}
    comparison = compare_curves(curves, **common)
    results = comparison.results
    missed = [*_too_low(results, at_least), *_too_far_below(results, share_of_reference)]
    files = [] if output is None else _write(comparison, stem_of(output))
    return replace(comparison, missed=tuple(missed), files=tuple(files))


def _write(comparison: Comparison, output: Path) -> list[Path]:
    """Every table and figure of a comparison."""
    files = [_write_scores(comparison.results, output, comparison.units)]
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
        ValueError: curves that have not come so far, or a game without bounds.
    """
    results = _results(curves, at_steps, units, target)
    overall = _overall(_matrices(results), units)
    return Comparison(metric, units, tuple(results), tuple(overall), (), ())


def _results(
    curves: Sequence[Curve], at_steps: int | None, units: Units, target: float | None
) -> list[Result]:
    """One for each experiment on each environment, by environment."""
    results: list[Result] = []
    for env_id in dict.fromkeys(curve.env_id for curve in curves):
        of_env = [curve for curve in curves if curve.env_id == env_id]
        results += _results_on_one(of_env, at_steps, units, target)
    return results


def _results_on_one(
    curves: Sequence[Curve], at_steps: int | None, units: Units, target: float | None
) -> list[Result]:
    """One for each experiment on one environment."""
    end = min(curve.steps[-1] for curve in curves)
    at = float(at_steps or end)
    if at > end:
        short = next(curve for curve in curves if curve.steps[-1] == end)
        raise ValueError(
            f"{short.label} on {short.env_id} ends at {end:,.0f} steps; at {at:,.0f} there is "
            "nothing to compare: leave at_steps out, or choose fewer"
        )
    results = []
    for curve in curves:
        scores = [_in_units(score, curve.env_id, units) for score in _scores(curve, at)]
        mean = estimate([[score] for score in scores], MEASURES["mean"])
        reaches = None if target is None else steps_to_reach(curve.steps, curve.mean, target)
        about = (curve.label, curve.env_id, curve.published, int(at))
        results.append(Result(*about, tuple(scores), mean, reaches))
    return results


def _scores(curve: Curve, at: float) -> Array:
    """The mean of each run over the last tenth of the steps up to `at`.

    A curve of few points may have none so late: then what lies between those around it.
    """
    end = last_step(curve.steps, at)
    if curve.steps[0] > end:
        begins = f"begins at {curve.steps[0]:,.0f} steps"
        raise ValueError(f"{curve.label} on {curve.env_id} {begins}, after {at:,.0f}")
    late = (curve.steps <= end) & (curve.steps > (1 - WINDOW) * at)
    if late.any():
        return curve.runs[:, late].mean(axis=1)
    return np.array([np.interp(at, curve.steps, run) for run in curve.runs])


def _in_units(score: float, env_id: str, units: Units) -> float:
    """A score in units of the task, if that is wanted."""
    if units == "raw":
        return score
    bounds, game = PROCGEN_BOUNDS[units.removeprefix("procgen-")], env_id.rpartition(":")[2].lower()
    if game not in bounds:
        raise ValueError(
            f"{env_id} has no bounds of Procgen, which units {units} need; choose raw, or leave "
            f"its runs out (there are bounds for {', '.join(sorted(bounds))})"
        )
    return normalized(score, bounds[game])


def _too_low(results: Sequence[Result], least: float | None) -> list[str]:
    """Which of our means are below a bound, in words."""
    return [
        f"{result.label} on {result.env_id}: {result.mean.value:.4g}, at least {least:g} was wanted"
        for result in results
        if least is not None and not result.published and result.mean.value < least
    ]


def _too_far_below(results: Sequence[Result], share: float | None) -> list[str]:
    """Which of our means are below a share of a published one's, in words."""
    missed = []
    for ours in results:
        for theirs in results:
            is_pair = ours.env_id == theirs.env_id and theirs.published and not ours.published
            if share is None or not is_pair:
                continue
            # Of returns below zero a share is as far below them as it would be below others.
            wanted = theirs.mean.value - (1 - share) * abs(theirs.mean.value)
            if ours.mean.value < wanted:
                missed.append(
                    f"{ours.label} on {ours.env_id}: {ours.mean.value:.4g}, at least {wanted:.4g} "
                    f"was wanted, {share:g} of {theirs.label}'s {theirs.mean.value:.4g}"
                )
    return missed


def _matrices(results: Sequence[Result]) -> dict[str, Array]:
    """Scores `[R, T]` by experiment: of those on all environments, as many runs on each."""
    env_ids = list(dict.fromkeys(result.env_id for result in results))
    by_label: dict[str, dict[str, tuple[float, ...]]] = defaultdict(dict)
    for result in results:
        by_label[_shown_label(result)][result.env_id] = result.scores
    matrices: dict[str, Array] = {}
    for label, scores in by_label.items():
        if scores.keys() == set(env_ids):
            fewest = min(map(len, scores.values()))
            matrices[label] = score_matrix({name: scores[name][:fewest] for name in env_ids})
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


_COLUMNS = ("env_id", "experiment", "published", "run", "env_steps", "units", "score")


def _write_scores(results: Sequence[Result], output: Path, units: Units) -> Path:
    """A row for each run."""
    return _write_table(output, _COLUMNS, (
        (result.env_id, result.label, int(result.published), number, result.steps, units, score)
        for result in results
        for number, score in enumerate(result.scores, start=1)
    ))  # fmt: skip


def _write_table(output: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """A CSV file; fractions have six digits."""
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_name(output.name + ".csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row])
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
    env_ids = {result.env_id for result in comparison.results}
    return bool(comparison.overall) and (len(env_ids) == 1 or comparison.units != "raw")


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
    """The comparison as tables for a terminal."""
    env_ids = dict.fromkeys(result.env_id for result in comparison.results)
    found = [_table_of(comparison, env_id) for env_id in env_ids]
    if _have_one_unit(comparison):
        table = _table("all environments (95 % stratified bootstrap)", "experiment", "runs on each",
                       *comparison.overall[0].measures)  # fmt: skip
        for one in comparison.overall:
            _add_row(table, one.label, one.num_runs, *one.measures.values())
        found.append(table)
    if len(comparison.overall) > 1:
        table = _table("probability of improvement", "of", "is", "over")
        for one in comparison.overall:
            for other, probability in one.improves.items():
                _add_row(table, one.label, probability, other)
        found.append(table)
    return found


def _table_of(comparison: Comparison, env_id: str) -> Any:
    """The experiments on one environment."""
    of_env = [result for result in comparison.results if result.env_id == env_id]
    units = "" if comparison.units == "raw" else f", in units {comparison.units}"
    table = _table(
        f"{env_id}: {comparison.metric} at {steps_text(of_env[0].steps)} steps{units}",
        "experiment", "runs", "mean (95 %)", "worst", "best",
        *(() if of_env[0].reaches is None else ("reaches the target after",)),
    )  # fmt: skip
    for result in of_env:
        label = _shown_label(result)
        ends = (f"{min(result.scores):.4g}", f"{max(result.scores):.4g}")
        row = [label, len(result.scores), result.mean, *ends]
        if result.reaches is not None:
            row.append(steps_text(result.reaches) if math.isfinite(result.reaches) else "never")
        _add_row(table, *row)
    return table


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
        table.add_column(column, justify="right")
    return table
