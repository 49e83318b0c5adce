"""Version of the code. Kind: effects (runs git)."""

from __future__ import annotations

import subprocess
from pathlib import Path


def find_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return a directory's git commit, with `-dirty` after changes; None outside a checkout."""
    # The first command fails in folders that the surrounding repository does not track.
    verify, describe = "rev-parse --verify HEAD:./", "describe --always --dirty --exclude=*"
    try:
        for words in (verify, describe):
            answer = subprocess.check_output(
                ["git", *words.split()], cwd=folder, stderr=subprocess.DEVNULL, text=True
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.strip()
