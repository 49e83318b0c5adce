"""Compare learning in fp32, with bf16 in the auxiliary phase, and with bf16 everywhere.

usage: python benchmarks/precision.py OUT.csv.gz FIGURE.png [--games starpilot …] [--seeds 3]
    [--jobs 2] [--fields "…"]

`quickstart` (PPG with one network) on each game and seed, with narrower convolutions and fewer
steps than the papers have, so that it fits a small machine; `--fields` changes that. Each
iteration is a row. Runs that the file has are not repeated, so that an interrupted measurement
continues. The figure has the mean over seeds and the range.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from phasicrl import train
from phasicrl.cli import parse_config
from phasicrl.lab.experiments.trials import ResultTable, Trial, fill_table
from phasicrl.system.machine import num_cores
from phasicrl.system.provenance import commit
from phasicrl.training.run import Run

SETTINGS = {
    "fp32": "--compute.policy-precision fp32 --compute.aux-precision fp32",
    "bf16 in the auxiliary phase": "--compute.policy-precision fp32 --compute.aux-precision bf16",
    "bf16 in both phases": "--compute.policy-precision bf16 --compute.aux-precision bf16",
}
FIELDS = "--model.channels 8 16 16 --total-env-steps 200_000"
METRICS = {
    "charts/episodic_return_100": "return, 100 episodes",
    "losses/entropy": "entropy",
    "losses/approx_kl": "KL of the policy phase",
    "losses/explained_variance": "explained variance",
    "losses/aux/kl_loss": "KL of the auxiliary phase",
    "gradients/policy_norm": "gradient norm",
}
"""Metrics of each row, and their titles in the figure."""
COLUMNS = ("game", "setting", "seed", "env_steps", *METRICS, "commit")
Row = dict[str, str]


def measure(trial: Trial) -> list[Row]:
    """Train once; returns a row for each iteration."""
    game, setting = trial.label
    rows: list[Row] = []
    made = {"commit": commit() or "unknown"}

    def note(trained: Run, record: dict[str, float]) -> None:
        kept = {name: f"{record[name]:.5g}" for name in METRICS if name in record}
        seed, env_steps = str(trial.config.seed), str(trained.env_steps)
        about = {"game": game, "setting": setting, "seed": seed, "env_steps": env_steps}
        rows.append(about | kept | made)

    with tempfile.TemporaryDirectory() as folder:
        train(replace(trial.config, output_dir=folder), on_iteration=note)
    return rows


def make_trials(games: tuple[str, ...], seeds: int, fields: str, num_threads: int) -> list[Trial]:
    """Return all trials, seed by seed: an interrupted measurement has every game and setting."""
    trials: list[Trial] = []
    for seed in range(1, seeds + 1):
        for game in games:
            for setting, flags in SETTINGS.items():
                words = f"quickstart --env.id {game} --seed {seed} --log.console off "
                words += f"--log.no-tensorboard {flags} {fields} --compute.num-threads "
                words += f"{num_threads} --env.num-threads {num_threads} --compute.micro-batch 64"
                config = parse_config(words.split()).with_updates(
                    {"checkpoint.every_minutes": None}
                )
                trials.append(Trial((game, setting), config))
    return trials


def draw(rows: list[Row], path: Path) -> None:
    """Draw a row of panels for each game."""
    games = list(dict.fromkeys(row["game"] for row in rows))
    figure = Figure(figsize=(3 * len(METRICS), 2.4 * len(games)), layout="constrained")
    panels = figure.subplots(len(games), len(METRICS), squeeze=False)
    for number, (line, game) in enumerate(zip(panels, games, strict=True), 1):
        for panel, (metric, title) in zip(line, METRICS.items(), strict=True):
            for setting, color in zip(SETTINGS, ("0.3", "tab:blue", "tab:orange"), strict=True):
                curves: dict[int, dict[str, float]] = {}
                for row in rows:
                    if (row["game"], row["setting"]) == (game, setting) and row.get(metric):
                        curves.setdefault(int(row["env_steps"]), {})[row["seed"]] = float(
                            row[metric]
                        )
                most = max((len(values) for values in curves.values()), default=0)
                steps = [at for at in sorted(curves) if len(curves[at]) == most]
                values = np.array([list(curves[at].values()) for at in steps]).reshape(
                    len(steps), -1
                )
                if not len(values):
                    continue
                x = np.array(steps) / 1e3
                panel.plot(x, values.mean(1), color=color, label=setting, linewidth=1.2)
                panel.fill_between(
                    x, values.min(1), values.max(1), color=color, alpha=0.15, linewidth=0
                )
            panel.set_title(f"{game}: {title}", fontsize="small", loc="left")
            panel.tick_params(labelsize="x-small")
            if number == len(games):
                panel.set_xlabel("thousand environment steps", fontsize="x-small")
    panels[0, 0].legend(fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=110)


def main(
    output: Path,
    figure: Path,
    /,
    games: tuple[str, ...] = ("starpilot", "fruitbot", "coinrun"),
    seeds: int = 3,
    jobs: int = 2,
    fields: str = FIELDS,
) -> None:
    """Run what is missing, and draw everything."""
    table = ResultTable(output, COLUMNS, label=("game", "setting"))
    trials = make_trials(games, seeds, fields, max(1, num_cores() // jobs))
    for trial in fill_table(table, trials, measure, jobs=jobs):
        print(*trial.key, flush=True)
    draw(table.rows(), figure)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
