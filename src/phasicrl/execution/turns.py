"""Runs that would fill the same cores compute in turns. Kind: effects (locks two files).

Threads of two runs that are mixed on the cores wait for each other after every kernel, and find the
caches full of the other run's numbers. In turns of some tens of milliseconds each run has all cores
and both are together as fast as one alone (docs/performance.md).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE = 2.0
"""Seconds after which a run computes without a turn: who has it may have been stopped."""
IMPATIENCE = 30.0
"""Seconds for which it then takes what turns it gets without waiting."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-4, 1e-3


class Turns:
    """Turns of this user's runs on the same cores of this machine.

    Who computes has `now` locked, who is next has `next`: none that has just had its turn comes
    before one that waits. The system gives the locks of a process back when it ends. For a run that
    was stopped in its turn, others wait two seconds of every thirty.

    Args:
        folder: of the two files; by default one of the user's, in the system's folder for temporary
            files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._impatient_until = 0.0
        self._next = self._now = -1
        cores = hashlib.sha256(repr(sorted(os.sched_getaffinity(0))).encode()).hexdigest()[:8]
        folder = folder or Path(tempfile.gettempdir()) / f"phasicrl-{os.getuid()}"
        with suppress(OSError):  # nowhere to write: everybody computes at once
            folder.mkdir(mode=0o700, exist_ok=True)
            self._next, self._now = (
                os.open(folder / f"{cores}.{name}", os.O_RDWR | os.O_CREAT, 0o600)
                for name in ("next", "now")
            )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and have it."""
        start = time.monotonic()
        deadline = start + PATIENCE if start >= self._impatient_until else start
        has_turn = self._now >= 0 and _lock(self._next, deadline)
        if has_turn:
            has_turn = _lock(self._now, deadline)
            fcntl.flock(self._next, fcntl.LOCK_UN)
        if has_turn:
            self._impatient_until = 0.0
        elif deadline > start:
            self._impatient_until = deadline + IMPATIENCE
        try:
            yield
        finally:
            if has_turn:
                fcntl.flock(self._now, fcntl.LOCK_UN)

    def __del__(self) -> None:
        for file in {self._next, self._now} - {-1}:
            os.close(file)


def _lock(file: int, deadline: float) -> bool:
    """Lock a file; False if that is not possible until the deadline."""
    pause = _FIRST_PAUSE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:  # another has it; or the file system has no locks
            if time.monotonic() > deadline:
                return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
