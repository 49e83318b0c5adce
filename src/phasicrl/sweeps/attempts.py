"""Attempts at the trials of a sweep, which are also the claims to them. Kind: effects (files).

`attempts/ID.001.json` is the first attempt at the trial ID. The process that trains makes the file,
which only one can (`O_EXCL`); only its owner writes to it, and nobody deletes or renames one. A
trial belongs to the last attempt; who takes it over from a dead owner makes the next file, and of
several who try only one can. An owner that finds a later attempt beside its own ends at once.

Whether an owner lives is asked of the system, if it is on this machine. Of another machine's the
file must change, which its owner sees to: no clock is compared with another machine's.

torch is not imported: a process claims before it loads that.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phasicrl.config_io import write_json

State = Literal["pending", "running", "done", "failed"]
Outcome = Literal["done", "failed", "released"]
ATTEMPTS = "attempts"
LEASE = 120.0
"""Seconds after which another machine's claim that nobody renews is given up for dead."""
TAKEN, TAKEN_OVER = 71, 70
"""Exit codes of a process that did not get a trial, and of one that lost it; no run has them."""
_RENEWALS = 8
"""In the time of a lease."""
_NAME = re.compile(r"(.+)\.(\d{3,})\.json")


@functools.cache
def this_machine() -> str:
    """Where process numbers mean what they mean here: host, its last start, space of processes."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [boot.read_text().strip() if boot.exists() else ""]
    parts.append(os.readlink(space) if space.is_symlink() else "")
    return " ".join([socket.gethostname(), *parts])


def started(pid: int) -> str | None:
    """When a process of this machine began, in the kernel's ticks; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    # Of a killed process the first thread may be gone while others still hold its locks.
    return None if state in "ZX" and int(fields[16]) <= 1 else fields[18]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a trial.

    Attributes:
        path: of its file.
        trial: the trial's id.
        number: from 1 on.
    """

    path: Path
    trial: str
    number: int

    def read(self) -> dict[str, Any]:
        """Owner and outcome; nothing while its owner has not written it."""
        try:
            return json.loads(self.path.read_text())
        except ValueError:
            return {}

    def write(self, about: dict[str, Any]) -> None:
        """Replace what it says, at once."""
        write_json(self.path, about)

    @property
    def successor(self) -> Attempt:
        """The next one, whether it is there or not."""
        return attempt_at(self.path.parent.parent, self.trial, self.number + 1)


def attempt_at(sweep: Path, trial: str, number: int) -> Attempt:
    """An attempt at a trial of the sweep in a folder, whether it is there or not."""
    return Attempt(sweep / ATTEMPTS / f"{trial}.{number:03d}.json", trial, number)


def all_attempts(sweep: Path) -> dict[str, list[Attempt]]:
    """All attempts in a sweep's folder by trial, first ones first."""
    found: dict[str, list[Attempt]] = defaultdict(list)
    for path in (sweep / ATTEMPTS).glob("*.json"):
        if match := _NAME.fullmatch(path.name):
            found[match[1]].append(Attempt(path, match[1], int(match[2])))
    return {trial: sorted(of, key=lambda one: one.number) for trial, of in found.items()}


class Watch:
    """Says of attempts whether their owners live.

    Args:
        lease: seconds, see `LEASE`.
    """

    def __init__(self, lease: float = LEASE) -> None:
        self._lease = lease
        self._seen: dict[Path, tuple[int, float]] = {}
        self._renewed: set[Path] = set()

    def state(self, attempts: Sequence[Attempt]) -> tuple[State, int]:
        """The state of a trial by its attempts, and how often it has failed."""
        said = [attempt.read() for attempt in attempts]
        failures = sum(about.get("outcome") == "failed" for about in said)
        if not said or said[-1].get("outcome") == "released":
            return "pending", failures
        if outcome := said[-1].get("outcome"):
            return outcome, failures
        return "running" if self._is_alive(attempts[-1], said[-1]) else "pending", failures

    def has_seen_alive(self, attempt: Attempt) -> bool:
        """Whether the owner of an attempt has given a sign of life since this began to watch."""
        return attempt.path in self._renewed

    def _is_alive(self, attempt: Attempt, about: dict[str, Any]) -> bool:
        """Whether the owner of an attempt without an outcome lives, as far as is known."""
        if about.get("machine") == this_machine() and about["started"] is not None:
            self._renewed.add(attempt.path)
            return started(about["pid"]) == about["started"]
        now, changed = time.monotonic(), attempt.path.stat().st_mtime_ns
        before, since = self._seen.setdefault(attempt.path, (changed, now))
        if before != changed:
            self._renewed.add(attempt.path)
            self._seen[attempt.path] = (changed, now)
            return True
        return now - since <= self._lease


class Claim:
    """Holds a trial for this process until it says what came of it, or ends.

    Args:
        attempt: that is to be this process's.
        lease: seconds, see `LEASE`.

    Raises:
        FileExistsError: another process has it.
    """

    def __init__(self, attempt: Attempt, *, lease: float = LEASE) -> None:
        self.attempt = attempt
        self._about: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": this_machine(),
            "started": started(os.getpid()),
        }
        with attempt.path.open("x") as file:
            file.write(json.dumps(self._about, indent=2) + "\n")
        self._over = threading.Event()
        self._every = lease / _RENEWALS
        self._renewing = threading.Thread(target=self._renew, daemon=True)
        self._renewing.start()

    def end(self, outcome: Outcome, **about: Any) -> None:
        """Say what came of it."""
        self._over.set()
        self._renewing.join()
        self.attempt.write(self._about | {"outcome": outcome} | about)

    def _renew(self) -> None:
        """Change the file again and again; end the process if it has been taken for dead."""
        while not self._over.wait(self._every):
            if self.attempt.successor.path.exists():
                os._exit(TAKEN_OVER)
            try:
                os.utime(self.attempt.path)
            except OSError:  # the file server is away; it may come back
                continue
