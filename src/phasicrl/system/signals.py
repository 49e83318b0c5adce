"""Signals that end a run, as exceptions, so that the run is saved. Kind: effects."""

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

EXIT_PREEMPTED, EXIT_INTERRUPTED = 75, 130
"""Exit codes after SIGTERM ("try again later") and after Ctrl-C."""
_DEBOUNCE_SECONDS = 0.5
_PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def call_on_parent_exit(on_parent_exit: Callable[[], object]) -> None:
    """Start a thread that calls `on_parent_exit` when the `multiprocessing` parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process has no parent"

    def wait_for_parent() -> None:
        parent.join()
        on_parent_exit()

    threading.Thread(target=wait_for_parent, daemon=True).start()


class TerminationRequested(BaseException):
    """Request by a signal to end; no SystemExit, which environments may raise by `sys.exit()`."""


class PreemptedExit(SystemExit):
    """End of the process after a signal, with the run saved and exit code 75, "try again later"."""

    code = EXIT_PREEMPTED


def exit_preempted(number: int, frame: FrameType | None) -> None:
    """Handle a signal by ending the process at once, with exit code 75."""
    os._exit(EXIT_PREEMPTED)


@contextmanager
def exit_on_preemption() -> Iterator[None]:
    """Exit with 75, in the block, on SIGTERM, SIGHUP or SIGUSR1, unless a run handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    default = [x for x in _PREEMPTION_SIGNALS if is_main and signal.getsignal(x) == signal.SIG_DFL]
    for number in default:
        signal.signal(number, exit_preempted)
    try:
        yield
    except PreemptedExit:  # the process ends
        default.clear()
        raise
    finally:
        for number in default:
            signal.signal(number, signal.SIG_DFL)


class SignalHandler:
    """Context in which the first signal raises an exception in the main thread.

    SIGINT raises KeyboardInterrupt; SIGTERM, SIGHUP and SIGUSR1 raise `TerminationRequested`, which
    leaves the context as `PreemptedExit`. Signals that the program handles itself are not changed.

    Args:
        request: function of the exception that returns whether all processes of the run will raise
            it together later; otherwise it is raised at once.
    """

    def __init__(self, request: Callable[[BaseException], bool]) -> None:
        self._request = request
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._is_ending, self._raised_at = False, -math.inf

    def __enter__(self) -> Self:
        """Install the signal handlers, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *_PREEMPTION_SIGNALS):
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler, exit_preempted):
                    self._old_handlers[number] = signal.signal(number, self._handle)
        return self

    def ignore_further(self) -> None:
        """Ignore further signals while the run is saved, except a second Ctrl-C."""
        self._is_ending = True

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Restore the earlier handlers; raise `PreemptedExit` after a termination request."""
        self._is_ending = True
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if isinstance(error, TerminationRequested):
            preempted = PreemptedExit(str(error))
            vars(preempted).update(vars(error))
            raise preempted from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A process group may get several signals at once, of which the first counts. Later ones
        # count too, because the first may have been raised where Python ignores exceptions, such
        # as in a destructor.
        now = time.monotonic()
        if now - self._raised_at < _DEBOUNCE_SECONDS:
            return
        if self._is_ending:
            if number == signal.SIGINT:
                os._exit(EXIT_INTERRUPTED)
            return
        self._raised_at = now
        name = signal.Signals(number).name
        error = KeyboardInterrupt(name) if number == signal.SIGINT else TerminationRequested(name)
        if not self._request(error):
            raise error
