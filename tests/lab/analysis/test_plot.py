"""Learning curves: what is averaged, what the band is called, and the files behind a image."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from phasicrl.cli import main
from phasicrl.config import AuxConfig, CheckpointConfig, Config, EnvConfig, PPOConfig
from phasicrl.lab.analysis import plot
from phasicrl.lab.analysis.compare import compare_runs
from phasicrl.lab.analysis.plot import plot_runs, run_curves
from phasicrl.lab.analysis.references import REFERENCES
from phasicrl.session.bootstrap import bootstrap_interval

pytest.importorskip("matplotlib")

RETURN = "charts/episodic_return_100"
HEADER = "experiment,run,game,step,episodic_return\n"
STARPILOT = plot.Task("procgen:starpilot", "easy")


def make_run(
    folder: Path,
    points: Sequence[tuple[int, float | None]],
    *,
    metric: str = RETURN,
    env: str | EnvConfig = "procgen:starpilot",
    **settings: Any,
) -> Path:
    """A run directory with one number in each row."""
    folder.mkdir(parents=True)
    env = EnvConfig(id=env) if isinstance(env, str) else env
    config = Config(**{"name": "demo", **settings}, env=env)
    (folder / "config.json").write_text(config.to_json())
    rows = [
        {"env_steps": steps, "iteration": i, "phase": 0, "wall_time": float(i), metric: value}
        for i, (steps, value) in enumerate(points)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_runs(tmp_path: Path, *curves: Sequence[float], **settings: Any) -> list[Path]:
    """A run for each curve, with seeds 1, 2, … and rows at 100, 200, … steps."""
    return [
        make_run(
            tmp_path / f"run{seed}",
            [(100 * i, value) for i, value in enumerate(curve, start=1)],
            seed=seed,
            **settings,
        )
        for seed, curve in enumerate(curves, start=1)
    ]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    return [float(row[column]) for row in rows]


def test_the_csv_holds_means_and_intervals_over_seeds(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, [1.0, 4.0], [2.0, 6.0], [6.0, 11.0])
    rows = read_csv(plot_runs(runs, output=tmp_path / "curve")[2])
    assert numbers(rows, "env_steps") == [100, 200]
    assert numbers(rows, "mean") == [3.0, 7.0]
    intervals = list(zip(numbers(rows, "low"), numbers(rows, "high"), strict=True))
    assert intervals == [
        pytest.approx(bootstrap_interval(values)) for values in ([1, 2, 6], [4, 6, 11])
    ]
    assert {
        (row["metric"], row["env_id"], row["curve"], row["published"], row["num_runs"])
        for row in rows
    } == {(RETURN, "procgen:starpilot", "demo", "0", "3")}


def test_the_band_of_two_seeds_is_minimum_to_maximum_and_one_seed_has_none(tmp_path: Path) -> None:
    two = make_runs(tmp_path / "two", [1.0, 4.0], [3.0, 2.0])
    rows = read_csv(plot_runs(two, output=tmp_path / "two.png")[2])
    assert (numbers(rows, "mean"), numbers(rows, "low"), numbers(rows, "high")) == (
        [2.0, 3.0],
        [1.0, 2.0],
        [3.0, 4.0],
    )
    rows = read_csv(plot_runs(two[:1], output=tmp_path / "one.png")[2])
    assert [(row["mean"], row["low"], row["high"], row["band"]) for row in rows] == [
        ("1.0", "", "", ""),
        ("4.0", "", "", ""),
    ]


def test_runs_are_joined_on_one_grid_where_all_have_data(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", [(100, 0.0), (200, 10.0), (400, 30.0)], seed=1)
    second = make_run(tmp_path / "b", [(150, 4.0), (300, 7.0), (900, 100.0)], seed=2)
    said = r"^demo on procgen:starpilot \(easy\) is cut at 400 steps, where its shortest run ends"
    with pytest.warns(UserWarning, match=said):
        (curve,) = run_curves([first, second], RETURN)
    assert curve.steps.tolist() == [150, 200, 300, 400]
    assert curve.runs[0].tolist() == [5, 10, 20, 30]
    assert curve.runs[1].tolist() == pytest.approx([4, 5, 7, 7 + 93 / 6])


def test_a_run_that_is_a_little_shorter_is_no_note(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(end), [(50, 1.0), (end, 1.0)], seed=end) for end in (90, 100)]
    (curve,) = run_curves(runs, RETURN)
    assert curve.steps[-1] == 90


def test_rows_without_a_number_are_passed_over(tmp_path: Path) -> None:
    (curve,) = run_curves(
        [make_run(tmp_path / "a", [(100, None), (200, 1.0), (300, None), (400, 3.0)])], RETURN
    )
    assert curve.steps.tolist() == [200, 400] and curve.mean.tolist() == [1.0, 3.0]


def test_long_runs_are_thinned_but_keep_both_ends(tmp_path: Path) -> None:
    (curve,) = run_curves(make_runs(tmp_path, np.arange(5_000, dtype=float).tolist()), RETURN)
    assert len(curve.steps) == 1_000
    assert (curve.steps[0], curve.steps[-1], curve.mean[-1]) == (100, 500_000, 4_999)


def test_smoothing_is_the_mean_over_the_steps_before(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, [1.0, 3.0, 8.0, 0.0])
    (curve,) = run_curves(runs, RETURN, smooth_steps=200)
    assert curve.mean.tolist() == [1.0, 2.0, 5.5, 4.0]
    (curve,) = run_curves(runs, RETURN, smooth_steps=1_000)
    assert curve.mean.tolist() == [1.0, 2.0, 4.0, 3.0]


def test_experiments_and_environments_are_curves_and_panels_of_their_own(tmp_path: Path) -> None:
    points = [(100, 1.0), (200, 2.0)]
    runs = [
        make_run(tmp_path / f"{name}-{game}-{i}", points, name=name, env=f"procgen:{game}", seed=i)
        for name in ("ppg", "ppo")
        for game in ("starpilot", "heist")
        for i in (1, 2)
    ]
    curves = run_curves(runs, RETURN)
    assert [(curve.label, curve.env_id, len(curve.runs)) for curve in curves] == [
        ("ppg", "procgen:starpilot", 2),
        ("ppg", "procgen:heist", 2),
        ("ppo", "procgen:starpilot", 2),
        ("ppo", "procgen:heist", 2),
    ]
    figure = plot.draw_curves(curves, "return", "Two games")
    titles = [panel.get_title() for panel in figure.axes]
    assert titles == ["procgen:starpilot (easy)", "procgen:heist (easy)"]
    assert len(figure.legends[0].get_texts()) == 2


def test_runs_with_other_settings_are_not_averaged(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{rate}-{i}", [(1, 1.0)], seed=i, ppo=PPOConfig(learning_rate=rate))
        for rate in (1e-3, 1e-4)
        for i in (1, 2)
    ]
    curves = run_curves(runs, RETURN)
    assert [curve.label for curve in curves] == [
        "demo, ppo.learning_rate 0.001",
        "demo, ppo.learning_rate 0.0001",
    ]


def test_a_group_that_is_off_is_named_once(tmp_path: Path) -> None:
    ppg, ppo = (
        make_run(tmp_path / "a", [(1, 1.0)], aux=AuxConfig(epochs=6)),
        make_run(tmp_path / "b", [(1, 1.0)]),
    )
    assert [curve.label for curve in run_curves([ppg, ppo], RETURN)] == [
        "demo, aux on",
        "demo, aux off",
    ]


def test_where_and_how_a_run_was_made_makes_no_difference(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", [(1, 1.0)], seed=1, output_dir="here", total_env_steps=1000)
    second = make_run(
        tmp_path / "b", [(1, 1.0)], seed=2, output_dir="there", checkpoint=CheckpointConfig(keep=5)
    )
    (curve,) = run_curves([first, second], RETURN)
    assert curve.label == "demo"


@pytest.mark.parametrize(
    ("count", "published", "text"),
    [
        (1, False, "one seed"),
        (2, False, "mean of 2 seeds, band: minimum to maximum"),
        (5, False, "mean of 5 seeds, band: 95 % bootstrap interval of the mean"),
        (1, True, "published (1 run)"),
        (3, True, "published (3 runs), band: minimum to maximum"),
    ],
)
def test_the_legend_says_what_line_and_band_are(count: int, published: bool, text: str) -> None:
    curve = plot.Curve(
        label="ppg",
        env_id="procgen:heist",
        steps=np.arange(2.0),
        runs=np.ones((count, 2)),
        published=published,
    )
    assert plot.legend_texts([curve]) == {("ppg", published): f"ppg: {text}"}
    figure = plot.draw_curves([curve], "return", None)
    assert [entry.get_text() for entry in figure.legends[0].get_texts()] == [f"ppg: {text}"]


def test_the_legend_says_where_there_are_fewer_seeds(tmp_path: Path) -> None:
    one, both = np.ones((1, 2)), np.ones((2, 2))
    curves = [
        plot.Curve(label="ppg", env_id=f"procgen:{game}", steps=np.arange(2.0), runs=runs)
        for game, runs in (("heist", one), ("maze", both), ("miner", one))
    ]
    expected = "ppg: one seed (heist, miner); mean of 2 seeds, band: minimum to maximum (maze)"
    assert plot.legend_texts(curves) == {("ppg", False): expected}


def test_two_runs_of_one_seed_are_not_called_two_seeds(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [(1, 1.0)], seed=1) for name in "ab"]
    with pytest.warns(
        UserWarning, match=r"^demo on procgen:starpilot \(easy\) has several runs of"
    ):
        (curve,) = run_curves(runs, RETURN)
    assert curve.about == "mean of 2 runs, band: minimum to maximum"


def test_the_image_has_axes_with_names_and_units(tmp_path: Path) -> None:
    (curve,) = run_curves(make_runs(tmp_path, [1.0, 2.0, 3.0]), RETURN)
    figure = plot.draw_curves([curve], plot.axis_label(RETURN, 500_000), "Starpilot")
    (panel,) = figure.axes
    assert panel.get_xlabel() == "environment steps"
    assert figure.get_supylabel() == "episodic return, last 100 episodes\n(mean over 500k steps)"
    assert figure.get_suptitle() == "Starpilot" and panel.get_title() == "procgen:starpilot (easy)"
    assert plot.axis_label("losses/explained_variance", 0) == "explained variance"
    assert {*plot._AXIS_LABELS, *plot.RETURNS} <= plot.METRICS.keys()


def test_the_legend_says_once_what_is_the_same_for_all_its_lines() -> None:
    def curve(label: str, count: int) -> plot.Curve:
        return plot.Curve(label=label, env_id="a", steps=np.arange(2.0), runs=np.ones((count, 2)))

    def legend(*curves: plot.Curve) -> tuple[str, list[str]]:
        (found,) = plot.draw_curves(list(curves), "return", None).legends
        return found.get_title().get_text(), [entry.get_text() for entry in found.get_texts()]

    assert legend(curve("ppg", 2), curve("ppo", 2)) == (
        "mean of 2 seeds, band: minimum to maximum", ["ppg", "ppo"]
    )  # fmt: skip
    band = "band: 95 % bootstrap interval of the mean"
    assert legend(curve("a", 3), curve("b", 5), curve("c", 5), curve("d", 1)) == (
        f"mean of 5 seeds, {band}", ["a: 3 seeds", "b", "c", "d: one seed"]
    )  # fmt: skip
    assert legend(curve("a", 5), curve("b", 3)) == (
        f"mean of 5 seeds, {band}", ["a", "b: 3 seeds"]
    )  # fmt: skip
    assert legend(curve("ppg", 2), curve("ppo", 1)) == (
        "", ["ppg: mean of 2 seeds, band: minimum to maximum", "ppo: one seed"]
    )  # fmt: skip


def test_a_long_title_stays_within_the_figure() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    curve = plot.Curve(label="x", env_id="a", steps=np.arange(2.0), runs=np.ones((1, 2)))
    title = "fig5: policy iterations N_π before each auxiliary phase (PPG paper, figure 5)"
    figure = plot.draw_curves([curve], "episodic return, last 100 episodes", title)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    label_box, title_box = (
        text.get_window_extent(canvas.get_renderer()) for text in figure.texts if text.get_text()
    )
    assert label_box.x0 > 0 and label_box.y1 < title_box.y0
    assert title_box.x0 > 0 and title_box.x1 < figure.bbox.x1


def test_long_legends_are_broken_into_lines(tmp_path: Path) -> None:
    curve = plot.Curve(label="x" * 60, env_id="a", steps=np.arange(2.0), runs=np.ones((3, 2)))
    (entry,) = plot.draw_curves([curve], "return", None).legends[0].get_texts()
    assert entry.get_text().count("\n") == 1


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (0, "0"),
        (500, "500"),
        (1_000, "1k"),
        (2_500_000, "2.5M"),
        (25e6, "25M"),
        (12_345, "12.345k"),
        (1e9, "1G"),
    ],
)
def test_steps_on_the_axis(steps: float, text: str) -> None:
    assert plot.steps_text(steps) == text


@pytest.mark.parametrize("panels", [1, 2, 3, 5, 16])
def test_any_number_of_environments_is_drawn(tmp_path: Path, panels: int) -> None:
    runs = [
        make_run(tmp_path / str(i), [(1, 1.0), (2, 2.0)], env=f"gymnasium:Env{i}-v0")
        for i in range(panels)
    ]
    plot_runs(runs, output=tmp_path / "figure")


def test_the_files_are_images_and_a_second_drawing_is_equal_to_the_byte(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, [1.0, 4.0], [2.0, 6.0], [3.0, 5.0])
    paths = plot_runs(runs, output=tmp_path / "new" / "figure.v1.png", title="Demo")
    assert [path.name for path in paths] == ["figure.v1.png", "figure.v1.svg", "figure.v1.csv"]
    head = paths[0].read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:24])[0] == 1280
    assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")
    before = [path.read_bytes() for path in paths]
    plot_runs(runs, output=tmp_path / "new" / "figure.v1.svg", title="Demo")
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("begin", "=+-@")
def test_no_name_is_a_formula_of_a_spreadsheet(tmp_path: Path, begin: str) -> None:
    name = f"{begin}1+1"
    runs = make_runs(tmp_path, [-1.0], name=name, env=f"{name}-v0")
    (row,) = read_csv(plot_runs(runs, output=tmp_path / "figure")[2])
    assert (row["curve"], row["env_id"], row["mean"]) == (f"'{name}", f"'{name}-v0", "-1.0")
    compare_runs(runs, output=tmp_path / "table")
    (row,) = read_csv(tmp_path / "table.csv")
    assert (row["experiment"], row["env_id"], row["score"]) == (f"'{name}", f"'{name}-v0", "-1")


def test_a_name_with_a_dot_is_not_cut(tmp_path: Path) -> None:
    paths = plot_runs(make_runs(tmp_path, [1.0]), output=tmp_path / "lr0.001")
    assert [path.name for path in paths] == ["lr0.001.png", "lr0.001.svg", "lr0.001.csv"]


def publish(monkeypatch: pytest.MonkeyPatch, text: str, **levels: str) -> Path:
    """Have the package carry a reference, of easy levels unless it or `levels` says another."""
    usual = {"split": "train", "distribution": "easy", "num_levels": "0"} | levels
    rows = [usual | row for row in csv.DictReader(io.StringIO(text))]
    packaged = plot._published_rows
    monkeypatch.setattr(
        plot, "_published_rows", lambda name: rows if name == "published" else packaged(name)
    )
    monkeypatch.setitem(REFERENCES, "published", "of a test")
    return Path("published")


def test_published_curves_are_laid_beside_ours_up_to_our_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEADER + "".join(
        f"{experiment},{run},{game},{step},{step / 100 + run}\n"
        for experiment in ("ppg", "ppo")
        for run in (0, 1, 2)
        for game in ("starpilot", "heist")
        for step in (300, 100, 200.0)
    )
    path = publish(monkeypatch, text)
    runs = make_runs(tmp_path, [1.0, 4.0])
    rows = read_csv(
        plot_runs(runs, output=tmp_path / "figure", reference=path, reference_experiments=["ppo"])[
            2
        ]
    )
    published = [row for row in rows if row["published"] == "1"]
    assert {row["curve"] for row in published} == {"ppo"} and {
        row["num_runs"] for row in published
    } == {"3"}
    assert numbers(published, "env_steps") == [100, 200]
    assert numbers(published, "mean") == [2.0, 3.0]
    assert (numbers(published, "low"), numbers(published, "high")) == ([1.0, 2.0], [3.0, 4.0])
    curves = plot.reference_curves(path, RETURN, ends={STARPILOT: 200.0})
    assert [curve.label for curve in curves] == ["ppg", "ppo"]


def test_evaluations_on_unseen_levels_stand_beside_such(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def score(metric: str, game: str = "bigfish", reference: str = "baselines-easy-200") -> float:
        ends = {plot.Task(f"procgen:{game}", "easy"): 5e7}
        (curve,) = plot.reference_curves(Path(reference), metric, ends=ends)
        return float(curve.mean[-1])

    train, unseen = score("evaluation/train_return"), score("evaluation/return")
    assert unseen < train == score(RETURN)
    score("evaluation/return", reference="baselines-easy")  # learned on all levels
    assert not recwarn.list
    score("evaluation/return", "coinrun")
    assert "returns on levels of the training" in str(recwarn.pop().message)


def own_curve(path: Path, *rows: str, header: str = "step,low,mean,high") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_reference_may_be_a_curve_with_its_band(tmp_path: Path) -> None:
    """Up to our last step, for any metric; in any order of rows and columns."""
    path = own_curve(tmp_path / "theirs.csv", "200,7,1,2", "100,6,0,1", "300,9,9,9",
                     header="step,high,low,mean")  # fmt: skip
    runs = make_runs(tmp_path, [1.0, 4.0], metric="losses/entropy")
    output, metric = tmp_path / "figure", "losses/entropy"
    rows = read_csv(plot_runs(runs, output=output, metric=metric, reference=path)[2])
    theirs = [row for row in rows if row["published"] == "1"]
    assert {row["curve"] for row in theirs} == {"theirs"}
    assert [numbers(theirs, name) for name in ("env_steps", "low", "mean", "high")] == [
        [100, 200], [0, 1], [1, 2], [6, 7],
    ]  # fmt: skip


def test_a_curve_that_does_not_fit_says_why(tmp_path: Path) -> None:
    path, ends = tmp_path / "theirs.csv", {STARPILOT: 200.0}
    for header in ("low,mean,high", "step,mean,high", "step,low,high", "step,low,mean"):
        (missing,) = {"step", "low", "mean", "high"} - {*header.split(",")}
        with pytest.raises(ValueError, match=rf"theirs.csv has no column {missing}; "):
            plot.reference_curves(own_curve(path, header=header), RETURN, ends=ends)
    with pytest.raises(ValueError, match="begins at 300 steps"):
        plot.reference_curves(own_curve(path, "300,1,2,3"), RETURN, ends=ends)
    with pytest.raises(ValueError, match="has no rows"):
        plot.reference_curves(own_curve(path), RETURN, ends=ends)
    with pytest.raises(ValueError, match="is one curve; give runs of one environment"):
        plot.reference_curves(path, RETURN, ends=ends | {plot.Task("procgen:heist", "easy"): 1.0})


def test_a_target_is_a_line_in_each_panel(tmp_path: Path) -> None:
    curves = [
        plot.Curve(label="ppg", env_id=name, steps=np.arange(2.0), runs=np.ones((1, 2)))
        for name in ("a", "b")
    ]
    for panel in plot.draw_curves(curves, "return", None, 7.5).axes:
        (target,) = (line for line in panel.lines if line.get_linestyle() == ":")
        assert list(np.asarray(target.get_ydata())) == [7.5, 7.5]
    for panel in plot.draw_curves(curves, "return", None).axes:
        assert len(panel.lines) == 1
    paths = [
        plot_runs(runs, output=tmp_path / name, target=target)[0]
        for runs in [make_runs(tmp_path / "runs", [1.0, 4.0])]
        for name, target in (("with", 3.0), ("without", None))
    ]
    assert paths[0].read_bytes() != paths[1].read_bytes()


LEVELS_HEADER = "experiment,run,game,distribution,num_levels,step,episodic_return\n"


def test_difficulties_of_a_game_are_two_panels_with_their_own_published_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hard curve is not drawn beside the easy run, nor the other way round."""
    text = LEVELS_HEADER + "ppo,0,heist,easy,0,100,5\nppo,0,heist,hard,0,100,2\n"
    path = publish(monkeypatch, text)
    easy, hard = EnvConfig(id="procgen:heist"), EnvConfig(id="procgen:heist", distribution="hard")
    runs = [make_run(tmp_path / "easy", [(100, 6.0)], env=easy),
            make_run(tmp_path / "hard", [(100, 3.0)], env=hard)]  # fmt: skip
    with pytest.warns(UserWarning, match="left out") as told:
        rows = read_csv(plot_runs(runs, output=tmp_path / "figure", reference=path)[2])
    assert [(row["distribution"], row["curve"], row["mean"]) for row in rows] == [
        ("easy", "demo", "6.0"), ("hard", "demo", "3.0"), ("easy", "ppo", "5.0"),
        ("hard", "ppo", "2.0"),
    ]  # fmt: skip
    assert [row["num_levels"] for row in rows] == ["0"] * 4
    assert {str(each.message).partition(": ")[2] for each in told} == {
        f"ppo of {path}: hard levels of heist; the runs of procgen:heist: easy levels",
        f"ppo of {path}: easy levels of heist; the runs of procgen:heist: hard levels",
    }


def test_one_experiment_on_two_numbers_of_levels_is_two_curves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = LEVELS_HEADER + "ppo,0,heist,easy,0,100,5\nppo,0,heist,easy,200,100,7\n"
    path = publish(monkeypatch, text)
    ends = {plot.Task("procgen:heist", "easy"): 100.0}
    curves = plot.reference_curves(path, RETURN, ends=ends)
    assert [(curve.label, curve.mean[0]) for curve in curves] == [
        ("ppo, all levels", 5), ("ppo, 200 levels", 7)
    ]  # fmt: skip
    assert plot.legend_texts(curves)["ppo, 200 levels", True] == (
        "ppo, 200 levels: published (1 run), trained on 200 levels"
    )
    assert plot.legend_texts(curves[:1]) == {("ppo, all levels", True): (
        "ppo, all levels: published (1 run)"
    )}  # fmt: skip


def test_a_reference_of_another_difficulty_alone_is_refused(tmp_path: Path) -> None:
    """It is told which of the package has the run's."""
    run = make_run(tmp_path / "run", [(100_000, 1.0)])
    with pytest.raises(ValueError, match="nothing to compare with") as told:
        plot_runs([run], output=tmp_path / "figure", reference=Path("ppg-paper"))
    said = str(told.value)
    assert "ppg, ppo of ppg-paper: hard levels of starpilot" in said
    assert "the runs of procgen:starpilot: easy levels" in said
    for name in ("baselines-easy", "procgen-easy-25m", "baselines-final"):
        assert name in said
    assert not list(tmp_path.glob("figure*"))
    maze = EnvConfig(id="procgen:maze", distribution="memory")
    other = make_run(tmp_path / "m", [(100_000, 1.0)], env=maze)
    with pytest.raises(ValueError, match="memory levels there is no reference of the package"):
        plot_runs([other], output=tmp_path / "figure", reference=Path("baselines-easy"))


def test_ours_are_solid_published_ones_dashed_and_all_colors_differ() -> None:
    keys = [("ppg", False), ("ppo", False), ("ppg", True), ("ppo", True), ("a", True)]
    looks = plot._looks(keys)
    assert [looks[key]["linestyle"] == "-" for key in keys] == [True, True, False, False, False]
    assert len({looks[key]["color"] for key in keys}) == 5
    many = plot._looks([(str(i), i % 2 == 0) for i in range(40)])
    assert len({(str(look["color"]), str(look["linestyle"])) for look in many.values()}) > 25


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (HEADER + "ppo,0,heist,100,1\n", {}, "no game 'starpilot'.*it has: heist"),
        (
            HEADER + "ppo,0,starpilot,100,1\n",
            {"reference_experiments": ["pppo"]},
            "no experiment 'pppo' for starpilot .did you mean 'ppo'",
        ),
        (
            HEADER + "ppo,0,starpilot,100,1\n",
            {"metric": "losses/entropy"},
            "metric is 'losses/entropy'; published has returns: charts/ep",
        ),
        (
            HEADER + "ppo,0,starpilot,9999,1\n",
            {},
            "begins at 9,999 steps and the runs of procgen:starpilot end at 200",
        ),
        (
            HEADER + "".join(f"e{i},0,starpilot,100,1\n" for i in range(9)),
            {},
            "9 experiments for starpilot, too many .* e0, e1",
        ),
    ],
)
def test_a_reference_that_does_not_fit_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, settings: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    path = publish(monkeypatch, text)
    runs = make_runs(tmp_path, [1.0, 2.0], metric=settings.get("metric", RETURN))
    with pytest.raises(ValueError, match=message):
        plot_runs(runs, output=tmp_path / "figure", reference=path, **settings)
    assert not list(tmp_path.glob("figure*"))


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"nowhere is not a run directory, it has no config\.json; give folders that",
    ):
        run_curves([tmp_path / "nowhere"], RETURN)
    make_runs(tmp_path / "runs", [1.0])
    with pytest.raises(ValueError, match=r"it holds run directories: give .*runs/\*"):
        run_curves([tmp_path / "runs"], RETURN)


def test_runs_without_data_are_named(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty", [])
    with pytest.raises(
        ValueError, match="empty has no data yet: its first iteration is not finished"
    ):
        run_curves([empty], RETURN)
    (empty / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="empty has no data yet"):
        run_curves([empty], RETURN)
    with pytest.raises(ValueError, match="there are no runs to plot"):
        run_curves([], RETURN)


def test_a_run_without_the_metric_says_what_it_has(tmp_path: Path) -> None:
    run = make_run(tmp_path / "ppo", [(1, 2.0), (2, math.nan)])
    with pytest.raises(
        ValueError, match=f"has no 'losses/aux/kl_loss' in its 2 iterations; it has: {RETURN}"
    ):
        run_curves([run], "losses/aux/kl_loss")


def test_an_unknown_metric_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no metric 'losses/entropie' .did you mean 'losses/entropy'"
    ):
        plot_runs(make_runs(tmp_path, [1.0]), output=tmp_path / "figure", metric="losses/entropie")


def test_runs_that_share_no_steps_are_refused(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", [(100, 1.0)], seed=1),
        make_run(tmp_path / "b", [(200, 1.0)], seed=2),
    ]
    with pytest.raises(
        ValueError,
        match=r"of demo have no steps in common: one ends at 100, before .* first number at 200",
    ):
        run_curves(runs, RETURN)


def test_smoothing_over_less_than_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smooth_steps is -1"):
        plot_runs(make_runs(tmp_path, [1.0]), output=tmp_path / "figure", smooth_steps=-1)


def test_a_missing_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no reference file .*nothing\.csv"):
        plot_runs(
            make_runs(tmp_path, [1.0]),
            output=tmp_path / "figure",
            reference=tmp_path / "nothing.csv",
        )


@pytest.mark.parametrize("verb", ["plot", "compare"])
def test_experiments_of_a_reference_that_is_not_given_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    words = [*map(str, make_runs(tmp_path, [1.0])), "--output", str(tmp_path / "figure")]
    assert main([verb, *words, "--reference-experiments", "ppo"]) == 2
    assert "error: reference_experiments given without a reference" in capsys.readouterr().err
    assert not list(tmp_path.glob("figure*"))


@pytest.mark.parametrize("verb", ["plot", "compare"])
def test_the_name_of_a_file_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    runs = list(map(str, make_runs(tmp_path, [1.0])))
    assert main([verb, *runs, "--output", str(tmp_path / "figure.pdf")]) == 2
    assert "figure.pdf: images end with .png and .svg, tables with" in capsys.readouterr().err
    assert not list(tmp_path.glob("figure*"))
    assert main([verb, *runs, "--output", str(tmp_path / "figure-0.5")]) == 0
    assert (tmp_path / "figure-0.5.csv").exists()


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'phasicrl\[plot\]'"):
        plot_runs(make_runs(tmp_path, [1.0]), output=tmp_path / "figure")


def test_knobs_of_a_group_tell_experiments_apart_where_it_is_off_in_a_third(
    tmp_path: Path,
) -> None:
    """Two sweeps of PPG and a PPO under one name are three experiments, not two."""
    off, *on = None, AuxConfig(epochs=6, every=16), AuxConfig(epochs=6, every=32)
    runs = [
        make_run(tmp_path / str(number), [(100, 1.0)], aux=aux)
        for number, aux in enumerate((off, *on))
    ]
    labels = [curve.label for curve in run_curves(runs, RETURN)]
    assert labels == ["demo, aux off", "demo, aux on, aux.every 16", "demo, aux on, aux.every 32"]
    assert [curve.label for curve in run_curves(runs[:2], RETURN)] == [
        "demo, aux off", "demo, aux on"
    ]  # fmt: skip
