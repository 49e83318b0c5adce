"""Figures of learning curves, beside published curves: PNG, SVG and CSV.

Kind: effects (writes files).
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from colorsys import hls_to_rgb
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from phasicrl.lab.analysis.curves import Curve, Task, get_shared_experiment, read_curves
from phasicrl.lab.analysis.references import read_reference_curves
from phasicrl.system.machine import import_optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CurveKey: TypeAlias = tuple[str, bool]
"""Label of a curve, and true if the curve is published."""
Styles: TypeAlias = dict[CurveKey, dict[str, Any]]

_CSV_COLUMNS = (
    "metric", "env_id", "distribution", "num_levels", "curve", "published", "num_runs", "band",
    "env_steps", "mean", "low", "high",
)  # fmt: skip
# By Okabe and Ito: distinct for color-blind readers as well.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MAX_CURVES = 10
"""Most curves of a panel; more have a panel each."""
MAX_CURVES_WITH_RUNS = 2
"""Most curves of a panel that are drawn with their single runs."""
_DASHES = (0, (4, 1.5))
_ENDINGS, _FORMULA_PREFIXES = (".png", ".svg", ".csv"), ("=", "+", "-", "@", "\t", "\r")
_LETTERS_PER_INCH, _INCHES_PER_LINE = 12, 0.2
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 10, "legend.fontsize": 9,
    "figure.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#E5E5E5", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.edgecolor": "#666666", "xtick.color": "#333333", "ytick.color": "#333333",
    "svg.hashsalt": "phasicrl", "text.parse_math": False,
}  # fmt: skip


class Panel(NamedTuple):
    """Panel of a figure: curves of one task; a task of many curves has several panels."""

    task: Task
    title: str
    curves: list[Curve]


def plot_runs(
    runs: Sequence[Path], *, output: Path = Path("curves"),
    metric: str = "charts/episodic_return_100", smooth_steps: int = 0,
    reference: Path | None = None, target: float | None = None, title: str | None = None,
) -> list[Path]:  # fmt: skip
    """Draw learning curves of runs over seeds, beside published curves if requested.

    There is one panel for each environment, and one curve for each experiment.

    Args:
        runs: Run directories, or the directory of a sweep; runs of one experiment on one
            environment are one curve over seeds.
        output: Name of the files, without their endings .png, .svg and .csv.
        metric: Metric on the y axis.
        smooth_steps: Window of a moving average, in environment steps; 0: none.
        reference: Published returns: ppg-paper, baselines-easy, baselines-easy-200,
            baselines-final, cleanrl-ppg, procgen-easy-25m, zoo, tianshou, slm-lab,
            cleanrl; or a CSV file with the columns step, low, mean, high. Published
            returns of a game of Procgen stand beside runs of the same difficulty only.
        target: Value of a dotted line.
        title: Title of the figure; none: the name of the experiments if all share it.

    Returns:
        The written files.

    Raises:
        ValueError: a folder is not a run directory, no run has data for the metric, or the
            reference lacks the metric, the game or a column.
        FileNotFoundError: the reference file does not exist.
        ModuleNotFoundError: matplotlib is not installed.
    """
    require_matplotlib()
    if smooth_steps < 0:
        raise ValueError(f"smooth_steps is {smooth_steps}; expected at least 0")
    curves = read_curves(runs, metric, smooth_steps=smooth_steps)
    if reference is not None:
        end_by_task: dict[Any, float] = defaultdict(float)
        for curve in curves:
            end_by_task[curve.task] = max(end_by_task[curve.task], float(curve.steps[-1]))
        curves += read_reference_curves(
            reference, metric, end_by_task=end_by_task, smooth_steps=smooth_steps)  # fmt: skip
    window = f"\n(mean over {format_steps(smooth_steps)} steps)" if smooth_steps else ""
    figure = draw_curves(curves, metric + window, title, target)
    stem = prepare_stem(output)
    source = f"{metric} of {', '.join(map(str, runs))}"
    images = save_figure(figure, stem, f"{source}; published: {reference}" if reference else source)
    return [*images, write_csv(stem, _CSV_COLUMNS, _iterate_point_rows(curves, metric))]


def require_matplotlib() -> None:
    """Raise an error that names the extra if matplotlib is missing."""
    import_optional("matplotlib", "figures need matplotlib")


def prepare_stem(output: Path) -> Path:
    """Create the parent directory of a file; return its path without `.png`, `.svg` or `.csv`."""
    output = Path(output)
    if not output.name:  # such as .
        raise ValueError(f"output is {output}; expected the name of a file")
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.with_suffix("") if output.suffix in _ENDINGS else output


def write_csv(stem: Path, column_names: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a table; escape texts that a spreadsheet would read as formulas."""
    path = stem.with_name(stem.name + ".csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column_names)
        for row in rows:
            writer.writerow(
                f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA_PREFIXES) else cell
                for cell in row
            )
    return path


def _iterate_point_rows(curves: Sequence[Curve], metric: str) -> Iterator[Sequence[object]]:
    """Yield a row of the table for each point of each curve."""
    for curve in curves:
        key = (metric, *curve.task, curve.num_levels, curve.label, int(curve.is_published),
               len(curve.values), curve.band_description)  # fmt: skip
        for step, mean, low, high in zip(curve.steps, curve.mean, *curve.band, strict=True):
            yield *key, int(step), mean, *((low, high) if curve.band_description else ("", ""))


def draw_curves(
    curves: Sequence[Curve], y_label: str, title: str | None, target: float | None = None
) -> Figure:
    """Draw a panel for each task, with a dotted line at the target, and a common legend.

    Where a task has more than `MAX_CURVES`, each of ours has a panel, beside the published ones.
    Single runs are drawn if no panel has more than `MAX_CURVES_WITH_RUNS`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels, tasks = _divide_among_panels(curves), {curve.task for curve in curves}
    is_split = len(panels) > len(tasks)
    rows, columns, width, height = choose_figure_layout(len(panels))
    letters = int(_LETTERS_PER_INCH * width)
    draws_runs = max(len(panel.curves) for panel in panels) <= MAX_CURVES_WITH_RUNS
    texts, legend_title = format_legend(curves, draws_runs=draws_runs)
    texts = {key: textwrap.fill(text, letters) for key, text in texts.items()
             if key[1] or not is_split}  # fmt: skip
    longest = max(map(len, texts.values()), default=0)
    legend_columns = max(1, min(len(texts), letters // (longest + 9)))
    below = math.ceil(sum(text.count("\n") + 1 for text in texts.values()) / legend_columns) + 1
    shared = get_shared_experiment(curves) + f", {panels[0].task}" * (is_split and len(tasks) == 1)
    heading = textwrap.fill(title or shared.removeprefix(", "), int(0.8 * letters))
    height += _INCHES_PER_LINE * (len(heading.splitlines()) + below)
    styles = assign_styles([*texts, *[("", False)] * is_split])
    pads = {"figure.constrained_layout.w_pad": 0.08, "figure.constrained_layout.h_pad": 0.06}
    with rc_context(STYLE | pads):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for index, (panel, axes) in enumerate(zip(panels, grid, strict=False)):
            if index and panels[index - 1].task == panel.task:
                axes.sharey(grid[index - 1])
            _draw_panel(axes, panel.curves, styles, draws_runs=draws_runs)
            axes.set_title(textwrap.fill(panel.title, letters // columns))
            if target is not None:
                axes.axhline(target, color="#666666", linewidth=1, linestyle=":", zorder=1)
            axes.set_xlabel("environment steps" if index + columns >= len(panels) else "")
        figure.supylabel(y_label, fontsize=STYLE["axes.labelsize"])
        figure.suptitle(heading)
        figure.legend(
            handles=[Line2D([], [], label=text, **styles[key]) for key, text in texts.items()],
            title=legend_title, ncols=legend_columns, loc="outside lower center", frameon=False,
            handlelength=3,
        )  # fmt: skip
    return figure


def _divide_among_panels(curves: Sequence[Curve]) -> list[Panel]:
    """Return the panels of a figure of the curves."""
    groups: dict[Task, list[Curve]] = defaultdict(list)
    for curve in curves:
        groups[curve.task].append(curve)
    if max(map(len, groups.values())) <= MAX_CURVES:
        return [Panel(task, str(task), group) for task, group in groups.items()]
    return [
        Panel(task, f"{curve.label}{f', {task}' * (len(groups) > 1)} ({curve.runs_description})",
              [curve, *(each for each in group if each.is_published)])
        for task, group in groups.items() for curve in group if not curve.is_published
    ]  # fmt: skip


def choose_figure_layout(count: int) -> tuple[int, int, float, float]:
    """Return rows, columns, width and height in inches of a figure with `count` panels."""
    columns = count if count <= 3 else min(4, math.ceil(math.sqrt(count)))
    rows = math.ceil(count / columns)
    size = (6.4, 3.7) if count == 1 else (max(6.4, 3.2 * columns), 2.5 * rows + 0.3)
    return rows, columns, *size


def format_legend(curves: Sequence[Curve], *, draws_runs: bool) -> tuple[dict[CurveKey, str], str]:
    """Return the texts of a figure's legend by curve, and its title: what lines and bands are."""
    descriptions_by_key: dict[CurveKey, list[str]] = defaultdict(list)
    for curve in curves:
        descriptions_by_key[curve.label, curve.is_published].append(curve.runs_description)
    texts = {key: " or ".join(dict.fromkeys(each)) for key, each in descriptions_by_key.items()}
    bands = dict.fromkeys(curve.band_description for curve in curves if curve.band_description)
    title = f"{'thin: single runs; ' * draws_runs}band: {' or '.join(bands)}" if bands else ""
    return {key: f"{key[0]} ({text})" for key, text in texts.items()}, title


def extend_colors(count: int, base: Sequence[str], lightness: float) -> list[str]:
    """Return distinct colors: those of `base`, and as many others as are missing."""
    hues = range(count - len(base))
    others = [hls_to_rgb(hue / len(hues), lightness, 0.7) for hue in hues]
    return [*base, *(f"#{''.join(f'{round(255 * x):02X}' for x in color)}" for color in others)]


def assign_styles(keys: Sequence[CurveKey]) -> Styles:
    """Choose a different color for each curve; dash published ones, not ours."""
    colors = extend_colors(len(keys), COLORS, 0.4)
    ours, theirs = iter(colors), reversed(colors)
    return {
        key: {"linestyle": _DASHES if key[1] else "-", "color": next(theirs if key[1] else ours)}
        for key in keys
    }


def _draw_panel(axes: Axes, curves: Sequence[Curve], styles: Styles, *, draws_runs: bool) -> None:
    for curve in curves:
        style = styles.get((curve.label, curve.is_published)) or styles["", False]
        color = style["color"]
        marker = {"marker": "o", "markersize": 4} if len(curve.steps) == 1 else {}
        axes.plot(curve.steps, curve.mean, zorder=2 if curve.is_published else 3, **style, **marker)
        if curve.band_description:
            # The band of a single step is a bar.
            axes.fill_between(curve.steps, *curve.band, color=color, alpha=0.18, lw=2 * len(marker))
            if draws_runs:
                axes.plot(curve.steps, curve.values.T, lw=0.6, alpha=0.4, color=color, **marker)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda step, _: format_steps(step))
    axes.set_xlim(0, 1.01 * max(curve.steps[-1] for curve in curves))


def format_steps(steps: float) -> str:
    """Format a number of steps: 0, 500, 20k, 2.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(steps) >= size:
            return f"{steps / size:.10g}{unit}"
    return f"{steps:.10g}"


def save_figure(figure: Figure, stem: Path, description: str) -> list[Path]:
    """Write a figure as PNG and SVG with a description in their metadata, and return the paths.

    Equal figures give equal bytes.
    """
    from matplotlib import rc_context

    png, svg = (stem.with_name(stem.name + ending) for ending in (".png", ".svg"))
    with rc_context(STYLE):
        figure.savefig(png, dpi=200, metadata={"Software": "phasicrl", "Description": description})
        about = {"Creator": "phasicrl", "Description": description, "Date": None}
        figure.savefig(svg, metadata=about)
    return [png, svg]
