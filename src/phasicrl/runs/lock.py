"""Lock of a run directory, which one process at a time holds. Kind: effects (files)."""

import contextlib
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path

LOCK_FILE = ".lock"


class RunInUseError(ValueError):
    """Another process holds the lock of a run directory."""


class RunLock:
    """Lock of a run directory, held until it is closed or the process ends.

    Args:
        path: path of the run directory.

    Raises:
        RunInUseError: another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self._file = (path / LOCK_FILE).open("a+", encoding="utf-8")
        exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            try:
                fcntl.flock(self._file, exclusive)
            except BlockingIOError:  # `is_held` locks for a moment, too
                time.sleep(0.1)  # the holder may still be writing its name
                fcntl.flock(self._file, exclusive)
        except BlockingIOError:
            self._file.seek(0)
            holder = "another process"
            with contextlib.suppress(ValueError), self._file:
                holder = "process {pid} on {host} since {since}".format(**json.load(self._file))
            given = f"{path} is in use by {holder}"
            rule = "no other user. Stop it or wait for it"
            raise RunInUseError(f"{given}; expected {rule}") from None
        except OSError:
            pass  # the file system has no locks
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, self._file)
        self._file.flush()

    @staticmethod
    def is_held(path: Path) -> bool:
        """Return whether a process holds the lock; write nothing, since others may look, too."""
        try:
            with (path / LOCK_FILE).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:  # or no process was here, or the file system has no locks
            return isinstance(error, BlockingIOError)
        return False

    def close(self) -> None:
        """Release the lock; further calls do nothing."""
        self._file.close()
