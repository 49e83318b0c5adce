"""Learning curves of runs, beside published ones: PNG, SVG and the CSV behind them.

Kind: effects (writes files).

One curve is the mean over runs of one experiment that differ in nothing but the seed. The x axis is
always environment steps.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phasicrl.analysis.references import HEADLINES, REFERENCES, reference_file
from phasicrl.analysis.statistics import bootstrap_band
from phasicrl.config import Config
from phasicrl.config_io import nearest_name
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array: TypeAlias = NDArray[np.float64]
Points: TypeAlias = tuple[Array, Array]  # steps and values
Series: TypeAlias = dict[tuple[str, str], Points]  # by (experiment, run)
Looks: TypeAlias = dict[tuple[str, bool], dict[str, Any]]  # of lines, by (label, published)

REFERENCE_COLUMNS = {
    "charts/episodic_return": "episodic_return",
    "charts/episodic_return_100": "episodic_return",
    "evaluation/return": "episodic_return",
    "evaluation/train_return": "episodic_return",
    "charts/episodic_length": "episodic_length",
    "losses/entropy": "entropy",
    "losses/value_loss": "value_loss",
    # Baselines logs half the mean squared log-ratio (k2): the same to first order.
    "losses/approx_kl": "approx_kl",
    "losses/clipfrac": "clipfrac",
    "losses/explained_variance": "explained_variance",
}
"""Our metrics that published curves may hold, and the columns of a reference that hold them."""

_COLUMNS = "metric env_id curve published num_runs band env_steps mean low high"  # we write
_NEEDED_COLUMNS = ("experiment", "run", "game", "step")
# Of Okabe and Ito: told apart by all eyes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ((0, (4, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1, 1.5)))
_MOST_POINTS = 1_000
_MOST_REFERENCES = 6
_NEAR = 1.02
WINDOW = 0.1
"""Share of the steps, the last ones, over which a score is the mean."""
_LETTERS_PER_INCH, _INCHES_PER_LINE = 12, 0.18  # of a legend
_AXIS_LABELS = {
    "charts/episodic_return": "episodic return",
    "charts/episodic_return_100": "episodic return, last 100 episodes",
    "charts/SPS": "environment steps per second",
    "losses/old_approx_kl": "KL divergence, k1 (nats)",
    "losses/approx_kl": "KL divergence, k3 (nats)",
    "losses/clipfrac": "fraction of clipped samples",
    "losses/entropy": "entropy of the policy (nats)",
    "losses/action_std": "deviation of actions",
    "losses/aux/kl_loss": "KL divergence in the auxiliary phase (nats)",
    "losses/aux/aux_value_loss": "value loss of the policy's network",
    "losses/aux/real_value_loss": "value loss of the value network",
    "gradients/policy_norm": "norm of the policy's gradient",
    "gradients/value_norm": "norm of the value's gradient",
    "gradients/aux_norm": "norm of the gradient",
    "rewards/clipped_fraction": "fraction of clipped rewards",
    "observations/clipped_fraction": "fraction of clipped observations",
    "network/dormant_fraction": "fraction of dormant features",
    "evaluation/return": "return of evaluations",
    "evaluation/train_return": "return of evaluations on the training's levels",
}


@dataclass(frozen=True, eq=False)
class Curve:
    """Runs on one grid of steps: their mean is the line, what they spread over is the band."""

    label: str
    env_id: str
    steps: Array
    runs: Array
    """Runs × steps."""
    noun: str = "seed"
    published: bool = False

    @property
    def mean(self) -> Array:
        """Mean over runs at each step."""
        return self.runs.mean(axis=0)

    @property
    def band_name(self) -> str:
        """What the band is; empty if there is none."""
        if len(self.runs) > 2 and not self.published:
            return "95 % bootstrap interval of the mean"
        return "minimum to maximum" if len(self.runs) > 1 else ""

    @cached_property
    def band(self) -> tuple[Array, Array]:
        """Lower and upper edge."""
        if len(self.runs) > 2 and not self.published:
            return bootstrap_band(self.runs)
        return self.runs.min(axis=0), self.runs.max(axis=0)

    @property
    def about(self) -> str:
        """Over how many runs the curve is, and what its band is."""
        count = len(self.runs)
        band = f", band: {self.band_name}" if self.band_name else ""
        if self.published:
            return f"published ({count} run{'s' if count > 1 else ''}){band}"
        return f"mean of {count} {self.noun}s{band}" if count > 1 else f"one {self.noun}"


def plot_runs(
    runs: Sequence[Path],
    *,
    output: Path = Path("curves"),
    metric: str = "charts/episodic_return_100",
    smooth_steps: int = 0,
    reference: Path | None = None,
    reference_experiments: Sequence[str] = (),
    reference_game: str | None = None,
    reference_split: str = "train",
    title: str | None = None,
) -> list[Path]:
    """Draw learning curves of runs over seeds, with published curves beside them if wanted.

    There is one panel for each environment, and one curve for each experiment.

    Args:
        runs: Run directories; one experiment on one environment is one curve over its seeds.
        output: Name of the image; .png, .svg and .csv are put behind it.
        metric: Which metric.
        smooth_steps: Average over so many environment steps up to each point; 0: as recorded.
        reference: Published curves: ppg-paper, baselines-easy, baselines-easy-200, zoo, tianshou,
            slm-lab, cleanrl, or a CSV file of experiment, run, game, step, episodic_return, …
        reference_experiments: Its experiments; none: all, if few; of ppg-paper PPG and PPO.
        reference_game: The game in that file, if it is not the environment's name.
        reference_split: Which rows of that file, if it has a column `split`.
        title: Over the figure.

    Returns:
        The files written.

    Raises:
        ValueError: an unknown metric, a folder that is not a run directory, runs without data for
            the metric, or a reference without that metric, game or experiment.
        FileNotFoundError: no reference file.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if metric not in METRICS:
        nearest = nearest_name(metric, METRICS)
        raise ValueError(f"there is no metric {metric!r}{nearest}; accepted: {', '.join(METRICS)}")
    if smooth_steps < 0:
        wanted = "give the environment steps to average over, or 0 for none"
        raise ValueError(f"smooth_steps is {smooth_steps}; {wanted}")
    curves = run_curves(runs, metric, smooth_steps=smooth_steps)
    if reference is not None:
        ends: dict[str, int] = {}
        for curve in curves:
            ends[curve.env_id] = max(ends.get(curve.env_id, 0), curve.steps[-1])
        curves += reference_curves(
            reference, metric, ends=ends, game=reference_game, experiments=reference_experiments,
            split=reference_split, smooth_steps=smooth_steps,
        )  # fmt: skip
    figure = draw_curves(curves, axis_label(metric, smooth_steps), title)
    stem = stem_of(output)
    stem.parent.mkdir(parents=True, exist_ok=True)
    about = f"{metric} of {', '.join(map(str, runs))}"
    images = save_figure(figure, stem, f"{about}; published: {reference}" if reference else about)
    table = stem.with_name(stem.name + ".csv")
    _write_csv(curves, metric, table)
    return [*images, table]


def run_curves(runs: Sequence[Path], metric: str, *, smooth_steps: int = 0) -> list[Curve]:
    """The curves of run directories, in the order in which their experiments first come.

    Raises:
        ValueError: no runs, a folder that is not a run directory, runs without data for `metric`,
            or runs of one experiment that share no steps.
    """
    if not runs:
        way = "name at least one run directory: `phasicrl plot RUN …`"
        raise ValueError(f"there are no runs to plot; {way}")
    configs = {run: RunDirectory(run).config for run in runs}
    env_ids = {run: RunDirectory(run).env_id for run in configs}
    labels = _labels(configs, env_ids)
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for run in configs:
        groups[env_ids[run], labels[run]].append(run)
    curves = []
    for (env_id, label), members in groups.items():
        points = [smoothed(_read_series(run, metric), smooth_steps) for run in members]
        is_one_each = len({configs[run].seed for run in members}) == len(members)
        noun = "seed" if is_one_each else "run"
        curves.append(Curve(label, env_id, *_align(points, label), noun))
    return curves


def reference_curves(
    path: Path,
    metric: str,
    *,
    ends: Mapping[str, float],
    game: str | None = None,
    experiments: Sequence[str] = (),
    split: str = "train",
    smooth_steps: int = 0,
) -> list[Curve]:
    """Published curves, one for each environment and experiment.

    Args:
        path: CSV file, see `plot_runs`.
        metric: one of `REFERENCE_COLUMNS`.
        ends: environments, and the steps up to which their curves are wanted.
        game: the game in the file; none: the environment's name without its back end.
        experiments: none: those in `HEADLINES`; of other files all, if they are few.
        split: which rows, if the file has a column `split`.
        smooth_steps: see `plot_runs`.

    Raises:
        ValueError: the file lacks columns, a game or an experiment, or holds too many experiments
            to draw them all.
        FileNotFoundError: no such file.
    """
    experiments = experiments or HEADLINES.get(str(path), ())
    path = reference_file(path)
    games = {env_id: _game(game or env_id.rpartition(":")[2]) for env_id in ends}
    series = _read_reference(path, metric, games=set(games.values()), split=split)
    curves = []
    for env_id, name in games.items():
        for experiment in _choose_experiments(path, name, series[name], experiments):
            runs = [points for key, points in series[name].items() if key[0] == experiment]
            smooth = [smoothed(points, smooth_steps) for points in runs]
            steps, values = _align(smooth, f"experiment {experiment} of {path}")
            seen = steps <= last_step(steps, ends[env_id])
            if not seen.any():
                raise ValueError(
                    f"{path} begins at {steps[0]:,.0f} steps and the runs of {env_id} end at "
                    f"{ends[env_id]:,.0f}: there is nothing to compare yet"
                )
            curves.append(Curve(experiment, env_id, steps[seen], values[:, seen], "run", True))
    return curves


def stem_of(output: Path) -> Path:
    """The name that endings are put behind, if one of them was given with it."""
    return output.with_suffix("") if output.suffix in (".png", ".svg", ".csv") else output


def last_step(steps: Array, end: float) -> float:
    """The last step of a curve that counts, beside runs that ended at another.

    A published number that stands alone, far from others, is for a budget, which whole rollouts do
    not come to exactly: it counts for runs that end a little before it.
    """
    is_late = (steps > (1 - WINDOW) * end) & (steps <= end)
    following = steps[steps > end]
    if is_late.any() or not len(following) or following[0] > end * _NEAR:
        return end
    return float(following[0])


def _game(name: str) -> str:
    """The name of a game or task without its version, and as train-procgen calls it.

    That has names of its own for a game's training levels.
    """
    return re.sub(r"-v\d+$", "", name.lower()).removesuffix("-train")


def _choose_experiments(
    path: Path, game: str, series: Series, wanted: Sequence[str]
) -> Sequence[str]:
    present = list(dict.fromkeys(experiment for experiment, _ in series))
    known = ", ".join(present)
    for name in wanted:
        if name not in present:
            what = f"no experiment {name!r} for {game}{nearest_name(name, present)}"
            raise ValueError(f"{path} has {what}; it has: {known}")
    if not wanted and len(present) > _MOST_REFERENCES:
        what = f"{len(present)} experiments for {game}, too many to draw"
        raise ValueError(f"{path} holds {what}; choose from: {known}")
    return wanted or present


def _read_series(run: Path, metric: str) -> Points:
    """Steps and values of the rows that have a number."""
    rows = RunDirectory(run).metrics(metric)
    pairs = [(row["env_steps"], row.get(metric, math.nan)) for row in rows]
    known = [pair for pair in pairs if math.isfinite(pair[1])]
    if not known:
        rows = RunDirectory(run).metrics()
        held = ((name, row[name]) for row in rows for name in METRICS.keys() & row)
        others = ", ".join(sorted({name for name, value in held if math.isfinite(value)}))
        raise ValueError(f"{run} has no {metric!r} in its {len(rows)} iterations; it has: {others}")
    steps, values = np.array(known, dtype=np.float64).T
    return steps, values


def _labels(configs: dict[Path, Config], env_ids: Mapping[Path, str]) -> dict[Path, str]:
    """Name of each run's experiment.

    Runs of one name that differ in more than the seed on some environment also get what they differ
    in, on all environments.
    """
    knobs: dict[Path, dict[str, str]] = {}
    for run, config in configs.items():
        values = config.identity().items()
        knobs[run] = {knob: "off" if value is None else str(value) for knob, value in values}
        knobs[run].pop("env.id")  # curves are apart by environment anyway
    everything = {knob for other in knobs.values() for knob in other}
    # Values by name, environment and knob.
    seen: dict[tuple[str, str], dict[str, set[str | None]]] = defaultdict(lambda: defaultdict(set))
    for run, config in configs.items():
        for knob in everything:
            seen[config.name, env_ids[run]][knob].add(knobs[run].get(knob))
    shown: dict[str, set[str]] = defaultdict(set)
    for (name, _), values in seen.items():
        shown[name] |= _telling(values)
    return {
        run: ", ".join(
            [config.name, *(f"{knob} {knobs[run][knob]}" for knob in knobs[run]
                            if knob in shown[config.name])]
        )
        for run, config in configs.items()
    }  # fmt: skip


def _telling(values: Mapping[str, set[str | None]]) -> set[str]:
    """The knobs with several values, which tell the runs apart.

    Where a group is off in some runs, "aux on" says it: a knob that has one value in all the others
    would only repeat it.
    """
    differing = {knob for knob, held in values.items() if len(held) > 1}
    return {
        knob
        for knob in differing
        if knob.rpartition(".")[0] not in differing or len(values[knob] - {None}) > 1
    }


def _read_reference(path: Path, metric: str, *, games: set[str], split: str) -> dict[str, Series]:
    """The runs of some games."""
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    present: set[str] = set()
    for game, experiment, run, step, value in _reference_points(path, metric, split):
        present.add(game)
        if game in games and math.isfinite(value):
            points[game, experiment, run].append((step, value))
    series: dict[str, Series] = {game: {} for game in games}
    for (game, experiment, run), pairs in points.items():
        steps, values = np.array(sorted(pairs)).T
        series[game][experiment, run] = steps, values
    for game in sorted(games):
        if game not in present:
            nearest, known = nearest_name(game, present), ", ".join(sorted(present))
            where = f"{game!r} (split {split!r})"
            raise ValueError(f"{path} has no game {where}{nearest}; it has: {known}")
        if not series[game]:
            where = f"{metric!r} of {game} (split {split!r})"
            raise ValueError(f"{path} has no numbers for {where}; leave the reference out")
    return series


def _reference_points(
    path: Path, metric: str, split: str
) -> Iterator[tuple[str, str, str, float, float]]:
    """(game, experiment, run, step, value) of every row of the split."""
    with _open_text(path) as file:
        reader = csv.reader(file)
        header = next(reader, [])
        experiment, run, game, step, value = _find_columns(path, header, metric)
        split_at = header.index("split") if "split" in header else None
        for row in reader:
            try:
                if split_at is not None and row[split_at] != split:
                    continue
                number = float(row[value] or "nan")
                yield _game(row[game]), row[experiment], row[run], float(row[step]), number
            except (ValueError, IndexError) as error:
                where = f"line {reader.line_num} of {path}"
                what = f"is not a row of published curves ({error}): {row}"
                raise ValueError(f"{where} {what}") from None


def _find_columns(path: Path, header: list[str], metric: str) -> list[int]:
    if missing := [name for name in _NEEDED_COLUMNS if name not in header]:
        needed = f"a reference has {', '.join(_NEEDED_COLUMNS)} and metrics"
        raise ValueError(f"{path} has no column {', '.join(missing)}; {needed}")
    column = REFERENCE_COLUMNS.get(metric)
    if column not in header:
        known = ", ".join(name for name, column in REFERENCE_COLUMNS.items() if column in header)
        raise ValueError(f"{path} has nothing to compare {metric!r} with; it has: {known}")
    return [header.index(name) for name in (*_NEEDED_COLUMNS, column)]


def _open_text(path: Path) -> TextIO:
    if not path.is_file():
        way = f"give a CSV file of published curves, or one of {', '.join(REFERENCES)}"
        raise FileNotFoundError(f"there is no reference file {path}; {way}")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def smoothed(points: Points, window: int) -> Points:
    """Mean over the values in `(step − window, step]`."""
    steps, values = points
    if window == 0:
        return points
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.searchsorted(steps, steps - window, side="right")
    after = np.arange(1, len(steps) + 1)
    return steps, (sums[after] - sums[first]) / (after - first)


def _align(series: list[Points], owner: str) -> Points:
    """Put runs on one grid of steps by interpolation, from the last begin to the first end."""
    start, end = max(steps[0] for steps, _ in series), min(steps[-1] for steps, _ in series)
    if start > end:
        ends = f"one ends at {end:,.0f}, before another's first number at {start:,.0f}"
        raise ValueError(f"the runs of {owner} have no steps in common: {ends}")
    grid = np.unique(np.concatenate([steps for steps, _ in series]))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > _MOST_POINTS:
        grid = grid[np.linspace(0, len(grid) - 1, _MOST_POINTS).round().astype(int)]
    return grid, np.stack([np.interp(grid, steps, values) for steps, values in series])


def _write_csv(curves: list[Curve], metric: str, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS.split())
        for curve in curves:
            about = (metric, curve.env_id, curve.label, int(curve.published))
            band = (len(curve.runs), curve.band_name)
            for step, mean, low, high in zip(curve.steps, curve.mean, *curve.band, strict=True):
                edges = (low, high) if curve.band_name else ("", "")
                writer.writerow([*about, *band, int(step), mean, *edges])


def draw_curves(curves: list[Curve], y_label: str, title: str | None) -> Figure:
    """Draw one panel for each environment, and one legend for all.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.lines import Line2D
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'phasicrl[plot]'") from None

    env_ids = list(dict.fromkeys(curve.env_id for curve in curves))
    columns = len(env_ids) if len(env_ids) <= 3 else min(4, math.ceil(math.sqrt(len(env_ids))))
    rows = math.ceil(len(env_ids) / columns)
    width, height = (6.4, 3.7) if len(env_ids) == 1 else (max(6.4, 3.2 * columns), 2.5 * rows + 0.3)
    letters = int(_LETTERS_PER_INCH * width)
    legend, about, legend_columns = _legend(curves, letters)
    lines = sum(text.count("\n") + 1 for text in legend.values())
    total_height = height + _INCHES_PER_LINE * (math.ceil(lines / legend_columns) + bool(about))
    looks = _looks(list(legend))
    with rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
        figure = Figure(figsize=(width, total_height), layout=layout)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for index, env_id in enumerate(env_ids):
            panel = panels[index]
            _draw_panel(panel, [curve for curve in curves if curve.env_id == env_id], looks)
            panel.set_title(env_id)
            panel.set_xlabel("environment steps" if index + columns >= len(env_ids) else "")
        for panel in panels[len(env_ids) :]:
            panel.set_axis_off()
        middle = 1 - 0.5 * height / total_height  # of the panels
        figure.supylabel(y_label, y=middle, fontsize=STYLE["axes.labelsize"])
        if title:
            figure.suptitle(title)
        figure.legend(  # below all panels: it says too much to fit into one
            handles=[Line2D([], [], label=text, **looks[key]) for key, text in legend.items()],
            title=about, ncols=legend_columns, loc="outside lower center", frameon=False,
            handlelength=3,
        )  # fmt: skip
    return figure


def _legend(curves: list[Curve], letters: int) -> tuple[dict[tuple[str, bool], str], str, int]:
    """The legend's texts, what is said once for all of them, and in how many columns they fit.

    Args:
        curves: that are drawn.
        letters: that fit into a line.
    """
    texts = legend_texts(curves)
    (about, *others) = {text.removeprefix(f"{key[0]}: ") for key, text in texts.items()}
    if others or len(texts) == 1:
        return {key: textwrap.fill(text, letters) for key, text in texts.items()}, "", 1
    longest = max(len(label) for label, _ in texts)
    columns = max(1, min(len(texts), (letters + 10) // (longest + 10)))  # 10: a line and a gap
    return {key: textwrap.fill(key[0], letters) for key in texts}, about, columns


def legend_texts(curves: list[Curve]) -> dict[tuple[str, bool], str]:
    """Legend by (label, published): what its curves are, and where if that differs."""
    abouts: dict[tuple[str, bool], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for curve in curves:
        abouts[curve.label, curve.published][curve.about].append(curve.env_id.rpartition(":")[2])
    texts = {}
    for key, where in abouts.items():
        parts = [f"{about} ({', '.join(games)})" for about, games in where.items()]
        texts[key] = f"{key[0]}: {'; '.join(parts if len(where) > 1 else where)}"
    return texts


STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 10, "legend.fontsize": 9,
    "figure.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#E5E5E5", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.edgecolor": "#666666", "xtick.color": "#333333", "ytick.color": "#333333",
    "svg.hashsalt": "phasicrl",
}  # fmt: skip


def _looks(keys: list[tuple[str, bool]]) -> Looks:
    """Color and dashes by (label, published), the same in every panel.

    Ours are solid. Published ones are dashed, and the first is gray.
    """
    ours = cycle(product(("-", *_DASHES), COLORS))
    num_ours = sum(not published for _, published in keys)
    unused = ("#4D4D4D", *(COLORS[num_ours:] or COLORS))
    theirs = zip(cycle(_DASHES), cycle(unused), strict=False)
    looks: Looks = {}
    for key in keys:
        dashes, color = next(theirs if key[1] else ours)
        width = 1.4 if key[1] else 1.8
        looks[key] = {"color": color, "linestyle": dashes, "linewidth": width}
    return looks


def _draw_panel(panel: Axes, curves: list[Curve], looks: Looks) -> None:
    for curve in curves:
        look = looks[curve.label, curve.published]
        color = look["color"]
        marker = {"marker": "o", "markersize": 4} if len(curve.steps) == 1 else {}
        panel.plot(curve.steps, curve.mean, zorder=2 if curve.published else 3, **look, **marker)
        if curve.band_name:
            panel.fill_between(
                curve.steps, *curve.band, color=color, alpha=0.18, linewidth=0, zorder=1
            )
            panel.plot(curve.steps, curve.runs.T, linewidth=0.6, alpha=0.4, color=color, zorder=1.5)
    panel.locator_params(axis="x", nbins=6)
    panel.xaxis.set_major_formatter(lambda step, _: steps_text(step))
    panel.margins(x=0.01)
    panel.set_xlim(left=0)


def steps_text(steps: float) -> str:
    """A number of steps as on an axis: 0, 500, 20k, 2.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(steps) >= size:
            return f"{steps / size:.10g}{unit}"
    return f"{steps:.10g}"


def axis_label(metric: str, smooth_steps: int) -> str:
    """What a metric is called beside an axis."""
    label = _AXIS_LABELS.get(metric, metric.rpartition("/")[2].replace("_", " "))
    return f"{label}\n(mean over {steps_text(smooth_steps)} steps)" if smooth_steps else label


def save_figure(figure: Figure, stem: Path, about: str) -> list[Path]:
    """Write a figure as PNG and SVG; the same data gives the same files, fit for version control.

    Returns:
        The images, whose names are the stem's with their endings behind it.
    """
    from matplotlib import rc_context

    png, svg = (stem.with_name(stem.name + ending) for ending in (".png", ".svg"))
    with rc_context(STYLE):
        figure.savefig(png, dpi=200, metadata={"Software": "phasicrl", "Description": about})
        figure.savefig(svg, metadata={"Creator": "phasicrl", "Description": about, "Date": None})
    return [png, svg]
