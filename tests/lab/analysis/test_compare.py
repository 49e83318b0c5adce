"""Comparisons of runs with each other and with published runs at equal steps."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from phasicrl.cli import main
from phasicrl.config import EnvConfig, PPOConfig
from phasicrl.lab.analysis.compare import compare_runs, make_tables
from phasicrl.training.bootstrap import bootstrap_mean_interval
from tests.lab.analysis.runs import HARD, make_run, make_runs, numbers, own_curve, publish, read_csv


def line(values: list[float]) -> list[float]:
    """Return a curve of twenty rows: zeros, and then values."""
    return [0.0] * (20 - len(values)) + values


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Make three seeds of one experiment and two of another, of half as many steps."""
    one = make_runs(tmp_path / "one", line([2.0, 4.0]), line([3.0, 5.0]), line([7.0, 9.0]))
    two = make_runs(tmp_path / "two", *([1.0] * 9 + [last] for last in (6.0, 8.0)), name="other")
    return one + two


def compare(*words: object) -> int:
    return main(["compare", *map(str, words)])


def test_the_score_is_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    """Rows at 100 … 2,000: the last tenth is 1,900 and 2,000, without 1,800."""
    runs = make_runs(tmp_path, line([50.0, 2.0, 4.0]), line([50.0, 3.0, 5.0]), line([50, 7, 9]))
    (result,) = compare_runs(runs).results
    assert result.steps == 2000 and result.scores == (3.0, 4.0, 8.0)
    assert result.mean.value == 5 and result.reaches is None and result.reached == ()
    slow = bootstrap_mean_interval(result.scores)
    near = 0.02 * (slow[1] - slow[0])
    assert (result.mean.low, result.mean.high) == pytest.approx(slow, abs=near)
    paths: Any = map(str, make_runs(tmp_path / "long", [0.0, 1.0] * 1000))
    (long,) = compare_runs(list(paths)).results
    assert long.scores == (0.5,), "of all rows, not of those that a figure shows"


def test_all_are_compared_where_the_shortest_ends(runs: list[Path]) -> None:
    first, second = (comparison := compare_runs(runs)).results
    assert "at 1,000 steps, where other ends; its longest run has 2,000" in comparison.notes[-1]
    assert (first.label, second.label) == ("demo", "other")
    assert first.steps == second.steps == 1000
    assert first.scores == (0.0, 0.0, 0.0)  # later rows do not count
    assert second.scores == (6.0, 8.0)  # 1,000 alone is later than 900
    assert compare_runs(runs, at_steps=900).results[1].scores == (1.0, 1.0)
    for steps in (1500, 0, -5):
        with pytest.raises(ValueError, match=f"^at_steps is {steps:,}"):
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
    assert two.measures["mean"].value == 1.75 and "optimality gap" not in one.measures
    # Star pilot: 1 > 0, 1 = 1, 2 > 0, 2 > 1; big fish: 5 > 0, 5 < 6, 7 > both.
    assert one.improves["b"].value == pytest.approx((3.5 / 4 + 3 / 4) / 2)
    # An experiment that lacks an environment is not measured over all.
    runs += make_runs(tmp_path / "c", line([1.0]), name="c")
    assert [each.label for each in compare_runs(runs).overall] == ["demo", "b"]


def test_units_of_procgen(tmp_path: Path) -> None:
    """StarPilot's bounds are 2.5 and 64 on easy levels, 1.5 and 35 on hard ones."""
    curves = line([2.5] * 3), line([64.0] * 3)
    runs = make_runs(tmp_path / "easy", *curves)
    for units in ("procgen-easy", "procgen-easy-paper"):
        (one,) = compare_runs(runs, units=units).overall
        assert compare_runs(runs, units=units).results[0].scores == (0.0, 1.0)
        assert one.measures["optimality gap"].value == 0.5
    hard = make_runs(tmp_path / "hard", *curves, env=HARD)
    scores = compare_runs(hard, units="procgen-hard").results[0].scores
    assert scores == pytest.approx((1 / 33.5, 62.5 / 33.5))
    memory = EnvConfig(id="procgen:maze", distribution="memory")
    for others, units, task in [
        (runs, "procgen-hard", r"procgen:starpilot \(easy\)"),
        (hard, "procgen-easy-paper", r"procgen:starpilot \(hard\)"),
        (make_runs(tmp_path / "m", line([1.0]), env=memory), "procgen-easy", "procgen:maze"),
        (make_runs(tmp_path / "c", [1.0], env="CartPole-v1"), "procgen-easy", "CartPole-v1"),
    ]:
        with pytest.raises(ValueError, match=f"units is {units}; .* bounds of {task}"):
            compare_runs(others, units=units)  # type: ignore[arg-type]


PEAK = [(step, 100.0 if step == 4440 else 0.0) for step in range(0, 50_000, 10)]


@pytest.mark.parametrize(("curves", "target", "reached", "median"), [
    # A seed's own rows count: not another's late start, not lines between rows, not thinning.
    (
        [[(5000, 90), (30_000, 90)], [(21_000, 90), (30_000, 90)],
         [(8000, 80), (12_000, 100), (30_000, 100)]],
        90, (5000, 21_000, 12_000), 12_000,
    ),
    ([PEAK], 90, (4440,), 4440),
    # Not what comes after the shortest run has ended.
    ([[(100, 1), (200, 1)], [(100, 1), (200, 1), (220, 9)]], 9, (inf, inf), inf),
    ([[(100, 1), (200, 9)], [(100, 1), (200, 1)]], 9, (200, inf), inf),
])  # fmt: skip
def test_when_each_run_reaches_a_target(
    tmp_path: Path, curves: list[Any], target: float, reached: tuple[float, ...], median: float
) -> None:
    runs = [make_run(tmp_path / str(i), each, seed=i) for i, each in enumerate(curves)]
    other = make_run(tmp_path / "other", [(100, 0.0), (10**6, 200.0)], name="other")
    result, late = compare_runs([*runs, other], target=target).results
    assert late.reached == (inf,), "as many steps as the others"
    assert result.reached == reached
    assert result.reaches is not None and result.reaches.value == median


CLIMBS = ([0.0, 6, 6, 6, 6], [0.0, 0, 6, 6, 6], [0.0, 0, 0, 5, 0], [0.0, 0, 0, 0, 7], [4.0] * 5)
"""Seeds that are at 5 after 200, 300, 400 and 500 steps, and one that never is."""


def test_steps_to_a_target_are_in_the_table_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five reach it by 400. Of resampled medians 5.8 % are 200, and 5.8 % are none."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "200")
    output, file = tmp_path / "made" / "beside.csv", tmp_path / "b" / "comparison.json"
    words = ("--target", 5, "--output", output, "--json", file)
    assert compare(*make_runs(tmp_path, *CLIMBS), *words) == 0
    (result,) = json.loads(file.read_text())["results"]
    assert result["reached"] == [200, 300, 400, 500, None]
    printed = capsys.readouterr().out
    assert "400 (200 to never)" in printed and "4 of 5 runs" in printed
    rows = read_csv(output)
    assert numbers(rows, "steps_to_target") == [200, 300, 400, 500, inf]
    assert numbers(rows, "target") == [5] * 5 and numbers(rows, "score") == [6, 6, 0, 7, 4]
    files = sorted(path.name for path in output.parent.iterdir())
    assert files == ["beside.csv", "beside.png", "beside.svg"]


def test_targets_have_the_units_of_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the way from 2.5 to 64 is 33.25."""
    path = publish(monkeypatch, *(f"theirs,a,starpilot,{s},{s / 10}" for s in (332, 333, 500)))
    runs = make_runs(tmp_path, [2.5, 33.2, 33.3, 40.0, 40.0])
    found = compare_runs(runs, units="procgen-easy", target=0.5, reference=path).results
    assert [result.reached for result in found] == [(300,), (333,)]


@pytest.mark.parametrize("reference", ["cleanrl", "one.csv"])
def test_one_published_number_has_no_steps_to_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own_curve(Path("one.csv"), "500000,480,490,500")
    curve = [(step, step / 1000) for step in range(100_000, 600_000, 100_000)]
    run = make_run(tmp_path / "run", curve, env="gymnasium:CartPole-v1")
    found = compare_runs([run], target=300.0, reference=Path(reference))
    ours, theirs = found.results
    assert ours.reached == (300_000,) and theirs.reached == () and theirs.reaches is None
    assert any("steps to the target are not known" in note for note in found.notes)


PUBLISHED = [
    f"theirs,{run},starpilot,{step},{value}"
    for run, value in (("a", 8.0), ("b", 12.0))
    for step in range(100, 2500, 100)
]


def test_published_runs_may_have_our_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(monkeypatch, *PUBLISHED)
    runs = make_runs(tmp_path, line([2.0] * 3), line([3.0] * 3), name="theirs")
    found = compare_runs(runs, reference=path)
    assert [(each.full_name, each.steps, each.scores) for each in found.results] == [
        ("theirs", 2000, (2.0, 3.0)), ("theirs (published)", 2000, (8.0, 12.0))
    ]  # fmt: skip
    ours, theirs = found.overall
    assert (ours.measures["mean"].value, theirs.measures["mean"].value) == (2.5, 10.0)
    assert ours.improves["theirs (published)"].value == 0.0


def test_each_difficulty_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("theirs,0,starpilot,100,5,easy,0", "theirs,0,starpilot,100,2,hard,0")
    path = publish(monkeypatch, *rows, columns=",distribution,num_levels")
    runs = [make_run(tmp_path / "easy", [(100, 6.0)]),
            make_run(tmp_path / "hard", [(100, 1.0)], env=HARD)]  # fmt: skip
    found = compare_runs(runs, reference=path, share_of_reference=1.0)
    assert [(each.label, each.distribution, each.scores) for each in found.results] == [
        ("demo", "easy", (6.0,)), ("theirs", "easy", (5.0,)),
        ("demo", "hard", (1.0,)), ("theirs", "hard", (2.0,)),
    ]  # fmt: skip
    (missed,) = found.missed
    assert "demo on procgen:starpilot (hard) is 1; expected at least 2" in missed
    assert [one.label for one in found.overall] == ["demo", "theirs (published)"]


def test_notes_describe_published_scores(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "a", [0.0] * 999 + [450.0, 9.0], env="gymnasium:CartPole-v1")
    (note,) = compare_runs(runs, reference=Path("zoo")).notes
    assert "one number, the best checkpoint of one run, greedy" in note
    assert "ours: charts/episodic_return_100, sampled actions in training" in note
    few = EnvConfig(id="procgen:starpilot", num_levels=200)
    runs = [make_run(tmp_path / "few", [(100_000, 1.0)], env=few)]
    found = compare_runs(runs, reference=Path("baselines-easy"))
    assert found.notes == ("easy-all (published) was trained on all levels, demo on 200 levels",)
    (agent,) = compare_runs([Path("cartpole-ppg")]).results
    assert agent.label == "cartpole-ppg"
    assert compare_runs(runs, reference=Path("baselines-easy-200")).notes == ()


def test_the_command_fails_where_a_bound_is_missed(
    runs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*runs[:3], "--reference", publish(monkeypatch, *PUBLISHED)]
    tried = [(5, 0.5), ("nan", 0.5), (5.1, 0.51)]
    codes = [compare(*words, "--at-least", x, "--share-of-reference", y) for x, y in tried]
    assert codes == [0, 1, 1]
    error = capsys.readouterr().err
    assert "demo on procgen:starpilot (easy) is 5; expected at least 5.1" in error
    assert "0.51 of theirs (published) 10" in error
    assert compare(*runs, "--share-of-reference", 1) == 2
    other = make_runs(runs[0].parent / "other", [9.0], env="gymnasium:CartPole-v1")
    assert compare(*other, *words, "--share-of-reference", 0.1) == 1
    assert "CartPole-v1 has no published result; expected one" in capsys.readouterr().err


@pytest.mark.parametrize(("share", "missed"), [(0.95, []), (0.97, ["-103"]), (1.03, ["-97"])])
def test_a_share_below_zero_lies_below(tmp_path: Path, share: float, missed: list[str]) -> None:
    path = own_curve(tmp_path / "theirs.csv", "2000,-100,-100,-100")
    runs = make_runs(tmp_path, line([-104.0] * 3))
    found = compare_runs(runs, reference=path, share_of_reference=share).missed
    assert [f"expected at least {bound} (" in text
            for text, bound in zip(found, missed, strict=True)] == [True] * len(missed)  # fmt: skip


def test_tables_fit_into_eighty_columns_and_have_names_verbatim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals are on one line, and a single run has none."""
    monkeypatch.setenv("COLUMNS", "80")
    low = make_runs(tmp_path / "a", line([-1229.4] * 4), line([-1000.0] * 4), name="demo at " * 5)
    one = make_runs(tmp_path / "b", line([158.0] * 4), name="ppo [red]")
    assert compare(*low, *one, "--target", 150) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "│ -1,115 (-1,229 to -1,000) │ -1,229 │ -1,000 │" in printed
    assert "│ 158 (–) │" in printed and "│ 1.7k (–) │ 1 of 1 runs │" in printed
    assert "never │ 0 of 2 runs │" in printed and "never (" not in printed
    assert "ppo [red]" in printed and "all environments" not in printed
    # A pair is there once.
    assert printed.partition("probability of improvement")[2].count("(0 to 0)") == 1
    both = make_runs(tmp_path / "c", line([20.1] * 3), line([7.2] * 3))
    both += make_runs(tmp_path / "d", line([9.1] * 3), line([3.2] * 3), env="procgen:bigfish")
    assert compare(*both, "--units", "procgen-easy") == 0
    printed = capsys.readouterr().out
    assert "│ optimality gap │ demo       │            2 │ " in printed
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed
    assert compare(*both) == 0  # raw returns of two environments are not averaged
    assert "optimality gap" not in (printed := capsys.readouterr().out) and "IQM" not in printed


@pytest.mark.parametrize(("rows", "at_steps", "score"), [
    (("2040,7,7,7",), None, 7.0),  # a budget that whole rollouts do not hit exactly
    (("1000,5,5,5", "2040,7,7,7"), None, 7.0),
    (("1000,5,5,5", "2040,7,7,7"), 1520, 6.0),  # between budgets: interpolated
    (("2040,7,7,7", "4000,9,9,9"), None, 7.0),
    (("2041,7,7,7",), None, None),
])  # fmt: skip
def test_few_published_numbers_count_for_their_budgets(
    tmp_path: Path, rows: tuple[str, ...], at_steps: int | None, score: float | None
) -> None:
    path = own_curve(tmp_path / "two.csv", *rows)
    runs = make_runs(tmp_path, line([2.0] * 3))  # to 2,000
    if score is None:
        with pytest.raises(ValueError, match=r"expected at least 2,041, where two on procgen"):
            compare_runs(runs, reference=path)
    else:
        assert compare_runs(runs, at_steps=at_steps, reference=path).results[1].scores == (score,)


def test_an_early_evaluation_alone_is_not_the_score_at_the_end(tmp_path: Path) -> None:
    """Runs end at 1,500, between two evaluations at 1,000 and 2,000."""
    few = make_run(tmp_path / "few", [(1000, 10.0), (2000, 20.0)])
    many = make_run(tmp_path / "many", [(100 * i, 1.0) for i in range(1, 16)], name="many")
    first, second = compare_runs([few, many]).results
    assert (first.steps, first.scores, second.scores) == (1500, (15.0,), (1.0,))


def test_an_environment_is_one_however_its_id_was_spelled(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(seed), [(100, float(seed))], seed=seed, env=env)
        for seed, env in ((2, "CartPole-v1"), (4, "envpool:CartPole-v1"))
    ]
    for run in runs:
        (run / "card.json").write_text('{"environment": "envpool:CartPole-v1"}')
    (result,) = compare_runs(runs).results
    assert (result.env_id, result.scores) == ("envpool:CartPole-v1", (2.0, 4.0))


def test_an_experiment_has_one_name_on_every_environment(tmp_path: Path) -> None:
    """Two rates on one game, of which another game has one."""
    runs = []
    for game, rates in {"starpilot": (1e-3, 3e-4), "bigfish": (1e-3,)}.items():
        for rate in rates:
            folder = tmp_path / game / str(rate)
            ppo = PPOConfig(learning_rate=rate)
            runs += make_runs(folder, line([rate] * 3), env=f"procgen:{game}", ppo=ppo)
    found = compare_runs(runs)
    assert [result.label for result in found.results] == ["lr 3e-4", "lr 1e-3", "lr 1e-3"]
    assert [one.label for one in found.overall] == ["lr 1e-3"]
    lacking = "lr 3e-4 lacks an environment: not in the measures"
    assert found.notes == ("all runs are of demo", lacking)


def test_more_than_ten_experiments_are_compared_with_the_first(tmp_path: Path) -> None:
    clips = [0.125 * i for i in range(1, 12)]
    runs = [make_runs(tmp_path / f"{clip}", line([clip] * 3), ppo=PPOConfig(clip=clip))[0]
            for clip in clips]  # fmt: skip
    for number in (10, 11):
        *_, (_, _, rows) = make_tables(compare_runs(runs[:number]))
        assert len(rows) == {10: 10 * 9 / 2, 11: 10}[number]
    assert [(one, over) for one, _, over in rows] == [
        (f"clip {clip}", "clip 0.125") for clip in clips[1:]
    ]  # fmt: skip
