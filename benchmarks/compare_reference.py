"""Compare runs with published curves, window by window, as a CSV file and a figure.

usage: python benchmarks/compare_reference.py RUN … --reference baselines_ppo_easy_all.csv.gz
    --output docs/figures/baselines
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from phasicrl.lab.analysis.curves import Curve, Task, read_curves
from phasicrl.runs.directory import RunDirectory

METRICS = {
    "charts/episodic_return_100": "episodic return, last 100 episodes",
    "losses/entropy": "entropy (nats)",
    "losses/explained_variance": "explained variance",
}
COLUMNS = dict(zip(METRICS, ("episodic_return", "entropy", "explained_variance"), strict=True))
"""Column of the published runs for each metric."""
WINDOWS = 4
T_95 = 4.303  # Student's t, two degrees of freedom, two-sided 95 %


def windows(edges: Sequence[int], steps: np.ndarray, values: np.ndarray) -> list[float]:
    """Average a curve over each window of steps."""
    return [float(values[(steps > low) & (steps <= high)].mean()) for low, high in pairwise(edges)]


def prediction_half_width(runs: np.ndarray) -> np.ndarray:
    """Return half the 95 % interval for one more run, for each column of three runs."""
    return T_95 * runs.std(axis=0, ddof=1) * np.sqrt(1 + 1 / len(runs))


def published_runs(path: Path, task: Task, column: str, end: float) -> Curve:
    """Read the published runs of a game up to a step, at the steps that all of them have."""
    game = task.env_id.rpartition(":")[2]
    runs: dict[str, dict[float, float]] = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["game"] == game and row[column] and float(row["step"]) <= end:
                runs[row["run"]][float(row["step"])] = float(row[column])
    steps = sorted(set.intersection(*map(set, runs.values())))
    values = np.array([[run[step] for step in steps] for run in runs.values()])
    return Curve("published", task, np.array(steps), values, is_published=True)


def compare(
    ours: dict[int, Curve], published: Curve, edges: list[int], metric: str
) -> list[dict[str, object]]:
    """Return one row for each run of ours and window.

    It has our mean, the published runs' span, and the 95 % interval for one more run of theirs.
    """
    theirs = np.array([windows(edges, published.steps, run) for run in published.values])
    half = prediction_half_width(theirs)
    rows = []
    for seed, curve in ours.items():
        for index, value in enumerate(windows(edges, curve.steps, curve.values[0])):
            column = theirs[:, index]
            rows.append(
                {
                    "env": curve.task.env_id, "seed": seed, "metric": metric,
                    "steps": f"{edges[index]:,}–{edges[index + 1]:,}",
                    "ours": round(value, 3), "published_min": round(float(column.min()), 3),
                    "published_mean": round(float(column.mean()), 3),
                    "published_max": round(float(column.max()), 3),
                    "prediction_half_width": round(float(half[index]), 3),
                    "within_min_max": bool(column.min() <= value <= column.max()),
                    "within_95_prediction": bool(abs(value - column.mean()) <= half[index]),
                }
            )  # fmt: skip
    return rows


def draw(panels: list[list[tuple[dict[int, Curve], Curve]]], output: Path) -> None:
    """Draw a row for each game, a column for each metric."""
    size = (4.2 * len(METRICS), 3.0 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), len(METRICS), squeeze=False)
    for row, pairs in zip(axes, panels, strict=True):
        for panel, title, (ours, published) in zip(row, METRICS.values(), pairs, strict=True):
            panel.fill_between(
                published.steps / 1e6, *published.band, color="#999999", alpha=0.35, linewidth=0
            )
            panel.plot(published.steps / 1e6, published.values.T, color="#777777", linewidth=0.7)
            for curve in ours.values():
                panel.plot(curve.steps / 1e6, curve.values[0], color="#0072B2", linewidth=1.2)
            panel.set_title(f"{published.task.env_id}: {title}", fontsize=10)
            panel.grid(alpha=0.25)
    for panel in axes[-1]:
        panel.set_xlabel("environment steps (millions)")
    ours, published = panels[0][0]
    lines = [
        axes[0][0].plot([], [], color=color, linewidth=2)[0] for color in ("#0072B2", "#777777")
    ]
    labels = [
        f"phasicrl, {len(ours)} seeds",
        f"OpenAI Baselines, {len(published.values)} published runs, band: minimum to maximum",
    ]
    figure.legend(lines, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(output.with_suffix(".png"), dpi=150)


def main(runs: tuple[Path, ...], /, reference: Path, output: Path) -> None:
    """Compare, and write a CSV file and a figure."""
    games: dict[str, dict[int, Path]] = {}
    for run in runs:
        config = RunDirectory(run).config
        games.setdefault(config.env.id, {})[config.seed] = run
    panels: list[list[tuple[dict[int, Curve], Curve]]] = []
    rows: list[dict[str, object]] = []
    for of_seed in games.values():
        panels.append([])
        for metric in METRICS:
            ours = {seed: read_curves([of_seed[seed]], metric)[0] for seed in sorted(of_seed)}
            end = min(float(curve.steps[-1]) for curve in ours.values())
            (task,) = {curve.task for curve in ours.values()}
            published = published_runs(reference, task, COLUMNS[metric], end)
            edges = np.linspace(0, min(end, published.steps[-1]), WINDOWS + 1).astype(int).tolist()
            rows += compare(ours, published, edges, metric)
            panels[-1].append((ours, published))
    with output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(panels, output)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
