"""Draws the figures of docs/ anew, from committed files: `python -m tools.figures [NAME …]`.

`make figures` draws all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import batch_invariance, draw_trace, levels, precision
from phasicrl.lab.analysis.plot import draw_curves, save_figure
from phasicrl.lab.experiments.run_suite import suite_curves
from phasicrl.lab.experiments.suites import SUITES
from phasicrl.lab.experiments.trials import ResultTable
from tools.result_tables import RESULTS, RUN_SUITES, read

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"


def _suite(name: str, output: Path) -> None:
    """A suite's figure from its table, as `phasicrl suite` draws it."""
    curves = suite_curves(read(f"suites/{name}-small"))
    title = f"{name}: {SUITES[name].about}"
    figure = draw_curves(curves, "episodic return, last 100 episodes", title)
    for path in save_figure(figure, output.with_suffix(""), f"suite {name}, small"):
        if path != output:  # the pages show the PNG
            path.unlink()


def _batch_invariance(output: Path) -> None:
    """Returns for four sizes of the batch."""
    label = ("task", "arm", "divided_by")
    file = RESULTS / "batch_invariance.csv.gz"
    batch_invariance.draw(ResultTable(file, batch_invariance.COLUMNS, label).rows(), output)


def _precision(output: Path) -> None:
    """What was noted in runs of each precision."""
    file = RESULTS / "selection" / "precision.csv.gz"
    precision.draw(ResultTable(file, precision.COLUMNS, ("game", "setting")).rows(), output)


def _levels(output: Path) -> None:
    """Returns on the levels of the training and on all."""
    file = RESULTS / "levels.csv"
    levels.draw(ResultTable(file, levels.COLUMNS, ("levels",)).rows(), output)


def _scaling_model(output: Path) -> None:
    """A model of many processes beside what larger batches cost."""
    files = [RESULTS / "scaling.csv", RESULTS / "batch_invariance.csv.gz"]
    _run("scaling_model.py", *files, output)


def _baselines(output: Path) -> None:
    """Ours among the published runs, and the CSV that the page's table is made from."""
    runs = sorted(path.parent for path in (RESULTS / "baselines").glob("*/metrics.jsonl"))
    published = RESULTS / "baselines" / "published.csv.gz"
    _run("compare_reference.py", *runs, "--reference", published, "--output", output)


def _run(script: str, *words: object) -> None:
    """Run a script of benchmarks/, which prints its table too."""
    command = [sys.executable, ROOT / "benchmarks" / script, *words]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


FIGURES: dict[str, Callable[[Path], None]] = {
    "baselines.png": _baselines,
    "batch-invariance.png": _batch_invariance,
    "levels.png": _levels,
    "precision.png": _precision,
    "scaling-model.png": _scaling_model,
    "trace.png": partial(draw_trace.draw, RESULTS / "trace.csv.gz"),
    **{f"suite-{name}.png": partial(_suite, name) for name in RUN_SUITES},
}
"""Every figure, and what draws it into a file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="suite-mva.png, for example")
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder that gets them")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - FIGURES.keys():
        parser.error(
            f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}"
        )
    for name in options.names or FIGURES:
        FIGURES[name](options.output / name)
        print(options.output / name)


if __name__ == "__main__":
    main()
