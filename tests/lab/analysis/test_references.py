"""Published results of the package equal the published numbers."""

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from phasicrl.cli import main
from phasicrl.lab.analysis import references
from phasicrl.lab.analysis.compare import compare_runs
from phasicrl.lab.analysis.curves import Task
from phasicrl.lab.analysis.plot import plot_runs
from phasicrl.lab.analysis.references import REFERENCE_NAMES, VALUE_NOTES, read_reference_curves
from phasicrl.lab.analysis.scores import PROCGEN_BOUNDS, scale_score
from phasicrl.lab.experiments.trials import RETURN
from tests.lab.analysis.runs import make_runs, own_curve, publish, read_csv


def rows(name: str) -> list[dict[str, str]]:
    return references._read_table(name)


def test_the_curves_of_the_paper_give_its_headline() -> None:
    """Mean normalized return over 16 games at 100M steps: .76 of PPG, .58 of PPO (abstract)."""
    last: dict[tuple[str, str, str], tuple[int, float]] = {}
    for row in rows("ppg-paper"):
        key = (row["experiment"], row["run"], row["game"])
        point = (int(row["step"]), float(row["episodic_return"]))
        last[key] = max(last.get(key, (0, 0.0)), point)
    scores: dict[str, list[float]] = defaultdict(list)
    for (experiment, _, game), (step, value) in last.items():
        assert step > 99e6
        scores[experiment].append(scale_score(value, PROCGEN_BOUNDS["hard"][game]))
    assert np.mean(scores["ppg"]) == pytest.approx(0.76, abs=0.015)
    assert np.mean(scores["ppo"]) == pytest.approx(0.58, abs=0.015)
    assert len(scores["ppg"]) == len(scores["ppo"]) == 48 and len(scores["e-pi-6"]) == 16


def test_the_paper_s_reference_is_its_two_algorithms_unless_others_are_named() -> None:
    def drawn(*wanted: str) -> set[str]:
        ends = {Task("procgen:starpilot", "hard"): 1e8}
        curves = read_reference_curves(
            Path("ppg-paper"), RETURN, end_by_task=ends, experiments=wanted
        )
        assert all(curve.values.shape[0] == (1 if "pi" in curve.label else 3) for curve in curves)
        return {curve.label for curve in curves}

    assert drawn() == {"ppg", "ppo"} and drawn("e-pi-1", "e-pi-6") == {"e-pi-1", "e-pi-6"}


def test_a_name_is_enough_and_versions_of_tasks_do_not_matter(tmp_path: Path) -> None:
    """Our run of CartPole-v1 beside RL Zoo's number, which was reached after 100,000 steps."""
    pytest.importorskip("matplotlib")
    runs = make_runs(tmp_path, [0.0] * 999 + [450.0, 9.0], env="gymnasium:CartPole-v1")
    ours, theirs = compare_runs(runs, reference=Path("zoo")).results
    assert ours.steps == theirs.steps == 100_000
    assert theirs.scores == (500.0,) and theirs.published
    table = read_csv(plot_runs(runs, output=tmp_path / "drawn", reference=Path("zoo"))[2])
    assert [row["mean"] for row in table if row["published"] == "1"] == ["500.0"]


def test_last_returns_of_baselines_equal_those_of_curves_and_normalized_means() -> None:
    last: dict[tuple[str, str, int], dict[str, float]] = defaultdict(dict)
    for row in rows("baselines-final"):
        key = (row["experiment"], row["split"], int(row["step"]))
        last[key][row["game"]] = float(row["episodic_return"])
    means = {("easy", "train", 25): 0.645, ("easy", "train", 50): 0.734,
             ("hard", "train", 100): 0.626, ("hard", "train", 200): 0.749,
             ("easy-200", "train", 25): 0.599, ("easy-200", "test", 25): 0.357,
             ("hard-500", "train", 200): 0.512, ("hard-500", "test", 200): 0.276}  # fmt: skip
    for (levels, split, millions), mean in means.items():
        found = last.pop((levels, split, millions * 1_000_000))
        bounds = PROCGEN_BOUNDS[levels.split("-")[0]]  # type: ignore[index]
        scores = [scale_score(value, bounds[game]) for game, value in found.items()]
        assert len(scores) == 16 and np.mean(scores) == pytest.approx(mean, abs=0.002), levels
    assert not last
    curves: dict[str, list[float]] = defaultdict(list)
    for row in rows("baselines-easy"):
        if int(row["step"]) > 48e6:
            curves[row["game"]].append(float(row["episodic_return"]))
    finals = {row["game"]: float(row["episodic_return"]) for row in rows("baselines-final")
              if row["experiment"] == "easy" and int(row["step"]) == 50_000_000}  # fmt: skip
    for game, values in curves.items():
        assert finals[game] == pytest.approx(np.mean(values), rel=0.1, abs=0.3), game


def test_cleanrl_s_curves_of_ppg_have_the_means_of_their_windows() -> None:
    """Mean returns over the second and third million steps, read off its episodes."""
    ends = {Task("procgen:starpilot", "easy"): 25e6}
    curves = {curve.label: curve for curve in
              read_reference_curves(Path("cleanrl-ppg"), RETURN, end_by_task=ends)}  # fmt: skip
    for label, low, means in (
        ("cleanrl-ppg", 1e6, (13.4, 9.6, 6.9)),
        ("cleanrl-ppg-full-value-gradient-in-aux", 2e6, (22.7, 24.6, 20.0)),
        ("cleanrl-ppg-two-networks", 2e6, (27.7, 24.7, 26.9)),
    ):
        curve = curves.pop(label)
        window = (curve.steps > low) & (curve.steps <= low + 1e6)
        assert curve.values[:, window].mean(axis=1) == pytest.approx(means, abs=0.05)
    assert not curves


def test_references_that_are_not_curves_have_descriptions() -> None:
    curves = [key for key in REFERENCE_NAMES if len({row["step"] for row in rows(key)}) > 20]
    assert {*REFERENCE_NAMES} - VALUE_NOTES.keys() == {*curves}


@pytest.mark.parametrize(
    ("distribution", "expected"), [("easy", {"easy", "easy-200"}), ("hard", {"hard", "hard-500"})]
)
def test_curves_of_the_same_difficulty_are_taken(distribution: str, expected: set[str]) -> None:
    ends = {Task("procgen:starpilot", distribution): 2e8}
    curves = read_reference_curves(Path("baselines-final"), RETURN, end_by_task=ends)
    assert {curve.label for curve in curves} == expected


EASY = Task("procgen:starpilot", "easy")
POINTS = [
    f"{experiment},{run},{game},{step},{step / 100 + run}" for experiment, run, game, step
    in itertools.product(("ppg", "ppo"), (0, 1, 2), ("starpilot", "heist"), (300, 100, 200.0))
]  # fmt: skip


def test_published_runs_are_read_up_to_our_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = read_reference_curves(publish(monkeypatch, *POINTS), RETURN, end_by_task={EASY: 200.0})
    assert [(curve.label, len(curve.values)) for curve in curves] == [("ppg", 3), ("ppo", 3)]
    for curve in curves:
        assert curve.steps.tolist() == [100, 200] and curve.mean.tolist() == [2.0, 3.0]
        np.testing.assert_array_equal(curve.band, ([1.0, 2.0], [3.0, 4.0]))


def test_each_difficulty_has_its_own_published_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task without any has none."""
    columns = ",distribution,num_levels"
    rows = ("ppo,0,heist,100,5,easy,0", "ppo,0,heist,100,2,hard,500")
    path = publish(monkeypatch, *rows, columns=columns)
    tasks = [Task("procgen:heist", level) for level in ("easy", "hard", "memory")]
    curves = read_reference_curves(path, RETURN, end_by_task=dict.fromkeys(tasks, 100.0))
    assert [(curve.task, curve.mean[0], curve.num_levels) for curve in curves] == [
        (tasks[0], 5, 0), (tasks[1], 2, 500)
    ]  # fmt: skip
    message = r"for procgen:heist \(memory\) nothing else. It has heist"
    with pytest.raises(ValueError, match=message):
        read_reference_curves(path, RETURN, end_by_task={tasks[2]: 100.0})


def test_evaluations_on_unseen_levels_have_references(recwarn: pytest.WarningsRecorder) -> None:
    def score(metric: str, game: str = "bigfish", reference: str = "baselines-easy-200") -> float:
        ends = {Task(f"procgen:{game}", "easy"): 5e7}
        (curve,) = read_reference_curves(Path(reference), metric, end_by_task=ends)
        return float(curve.mean[-1])

    train, unseen = score("evaluation/train_return"), score("evaluation/return")
    assert unseen < train == score(RETURN)
    score("evaluation/return", reference="baselines-easy")  # trained on all levels
    assert not recwarn.list
    score("evaluation/return", "coinrun")
    assert "returns on training levels only" in str(recwarn.pop().message)


def test_unsuitable_references_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, file, ends = publish(monkeypatch, *POINTS), tmp_path / "theirs.csv", {EASY: 50.0}
    with pytest.raises(ValueError, match="metric is losses/entropy; expected one of charts/ep"):
        read_reference_curves(made, "losses/entropy", end_by_task=ends)
    with pytest.raises(ValueError, match="begins at 100 steps; expected runs of procgen:starpilot"):
        read_reference_curves(made, RETURN, end_by_task=ends)
    for header in ("low,mean,high", "step,mean,high", "step,low,high", "step,low,mean"):
        (missing,) = {"step", "low", "mean", "high"} - {*header.split(",")}
        with pytest.raises(ValueError, match=rf"theirs.csv has no column {missing}; "):
            read_reference_curves(own_curve(file, header=header), RETURN, end_by_task=ends)
    with pytest.raises(ValueError, match="has no rows"):
        read_reference_curves(own_curve(file), RETURN, end_by_task=ends)
    with pytest.raises(ValueError, match=r"theirs.csv: .*'2,000'; expected a number"):
        read_reference_curves(own_curve(file, '100,1,"2,000",3'), RETURN, end_by_task=ends)
    own_curve(file, "10,1,2,3", "20,1,,3", header="\ufeffstep,low,mean,high")
    assert read_reference_curves(file, RETURN, end_by_task=ends)[0].mean.tolist() == [2], (
        "no blank one"
    )
    with pytest.raises(ValueError, match="one curve; expected runs of one environment"):
        read_reference_curves(file, RETURN, end_by_task=ends | {Task("procgen:heist", "easy"): 1.0})
    with pytest.raises(FileNotFoundError, match=r"zoos; .* \(easy\) baselines-easy, .*, made$"):
        read_reference_curves(Path("zoos"), RETURN, end_by_task=ends)


@pytest.mark.parametrize(("env", "names"), [
    ("gymnasium:CartPole-v1", "cleanrl, slm-lab, zoo"),
    ("envpool:Humanoid-v4", "cleanrl, slm-lab, tianshou"),
    ("toy:Corridor", "nothing else"),
])  # fmt: skip
def test_the_command_names_the_references_of_the_task(
    env: str, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = make_runs(tmp_path, [1.0], env=env)
    for given in (["ppg-paper"], ["nowhere.csv"], []):
        assert main(["compare", str(run), "--reference", *given]) != 0
        assert f"for {env} {names}" in " ".join(capsys.readouterr().err.split())
