"""Environments of this process that hang: an error with the place, and a run that is saved."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phasicrl.algorithm import learn
from phasicrl.config import CheckpointConfig
from phasicrl.envs import watchdog
from phasicrl.envs.bridge import Bridge
from phasicrl.envs.gymnasium import GymnasiumEnv
from phasicrl.envs.protocol import EnvError
from phasicrl.envs.watchdog import Watchdog, last_resort
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.build import start_run
from tests.faults.harness import wait_for
from tests.helpers import Clock, Corridor, is_there, tiny

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


CLOCK = Clock()
"""Set by hand: a busy machine makes nothing late."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=CLOCK, sleep=time.sleep))


def hang() -> None:
    """Sleep; long ago, by the clock."""
    CLOCK.now += 1000
    time.sleep(1000)


class Hanging(Corridor):
    """Hangs in the third step of one environment of several, or where it is told to."""

    made, where = 0, "step"

    def __init__(self) -> None:
        super().__init__()
        self.number = Hanging.made
        Hanging.made += 1
        self.num_steps = 0

    def reset(self, **options: Any) -> Any:
        if Hanging.where == "reset":
            hang()
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        if Hanging.where == "step" and self.number == 2 and self.num_steps == 3:
            hang()
        return super().step(action)

    def close(self) -> None:
        if Hanging.where == "close" and self.number == 2:
            hang()


def hanging(where: str) -> Bridge:
    """Three environments; the interface is found out with another one."""
    Hanging.made, Hanging.where = -1, ""
    backend = GymnasiumEnv(Hanging, num_envs=3, seed=1, name="mine", parallel="sync")
    envs = Bridge(backend)
    envs._step_seconds = envs._reset_seconds = 8.0
    Hanging.where = where
    return envs


@pytest.mark.parametrize("where", ["reset", "step", "close"])
def test_a_call_that_hangs_is_an_error_with_its_place(
    where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    envs = hanging(where)
    index = {"reset": 0, "step": 2, "close": 2}[where]
    with pytest.raises(
        EnvError, match=rf"mine: environment {index}, {where}\(\) has not come back within 8 s"
    ):
        envs.reset()
        for _ in range(5):
            envs.step(torch.ones(3, dtype=torch.long))
        envs.close()
    assert "mine hangs here:" in (said := capfd.readouterr().err) and "time.sleep(1000)" in said


def test_what_comes_back_in_time_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    dog = Watchdog("mine")
    for _ in range(8):
        with dog.watch("step()", 0.5):
            CLOCK.now += 0.4
    CLOCK.now += 10
    time.sleep(0.1)  # some ticks
    dog.close()
    assert not capfd.readouterr().err


def test_another_thread_cannot_be_interrupted_and_is_ended_by_the_last_resort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a call into C that never returns: no signal helps."""
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.0)
    release, ended = threading.Event(), threading.Event()
    errors: list[EnvError] = []

    def call() -> None:
        with Watchdog("mine").watch("step()", 0.05):
            CLOCK.now += 1
            release.wait(100)

    def end(error: EnvError) -> None:
        errors.append(error)
        ended.set()
        release.set()

    with last_resort(end):
        thread = threading.Thread(target=call)
        thread.start()
        assert ended.wait(100)
        thread.join(100)
    assert "step() has not come back within 0.05 s" in str(errors[0])


def test_a_run_whose_environment_hangs_is_saved(tmp_path: Path) -> None:
    class LaterHanging(Corridor):
        num_steps = 0

        def step(self, action: Any) -> Any:
            type(self).num_steps += 1
            if type(self).num_steps > 2 * 32 + 5:
                hang()
            return super().step(action)

    config = tiny(tmp_path, checkpoint=CheckpointConfig(every_minutes=None))
    with (
        pytest.raises(EnvError, match="has not come back"),
        start_run(config, make_env=LaterHanging) as run,
    ):
        learn(run)
    assert [path.name for path in RunDirectory(run.directory).checkpoints] == ["step-000000000064"]


IN_C = """
import ctypes, sys, time
from pathlib import Path
from types import SimpleNamespace
from phasicrl.algorithm import learn
from phasicrl.envs import watchdog
from phasicrl.session.build import start_run
from tests.helpers import Clock, Corridor, tiny

CLOCK = Clock()
watchdog.time = SimpleNamespace(monotonic=CLOCK, sleep=time.sleep)
watchdog.TICK_SECONDS, watchdog.GRACE_SECONDS = 0.01, 0.0

class Stuck(Corridor):
    num_steps = 0

    def step(self, action):
        Stuck.num_steps += 1
        if Stuck.num_steps > 2 * 32 + 5:
            CLOCK.now += 1000
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second waits for the first, signals or not
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return super().step(action)

with start_run(tiny(Path(sys.argv[1])), make_env=Stuck) as run:
    learn(run)
"""


def test_a_call_into_c_that_never_returns_is_saved_and_ended_too(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(IN_C)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs")],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=60,
    )  # fmt: skip
    assert done.returncode == 4 and "pthread_mutex_lock" in done.stderr
    assert "error: corridor: environment" in done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in RunDirectory(run).checkpoints] == ["step-000000000064"]


def test_it_is_ended_also_where_nothing_can_be_saved_or_said(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    broken = "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 2)\n"
    script.write_text(
        "import os\nfrom phasicrl.session.run import Run\n"
        "def no_memory(self): raise MemoryError\n"
        f"Run._save_kept = no_memory\n{broken}{IN_C}"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs")],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=60,
    )  # fmt: skip
    assert done.returncode == 4 and done.stderr == ""


def test_workers_end_with_their_trainer(tmp_path: Path) -> None:
    """Killed from outside while one of them hangs, which nothing inside can then end."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, time\n"
        "from phasicrl.envs.bridge import Bridge\n"
        "from phasicrl.envs.gymnasium import GymnasiumEnv\n"
        "from tests.helpers import Corridor\n"
        "class Hanging(Corridor):\n"
        "    def step(self, action):\n"
        "        os.write(1, f'{os.getpid()}\\n'.encode())  # at once: two share the pipe\n"
        "        time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    how = {'name': 'm', 'parallel': 'processes'}\n"
        "    envs = Bridge(GymnasiumEnv(Hanging, num_envs=2, seed=1, **how))\n"
        "    envs.reset()\n"
        "    import torch\n"
        "    envs.step(torch.ones(2, dtype=torch.long))\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        workers = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_there, workers)))
