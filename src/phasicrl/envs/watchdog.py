"""Deadlines for environments in this process. Kind: effects (ends the process)."""

import faulthandler
import os
import sys
import threading

from phasicrl.envs.protocol import EnvError

CALL_TIMEOUT = 300
"""Deadline of a call in seconds; a step may reset environments, a reset may make them."""


class EnvWatchdog:
    """Thread that ends the process with exit code 4 and all stacks if a call hangs.

    Time in which the process is stopped, for example by Ctrl-Z, does not count, apart from one
    second.

    Attributes:
        current_call: name and deadline in seconds of the current call, set for each call; None
            outside.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.current_call: tuple[str, float] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._exit_on_hang, daemon=True, name="env-watchdog").start()

    def close(self) -> None:
        """End the thread that watches calls."""
        self._closed.set()

    def _exit_on_hang(self) -> None:
        call, ticks = None, 0
        while not self._closed.wait(1):
            previous, call = call, self.current_call
            ticks = ticks + 1 if call is previous else 0
            if call is not None and ticks >= call[1]:
                text = f"{self._name}: {call[0]} has not returned within {call[1]} s; it hangs, or"
                try:
                    print(f"error: {text} the machine is overloaded", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(2)
                finally:  # even if nothing can be printed
                    os._exit(EnvError.exit_code)
