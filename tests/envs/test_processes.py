"""Environments in processes: deadlines, deaths, signals, and the end of the trainer."""

import os
import signal
import subprocess
import sys
import warnings
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.envs import processes
from phasicrl.envs.processes import find_hung_process
from phasicrl.envs.protocol import EnvError
from tests.envs.acting import NEVER, draw_action, make
from tests.envs.counting import Counting, Misbehaving, Structured
from tests.faults.harness import wait_for
from tests.helpers import is_there


def test_processes_do_not_wait_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class HasTorch(Structured):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:1], float("torch" in sys.modules), False, False, {}

    server: Any = forkserver.ForkServer()  # that of the other tests has torch
    server.set_forkserver_preload([])
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    envs = make(HasTorch, "async", num_envs=1)
    envs.reset()
    assert envs.step(draw_action(envs, np.random.default_rng(1))).reward.tolist() == [0.0]
    envs.close()
    server._stop()


def write(tmp_path: Path, text: str) -> str:
    """Write a script that finds the tests, also in the processes that it starts."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{text}")
    return str(script)


def run(tmp_path: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, write(tmp_path, text), *words],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_process_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = make(partial(Misbehaving, "hangs", 3), "async", num_envs=2)
    envs.reset()
    monkeypatch.setattr(processes, "CALL_TIMEOUT", 1)
    started = envs._vector.processes
    with pytest.raises(EnvError, match=r"mine: environment \d has not finished step\(\)"):
        for _ in range(3):
            envs.step(NEVER[:2])
    assert not any(process.is_alive() for process in started)


def test_only_seconds_in_which_the_trainer_runs_count() -> None:
    """By hand: an answer comes in the wait of this number, however long that was."""

    class Pipe:
        def __init__(self, waits: int) -> None:
            self.left = waits

        def poll(self, timeout: float) -> bool:
            assert timeout == 1
            self.left -= 1
            return self.left <= 0

    for waits, silent in (((1, 1), None), ((3, 1), None), ((1, 4), 1), ((4, 1), 0), ((3, 3), 1)):
        assert find_hung_process([Pipe(number) for number in waits], 3) == silent


def test_a_failure_to_make_an_environment_in_its_process_is_reported() -> None:
    home = os.getpid()

    def make_env() -> gym.Env[Any, Any]:
        if os.getpid() != home:
            raise OSError("the port is taken")
        return Counting()

    envs = make(make_env, "async", num_envs=1)
    with pytest.raises(EnvError, match=r"environment 0, reset\(\) .*OSError: the port is taken"):
        envs.reset()


class Chance(Counting):
    """Environment that shows a number, by its kind: fixed, or drawn from a generator."""

    observation_space = gym.spaces.Box(0, 9, (3,), np.float32)

    def __init__(self, kind: str, script: Any) -> None:
        super().__init__()
        self._kind, self._script = kind, script

    def _observe(self) -> np.ndarray:
        draws = {
            "fixed": lambda: 3.0, "own": self.np_random.random, "few": lambda: self._id % 2,
            "script": lambda: self._script.random(), "space": lambda: self._script.sample()[0],
            "coin": lambda: self._script.integers(3),
            "steps": lambda: self._script.random() if self._time else 0,
        }  # fmt: skip
        return np.full(3, draws[self._kind](), np.float32)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("fixed", 0), ("own", 0), ("few", 0), ("script", 1), ("space", 1), ("coin", 1), ("steps", 1)],
)
def test_generators_that_processes_have_in_common_are_warned_of(kind: str, count: int) -> None:
    """Starts that are equal since they follow their seeds are right."""
    space = gym.spaces.Box(0, 9, (3,), seed=1)
    script = space if kind == "space" else np.random.default_rng(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        envs = make(partial(Chance, kind, script), "async", num_envs=3)
        envs.reset()
        envs.reset()
        envs.close()
    assert [str(each.message).count("self.np_random") for each in caught] == [1] * count


@pytest.mark.filterwarnings("ignore:.*do not follow their seeds")
@pytest.mark.parametrize("at", [1, "later reset"])
def test_the_probe_of_chance_is_not_in_the_trainer_which_may_die_with_it(at: int | str) -> None:
    envs = make(partial(Misbehaving, "dies", at), "async", num_envs=2)
    envs.reset()
    call = "step" if at == 1 else "reset"
    with pytest.raises(EnvError, match=rf"environment \d died in {call}\(\) \(.* -9\).*memory"):
        envs.step(NEVER[:2])
        envs.reset()


class Cancelled(BaseException):
    """Error of an environment that is no `Exception`."""


class Cancelling(Counting):
    """Environment whose first step or reset raises what is no `Exception`."""

    def __init__(self, kind: type[BaseException], call: str, home: int) -> None:
        super().__init__()
        self._kind, self._call, self._home = kind, call, home

    def reset(self, **given: Any) -> Any:
        if self._call == "reset" and os.getpid() != self._home:
            raise self._kind("by the simulator")
        return super().reset(**given)

    def step(self, action: int) -> Any:
        raise self._kind("by the simulator")


@pytest.mark.parametrize("call", ["reset", "step"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, Cancelled])
def test_any_exception_of_an_environment_is_reported(kind: type[BaseException], call: str) -> None:
    envs = make(partial(Cancelling, kind, call, os.getpid()), "async", num_envs=2)
    with pytest.raises(EnvError, match=rf"environment \d, {call}\(\).*{kind.__name__}: by the sim"):
        envs.reset()
        envs.step(NEVER[:2])


FAILS = """
import multiprocessing
from tests.envs.acting import make
from tests.envs.counting import Counting

def launch():
    return make(Counting, "async", num_envs=2)

def fail_later():
    envs = launch()
    envs.reset()
    raise RuntimeError("of the user")

def fail_early():
    from multiprocessing.context import ForkServerProcess
    start, started = ForkServerProcess._Popen, []
    def second_fails(process):
        if started:
            raise OSError("too many open files")
        started.append(start(process))
        return started[0]
    ForkServerProcess._Popen = staticmethod(second_fails)
    launch()

if __name__ == "__main__":
    if sys.argv[1] == "early":
        fail_early()
    child = multiprocessing.get_context("spawn").Process(target=fail_later)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.long
@pytest.mark.parametrize("when, said", [("early", "too many open"), ("later", "of the user")])
def test_a_program_that_fails_ends_with_them(tmp_path: Path, when: str, said: str) -> None:
    """While they start, and in a process of one's own: multiprocessing would wait for ever."""
    result = run(tmp_path, FAILS, when)
    assert result.returncode == 1 and said in result.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_processes_leave_signals_to_the_trainer(sent: signal.Signals) -> None:
    envs = make(Counting, "async", num_envs=1)
    envs.reset()
    process = envs._vector.processes[0]
    assert process.pid is not None
    os.kill(process.pid, sent)
    envs.step(NEVER[:1])
    envs.close()
    assert not process.is_alive()


def test_replay_has_time_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    envs, restored = (make(Counting, "async", num_envs=1) for _ in range(2))
    envs.reset()
    for _ in range(4):
        envs.step(NEVER[:1])
    deadlines: list[int] = []
    monkeypatch.setattr(processes, "find_hung_process", lambda _, time: deadlines.append(time))
    restored.load_state_dict(envs.state_dict() or {})
    assert deadlines[-1] >= 4 * processes.CALL_TIMEOUT


ENDS = """
import os, time
from tests.envs.counting import Counting  # all that processes import

class Sleeping(Counting):
    def step(self, action):
        os.write(1, f"{os.getpid()}\\n".encode())  # at once: two share the pipe
        time.sleep(1000)

if __name__ == "__main__":
    import torch
    from tests.envs.acting import make
    kind = Sleeping if sys.argv[1] == "killed" else Counting
    envs = make(kind, "async", num_envs=2)
    envs.reset()
    if kind is Sleeping:
        envs.step(torch.zeros(2, dtype=torch.int64))
    print(*(process.pid for process in envs._vector.processes), sep="\\n", flush=True)
    if sys.argv[1] == "exit":
        raise SystemExit(0)
"""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "end", [pytest.param("returns", marks=LONG), pytest.param("exit", marks=LONG), "killed"]
)
def test_processes_end_with_the_trainer(end: str, tmp_path: Path) -> None:
    """Let the trainer return without `close`, or kill it while they hang."""
    words = [sys.executable, write(tmp_path, ENDS), end]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        if end == "killed":
            process.kill()
        process.wait(60)
    wait_for(lambda: not any(map(is_there, pids)))


UNGUARDED = """
from phasicrl.envs.processes import ProcessVectorEnv
from tests.envs.counting import Counting

ProcessVectorEnv([Counting], "mine").reset()
"""


def test_a_script_without_a_main_guard_gets_the_remedy(tmp_path: Path) -> None:
    result = run(tmp_path, UNGUARDED)
    assert "ProcessLostError: mine: processes did not start" in result.stderr
    assert "if __name__ == '__main__':" in result.stderr


def test_a_long_tmpdir_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / ("x" * 99)).mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    assert "Set TMPDIR" in run(tmp_path, UNGUARDED).stderr
