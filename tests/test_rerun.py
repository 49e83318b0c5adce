"""A test that passes when it is run again is flaky; one that fails again has failed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pathlib

def fail_once(name):
    mark = pathlib.Path(__file__).with_name(name)
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")

def test_sound(): pass
def test_flaky(): fail_once("flaky")
def test_golden(): fail_once("golden")
def test_broken(): raise AssertionError("each time")
def test_crash():
    mark = pathlib.Path(__file__).with_name("crash")
    if not mark.exists():
        mark.touch()
        os._exit(1)
"""


def run(folder: Path, chosen: str, *words: str) -> tuple[int, list[str]]:
    """Run some of the tests above; return the exit code and the tests called flaky."""
    (folder / "pytest.ini").touch()
    (folder / "test_it.py").write_text(TESTS)
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p tests.rerun"}
    plugins["PYTEST_DEBUG_TEMPROOT"] = str(folder)  # else it deletes folders of earlier tests
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--rerun-failed", *words, "-k", chosen],
        cwd=folder, env=os.environ | plugins | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, re.findall(r"^flaky: test_it\.py::(\w+)$", done.stdout, re.MULTILINE)


def test_a_failed_test_is_run_again(tmp_path: Path) -> None:
    parallel = ("-p", "xdist.plugin", "-n", "1")
    assert run(tmp_path, "sound or flaky or crash", *parallel) == (0, ["test_flaky", "test_crash"])


@pytest.mark.long
def test_one_that_fails_again_has_failed_and_golden_ones_get_no_second_chance(
    tmp_path: Path,
) -> None:
    assert run(tmp_path, "flaky or broken") == (1, ["test_flaky"])
    assert run(tmp_path, "golden") == (1, [])
