"""The folder of a sweep: what is trained, named by its content, and what became of it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.config import Config
from phasicrl.experiments.trials import measure_once, reached
from phasicrl.presets import get_preset
from phasicrl.sweeps.status import lines, sweep_status
from phasicrl.sweeps.sweep import (
    Sweep,
    configs_of,
    create_sweep,
    grid,
    sweep_results,
)
from tests.faults.harness import small


def base(folder: Path, **changes: object) -> Config:
    return small(folder, "ppo").changed({"seed": 1, **changes})


def test_a_grid_has_every_combination_and_names_it_without_the_environment(tmp_path: Path) -> None:
    arms = grid(
        {"one": base(tmp_path)},
        {"ppo.clip": (0.1, None), "env.id": ("gymnasium:CartPole-v1", "gymnasium:Acrobot-v1")},
    )
    assert [(arm, config.ppo.clip, config.env.id) for arm, config in arms] == [
        ("one ppo.clip=0.1", 0.1, "gymnasium:CartPole-v1"),
        ("one ppo.clip=0.1", 0.1, "gymnasium:Acrobot-v1"),
        ("one ppo.clip=none", None, "gymnasium:CartPole-v1"),
        ("one ppo.clip=none", None, "gymnasium:Acrobot-v1"),
    ]
    with pytest.raises(ValueError, match=r"one ppo.clip=-1.0: .*clip"):
        grid({"one": base(tmp_path)}, {"ppo.clip": (-1.0,)})


def test_a_sweep_is_extended_and_repeats_nothing(tmp_path: Path) -> None:
    folder, some = tmp_path / "sweep", base(tmp_path)
    assert create_sweep(folder, [("a", some)], seeds=(1, 2)) == (2, 2)
    before = {path: path.read_text() for path in folder.rglob("*.json")}
    other = some.changed({"ppo.clip": 0.1})
    assert create_sweep(folder, [("a", some), ("b", other)], seeds=(1, 2, 3)) == (4, 6)
    assert all(path.read_text() == text for path, text in before.items())
    trials = Sweep(folder).trials()
    assert [trial.seeds for trial in trials] == [(1,)] * 2 + [(2,)] * 2 + [(3,)] * 2
    assert {(trial.arm, trial.config) for trial in trials} == {
        (arm, replace(config, seed=seed))
        for arm, config in (("a", some), ("b", other))
        for seed in (1, 2, 3)
    }


def test_names_follow_from_what_is_trained_and_not_from_how(tmp_path: Path) -> None:
    def name(config: Config) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        create_sweep(folder, [("a", config)], seeds=(1,))
        (trial,) = Sweep(folder).trials()
        (run,) = configs_of(trial, folder, jobs=2, cores=4)
        assert run.output_dir == str(folder / "runs") and run.compute.num_threads == 2
        assert run.env.num_threads is None, "it has no effect on Gymnasium's"
        assert trial.id.startswith(run.name)
        return trial.id

    some = base(tmp_path)
    assert name(some) == name(some.changed({"compute.num_threads": 1, "log.tensorboard": False}))
    different = [some.changed({"ppo.gamma": 0.5}), some.changed({"total_env_steps": 64})]
    assert len({name(some), *map(name, different)}) == 3


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder, some = tmp_path / "sweep", base(tmp_path)
    unknown = some.changed({"env.id": "procgen:starpilto"})
    with pytest.raises(ValueError, match=r"b: Procgen has no game 'starpilto' .*starpilot"):
        create_sweep(folder, [("a", some), ("b", unknown)])
    discrete = some.changed({"action.rescale": "clip"})
    with pytest.raises(ValueError, match=r"b: .*action.rescale"):
        create_sweep(folder, [("a", some), ("b", discrete)])
    quiet = some.changed({"checkpoint.keep": 7})
    with pytest.raises(ValueError, match="'b' and 'a' are one experiment, seed 1"):
        create_sweep(folder, [("a", some), ("b", quiet)], seeds=(1,))
    with pytest.raises(ValueError, match="below 101, on which settings are chosen"):
        create_sweep(folder, [("a", some)], seeds=(1, 101))
    assert not folder.exists()
    create_sweep(folder, [("a", some)], seeds=(1,))
    with pytest.raises(ValueError, match="below 101, on which settings are chosen"):
        create_sweep(folder, [("a", some)], seeds=(101,))
    with pytest.raises(ValueError, match="is not the folder of a sweep"):
        Sweep(tmp_path)
    (damaged,) = (folder / "trials").iterdir()
    damaged.write_text(json.dumps({"arm": "a"}))
    with pytest.raises(ValueError, match=damaged.name):
        Sweep(folder).trials()


@pytest.mark.long
def test_results_and_status_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, some = tmp_path / "sweep", base(tmp_path)
    arms = [("a", some), ("b", some.changed({"ppo.gamma": 0.5}))]
    create_sweep(folder, arms, seeds=(1, 2))
    with pytest.raises(ValueError, match=r"no run of .* is finished"):
        sweep_results(folder)
    trials = Sweep(folder).trials()
    for trial in trials:
        (config,) = configs_of(trial, folder)
        if trial.arm == "a":
            measure_once(config, reached)
        elif trial.seeds == (1,):  # stopped half-way
            train(config, on_iteration=lambda run, _: "stop" if run.iteration == 12 else None)
    found = sweep_results(folder)
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"], row["env_steps"]) for row in rows] == [
        ("a", "1", "1536"), ("a", "2", "1536")
    ]  # fmt: skip
    (result,) = found.comparison.results
    assert result.label == "a" and len(result.scores) == 2
    a, b = sorted(sweep_status(folder), key=lambda status: status.arm)
    assert (a.steps, a.total_steps, b.steps, b.total_steps) == (3072, 3072, 768, 3072)
    assert {seed: round(value, 3) for seed, value in a.returns.items()} == {
        int(row["seed"]): float(row["return_100"]) for row in rows
    }
    assert set(b.returns) == {1} and b.seconds_left is None and b.pending == 2
    assert main(["sweep", "status", str(folder), "--json"]) == 0
    by_arm = {row["arm"]: row for row in json.loads(capsys.readouterr().out)}
    assert by_arm["b"]["steps"] == 768 and by_arm["a"]["pending"] == 2
    assert main(["sweep", "status", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed == lines(sweep_status(folder)) + "\n" and "3,072 of 3,072" in printed


CREATE = ["sweep", "create"]


def test_the_command_reads_values_as_train_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "sweep")
    words = ["--seeds", "101", "102", "--set", "ppo.learning-rate=1e-3,3e-4"]
    words += ["--set", "model.hidden_sizes=32 32,16", "--set", "reward_norm=none"]
    words += ["--set", "ppo.bootstrap_truncation=false", "--set", "total_env_steps=8_192"]
    assert main([*CREATE, folder, "classic-ppo", "classic-ppg", *words]) == 0
    assert "16 trials added, 16 in all" in capsys.readouterr().out
    trials = Sweep(tmp_path / "sweep").trials()
    configs = [trial.config for trial in trials if trial.config is not None]
    assert {config.seed for config in configs} == {101, 102}
    assert {config.ppo.learning_rate for config in configs} == {1e-3, 3e-4}
    assert {config.model.hidden_sizes for config in configs} == {(32, 32), (16,)}
    assert {config.aux is None for config in configs} == {True, False}
    for config in configs:
        assert config.reward_norm is None and config.total_env_steps == 8192
        assert not config.ppo.bootstrap_truncation
    assert (
        "classic-ppg ppo.learning_rate=0.001 model.hidden_sizes=32 32 reward_norm=none "
        "ppo.bootstrap_truncation=False total_env_steps=8192" in {trial.arm for trial in trials}
    )


def test_naming_a_field_of_a_group_that_is_off_switches_it_on(tmp_path: Path) -> None:
    folder = str(tmp_path / "sweep")
    assert main([*CREATE, folder, "classic-ppo", "--seeds", "1", "--set", "aux.every=4,8"]) == 0
    assert get_preset("classic-ppo").aux is None
    configs = [trial.config for trial in Sweep(tmp_path / "sweep").trials()]
    assert {config.aux.every for config in configs if config and config.aux} == {4, 8}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["classic-ppo", "--set", "ppo.lerning_rate=1"], "did you mean 'ppo.learning_rate'?"),
        (["classic-ppo", "--set", "ppo.clip"], "--set takes FIELD=VALUE,VALUE…"),
        (["clasic-ppo"], "classic-ppo"),
        (["classic-ppo", "--set", "ppo.clip=-1"], "classic-ppo ppo.clip=-1.0: "),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main([*CREATE, str(tmp_path / "sweep"), *words]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "sweep").exists()


def test_the_uses_of_the_verb_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert "usage: phasicrl sweep COMMAND DIR" in capsys.readouterr().out
    assert main(["sweep", "wrok"]) == 2
    assert "did you mean 'work'?" in capsys.readouterr().err
