"""Which code this is. Kind: effects (asks git)."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of a folder, with `-dirty` if it was changed; None outside a checkout."""
    # The first command fails in a folder that the repository around it does not track.
    known, describe = "rev-parse --verify HEAD:./", "describe --always --dirty --exclude=*"
    try:
        for words in (known, describe):
            answer = subprocess.check_output(
                ["git", *words.split()], cwd=folder, stderr=subprocess.DEVNULL, text=True
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.strip()
