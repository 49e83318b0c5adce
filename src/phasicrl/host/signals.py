"""What ends a run from outside ends it in order. Kind: effects.

A signal becomes an exception, after which the run is saved.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

PREEMPTED, INTERRUPTED = 75, 130
"""Exit codes of a run that was told to end: start it again; Ctrl-C."""
_AT_ONCE = 0.5
"""Seconds."""
_ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def when_parent_ends(end: Callable[[], object]) -> None:
    """Call a function, in a thread of its own, when the process that started this one is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "nobody has started this process"

    def watch() -> None:
        parent.join()
        end()

    threading.Thread(target=watch, daemon=True).start()


class ToldToEnd(BaseException):
    """A signal came. No SystemExit: an environment that calls `sys.exit()` raises that."""


class Preempted(SystemExit):
    """The process was told to end, and the run is saved; `code` is 75, "try again later"."""

    def __init__(self, name: str) -> None:
        super().__init__(PREEMPTED)
        self.name = name

    def __str__(self) -> str:
        """What came."""
        return self.name


class Signals:
    """Between `install` and `remove` the first signal raises where the main thread is.

    No later one interrupts what follows.

    SIGINT raises KeyboardInterrupt; SIGTERM, SIGHUP and SIGUSR1 raise `ToldToEnd`. A second SIGINT
    ends the process at once. Signals that the program has handlers for are left to these.

    Args:
        ask: is given the exception, and says whether all processes of the run will raise it
            together, later; else it is raised where the signal came.
    """

    def __init__(self, ask: Callable[[BaseException], bool]) -> None:
        self._ask = ask
        self._before: dict[signal.Signals, Any] = {}
        self._closing, self._raised_at = False, -math.inf

    def install(self) -> None:
        """Take over the signals that nobody has taken; only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, *_ASKS_TO_END):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = signal.signal(number, self._handle)

    def hold(self) -> None:
        """From now on signals wait: the run is being saved."""
        self._closing = True

    def remove(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Several of a kind come at once to a group of processes, and none but the first counts. One
        # that comes later is heard: the first may have been raised where Python passes exceptions
        # over, such as a destructor.
        now = time.monotonic()
        if now - self._raised_at < _AT_ONCE:
            return
        if self._closing:
            if number == signal.SIGINT:
                os._exit(INTERRUPTED)
            return
        self._raised_at = now
        name = signal.Signals(number).name
        error = KeyboardInterrupt(name) if number == signal.SIGINT else ToldToEnd(name)
        if not self._ask(error):
            raise error
