"""Signals that end a run become exceptions, after which it is saved. Kind: effects."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

PREEMPTED, INTERRUPTED = 75, 130
"""Exit codes of a run that ends by a signal: "try again later"; Ctrl-C."""
_REPEAT_SECONDS = 0.5
_TERMINATION = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def when_parent_ends(end: Callable[[], object]) -> None:
    """Call a function, in a thread of its own, when the process that started this one is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process has no parent"

    def watch() -> None:
        parent.join()
        end()

    threading.Thread(target=watch, daemon=True).start()


class TerminationRequested(BaseException):
    """A signal came. No SystemExit: an environment that calls `sys.exit()` raises that."""


class Preempted(SystemExit):
    """The process was asked to end, and the run is saved; `code` is 75, "try again later"."""

    def __init__(self, name: str) -> None:
        super().__init__(PREEMPTED)
        self.name = name

    def __str__(self) -> str:
        """Return the name of the signal."""
        return self.name


def exit_preempted(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end the process at once, with exit code 75."""
    os._exit(PREEMPTED)


@contextmanager
def exiting_preempted() -> Iterator[None]:
    """Give a program that trains exit code 75 for signals before and after a run handles them."""
    default = [n for n in _TERMINATION if signal.getsignal(n) == signal.SIG_DFL]
    for number in default:
        signal.signal(number, exit_preempted)
    try:
        yield
    except Preempted:  # the process is about to end
        default.clear()
        raise
    finally:
        for number in default:
            signal.signal(number, signal.SIG_DFL)


class Signals:
    """Within its context, raises an exception in the main thread when a first signal arrives.

    SIGINT raises KeyboardInterrupt; SIGTERM, SIGHUP and SIGUSR1 raise `TerminationRequested`,
    which leaves the context as `Preempted`. Signals that the program handles itself are left alone.

    Args:
        request: called with the exception; returns whether all processes of the run will raise it
            together later. Else it is raised at once.
    """

    def __init__(self, request: Callable[[BaseException], bool]) -> None:
        self._request = request
        self._before: dict[signal.Signals, Any] = {}
        self._is_ending, self._raised_at = False, -math.inf

    def __enter__(self) -> Self:
        """Handle the signals; only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *_TERMINATION):
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler, exit_preempted):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def hold(self) -> None:
        """Ignore further signals while the run is saved; a second Ctrl-C ends the process."""
        self._is_ending = True

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Restore the handlers."""
        self._is_ending = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, TerminationRequested):
            preempted = Preempted(str(error))
            vars(preempted).update(vars(error))
            raise preempted from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A group of processes gets several of a kind at once, of which the first counts. A later
        # one counts too: the first may have been raised where Python ignores exceptions, such as
        # a destructor.
        now = time.monotonic()
        if now - self._raised_at < _REPEAT_SECONDS:
            return
        if self._is_ending:
            if number == signal.SIGINT:
                os._exit(INTERRUPTED)
            return
        self._raised_at = now
        name = signal.Signals(number).name
        error = KeyboardInterrupt(name) if number == signal.SIGINT else TerminationRequested(name)
        if not self._request(error):
            raise error
