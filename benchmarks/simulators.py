"""Train on the tensor environments of examples/ over seeds, and draw the curves.

usage: python benchmarks/simulators.py OUTPUT.csv [--seeds 5] [--first-seed 101] [--jobs 1]
           [--figure PNG]
for example: python benchmarks/simulators.py benchmarks/results/simulators.csv
    --figure docs/figures/simulators.png

A row is the mean return of 100 training episodes after an iteration. Runs that the file has are not
repeated.
"""

import importlib
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from phasicrl import get_preset, train
from phasicrl.lab.experiments import trials
from phasicrl.system.machine import find_commit

sys.path.append(str(Path(__file__).parents[1] / "examples"))
COLUMNS = ("task", "algorithm", "seed", "env_steps", "return_100", "commit")
RECALL: dict[str, Any] = {
    "env.num_envs": 64, "model.memory": "lstm", "ppo.num_steps": 32, "total_env_steps": 65_536,
}  # fmt: skip
ARMS: dict[tuple[str, ...], tuple[str, str, str, dict[str, Any]]] = {
    (task, algorithm): (file, kind, f"{preset}-{algorithm.lower()}", changes)
    for task, file, kind, preset, changes in (
        ("CartPole", "tensor_cartpole", "TensorCartPole", "cartpole", {}),
        ("Pendulum", "tensor_pendulum", "TensorPendulum", "pendulum", {}),
        ("recall (LSTM, masks)", "tensor_recall", "TensorRecall", "cartpole", RECALL),
    )
    for algorithm in ("PPO", "PPG")
}
"""File, class, preset and changed options of each task and algorithm."""


def train_once(trial: trials.Trial) -> list[trials.Row]:
    """Train, and return a row for each iteration."""
    file, kind, *_ = ARMS[trial.label_parts]
    means: dict[int, float] = {}

    def note_return(run: Any, record: dict[str, float]) -> None:
        means[run.env_steps] = round(run.collector.episodes.recent_mean_return, 3)

    with tempfile.TemporaryDirectory() as folder:
        simulator = getattr(importlib.import_module(file), kind)
        config = trial.config.with_updates({"output_dir": folder})
        train(config, make_vector_env=simulator, callbacks=note_return)
    commit = find_commit() or "unknown"
    rows = ((*trial.key, env_steps, means[env_steps], commit) for env_steps in means)
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def draw(table: list[dict[str, str]], path: Path) -> None:
    """Draw the mean and the range over seeds of each arm, a panel for each task."""
    curves: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in table:
        steps = curves[row["task"], row["algorithm"]]
        steps[int(row["env_steps"])].append(float(row["return_100"]))
    seeds = len({row["seed"] for row in table})
    tasks = list(dict.fromkeys(task for task, _ in curves))
    figure = Figure(figsize=(10, 3), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        algorithms = [algorithm for other, algorithm in curves if other == task]
        for color, algorithm in zip(("C0", "C1"), algorithms, strict=False):
            steps = sorted(curves[task, algorithm])
            values = np.array([curves[task, algorithm][step] for step in steps])
            thousands = [step / 1000 for step in steps]
            panel.plot(thousands, values.mean(1), color, label=algorithm)
            panel.fill_between(
                thousands, values.min(1), values.max(1), color=color, alpha=0.2, lw=0
            )
        panel.set(title=task, xlabel="thousands of environment steps")
    figure.axes[0].set_ylabel("return, last 100 episodes")
    figure.axes[0].legend(title=f"mean and range\nof {seeds} seeds")
    figure.savefig(path, dpi=120)


def main(
    output: Path, /, seeds: int = 5, first_seed: int = trials.FIRST_REPORT_SEED,
    jobs: int = 1, figure: Path | None = None,
) -> None:  # fmt: skip
    """Train what the file lacks, and draw."""
    table = trials.ResultTable(output, COLUMNS, label_columns=("task", "algorithm"))
    wanted: list[trials.Trial] = []
    for arm, (file, _, preset, changes) in ARMS.items():
        config = get_preset(preset).with_updates({
            "env.id": file, "log.console": "off", "log.tensorboard": False,
            "checkpoint.every_minutes": None, **changes,
        })  # fmt: skip
        wanted += trials.vary_seed(arm, config, range(first_seed, first_seed + seeds))
    for trial in trials.run_missing_trials(table, wanted, train_once, jobs):
        print(*trial.key, flush=True)
    if figure is not None:
        draw(table.read(), figure)


if __name__ == "__main__":
    tyro.cli(main)
