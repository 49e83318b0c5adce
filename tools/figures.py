"""Draw the figures of docs/ from committed files: `python -m tools.figures [NAME …]`.

`make figures` draws all of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from benchmarks import batch_invariance, compare_reference, simulators
from phasicrl.lab.analysis.curves import read_curves
from phasicrl.lab.analysis.plot import draw_curves, save_figure
from phasicrl.lab.analysis.references import read_reference_curves
from phasicrl.lab.experiments.run_suite import make_curves
from phasicrl.lab.experiments.trials import RETURN
from tools.result_tables import PPG_RUNS, PPG_WINDOW, RESULTS, read

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"


def _suite(name: str, title: str, output: Path) -> None:
    """Draw a suite's figure from its table, as `phasicrl suite` does but for its title."""
    curves = make_curves(read(f"suites/{name}-small"))
    figure = draw_curves(curves, "episodic return, last 100 episodes", title)
    _save(figure, output, f"suite {name}, small")


def _save(figure: Figure, output: Path, description: str) -> None:
    for path in save_figure(figure, output.with_suffix(""), description):
        if path != output:  # the pages show the PNG
            path.unlink()


def _ppg(output: Path) -> None:
    """Draw our PPG on StarPilot among published runs, as `phasicrl plot` does but for its title."""
    curves = read_curves([*PPG_RUNS.values()], "charts/episodic_return", smooth_steps=PPG_WINDOW)
    ends = {curves[0].task: float(max(curve.steps[-1] for curve in curves))}
    curves += read_reference_curves(Path("cleanrl-ppg"), RETURN, end_by_task=ends)
    (ppo,) = read_reference_curves(Path("baselines-easy"), RETURN, end_by_task=ends)
    curves.append(replace(ppo, label="OpenAI Baselines' PPO"))
    title = "PPG with auxiliary epochs over 8 and over all 32 iterations, beside published runs"
    label = f"episodic return, mean over {PPG_WINDOW:,} steps\n(Baselines: last 100 episodes)"
    _save(draw_curves(curves, label, title), output, "procgen-25m, cleanrl-ppg, baselines-easy")


PPG_RATES = {"8 of 32": 388, "all 32": 151}
PPO_RATE = 377
"""Environment steps per second on two cores (docs/ppo-to-ppg.md)."""


def _ppg_hours(output: Path) -> None:
    """Draw our PPG on StarPilot and published runs against hours at our rates."""
    curves = read_curves([*PPG_RUNS.values()], "charts/episodic_return", smooth_steps=PPG_WINDOW)
    rates = [PPG_RATES[name.partition(",")[0]] for name in PPG_RUNS]
    ends = {curves[0].task: 25e6}
    _, ppg, _ = read_reference_curves(Path("cleanrl-ppg"), RETURN, end_by_task=ends)
    (ppo,) = read_reference_curves(Path("baselines-easy"), RETURN, end_by_task=ends)
    curves += [replace(ppg, label="CleanRL's, all 32"), replace(ppo, label="OpenAI Baselines' PPO")]
    for index, rate in enumerate([*rates, PPG_RATES["all 32"], PPO_RATE]):
        curves[index] = replace(curves[index], steps=curves[index].steps / (3600 * rate))
    title = "By hours on two cores, published runs at our rates"
    figure = draw_curves(curves, "episodic return", title)
    figure.axes[0].set(xlabel="hours", xlim=(0, 18))
    _save(figure, output, "procgen-25m, cleanrl-ppg, baselines-easy")


def _baselines(output: Path) -> None:
    """Draw our runs among the published ones, and write the CSV of the page's table."""
    folder = RESULTS / "baselines"
    runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    published = folder / "published.csv.gz"
    compare_reference.main(tuple(runs), reference=published, output=output)


FIGURES: dict[str, Callable[[Path], None]] = {
    "baselines.png": _baselines,
    "ppg-starpilot.png": _ppg,
    "ppg-starpilot-hours.png": _ppg_hours,
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
