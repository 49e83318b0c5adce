"""Lock with which runs on the same cores compute alternately. Kind: effects (locks two files).

Threads of two runs on the same cores wait for each other after every kernel and evict each other's
data from the caches. Where one computes at a time, for some tens of milliseconds (its turn), the
throughput of two runs equals that of one (docs/performance.md).
"""

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

TIMEOUT_SECONDS, BACKOFF_SECONDS = 2.0, 30.0
"""Maximum wait for the lock, and time without locking after a wait that long."""


class CpuTurnLock:
    """Lock for one user's runs on the same cores, so that only one of them computes at a time.

    The computing run locks the file `now`, and the first waiting run the file `next`, so that no
    run has two turns in a row while another waits. The end of a process releases both. Others wait
    at most 2 s (a holder may be suspended), then not at all for 30 s.

    Args:
        folder: directory of the two files; None: `phasicrl-UID` in the folder for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"phasicrl-{os.getuid()}"
        self._cores = hashlib.sha256(repr(sorted(os.sched_getaffinity(0))).encode()).hexdigest()[:8]
        self._retry_at = 0.0

    @contextmanager
    def take_cpu_turn(self) -> Iterator[None]:
        """Wait for the turn of this run to compute on its cores, and hold it until the block ends.

        After 2 s of waiting, or where files cannot be locked or are another user's, the block runs
        without a turn; for the next 30 s blocks do not wait.
        """
        start = time.monotonic()
        deadline = start + TIMEOUT_SECONDS if start >= self._retry_at else start
        with ExitStack() as files:
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                if self._folder.lstat().st_uid != os.getuid():
                    raise PermissionError
                with (self._folder / f"{self._cores}.next").open("a") as following:
                    _lock(following, deadline)
                    now = files.enter_context((self._folder / f"{self._cores}.now").open("a"))
                    _lock(now, deadline)
                self._retry_at = 0.0
            except OSError:  # timed out, no locks, or another user's: compute without a turn
                if deadline > start:
                    self._retry_at = deadline + BACKOFF_SECONDS
            yield


def _lock(file: IO[str], deadline: float) -> None:
    """Lock a file.

    Raises:
        OSError: another process holds the lock until the deadline, or the file cannot be locked.
    """
    pause = 1e-4
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
