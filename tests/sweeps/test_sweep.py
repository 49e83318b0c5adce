"""The folder of a sweep: what is trained, named by its content, and what became of it."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.config import Config
from phasicrl.experiments.trials import RESULT_FILE, measure_once, reached
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.sweeps import status as status_module
from phasicrl.sweeps.attempts import Claim, attempt_at
from phasicrl.sweeps.status import ArmStatus, lines, status_table, sweep_status
from phasicrl.sweeps.sweep import (
    Sweep,
    SweepTrial,
    configs_of,
    create_sweep,
    grid,
    sweep_results,
)
from tests.faults.harness import small
from tests.helpers import skip_without_envpool


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
    with pytest.raises(ValueError, match="seed 1 is given twice; give each seed once"):
        create_sweep(folder, [("a", some)], seeds=(1, 2, 1))
    with pytest.raises(
        ValueError, match=r"sweep would have .*; give each kind a folder of its own"
    ):
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


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with pytest.raises(
        ValueError, match=r"nothing to train \(0 presets or configurations, 3 seeds"
    ):
        create_sweep(folder, [])
    with pytest.raises(
        ValueError, match=r"1 presets or configurations, 0 seeds\); give at least 1"
    ):
        create_sweep(folder, [("a", base(tmp_path))], seeds=())
    assert not folder.exists()


def test_knobs_that_a_sweep_sets_itself_are_refused(tmp_path: Path) -> None:
    for path, values, way in (
        ("seed", (1, 2), "give --seeds"),
        ("name", ("a", "b"), "leave it out, an arm is called what is set in it"),
        ("output_dir", ("elsewhere",), "leave it out, the runs are in its folder `runs`"),
        ("log.console", ("off", "plain"), "leave it out, its folder `logs` has what"),
    ):
        with pytest.raises(ValueError, match=f"a sweep sets {path} itself; {way}"):
            grid({"a": base(tmp_path)}, {path: values})


def test_weights_to_begin_with_are_looked_at_and_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(base(tmp_path / "runs", total_env_steps=64)).directory
    folder, begins = tmp_path / "sweep", base(tmp_path, init_from=f"runs/{run.name}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"b: .*nowhere is not a run directory"):
        create_sweep(folder, [("b", begins.changed({"init_from": "nowhere"}))])
    assert not folder.exists()
    create_sweep(folder, [("a", begins)], seeds=(1,))
    (trial,) = Sweep(folder).trials()
    assert trial.config is not None and trial.config.init_from == str(run.resolve())


def test_the_time_left_is_that_of_what_will_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs of 1,536 steps: one diverged, one failed, one is pending and one under way."""
    folder, steps = tmp_path / "sweep", {1: 64, 2: 128, 3: 512, 4: 768}
    create_sweep(folder, [("a", base(tmp_path))], seeds=(1, 2, 3, 4))
    trials = Sweep(folder).trials()
    claims = {t.seeds[0]: Claim(attempt_at(folder, t.id, 1)) for t in trials if t.seeds != (3,)}
    claims[1].end("done", diverged=True)
    claims[2].end("failed")

    def runs(sweep: Sweep, trial: SweepTrial) -> list[SimpleNamespace]:
        return [SimpleNamespace(config=trial.config)]

    def last(files: SimpleNamespace) -> dict[str, float]:
        return {"env_steps": steps[files.config.seed], "charts/SPS": 16.0}

    monkeypatch.setattr(Sweep, "runs", runs)
    monkeypatch.setattr(status_module, "_last", last)
    (status,) = sweep_status(folder)
    claims[4].end("released")
    assert (status.done, status.failed, status.pending, status.running) == (1, 1, 1, 1)
    assert (status.steps, status.total_steps) == (64 + 128 + 512 + 768, 4 * 1536)
    assert status.seconds_left == (1536 - 512 + 1536 - 768) / 16


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


def test_the_table_of_a_status_has_whole_names_on_a_narrow_terminal() -> None:
    from rich.console import Console

    def shown(*envs: str) -> tuple[str, str]:
        statuses = [
            ArmStatus(f"cartpole-ppo ppo.clip={clip}", env, 1, 1, 1, 0, 0, 65536, 300_000,
                      {1: 123.4, 2: 98.23, 3: 200.0}, 3720.0)
            for clip, env in zip((0.1, 0.2), envs, strict=True)
        ]  # fmt: skip
        console = Console(width=80, file=io.StringIO())
        with console.capture() as captured:
            console.print(status_table(statuses, "sw"))
        title, *rows = captured.get().splitlines()
        assert all(len(row) <= 80 for row in rows) and "…" not in captured.get()
        return title.strip(), "".join(row.split("│")[1].strip() for row in rows if "│" in row)

    title, arms = shown("CartPole-v1", "CartPole-v1")
    assert title == "sw on CartPole-v1"
    assert arms == "cartpole-ppoppo.clip=0.1cartpole-ppoppo.clip=0.2"
    assert shown("CartPole-v1", "procgen:starpilot")[0] == "sw"


def test_a_value_that_cannot_be_read_names_a_command_that_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "sweep"), "classic-ppo", "--set", "ppo.clip=0.1,abc"]
    with pytest.raises(SystemExit):
        main(["sweep", "create", *words])
    said = capsys.readouterr()
    assert "see phasicrl train classic-ppo --help" in " ".join((said.out + said.err).split())


def test_units_of_another_difficulty_are_refused(tmp_path: Path) -> None:
    skip_without_envpool()
    levels = {"env.id": "procgen:starpilot", "env.distribution": "hard"}
    config = get_preset("procgen-ppo").changed(levels)
    create_sweep(tmp_path / "sweep", [("a", config)], seeds=(1,))
    (trial,) = Sweep(tmp_path / "sweep").trials()
    (made,) = configs_of(trial, tmp_path / "sweep")
    RunDirectory.make(made).write_json(RESULT_FILE, {})
    with pytest.raises(ValueError, match=r"procgen-easy are of easy levels.*choose procgen-hard"):
        sweep_results(tmp_path / "sweep", units="procgen-easy")


def test_each_difficulty_of_a_game_is_a_task_of_its_own(tmp_path: Path) -> None:
    skip_without_envpool()
    hard = get_preset("procgen-ppo").changed({"env.distribution": "hard"})
    create_sweep(tmp_path / "sweep", [("a", get_preset("procgen-ppo")), ("b", hard)], seeds=(1,))
    for trial in Sweep(tmp_path / "sweep").trials():
        (made,) = configs_of(trial, tmp_path / "sweep")
        RunDirectory.make(made).write_json(RESULT_FILE, {"curve": " ".join(["7"] * 40)})
    found = sweep_results(tmp_path / "sweep").comparison.results
    tasks = ["procgen:starpilot (easy)", "procgen:starpilot (hard)"]
    assert [str(result.task) for result in found] == tasks
    with (tmp_path / "sweep/results.csv").open() as file:
        assert [row["task"] for row in csv.DictReader(file)] == tasks


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
        (["classic-ppo", "--set", "seed=1,2"], "a sweep sets seed itself; give --seeds"),
        (
            ["classic-ppo", "--set", "ppo.clip=0.1", "--set", "ppo.clip=0.2"],
            "--set ppo.clip comes twice; give all its values in one, with commas",
        ),
        ([], "there is nothing to train (0 presets or configurations, 3 seeds)"),
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
