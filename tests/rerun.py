"""`--rerun-failed`: run each failed test once more, by itself; one that passes then is flaky.

A flaky test does not fail the run, but is a defect: the run prints `flaky: TEST` for it.
"""

import subprocess
import sys

import pytest

MAX_RERUNS = 10
"""Number of failed tests above which none is run again: something is broken."""
REPORTS = pytest.StashKey[list[pytest.TestReport]]()
"""Failures of flaky tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rerun-failed", action="store_true", help="run failed tests once more")


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not config.getoption("--rerun-failed") or hasattr(config, "workerinput"):
        return
    stats = config.pluginmanager.get_plugin("terminalreporter").stats  # type: ignore[union-attr]
    failed = [*stats.pop("failed", []), *stats.pop("error", [])]
    tests = dict.fromkeys(report.nodeid for report in failed)
    passed = {test for test in tests if len(tests) <= MAX_RERUNS and _passes_alone(config, test)}
    config.stash[REPORTS] = [report for report in failed if report.nodeid in passed]
    stats["flaky"] = config.stash[REPORTS]
    stats["failed"] = [report for report in failed if report.nodeid not in passed]
    is_whole = session.exitstatus == pytest.ExitCode.TESTS_FAILED and not session.shouldfail
    if passed and not stats["failed"] and is_whole:
        session.exitstatus = pytest.ExitCode.OK


def _passes_alone(config: pytest.Config, test: str) -> bool:
    """Run one test in a new process. Golden numbers get no second chance."""
    command = [sys.executable, "-m", "pytest", "-m", "", "--tb", "short", test]
    return "golden" not in test and subprocess.run(command, cwd=config.rootpath).returncode == 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.config.stash.get(REPORTS, [])
    for report in reports:
        terminalreporter.section(f"{report.nodeid} failed, but passed by itself")
        terminalreporter.write_line(report.longreprtext)
    for test in dict.fromkeys(report.nodeid for report in reports):
        terminalreporter.write_line(f"flaky: {test}")
