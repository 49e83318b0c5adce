"""Comparison of runs with each other and with published runs at equal steps, with intervals.

Kind: effects (reads and writes files).

The score of a run is the mean of a metric over the last tenth of the steps up to a point that all
runs of its environment have reached.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product, zip_longest
from pathlib import Path
from typing import Literal

import numpy as np

from phasicrl.config_io import write_json
from phasicrl.envs.protocol import LIMIT_HINT
from phasicrl.lab.analysis import plot
from phasicrl.lab.analysis import scores as measures
from phasicrl.lab.analysis.curves import Array, Curve, Task, get_shared_experiment, read_curves
from phasicrl.lab.analysis.references import FINAL_SHARE, find_scoring_end, read_reference_curves
from phasicrl.lab.analysis.scores import MEASURES, Estimate, estimate, format_number

ScoreUnits = Literal["raw", "procgen-easy", "procgen-easy-paper", "procgen-hard"]
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, heads of the columns, rows."""
_CSV_COLUMNS = (
    "env_id", "distribution", "experiment", "published", "run", "env_steps", "units", "score",
    "target", "steps_to_target",
)  # fmt: skip


class MissedMinimumError(RuntimeError):
    """Mean score below a minimum, raised by `Comparison.raise_missed_minimums` only."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class ExperimentScores:
    """Scores of an experiment on a task.

    Attributes:
        label: name of the experiment.
        env_id: environment.
        distribution: difficulty of Procgen's levels; empty for other environments.
        published: true for results of others.
        steps: environment steps at which experiments are compared.
        scores: score of each run.
        mean: mean of the scores.
        reached: first environment step at which each run reaches the target, or infinity; empty
            without a target.
        reaches: median of `reached`; None without a target.
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
        """Task of the experiment: environment, and difficulty of Procgen's levels."""
        return Task(self.env_id, self.distribution)

    @property
    def full_name(self) -> str:
        """Label, followed by `(published)` for published results."""
        return f"{self.label} (published)" if self.published else self.label


@dataclass(frozen=True, slots=True)
class AggregateScores:
    """Measures of an experiment over all environments.

    Attributes:
        label: name of the experiment.
        num_runs: runs on each environment.
        measures: estimates by the names of `scores.MEASURES`.
        improves: by the label of each other experiment, the probability that a run of this
            experiment is better than one of the other on the same environment.
    """

    label: str
    num_runs: int
    measures: Mapping[str, Estimate]
    improves: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare_runs`.

    Attributes:
        metric: metric that was compared.
        units: units of the scores and of the target.
        results: results by task, ours first.
        overall: measures of the experiments on all tasks.
        missed: a sentence for each minimum that is missed.
        files: written files.
        target: value that runs should reach.
        notes: what all runs share, and each difference between published results and ours.
    """

    metric: str
    units: ScoreUnits
    results: tuple[ExperimentScores, ...]
    overall: tuple[AggregateScores, ...]
    missed: tuple[str, ...]
    files: tuple[Path, ...]
    target: float | None = None
    notes: tuple[str, ...] = ()

    def raise_missed_minimums(self) -> None:
        """Raise `MissedMinimumError` if a minimum is missed."""
        if self.missed:
            raise MissedMinimumError("\n".join(self.missed))


def compare_runs(
    runs: Sequence[Path], *, metric: str = "charts/episodic_return_100",
    at_steps: int | None = None, units: ScoreUnits = "raw", target: float | None = None,
    at_least: float | None = None, share_of_reference: float | None = None,
    reference: Path | None = None, output: Path | None = None, json: Path | None = None,
) -> Comparison:  # fmt: skip
    """Compare runs with each other and with published runs, at equal steps, with intervals.

    Args:
        runs: Run directories, or the directory of a sweep; one experiment on one environment may
            have several seeds.
        metric: Metric to compare; larger is better.
        at_steps: Environment steps at which runs are compared; none: the last of the shortest run.
        units: Units of scores: raw, or normalized by Procgen's bounds of chance and of the best, as
            in the authors' code or as printed in their paper.
        target: Report after how many steps each run reaches this value (in `units`).
        at_least: Minimum mean of each experiment (in `units`).
        share_of_reference: Minimum mean of each experiment, as a share of each published mean.
        reference: Published results, as for `phasicrl plot`.
        output: Name of a table of all scores, .csv, and of a figure of the performance profiles,
            .png and .svg; none: no files.
        json: JSON file for the comparison.

    Returns:
        Scores, their means and intervals, measures over all environments, and missed minimums.

    Raises:
        ValueError: runs are too short, units are of another task, or what `plot_runs` raises.
        FileNotFoundError: the reference file does not exist.
        ModuleNotFoundError: matplotlib is not installed, and a figure was requested.
    """
    if output is not None:
        plot.require_matplotlib()
    if reference is None and share_of_reference is not None:
        raise ValueError(f"share_of_reference is {share_of_reference:g}; expected a reference too")
    curves = read_curves(runs, metric)
    unscored = [curve.label for curve in curves if np.isnan(curve.values).any()]
    if not (curves := [curve for curve in curves if curve.label not in unscored]):
        raise ValueError(f"no run has a finished episode; expected one. Set a limit ({LIMIT_HINT})")
    if reference is not None:
        end_by_task = {curve.task: math.inf for curve in curves}
        curves += read_reference_curves(reference, metric, end_by_task=end_by_task)
    comparison = compare_curves(
        curves, metric=metric, at_steps=at_steps, units=units, target=target
    )
    missed = _list_missed_minimums(comparison.results, unscored, at_least, share_of_reference)
    written_files: list[Path] = []
    if output is not None:
        stem = plot.prepare_stem(output)
        table = plot.write_csv(stem, _CSV_COLUMNS, _iterate_score_rows(comparison))
        written_files = [table, *_draw_profiles(comparison, stem)]
    notes = (*comparison.notes, *(f"not compared: {label}" for label in unscored))
    comparison = replace(comparison, missed=tuple(missed), files=tuple(written_files), notes=notes)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, asdict(comparison))
    return comparison


def compare_curves(
    curves: Sequence[Curve], *, metric: str, at_steps: int | None = None, units: ScoreUnits = "raw",
    target: float | None = None,
) -> Comparison:  # fmt: skip
    """Compare curves at equal steps.

    Args:
        curves: curves of runs and published curves.
        metric: metric of the curves.
        at_steps: see `compare_runs`.
        units: see `compare_runs`.
        target: see `compare_runs`.

    Raises:
        ValueError: curves begin after `at_steps` or end before, or units are of another task.
    """
    results, notes = list[ExperimentScores](), [*_make_notes(curves, metric, target)]
    scaled = [_normalize_curve(curve, units) for curve in curves]
    for task in dict.fromkeys(curve.task for curve in curves):
        task_curves = [curve for curve in scaled if curve.task == task]
        end = min(task_curves, key=lambda curve: curve.steps[-1])
        at = float(end.steps[-1] if at_steps is None else at_steps)
        if at > end.steps[-1]:
            rule = f"at most {end.steps[-1]:,.0f}, where {end.label} on {task} ends"
            remedy = "Give fewer, or leave it out."
            raise ValueError(f"at_steps is {at:,.0f}; expected {rule}. {remedy}")
        longest = max(curve.steps[-1] for curve in task_curves if not curve.is_published)
        if at_steps is None and at < (1 - FINAL_SHARE) * longest:
            where = f"at {at:,.0f} steps, where {end.label} ends"
            notes.append(f"{task} is compared {where}; its longest run has {longest:,.0f}")
        results += [_score_experiment(curve, at, target) for curve in task_curves]
    overall = tuple(_measure_overall(_collect_scores(results), units))
    lacking = {result.full_name for result in results} - {each.label for each in overall}
    notes += [f"{name} lacks an environment: not in the measures" for name in sorted(lacking)]
    return Comparison(metric, units, tuple(results), overall, (), (), target, tuple(notes))


def _make_notes(curves: Sequence[Curve], metric: str, target: float | None) -> list[str]:
    """Name what all runs share, and describe differences between published results and ours."""
    mode = ", sampled actions in training" if metric.startswith("charts/") else ""
    name = get_shared_experiment(curves)
    notes = [f"all runs are of {name}"] * bool(name)
    for theirs in (curve for curve in curves if curve.is_published):
        name = f"{theirs.label} (published)"
        if theirs.value_note:
            notes.append(f"{name}: {theirs.value_note}; ours: {metric}{mode}")
        if target is not None and theirs.is_one_number:
            notes.append(f"{name}: steps to the target are not known")
        for ours in curves:
            is_pair = ours.task == theirs.task and not ours.is_published
            if is_pair and len({theirs.num_levels, ours.num_levels} - {None}) > 1:
                levels, own = (f"{curve.num_levels or 'all'} levels" for curve in (theirs, ours))
                notes.append(f"{name} was trained on {levels}, {ours.label} on {own}")
    return [*dict.fromkeys(notes)]


def _score_experiment(curve: Curve, at: float, target: float | None) -> ExperimentScores:
    """Score the runs of a curve up to `at` steps, and the steps at which they reach a target."""
    # Recorded rows: thinned or interpolated ones have other means, and reach a target elsewhere.
    points = curve.run_points or [(curve.steps, run) for run in curve.values]
    end = find_scoring_end(curve.steps, at)
    if curve.steps[0] > end:
        given = f"at_steps is {at:,.0f} (by default where the shortest run ends)"
        start = f"{curve.steps[0]:,.0f}, where {curve.label} on {curve.task} begins"
        raise ValueError(f"{given}; expected at least {start}. Train longer, or leave it out")
    scores = tuple(_score_run(x, y, at, end) for x, y in points)
    mean = estimate([[score] for score in scores], MEASURES["mean"])
    result = ExperimentScores(curve.label, *curve.task, curve.is_published, int(at), scores, mean)
    if target is None or curve.is_one_number:
        return result
    reached = tuple(float(min(x[(x <= at) & (y >= target)], default=np.inf)) for x, y in points)
    return replace(result, reached=reached, reaches=measures.median_steps_to_target(reached))


def _score_run(steps: Array, values: Array, at: float, end: float) -> float:
    """Average a run over the last tenth of `at` steps, up to `end`, or interpolate it at `at`."""
    late = values[(steps > (1 - FINAL_SHARE) * at) & (steps <= end)]
    return float(late.mean() if len(late) else np.interp(at, steps, values))


def _normalize_curve(curve: Curve, units: ScoreUnits) -> Curve:
    """Convert a curve to units of its task.

    Raises:
        ValueError: the units are of other tasks, or of another difficulty.
    """
    if units == "raw":
        return curve
    name, game = units.removeprefix("procgen-"), curve.task.env_id.rpartition(":")[2].lower()
    bounds = measures.PROCGEN_BOUNDS.get(name, {})
    if game not in bounds or curve.task.difficulty not in ("", name.removesuffix("-paper")):
        rule = f"raw, or units with bounds of {curve.task}"
        games = ", ".join(sorted(bounds))
        raise ValueError(f"units is {units}; expected {rule}. Games with bounds: {games}")
    pairs = [(x, measures.scale_score(y, bounds[game])) for x, y in curve.run_points]
    return replace(curve, values=measures.scale_score(curve.values, bounds[game]), run_points=pairs)


def _list_missed_minimums(
    results: Sequence[ExperimentScores], unscored: Sequence[str], minimum_mean: float | None,
    share_of_reference: float | None,
) -> list[str]:  # fmt: skip
    """List means of ours below a minimum or a fraction of a published mean, or without one."""
    lacking = [] if minimum_mean is None and share_of_reference is None else unscored
    missed = [f"{label} has no score; expected finished episodes" for label in lacking]
    for ours in (result for result in results if not result.published):
        minimums = [] if minimum_mean is None else [(minimum_mean, "")]
        name = f"{ours.label} on {ours.task}"
        if share_of_reference is not None:
            published = [each for each in results if each.published and each.task == ours.task]
            missed += [] if published else [f"{name} has no published result; expected one"]
            for theirs in published:  # below zero, a share of 0.95 is 5 % lower, not higher
                mean = theirs.mean.value
                source = f" ({share_of_reference:g} of {theirs.full_name} {mean:.4g})"
                minimums.append((mean - (1 - share_of_reference) * abs(mean), source))
        missed += [f"{name} is {ours.mean.value:.4g}; expected at least {least:.4g}{source}"
                   for least, source in minimums if not ours.mean.value >= least]  # fmt: skip
    return missed


def _collect_scores(results: Sequence[ExperimentScores]) -> dict[str, Array]:
    """Return scores `[R, T]` of each experiment on all tasks, with as many runs on each."""
    tasks = list(dict.fromkeys(str(result.task) for result in results))
    scores_by_name_and_task: dict[str, dict[str, tuple[float, ...]]] = defaultdict(dict)
    for result in results:
        scores_by_name_and_task[result.full_name][str(result.task)] = result.scores
    matrices: dict[str, Array] = {}
    for name, scores in scores_by_name_and_task.items():
        if scores.keys() == set(tasks):
            fewest = min(map(len, scores.values()))
            matrices[name] = np.array([scores[task][:fewest] for task in tasks]).T
    return matrices


def _measure_overall(matrices: Mapping[str, Array], units: ScoreUnits) -> list[AggregateScores]:
    """Measure each experiment alone and against each other experiment."""
    # The optimality gap needs a best score of 1, which raw returns do not have.
    wanted = {name: MEASURES[name] for name in MEASURES
              if units != "raw" or name != "optimality gap"}  # fmt: skip
    return [
        AggregateScores(
            label, len(matrix), {name: estimate(matrix, wanted[name]) for name in wanted},
            {name: measures.probability_of_improvement(matrix, theirs)
             for name, theirs in matrices.items() if name != label},
        )
        for label, matrix in matrices.items()
    ]  # fmt: skip


def _iterate_score_rows(comparison: Comparison) -> Iterator[Sequence[object]]:
    """Yield a row of the table of scores for each run."""
    for result in comparison.results:
        about = *result.task, result.label, int(result.published)
        pairs = zip_longest(result.scores, result.reached)
        for number, (score, reached) in enumerate(pairs, start=1):
            at = result.steps, comparison.units, float(f"{score:.6g}"), comparison.target, reached
            yield *about, number, *at


def _draw_profiles(comparison: Comparison, stem: Path) -> list[Path]:
    """Draw the fraction of each experiment's runs above each score over all environments."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    matrices = _collect_scores(comparison.results)
    if not matrices:
        return []
    every = np.concatenate([matrix.ravel() for matrix in matrices.values()])
    margin = 0.05 * np.ptp(every) or 1.0
    levels = np.linspace(every.min() - margin, every.max() + margin, 201)
    num_panels = len(matrices) if len(matrices) > plot.MAX_CURVES else 1
    rows, columns, width, height = plot.choose_figure_layout(num_panels)
    height += 0.2 * len(matrices) * (num_panels == 1)  # the legend
    colors = plot.extend_colors(len(matrices), plot.COLORS, 0.4)
    with rc_context(plot.STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels[num_panels:]:
            panel.set_axis_off()
        for index, (label, matrix) in enumerate(matrices.items()):
            share, low, high = measures.performance_profile(matrix, levels)
            panel = panels[index % num_panels]
            name = f"{label}, {matrix.size} run{'s' * (matrix.size > 1)}"
            panel.plot(levels, share, label=name, color=colors[index])
            panel.fill_between(levels, low, high, color=colors[index], alpha=0.18, linewidth=0)
            panel.set_title(textwrap.fill(name, 38) * (num_panels > 1))
            panel.set_xlabel(f"score, {comparison.units}" * (index + columns >= num_panels))
            panel.set_ylabel("fraction of runs above it" * (index % columns == 0))
        tasks = ", ".join(dict.fromkeys(str(result.task) for result in comparison.results))
        figure.suptitle(textwrap.shorten(f"{comparison.metric}; bands: 95 %; {tasks}", 76))
        if num_panels == 1:
            # With handles, as labels that begin with _ are left out otherwise.
            handles = panels[0].get_lines()
            figure.legend(handles=handles, loc="outside lower center", frameon=False)
    return plot.save_figure(figure, stem, "performance profiles, 95 % stratified bootstrap band")


def make_tables(comparison: Comparison) -> list[Table]:
    """Make the tables of a comparison, each for `cli.print_table`."""
    results, overall = comparison.results, comparison.overall
    tasks = list(dict.fromkeys(result.task for result in results))
    units = "" if comparison.units == "raw" else f", in units {comparison.units}"
    tables: list[Table] = []
    for task in tasks:
        task_results = [result for result in results if result.task == task]
        at = f"{comparison.metric} at {plot.format_steps(task_results[0].steps)} steps{units}"
        columns = ("experiment", "runs", "mean (95 %)", "worst", "best")
        tables.append((f"{task}: {at}", columns, [
            (result.full_name, str(runs := len(result.scores)), _format_estimate(result.mean, runs),
             format_number(min(result.scores), 4), format_number(max(result.scores), 4))
            for result in task_results
        ]))  # fmt: skip
        if comparison.target is not None:
            title = f"{task}: median steps to {comparison.target:g} ({comparison.units})"
            tables.append((title, ("experiment", "median (95 %)", "reached by"), [
                (result.full_name, _format_median_steps(result.reaches, len(result.reached)),
                 f"{sum(map(math.isfinite, result.reached))} of {len(result.reached)} runs")
                for result in task_results if result.reaches is not None
            ]))  # fmt: skip
    # Raw returns of different environments are not averaged.
    if len(tasks) > 1 and overall and comparison.units != "raw":
        columns = ("measure", "experiment", "runs on each", "value (95 %)")
        tables.append(("all environments (95 % stratified bootstrap)", columns, [
            (name, one.label, f"{one.num_runs}", _format_estimate(one.measures[name], one.num_runs))
            for name, one in product(overall[0].measures, overall)]))  # fmt: skip
    if len(overall) > 1:  # each pair once: the other way round it is 1 less this
        is_long, title = len(overall) > plot.MAX_CURVES, "probability of improvement"
        pairs = product(overall[1:], overall[:1]) if is_long else combinations(overall, 2)
        columns = ("of", "is (95 %)", "over")
        tables.append((title + " over the first experiment" * is_long, columns, [
            (one.label, _format_estimate(
                one.improves[other.label], max(one.num_runs, other.num_runs)), other.label)
            for one, other in pairs]))  # fmt: skip
    return tables


def _format_estimate(estimate: Estimate, num_runs: int) -> str:
    """Format a value with its interval; a single run has none."""
    return str(estimate) if num_runs > 1 else f"{format_number(estimate.value, 3)} (–)"


def _format_median_steps(estimate: Estimate, num_runs: int) -> str:
    """Format a median number of steps with its interval."""
    value, low, high = (plot.format_steps(steps) if math.isfinite(steps) else "never"
                        for steps in (estimate.value, estimate.low, estimate.high))  # fmt: skip
    if low == "never":
        return value
    return f"{value} ({low} to {high})" if num_runs > 1 else f"{value} (–)"
