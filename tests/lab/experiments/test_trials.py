"""Trials: each run once, rows in order, and seeds for choosing apart from seeds for reporting."""

import csv
import gzip
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

from phasicrl.config import Config, EnvConfig
from phasicrl.envs.protocol import EnvError
from phasicrl.lab.experiments import trials as trials_module
from phasicrl.lab.experiments.trials import (
    FailedTrialsError,
    Failure,
    ResultTable,
    Trial,
    prepare_trial_config,
    run_in_processes,
    run_missing_trials,
    vary_seed,
)
from phasicrl.presets import get_preset
from tests.corridor import Corridor
from tests.faults.harness import wait_for
from tests.helpers import is_there, run_here

CONFIG = Config(env=EnvConfig(id="x"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "run_in_processes", run_here)


def table(path: Path) -> ResultTable:
    return ResultTable(path, ("preset", "seed", "reached"))


def rows_of(trial: Trial) -> list[dict[str, Any]]:
    seed = trial.config.seed
    return [{"preset": trial.label_parts[0], "seed": seed, "reached": 10 * seed}]


def read(path: Path) -> list[tuple[str, str, str]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [tuple(row.values()) for row in csv.DictReader(text.splitlines())]  # type: ignore[misc]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["some.csv", "some.csv.gz"])
def test_each_run_is_made_once_and_rows_are_ordered(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    ppo, ppg = vary_seed(("ppo",), CONFIG, (102, 101)), vary_seed(("ppg",), CONFIG, (101,))
    made = [trial.key for trial in run_missing_trials(table(path), [ppo[0], *ppg], rows_of)]
    assert made == [("ppo", "102"), ("ppg", "101")]
    before = path.read_bytes()
    made = [trial.key for trial in run_missing_trials(table(path), [*ppo, *ppg], rows_of)]
    assert made == [("ppo", "101")]
    assert read(path) == [("ppo", "101", "1010"), ("ppo", "102", "1020"), ("ppg", "101", "1010")]
    assert list(run_missing_trials(table(path), [*ppo, *ppg], rows_of)) == []
    path.unlink()
    list(run_missing_trials(table(path), [ppo[0], *ppg], rows_of))
    assert path.read_bytes() == before


@pytest.mark.usefixtures("here")
def test_a_run_may_have_several_rows_and_a_label_several_words(tmp_path: Path) -> None:
    columns = ("game", "setting", "seed", "steps")
    results = ResultTable(tmp_path / "x.csv", columns, label_columns=columns[:2])

    def measure(trial: Trial) -> list[dict[str, Any]]:
        about = dict(zip(columns[:3], trial.key, strict=True))
        return [about | {"steps": steps} for steps in (5, 10)]

    *trials, new = (Trial(("heist", setting), CONFIG) for setting in ("fp32", "bf16", "fp64"))
    assert len(list(run_missing_trials(results, trials, measure))) == 2
    assert [row["steps"] for row in results.read()] == ["5", "10"] * 2
    assert results.find_missing([*trials, new]) == [new]


@pytest.mark.parametrize("name", ["some.csv", "some.csv.gz"])
def test_a_full_disk_keeps_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first, second = vary_seed(("ppo",), CONFIG, (101, 102))
    table(tmp_path / name).add(rows_of(first))

    def write(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="no space left"):
        table(tmp_path / name).add(rows_of(second))
    assert read(tmp_path / name) == [("ppo", "101", "1010")]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.usefixtures("here")
def test_seeds_for_choosing_and_for_reporting_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    with pytest.raises(ValueError, match="below 101, on which settings are chosen"):
        table(path).find_missing(vary_seed(("ppo",), CONFIG, (100, 101)))
    table(path).add(rows_of(Trial(("ppo",), CONFIG.with_updates({"seed": 101}))))
    with pytest.raises(ValueError, match=r"expected one kind\. Separate them"):
        next(run_missing_trials(table(path), vary_seed(("ppg",), CONFIG, (1,)), rows_of))
    assert read(path) == [("ppo", "101", "1010")]


@pytest.mark.usefixtures("here")
def test_a_failed_run_is_reported_after_the_others_have_their_rows(tmp_path: Path) -> None:
    def measure(trial: Trial) -> list[dict[str, Any]]:
        if trial.config.seed == 102:
            raise OSError("the disk is full")
        return rows_of(trial)

    trials = vary_seed(("ppo",), CONFIG, (101, 102, 103))
    with pytest.raises(FailedTrialsError, match=r"1 trials failed.*\n  ppo, 102: the disk is full"):
        list(run_missing_trials(table(tmp_path / "x.csv"), trials, measure))
    assert [row[1] for row in read(tmp_path / "x.csv")] == ["101", "103"]


def meet_fault(name: str) -> str:
    """Return, raise, or end the process in one of several ways."""
    if name == "error":
        raise RuntimeError("out of memory")
    if name == "env":
        raise EnvError("step() raised")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        os._exit(4)  # as faulthandler does after a deadline
    return name


def find_env(name: str) -> Any:
    """Return the entry point of an environment, as in a trial's process."""
    return gym.spec(name).entry_point


def test_processes_know_what_the_user_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = {"Named-v0": "mine:Env", "Given-v0": Corridor, "Other-v0": lambda: Corridor()}
    for name, maker in makers.items():
        monkeypatch.setitem(gym.registry, name, EnvSpec(name, entry_point=maker))
    found = dict(run_in_processes(["Named-v0", "Given-v0"], find_env, jobs=2))
    assert found == {name: makers[name] for name in ("Named-v0", "Given-v0")}


@pytest.mark.long
def test_trials_run_in_processes_of_their_own_and_none_stops_another(
    capfd: pytest.CaptureFixture[str],
) -> None:
    names = ["error", "env", "killed", "hangs", "one", "two", ""]  # the last returns a false value
    found = dict(run_in_processes(names, meet_fault, jobs=3))
    ended = "its process ended with exit code"
    failures = {"killed": Failure(f"{ended} -9"), "hangs": Failure(f"{ended} 4")}
    failures["error"] = Failure("RuntimeError: out of memory")
    failures["env"] = Failure("EnvError: step() raised")
    assert found == failures | {"one": "one", "two": "two", "": ""}
    assert not multiprocessing.active_children()
    assert capfd.readouterr().err.count("Traceback") == 1, "of the error that nobody expects"


def save_on_request(folder: Path, seed: int) -> None:
    """Write the id of this process, and save a run at SIGTERM."""

    def save(*_: object) -> None:
        (folder / f"{seed} saved").touch()
        sys.exit(75)

    signal.signal(signal.SIGTERM, save)
    (folder / f"{seed} began").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_runs_are_saved_when_the_parent_ends(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""if True:
        from functools import partial
        from {__name__} import *
        list(run_in_processes([1, 2, 3], partial(save_on_request, Path({str(tmp_path)!r})), jobs=2))
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[3], stderr=subprocess.DEVNULL
    )
    pids = [int(wait_for(lambda seed=seed: text(tmp_path / f"{seed} began"))) for seed in (1, 2)]
    parent.send_signal(number)
    codes = {signal.SIGTERM: 75, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -signal.SIGKILL}
    assert parent.wait(30) == codes[number]
    wait_for(lambda: not any(is_there(pid) for pid in pids))
    assert {path.name for path in tmp_path.glob("* saved")} == {"1 saved", "2 saved"}
    assert not (tmp_path / "3 began").exists()


def text(path: Path) -> str | None:
    """Return the text of a file, or None without a file."""
    return path.read_text() if path.exists() else None


def test_a_version_with_another_option_finds_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = get_preset("cartpole-ppg")
    names = [prepare_trial_config(config, "x", Path()).name]
    names.append(prepare_trial_config(config.with_updates({"ppo.clip": 0.123}), "x", Path()).name)
    plain = Config.identity
    monkeypatch.setattr(Config, "identity", lambda self: {"an.option": None} | plain(self))
    assert prepare_trial_config(config, "x", Path()).name == names[0] != names[1]
