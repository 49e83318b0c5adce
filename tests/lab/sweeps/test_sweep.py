"""Sweeps: grid, locks, skipped and resumed trials, status."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.config import Config
from phasicrl.config_io import SCHEMA, read_instance
from phasicrl.lab.experiments import trials
from phasicrl.lab.experiments.trials import FailedTrialsError
from phasicrl.lab.sweeps import grid, sweep
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.lock import RunLock
from tests.faults.harness import small, wait_for
from tests.helpers import assert_same, rows_of, run_here, stop_at


def values(folder: Path, **lists: Any) -> Path:
    """Write a file of values; `__` in a name is the dot of an option."""
    file = folder / "values.json"
    file.write_text(json.dumps({name.replace("__", "."): lists[name] for name in lists}))
    return file


def written(folder: Path, *configs: Config) -> Path:
    """Write a sweep of configurations, each a trial named by its place."""
    for number, config in enumerate(configs):
        grid.write_dataclass(folder / str(number) / grid.TRIAL_FILE, config)
    return folder


def states(folder: Path) -> list[str]:
    """Return the state of each trial."""
    return [status.state for status in sweep.get_trial_statuses(folder)]


def three(tmp_path: Path) -> Path:
    """Write a sweep of a small run over three seeds."""
    config = small(tmp_path, "ppo", total_env_steps=2 * 64)
    return written(tmp_path / "sweep", *(replace(config, seed=seed) for seed in (1, 2, 3)))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "run_in_processes", run_here)


def test_a_grid_has_every_combination(tmp_path: Path) -> None:
    envs = ["gymnasium:CartPole-v1", "gymnasium:Acrobot-v1"]
    base = small(tmp_path, "ppo")
    lists = {"ppo.clip": [0.1, None], "model.hidden_sizes": [[8], []], "env.id": envs}
    arms = grid.make_grid_arms(base, lists)
    clips = [(config.ppo.clip, config.model.hidden_sizes, config.env.id) for _, config in arms]
    assert clips == [(c, h, e) for c in (0.1, None) for h in ((8,), ()) for e in envs]
    assert arms[0][0] == f"{base.name} ppo.clip=0.1 model.hidden_sizes=8", "compared on all envs"
    assert grid.make_grid_arms(base, {}) == [(base.name, base)]
    with pytest.raises(ValueError, match=r"=fp32 and .*=bf16 are one experiment"):
        grid.make_grid_arms(base, {"compute.policy_precision": ["fp32", "bf16"]})


def test_a_sweep_is_extended_and_repeats_nothing(tmp_path: Path) -> None:
    folder, close = tmp_path / "sweep", [0.123412, 0.123388]
    assert sweep.add_trials(folder, ["classic-ppo"], values=values(tmp_path, ppo__clip=close)) == 6
    before = {path: path.read_text() for path in folder.glob(f"*/{grid.TRIAL_FILE}")}
    more = values(tmp_path, ppo__clip=[*close, 0.3])
    assert sweep.add_trials(folder, ["classic-ppo", "classic-ppg"], values=more, seeds=(1, 2)) == 8
    assert all(path.read_text() == text for path, text in before.items())
    configs = [
        read_instance(Config, path / grid.TRIAL_FILE) for path in sweep.list_trial_folders(folder)
    ]
    assert [config.seed for config in configs] == [1] * 6 + [2] * 6 + [3] * 2, "seed by seed"
    assert len({(config.seed, config.ppo.clip, config.name) for config in configs}) == 14
    assert get_preset("classic-ppo").with_updates({"ppo.clip": 0.3, "seed": 2}) in configs


@pytest.mark.parametrize(("tree", "says"), [
    ([1], "expected a JSON object"),
    ({"ppo.clip": 0.1}, "ppo.clip is 0.1; expected a list of values"),
    ({"ppo.clip": []}, "ppo.clip is []; expected a list"),
    ({"ppo.clip": ["a"]}, "ppo.clip=a: "),
    ({"ppo.clip": [{"a": [1]}]}, "ppo.clip=a=[1]: "),
    ({"ppo.clip": [-1]}, "classic-ppo ppo.clip=-1: "),
    ({"model.hidden_sizes": [[[1]]]}, "model.hidden_sizes"),
    ({"seed": [1, 2]}, "seed is set by the sweep; expected others"),
    ({"env.id": ["procgen:starpilto"]}, "did you mean"),
    ({"env.id": ["gymnasium:sent_with_it:X-v0"]}, "add --import sent_with_it"),
    ({"init_from": ["nowhere"]}, "nowhere is not a run directory"),
])  # fmt: skip
def test_values_that_cannot_be_trained_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: Any, says: str
) -> None:
    (tmp_path / "values.json").write_text(json.dumps(tree))
    words = ["--values", str(tmp_path / "values.json")]
    assert main(["sweep", "make", str(tmp_path / "sweep"), "classic-ppo", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and "Traceback" not in error
    assert not (tmp_path / "sweep").exists()


def test_seeds_for_choosing_and_for_reporting_do_not_meet(tmp_path: Path) -> None:
    sweep.add_trials(tmp_path / "sweep", ["classic-ppo"], seeds=(1,))
    with pytest.raises(ValueError, match=r"expected one kind\. Separate them"):
        sweep.add_trials(tmp_path / "sweep", ["classic-ppo"], seeds=(101,))
    for presets, seeds in (([], (1,)), (["classic-ppo"], ())):
        with pytest.raises(ValueError, match="expected at least one of each"):
            sweep.add_trials(tmp_path / "empty", presets, seeds=seeds)
    with pytest.raises(ValueError, match="seed is -5"):
        sweep.add_trials(tmp_path / "negative", ["classic-ppo"], seeds=(1, -5))
    assert not (tmp_path / "negative").exists()
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / grid.SEARCH_FILE).touch()
    with pytest.raises(ValueError, match="with a search; expected a new folder"):
        sweep.add_trials(tmp_path / "search", ["classic-ppo"])


def test_trials_at_several_difficulties_of_a_game_are_distinguished(tmp_path: Path) -> None:
    for level in ("easy", "hard"):
        config = get_preset("procgen-ppo").with_updates({"env.distribution": level})
        grid.write_dataclass(tmp_path / level / grid.TRIAL_FILE, config)
    envs = [status.task for status in sweep.get_trial_statuses(tmp_path)]
    assert envs == ["procgen:starpilot (easy)", "procgen:starpilot (hard)"]


def test_paths_of_weights_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(small(tmp_path / "runs", "ppo", total_env_steps=64)).directory
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["cartpole-ppg", f"runs/{run.name}", f"~/runs/{run.name}"]  # one comes with phasicrl
    base = small(tmp_path, "ppg", total_env_steps=32)
    arms = [grid.make_arm(base, {"init_from": x}) for x in given]
    assert [x.init_from for _, x in arms] == ["cartpole-ppg", *[str(run.resolve())] * 2]
    arms = [(arm, x.with_updates({"model.memory_size": 3})) for arm, x in arms]
    with pytest.warns(UserWarning, match="(memory_size|no aux).*as in .*cartpole-ppg") as found:
        trials.check_arms(arms)
    assert len(found) == 2, "one warning for all arms"


@pytest.mark.usefixtures("here")
def test_finished_and_running_trials_are_skipped(tmp_path: Path) -> None:
    folder, ended = three(tmp_path), list[tuple[str, str]]()
    assert states(folder) == ["pending"] * 3 and not [*folder.glob("*/.lock")], "nothing is written"
    with closing(RunLock(folder / "1")):
        sweep.run_sweep(folder, on_trial=lambda *words: ended.append(words))
        assert [(name.split()[0], state) for name, state in ended] == [("0", "done"), ("2", "done")]
        assert sweep.train_trial(folder / "1") == "running"
        assert states(folder) == ["done", "running", "done"]
    before = sorted((folder / "0").rglob("*"))
    sweep.run_sweep(folder, on_trial=lambda *words: ended.append(words))
    assert ended[2:] == [("1 (tiny)", "done")] and sorted((folder / "0").rglob("*")) == before
    for status in sweep.get_trial_statuses(folder):
        (run,) = (folder / status.id / "runs").iterdir()
        assert status.env_steps == 128
        assert status.return_100 == RunDirectory(run).metrics(trials.RETURN)[-1][trials.RETURN]


def test_trials_train_and_resume_in_an_environment_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rooms.py").write_text("from tests.corridor import corridor as make\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder, words = tmp_path / "sweep", ["--make-env", "rooms:make", "--total-env-steps", "2048"]
    assert main(["sweep", "make", str(folder), "classic-ppo", "--seeds", "1", *words]) == 0
    (trial,) = sweep.list_trial_folders(folder)
    config = read_instance(Config, trial / grid.TRIAL_FILE)
    assert (config.env.id, config.total_env_steps) == ("gymnasium:rooms:make", 2048)
    train(trials.prepare_trial_config(config, config.name, trial), callbacks=stop_at(1))
    sys.modules.pop("rooms")
    assert main(["sweep", "run", str(folder)]) == 2
    assert "--import rooms" in capsys.readouterr().err
    assert sweep.train_trial(trial) == "done", "in a process that has not imported the module"
    (run,) = map(RunDirectory, (trial / "runs").iterdir())
    assert run.metrics()[-1]["env_steps"] == 2048 and len(run.card["resumed"]) == 1
    assert run.metrics(trials.RETURN)[-1][trials.RETURN] <= 1, "reward 1 at the end of a corridor"


@pytest.mark.usefixtures("here")
def test_diverged_trials_are_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"ppo.learning_rate": 1e30, "ppo.max_grad_norm": None}
    good = small(tmp_path, "ppo")
    folder = written(tmp_path / "sweep", good, good.with_updates(bad))
    plain = trials.train

    def interrupted(config: Config, **how: Any) -> None:
        plain(config, callbacks=stop_at(9))
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep(folder)
    first, _ = sweep.get_trial_statuses(folder)
    assert (first.state, first.env_steps) == ("stopped", 576)
    monkeypatch.setattr(trials, "train", plain)
    sweep.run_sweep(folder)
    assert states(folder) == ["done", "diverged"]
    whole = RunDirectory(train(good).directory)
    (run,) = map(RunDirectory, (folder / "0" / "runs").iterdir())
    assert_same([whole.load_weights(), rows_of(whole)], [run.load_weights(), rows_of(run)])


@pytest.mark.usefixtures("here")
def test_a_failed_trial_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged or hostile file is refused in one sentence."""
    folder = three(tmp_path)
    second = folder / "1" / grid.TRIAL_FILE
    grid.write_dataclass(second, replace(read_instance(Config, second), init_from="nowhere"))
    with pytest.raises(FailedTrialsError, match=r"1 trials failed.*\n.*/sweep/1: .*nowhere is not"):
        sweep.run_sweep(folder)
    assert main(["sweep", "run", str(folder)]) == 1
    assert capsys.readouterr().err.startswith("error: 1 trials failed")
    assert {path.parent.name for path in folder.glob(f"*/{grid.OUTCOME_FILE}")} == {"0", "2"}
    for text in ("{", "[]", '{"seed": "x"}', '{"env": 3}', '{"env": {"id": "gymnasium:sent:X"}}'):
        second.write_text(text.replace('{"', f'{{"schema": {SCHEMA}, "', 1))
        assert main(["sweep", "run", str(folder)]) == 2
        error = capsys.readouterr().err
        assert "sweep/1/trial.json" in error or "--import sent" in error
        assert "Traceback" not in error and "sent" not in sys.modules
    grid.write_dataclass(second, read_instance(Config, folder / "0" / grid.TRIAL_FILE))
    (folder / "0" / grid.OUTCOME_FILE).write_text(f'{{"schema": {SCHEMA}, "state": [3]}}')
    for command in ("run", "status"):
        assert main(["sweep", command, str(folder)]) == 2
        assert "outcome.json: state is [3]" in capsys.readouterr().err


def test_shards_are_disjoint_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "sweep", *[small(tmp_path, "ppo")] * 8)
    taken: list[str] = []

    def take(items: Any, work: Any, *, jobs: int) -> Any:
        taken.extend(item.name for item in items)
        return iter(())

    monkeypatch.setattr(trials, "run_in_processes", take)
    for number in (1, 2, 3, 8, 11):
        taken.clear()
        for first in range(1, number + 1):
            sweep.run_sweep(folder, shard=f"{first}/{number}")
        assert sorted(taken) == [str(n) for n in range(8)]
    for wrong in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2", ""):
        with pytest.raises(ValueError, match="expected I/N"):
            sweep.run_sweep(folder, shard=wrong)
    with pytest.raises(ValueError, match="has no trials; expected a sweep"):
        sweep.run_sweep(tmp_path)


def test_status_names_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    sweep.add_trials(folder, ["classic-ppo"], values=values(tmp_path, ppo__clip=[0.1]), seeds=(1,))
    (trial,) = sweep.list_trial_folders(folder)
    grid.write_dataclass(trial / grid.OUTCOME_FILE, grid.Outcome("done"))
    (status,) = sweep.get_trial_statuses(folder)
    assert (status.arm, status.state) == ("classic-ppo", "done")
    assert status.shared_settings_text == "classic-ppo, clip 0.1"
    more = values(tmp_path, ppo__clip=[0.1, 0.3])
    sweep.add_trials(folder, ["classic-ppo"], values=more, seeds=(1,))
    statuses = sweep.get_trial_statuses(folder)
    assert {status.arm for status in statuses} == {"clip 0.1", "clip 0.3"}
    assert {status.shared_settings_text for status in statuses} == {"classic-ppo"}
    assert main(["sweep", "status", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("clip 0.1") == shown.count("clip 0.3") == 1
    assert all(status.id in shown for status in statuses)  # to be copied


def test_status_of_many_trials_lists_those_that_need_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    sweep.add_trials(folder, ["classic-ppo"], seeds=range(1, 22))
    trials = sweep.list_trial_folders(folder)
    for trial, state in zip(trials[:19], [*["done"] * 17, "diverged", "diverged"], strict=True):
        grid.write_dataclass(trial / grid.OUTCOME_FILE, grid.Outcome(state))
    for lost in (0, 1):
        assert main(["sweep", "status", str(folder)]) == 0
        shown = capsys.readouterr().out
        assert f"\n17 done, 2 diverged, {2 - lost} pending\n" in shown
        assert shown.count("│ classic-ppo") == (20 if lost else 2)
        (trials[-1] / grid.TRIAL_FILE).unlink(missing_ok=True)


def begin(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "phasicrl", "sweep", "run", str(folder), "--jobs", "2"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def locked_by(folder: Path) -> int:
    """Return the process that trains a trial."""
    return json.loads((folder / ".lock").read_text())["pid"]


def has_begun(folder: Path, rows: int = 15) -> bool:
    """Return true if every trial has some rows of metrics."""
    runs = [[*(each / "runs").glob("*")] for each in sweep.list_trial_folders(folder)]
    return all(of and len(RunDirectory(of[0]).last_rows(rows)) == rows for of in runs)


@pytest.mark.long
def test_killed_and_interrupted_trials_are_resumed_to_the_unbroken_run(tmp_path: Path) -> None:
    """Kill one process, and end the other with its parent."""
    long = small(tmp_path / "whole", "ppo", total_env_steps=150 * 64)
    folder = written(tmp_path / "sweep", long, replace(long, seed=2))
    runner = begin(folder)
    wait_for(lambda: has_begun(folder), 120)
    os.kill(locked_by(folder / "0"), signal.SIGKILL)
    wait_for(lambda: sweep.read_trial_outcome(folder / "0").state == "stopped")
    runner.terminate()
    output = runner.communicate(timeout=60)[0]
    assert runner.returncode == 75 and "Traceback" not in output
    assert states(folder) == ["stopped"] * 2
    runner = begin(folder)
    output = runner.communicate(timeout=240)[0]
    assert runner.returncode == 0 and all(f"{trial} (tiny): done" in output for trial in (0, 1))
    for number, seed in enumerate((long.seed, 2)):
        (run,) = map(RunDirectory, (folder / str(number) / "runs").iterdir())
        assert len(run.card["resumed"]) == 1
        whole = RunDirectory(train(replace(long, seed=seed)).directory)
        assert_same([whole.load_weights(), rows_of(whole)], [run.load_weights(), rows_of(run)])


@pytest.mark.slow
def test_a_ray_cluster_may_lose_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    long = small(tmp_path, "ppo", total_env_steps=150 * 64)
    bad = replace(long, init_from="nowhere")
    folder = written(tmp_path / "sweep", long, replace(long, seed=2), bad)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.getsignal(signal.SIGTERM)  # Ray takes it, and does not give it back
    size: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    try:
        # This process belongs to the node that there is now, which stays.
        ray.init(address=cluster.address, log_to_driver=False)
        node = cluster.add_node(**size)
        cluster.wait_for_nodes()
        assert len(ray.nodes()) == 2 and ray.cluster_resources()["CPU"] == 2

        def lose_a_node() -> None:
            wait_for(lambda: has_begun(folder, 5), 120)
            cluster.remove_node(node, allow_graceful=False)

        (folder / "2" / grid.TRIAL_FILE).rename(folder / "bad.json")
        loser = threading.Thread(target=lose_a_node)
        loser.start()
        sweep.run_sweep(folder, ray=(str(cluster.address),))
        loser.join()
        (folder / "bad.json").rename(folder / "2" / grid.TRIAL_FILE)
        with pytest.raises(FailedTrialsError, match=r"sweep/2: .*nowhere is not"):
            sweep.run_sweep(folder, ray=())
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)
    assert [sweep.read_trial_outcome(folder / name).state for name in "01"] == ["done", "done"]
    runs = [RunDirectory(run) for run in folder.glob("*/runs/*")]
    assert sorted(len(run.card["resumed"]) for run in runs) == [0, 1]
