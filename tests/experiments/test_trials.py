"""Trials: each run once, rows in order, and seeds for choosing apart from seeds for reporting."""

from __future__ import annotations

import csv
import gzip
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phasicrl.config import Config, EnvConfig
from phasicrl.envs import watchdog
from phasicrl.experiments import trials as trials_module
from phasicrl.experiments.trials import (
    ResultTable,
    Trial,
    fill_table,
    over_seeds,
    ready,
    run_trials,
)
from phasicrl.presets import get_preset
from tests.faults.harness import wait_for
from tests.helpers import is_there

CONFIG = Config(env=EnvConfig(id="x"))


def table(path: Path) -> ResultTable:
    return ResultTable(path, ("preset", "seed", "reached"))


def rows_of(trial: Trial) -> list[dict[str, Any]]:
    return [
        {"preset": trial.label[0], "seed": trial.config.seed, "reached": 10 * trial.config.seed}
    ]


def read(path: Path) -> list[tuple[str, str, str]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [
        (row["preset"], row["seed"], row["reached"]) for row in csv.DictReader(text.splitlines())
    ]


@pytest.mark.parametrize("name", ["some.csv", "some.csv.gz"])
def test_each_run_is_made_once_and_rows_are_in_the_order_of_labels_and_seeds(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    ppo, ppg = over_seeds(("ppo",), CONFIG, (102, 101)), over_seeds(("ppg",), CONFIG, (101,))
    made = [trial.key for trial in fill_table(table(path), [ppo[0], *ppg], rows_of)]
    assert made == [("ppo", "102"), ("ppg", "101")]
    before = path.read_bytes()
    assert [trial.key for trial in fill_table(table(path), [*ppo, *ppg], rows_of)] == [
        ("ppo", "101")
    ]
    assert read(path) == [("ppo", "101", "1010"), ("ppo", "102", "1020"), ("ppg", "101", "1010")]
    assert list(fill_table(table(path), [*ppo, *ppg], rows_of)) == []
    path.unlink()
    list(fill_table(table(path), [ppo[0], *ppg], rows_of))
    assert path.read_bytes() == before


def test_a_run_may_have_several_rows_and_a_label_several_words(tmp_path: Path) -> None:
    results = ResultTable(
        tmp_path / "x.csv", ("game", "setting", "seed", "steps"), label=("game", "setting")
    )

    def measure(trial: Trial) -> list[dict[str, Any]]:
        game, setting = trial.label
        return [
            {"game": game, "setting": setting, "seed": trial.config.seed, "steps": steps}
            for steps in (5, 10)
        ]

    trials = [
        Trial((game, setting), CONFIG) for game in ("heist", "maze") for setting in ("fp32", "bf16")
    ]
    assert len(list(fill_table(results, trials, measure))) == 4
    assert [row["steps"] for row in results.rows()] == ["5", "10"] * 4
    assert results.missing([*trials, Trial(("heist", "fp64"), CONFIG)]) == [
        Trial(("heist", "fp64"), CONFIG)
    ]


@pytest.mark.parametrize("name", ["some.csv", "some.csv.gz"])
def test_a_full_disk_leaves_the_rows_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first, second = over_seeds(("ppo",), CONFIG, (101, 102))
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


def test_seeds_for_choosing_and_for_reporting_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    with pytest.raises(ValueError, match="below 101, on which settings are chosen"):
        table(path).missing(over_seeds(("ppo",), CONFIG, (100, 101)))
    table(path).add(rows_of(Trial(("ppo",), CONFIG.changed({"seed": 101}))))
    with pytest.raises(ValueError, match="write them to another file"):
        next(fill_table(table(path), over_seeds(("ppg",), CONFIG, (1,)), rows_of))
    assert read(path) == [("ppo", "101", "1010")]


def test_a_run_that_fails_leaves_the_rows_of_the_others(tmp_path: Path) -> None:
    def measure(trial: Trial) -> list[dict[str, Any]]:
        if trial.config.seed == 102:
            raise RuntimeError("out of memory")
        return rows_of(trial)

    with pytest.raises(RuntimeError, match="out of memory"):
        list(
            fill_table(
                table(tmp_path / "x.csv"), over_seeds(("ppo",), CONFIG, (101, 102, 103)), measure
            )
        )
    assert read(tmp_path / "x.csv") == [("ppo", "101", "1010")]


def test_trials_run_in_processes_too() -> None:
    trials = over_seeds(("ppo",), CONFIG, (1, 2, 3))
    found = dict(run_trials(trials, rows_of, jobs=2))
    assert found == {trial: rows_of(trial) for trial in trials}


def wait_for_nothing(folder: Path, trial: Trial) -> None:
    """Leave word of this process, and go on until told to end, as a run does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / f"{trial.config.seed}").write_text(str(os.getpid()))
    time.sleep(600)


def trials_without_end(folder: Path) -> None:
    trials = over_seeds(("ppo",), CONFIG, (1, 2, 3, 4))  # the last two are handed over early
    list(run_trials(trials, partial(wait_for_nothing, folder), jobs=2))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_processes_of_trials_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    # A program of its own tracks its semaphores, and takes them away when it was killed.
    program = f"from {__name__} import *; trials_without_end(Path({str(tmp_path)!r}))"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    wait_for(lambda: all((tmp_path / seed).exists() for seed in "12"))
    pids = [wait_for(lambda seed=seed: (tmp_path / seed).read_text()) for seed in "12"]
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(is_there(int(pid)) for pid in pids))


def fail_if_first(folder: Path, seed: int) -> None:
    """The first fails once the second has begun."""
    if seed == 1:
        wait_for(lambda: (folder / "2 began").exists())
        raise RuntimeError("out of memory")


def fail_or_wait(folder: Path, trial: Trial) -> None:
    """The first fails; the others go on until they are told to end."""
    seed = trial.config.seed
    fail_if_first(folder, seed)

    def end(*_: object) -> None:
        (folder / f"{seed} ended").touch()
        sys.exit(75)

    signal.signal(signal.SIGTERM, end)
    (folder / f"{seed} began").touch()
    time.sleep(600)


@pytest.mark.long
def test_when_one_fails_the_others_are_told_to_end_and_no_more_begin(tmp_path: Path) -> None:
    trials = over_seeds(("ppo",), CONFIG, range(1, 9))
    with pytest.raises(RuntimeError, match="out of memory"):
        list(run_trials(trials, partial(fail_or_wait, tmp_path), jobs=2))
    began, ended = (
        {path.name.split()[0] for path in tmp_path.glob(f"* {what}")} for what in ("began", "ended")
    )
    # The third may begin before the failure of the first is known, and be told to end before it has
    # left word that it began.
    assert "2" in began <= ended <= {"2", "3"}


def fail_or_save(folder: Path, trial: Trial) -> None:
    """The first fails; the second saves its run and hears no second signal meanwhile."""
    fail_if_first(folder, trial.config.seed)

    def save(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.exit(75)

    signal.signal(signal.SIGTERM, save)
    (folder / "2 began").touch()
    time.sleep(600)


@pytest.mark.long
@pytest.mark.timeout(60)
def test_one_that_saves_its_run_ends_though_another_died_first(tmp_path: Path) -> None:
    # The first dies while it waits for a trial, with the lock of their queue: whoever comes back to
    # the queue waits for ever.
    trials = over_seeds(("ppo",), CONFIG, (1, 2))
    with pytest.raises(RuntimeError, match="out of memory"):
        list(run_trials(trials, partial(fail_or_save, tmp_path), jobs=2))
    assert not multiprocessing.active_children()


def num_last_resorts(trial: Trial) -> int:
    return len(watchdog._last_resorts)


def test_processes_of_trials_can_be_ended_where_they_hang_outside_of_a_run() -> None:
    trials = over_seeds(("ppo",), CONFIG, (1, 2))
    assert dict(run_trials(trials, num_last_resorts, jobs=2)) == dict.fromkeys(trials, 1)
    assert not watchdog._last_resorts


def module_of(trial: Trial) -> str:
    """Which file a module is from that only the command line has named."""
    return str(sys.modules["of_a_user"].__file__)


@pytest.mark.long
def test_processes_of_trials_import_what_the_command_line_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_user.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trials_module, "ASKED_IMPORTS", ["of_a_user"])
    found = dict(run_trials(over_seeds(("ppo",), CONFIG, (1, 2)), module_of, jobs=2))
    assert set(found.values()) == {str(tmp_path / "of_a_user.py")}


def test_a_trial_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(ValueError, match="ppo, 101 is asked for twice"):
        list(fill_table(table(path), over_seeds(("ppo",), CONFIG, (101, 102, 101)), rows_of))
    assert not path.exists()


def test_a_version_with_another_knob_finds_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = get_preset("cartpole-ppg")
    names = [ready(config, "x", 1, Path()).name]
    names.append(ready(config.changed({"ppo.clip": 0.123}), "x", 1, Path()).name)
    plain = Config.identity
    monkeypatch.setattr(Config, "identity", lambda self: {"a.knob": None} | plain(self))
    assert ready(config, "x", 1, Path()).name == names[0] != names[1]


def test_what_a_preset_reached_is_one_row(tmp_path: Path) -> None:
    quiet = {
        "log.console": "off",
        "log.tensorboard": False,
        "output_dir": str(tmp_path / "runs"),
        "total_env_steps": 2048,
    }
    config = get_preset("classic-ppo").changed({"env.id": "gymnasium:CartPole-v1", **quiet})
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "learning.py"))
    results = ResultTable(tmp_path / "cartpole.csv", script["LEARNING_COLUMNS"])
    list(
        fill_table(
            results,
            over_seeds(("classic-ppo --x",), config, (1,)),
            partial(script["learning_row"], threshold=1.0),
        )
    )
    (row,) = results.rows()
    assert (row["preset"], row["seed"], row["env"], row["env_steps"]) == (
        "classic-ppo --x",
        "1",
        "gymnasium:CartPole-v1",
        "2048",
    )
    assert (
        row["steps_to_threshold"] == "1024"
        and float(row["greedy_mean"]) >= float(row["greedy_min"]) > 0
    )
    assert all(row[name] for name in ("seconds", "return_100", "sampled_mean"))
