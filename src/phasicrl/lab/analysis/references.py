"""Published results from the package or from a file, as curves beside runs.

Kind: effects (reads files).

`python -m tools.reference_tables` makes the package's tables of curves from the sources' files; the
tables of single numbers are written by hand.
"""

import csv
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasicrl.lab.analysis.curves import ONE_NUMBER_NOTE, Array, Curve, Points, Task, align, smooth

FOLDER = Path(__file__).with_name("published")
"""Folder with a CSV file for each reference: experiment, run, game, split, distribution, num_levels
(in training; 0 is all), step, episodic_return. Distribution and num_levels are empty outside
Procgen."""

REFERENCE_NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.csv")))
"""Names and sources:

- ppg-paper: PPG and PPO on 16 games of Procgen, hard, to 100M steps, with the ablations of the PPG
  paper (Cobbe et al. 2020); openai/phasic-policy-gradient, results/, MIT.
- baselines-easy: PPO of OpenAI Baselines on 10 games of Procgen, easy, all levels, to 50M steps,
  three runs; openai/train-procgen, results/, MIT.
- baselines-easy-200: likewise on 200 levels, with returns on unseen levels (split test).
- baselines-final: the last returns of PPO of OpenAI Baselines on 16 games of Procgen: experiments
  easy, hard, easy-200 and hard-500, the last two with returns on unseen levels (split test);
  openai/train-procgen at 1a2ae21, results/, MIT.
- cleanrl-ppg: CleanRL's PPG on starpilot, easy, all levels, to 24.75M steps, three runs each: as it
  is, with the value gradient in the whole network in the auxiliary phase, and with two networks;
  means of 250,000 steps; mcederle99/cleanrl at 6f843db, results_data/, MIT.
- procgen-easy-25m: PPG and PPO of CleanRL, and OpenAI's PPG run by the same authors, on starpilot,
  bossfight and bigfish, easy, 25M steps; vwxyzjn/cleanrl, docs/rl-algorithms/ppg.md.
- zoo: PPO of RL Baselines3 Zoo (DLR-RM/rl-baselines3-zoo, benchmark.md): the best checkpoint of a
  single run, greedy.
- tianshou: PPO of Tianshou on MuJoCo (thu-ml/tianshou, examples/mujoco/README.md): means of ten
  seeds, on versions v1 to v3 of the tasks.
- slm-lab: PPO of SLM-Lab (kengz/SLM-Lab at 96be3938, docs/BENCHMARKS.md): means of four sessions in
  training; of Atari the best of three λ for each game. Without InvertedPendulum, for which it has
  two budgets.
- cleanrl: PPO of CleanRL (vwxyzjn/cleanrl at fe8d8a03, docs/benchmark/ppo.md and others): three
  seeds.
"""
DEFAULT_EXPERIMENTS = {"ppg-paper": ("ppg", "ppo")}
"""Default experiments of references with many."""
VALUE_NOTES = {
    "baselines-final": f"{ONE_NUMBER_NOTE}, the last return",
    "procgen-easy-25m": f"{ONE_NUMBER_NOTE}, a mean return",
    "zoo": f"{ONE_NUMBER_NOTE}, the best checkpoint of one run, greedy, of Atari sampled",
    "tianshou": f"{ONE_NUMBER_NOTE}, evaluations of ten seeds, the highest mean within the budget",
    "slm-lab": f"{ONE_NUMBER_NOTE}, the mean of four sessions; of Atari with the best of three λ",
    "cleanrl": f"{ONE_NUMBER_NOTE}, the mean of three seeds",
}
"""Descriptions of references other than returns in training."""
FINAL_SHARE = 0.1
"""Share of the steps, at the end, over which a score is averaged."""
_RETURNS = (
    "charts/episodic_return", "charts/episodic_return_100", "evaluation/return",
    "evaluation/train_return",
)  # fmt: skip
_CSV_COLUMNS = ("step", "low", "mean", "high")
_BUDGET_TOLERANCE = 0.02


def read_reference_curves(
    reference: Path, metric: str, *, end_by_task: Mapping[Task, float],
    experiments: Sequence[str] = (), smooth_steps: int = 0,
) -> list[Curve]:  # fmt: skip
    """Read a published curve for each task and experiment.

    Args:
        reference: a name in `REFERENCE_NAMES`, or a CSV file (step, low, mean, high) of one task.
        metric: metric of the runs, not checked for a file; for a name, it must be a return.
        end_by_task: last step to read for each task.
        experiments: experiments to read; none: `DEFAULT_EXPERIMENTS[name]`, or else all.
        smooth_steps: window of a moving average in environment steps, 0 for none; not for files.

    Raises:
        ValueError: a file lacks a column or gets several tasks, or the reference lacks the metric
            or curves of the tasks (Procgen: of the same difficulty).
        FileNotFoundError: the reference file does not exist.
    """
    if (name := str(reference)) not in REFERENCE_NAMES:
        return [_read_curve(reference, end_by_task)]
    if metric not in _RETURNS:
        raise ValueError(f"metric is {metric}; expected one of {', '.join(_RETURNS)}")
    rows, wanted = _read_table(name), experiments or DEFAULT_EXPERIMENTS.get(name)
    curves = []
    for task, end in end_by_task.items():
        key = (_get_game_name(task.env_id), task.difficulty)
        task_rows = [row for row in rows if (row["game"], row["distribution"]) == key
                   and (not wanted or row["experiment"] in wanted)]  # fmt: skip
        for experiment in dict.fromkeys(row["experiment"] for row in task_rows):
            selected = [row for row in task_rows if row["experiment"] == experiment]
            points = [smooth(run, smooth_steps) for run in _collect_points(name, selected, metric)]
            steps, values = align(points, f"experiment {experiment} of {name}")
            mask, levels = _get_step_mask(name, task, steps, end), selected[0]["num_levels"]
            curves.append(Curve(experiment, task, steps[mask], values[:, mask], True,
                int(levels) if levels else None, VALUE_NOTES.get(name, ""), points))  # fmt: skip
    if not curves:
        games = sorted({str(Task(row["game"], row["distribution"])) for row in rows})
        text = f"{_format_choices(end_by_task)}. It has {', '.join(games)}"
        raise ValueError(f"reference is {name}; expected {text}")
    return curves


def _format_choices(tasks: Iterable[Task]) -> str:
    """List the references with curves of the tasks, as text."""
    keys = {(_get_game_name(task.env_id), task.difficulty): task for task in tasks}
    names = [name for name in REFERENCE_NAMES
             if any((x["game"], x["distribution"]) in keys for x in _read_table(name))]  # fmt: skip
    among = ", ".join(names) or "nothing else"
    return f"a CSV file, or for {', '.join(map(str, keys.values()))} {among}"


def find_scoring_end(steps: Array, end: float) -> float:
    """Return `end`, or a curve's next step up to 2 % later if the tenth before has none.

    Published numbers at single steps are for a budget, which whole rollouts may miss by a little:
    they count for runs that end up to 2 % before.
    """
    is_late = (steps > (1 - FINAL_SHARE) * end) & (steps <= end)
    following = steps[steps > end]
    if is_late.any() or not len(following) or following[0] > (1 + _BUDGET_TOLERANCE) * end:
        return end
    return float(following[0])


def _read_curve(path: Path, end_by_task: Mapping[Task, float]) -> Curve:
    """Read a reference from the user's file."""
    if not path.is_file():
        raise FileNotFoundError(f"reference is {path}; expected {_format_choices(end_by_task)}")
    if (count := len(end_by_task)) > 1:
        rule = f"runs of one environment, not of {count}"
        raise ValueError(f"reference is {path}, one curve; expected {rule}")
    ((task, end),) = end_by_task.items()
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        if absent := sorted({*_CSV_COLUMNS} - {*(reader.fieldnames or ())}):
            given = f"{path} has no column {', '.join(absent)}"
            raise ValueError(f"{given}; expected {', '.join(_CSV_COLUMNS)}")
        try:
            rows = [[float(row[name] or "nan") for name in _CSV_COLUMNS] for row in reader]
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected a number") from None
    rows = sorted(row for row in rows if np.isfinite(row[::2]).all())  # with a step and a mean
    columns = np.array(rows).reshape(-1, len(_CSV_COLUMNS)).T
    steps, low, mean, high = columns[:, _get_step_mask(str(path), task, columns[0], end)]
    return Curve(path.stem, task, steps, mean[None], True, band_edges=(low, high))


def _get_step_mask(name: str, task: Task, steps: Array, end: float) -> NDArray[np.bool_]:
    """Return a mask of the steps of a reference to compare with runs of a task."""
    mask = steps <= find_scoring_end(steps, end)
    if not mask.any():
        begins = f"begins at {steps[0]:,.0f} steps" if len(steps) else "has no rows"
        rule = f"runs of {task} beyond {end:,.0f} steps"
        raise ValueError(f"reference is {name}, which {begins}; expected {rule}")
    return mask


def _read_table(name: str) -> list[dict[str, str]]:
    """Read the table of a reference of the package."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _collect_points(name: str, rows: Sequence[Mapping[str, str]], metric: str) -> list[Points]:
    """Collect the runs of an experiment on a task, on the levels of the metric."""
    unseen = metric == "evaluation/return"
    split = "test" if unseen and any(row["split"] == "test" for row in rows) else "train"
    if unseen and split == "train" and rows[0]["num_levels"] not in ("", "0"):
        message = f"{name} has returns on training levels only, {metric} is on unseen levels"
        warnings.warn(f"{rows[0]['game']}: {message}", stacklevel=3)
    points_by_run: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["split"] == split:
            points_by_run[row["run"]].append((float(row["step"]), float(row["episodic_return"])))
    points = (np.array(sorted(pairs)).T for pairs in points_by_run.values())
    return [(steps, values) for steps, values in points]


def _get_game_name(env_id: str) -> str:
    """Return the name of a game or task without back end and version."""
    return re.sub(r"-v\d+$", "", env_id.rpartition(":")[2].lower())
