"""Gymnasium environments in processes with deadlines. Kind: effects."""

import contextlib
import functools
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from phasicrl.envs.checks import MakeEnv
from phasicrl.envs.protocol import EnvError
from phasicrl.envs.watchdog import CALL_TIMEOUT
from phasicrl.system.signals import call_on_parent_exit

CLOSE_TIMEOUT = 5
"""Maximum time for processes to end."""


class ProcessLostError(EnvError):
    """Failure of a process that died or hangs; all processes were ended."""


class ProcessVectorEnv(AsyncVectorEnv[Any, Any]):
    """Vector of Gymnasium environments, each in its process.

    If a process hangs or dies, all are ended and the call raises a `ProcessLostError`.
    """

    def __init__(self, makers: Sequence[MakeEnv], name: str) -> None:
        self._name, self._error = name, cast("ProcessLostError | None", None)
        calls = [functools.partial(_make_env_in_process, maker, os.getpid()) for maker in makers]
        try:
            # A fork would copy locks that threads of PyTorch and EnvPool hold.
            super().__init__(calls, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP)
        except Exception as error:
            _kill_all(getattr(self, "processes", ()))
            remedy = "Put the code of your script under `if __name__ == '__main__':`, and use a"
            remedy += " make_env that can be pickled; or use env.vectorization sync"
            if "AF_UNIX" in str(error):
                remedy = "Set TMPDIR to a folder with a shorter path"
            text = f"{name}: processes did not start ({error!r}). {remedy}"
            raise ProcessLostError(text) from error
        # Must run before multiprocessing's clean-up, which sends SIGTERM and waits forever.
        Finalize(self, _kill_all, (self.processes,), exitpriority=10)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Reset all environments; return first observations `[B, …]` and infos."""
        return self._request(CALL_TIMEOUT, self.reset_wait, self.reset_async, seed, options)

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments; return the five results of Gymnasium's step."""
        return self._request(CALL_TIMEOUT, self.step_wait, self.step_async, actions)

    def call(self, name: str, *args: Any, **_: Any) -> tuple[Any, ...]:
        """Call a method of every environment, and return the results in order."""
        num_steps = max(map(len, args[-1])) if name == "restore" else 0  # which it plays again
        timeout = CALL_TIMEOUT * (2 + num_steps)
        return self._request(timeout, self.call_wait, self.call_async, name, *args)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask all processes to close; kill those still alive after `CLOSE_TIMEOUT`.

        With `terminate`, kill them at once. `timeout` has no effect in either case.
        """
        end = time.monotonic() + (0 if terminate else CLOSE_TIMEOUT)
        for pipe in self.parent_pipes:
            with contextlib.suppress(OSError, AttributeError):  # Gymnasium sets None after an error
                pipe.send(("close", None))
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        _kill_all(self.processes)

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Raise the error of a process unchanged; Gymnasium would warn and wrap it."""
        if not all(successes):
            raise self.error_queue.get()[2]

    def _request(
        self, timeout: int, receive: Callable[[], Any], send_async: Callable[..., Any], *args: Any
    ) -> Any:
        """Send a call to all processes, and wait `timeout` seconds for the results.

        Raises:
            ProcessLostError: a process hangs or died; all of them were ended.
        """
        if self._error is not None:
            raise self._error
        call_name = send_async.__name__.removesuffix("_async")
        try:
            send_async(*args)
            if (hung := find_hung_process(self.parent_pipes, timeout)) is None:
                return receive()
            text = f"environment {hung} has not finished {call_name}() within {timeout} s"
            text += "; it hangs, or the machine is overloaded"
        except (EOFError, OSError):
            ends = [process.sentinel for process in self.processes]
            multiprocessing.connection.wait(ends, CLOSE_TIMEOUT)
            codes = [(i, process.exitcode) for i, process in enumerate(self.processes)]
            index, code = next((pair for pair in codes if pair[1] is not None), codes[0])
            text = f"the process of environment {index} died in {call_name}() (exit code {code})"
            text += "; memory may be short: use fewer environments" * (code in (None, -9))
        self.close(terminate=True)
        self._error = ProcessLostError(f"{self._name}: {text}")
        raise self._error from None


def find_hung_process(pipes: Sequence[Any], seconds: int) -> int | None:
    """Wait for a result in each pipe, and return the index of the first without one in time.

    Time in which this process is stopped does not count, apart from one second.
    """
    for index, pipe in enumerate(pipes):
        while not pipe.poll(1):
            seconds -= 1
            if seconds <= 0:
                return index
    return None


def _kill_all(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join(CLOSE_TIMEOUT)


def _make_env_in_process(maker: MakeEnv, parent_pid: int) -> gym.Env[Any, Any]:
    """Make an environment in its process, or in the process `parent_pid` for Gymnasium's spaces."""
    env: Any = maker()
    if os.getpid() != parent_pid:
        # Signals to the process group (Ctrl-C, SLURM) are handled by the trainer, which saves.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        call_on_parent_exit(lambda: os._exit(1))
        env.error_types = (BaseException,)  # no Ctrl-C comes here
    return env
