"""Environments in processes: deadlines, deaths, signals, and the end of the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.envs.protocol import EnvError
from tests.envs.acting import NEVER, draw_action, make
from tests.envs.counting import Counting, Faulty, Structured
from tests.faults.harness import wait_for
from tests.helpers import is_there


def test_processes_do_not_wait_for_torch() -> None:
    class HasTorch(Structured):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:1], float("torch" in sys.modules), False, False, {}

    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # other tests give it torch
    forkserver.set_forkserver_preload([])
    envs = make(HasTorch, "processes", num_envs=1)
    envs.reset()
    assert envs.step(draw_action(envs, np.random.default_rng(1))).reward.tolist() == [0.0]
    envs.close()


def test_a_process_that_is_killed_is_named() -> None:
    envs = make(lambda: Faulty("dies"), "processes", num_envs=2)
    envs.reset()
    with pytest.raises(
        EnvError, match=r"the process of environment \d died in step\(\) \(signal SIGKILL\).*memory"
    ):
        for _ in range(3):
            envs.step(NEVER[:2])
    envs.close()


def test_a_process_that_hangs_is_named_after_the_deadline() -> None:
    envs = make(lambda: Faulty("hangs"), "processes", num_envs=2, step_seconds=5.0)
    envs.reset()
    envs.step(NEVER[:2])
    envs.step(NEVER[:2])
    processes = envs.backend._vector.processes  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match=r"environment 0 has not finished step\(\) within 5 s"):
        envs.step(NEVER[:2])
    assert not any(process.is_alive() for process in processes)


def test_a_process_that_hangs_prints_where(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import functools, numpy\n"
        "from tests.envs import counting\n"
        "from phasicrl.envs.gymnasium import GymnasiumEnv\n"
        "if __name__ == '__main__':\n"
        "    make_env = functools.partial(counting.Faulty, 'hangs')\n"
        "    envs = GymnasiumEnv(make_env, num_envs=1, seed=1, name='mine', parallel='processes', "
        "step_seconds=5.0)\n"
        "    envs.reset()\n"
        "    for _ in range(3): envs.step(numpy.zeros(1, int))\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "counting.py" in result.stderr and "in _misbehave" in result.stderr
    assert "ProcessLostError: mine: environment 0 has not finished" in result.stderr


def test_a_failure_to_make_an_environment_in_its_process_is_told() -> None:
    home = os.getpid()

    def make_env() -> gym.Env[Any, Any]:
        if os.getpid() != home:
            raise OSError("the port is taken")
        return Counting()

    envs = make(make_env, "processes", num_envs=1)
    with pytest.raises(
        EnvError, match=r"environment 0, reset\(\) at step 0: OSError: the port is taken"
    ):
        envs.reset()


FAILS = """
import multiprocessing, os, sys
sys.path.insert(0, ROOT)
from phasicrl.envs.gymnasium import GymnasiumEnv
from tests.envs.counting import Counting

def make():
    return GymnasiumEnv(Counting, num_envs=2, seed=1, name="mine", parallel="processes")

def fail_later():
    envs = make()
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
    make()

if __name__ == "__main__":
    if sys.argv[1] == "early":
        fail_early()
    child = multiprocessing.get_context("spawn").Process(target=fail_later)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("when", "said"), [("early", "too many open files"), ("later", "of the user")]
)
def test_a_program_that_fails_ends_with_them(tmp_path: Path, when: str, said: str) -> None:
    """While they start, and in a process of one's own: multiprocessing would wait for ever."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS.replace("ROOT", repr(str(Path(__file__).parents[2]))))
    done = subprocess.run(
        [sys.executable, str(script), when], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_processes_leave_signals_to_the_trainer(sent: signal.Signals) -> None:
    envs = make(Counting, "processes", num_envs=1)
    envs.reset()
    process = envs.backend._vector.processes[0]  # type: ignore[attr-defined]
    assert process.pid is not None
    os.kill(process.pid, sent)
    envs.step(NEVER[:1])
    envs.close()
    assert not process.is_alive()


class Sleeping(Counting):
    """Prints its process and hangs in its first step."""

    def step(self, action: int) -> Any:
        os.write(1, f"{os.getpid()}\n".encode())  # at once: two share the pipe
        time.sleep(1000)


ENDS = """
import sys, threading, os, numpy
from phasicrl.envs.gymnasium import GymnasiumEnv
from tests.envs.test_processes import Counting, Sleeping

if __name__ == "__main__":
    kind = Sleeping if sys.argv[1] == "killed" else Counting
    envs = GymnasiumEnv(kind, num_envs=2, seed=1, name="mine", parallel="processes")
    envs.reset()
    if kind is Sleeping:
        envs.step(numpy.zeros(2, int))
    print(*(process.pid for process in envs._vector.processes), sep="\\n", flush=True)
    if sys.argv[1] == "exit":
        raise SystemExit(0)
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("returns", marks=pytest.mark.long),
        pytest.param("exit", marks=pytest.mark.long),
        "killed",
    ],
)
def test_processes_end_with_the_trainer(end: str, tmp_path: Path) -> None:
    """Whether it ends by itself without `close`, or is killed while they hang."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{ENDS}")
    words = [sys.executable, str(script), end]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        if end == "killed":
            process.kill()
        process.wait(60)
    wait_for(lambda: not any(map(is_there, pids)))


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from phasicrl.envs.gymnasium import GymnasiumEnv, made_by_id\n"
        "GymnasiumEnv(made_by_id('CartPole-v1'), num_envs=1, seed=1, name='mine', "
        "parallel='processes')\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ProcessLostError: mine: the process of environment 0 died in its start" in result.stderr
    assert "if __name__ == '__main__':" in result.stderr
