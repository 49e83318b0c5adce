"""Figures of learning curves: panels, legends, and the files."""

import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from phasicrl.config import PPOConfig
from phasicrl.lab.analysis import plot
from phasicrl.lab.analysis.compare import compare_runs
from phasicrl.lab.analysis.curves import Curve, Task
from phasicrl.lab.analysis.plot import draw_curves, plot_runs
from phasicrl.lab.analysis.report import write_report
from phasicrl.lab.experiments.run_suite import run_suite
from phasicrl.training.bootstrap import bootstrap_mean_interval
from tests.helpers import mark_long
from tests.lab.analysis.runs import RETURN, make_run, make_runs, numbers, own_curve, read_csv

pytest.importorskip("matplotlib")


def curve(label: str, runs: int = 1, task: str = "a", **more: Any) -> Curve:
    return Curve(label, Task(task), np.arange(2.0), np.ones((runs, 2)), **more)


def test_the_csv_holds_means_and_intervals_over_seeds(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, [1.0, 4.0], [2.0, 6.0], [6.0, 11.0])
    rows = read_csv(plot_runs(runs, output=tmp_path / "curve")[2])
    assert numbers(rows, "env_steps") == [100, 200] and numbers(rows, "mean") == [3.0, 7.0]
    intervals = list(zip(numbers(rows, "low"), numbers(rows, "high"), strict=True))
    assert intervals == [
        pytest.approx(bootstrap_mean_interval(values)) for values in ([1, 2, 6], [4, 6, 11])
    ]
    columns = ("metric", "env_id", "distribution", "curve", "published", "num_runs")
    assert {tuple(row[name] for name in columns) for row in rows} == {
        (RETURN, "procgen:starpilot", "easy", "demo", "0", "3")
    }
    rows = read_csv(plot_runs(runs[:1], output=tmp_path / "one")[2])
    assert [(row["mean"], row["low"], row["band"]) for row in rows] == [
        ("1.0", "", ""), ("4.0", "", "")
    ]  # fmt: skip


MANY = "95 % bootstrap interval of the mean"
THIN = "thin: single runs; band: "


@pytest.mark.parametrize(("curves", "lines", "title"), [
    ([curve("ppg")], ["ppg (one run)"], ""),
    ([curve("ppg", 2)], ["ppg (2 runs)"], f"{THIN}minimum to maximum"),
    ([curve("a", 3), curve("b", 5)], ["a (3 runs)", "b (5 runs)"], THIN + MANY),
    ([curve(x, 3) for x in "abc"], [f"{x} (3 runs)" for x in "abc"], f"band: {MANY}"),
    (
        [curve("a", 1, "x"), curve("a", 2, "y"), curve("b", 1, "x", is_published=True)],
        ["a (one run or 2 runs)", "b (published: one run)"],
        f"{THIN}minimum to maximum",
    ),
])  # fmt: skip
def test_the_legend_has_runs_and_bands(curves: list[Curve], lines: list[str], title: str) -> None:
    figure = draw_curves(curves, "return", None)
    (legend,) = figure.legends
    has_thin_lines = any(line.get_alpha() for panel in figure.axes for line in panel.lines)
    assert has_thin_lines == ("thin" in title)
    assert [entry.get_text() for entry in legend.get_texts()] == lines
    assert legend.get_title().get_text() == title


def test_long_titles_and_legends_stay_within_the_figure() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    title = "fig5: policy iterations N_π before each auxiliary phase (PPG paper, figure 5)"
    figure = draw_curves([curve("x" * 60 + " y" * 20), curve("z", 3)], "return", title)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer: Any = canvas.get_renderer()
    heading = next(text for text in figure.texts if text.get_text().startswith("fig5"))
    (panel,), (legend,) = figure.axes, figure.legends
    boxes = [each.get_window_extent(renderer) for each in (legend, panel, heading)]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert boxes[0].y0 >= 0 and boxes[0].y1 < boxes[1].y0 and boxes[1].y1 < boxes[2].y0
    assert boxes[1].height > 0.5 * 3.7 * figure.dpi, "the panel keeps its height"


@pytest.mark.parametrize("panels", [1, 2, 3, 5, 16])
def test_each_environment_has_a_panel_with_its_curves_and_the_target(panels: int) -> None:
    curves = [curve(label, task=str(number)) for number in range(panels) for label in "ab"]
    shown = [panel for panel in draw_curves(curves, "return", None, 7.5).axes if panel.axison]
    assert [panel.get_title() for panel in shown] == [str(number) for number in range(panels)]
    for panel in shown:
        *lines, target = panel.lines
        assert len(lines) == 2
        assert target.get_linestyle() == ":" and list(np.asarray(target.get_ydata())) == [7.5] * 2
    assert panels == 1 or "environment steps" in {panel.get_xlabel() for panel in shown}
    assert not any(
        line.get_linestyle() == ":"
        for panel in draw_curves(curves, "return", None).axes
        for line in panel.lines
    )


@pytest.mark.parametrize(
    ("arms", "tasks"), [(10, "x"), (10, "xy"), (11, "xy"), *mark_long([(40, "x")])]
)
def test_many_arms_are_drawn_in_small_panels_of_distinct_colors(arms: int, tasks: str) -> None:
    ours = [curve(f"clip {x}", 3, task, experiment="demo") for task in tasks for x in range(arms)]
    theirs = [curve(f"theirs {i}", 1, task, is_published=True) for task in tasks for i in range(9)]
    for drawn, published in ((ours, 0), (ours + theirs, 9)):
        figure = draw_curves(drawn, "return", None)
        panels = [panel for panel in figure.axes if panel.axison]
        split = arms + published > 10
        assert len(panels) == len(tasks) * (arms if split else 1)
        for panel in panels:
            lines = [line for line in panel.lines if line.get_alpha() is None]
            assert len(lines) == (1 if split else arms) + published
            assert len({line.get_color() for line in lines}) == len(lines)
        (legend,) = figure.legends
        named = [text.get_text() for text in legend.get_texts()] + [p.get_title() for p in panels]
        for label in (f"clip {arm}" for arm in range(arms)):  # once in each panel or in the legend
            wanted = len(tasks) if split else 1
            assert sum(text.startswith((f"{label} ", f"{label}, ")) for text in named) == wanted
        said = figure.get_suptitle() + "".join(named)
        assert said.count("demo") == 1 and "x" in said


def test_panels_without_a_line_show_their_steps_and_runs() -> None:
    """No episode has ended, or all runs have one row: a point each, and a bar as their band."""
    endless = Curve("no end", Task("a"), np.array([9.0, 1e4]), np.full((3, 2), np.nan))
    single = Curve("one row", Task("b"), np.array([1e3]), np.array([[1.0], [2.0], [6.0]]))
    first, second = draw_curves([endless, single], "return", None).axes
    assert first.get_xlim() == (0, 10_100) and second.get_xlim() == (0, 1_010)
    assert len(second.lines) == 4 and all(line.get_marker() == "o" for line in second.lines)
    assert np.max(second.collections[0].get_linewidth()) > 1


def test_panels_of_one_task_have_one_scale() -> None:
    runs = [Curve(f"{i}", Task("a"), np.arange(2.0), np.full((1, 2), 10.0**i)) for i in range(11)]
    panels = [panel for panel in draw_curves(runs, "return", None).axes if panel.axison]
    assert len({panel.get_ylim() for panel in panels}) == 1 and panels[0].get_ylim()[1] > 1e10


@pytest.mark.parametrize("arms", [9, 12])
def test_profiles_of_many_arms_have_distinct_colors_or_panels(
    arms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, *_: figures.append(figure) or [])
    runs = [make_run(tmp_path / f"{arm}", [(1, float(arm))], ppo=PPOConfig(clip=0.1 + arm / 100))
            for arm in range(arms)]  # fmt: skip
    compare_runs(runs, output=tmp_path / "profiles")
    panels = [panel for panel in figures[0].axes if panel.axison]
    assert [len(panel.lines) for panel in panels] == ([9] if arms == 9 else [1] * 12)
    assert len({line.get_color() for panel in panels for line in panel.lines}) == arms
    assert {panel.get_title() == "" for panel in panels} == {arms == 9}
    one_run = make_run(tmp_path / "one run", [(1, 2.0)], name="_base")  # as in solved arms
    compare_runs([one_run], output=tmp_path / "of one run")
    (line,), (legend,) = figures[1].axes[0].lines, figures[1].legends
    assert {*np.asarray(line.get_ydata())} == {0, 1}
    assert [text.get_text() for text in legend.get_texts()] == ["_base, 1 run"]


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0, "0"), (500, "500"), (1_000, "1k"), (2_500_000, "2.5M"), (12_345, "12.345k"), (1e9, "1G")],
)
def test_steps_on_the_axis(steps: float, text: str) -> None:
    assert plot.format_steps(steps) == text


@pytest.mark.long
def test_the_files_are_images_and_drawing_again_gives_equal_bytes(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, [1.0, 4.0], [2.0, 6.0], [3.0, 5.0])
    paths = plot_runs(runs, output=tmp_path / "new" / "lr0.001.png", title="Demo")
    assert [path.name for path in paths] == ["lr0.001.png", "lr0.001.svg", "lr0.001.csv"]
    head = paths[0].read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:24])[0] == 1280
    assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")
    before = [path.read_bytes() for path in paths]
    plot_runs(runs, output=tmp_path / "new" / "lr0.001", title="Demo")
    assert [path.read_bytes() for path in paths] == before


def test_ours_are_solid_published_ones_dashed_and_all_differ() -> None:
    keys = [("ppg", False), ("ppo", False), ("ppg", True), ("ppo", True), ("a", True)]
    styles = plot.assign_styles(keys)
    assert [styles[key]["linestyle"] == "-" for key in keys] == [True, True, False, False, False]
    assert len({styles[key]["color"] for key in keys}) == 5
    many = plot.assign_styles([(str(i), i % 4 == 3) for i in range(28)])
    assert len({style["color"] for style in many.values()}) == 28


def test_a_window_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smooth_steps is -1"):
        plot_runs(make_runs(tmp_path, [1.0]), output=tmp_path / "figure", smooth_steps=-1)
    assert not list(tmp_path.glob("figure*"))


def test_a_figure_of_runs_beside_a_curve_of_a_file(tmp_path: Path) -> None:
    """The curve is cut at our last step; metric and order of rows and columns are free."""
    path = own_curve(tmp_path / "theirs.csv", "200,7,1,2", "100,6,0,1", "300,9,9,9",
                     header="step,high,low,mean")  # fmt: skip
    metric = "losses/entropy"
    runs = make_runs(tmp_path, [1.0, 4.0], metric=metric)
    rows = read_csv(plot_runs(runs, output=tmp_path / "x", metric=metric, reference=path)[2])
    theirs = [row for row in rows if row["published"] == "1"]
    assert {row["curve"] for row in theirs} == {"theirs"}
    assert [numbers(theirs, name) for name in ("env_steps", "low", "mean", "high")] == [
        [100, 200], [0, 1], [1, 2], [6, 7],
    ]  # fmt: skip


def test_missing_matplotlib_fails_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, output = make_run(tmp_path / "run", [(1, 1.0)]), tmp_path / "output"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (
        lambda: plot_runs([run], output=output),
        lambda: compare_runs([run], output=output),
        lambda: write_report([run], output=output.with_suffix(".html")),
        lambda: run_suite("fig6", tasks=("cartpole",), output_dir=output),
    ):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'phasicrl\[lab\]'"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert compare_runs([run]).results, "tables alone need no matplotlib"


@pytest.mark.parametrize("begin", mark_long("=+-@", "="))
def test_no_name_is_a_formula_of_a_spreadsheet(tmp_path: Path, begin: str) -> None:
    name = f"{begin}1+1"
    runs = make_runs(tmp_path, [-1.0], name=name, env=f"{name}-v0")
    (row,) = read_csv(plot_runs(runs, output=tmp_path / "figure")[2])
    assert (row["curve"], row["env_id"], row["mean"]) == (f"'{name}", f"'{name}-v0", "-1.0")
    compare_runs(runs, output=tmp_path / "table")
    (row,) = read_csv(tmp_path / "table.csv")
    assert (row["experiment"], row["env_id"], row["score"]) == (f"'{name}", f"'{name}-v0", "-1.0")
