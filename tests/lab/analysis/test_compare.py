"""Runs beside each other and beside published ones, at equal steps."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from phasicrl.cli import main
from phasicrl.config import EnvConfig, PPOConfig
from phasicrl.lab.analysis.compare import compare_runs
from phasicrl.lab.analysis.plot import plot_runs
from phasicrl.session.bootstrap import bootstrap_interval
from tests.lab.analysis.test_plot import (
    HEADER,
    LEVELS_HEADER,
    make_run,
    make_runs,
    own_curve,
    publish,
    read_csv,
)

pytest.importorskip("matplotlib")


def line(values: list[float]) -> list[float]:
    """A curve of twenty rows: zeros, and then values."""
    return [0.0] * (20 - len(values)) + values


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three seeds of one experiment and two of another, which stop after half the steps."""
    one = make_runs(tmp_path / "one", line([2.0, 4.0]), line([3.0, 5.0]), line([7.0, 9.0]))
    two = make_runs(tmp_path / "two", *([1.0] * 9 + [last] for last in (6.0, 8.0)), name="other")
    return one + two


def test_the_score_is_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    """Rows at 100 … 2,000: the last tenth is 1,900 and 2,000, without 1,800."""
    runs = make_runs(tmp_path, line([50.0, 2.0, 4.0]), line([50.0, 3.0, 5.0]))
    (result,) = compare_runs(runs).results
    assert result.steps == 2000 and result.scores == (3.0, 4.0)
    assert result.mean.value == 3.5 and result.reaches is None and result.reached == ()


def test_the_interval_is_that_of_the_mean_over_runs(runs: list[Path]) -> None:
    (result,) = compare_runs(runs[:3]).results
    slow = bootstrap_interval(result.scores)
    near = 0.02 * (slow[1] - slow[0])
    assert (result.mean.low, result.mean.high) == pytest.approx(slow, abs=near)


def test_all_are_compared_where_the_shortest_ends(runs: list[Path]) -> None:
    first, second = compare_runs(runs).results
    assert (first.label, second.label) == ("demo", "other")
    assert first.steps == second.steps == 1000
    assert first.scores == (0.0, 0.0, 0.0)  # what came later does not count
    assert second.scores == (6.0, 8.0)  # 1,000 alone is later than 900
    at_fewer = compare_runs(runs, at_steps=900).results
    assert at_fewer[1].scores == (1.0, 1.0)
    with pytest.raises(ValueError, match=r"other on procgen:starpilot \(easy\) ends at 1,000 st"):
        compare_runs(runs, at_steps=1500)


@pytest.mark.parametrize("steps", [0, -5])
def test_less_than_a_step_is_refused(runs: list[Path], steps: int) -> None:
    with pytest.raises(ValueError, match=f"^at_steps is {steps}; give at least 1, or leave it out"):
        compare_runs(runs, at_steps=steps)


def test_over_all_environments(tmp_path: Path) -> None:
    """Two experiments on two games; one has a run more, which is left out."""
    runs = []
    for game, scores in {"starpilot": (1.0, 2.0), "bigfish": (5.0, 7.0)}.items():
        env = f"procgen:{game}"
        runs += make_runs(tmp_path / game / "a", *(line([x] * 3) for x in scores), env=env)
        more = (0.0, 6.0, 99.0) if game == "bigfish" else (0.0, 1.0)
        runs += make_runs(tmp_path / game / "b", *(line([x] * 3) for x in more), env=env, name="b")
    one, two = compare_runs(runs).overall
    assert (one.label, one.num_runs, two.label, two.num_runs) == ("demo", 2, "b", 2)
    assert one.measures["mean"].value == 3.75 and one.measures["IQM"].value == 3.5
    assert two.measures["mean"].value == 1.75
    # Star pilot: 1 > 0, 1 = 1, 2 > 0, 2 > 1; big fish: 5 > 0, 5 < 6, 7 > both.
    assert one.improves["b"].value == pytest.approx((3.5 / 4 + 3 / 4) / 2)


def test_an_experiment_that_lacks_an_environment_is_not_in_the_whole(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "a", line([1.0]))
    runs += make_runs(tmp_path / "b", line([1.0]), env="procgen:maze", name="b")
    assert compare_runs(runs).overall == ()


def test_units_of_procgen(tmp_path: Path) -> None:
    """StarPilot's bounds are 2.5 and 64 on easy levels, 1.5 and 35 on hard ones."""
    curves = line([2.5] * 3), line([64.0] * 3)
    runs = make_runs(tmp_path / "easy", *curves)
    assert compare_runs(runs, units="procgen-easy").results[0].scores == (0.0, 1.0)
    assert compare_runs(runs, units="procgen-easy-paper").results[0].scores == (0.0, 1.0)
    hard = make_runs(tmp_path / "hard", *curves, env=HARD)
    scores = compare_runs(hard, units="procgen-hard").results[0].scores
    assert scores == pytest.approx((1 / 33.5, 62.5 / 33.5))
    with pytest.raises(ValueError, match=r"procgen-hard are of hard .* choose procgen-easy$"):
        compare_runs(runs, units="procgen-hard")
    with pytest.raises(ValueError, match=r"procgen-easy-paper are of easy .* choose procgen-hard$"):
        compare_runs(hard, units="procgen-easy-paper")
    memory = EnvConfig(id="procgen:maze", distribution="memory")
    with pytest.raises(ValueError, match="procgen:maze played memory ones; choose raw"):
        compare_runs(make_runs(tmp_path / "m", line([1.0]), env=memory), units="procgen-easy")
    other = make_runs(tmp_path / "c", line([1.0]), env="gymnasium:CartPole-v1")
    with pytest.raises(ValueError, match="gymnasium:CartPole-v1 has no bounds of Procgen"):
        compare_runs(other, units="procgen-easy")


NEVER = float("inf")
CLIMBS = ([0.0, 6, 6, 6, 6], [0.0, 0, 6, 6, 6], [0.0, 0, 0, 5, 0], [0.0, 0, 0, 0, 7], [4.0] * 5)
"""Seeds that are at 5 after 200, 300, 400 and 500 steps, and one that never is."""


def test_when_each_run_reaches_a_target(runs: list[Path]) -> None:
    first, second = compare_runs(runs, target=7.0).results
    assert first.reached == (NEVER, NEVER, 1900) and first.num_that_reach == 1
    assert second.reached == (NEVER, 1000)
    assert first.reaches is not None and first.reaches.value == NEVER


def test_the_median_of_the_steps_to_a_target_is_in_the_table_and_in_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five reach it by 400. Of medians 5.8 % are 200, and 5.8 % are none."""
    monkeypatch.setenv("COLUMNS", "200")
    runs = make_runs(tmp_path, *CLIMBS)
    words = ["--target", "5", "--output", str(tmp_path / "beside")]
    assert main(["compare", *map(str, runs), *words]) == 0
    printed = capsys.readouterr().out
    assert "median steps to 5 (raw)" in " ".join(printed.split())
    assert "400 (200 to never)" in printed and "4 of 5 runs" in printed
    rows = read_csv(tmp_path / "beside.csv")
    assert [row["steps_to_target"] for row in rows] == ["200", "300", "400", "500", "inf"]
    assert {row["target"] for row in rows} == {"5"}
    (row,) = read_csv(tmp_path / "beside-target.csv")
    assert row == {
        "env_id": "procgen:starpilot", "distribution": "easy", "experiment": "demo",
        "published": "0", "units": "raw", "target": "5", "num_runs": "5",
        "runs_that_reach_it": "4", "median_steps": "400", "low": "200", "high": "inf",
    }  # fmt: skip
    assert main(["compare", *map(str, runs), "--output", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "none-target.csv").exists()
    assert {row["steps_to_target"] for row in read_csv(tmp_path / "none.csv")} == {""}


def test_a_target_is_in_the_units_of_the_scores_also_for_published_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the way from 2.5 to 64 is 33.25."""
    monkeypatch.setenv("COLUMNS", "200")
    text = HEADER + "".join(f"theirs,a,starpilot,{s},{s / 10}\n" for s in (332, 333, 500))
    path = publish(monkeypatch, text)
    runs = make_runs(tmp_path, [2.5, 33.2, 33.3, 40.0, 40.0])
    settings = ["--units", "procgen-easy", "--target", "0.5", "--reference", str(path)]
    assert main(["compare", *map(str, runs), *settings]) == 0
    printed = capsys.readouterr().out
    assert "median steps to 0.5 (procgen-easy)" in " ".join(printed.split())
    found = compare_runs(runs, units="procgen-easy", target=0.5, reference=path).results
    assert [result.reached for result in found] == [(300,), (333,)]


def test_a_run_reaches_a_target_where_it_noted_so_itself(tmp_path: Path) -> None:
    """Its own rows count: not another seed's late begin, not lines between them, not a choice."""
    short = [(5000, 90.0), (30_000, 90.0)]
    late = [(21_000, 90.0), (30_000, 90.0)]
    between = [(8000, 80.0), (12_000, 100.0), (30_000, 100.0)]
    runs = [make_run(tmp_path / str(i), each, seed=i)
            for i, each in enumerate((short, late, between))]  # fmt: skip
    (result,) = compare_runs(runs, target=90.0).results
    assert result.reached == (5000, 21_000, 12_000)
    peak = [(step, 100.0 if step == 4440 else 0.0) for step in range(0, 50_000, 10)]
    (result,) = compare_runs([make_run(tmp_path / "long", peak)], target=90.0).results
    assert result.reached == (4440,)


def test_a_run_that_goes_on_after_the_others_has_no_more_time_to_reach_a_target(
    tmp_path: Path,
) -> None:
    runs = make_runs(tmp_path, [1.0] * 20, [1.0] * 20 + [9.0])
    (result,) = compare_runs(runs, target=9.0).results
    assert result.reached == (NEVER, NEVER)


@pytest.mark.parametrize("reference", ["cleanrl", "one.csv"])
def test_one_published_number_does_not_say_when_a_target_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own_curve(Path("one.csv"), "500000,480,490,500")
    points = [(step, step / 1000) for step in range(100_000, 600_000, 100_000)]
    run = make_run(tmp_path / "run", points, env="gymnasium:CartPole-v1")
    found = compare_runs([run], target=300.0, reference=Path(reference))
    ours, theirs = found.results
    assert ours.reached == (300_000,) and theirs.reached == () and theirs.reaches is None
    assert any("when it reached the target is not known" in note for note in found.notes)


HARD = EnvConfig(id="procgen:starpilot", distribution="hard")


def test_an_easy_run_is_not_compared_with_hard_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says which of the package's references fit, and ends as for any mistake."""
    points = [(100_000 * i, 5.0) for i in range(1, 21)]
    easy = make_run(tmp_path / "easy", points)
    words = ["--reference", "ppg-paper", "--units", "procgen-easy"]
    assert main(["compare", str(easy), *words]) == 2
    said = capsys.readouterr().err
    assert "nothing to compare with: ppg, ppo of ppg-paper: hard levels of starpilot" in said
    assert "the runs of procgen:starpilot: easy levels" in said
    assert "baselines-easy" in said and "procgen-easy-25m" in said

    hard = make_run(tmp_path / "hard", points, env=HARD)
    raw, in_units = (
        compare_runs([hard], reference=Path("ppg-paper"), units=units).results
        for units in ("raw", "procgen-hard")
    )
    assert [(result.label, result.task) for result in raw] == [
        ("demo", ("procgen:starpilot", "hard")), ("ppg", ("procgen:starpilot", "hard")),
        ("ppo", ("procgen:starpilot", "hard")),
    ]  # fmt: skip
    for one, other in zip(raw, in_units, strict=True):
        assert other.scores == pytest.approx([(score - 1.5) / 33.5 for score in one.scores])
    with pytest.raises(ValueError, match="choose procgen-hard"):
        compare_runs([hard], reference=Path("ppg-paper"), units="procgen-easy")


def test_difficulties_of_a_game_are_two_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "theirs,0,starpilot,easy,0,100,5\ntheirs,0,starpilot,hard,0,100,2\n"
    path = publish(monkeypatch, LEVELS_HEADER + text)
    runs = [make_run(tmp_path / "easy", [(100, 6.0)]),
            make_run(tmp_path / "hard", [(100, 1.0)], env=HARD)]  # fmt: skip
    with pytest.warns(UserWarning, match="left out"):
        found = compare_runs(runs, reference=path, share_of_reference=1.0, output=tmp_path / "out")
    assert [(each.label, each.distribution, each.scores) for each in found.results] == [
        ("demo", "easy", (6.0,)), ("theirs", "easy", (5.0,)),
        ("demo", "hard", (1.0,)), ("theirs", "hard", (2.0,)),
    ]  # fmt: skip
    (missed,) = found.missed
    assert "demo on procgen:starpilot (hard): 1, at least 2 was wanted" in missed
    assert [one.label for one in found.overall] == ["demo", "theirs (published)"]
    rows = read_csv(tmp_path / "out.csv")
    assert [row["distribution"] for row in rows] == ["easy", "easy", "hard", "hard"]


def test_what_published_scores_are_is_said_under_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    runs = make_runs(tmp_path / "a", [0.0] * 999 + [450.0, 9.0], env="gymnasium:CartPole-v1")
    assert main(["compare", *map(str, runs), "--reference", "zoo"]) == 0
    printed = capsys.readouterr().out
    assert "note: zoo (published): one number, the best checkpoint of one run, greedy" in printed
    assert "ours: charts/episodic_return_100, sampled actions in training" in printed

    few = EnvConfig(id="procgen:starpilot", num_levels=200)
    runs = [make_run(tmp_path / "few", [(100_000, 1.0)], env=few)]
    found = compare_runs(runs, reference=Path("baselines-easy"))
    assert found.notes == ("easy-all (published) was trained on all levels, demo on 200 levels",)
    assert compare_runs(runs, reference=Path("baselines-easy-200")).notes == ()


PUBLISHED = HEADER + "".join(
    f"theirs,{run},starpilot,{step},{value}\n"
    for run, value in (("a", 8.0), ("b", 12.0))
    for step in range(100, 2500, 100)
)


def test_published_runs_stand_beside_ours(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(monkeypatch, PUBLISHED)
    ours, theirs = compare_runs(runs[:3], reference=path).results
    assert (ours.steps, theirs.steps, theirs.published) == (2000, 2000, True)
    assert theirs.label == "theirs" and theirs.scores == (8.0, 12.0)


def test_bounds_that_do_not_hold_are_named(
    runs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(monkeypatch, PUBLISHED)
    words = ["compare", *map(str, runs[:3]), "--reference", str(path)]
    assert main([*words, "--at-least", "5", "--share-of-reference", "0.5"]) == 0
    capsys.readouterr()
    assert main([*words, "--at-least", "5.1", "--share-of-reference", "0.51"]) == 1
    said = capsys.readouterr().err
    assert "demo on procgen:starpilot (easy): 5, at least 5.1 was wanted" in said
    assert "at least 5.1 was wanted, 0.51 of theirs's 10" in said
    assert main(["compare", *map(str, runs), "--share-of-reference", "1"]) == 2


def test_the_command_prints_and_writes(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made" / "beside"
    words = ["--output", str(output), "--target", "7"]
    assert main(["compare", *map(str, runs), *words]) == 0
    printed = capsys.readouterr().out
    title = "procgen:starpilot (easy): charts/episodic_return_100 at 1k steps"
    assert title in " ".join(printed.split())
    assert "never" in printed and "probability of improvement" in printed
    assert "all environments" not in printed  # it is one
    # A pair stands there once; the files have it both ways.
    *_, pair = [line for line in printed.splitlines() if "demo" in line and "other" in line]
    assert pair.split("│")[1].strip() == "demo" and pair.split("│")[2].strip().startswith("0 (")
    assert "1 (" not in printed.partition("probability of improvement")[2]
    with output.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["score"] for row in rows] == ["0", "0", "0", "6", "8"]
    assert {row["env_steps"] for row in rows} == {"1000"}
    for end in (".png", ".svg", "-measures.png", "-measures.svg"):
        assert output.with_name(output.name + end).stat().st_size > 1000
    profile, measures = (read_csv(output.with_name(f"beside-{name}.csv"))
                         for name in ("profile", "measures"))  # fmt: skip
    demo = [row for row in profile if row["experiment"] == "other"]
    above = {float(row["score"]): float(row["share_above"]) for row in demo}
    assert above[0] == 1 and above[6.4] == 0.5 and above[8] == 0  # of 6 and 8
    found = {(row["experiment"], row["measure"]): row for row in measures}
    assert float(found["other", "mean"]["value"]) == 7
    assert float(found["demo", "mean"]["value"]) == 0
    assert float(found["other", "probability of improvement over demo"]["value"]) == 1


def test_tables_fit_into_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals are on one line, and there is none of one run."""
    monkeypatch.setenv("COLUMNS", "80")
    low = make_runs(tmp_path / "a", line([-1229.4] * 4), line([-1000.0] * 4), name="demo at " * 5)
    one = make_runs(tmp_path / "b", line([158.0] * 4))
    assert main(["compare", *map(str, low + one), "--target", "150"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "│ -1,115 (-1,229 to -1,000) │ -1,229 │ -1,000 │" in printed
    assert "│ 158 (–) │" in printed and "│ 1.7k (–) │ 1 of 1 runs │" in printed
    assert "never │ 0 of 2 runs │" in printed and "never (" not in printed
    both = make_runs(tmp_path / "c", line([20.1] * 3), line([7.2] * 3), name="demo")
    both += make_runs(tmp_path / "d", line([9.1] * 3), line([3.2] * 3), env="procgen:bigfish")
    assert main(["compare", *map(str, both), "--units", "procgen-easy"]) == 0
    printed = capsys.readouterr().out
    assert "│ optimality gap │       demo │            2 │ " in printed
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed


def test_measures_over_environments_without_a_common_unit_are_not_written(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "one", line([2.0] * 3), env="procgen:starpilot")
    runs += make_runs(tmp_path / "two", line([3.0] * 3), env="procgen:bigfish")
    raw, one_unit = (
        compare_runs(runs, units=units, output=tmp_path / units).files
        for units in ("raw", "procgen-easy")
    )
    assert not any("-measures" in path.name for path in raw)
    assert sum("-measures" in path.name for path in one_unit) == 3
    gap = [row for row in read_csv(tmp_path / "procgen-easy-measures.csv")
           if row["measure"] == "optimality gap"]  # fmt: skip
    assert float(gap[0]["value"]) == pytest.approx(1, abs=0.1)  # both play no better than chance


def test_ours_and_a_published_one_of_the_same_name_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all environments, too; on one each is the whole."""
    path = publish(monkeypatch, PUBLISHED)
    runs = make_runs(tmp_path, line([2.0] * 3), line([3.0] * 3), name="theirs")
    ours, theirs = compare_runs(runs, reference=path).overall
    assert (ours.label, theirs.label) == ("theirs", "theirs (published)")
    assert (ours.measures["mean"].value, theirs.measures["mean"].value) == (2.5, 10.0)
    assert ours.improves["theirs (published)"].value == 0.0


def test_a_share_of_what_is_below_zero_lies_below_it(tmp_path: Path) -> None:
    path = own_curve(tmp_path / "theirs.csv", "2000,-100,-100,-100")
    runs = make_runs(tmp_path, line([-104.0] * 3))
    found = [
        compare_runs(runs, reference=path, share_of_reference=share).missed
        for share in (0.95, 0.97, 1.03)
    ]
    assert found[0] == ()
    assert "at least -103 was wanted" in found[1][0] and "at least -97 was wanted" in found[2][0]


def test_one_published_number_counts_for_a_budget_that_rollouts_do_not_come_to(
    tmp_path: Path,
) -> None:
    path = own_curve(tmp_path / "far.csv", "2040,7,7,7")
    runs = make_runs(tmp_path, line([2.0] * 3))
    ours, theirs = compare_runs(runs, reference=path).results
    assert (ours.steps, theirs.steps, theirs.scores) == (2000, 2000, (7.0,))
    own_curve(path, "2041,7,7,7")
    with pytest.raises(ValueError, match=r"far on procgen:starpilot \(easy\) begins at 2,041 st"):
        compare_runs(runs, reference=path)


def test_few_published_numbers_count_for_their_budgets(tmp_path: Path) -> None:
    path = own_curve(tmp_path / "two.csv", "1000,5,5,5", "2040,7,7,7")
    runs = make_runs(tmp_path, line([2.0] * 3))  # to 2,000
    assert compare_runs(runs, reference=path).results[1].scores == (7.0,)
    # Between budgets: what lies between their numbers.
    (_, between) = compare_runs(runs, at_steps=1520, reference=path).results
    assert between.scores == (6.0,)
    # Of budgets that begin a little after the runs end, the first one counts.
    own_curve(path, "2040,7,7,7", "4000,9,9,9")
    assert compare_runs(runs, reference=path).results[1].scores == (7.0,)
    rows = read_csv(plot_runs(runs, output=tmp_path / "beside", reference=path)[2])
    assert [row["env_steps"] for row in rows if row["published"] == "1"] == ["2040"]


def test_an_evaluation_that_is_long_ago_is_not_the_score_of_now(tmp_path: Path) -> None:
    """Of two evaluations, at 1,000 and 2,000, the second runs end at 1,500, between them."""
    few = make_run(tmp_path / "few", [(1000, 10.0), (2000, 20.0)])
    many = make_run(tmp_path / "many", [(100 * i, 1.0) for i in range(1, 16)], name="many")
    first, second = compare_runs([few, many]).results
    assert (first.steps, first.scores, second.scores) == (1500, (15.0,), (1.0,))


def test_an_environment_is_one_however_its_id_was_spelled(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "one", line([2.0] * 3), env="CartPole-v1")
    runs += make_runs(tmp_path / "two", line([3.0] * 3), env="envpool:CartPole-v1", name="b")
    for run in runs:
        (run / "card.json").write_text('{"environment": "envpool:CartPole-v1"}')
    found = compare_runs(runs)
    assert {result.env_id for result in found.results} == {"envpool:CartPole-v1"}
    assert [one.label for one in found.overall] == ["demo", "b"]
    # One experiment, too: the id alone is no difference.
    runs = make_runs(tmp_path / "c", line([2.0] * 3), env="CartPole-v1")
    points = [(100 * i, value) for i, value in enumerate(line([4.0] * 3), start=1)]
    runs.append(make_run(tmp_path / "d", points, seed=2, env="envpool:CartPole-v1"))
    for run in runs:
        (run / "card.json").write_text('{"environment": "envpool:CartPole-v1"}')
    assert [result.scores for result in compare_runs(runs).results] == [(2.0, 4.0)]


def test_an_experiment_is_called_the_same_on_every_environment(tmp_path: Path) -> None:
    """Two rates on one game, of which another game has one."""
    runs = []
    for game, rates in {"starpilot": (1e-3, 3e-4), "bigfish": (1e-3,)}.items():
        for rate in rates:
            folder = tmp_path / game / str(rate)
            ppo = PPOConfig(learning_rate=rate)
            runs += make_runs(folder, line([rate] * 3), env=f"procgen:{game}", ppo=ppo)
    found = compare_runs(runs)
    assert [result.label for result in found.results] == [
        "demo, ppo.learning_rate 0.001", "demo, ppo.learning_rate 0.0003",
        "demo, ppo.learning_rate 0.001",
    ]  # fmt: skip
    assert [one.label for one in found.overall] == ["demo, ppo.learning_rate 0.001"]


def test_names_that_look_like_markup_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = make_runs(tmp_path / "a", line([2.0] * 3), name="ppo [red]")
    runs += make_runs(tmp_path / "b", line([3.0] * 3), name="ppo [x=3]")
    path = publish(monkeypatch, PUBLISHED.replace("theirs", "a [/b]"))
    assert main(["compare", *map(str, runs), "--reference", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("ppo [red]", "ppo [x=3]", "a [/b]"))


def test_a_seed_that_is_there_several_times_is_named(tmp_path: Path) -> None:
    """A run with another budget is one of the same experiment."""
    runs = [make_run(tmp_path / str(budget), [(100, 1.0)], seed=7, total_env_steps=budget)
            for budget in (1000, 2000)]  # fmt: skip
    runs += make_runs(tmp_path, [2.0], [3.0])
    with pytest.warns(UserWarning) as told:
        assert main(["compare", *map(str, runs)]) == 0
    (said,) = (str(each.message) for each in told)
    assert said.startswith("demo on procgen:starpilot (easy) has several runs of seed 7: give one")


def test_an_ending_that_is_given_is_not_put_there_twice(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "a", line([2.0] * 3))
    files = compare_runs(runs, output=tmp_path / "beside.csv").files
    assert files[0] == tmp_path / "beside.csv"
    assert {file.name.partition(".")[0] for file in files} == {
        "beside", "beside-profile", "beside-measures"
    }  # fmt: skip
