"""The examples run as they stand and are short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "true"}
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    number = float(next(word.strip(",;") for word in last.split() if word.strip(",;").replace(".", "").isdigit()))
    assert number > {"first_run": 80, "own_environment_and_network": 14, "own_loop": 195, "masked_with_memory": 7}[path.stem], last


def test_the_expected_examples_are_there() -> None:
    assert {path.stem for path in EXAMPLES} == {"first_run", "own_environment_and_network", "own_loop", "masked_with_memory"}
