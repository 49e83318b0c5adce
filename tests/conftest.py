"""Fixtures of every test, which close the runs that it opened, and the table of faults.

`--faults full --fault-table FILE` injects every fault of tests/faults and writes what held, with
the commit.
"""

import csv
import gc
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import jaxtyping
import pytest
import torch

from phasicrl.system.machine import find_commit, get_versions
from phasicrl.training import build, run
from tests import helpers

pytest_plugins = ["tests.rerun"]

_FAULTS: list[tuple[str, str, int, int]] = []
"""Faults of the tests: id, description, number of tries, number that held."""


_SHAPES = (
    "models/", "test_agents.", "test_combinations.", "test_golden.", "test_learner.",
    "test_normalize.", "test_objectives.", "test_phases.", "test_returns.",
)  # fmt: skip
"""Tests that check the shapes and types of each call: of the functions themselves, and of a run of
every kind. Elsewhere the checks would take a quarter of the time."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_checked = item.nodeid.removeprefix("tests/").startswith(_SHAPES)
    jaxtyping.config.update("jaxtyping_disable", not is_checked)


@pytest.fixture(autouse=True, scope="session")
def _skip_slow_calls() -> Iterator[None]:
    """Ask for commit and versions once, and flush no files: no test cuts the power."""
    commit, versions = find_commit(), get_versions()
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, run):
            patch.setattr(module, "find_commit", lambda: commit)
        patch.setattr(run, "get_versions", lambda: dict(versions))
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(autouse=True)
def _signals_are_given_back() -> Iterator[None]:
    """Fail a test that leaves signal handlers behind, which would swallow later signals."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in watched}
    yield
    left = {number: signal.getsignal(number) for number in watched}
    if left != before and threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            signal.signal(number, handler)
    assert left == before


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed PyTorch, so that no test depends on those before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _close_runs(_signals_are_given_back: None) -> Iterator[None]:
    yield
    while helpers.OPENED:
        helpers.OPENED.pop().resources.close()


def pytest_configure() -> None:
    """Let signals do what they do by default: a shell's background jobs ignore some of them.

    Programs that tests start would ignore them, too, and could not be interrupted. They compute in
    one thread, as this process does: several would wait for those of other tests.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    forkserver.set_forkserver_preload(["tests.preloaded"])
    torch.set_num_threads(1)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) == signal.SIG_IGN:
                is_int = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: 600,000 objects."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", choices=("few", "full"), default="few", help="how many faults")
    parser.addoption("--fault-table", type=Path, help="CSV file: what held of them")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        found = (value for name, value in report.user_properties if name == "fault")
        _FAULTS.extend(tuple(row) for row in found)  # type: ignore[arg-type]


def pytest_sessionfinish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("--fault-table")
    if path is not None and not hasattr(session.config, "workerinput"):
        _write_faults(path)


def _write_faults(path: Path) -> None:
    """Write what held; rows of an earlier run stay where this one did not try the same."""
    columns = ("fault", "what", "tried", "held", "commit")
    now: dict[tuple[str, str], list[int]] = {}
    for name, what, tried, held in _FAULTS:
        sums = now.setdefault((name, what), [0, 0])
        sums[0], sums[1] = sums[0] + tried, sums[1] + held
    rows = {key: (*key, *sums, find_commit()) for key, sums in now.items()}
    if path.is_file():
        with path.open(newline="") as file:
            before = [tuple(row) for row in csv.reader(file)][1:]
        rows = {(row[0], row[1]): row for row in before} | rows
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows[key] for key in sorted(rows))
