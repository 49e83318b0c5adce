"""Gymnasium's environments in processes of their own, with deadlines. Kind: effects.

Gymnasium 1.4.0's `AsyncVectorEnv` waits for ever, and tells the death of a process as an `EOFError`
without words.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from phasicrl.envs.interface import MakeEnv
from phasicrl.envs.protocol import EnvError
from phasicrl.host.signals import when_parent_ends

START_REMEDY = (
    "if it speaks of bootstrapping above, "
    "put the start of your script under `if __name__ == '__main__':`"
)
"""For a process that ends before it is asked for anything."""
CLOSE_SECONDS = 5.0
"""How long processes may take to end."""


class ProcessLostError(EnvError):
    """A process has died, or hangs; all of them were ended."""


class ProcessVectorEnv(AsyncVectorEnv[Any, Any]):
    """Gymnasium's environments in processes, with deadlines and with words for the death of one."""

    def __init__(
        self, makers: Sequence[MakeEnv], name: str, step_seconds: float, reset_seconds: float
    ) -> None:
        """Start one process for each maker."""
        self._name, self._step_seconds, self._reset_seconds = name, step_seconds, reset_seconds
        # Never "fork": it copies a process whose threads (PyTorch's, EnvPool's) may hold locks at
        # that moment.
        context, mode = "forkserver", gym.vector.AutoresetMode.SAME_STEP
        calls = [functools.partial(_made_in_its_process, maker, os.getpid()) for maker in makers]
        try:
            super().__init__(calls, context=context, autoreset_mode=mode)
        except BaseException as error:
            _kill([each for each in getattr(self, "processes", ()) if each.pid is not None])
            # From Python 3.14 on the server that forks them tells it first, and dies with them.
            if not isinstance(error, EOFError | ConnectionError):
                raise
            raise EnvError(
                f"{name}: the process of environment 0 died in its start ({type(error).__name__}); "
                f"{START_REMEDY}"
            ) from None

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all, within the deadline."""
        with self._watched("reset()", self._reset_seconds):
            self.reset_async(seed=seed, options=options)
            return self.reset_wait(self._reset_seconds)

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all, within the deadline."""
        with self._watched("step()", self._step_seconds):
            self.step_async(actions)
            return self.step_wait(self._step_seconds)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each, within the deadline of a step."""
        with self._watched(f"a look at its {name}", self._step_seconds):
            self.call_async(name)
            return self.call_wait(self._step_seconds)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each, within the deadline of a reset."""
        with self._watched(f"setting its {name}", self._reset_seconds):
            for pipe, value in zip(self.parent_pipes, values, strict=True):
                pipe.send(("_setattr", (name, value)))
            self._raise_if_errors([done for _, done in self._answers(self._reset_seconds)])

    def close(self, **_: Any) -> None:
        """End the processes: ask, wait a little, kill."""
        if self.closed:
            return
        for pipe in self._open_pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def _check_spaces(self) -> None:
        """Wait for the processes to start, within the deadline.

        Gymnasium calls this at the end of its constructor, and waits for ever.

        Until then the caller holds the semaphores that they open by name, so that this cannot be
        left to the first reset.
        """
        # Before the rest of multiprocessing's clean-up, which sends the SIGTERM that the processes
        # ignore and then waits for ever. In a process of its own none but it is called.
        self._at_exit = Finalize(None, _kill, (self.processes,), exitpriority=10)
        spaces = (self.observation_mode, self.single_observation_space, self.single_action_space)
        with self._watched("its start", self._reset_seconds):
            for pipe in self.parent_pipes:
                pipe.send(("_check_spaces", spaces))
            list(self._answers(self._reset_seconds))

    def _answers(self, seconds: float) -> Iterator[Any]:
        """What every process answers, within the deadline."""
        deadline = time.monotonic() + seconds
        for pipe in self.parent_pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise multiprocessing.TimeoutError
            yield pipe.recv()

    @contextlib.contextmanager
    def _watched(self, call: str, seconds: float) -> Iterator[None]:
        """Put silence and death of a process into words, and end the others."""
        try:
            yield
        except multiprocessing.TimeoutError:
            index = next((i for i, pipe in enumerate(self.parent_pipes) if not pipe.poll(0)), 0)
            pid = self.processes[index].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)  # it prints where it stands
                time.sleep(0.3)
            self._end()
            raise ProcessLostError(
                f"{self._name}: environment {index} has not finished {call} within {seconds:g} s; "
                "it hangs, or the machine is overloaded; "
                "where it stands is printed above"
            ) from None
        except (EOFError, OSError):
            index, how = self._who_died()
            self._end()
            remedy = "if it printed nothing above, memory may have run out: take fewer environments"
            if call == "its start":
                remedy = START_REMEDY
            raise ProcessLostError(
                f"{self._name}: the process of environment {index} died in {call} ({how}); {remedy}"
            ) from None

    def _who_died(self) -> tuple[int, str]:
        """Index of a dead process, and how it ended."""
        ends = [process.sentinel for process in self.processes]
        multiprocessing.connection.wait(ends, timeout=CLOSE_SECONDS)
        for index, process in enumerate(self.processes):
            code = process.exitcode
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                return index, how
        return 0, "it closed its pipe"

    @property
    def _open_pipes(self) -> list[Any]:
        """To the processes, but those that Gymnasium gave up after an error."""
        return [pipe for pipe in self.parent_pipes if pipe is not None]

    def _end(self) -> None:
        """Kill what still runs and release the pipes."""
        self.closed = True
        self._at_exit.cancel()
        _kill(self.processes)
        for pipe in self._open_pipes:
            pipe.close()
        self.error_queue.close()


def _kill(processes: Sequence[Any]) -> None:
    """End processes that ignore requests."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(CLOSE_SECONDS)


def _made_in_its_process(maker: MakeEnv, parent: int) -> gym.Env[Any, Any]:
    """Make an environment, after preparing its process.

    Gymnasium calls this in the trainer's process `parent` too, which is left as it is.
    """
    if os.getpid() != parent:
        # A signal to the whole process group (Ctrl-C, SLURM) is for the trainer, which still has to
        # save and then ends us.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Else an environment that hangs would stay.
        when_parent_ends(lambda: os._exit(1))
        faulthandler.register(signal.SIGUSR1)  # `ProcessVectorEnv` asks when an environment hangs
    return maker()


def refuse_unsendable(name: str, make_env: MakeEnv) -> None:
    """Refuse a function that cannot be sent to another process, before any process is started."""
    import cloudpickle  # Gymnasium sends it with this, and depends on it

    try:
        cloudpickle.dumps(make_env)
    except Exception as error:
        raise ValueError(
            f"{name}: make_env cannot be sent to another process ({error}); "
            "make everything it needs inside of it, or set env.parallel to sync"
        ) from error
