"""A search: its spaces, what it reports and gives up, what is not lost, what it exports."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.config import Config
from phasicrl.experiments import trials as trials_module
from phasicrl.experiments.trials import RESULT_FILE
from phasicrl.optimize import DivergedError
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory, read_config
from phasicrl.sweeps import search as module
from phasicrl.sweeps.search import (
    Search,
    Space,
    best_of_search,
    create_search,
    open_study,
    run_slot,
)
from phasicrl.sweeps.sweep import Sweep, configs_of, create_sweep
from phasicrl.sweeps.work import work_on_sweep
from tests.faults.harness import small

SPACES = {"ppo.learning_rate": Space(low=1e-5, high=1e-1, log=True), "ppo.clip": Space((0.1, None))}


def slot(folder: Path, number: int) -> dict[str, Any]:
    sweep = Sweep(folder)
    return run_slot(sweep, sweep.trial(f"slot-{number:04d}"), jobs=1, cores=None)


def read(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def test_spaces_are_read() -> None:
    assert Space.parse("log:1e-5:1e-3", read) == Space(low=1e-5, high=1e-3, log=True)
    assert Space.parse("1:6", read) == Space(low=1, high=6)
    assert Space.parse("-0.5:0.5", read) == Space(low=-0.5, high=0.5)
    assert Space.parse("0.1,0.2", read) == Space((0.1, 0.2))
    assert Space.parse("procgen:coinrun,procgen:maze", read).choices == (
        "procgen:coinrun", "procgen:maze"
    )  # fmt: skip
    for wrong in ("3:1", "log:0:1", "2:2"):
        with pytest.raises(ValueError, match="has no values; give LOW:HIGH"):
            Space.parse(wrong, read)


def test_values_come_from_their_spaces() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    whole, parts, rates, layers = [], [], [], []
    for _ in range(200):
        trial = study.ask()
        whole.append(Space(low=1, high=3).suggest(trial, "a"))
        parts.append(Space(low=1, high=3.0).suggest(trial, "b"))
        rates.append(Space(low=1e-4, high=1.0, log=True).suggest(trial, "c"))
        layers.append(Space(((32, 32), None)).suggest(trial, "d"))
    assert set(whole) == {1, 2, 3} and all(type(value) is int for value in whole)
    assert len(set(parts)) == 200 and min(parts) >= 1 and max(parts) <= 3
    assert 70 < sum(rate < 1e-2 for rate in rates) < 130, "half of the factors"
    assert set(layers) == {(32, 32), None}


def test_a_search_is_refused_where_it_would_mislead(tmp_path: Path) -> None:
    folder, base = tmp_path / "search", small(tmp_path, "ppo")
    with pytest.raises(ValueError, match="seed 101 would use it up; give seeds below 101"):
        create_search(folder, base, SPACES, seeds=(1, 101))
    with pytest.raises(ValueError, match="nothing to search"):
        create_search(folder, base, {})
    with pytest.raises(ValueError, match=r"ppo.clip=-1: .*clip"):
        create_search(folder, base, {"ppo.clip": Space((0.1, -1))})
    with pytest.raises(ValueError, match=r"ppo.gamma=2.0: "):
        create_search(folder, base, {"ppo.gamma": Space(low=0.5, high=2.0)})
    with pytest.raises(ValueError, match=r"the seeds are 1 2 1, .* twice; give each once"):
        create_search(folder, base, SPACES, seeds=(1, 2, 1))
    with pytest.raises(ValueError, match="a sweep sets seed itself; give --seeds"):
        create_search(folder, base, {"seed": Space(low=1, high=9)})
    assert not folder.exists()
    create_sweep(tmp_path / "grid", [("a", base)])
    with pytest.raises(ValueError, match=r"grid is a grid; .*, a search needs a folder of its own"):
        create_search(tmp_path / "grid", base, SPACES)
    with pytest.raises(ValueError, match=r"grid is a grid; `phasicrl sweep results .*/grid` comp"):
        best_of_search(tmp_path / "grid")
    assert create_search(folder, base, SPACES, trials=2) == (2, 2)
    assert create_search(folder, base, SPACES, trials=5) == (3, 5)
    with pytest.raises(ValueError, match="has another search"):
        create_search(folder, base, SPACES, trials=5, rungs=1)
    with pytest.raises(ValueError, match="has a search; give the grid a folder of its own"):
        create_sweep(folder, [("a", base)])
    with pytest.raises(ValueError, match=r"no trial of .* is finished"):
        best_of_search(folder)
    assert Search.read(folder) == Search(base, SPACES, (1, 2, 3), 5)


class Returns:
    """Stands for training: a run's return grows with its learning rate, seed and steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[tuple[float, int, int]] = []
        self.interrupt_at: tuple[int, int] | None = None
        monkeypatch.setattr(module, "_train_until", self.train)
        monkeypatch.setattr(module, "_score", lambda found, until: found)
        monkeypatch.setattr(module, "measure_once", lambda config, measure: {})

    def train(self, config: Config, until: int) -> float:
        if self.interrupt_at == (config.seed, until):
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.trained.append((config.ppo.learning_rate, config.seed, until))
        return 1e6 * config.ppo.learning_rate + {1: 0, 2: 10, 3: 20, 4: 1000}[config.seed] + until


def test_seeds_go_side_by_side_and_the_worse_half_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns, folder, base = Returns(monkeypatch), tmp_path / "search", small(tmp_path, "ppo")
    create_search(folder, base, SPACES, trials=12, seeds=(1, 2, 3, 4), rungs=3)
    said = [slot(folder, number) for number in range(12)]
    study = open_study(folder)
    assert [one["trial"] for one in said] == list(range(12)) == [t.number for t in study.trials]
    first = [step[1:] for step in returns.trained[:12]]
    assert first == [(seed, until) for until in (512, 1024, 1536) for seed in (1, 2, 3, 4)]
    pruned = [one["trial"] for one in said if "pruned" in one]
    assert pruned and min(pruned) >= 5, "five are finished before any is given up"
    for trial in study.trials:
        config = Config.from_json(trial.user_attrs["config"])
        rate = trial.params["ppo.learning_rate"]
        assert config.ppo.learning_rate == rate and config.seed == 1
        # The interquartile mean of four leaves the best and the worst out.
        expected = {until: 1e6 * rate + 15 + until for until in (512, 1024, 1536)}
        reported = dict(trial.intermediate_values)
        steps = sorted({step[2] for step in returns.trained if step[0] == rate})
        assert list(reported) == steps, "what was given up was trained no further"
        assert reported == pytest.approx({until: expected[until] for until in steps})
        is_pruned = trial.state == optuna.trial.TrialState.PRUNED
        assert is_pruned == (trial.number in pruned) == (steps != [512, 1024, 1536])
        if is_pruned:
            others = [t.intermediate_values[steps[-1]] for t in study.trials[: trial.number]
                      if steps[-1] in t.intermediate_values]  # fmt: skip
            assert reported[steps[-1]] < sorted(others)[(len(others)) // 2]


@pytest.mark.parametrize("left", [b'{"op_code":8,"trial', b"\n", b""])
def test_the_study_goes_on_after_a_line_that_a_full_disk_cut(tmp_path: Path, left: bytes) -> None:
    create_search(tmp_path / "s", small(tmp_path, "ppo"), SPACES, trials=1, seeds=(1,))
    study = open_study(tmp_path / "s")
    study.ask()
    with (tmp_path / "s" / module.STUDY).open("ab") as file:
        file.write(left.strip())
    # A process that was there before goes on, and so does one that begins later.
    study.ask().set_user_attr("a", 1)
    assert [trial.user_attrs for trial in open_study(tmp_path / "s").trials] == [{}, {"a": 1}]
    with pytest.raises(ValueError, match=r"no trial of .* is finished"):
        best_of_search(tmp_path / "s")


@pytest.mark.long
@pytest.mark.timeout(30)
def test_a_lock_that_a_killed_process_left_is_given_up_also_in_a_folder_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "GRACE_SECONDS", 3)
    create_search(Path("s"), small(tmp_path, "ppo"), SPACES, trials=1, seeds=(1,))
    made: list[str] = []
    symlink = os.symlink
    monkeypatch.setattr(os, "symlink", lambda to, at: (made.append(to), symlink(to, at)))
    open_study(Path("s"))
    symlink(made[0], Path("s") / f"{module.STUDY}.lock")  # as the killed one would have made it
    assert len(open_study(Path("s")).trials) == 0


def test_a_trial_that_was_cut_off_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns, folder = Returns(monkeypatch), tmp_path / "search"
    create_search(folder, small(tmp_path, "ppo"), SPACES, trials=2, seeds=(1, 2), rungs=2)
    returns.interrupt_at = (2, 1536)
    with pytest.raises(KeyboardInterrupt):
        slot(folder, 0)
    (cut,) = open_study(folder).trials
    assert cut.state == optuna.trial.TrialState.RUNNING and list(cut.intermediate_values) == [768]
    slot(folder, 1)
    slot(folder, 0)
    study = open_study(folder)
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert study.trials[0].params == cut.params
    assert {step[0] for step in returns.trained} == {
        t.params["ppo.learning_rate"] for t in study.trials
    }
    before = len(returns.trained)
    assert slot(folder, 0) == {"trial": 0} and len(returns.trained) == before


def test_a_part_that_was_judged_is_not_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna would judge the first part by what was reported after the last one."""
    returns, folder = Returns(monkeypatch), tmp_path / "search"
    create_search(folder, small(tmp_path, "ppo"), SPACES, trials=1, seeds=(1,), rungs=4)
    judged: list[int] = []

    def should_prune(trial: optuna.Trial) -> bool:
        judged.append(returns.trained[-1][2])
        return False

    monkeypatch.setattr(optuna.Trial, "should_prune", should_prune)
    returns.interrupt_at = (1, 1152)
    with pytest.raises(KeyboardInterrupt):
        slot(folder, 0)
    assert judged == [384, 768]
    slot(folder, 0)  # the second part perhaps not to its end: whether it goes on is asked again
    assert judged == [384, 768, 768, 1152]


def test_settings_that_differ_little_have_results_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Returns(monkeypatch)
    folder, clips = tmp_path / "search", (0.123412, 0.123388)
    create_search(folder, small(tmp_path, "ppo"), {"ppo.clip": Space(clips)}, trials=6, seeds=(1,))
    for number in range(6):
        slot(folder, number)
    arms = {trial.arm for trial in Sweep(folder).trials()}
    assert arms == {"ppo.clip=0.123412", "ppo.clip=0.123388"}


@pytest.mark.parametrize("is_choice", [False, True])
def test_a_search_that_was_received_imports_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_choice: bool
) -> None:
    """Neither where its base names one nor where a trial may choose it."""
    Returns(monkeypatch)
    (tmp_path / "sent_with_it.py").write_text("raise SystemExit('it runs')")
    monkeypatch.syspath_prepend(tmp_path)
    folder, name = tmp_path / "search", "gymnasium:sent_with_it:X-v0"
    create_search(folder, small(tmp_path, "ppo"), SPACES, trials=1, seeds=(1,))
    tree = json.loads((folder / "search.json").read_text())
    if is_choice:
        tree["spaces"]["env.id"] = [name]
    else:
        tree["base"]["env"]["id"] = name
    (folder / "search.json").write_text(json.dumps(tree))
    sweep = Sweep(folder)
    for act in (
        lambda: run_slot(sweep, sweep.trial("slot-0000"), jobs=1, cores=2),
        lambda: work_on_sweep(folder),
    ):
        with pytest.raises(ValueError, match="if you trust it, add --import sent_with_it"):
            act()
    assert "sent_with_it" not in sys.modules and not (folder / "runs").exists()
    assert not list((folder / "attempts").iterdir()), "no process was started"


def test_weights_to_begin_with_are_looked_at_and_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(small(tmp_path / "runs", "ppo", total_env_steps=64)).directory
    folder, there = tmp_path / "search", f"runs/{run.name}"
    monkeypatch.chdir(tmp_path)
    base = small(tmp_path, "ppo")
    with pytest.raises(ValueError, match="nowhere is not a run directory"):
        create_search(folder, base.changed({"init_from": "nowhere"}), SPACES)
    with pytest.raises(ValueError, match="nowhere is not a run directory"):
        create_search(folder, base, {"init_from": Space((there, "nowhere"))})
    assert not folder.exists()
    create_search(folder, base.changed({"init_from": there}), SPACES)
    assert Search.read(folder).base.init_from == str(run.resolve())
    create_search(tmp_path / "choice", base, {"init_from": Space((None, there))})
    found = Search.read(tmp_path / "choice").spaces["init_from"]
    assert found == Space((None, str(run.resolve())))


def test_values_that_do_not_go_together_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Returns(monkeypatch)
    folder, base = tmp_path / "search", small(tmp_path, "ppo")
    create_search(folder, base, {"ppo.num_minibatches": Space(low=2, high=4)}, trials=8, seeds=(1,))
    said = [slot(folder, number) for number in range(8)]
    bad = [one["trial"] for one in said if "infeasible" in one]
    assert bad, "64 steps in 3 minibatches"
    for trial in open_study(folder).trials:
        assert (trial.params["ppo.num_minibatches"] == 3) == (trial.number in bad)
        assert (trial.state == optuna.trial.TrialState.FAIL) == (trial.number in bad)


@pytest.mark.long
def test_it_trains_each_seed_to_its_rung_and_exports_what_was_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For real: two trials of two seeds, a second run of the exported configuration."""
    folder, quick = tmp_path / "search", {"checkpoint.every_minutes": None}
    base = small(tmp_path, "ppo", **quick, total_env_steps=12 * 64)
    stops: list[tuple[int, int]] = []
    plain = module._train_until

    def noted(config: Config, until: int) -> RunDirectory:
        files = plain(config, until)
        stops.append((config.seed, files.last_rows(1)[0]["env_steps"]))
        return files

    monkeypatch.setattr(module, "_train_until", noted)
    create_search(folder, base, SPACES, trials=2, seeds=(1, 2), rungs=2)
    for number in range(2):
        slot(folder, number)
    assert stops == [(1, 384), (2, 384), (1, 768), (2, 768)] * 2
    study, runs = open_study(folder), list((folder / "runs").glob("*/*"))
    assert len(runs) == 4 and all((run / RESULT_FILE).is_file() for run in runs)
    for trial in study.trials:
        place = Sweep(folder).trial(f"slot-{trial.number:04d}")
        found = [files for files in Sweep(folder).runs(place) if files is not None]
        last = [files.metrics("charts/episodic_return_100")[-1] for files in found]
        mean = sum(row["charts/episodic_return_100"] for row in last) / 2
        assert len(found) == 2 and trial.value == pytest.approx(mean)
        assert all(len(files.metrics()) == 12 for files in found)
    best = study.best_trial
    file = tmp_path / "best.json"
    assert main(["sweep", "best", str(folder), "--export", str(file)]) == 0
    assert f"trial {best.number}: " in capsys.readouterr().out
    wanted = base.changed(
        {**best.params, "ppo.clip": {"0.1": 0.1, "none": None}[best.params["ppo.clip"]], "seed": 1}
    )
    assert read_config(file) == wanted == best_of_search(folder).config
    place = Sweep(folder).trial(f"slot-{best.number:04d}")
    trained = [files.config for files in Sweep(folder).runs(place) if files is not None]
    assert all(config.identity() == wanted.identity() for config in trained)
    again = ["train", "--from", str(file), "--total-env-steps", "64"]
    assert main([*again, "--output-dir", str(tmp_path / "again")]) == 0
    (run,) = (tmp_path / "again").iterdir()
    assert (
        replace(RunDirectory(run).config, total_env_steps=768, output_dir=wanted.output_dir)
        == wanted
    )


def test_places_that_draw_the_same_settings_have_runs_of_their_own(tmp_path: Path) -> None:
    """Else the second would find the first one's run in use, or train it on."""
    folder, base = tmp_path / "search", small(tmp_path, "ppo")
    create_search(folder, base, SPACES, trials=2, seeds=(1,))
    configs = [
        configs_of(replace(Sweep(folder).trial(f"slot-{number:04d}"), config=base), folder)[0]
        for number in range(2)
    ]
    assert configs[0].output_dir != configs[1].output_dir
    assert configs[0].changed({"output_dir": configs[1].output_dir}) == configs[1]


def test_a_run_that_diverges_at_once_is_no_failure_of_the_sweep(tmp_path: Path) -> None:
    """It has no rows; it is not trained again, and a search is told that the trial has failed."""
    bad = small(tmp_path, "ppo").changed({"ppo.learning_rate": 1e30, "ppo.max_grad_norm": None})
    folder = tmp_path / "search"
    create_search(folder, bad, {"ppo.clip": Space((0.1, 0.2))}, trials=1, seeds=(1,), rungs=2)
    assert slot(folder, 0) == {"trial": 0}
    (trial,) = open_study(folder).trials
    assert trial.state == optuna.trial.TrialState.FAIL and "diverged" in trial.user_attrs["error"]
    (run,) = (folder / "runs").glob("*/*")
    row = json.loads((run / RESULT_FILE).read_text())
    assert row["env_steps"] == 0 and math.isnan(row["return_100"])
    assert row["commit"] and set(row["curve"].split()) == {"nan"}


def test_a_run_that_diverged_counts_with_its_lowest_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, "ppo", total_env_steps=640)
    plain = trials_module.train

    def diverging(config: Config, **how: Any) -> None:
        plain(config, on_iteration=lambda run, _: "stop" if run.iteration == 9 else None)
        raise DivergedError("no numbers")

    monkeypatch.setattr(trials_module, "train", diverging)
    files = module._train_until(config, 640)
    returns = [row[module.RETURN] for row in files.metrics() if module.RETURN in row]
    assert module._score(files, 640) == min(returns)
    assert module._score(files, 9 * 64) == returns[-1] != min(returns)
    assert module._score(files, 5 * 64) == files.metrics()[4][module.RETURN]


def test_the_command_reads_spaces_as_train_reads_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "search"
    words = ["--trials", "7", "--space", "ppo.learning-rate=log:1e-5:1e-3"]
    words += ["--space", "model.hidden_sizes=32 32,16", "--space", "ppo.policy_epochs=1:6"]
    words += ["--space", "ppo.clip=none,0.2"]
    assert main(["sweep", "search", str(folder), "classic-ppo", *words]) == 0
    assert "7 trials added, 7 in all" in capsys.readouterr().out
    search = Search.read(folder)
    assert search.base == get_preset("classic-ppo") and search.seeds == (1, 2, 3)
    assert search.spaces == {
        "ppo.learning_rate": Space(low=1e-5, high=1e-3, log=True),
        "model.hidden_sizes": Space(((32, 32), (16,))),
        "ppo.policy_epochs": Space(low=1, high=6),
        "ppo.clip": Space((None, 0.2)),
    }
    assert main(["sweep", "search", str(folder), "classic-ppo", "--seeds", "101", *words]) == 2
    assert "seed 101 would use it up" in capsys.readouterr().err
    assert main(["sweep", "search", str(folder), "classic-ppo", *words, *words[-2:]]) == 2
    assert "--space ppo.clip comes twice; give all its values" in capsys.readouterr().err
