"""Training of a suite: a row for each run, a figure and a comparison.

Kind: effects (trains, writes files).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from phasicrl.lab.analysis.compare import Comparison, ScoreUnits, compare_curves
from phasicrl.lab.analysis.curves import Curve, Task
from phasicrl.lab.analysis.plot import draw_curves, require_matplotlib, save_figure
from phasicrl.lab.experiments import trials
from phasicrl.lab.experiments.suites import SUITES, Scale
from phasicrl.lab.experiments.trials import Trial

COLUMNS = (
    "task", "arm", "budget", "seed", "env_steps", "return_100", "greedy_mean", "value_loss",
    "seconds", "commit", "curve",
)  # fmt: skip
"""Columns of a suite's table.

`value_loss` is the mean over the run; `curve` has the return after each fortieth of the budget.
"""


def run_suite(
    name: str, *, tasks: Sequence[str] = (), seeds: Sequence[int] = (),
    total_env_steps: int | None = None, scale: Scale = "small", jobs: int = 1,
    output_dir: Path = Path("runs/suites"), on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Comparison:  # fmt: skip
    """Train an experiment of the source documents, draw its curves and compare its arms.

    Finished runs, also those of another suite, are not repeated; interrupted runs resume from their
    last checkpoint.

    Args:
        name: Name of the suite: fig2 to fig9, value-epochs, seeds-table, skip-aux, n-aux, details,
            ppo-details, penalties, rates, mva, tricks, tricks-one-out.
        tasks: Games of Procgen, names with presets (halfcheetah), or ids of environments; none:
            those of the suite.
        seeds: Seeds of the runs; none: the published number of seeds, from 101 on.
        total_env_steps: Budget of each run; none: that of its settings.
        scale: As published, or small: a night on two cores.
        jobs: Number of runs at a time; they share the cores.
        output_dir: Directory of the runs, the table and the figure.
        on_trial: called with each run after its row is written.

    Raises:
        ValueError: before training, a suite or task is unknown, `jobs` is below one, or arms cannot
            be trained on a task; after it, no arm has a return of every seed.
        FailedTrialsError: some runs failed; all others have their rows.
    """
    if name not in SUITES:
        raise ValueError(f"name is {name}; expected one of {', '.join(SUITES)}")
    suite = SUITES[name]
    require_matplotlib()
    seeds = seeds or range(trials.FIRST_REPORT_SEED, trials.FIRST_REPORT_SEED + suite.num_seeds)
    threads, runs = trials.get_threads_per_job(jobs), list[Trial]()
    for task in (each.removeprefix("procgen:") for each in tasks or suite.get_tasks(scale)):
        for arm, config in suite.make_arms(suite.make_task_configs(task, scale)):
            budget = config.total_env_steps if total_env_steps is None else total_env_steps
            config = config.with_updates({"total_env_steps": budget})
            config = trials.prepare_trial_config(config, task, output_dir, threads=threads)
            runs += trials.vary_seed((task, arm, str(budget)), config, seeds)
    stem = output_dir / f"{name}-{scale}"
    table = trials.ResultTable(Path(f"{stem}.csv"), COLUMNS, ("task", "arm", "budget"))
    untrained = {", ".join(run.label_parts[:2]): run.config for run in table.find_missing(runs)}
    without = {"env.num_threads": None}  # of `prepare_trial_config`, for all environments
    trials.check_arms((arm, config.with_updates(without)) for arm, config in untrained.items())
    output_dir.mkdir(parents=True, exist_ok=True)
    # Seed by seed: an interrupted suite is a comparison over fewer seeds.
    runs.sort(key=lambda run: run.config.seed)
    for run in trials.run_missing_trials(table, runs, train_and_summarize, jobs=jobs):
        on_trial(run)
    curves = make_curves(table.read_rows_of(runs))
    title = f"{name}: {suite.description}"
    figure = draw_curves(curves, "episodic return, last 100 episodes", title)
    images = save_figure(figure, stem, f"suite {name}, {scale}")
    comparison = compare_curves(curves, metric=trials.RETURN, units=_choose_score_units(runs))
    return replace(comparison, files=(table.path, *images))


def train_and_summarize(trial: Trial) -> list[trials.Row]:
    """Train or resume the run of a trial, and return its results as a list of one row."""
    place = dict(zip(COLUMNS, (*trial.label_parts, trial.config.seed), strict=False))
    return [place | trials.summarize_run(trials.train_or_resume(trial.config).path)]


def make_curves(rows: Sequence[dict[str, str]]) -> list[Curve]:
    """Make a learning curve of each arm and task from the column `curve` of a suite's table.

    An arm is left out on a task, with a warning, if a seed ended no episode. Seeds that diverged
    are named in a warning: their last return counts to the end.

    Raises:
        ValueError: all arms are left out.
    """
    grouped: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        grouped.setdefault((row["arm"], row["task"]), []).append(row)
    curves = []
    for (arm, task), members in grouped.items():
        values = np.array([[float(point) for point in row["curve"].split()] for row in members])
        seen = np.isfinite(values).all(axis=0)
        steps = trials.make_curve_steps(int(members[0]["budget"]))
        if lost := [row["seed"] for row in members if row.get("greedy_mean") == "nan"]:
            text = f"{arm} on {task}: seed {', '.join(lost)} diverged; its last return counts"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if seen.any():
            curves.append(Curve(arm, Task(task), steps[seen], values[:, seen]))
            continue
        blank = [row["seed"] for row in members if "nan" in row["curve"].split()[-1]]
        reason = f"no episode had ended by {int(steps[-1]):,} steps with seed {', '.join(blank)}"
        warnings.warn(f"{arm} on {task} is left out: {reason}", RuntimeWarning, stacklevel=2)
    if not curves:
        raise ValueError("no arm has returns of all seeds; expected one. Give more total_env_steps")
    return curves


def _choose_score_units(runs: Sequence[Trial]) -> ScoreUnits:
    """Choose Procgen's units if all tasks are its games, else raw."""
    envs = [run.config.env for run in runs]
    if any(not env.id.startswith("procgen:") for env in envs):
        return "raw"
    return "procgen-hard" if envs[0].distribution == "hard" else "procgen-easy"
