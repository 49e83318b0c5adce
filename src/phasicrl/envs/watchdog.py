"""Environments of this process get deadlines: a call that hangs becomes an error. Kind: effects."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from phasicrl.envs.protocol import EnvError

STEP_SECONDS, RESET_SECONDS = 60.0, 300.0
"""How long environments may take; the first reset includes their start."""
TICK_SECONDS, GRACE_SECONDS = 0.25, 10.0
"""Between two looks; and after a signal until a call counts as one that none can interrupt."""
_last_resorts: list[Callable[[EnvError], None]] = []
_overdue: list[_Watch] = []
"""What the signal is about; a process has one handler of it, for all its environments."""


@contextmanager
def last_resort(end: Callable[[EnvError], None]) -> Iterator[None]:
    """Meanwhile call `end`, in another thread, for a call that hangs where no signal interrupts it.

    Only it can still save what there is, and end the process.
    """
    _last_resorts.append(end)
    try:
        yield
    finally:
        _last_resorts.remove(end)


def end_process(error: EnvError) -> None:
    """Say what hangs, and end this process, whatever became of the terminal."""
    _say(f"error: {error}\n")
    os._exit(error.exit_code)


def _say(text: str) -> None:
    """Print to the standard error, if it is still there: this thread has more to do."""
    with suppress(OSError, ValueError):
        print(text, end="", file=sys.stderr, flush=True)


class _Interrupt(BaseException):
    """Raised inside the call that hangs; no environment catches it by `except Exception`."""


class Watchdog:
    """Watches calls of the thread that makes the first of them; the main one's can be interrupted.

    A call that is overdue is shown on stderr with the place where it stands, and ends in an
    `EnvError` as soon as it runs Python again.

    Args:
        name: of the environments, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._watch: _Watch | None = None
        self._thread: threading.Thread | None = None
        self._watched = 0
        self._can_interrupt = False
        self._stop = threading.Event()

    def watch(self, call: str, seconds: float) -> _Watch:
        """As a context: give what happens inside so many seconds, else it raises an `EnvError`."""
        return _Watch(self, call, seconds)

    def begin(self, watch: _Watch) -> None:
        """Watch this from now on."""
        if self._thread is None:
            self._start()
        self._watch = watch

    def end(self) -> None:
        """Watch nothing."""
        self._watch = None

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _start(self) -> None:
        self._watched = threading.get_ident()
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL:
                signal.signal(signal.SIGVTALRM, _interrupt)
            self._can_interrupt = signal.getsignal(signal.SIGVTALRM) is _interrupt
        self._thread = threading.Thread(target=self._look, daemon=True, name="env-watchdog")
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            watch = self._watch
            if watch is not None and time.monotonic() > watch.due:
                self._bark(watch)

    def _bark(self, watch: _Watch) -> None:
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame else "(unknown)\n"
        _say(f"{self._name} hangs here:\n{stack}")
        watch.error = EnvError(
            f"{self._name}: {_environment(frame)}{watch.call} has not come back within "
            f"{watch.seconds:g} s; it hangs, or the machine is overloaded; "
            "where it stands is printed above"
        )
        if self._can_interrupt and self._watch is watch:
            _overdue.append(watch)
            signal.pthread_kill(self._watched, signal.SIGVTALRM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._watch is watch and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        if self._watch is watch and _last_resorts:
            _last_resorts[-1](watch.error)


class _Watch:
    """One call with its deadline."""

    __slots__ = ("_dog", "call", "due", "error", "is_open", "seconds")

    def __init__(self, dog: Watchdog, call: str, seconds: float) -> None:
        self._dog, self.call, self.seconds = dog, call, seconds
        self.error: EnvError | None = None
        self.is_open = True

    def __enter__(self) -> None:
        self.due = time.monotonic() + self.seconds
        self._dog.begin(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_open = False
        self._dog.end()
        if kind is not None and issubclass(kind, _Interrupt):
            assert self.error is not None
            raise self.error from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the call that is overdue, if it has not come back by now."""
    while _overdue:
        if _overdue.pop().is_open:
            raise _Interrupt


def _environment(frame: FrameType | None) -> str:
    """Which environment a frame, or one that called it, belongs to: `environment 3, `."""
    while frame is not None:
        index = getattr(frame.f_locals.get("self"), "env_index", None)
        if index is not None:
            return f"environment {index}, "
        frame = frame.f_back
    return ""
