"""Draw the figures of docs/ from committed files: `python -m tools.figures [NAME …]`.

`make figures` draws all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import tyro

from benchmarks import batch_invariance, compare_reference, simulators
from phasicrl.lab.analysis.plot import draw_curves, save_figure
from phasicrl.lab.experiments.run_suite import make_curves
from tools.result_tables import RESULTS, read

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"


def _suite(name: str, title: str, output: Path) -> None:
    """Draw a suite's figure from its table, as `phasicrl suite` does but for its title."""
    curves = make_curves(read(f"suites/{name}-small"))
    figure = draw_curves(curves, "episodic return, last 100 episodes", title)
    for path in save_figure(figure, output.with_suffix(""), f"suite {name}, small"):
        if path != output:  # the pages show the PNG
            path.unlink()


def _baselines(output: Path) -> None:
    """Draw our runs among the published ones, and write the CSV of the page's table."""
    folder = RESULTS / "baselines"
    runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    published = folder / "published.csv.gz"
    compare_reference.main(tuple(runs), reference=published, output=output)


FIGURES: dict[str, Callable[[Path], None]] = {
    "baselines.png": _baselines,
    "batch-invariance.png": lambda to: batch_invariance.draw(read("batch_invariance"), to),
    "simulators.png": lambda to: simulators.draw(read("simulators"), to),
    "suite-penalties.png": partial(
        _suite, "penalties", "PPG with clipping or a KL penalty, rewards normalized or not"
    ),
    "suite-value-epochs.png": partial(
        _suite, "value-epochs", "PPG with one to twenty value epochs (E_V)"
    ),
}
"""Function that draws each figure into a file."""


def main(names: tuple[str, ...] = tuple(FIGURES), /, output: Path = FOLDER) -> None:
    """Draw the figures that are named, or all."""
    for name in names:
        FIGURES[name](output / name)
        print(output / name)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
