"""Gymnasium's environments in processes of their own, with deadlines. Kind: effects."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from phasicrl.envs.interface import MakeEnv
from phasicrl.envs.protocol import EnvError
from phasicrl.envs.watchdog import RESET_SECONDS, STEP_SECONDS
from phasicrl.host.signals import when_parent_ends

START_REMEDY = (
    "if it speaks of bootstrapping above, "
    "put the start of your script under `if __name__ == '__main__':`"
)
CLOSE_SECONDS = 5
"""How long processes may take to end."""


class ProcessLostError(EnvError):
    """A process has died, or hangs; all of them were ended."""


class ProcessVectorEnv(AsyncVectorEnv[Any, Any]):
    """Gymnasium's environments in processes, with an error if one of them hangs or dies.

    Args:
        makers: a function for each environment.
        name: of the environments, for messages.
    """

    def __init__(self, makers: Sequence[MakeEnv], name: str) -> None:
        self._name = name
        calls = [functools.partial(_make_in_process, maker, os.getpid()) for maker in makers]
        try:
            # Forking would copy locks that threads of PyTorch and EnvPool may hold at that moment.
            super().__init__(calls, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP)
        except BaseException as error:
            _kill(getattr(self, "processes", ()))
            if not isinstance(error, EOFError | ConnectionError):
                raise
            text = f"{name}: a process of environments died in its start; {START_REMEDY}"
            raise ProcessLostError(text) from None
        # Before multiprocessing's own clean-up, which sends a SIGTERM and waits for ever.
        Finalize(self, _kill, (self.processes,), exitpriority=10)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments."""
        send = functools.partial(self.reset_async, seed, options)
        return self._finish("reset()", RESET_SECONDS, send, self.reset_wait)

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments."""
        send = functools.partial(self.step_async, actions)
        return self._finish("step()", STEP_SECONDS, send, self.step_wait)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of all environments."""
        send = functools.partial(self.call_async, name, *args, **kwargs)
        return self._finish(f"{name}()", RESET_SECONDS, send, self.call_wait)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask the processes to end, and kill those that do not."""
        end = time.monotonic() + (0 if terminate else timeout or CLOSE_SECONDS)
        for pipe in self.parent_pipes:
            with contextlib.suppress(OSError, AttributeError):  # Gymnasium sets None after an error
                pipe.send(("close", None))
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        _kill(self.processes)

    def _finish(
        self, call: str, seconds: int, send: Callable[[], Any], receive: Callable[[], Any]
    ) -> Any:
        """Send a call and return the answers; end all processes if one hangs or dies."""
        try:
            send()
            if (index := find_silent(self.parent_pipes, seconds)) is not None:
                pid = self.processes[index].pid
                assert pid is not None
                os.kill(pid, signal.SIGUSR1)  # prints its stack
                time.sleep(0.3)
                self._lose(
                    f"environment {index} has not finished {call} within {seconds} s; it hangs, or "
                    "the machine is overloaded. Its stack is printed above."
                )
            return receive()
        except (EOFError, OSError):
            ends = [process.sentinel for process in self.processes]
            multiprocessing.connection.wait(ends, CLOSE_SECONDS)
            codes = [process.exitcode for process in self.processes]
            index = next((i for i, code in enumerate(codes) if code is not None), 0)
            self._lose(
                f"the process of environment {index} died in {call} (exit code {codes[index]}). If "
                "it printed nothing, memory may have run out: take fewer environments."
            )

    def _lose(self, text: str) -> NoReturn:
        self.close(terminate=True)
        raise ProcessLostError(f"{self._name}: {text}") from None


def find_silent(pipes: Sequence[Any], seconds: int) -> int | None:
    """Wait for an answer in each pipe; return the index of one that has none after so many seconds.

    Only time in which this process runs counts: a wait in which it is stopped is one second.
    """
    for index, pipe in enumerate(pipes):
        while not pipe.poll(1):
            seconds -= 1
            if seconds <= 0:
                return index
    return None


def _kill(processes: Sequence[Any]) -> None:
    """End processes that ignore requests."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join(CLOSE_SECONDS)


def _make_in_process(maker: MakeEnv, parent: int) -> gym.Env[Any, Any]:
    """Make an environment, after preparing its process; Gymnasium also makes one in `parent`."""
    if os.getpid() != parent:
        # Signals to the whole group (Ctrl-C, SLURM) are for the trainer, which still has to save.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        when_parent_ends(lambda: os._exit(1))
        faulthandler.register(signal.SIGUSR1)
    return maker()


def check_sendable(name: str, make_env: MakeEnv) -> None:
    """Raise a ValueError for a function that cannot be sent to another process."""
    import cloudpickle  # Gymnasium sends it with this, and depends on it

    try:
        cloudpickle.dumps(make_env)
    except Exception as error:
        raise ValueError(
            f"{name}: make_env cannot be sent to another process ({error}); "
            "make everything it needs inside of it, or set env.parallel to sync"
        ) from error
