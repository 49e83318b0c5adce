"""Learning curves: averages over runs and steps."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasicrl.config import AuxConfig, CheckpointConfig, EnvConfig, ModelConfig, PPOConfig
from phasicrl.lab.analysis.compare import compare_runs
from phasicrl.lab.analysis.curves import Curve, Task, get_shared_experiment, read_curves
from phasicrl.lab.analysis.plot import plot_runs
from phasicrl.lab.analysis.report import write_report
from tests.lab.analysis.runs import RETURN, make_run, make_runs, read_csv


@pytest.mark.parametrize(("values", "published", "band", "name"), [
    ([[1.0, 4.0]], False, ([1, 4], [1, 4]), ""),
    ([[1.0, 4.0], [3.0, 2.0]], False, ([1, 2], [3, 4]), "minimum to maximum"),
    ([[1.0], [2.0], [6.0]], True, ([1], [6]), "minimum to maximum"),
])  # fmt: skip
def test_the_band_depends_on_the_number_of_runs(
    values: list[list[float]], published: bool, band: Any, name: str
) -> None:
    runs = np.array(values)
    curve = Curve("ppg", Task("x"), np.arange(runs.shape[1], dtype=float), runs, published)
    np.testing.assert_array_equal(curve.band, band)
    assert curve.band_description == name
    assert replace(curve, num_levels=200).runs_description.endswith(", 200 levels")


def test_runs_are_interpolated_on_one_grid_where_all_have_data(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", [(100, 0.0), (200, 10.0), (400, 30.0)], seed=1)
    second = make_run(tmp_path / "b", [(150, 4.0), (300, 7.0), (900, 100.0)], seed=2)
    with pytest.warns(UserWarning, match="demo on procgen:starpilot .* cut at 400 steps"):
        (curve,) = read_curves([first, second], RETURN)
    assert curve.steps.tolist() == [150, 200, 300, 400]
    assert curve.values[0].tolist() == [5, 10, 20, 30]
    assert curve.values[1].tolist() == pytest.approx([4, 5, 7, 7 + 93 / 6])
    third = make_run(tmp_path / "c", [(1000, 1.0)], seed=3)
    with pytest.raises(ValueError, match=r"ends at 400 and one .* at 1,000; expected common steps"):
        read_curves([first, third], RETURN)


def test_a_slightly_shorter_run_cuts_without_a_warning(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(end), [(50, 1.0), (end, 1.0)], seed=end) for end in (90, 100)]
    (curve,) = read_curves(runs, RETURN)
    assert curve.steps[-1] == 90


def test_rows_without_a_number_are_skipped(tmp_path: Path) -> None:
    points = [(100, None), (200, 1.0), (300, None), (400, 3.0), (500, math.nan)]
    (curve,) = read_curves([make_run(tmp_path / "a", points)], RETURN)
    assert curve.steps.tolist() == [200, 400] and curve.mean.tolist() == [1.0, 3.0]


def test_long_runs_are_thinned_but_keep_both_ends(tmp_path: Path) -> None:
    (curve,) = read_curves(make_runs(tmp_path, np.arange(5_000, dtype=float).tolist()), RETURN)
    assert len(curve.steps) == 1_000
    assert (curve.steps[0], curve.steps[-1], curve.mean[-1]) == (100, 500_000, 4_999)


@pytest.mark.parametrize(
    ("window", "mean"), [(200, [1.0, 2.0, 5.5, 4.0]), (1_000, [1.0, 2.0, 4.0, 3.0])]
)
def test_smoothing_averages_steps_before(tmp_path: Path, window: int, mean: list[float]) -> None:
    (curve,) = read_curves(make_runs(tmp_path, [1.0, 3.0, 8.0, 0.0]), RETURN, smooth_steps=window)
    assert curve.mean.tolist() == mean
    runs = make_runs(tmp_path / "spike", [0.5, 1e20, *[0.5] * 5])
    (curve,) = read_curves(runs, RETURN, smooth_steps=200)
    assert curve.mean.tolist()[3:] == [0.5] * 4, "it leaves nothing behind the window"


RATES = [{"ppo": PPOConfig(learning_rate=rate)} for rate in (1e-3, 1e-4)]
PHASES = [{"aux": AuxConfig(epochs=epochs)} for epochs in (0, 6)]


@pytest.mark.parametrize(("settings", "labels"), [
    ([{"name": "a"}, {"name": "b"}], ["a", "b"]),
    ([{"name": "a"}, {"name": "b"}, *RATES], ["a", "b", "demo, lr 1e-4", "demo, lr 1e-3"]),
    ([{"name": "a-1718000000"}, {"name": "a-01234abcde"}], ["a-1718000000", "a-01234abcde"]),
    (RATES, ["lr 1e-4", "lr 1e-3"]),
    ([{"ppo": PPOConfig(learning_rate=1e-3 + 1e-11)}, RATES[1]], ["lr 1e-4", "lr 1e-3"]),
    ([{"ppo": PPOConfig(clip=1 / 3)}, {}], ["clip 0.2", "clip 0.3333333"]),
    ([{"ppo": PPOConfig(gamma=g)} for g in (1.0, 0.9999999)], ["gamma 0.9999999", "gamma 1.0"]),
    (PHASES, ["aux.epochs 0", "aux.epochs 6"]),
    ([{}, {"output_dir": "there", "checkpoint": CheckpointConfig(keep=5)}], ["demo"]),
    ([{}, {"total_env_steps": 1000}], ["demo"]),
])  # fmt: skip
def test_experiments_are_named_by_what_differs_and_are_not_averaged(
    tmp_path: Path, settings: list[dict[str, Any]], labels: list[str]
) -> None:
    runs = [
        make_run(tmp_path / f"{seed}-{i}", [(1, float(i))], seed=seed + 10 * i, **each)
        for i, each in enumerate(settings)
        for seed in (1, 2)
    ]
    curves = read_curves(runs, RETURN)
    assert [curve.label for curve in curves] == labels
    assert {len(curve.values) for curve in curves} == {2 * len(settings) // len(labels)}


def test_experiments_are_sorted_by_value(tmp_path: Path) -> None:
    arms: list[dict[str, Any]] = [
        {"ppo": PPOConfig(clip=clip), "model": ModelConfig(hidden_sizes=sizes)}
        for clip in (None, 0.25, 0.125, 2.0) for sizes in ((128,), (64, 64), ())
    ]  # fmt: skip
    runs = [make_run(tmp_path / f"{i}", [(1, 1.0)], **arm) for i, arm in enumerate(arms)]
    assert [curve.label for curve in read_curves(runs, RETURN)] == [
        f"model.hidden_sizes {sizes}, clip {clip}"
        for sizes in ("", "64 64", "128") for clip in ("0.125", "0.25", "2.0", "none")
    ]  # fmt: skip


def test_an_option_of_the_environment_in_some_runs_distinguishes_them(tmp_path: Path) -> None:
    options = ({}, {"max_episode_steps": 9})
    runs = [
        make_run(tmp_path / str(i), [(1, 1.0)], env=EnvConfig(id="Ant-v5", options=each))  # type: ignore[arg-type]
        for i, each in enumerate(options)
    ]
    labels = [curve.label for curve in read_curves(runs, RETURN)]
    assert labels == ["demo", "env.options.max_episode_steps 9"]


def test_environments_and_difficulties_are_tasks(tmp_path: Path) -> None:
    envs = [
        EnvConfig(id="procgen:heist"), EnvConfig(id="procgen:heist", distribution="hard"),
        EnvConfig(id="gymnasium:CartPole-v1"),
    ]  # fmt: skip
    runs = [make_run(tmp_path / str(i), [(1, 1.0)], env=env) for i, env in enumerate(envs)]
    assert [(str(curve.task), curve.num_levels) for curve in read_curves(runs, RETURN)] == [
        ("procgen:heist (easy)", 0), ("procgen:heist (hard)", 0), ("gymnasium:CartPole-v1", None)
    ]  # fmt: skip


def test_two_runs_of_one_seed_are_named(tmp_path: Path) -> None:
    """A run with another budget belongs to the same experiment."""
    runs = [make_run(tmp_path / str(budget), [(1, 1.0)], seed=7, total_env_steps=budget)
            for budget in (1000, 2000)]  # fmt: skip
    with pytest.warns(UserWarning, match="demo on procgen:starpilot .* several runs of seed 7"):
        read_curves(runs, RETURN)


def test_the_folder_of_a_sweep_is_its_runs_and_arms_are_what_differs(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    sweep = tmp_path
    for (index, clip), seed in itertools.product(enumerate((0.5, 0.25)), (1, 2)):
        run = sweep / f"s{seed}-{index}" / "runs" / "run"
        make_run(run, [(1, clip + seed)], seed=seed, ppo=PPOConfig(clip=clip))
        (run.parents[1] / "trial.json").write_text("{}")
    curves = read_curves([sweep], RETURN)
    means = [(curve.label, curve.mean.tolist()) for curve in curves]
    assert means == [("clip 0.25", [1.75]), ("clip 0.5", [2.0])]
    assert get_shared_experiment(curves) == "demo" and not recwarn.list
    # A pending trial, and a run in which no episode has ended.
    (sweep / "s3-0").mkdir()
    (sweep / "s3-0" / "trial.json").write_text("{}")
    (sweep / "s1-0" / "runs" / "killed").mkdir()  # before it had a configuration
    metrics = sweep / "s2-0" / "runs" / "run" / "metrics.jsonl"
    metrics.write_text('{"env_steps": 9, "iteration": 1, "a/b": 1.0}\n')
    with pytest.warns(UserWarning) as warned:
        assert [len(curve.values) for curve in read_curves([sweep], RETURN)] == [2, 1]
    texts = [str(each.message) for each in warned]
    assert any(text.endswith(f"{sweep}/s3-0: left out") for text in texts)
    assert any("s2-0/runs/run: no episode has ended" in text for text in texts)


@pytest.mark.long
def test_pages_of_a_sweep_with_all_that_may_be_in_one(tmp_path: Path) -> None:
    """Trials without data, an arm in which no episode ended, runs of one iteration."""
    pytest.importorskip("matplotlib")
    sweep = tmp_path / "sweep"
    for index, clip in enumerate(np.linspace(0.1, 0.4, 13).round(3)):
        for seed in (1, 2, 3):
            points = [(100, 3.0 * index)] if index else [(100, None), (200, None)]
            run = sweep / f"s{seed}-{index:02d}" / "runs" / "run"
            make_run(run, points, seed=seed, ppo=PPOConfig(clip=float(clip)))
            (run.parents[1] / "trial.json").write_text("{}")
    (sweep / "s2-02" / "runs" / "run" / "metrics.jsonl").write_text("")
    with pytest.warns(UserWarning) as warned:
        rows = read_csv(plot_runs([sweep], output=tmp_path / "curves")[2])
        comparison = compare_runs([sweep], output=tmp_path / "scores", at_least=1.0)
        assert write_report([sweep]) == sweep / "report.html"
    page = (sweep / "report.html").read_text(encoding="utf-8")
    texts = [str(each.message) for each in warned]
    assert sum(f"finished in {sweep}/s2-02: left out" in text for text in texts) == 3
    assert sum("no episode has ended in 200 steps" in text for text in texts) == len(texts) - 3 == 6
    arms = {row["curve"]: row for row in rows}
    assert len(arms) == 13 and arms["clip 0.1 (no episode ended)"]["mean"] == "nan"
    assert [arms[f"clip {clip}"]["num_runs"] for clip in (0.125, 0.15)] == ["3", "2"]
    scores = {result.label: result.mean.value for result in comparison.results}
    assert scores == {f"clip {0.1 + 0.025 * i:.3g}": pytest.approx(3 * i) for i in range(1, 13)}
    assert "not compared: clip 0.1 (no episode ended)" in comparison.notes
    assert comparison.missed[0].startswith("clip 0.1 (no episode ended) has no score")
    assert page.count("Too few iterations for a diagnosis") == 38 == page.count("</h3>") // 3
    assert "<h1>38 runs of demo on procgen:starpilot (easy)</h1>" in page
    assert "1. clip 0.1, seed 1</h3>" in page and "38. clip 0.4, seed 3</h3>" in page
    (figures,) = [re.findall(f"<figcaption>{RETURN}(.*?)</fig", page)]
    assert figures == [
        ", undefined in 6 of 13 iterations, runs 1 to 10", ", runs 11 to 20", ", runs 21 to 30",
        ", runs 31 to 38",
    ]  # fmt: skip
    drawn = page[page.index("<figure>") : page.index("</figure>")]
    assert len({*re.findall(r"var\(--color\d+\)", drawn)}) == 7  # one for each run with a value


def test_folders_without_runs_or_data_are_refused(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty", [])
    run = make_run(tmp_path / "run", [(1, 2.0), (2, math.nan)])
    forked = make_run(tmp_path / "forked", [(1, 2.0)])
    config = (forked / "config.json").read_text()
    config = config.replace('"entropy_coef"', '"mirror": 1, "entropy_coef"')
    (forked / "config.json").write_text(config)
    sweep = tmp_path / "sweep"
    (sweep / "s1").mkdir(parents=True)
    (sweep / "s1" / "trial.json").write_text("{}")
    other = make_run(tmp_path / "other", [(1, 3.0)], metric="losses/aux/kl_loss")
    for runs, metric, message in [
        ([], RETURN, "no runs are given; expected at least one"),
        ([sweep], RETURN, "sweep/s1; expected a run with data"),
        ([tmp_path / "nowhere"], RETURN, "nowhere is not a run directory"),
        ([tmp_path], RETURN, r"such as .*/(empty|run|forked), or for plots .*/\*"),
        ([empty], RETURN, "empty; expected a run with data"),
        ([forked, forked], RETURN, "forked/config.json: unknown field ppo.mirror"),
        ([run], "charts/episodic_return_10", "metric is charts/episodic_return_10; expected"),
        ([other, run], "a/b", f"metric is a/b; expected one of {RETURN}, losses/aux/kl_loss$"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_curves(runs, metric)
    with pytest.warns(UserWarning) as warned:
        (curve,) = read_curves([empty, run, other], "losses/aux/kl_loss")
        assert write_report([empty, run], output=tmp_path / "page.html").is_file()
    assert curve.values.tolist() == [[3.0]]
    with pytest.warns(UserWarning, match="forked/config.json: unknown field ppo.mirror.*: left"):
        (curve,) = read_curves([forked, run], RETURN)
    assert curve.values.tolist() == [[2.0]]
    names = [str(each.message).removesuffix(": left out").split()[-1] for each in warned]
    assert names == [str(empty), str(run), str(empty)]
