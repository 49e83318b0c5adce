"""One process at a time writes into a run directory. Kind: effects (files)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import IO

LOCK_FILE = ".lock"


class RunLock:
    """Holds a run directory for this process until it is closed, or the process ends.

    The lock is the operating system's: what a dead process has left in the file holds nobody.

    Args:
        path: of the run directory.

    Raises:
        ValueError: another process has it; the message says which.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = (path / LOCK_FILE).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)  # it may have the lock, and not have written yet who it is
            holder = _holder(self._file)
            self._file.close()
            raise ValueError(
                f"{path} is in use by {holder}; let it finish, or stop it first"
            ) from None
        except OSError:
            pass  # this file system has no locks
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        }
        self._file.truncate(0)
        self._file.write(json.dumps(about))
        self._file.flush()

    def close(self) -> None:
        """Let others have it; calling it again does nothing."""
        self._file.close()


def _holder(file: IO[str]) -> str:
    """Who has the lock, in words."""
    file.seek(0)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        about = json.loads(file.read())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    return "another process"
