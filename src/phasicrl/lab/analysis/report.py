"""Report of runs: report.html, a single file without links to others.

Kind: effects (writes a file).
"""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from phasicrl import Config
from phasicrl.config import format_value
from phasicrl.config_io import atomic_write
from phasicrl.lab.analysis import curves
from phasicrl.lab.analysis.curves import Array, Points
from phasicrl.lab.analysis.diagnosis import MIN_VALUES, Finding, diagnose
from phasicrl.lab.analysis.plot import MAX_CURVES, extend_colors, format_steps, require_matplotlib
from phasicrl.presets import PRESETS
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import METRICS
from phasicrl.system.machine import import_optional

REPORT_FILE = "report.html"
GROUPS: dict[str, tuple[str, ...]] = {
    "Returns": ("charts/episodic_return_100", "charts/episodic_length", "evaluation/return",
                "evaluation/train_return", "evaluation/best_return", "procgen/level_complete"),
    "Policy": ("losses/entropy", "losses/action_std", "losses/approx_kl", "losses/clipfrac",
               "gradients/policy_norm", "network/dormant_fraction",
               "observations/clipped_fraction"),
    "Values": ("losses/explained_variance", "losses/value_loss", "gradients/value_norm",
               "rewards/clipped_fraction"),
    "Auxiliary phase": ("losses/aux/kl_loss", "losses/aux/aux_value_loss",
                        "losses/aux/real_value_loss", "gradients/aux_norm"),
    "Speed": ("charts/SPS",),
}  # fmt: skip
"""Curves of the page, in order."""
TIMES = ("rollout", "policy", "value", "auxiliary", "evaluation")
_LIGHT_COLORS = ("#0072B2", "#D55E00", "#00875F", "#B8568F", "#A36F00", "#6B4FBB", "#6B6B6B")
_DARK_COLORS = ("#4AA8E0", "#E8762B", "#2DBE92", "#DB93BB", "#E69F00", "#A99BE8", "#A8A8A8")
"""Colors of runs and of parts of the time, with a contrast of at least 3 (WCAG 1.4.11)."""
# Color in drawings, replaced by the page's own, which depends on its light or dark theme. So are
# the colors of runs, "#04" and the index of the run.
_INK = "#010203"
_MAX_POINTS, _MAX_VIDEOS, _MAX_VIDEO_BYTES = 800, 6, 30_000_000
_SMOOTHED_SHARE = 0.05
"""Share of the budget over which the bold lines are averaged."""


@dataclass(frozen=True, eq=False)
class _ReportedRun:
    """A run on the page."""

    run_directory: RunDirectory
    config: Config
    name: str
    index: int

    @property
    def color(self) -> str:
        return f"var(--color{self.index % MAX_CURVES})"

    @cached_property
    def metric_rows(self) -> list[dict[str, float]]:
        """Metrics of the page, one row for each iteration."""
        names = [*sum(GROUPS.values(), ()), *self.extra_metrics, *(f"time/{x}" for x in TIMES)]
        return self.run_directory.metrics(*names, "time/total", "charts/num_episodes")

    @cached_property
    def extra_metrics(self) -> list[str]:
        """Names of the run's other metrics: of callbacks, and of `evaluation.env_ids`."""
        found = {name for row in self.run_directory.metrics() for name in row if "/" in name}
        return sorted(found - {*METRICS})

    def get_points(self, metric: str) -> Points:
        """Return the steps and values of a metric in the rows where the metric is finite."""
        return curves.extract_points(self.metric_rows, metric)

    def _sum_times(self, *times: str) -> float:
        return float(sum(self.get_points(f"time/{part}")[1].sum() for part in times))

    @cached_property
    def findings(self) -> list[Finding]:
        names = {name for row in self.metric_rows for name in row if "/" in name}
        columns = {name: self.get_points(name)[1] for name in names}
        return diagnose(columns, self.config, diverged="diverged" in self.run_directory.card)

    @property
    def key_figures(self) -> dict[str, str]:
        """Formatted numbers at the top of the page, by caption."""
        steps, training = self.metric_rows[-1]["env_steps"], self._sum_times("total")
        facts = {"steps": f"{steps:,.0f} of {self.config.total_env_steps:,}"}
        for text, metric in (
            ("return, last 100 episodes", "charts/episodic_return_100"),
            ("evaluated", "evaluation/return"), ("best evaluated", "evaluation/best_return"),
        ):  # fmt: skip
            if len(values := self.get_points(metric)[1]):
                facts[text] = f"{values[-1]:.4g}"
            elif metric.startswith("charts/"):
                facts[text] = "no episode has ended"
        return facts | {
            "time": str(timedelta(seconds=round(training + self._sum_times("evaluation")))),
            "steps per second of training": f"{steps / training:,.0f}" if training else "unknown",
        }

    @property
    def time_shares(self) -> list[tuple[str, float]]:
        """Parts of the run's wall time, such as `rollout`, with their fractions; `else` is last."""
        total = self._sum_times("total", "evaluation") or 1.0
        shares = [(part, self._sum_times(part) / total) for part in TIMES]
        shares.append(("else", max(0.0, 1 - sum(share for _, share in shares))))
        return [(part, share) for part, share in shares if share > 0.001]

    @property
    def option_rows(self) -> list[tuple[str, str, str]]:
        """Options of the run: path, value, and the preset's value where it differs."""
        values, preset = self.config.values(), PRESETS.get(self.config.name)
        usual = preset.config.values() if preset else values
        return [
            (path, format_value(x), "" if x == usual.get(path) else format_value(usual.get(path)))
            for path, x in values.items()
        ]

    @property
    def provenance(self) -> dict[str, str]:
        """Commit, device, command, machine and versions of the run."""
        card = self.run_directory.card
        known = {name: card.get(name) for name in ("commit", "device", "environment")}
        command = " ".join(map(str, card.get("command") or []))
        parts = [card.get(name) or {} for name in ("machine", "versions")]
        known |= {"command": command, **parts[0], **parts[1]}
        return {name: str(value) for name, value in known.items() if value}

    @property
    def videos(self) -> list[tuple[str, str]]:
        """Names of the run's last videos, each with its content as a data URL."""
        films = sorted(self.run_directory.path.glob("videos/*.mp4"))
        small = [path for path in films if path.stat().st_size <= _MAX_VIDEO_BYTES]
        return [
            (path.name, f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}")
            for path in small[-_MAX_VIDEOS:]
        ]


def write_report(runs: Sequence[Path], *, output: Path | None = None) -> Path:
    """Write a page about a run, or about several side by side.

    Args:
        runs: Run directories, finished or not, or the directory of a sweep.
        output: File to write; none: `report.html` in the directory, or here for several.

    Returns:
        The written file.

    Raises:
        ValueError: `runs` is empty, no run has data, or the output is not an .html file.
        ModuleNotFoundError: Jinja or matplotlib is not installed.
    """
    jinja2 = import_optional("jinja2", "reports need jinja2")
    require_matplotlib()
    found = [RunDirectory.find(run) for run in runs]
    given = [*dict.fromkeys(each.path.resolve() for each in found)]
    folder = found[0].output_folder.resolve() if len(given) == 1 else Path()
    path = Path(output or folder / REPORT_FILE)
    if path.suffix != ".html":
        raise ValueError(f"output is {path}; expected a name with the ending .html")
    for run in given:  # which may come from somebody else
        RunDirectory(run).reject_special_files()
    for run in (members := curves.expand_sweeps(given)):
        RunDirectory(run).reject_special_files()
    labeled_runs = curves.label_runs(members)
    has_tasks = len({each.task for each in labeled_runs.values()}) > 1
    reported_runs: list[_ReportedRun] = []
    for run, each in labeled_runs.items():
        number = f"{len(reported_runs) + 1}. " * (len(labeled_runs) > MAX_CURVES)
        name = f"{number}{each.label}{f' on {each.task}' * has_tasks}, seed {each.config.seed}"
        name = name if len(labeled_runs) > 1 else run.name
        reported_runs.append(_ReportedRun(RunDirectory(run), each.config, name, len(reported_runs)))
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = pages.get_template("report.html.j2").render(
        reported_runs=reported_runs, groups=_draw_figures(reported_runs), min_values=MIN_VALUES,
        differing=_find_differences(reported_runs), presets=PRESETS, labeled_runs=labeled_runs,
        light_colors=extend_colors(MAX_CURVES, _LIGHT_COLORS, 0.33),
        dark_colors=extend_colors(MAX_CURVES, _DARK_COLORS, 0.68),
        shades={part: f"var(--color{index})" for index, part in enumerate((*TIMES, "else"))},
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _find_differences(reported_runs: Sequence[_ReportedRun]) -> dict[str, list[str]]:
    """Find the options in which runs differ; returns the values of the runs by option."""
    values = [each.config.values() for each in reported_runs]
    paths = dict.fromkeys(path for each in values for path in each)
    rows = {path: [format_value(each.get(path)) for each in values] for path in paths}
    return {path: row for path, row in rows.items() if len(set(row)) > 1}


def _draw_figures(reported_runs: Sequence[_ReportedRun]) -> dict[str, list[tuple[str, str]]]:
    """Draw all metrics of the runs, at most `MAX_CURVES` in a figure, by group and caption."""
    window = round(_SMOOTHED_SHARE * max(each.config.total_env_steps for each in reported_runs))
    figures_by_group: dict[str, list[tuple[str, str]]] = {}
    parts = [reported_runs[i : i + MAX_CURVES] for i in range(0, len(reported_runs), MAX_CURVES)]
    extra = tuple(dict.fromkeys(name for each in reported_runs for name in each.extra_metrics))
    for group, metrics in {**GROUPS, "Others": extra}.items():
        for metric, part in product(metrics, parts):
            series = [(each.index % MAX_CURVES, each.get_points(metric)) for each in part]
            missing = [np.isnan(row.get(metric, 0.0)) for each in part for row in each.metric_rows]
            undefined = f", undefined in {sum(missing)} of {len(missing)} iterations"
            caption = metric + undefined * any(missing)
            caption += f", runs {part[0].index + 1} to {part[-1].index + 1}" * (len(parts) > 1)
            xys = np.concatenate([np.stack(each.get_points(metric), 1) for each in reported_runs])
            drawing = _draw_figure(series, window, xys) if len(xys) else ""
            if drawing or any(missing):
                figures_by_group.setdefault(group, []).append((caption, drawing))
    return figures_by_group


def _draw_figure(series: Sequence[tuple[int, Points]], window: int, xys: Array) -> str:
    """Draw curves, by index of the run, as SVG in the colors of the page.

    Args:
        series: curves by index of the run.
        window: environment steps over which the bold lines are averaged.
        xys: points `[N, 2]` that the axes contain.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rc_settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "phasicrl", "font.family": "sans-serif",
        "text.color": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with mpl.rc_context(rc_settings):
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        axes = figure.add_subplot()
        axes.update_datalim(xys)
        for index, points in series:
            count = len(points[0])
            drawn = np.linspace(0, count - 1, min(count, _MAX_POINTS)).round().astype(int)
            for (steps, values), width, alpha in (
                (points, 0.6, 0.5), (curves.smooth(points, window), 1.6, 1.0)
            ):  # fmt: skip
                line_kwargs: Any = {"color": f"#04{index:04x}", "linewidth": width, "alpha": alpha}
                axes.plot(steps[drawn], values[drawn], "o" * (count == 1), **line_kwargs)
        if not any(values.any() for _, (_, values) in series):
            axes.set_ylim(-0.02, 1)  # a share that is always 0, not ± 0.05 around it
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda steps, _: format_steps(steps))
        axes.locator_params(nbins=5)
        axes.tick_params(labelsize=9)
        axes.patch.set_alpha(0)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return re.sub("#04([0-9a-f]{4})", lambda found: f"var(--color{int(found[1], 16)})", svg)
