"""Runs beside each other and beside published ones, at equal steps."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from phasicrl.analysis.compare import compare_runs
from phasicrl.analysis.plot import plot_runs
from phasicrl.analysis.statistics import bootstrap_interval
from phasicrl.cli import main
from phasicrl.config import PPOConfig
from tests.analysis.test_plot import HEADER, make_run, make_runs, read_csv

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
    assert result.mean.value == 3.5 and result.reaches is None


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
    with pytest.raises(ValueError, match="other on procgen:starpilot ends at 1,000 steps"):
        compare_runs(runs, at_steps=1500)


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
    runs = make_runs(tmp_path, line([2.5] * 3), line([64.0] * 3))
    assert compare_runs(runs, units="procgen-easy").results[0].scores == (0.0, 1.0)
    hard = compare_runs(runs, units="procgen-hard").results[0].scores
    assert hard == pytest.approx((1 / 33.5, 62.5 / 33.5))
    other = make_runs(tmp_path / "c", line([1.0]), env="gymnasium:CartPole-v1")
    with pytest.raises(ValueError, match="gymnasium:CartPole-v1 has no bounds of Procgen"):
        compare_runs(other, units="procgen-easy")


def test_when_a_target_is_reached(runs: list[Path]) -> None:
    first, second = compare_runs(runs, target=7.0).results
    assert first.reaches == float("inf")  # 0 everywhere up to 1,000 … and 6 at the end
    assert second.reaches == 1000


PUBLISHED = HEADER + "".join(
    f"theirs,{run},starpilot,{step},{value}\n"
    for run, value in (("a", 8.0), ("b", 12.0))
    for step in range(100, 2500, 100)
)


def test_published_runs_stand_beside_ours(tmp_path: Path, runs: list[Path]) -> None:
    path = tmp_path / "published.csv"
    path.write_text(PUBLISHED)
    ours, theirs = compare_runs(runs[:3], reference=path).results
    assert (ours.steps, theirs.steps, theirs.published) == (2000, 2000, True)
    assert theirs.label == "theirs" and theirs.scores == (8.0, 12.0)


def test_bounds_that_do_not_hold_are_named(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "published.csv"
    path.write_text(PUBLISHED)
    words = ["compare", *map(str, runs[:3]), "--reference", str(path)]
    assert main([*words, "--at-least", "5", "--share-of-reference", "0.5"]) == 0
    capsys.readouterr()
    assert main([*words, "--at-least", "5.1", "--share-of-reference", "0.51"]) == 1
    said = capsys.readouterr().err
    assert "demo on procgen:starpilot: 5, at least 5.1 was wanted" in said
    assert "at least 5.1 was wanted, 0.51 of theirs's 10" in said
    assert main(["compare", *map(str, runs), "--share-of-reference", "1"]) == 2


def test_the_command_prints_and_writes(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made" / "beside"
    words = ["--output", str(output), "--target", "7"]
    assert main(["compare", *map(str, runs), *words]) == 0
    printed = capsys.readouterr().out
    assert "procgen:starpilot: charts/episodic_return_100 at 1k steps" in printed
    assert "never" in printed and "IQM" in printed and "probability of improvement" in printed
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


def test_ours_and_a_published_one_of_the_same_name_are_two(tmp_path: Path) -> None:
    """Over all environments, too; on one each is the whole."""
    path = tmp_path / "published.csv"
    path.write_text(PUBLISHED)
    runs = make_runs(tmp_path, line([2.0] * 3), line([3.0] * 3), name="theirs")
    ours, theirs = compare_runs(runs, reference=path).overall
    assert (ours.label, theirs.label) == ("theirs", "theirs (published)")
    assert (ours.measures["mean"].value, theirs.measures["mean"].value) == (2.5, 10.0)
    assert ours.improves["theirs (published)"].value == 0.0


def test_a_share_of_what_is_below_zero_lies_below_it(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text(HEADER + "theirs,a,starpilot,2000,-100\n")
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
    path = tmp_path / "published.csv"
    path.write_text(HEADER + "near,a,starpilot,2040,7\n")
    runs = make_runs(tmp_path, line([2.0] * 3))
    ours, theirs = compare_runs(runs, reference=path).results
    assert (ours.steps, theirs.steps, theirs.scores) == (2000, 2000, (7.0,))
    path.write_text(HEADER + "far,a,starpilot,2041,7\n")
    with pytest.raises(ValueError, match="far on procgen:starpilot begins at 2,041 steps"):
        compare_runs(runs, reference=path)


def test_few_published_numbers_count_for_their_budgets(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    runs = make_runs(tmp_path, line([2.0] * 3))  # to 2,000
    path.write_text(HEADER + "two,a,starpilot,1000,5\ntwo,a,starpilot,2040,7\n")
    assert compare_runs(runs, reference=path).results[1].scores == (7.0,)
    # Between budgets: what lies between their numbers.
    (_, between) = compare_runs(runs, at_steps=1520, reference=path).results
    assert between.scores == (6.0,)
    # Of budgets that begin a little after the runs end, the first one counts.
    path.write_text(HEADER + "two,a,starpilot,2040,7\ntwo,a,starpilot,4000,9\n")
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
    runs += make_runs(tmp_path / "d", line([4.0] * 3), env="envpool:CartPole-v1")
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = make_runs(tmp_path / "a", line([2.0] * 3), name="ppo [red]")
    runs += make_runs(tmp_path / "b", line([3.0] * 3), name="ppo [x=3]")
    path = tmp_path / "published.csv"
    path.write_text(PUBLISHED.replace("theirs", "a [/b]"))
    assert main(["compare", *map(str, runs), "--reference", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("ppo [red]", "ppo [x=3]", "a [/b]"))


def test_an_ending_that_is_given_is_not_put_there_twice(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "a", line([2.0] * 3))
    files = compare_runs(runs, output=tmp_path / "beside.csv").files
    assert files[0] == tmp_path / "beside.csv"
    assert {file.name.partition(".")[0] for file in files} == {
        "beside", "beside-profile", "beside-measures"
    }  # fmt: skip
