"""Deadlines for environments of this process: a call that hangs ends the process. Kind: effects."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from typing import NoReturn, Self

from phasicrl.envs.protocol import EnvError

STEP_SECONDS, RESET_SECONDS = 60, 300
"""Deadlines of a step and of a reset; the first reset includes making the environments."""


def end_process(error: EnvError) -> NoReturn:
    """Print an error and the stacks of all threads, and end this process with exit code 4."""
    try:
        print(f"error: {error}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(2)
    finally:  # even if nothing can be printed
        os._exit(error.exit_code)


class Watchdog:
    """Ends the process if a call does not return in time.

    Its thread counts the seconds in which this process runs. A process that is stopped, for example
    by Ctrl-Z, loses one second at most.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._call: tuple[str, float] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._count_seconds, daemon=True, name="env-watchdog").start()

    def watch(self, call: str, seconds: float) -> Self:
        """Start the clock of a call, which ends with the context that this returns."""
        self._call = call, seconds
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._call = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _count_seconds(self) -> None:
        """End the process when one call has been under way for as many ticks as it has seconds."""
        call, ticks = None, 0
        while not self._closed.wait(1):
            ticks = ticks + 1 if self._call is call else 0
            call = self._call
            if call is not None and ticks >= call[1]:
                name, seconds = call
                text = f"{self._name}: {name} has not returned within {seconds} s"
                end_process(
                    EnvError(f"{text}; it hangs, or the machine is overloaded. Its stacks:")
                )
