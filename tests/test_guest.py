"""The package is a guest: importing and training leave the process as they found it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_process_stays_as_it_was(tmp_path: Path) -> None:
    # Without a main module: each process of environments would import it again, with torch.
    program = "import pathlib, sys; from tests import guest; guest.main(pathlib.Path(sys.argv[1]))"
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
