"""A page about runs: report.html, one file that loads nothing from elsewhere.

Kind: effects (writes a file).
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phasicrl.config import Config, format_value
from phasicrl.config_io import replacing
from phasicrl.host.machine import optional_module
from phasicrl.lab.analysis.diagnosis import Array, Finding, diagnose
from phasicrl.lab.analysis.plot import Points, axis_label, smoothed, steps_text
from phasicrl.presets import PRESETS, differences
from phasicrl.runs.directory import RunDirectory, each_once
from phasicrl.runs.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "report.html"
GROUPS: dict[str, tuple[str, ...]] = {
    "Returns": ("charts/episodic_return_100", "charts/episodic_length", "evaluation/return",
                "evaluation/train_return", "procgen/level_complete"),
    "Policy": ("losses/entropy", "losses/action_std", "losses/approx_kl", "losses/clipfrac",
               "gradients/policy_norm", "network/dormant_fraction",
               "observations/clipped_fraction"),
    "Values": ("losses/explained_variance", "losses/value_loss", "gradients/value_norm",
               "rewards/clipped_fraction"),
    "Auxiliary phase": ("losses/aux/kl_loss", "losses/aux/aux_value_loss",
                        "losses/aux/real_value_loss", "gradients/aux_norm"),
    "Speed": ("charts/SPS",),
}  # fmt: skip
"""Which curves the page has, in which order."""
EVALUATED = {
    "evaluation/return": "return", "evaluation/length": "length",
    "evaluation/train_return": "return on the training's levels", "evaluation/gap": "gap",
    "evaluation/best_return": "best return so far",
}  # fmt: skip
"""Columns of the table of evaluations."""
TIMES = ("rollout", "policy", "value", "auxiliary", "evaluation")
_PARTS = (*TIMES, "else")
_ON_LIGHT = ("#0072B2", "#D55E00", "#00875F", "#B8568F", "#A36F00", "#6B4FBB", "#6B6B6B")
_ON_DARK = ("#4AA8E0", "#E8762B", "#2DBE92", "#DB93BB", "#E69F00", "#A99BE8", "#A8A8A8")
"""Of runs, and parts of the time; each stands out from its page by a ratio of 3 (WCAG 1.4.11)."""
_COLORS = [f"var(--color{index})" for index in range(len(_ON_LIGHT))]
# What is drawn becomes the page's own colors, which follow light and dark.
_INK = "#010203"
_DRAWN = {color: f"#0405{index:02x}" for index, color in enumerate(_COLORS)}
_MOST_POINTS, _MOST_EVALUATIONS = 800, 12
_MOST_VIDEO_BYTES, _MOST_VIDEOS = 30_000_000, 6
_VIDEOS = {".mp4": "video/mp4", ".gif": "image/gif"}


@dataclass(frozen=True, eq=False)
class _Subject:
    """A run as the page shows it."""

    files: RunDirectory
    color: str

    @cached_property
    def config(self) -> Config:
        return self.files.config

    @cached_property
    def card(self) -> dict[str, Any]:
        return self.files.card

    @property
    def name(self) -> str:
        return self.files.path.resolve().name

    @cached_property
    def _rows(self) -> list[dict[str, float]]:
        names = [name for group in GROUPS.values() for name in group]
        times = [f"time/{part}" for part in TIMES]
        return self.files.metrics(*names, *times, "time/total", *EVALUATED)

    def points(self, metric: str) -> Points:
        """Steps and values of a metric, where it is a number."""
        pairs = [(row["env_steps"], row.get(metric, math.nan)) for row in self._rows]
        known = [(step, x) for step, x in pairs if isinstance(x, int | float) and math.isfinite(x)]
        steps, values = np.array(known, float).reshape(-1, 2).T
        return steps, values

    @cached_property
    def findings(self) -> list[Finding]:
        names = METRICS.keys() & {name for row in self._rows for name in row}
        return diagnose({name: self.points(name)[1] for name in names}, self.config)

    @property
    def facts(self) -> dict[str, str]:
        """What is said first."""
        steps, total = self._rows[-1]["env_steps"], self.config.total_env_steps
        facts = {"steps": f"{steps:,.0f} of {total:,}"}
        for text, metric in (
            ("return, last 100 episodes", "charts/episodic_return_100"),
            ("evaluated", "evaluation/return"), ("best evaluated", "evaluation/best_return"),
        ):  # fmt: skip
            if len(values := self.points(metric)[1]):
                facts[text] = f"{values[-1]:.4g}"
        training = float(self.points("time/total")[1].sum())
        return facts | {
            "time": _duration(self._seconds),
            "steps per second of training": f"{steps / training:,.0f}" if training else "unknown",
        }

    @property
    def _seconds(self) -> float:
        """Of all iterations, and of the evaluations after them."""
        return float(sum(self.points(f"time/{of}")[1].sum() for of in ("total", "evaluation")))

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """What evaluations in the run said: at most so many of them, the first and last always."""
        rows = [row for row in self._rows if math.isfinite(row.get("evaluation/return", math.nan))]
        kept = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_EVALUATIONS)).round().astype(int)
        return [rows[index] for index in kept]

    @property
    def evaluated(self) -> dict[str, str]:
        """The columns that the evaluations have, and what they are called."""
        held = {name for row in self.evaluations for name, value in row.items() if value == value}
        return {name: title for name, title in EVALUATED.items() if name in held}

    @property
    def times(self) -> list[tuple[str, float]]:
        """Parts of the time with their shares, the rest last."""
        total = self._seconds or 1.0
        shares = [(part, float(self.points(f"time/{part}")[1].sum()) / total) for part in TIMES]
        shares.append(("else", max(0.0, 1 - sum(share for _, share in shares))))
        return [(part, share) for part, share in shares if share > 0.001]

    @property
    def base(self) -> str:
        """The preset that the settings are held against."""
        return self.config.name if self.config.name in PRESETS else ""

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """Path and value of each field, and the preset's where that is another."""
        preset = PRESETS[self.base].config if self.base else None
        others = differences(self.config, preset) if preset else {}
        return [
            (path, format_value(value), format_value(others[path][0]) if path in others else "")
            for path, value in self.config.values().items()
        ]

    @property
    def versions(self) -> dict[str, str]:
        """What the run was made with."""
        machine = self.card.get("machine", {})
        known = {
            "command": " ".join(map(str, self.card.get("command", []))),
            "commit": self.card.get("commit"), "device": self.card.get("device"),
            "environment": self.card.get("environment"), **machine, **self.card.get("versions", {}),
        }  # fmt: skip
        return {name: str(value) for name, value in known.items() if value}

    @property
    def videos(self) -> list[tuple[str, str, str]]:
        """Name, kind and content, as an address, of the last films in the run directory."""
        below = self.files.path
        found = [
            path
            for path in sorted((*below.glob("*"), *below.glob("videos/*")))
            if path.suffix in _VIDEOS and path.is_file()
            if path.stat().st_size <= _MOST_VIDEO_BYTES
        ]
        return [
            (str(path.relative_to(below)), _VIDEOS[path.suffix], _as_address(path))
            for path in found[-_MOST_VIDEOS:]
        ]


def write_report(
    runs: Sequence[Path], *, output: Path | None = None, smooth_share: float = 0.05
) -> Path:
    """Write a page about a run, or about several side by side.

    Args:
        runs: run directories, finished or not.
        output: file to write; none: `report.html` in the directory of the run, or here if there are
            several.
        smooth_share: part of the budget over which the bold lines are means; thin ones are raw.

    Returns:
        The file that was written.

    Raises:
        ValueError: no run, one without any data, an output that is no .html, or a share outside of
            0 to 1.
    """
    jinja2 = optional_module("jinja2", "reports need jinja2", "plot")
    if not runs:
        raise ValueError("give at least one run directory")
    if output is not None and output.suffix != ".html":
        raise ValueError(f"{output}: pages end with .html")
    if not 0 <= smooth_share <= 1:
        raise ValueError(f"--smooth-share is from 0 to 1; given was {smooth_share:g}")
    runs = each_once(runs)
    for run in runs:
        RunDirectory(run).refuse_special_files()  # somebody else may have made it
    subjects = [
        _Subject(RunDirectory(run), color) for run, color in zip(runs, cycle(_COLORS), strict=False)
    ]
    template = resources.files("phasicrl.lab.analysis").joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(template).render(
        subjects=subjects, groups=_figures(subjects, smooth_share), differing=_differing(subjects),
        on_light=_ON_LIGHT, on_dark=_ON_DARK, shades=dict(zip(_PARTS, _COLORS, strict=False)),
    )  # fmt: skip
    path = output or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _differing(subjects: Sequence[_Subject]) -> dict[str, list[str]]:
    """Fields in which runs differ, with the value of each."""
    values = [subject.config.values() for subject in subjects]
    paths = {path: None for fields in values for path in fields}
    return {
        path: [format_value(fields.get(path)) for fields in values]
        for path in paths
        if len({format_value(fields.get(path)) for fields in values}) > 1
    }


def _figures(subjects: Sequence[_Subject], share: float) -> dict[str, list[tuple[str, str]]]:
    """Title and drawing of each curve that any of the runs has, by group."""
    figures: dict[str, list[tuple[str, str]]] = {}
    for group, metrics in GROUPS.items():
        for metric in metrics:
            series = [(subject.color, subject.points(metric)) for subject in subjects]
            if any(len(values) > 1 for _, (_, values) in series):
                window = share * max(subject.config.total_env_steps for subject in subjects)
                drawn = _draw(series, round(window))
                figures.setdefault(group, []).append((axis_label(metric, 0), drawn))
    return figures


def _draw(series: Sequence[tuple[str, Points]], window: int) -> str:
    """An SVG drawing whose ink has the color of the text around it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "phasicrl", "font.family": "sans-serif",
        "text.color": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        axes: Axes = figure.add_subplot()
        for name, points in series:
            color = _DRAWN[name]
            axes.plot(*_thinned(points), color=color, linewidth=0.6, alpha=0.5)
            axes.plot(*_thinned(smoothed(points, window)), color=color, linewidth=1.6)
        if not any(values.any() for _, (_, values) in series):
            axes.set_ylim(-0.02, 1)  # a share that is always 0, not ± 0.05 around it
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda steps, _: steps_text(steps))
        axes.locator_params(nbins=5)
        axes.tick_params(labelsize=9)
        axes.patch.set_alpha(0)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    for name, color in _DRAWN.items():
        svg = svg.replace(color, name)
    return svg


def _thinned(points: Points) -> tuple[Array, Array]:
    """No more points than a screen can show."""
    steps, values = points
    if len(steps) > _MOST_POINTS:
        kept = np.linspace(0, len(steps) - 1, _MOST_POINTS).round().astype(int)
        return steps[kept], values[kept]
    return steps, values


def _as_address(path: Path) -> str:
    """A file's content as an address that a browser reads."""
    return f"data:{_VIDEOS[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
