"""Numerics are golden: tiny runs give the committed numbers.

A change of them is a change of learning behavior (see `tests/golden.py`).
"""

import json
from pathlib import Path

import pytest

from tests.golden import FILE, measure, runs

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_tiny_run_gives_the_committed_numbers(name: str, tmp_path: Path) -> None:
    rows = measure(*runs(tmp_path)[name])
    for row, golden in zip(rows, GOLDEN[name], strict=True):
        # Other processors round differently, and a sampled action may hang on it; 1e-4 is far below
        # any change of the algorithm.
        assert row == pytest.approx(golden, rel=1e-4, abs=1e-5)


def test_every_golden_run_is_run() -> None:
    assert set(GOLDEN) == set(runs(Path()))
