"""Searches: values, reports, pruning, interruption."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from phasicrl.cli import main
from phasicrl.config import Config
from phasicrl.config_io import SCHEMA, read_instance, write_json
from phasicrl.lab.experiments import trials
from phasicrl.lab.sweeps import grid, sweep
from phasicrl.lab.sweeps import search as module
from phasicrl.presets import get_preset
from phasicrl.runs.checkpoint import CheckpointError
from phasicrl.runs.directory import AGENTS_FOLDER
from phasicrl.runs.lock import RunInUseError
from tests.faults.harness import small
from tests.helpers import run_here

VALUES: dict[str, Any] = {"ppo.learning_rate": ["log", 1e-5, 1e-1], "ppo.clip": [0.1, None]}


def written(folder: Path, search: module.Search, count: int) -> Path:
    """Write a search of a small configuration."""
    for number in range(count):
        grid.write_dataclass(folder / f"{number:04d}" / grid.TRIAL_FILE, search.base)
    write_json(folder / grid.SEARCH_FILE, search)
    return folder


def search_of(tmp_path: Path, *more: Any, values: dict[str, Any] = VALUES) -> module.Search:
    """Describe a search over 24 iterations."""
    base = small(tmp_path, "ppo", total_env_steps=1536, imports=("tests.corridor",))
    return module.Search(base, values, *more)


def trained(folder: Path, number: int) -> str:
    return sweep.train_trial(folder / f"{number:04d}")


def test_values_come_from_their_lists() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    spaces: dict[str, list[Any]] = {
        "whole": ["uniform", 1, 3], "parts": ["uniform", 1, 3.0], "rates": ["log", 1e-4, 1.0],
        "words": ["log", "uniform", 3], "lists": [[32, 32], None],
    }  # fmt: skip
    distributions = {path: module.make_optuna_distribution(x) for path, x in spaces.items()}
    drawn = [study.ask(distributions).params for _ in range(200)]
    whole, parts, rates = ([each[name] for each in drawn] for name in ("whole", "parts", "rates"))
    assert set(whole) == {1, 2, 3} and all(type(value) is int for value in whole)
    assert len(set(parts)) == 200 and min(parts) >= 1 and max(parts) <= 3
    assert 70 < sum(rate < 1e-2 for rate in rates) < 130, "half of the factors"
    assert {each["words"] for each in drawn} == {'"log"', '"uniform"', "3"}
    assert {each["lists"] for each in drawn} == {"[32, 32]", "null"}


def test_a_search_is_made_and_extended(tmp_path: Path) -> None:
    values = VALUES | {"ppo.value_clip": ["uniform", 1, 2], "ppo.policy_epochs": ["uniform", 1, 2]}
    (tmp_path / "values.json").write_text(json.dumps(values))
    words = [str(tmp_path / "search"), "classic-ppo", str(tmp_path / "values.json")]
    assert main(["sweep", "search", *words, "--trials", "2"]) == 0
    assert module.write_search(Path(words[0]), words[1], Path(words[2]), trials=5) == 3
    base, file = get_preset("classic-ppo"), tmp_path / "search" / grid.SEARCH_FILE
    search = read_instance(module.Search, file)
    assert search == module.Search(base, values, (1, 2, 3), 5)
    assert [{*map(type, x[1:])} for x in search.values.values()][2:] == [{float}, {int}]
    found = [(x.id, x.state, x.arm) for x in sweep.get_trial_statuses(file.parent)]
    assert found == [(f"{number:04d}", "pending", "no settings yet") for number in range(5)]
    with pytest.raises(ValueError, match="with another sweep"):
        module.write_search(tmp_path / "search", "classic-ppo", tmp_path / "values.json", rungs=1)
    sweep.add_trials(tmp_path / "grid", ["classic-ppo"], seeds=(1,))
    with pytest.raises(ValueError, match="with another sweep"):
        module.write_search(tmp_path / "grid", "classic-ppo", tmp_path / "values.json")


@pytest.mark.parametrize(("values", "options", "says"), [
    (VALUES, {"seeds": (1, 101)}, "seeds has 101; expected 0 to 100"),
    (VALUES, {"seeds": (-5,)}, "seeds has -5; expected 0 to 100"),
    (VALUES, {"rungs": 0}, "expected at least 1 of each"),
    (VALUES, {"trials": 0}, "trials is 0; expected at least 1"),
    (VALUES, {"seeds": ()}, "expected at least 1 of each"),
    ({}, {}, "expected at least 1 of each"),
    ({"ppo.clip": ["log", 0, 1]}, {}, r"ppo.clip is \['log', 0, 1\]; expected bounds"),
    ({"ppo.clip": ["uniform", 2, 1]}, {}, r"ppo.clip is \['uniform', 2, 1\]; expected bounds"),
    ({"ppo.gamma": ["uniform", 0.5, 2.0]}, {}, "ppo.gamma=2.0: "),
    ({"env.id": ["gymnasium:sent_with_it:X-v0"]}, {}, "add --import sent_with_it"),
])  # fmt: skip
def test_a_search_is_refused_where_it_would_mislead(
    tmp_path: Path, values: Any, options: dict[str, Any], says: str
) -> None:
    (tmp_path / "values.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=says):
        module.write_search(tmp_path / "search", "classic-ppo", tmp_path / "values.json", **options)
    assert not (tmp_path / "search").exists()


class Returns:
    """Stand-in of training: returns grow with learning rate, seed and steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Any = KeyboardInterrupt) -> None:
        self.error = error
        self.trained: list[tuple[float, int, int]] = []
        self.interrupt_at: tuple[int, int] | None = None
        monkeypatch.setattr(module, "_train_until", self.train)
        monkeypatch.setattr(module, "score_run", lambda found, until: found)

    def train(self, config: Config, until: int) -> float:
        if self.interrupt_at == (config.seed, until):
            self.interrupt_at = None
            raise self.error
        self.trained.append((config.ppo.learning_rate, config.seed, until))
        return 1e6 * config.ppo.learning_rate + {1: 0, 2: 10, 3: 20, 4: 1000}[config.seed] + until


def test_the_worse_half_is_pruned_by_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    returns = Returns(monkeypatch)
    folder = written(tmp_path / "search", search_of(tmp_path, (1, 2, 3, 4), 3), 12)
    states = [trained(folder, number) for number in range(12)]
    study = module.open_study(folder)
    assert [state.name.lower() for state in (t.state for t in study.trials)] == states
    first = [step[1:] for step in returns.trained[:12]]
    assert first == [(seed, until) for until in (512, 1024, 1536) for seed in (1, 2, 3, 4)]
    assert "pruned" in states and states.index("pruned") >= 5, "five are finished first"
    for trial in study.trials:
        config = read_instance(Config, folder / f"{trial.number:04d}" / grid.TRIAL_FILE)
        rate = trial.params["ppo.learning_rate"]
        assert config.ppo.learning_rate == rate and config.seed == 1
        # The interquartile mean of four leaves the best and the worst out.
        steps = sorted({step[2] for step in returns.trained if step[0] == rate})
        reported = dict(trial.intermediate_values)
        assert list(reported) == steps, "what was pruned was trained no further"
        assert reported == pytest.approx({until: 1e6 * rate + 15 + until for until in steps})
        is_pruned = trial.state == TrialState.PRUNED
        assert is_pruned == (steps != [512, 1024, 1536])
        if is_pruned:
            others = [t.intermediate_values[steps[-1]] for t in study.trials[: trial.number]
                      if steps[-1] in t.intermediate_values]  # fmt: skip
            assert reported[steps[-1]] < sorted(others)[len(others) // 2]
    scores = [x.score for x in sweep.get_trial_statuses(folder) if x.state == "complete"]
    assert max(filter(None, scores)) == study.best_value
    assert main(["sweep", "status", str(folder)]) == 0
    assert "/trial.json --seed 101 --import tests.corridor`" in capsys.readouterr().out


def test_trials_of_any_length_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial is worse than all before it."""
    monkeypatch.setattr(module, "_train_until", lambda *_: 0)
    values = {"total_env_steps": ["uniform", 1000, 9000]}
    folder = written(tmp_path / "search", search_of(tmp_path, (1,), 3, values=values), 9)
    states = []
    for number in range(9):
        monkeypatch.setattr(module, "score_run", lambda *_, worse=number: -worse)
        states.append(trained(folder, number))
    assert states == ["complete"] * 5 + ["pruned"] * 4


def test_a_seed_without_a_return_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Returns(monkeypatch)
    scores = {1: 4.0, 2: math.nan, 3: 5.0, 4: 6.0}
    monkeypatch.setattr(module, "_train_until", lambda config, _: scores[config.seed])
    folder = written(tmp_path / "search", search_of(tmp_path, (1, 2, 3, 4), 1), 1)
    assert trained(folder, 0) == "fail"
    assert "learning_rate=0.00" in (arm := sweep.get_trial_statuses(folder)[0].arm) and "nan" in arm


@pytest.mark.parametrize(("at", "error"), [
    ((2, 768), KeyboardInterrupt), ((1, 1152), RunInUseError), ((2, 1536), CheckpointError),
])  # fmt: skip
def test_an_interrupted_trial_keeps_its_settings_and_its_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[int, int], error: type[Exception]
) -> None:
    returns = Returns(monkeypatch, error)
    folder = written(tmp_path / "search", search_of(tmp_path, (1, 2), 4), 2)
    returns.interrupt_at = at
    with pytest.raises(error):
        trained(folder, 0)
    (cut,) = module.open_study(folder).trials
    assert cut.state == TrialState.RUNNING
    assert list(cut.intermediate_values) == list(range(384, at[1], 384))
    assert [trained(folder, number) for number in (1, 0)] == ["complete"] * 2
    study = module.open_study(folder)
    assert study.trials[0].params == cut.params and len(study.trials) == 2
    assert all([*t.intermediate_values] == [384, 768, 1152, 1536] for t in study.trials)
    before = len(returns.trained)
    (folder / "0000" / grid.OUTCOME_FILE).unlink()  # killed before it was written
    assert trained(folder, 0) == "complete" and len(returns.trained) == before


@pytest.mark.parametrize("left", [b'{"op_code":8,"trial', b""])
def test_the_study_continues_after_a_line_cut_by_a_full_disk(tmp_path: Path, left: bytes) -> None:
    module.open_study(tmp_path).ask().set_user_attr("a", 1)
    with (tmp_path / module.STUDY_FILE).open("ab") as file:
        file.write(left)
    module.open_study(tmp_path).ask().set_user_attr("a", 2)
    assert [x.user_attrs for x in module.open_study(tmp_path).trials] == [{"a": 1}, {"a": 2}]


def test_values_that_do_not_fit_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Returns(monkeypatch)
    # A process that trains imports the module of an environment later.
    grid.make_arm(get_preset("classic-ppo"), {"env.id": "gymnasium:sent_with_it:X-v0"})
    uneven = {"ppo.num_minibatches": ["uniform", 2, 4]}
    folder = written(tmp_path / "search", search_of(tmp_path, (1,), values=uneven), 8)
    states = [trained(folder, number) for number in range(8)]
    assert {"complete", "fail"} == set(states), "64 steps in 3 minibatches"
    for trial, state in zip(module.open_study(folder).trials, states, strict=True):
        assert (trial.params["ppo.num_minibatches"] == 3) == (state == "fail")
    for status in sweep.get_trial_statuses(folder):
        assert ("ppo.num_minibatches=3: " in status.arm) == (status.state == "fail"), status.arm


def test_values_that_fail_in_training_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("an episode is longer")

    monkeypatch.setattr(module, "_train_until", refuse)
    folder = written(tmp_path / "search", search_of(tmp_path, (1,)), 1)
    assert trained(folder, 0) == "fail"
    assert sweep.get_trial_statuses(folder)[0].arm == "an episode is longer"


def test_paths_of_weights_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(AGENTS_FOLDER / "cartpole-ppg", "own")
    Path("values.json").write_text(json.dumps({"init_from": ["own", None]}))
    for _ in range(2):  # the second adds nothing
        module.write_search(Path("search"), "cartpole-ppg", Path("values.json"), trials=1)
    search = read_instance(module.Search, Path("search") / grid.SEARCH_FILE)
    assert search.values == {"init_from": [str(tmp_path / "own"), None]}


@pytest.mark.parametrize(("tree", "says"), [
    ("[]", "search.json"),
    ('{"values": 3}', "values is 3"),
    ('{"values": {"ppo.clip": 3}}', "expected a list"),
    ('{"values": {"ppo.clip": [1]}, "seeds": ["a"]}', "seeds is 'a'"),
    ('{"values": {"env.id": ["gymnasium:sent_with_it:X-v0"]}}', "add --import sent_with_it"),
    ('{"values": {"imports": [["sent_with_it"]]}}', "add --import sent_with_it"),
    ('{"values": {"ppo.clip": [1]}, "base": {"env": {"id": "gymnasium:sent_with_it:X-v0"}}}',
     "add --import sent_with_it"),
])  # fmt: skip
def test_received_searches_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tree: str, says: str,
) -> None:  # fmt: skip
    (tmp_path / "sent_with_it.py").write_text("raise SystemExit('it runs')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trials, "run_in_processes", run_here)
    folder = written(tmp_path / "search", search_of(tmp_path), 1)
    (folder / grid.SEARCH_FILE).write_text(tree.replace("{", f'{{"schema": {SCHEMA}, ', 1))
    assert main(["sweep", "run", str(folder)]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert "sent_with_it" not in sys.modules and not (folder / "0000" / "runs").exists()


def test_diverged_runs_have_lowest_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plain = small(tmp_path, "ppo", total_env_steps=640), trials.train

    def diverging(config: Config, **how: Any) -> None:
        run = plain(config, callbacks=lambda run, _: "stop" if run.iteration == 9 else None)
        run.files.write_card(run.files.card | {"diverged": True})
        raise ValueError("no numbers")

    monkeypatch.setattr(trials, "train", diverging)
    files = module._train_until(config, 640)
    returns = [row[trials.RETURN] for row in files.metrics() if trials.RETURN in row]
    assert module.score_run(files, 640) == min(returns)
    assert module.score_run(files, 9 * 64) == returns[-1] != min(returns)
    assert module.score_run(files, 5 * 64) == files.metrics()[4][trials.RETURN]
    files.write_card({})  # as of a run that reached `stop_at_return`
    assert module.score_run(files, 640) == returns[-1]


@pytest.mark.long
def test_each_seed_is_trained_to_its_rung_and_the_best_trial_can_be_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train a trial of two seeds, a diverging one, and the best one again."""
    base = small(tmp_path / "again", "ppo", total_env_steps=12 * 64)
    base = base.with_updates({"ppo.max_grad_norm": None})
    search = module.Search(base, {"ppo.learning_rate": [1e-3, 1e30]}, (1, 2), 2)
    stops: list[tuple[int, int]] = []
    plain = module._train_until

    def noted(config: Config, until: int) -> Any:
        files = plain(config, until)
        stops.extend((config.seed, row["env_steps"]) for row in files.last_rows(1))
        return files

    monkeypatch.setattr(module, "_train_until", noted)
    monkeypatch.setattr(trials, "run_in_processes", run_here)
    folder = written(tmp_path / "search", search, 6)
    said: list[str] = []
    sweep.run_sweep(folder, on_trial=lambda name, _: said.append(name))
    assert len(said) == 6
    assert {"lr 1e-3)" in name or "1e+30: score is nan" in name for name in said} == {True}, said
    states = {status.id: status.state for status in sweep.get_trial_statuses(folder)}
    assert {*states.values()} == {"complete", "fail"}
    complete = [trial for trial, state in states.items() if state == "complete"]
    assert stops == [(1, 384), (2, 384), (1, 768), (2, 768)] * len(complete)
    best = folder / complete[0] / grid.TRIAL_FILE
    assert main(["sweep", "status", "--", str(folder)]) == 0
    assert f"phasicrl train --from {folder}" in capsys.readouterr().out
    assert main(["train", "--from", str(best), "--seed", "101"]) == 0
    assert next((tmp_path / "again").glob("*_s101_*")).is_dir()
