"""Measure learning for several sizes of the batch: PPO-EWMA with its rules, and PPO without.

usage: python benchmarks/batch_invariance.py OUT.csv.gz FIGURE.png [--seeds 111 112 …] [--jobs 2]

The largest batch has the options below; smaller ones have fewer environments. With the rules
of `scale_batch` and an averaged proximal policy, returns at the same number of environment steps
should agree; with the same options at every size, and PPO's proximal policy, they should not. The
file has a row for each tenth of a run; runs that it has are not repeated. Returns are those of
16 episodes that are not trained on: of episodes in training the short ones end first, the more so
the more environments there are.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from phasicrl import train
from phasicrl.cli import parse_config
from phasicrl.lab.experiments.batch_scale import scale_batch
from phasicrl.lab.experiments.trials import ResultTable, Trial, run_missing_trials, vary_seed
from phasicrl.system.machine import find_commit
from phasicrl.training.bootstrap import bootstrap_mean_interval
from phasicrl.training.run import Run

COMMON = (
    "classic-ppo --env.num-envs 16 --ppo.num-steps 16 --ppo.num-minibatches 16 "
    "--ppo.minibatch-by transitions --ppo.policy-epochs 1 --ppo.value-epochs 1 "
    "--ppo.schedule constant --ppo.advantage-norm batch --ppo.learning-rate 1.25e-4 "
    "--ppo.max-grad-norm none "
    "--ppo.clip 0.2 --reward-norm.per none --compute.num-threads 1 --env.num-threads 1 "
    "--evaluation.every-iterations 10 --evaluation.episodes 16 --evaluation.policy sampled "
    "--compute.compile off --log.console off --log.no-tensorboard"
)
TASKS = {
    "CartPole": "--env.id envpool:CartPole-v1 --total-env-steps 102_400",
    "Acrobot": "--env.id envpool:Acrobot-v1 --total-env-steps 102_400",
}
AVERAGED = "--ppo.proximal-decay 0.8889 --ppo.advantage-decay 0.2"
"""Options at the largest batch: eight steps old, as PPO's old policy in 16 steps on average."""
ARMS = {
    "PPO-EWMA with the rules": (AVERAGED, True),
    "PPO, the same options": ("", False),
}
"""Options of the largest batch, and whether the rules make smaller ones."""
DIVISORS = (1, 2, 4, 8)
"""Divisors of the largest batch."""
POINTS = 10
COLUMNS = ("task", "arm", "divided_by", "seed", "env_steps", "return", "commit")
Row = dict[str, str]


def make_trials(seeds: Iterable[int], tasks: Iterable[str]) -> list[Trial]:
    """Return all trials, seed by seed."""
    trials: list[Trial] = []
    for task in tasks:
        for arm, (of_arm, by_rules) in ARMS.items():
            config = parse_config(f"{COMMON} {TASKS[task]} {of_arm}".split())
            config = config.with_updates({"checkpoint.every_minutes": None})
            for size in DIVISORS:
                if by_rules:
                    scaled = scale_batch(config, 1 / size)
                else:
                    scaled = config.with_updates({"env.num_envs": config.env.num_envs // size})
                trials += vary_seed((task, arm, str(size)), scaled, seeds)
    return sorted(trials, key=lambda trial: trial.config.seed)


def measure(trial: Trial) -> list[Row]:
    """Train once; returns a row for each tenth of the run."""
    task, arm, size = trial.label_parts
    every = trial.config.budget // trial.config.batch_size // POINTS
    config = trial.config.with_updates({"evaluation.every_iterations": every})
    about = {"task": task, "arm": arm, "divided_by": size, "seed": str(trial.config.seed)}
    about["commit"] = find_commit() or "unknown"
    rows: list[Row] = []

    def note(run: Run, record: dict[str, float]) -> None:
        if "evaluation/return" in record:
            value = f"{record['evaluation/return']:.5g}"
            rows.append(about | {"env_steps": str(run.env_steps), "return": value})

    with tempfile.TemporaryDirectory() as folder:
        train(replace(config, output_dir=folder), callbacks=note)
    return rows


def group(rows: list[Row], task: str, arm: str, size: int, column: str) -> dict[str, list[float]]:
    """Return the returns of an arm at one size of the batch, by the values of a column."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if (row["task"], row["arm"], row["divided_by"]) == (task, arm, str(size)):
            groups.setdefault(row[column], []).append(float(row["return"]))
    return groups


def by_size(rows: list[Row], task: str, arm: str) -> dict[int, tuple[float, float, float]]:
    """Return the mean return over a whole run for each batch, and its interval over seeds."""
    found: dict[int, tuple[float, float, float]] = {}
    for size in DIVISORS:
        if by_seed := group(rows, task, arm, size, "seed"):
            means = [float(np.nanmean(values)) for values in by_seed.values()]
            found[size] = (float(np.mean(means)), *bootstrap_mean_interval(means))
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Draw a panel for each task and arm, a curve for each batch: mean over seeds and interval."""
    figure = Figure(figsize=(9, 3.2 * len(TASKS)), layout="constrained")
    panels = figure.subplots(len(TASKS), len(ARMS), sharey="row", squeeze=False)
    for line, task in zip(panels, TASKS, strict=True):
        for panel, arm in zip(line, ARMS, strict=True):
            for shade, size in zip(np.linspace(0.0, 0.8, len(DIVISORS)), DIVISORS, strict=True):
                if not (curve := group(rows, task, arm, size, "env_steps")):
                    continue
                x = [int(steps) / 1e3 for steps in curve]
                mean = [np.nanmean(each) for each in curve.values()]
                band = [bootstrap_mean_interval(np.nan_to_num(each)) for each in curve.values()]
                color = (shade, 0.3, 1 - shade)
                panel.plot(x, mean, color=color, linewidth=1.3, label=f"batch / {size}")
                panel.fill_between(x, *np.transpose(band), color=color, alpha=0.12, linewidth=0)
            panel.set_title(f"{task}: {arm}", fontsize="small", loc="left")
            panel.set_xlabel("thousand environment steps", fontsize="small")
        line[0].set_ylabel("return", fontsize="small")
    seeds = ", ".join(sorted({row["seed"] for row in rows}))
    title = f"mean of seeds {seeds}\nband: 95 % bootstrap interval of the mean"
    panels[0, 0].legend(title=title, title_fontsize="x-small", fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=110)


def main(
    output: Path,
    figure: Path,
    /,
    seeds: tuple[int, ...] = tuple(range(111, 116)),
    jobs: int = 2,
    tasks: tuple[str, ...] = tuple(TASKS),
) -> None:
    """Run what is missing, and draw the figure."""
    table = ResultTable(output, COLUMNS, label_columns=("task", "arm", "divided_by"))
    for trial in run_missing_trials(table, make_trials(seeds, tasks), measure, jobs=jobs):
        print(*trial.key, flush=True)
    draw(table.read(), figure)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
