"""Gymnasium's adapter: known episodes, and environments that go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.envs.gymnasium_adapter import GymnasiumEnv, made_by_id
from phasicrl.envs.protocol import EnvError
from tests.envs.counting import Counting, CountingInFloat32, Faulty, FromFive, Spaces

Parallel = Literal["sync", "processes"]
PARALLEL: tuple[Parallel, ...] = ("sync", "processes")
NEVER = np.zeros(3, np.int64)


def make(make_env: Any, parallel: Parallel = "sync", *, num_envs: int = 3, seed: int = 1, **seconds: float) -> GymnasiumEnv:
    return GymnasiumEnv(make_env, num_envs=num_envs, seed=seed, name="mine", parallel=parallel, **seconds)


@pytest.mark.parametrize("kind", [Counting, CountingInFloat32])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_known_episodes_come_out_whole(parallel: Parallel, kind: type[Counting]) -> None:
    """Every step of every episode of `Counting` is there once, with the right flags, ends and last observations."""
    envs = make(kind, parallel)
    obs = envs.reset()
    assert obs.dtype == np.float32
    ids, episode, clock = obs[:, 0].copy(), np.zeros(3, int), np.zeros(3, int)
    np.testing.assert_array_equal(obs[:, 1:], 0)
    for _ in range(40):
        step = envs.step(NEVER)
        clock += 1
        np.testing.assert_array_equal(step.reward, clock)
        done = clock == 2 + (ids + episode) % 3
        terminated = done & (episode % 2 == 0)  # where both flags are up, terminated wins
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, done & ~terminated)
        if done.any():
            np.testing.assert_array_equal(step.final_obs, np.stack([ids, episode, clock], axis=1)[done])
        else:
            assert step.final_obs is None
        episode += done
        clock[done] = 0
        np.testing.assert_array_equal(step.obs, np.stack([ids, episode, clock], axis=1))
    envs.close()
    assert episode.min() >= 8


@pytest.mark.parametrize("parallel", PARALLEL)
def test_each_environment_has_a_seed_of_its_own(parallel: Parallel) -> None:
    ids = []
    for seed in (1, 1, 2):
        envs = make(Counting, parallel, seed=seed)
        ids.append(envs.reset()[:, 0].tolist())
        assert envs.reset()[:, :2].tolist() == [[own, 1.0] for own in ids[-1]], "a second reset goes on, it does not seed again"
        envs.close()
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[0])) == 3 and not set(ids[0]) & set(ids[2])


def test_actions_are_counted_from_zero() -> None:
    envs = make(FromFive)
    assert envs.action_space == gym.spaces.Discrete(3)
    envs.reset()
    np.testing.assert_array_equal(envs.step(np.array([0, 1, 2])).reward, [5, 6, 7])
    envs.close()


FAULTS = {
    "raises": "ZeroDivisionError: division by zero (counting.py, line",
    "exits": "SystemExit: 3",
    "shape": "shape (3,); its observation_space says (2,)",
    "dtype": "dtype complex64; its observation_space says float32",
    "nan": "an observation that is not finite",
    "nan reward": "the reward nan",
    "old step": "a tuple of 4; (obs, reward, terminated, truncated, info) was expected",
    "none": "an object of type NoneType",
    "terminated": "terminated = None",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_environment_call_and_step(fault: str) -> None:
    made = iter(["nothing", "nothing", fault])  # for the probe of the spaces, for environment 0, for environment 1
    envs = make(lambda: Faulty(next(made)), num_envs=2)
    envs.reset()
    envs.step(NEVER[:2])
    envs.step(NEVER[:2])
    with pytest.raises(EnvError) as caught:
        envs.step(NEVER[:2])
    assert str(caught.value).startswith("mine: environment 1, step() at step 3: ")
    assert FAULTS[fault] in str(caught.value)
    with pytest.raises(EnvError, match="after close"):
        envs.step(NEVER[:2])


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_environments_own_traceback_is_attached(parallel: Parallel) -> None:
    envs = make(lambda: Faulty("raises"), parallel, num_envs=1)
    envs.reset()
    with pytest.raises(EnvError, match="ZeroDivisionError") as caught:
        for _ in range(3):
            envs.step(NEVER[:1])
    assert "raise ZeroDivisionError" in caught.value.__notes__[0]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_faults_of_a_reset_are_told_too(parallel: Parallel) -> None:
    for fault, message in {"reset raises": "RuntimeError: no level today", "reset without info": r"\(obs, info\) was expected"}.items():
        envs = make(lambda fault=fault: Faulty(fault), parallel, num_envs=2)
        with pytest.raises(EnvError, match=rf"environment 0, reset\(\) at step 0: .*{message}"):
            envs.reset()


def test_a_process_that_is_killed_is_named() -> None:
    envs = make(lambda: Faulty("dies"), "processes", num_envs=2)
    envs.reset()
    started = time.monotonic()
    with pytest.raises(EnvError, match=r"the process of environment \d died in step\(\) \(signal SIGKILL\).*memory"):
        for _ in range(3):
            envs.step(NEVER[:2])
    assert time.monotonic() - started < 5
    envs.close()


def test_a_process_that_hangs_is_named_after_the_deadline() -> None:
    envs = make(lambda: Faulty("hangs"), "processes", num_envs=2, step_seconds=0.5)
    envs.reset()
    envs.step(NEVER[:2])
    envs.step(NEVER[:2])
    processes = envs._vector.processes  # type: ignore[union-attr]
    with pytest.raises(EnvError, match=r"environment 0 has not finished step\(\) within 0.5 s"):
        envs.step(NEVER[:2])
    assert not any(process.is_alive() for process in processes)


def test_a_process_that_hangs_prints_where(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import functools, numpy\n"
        "from tests.envs import counting\n"
        "from phasicrl.envs.gymnasium_adapter import GymnasiumEnv\n"
        "if __name__ == '__main__':\n"
        "    make_env = functools.partial(counting.Faulty, 'hangs')\n"
        "    envs = GymnasiumEnv(make_env, num_envs=1, seed=1, name='mine', parallel='processes', step_seconds=0.5)\n"
        "    envs.reset()\n"
        "    for _ in range(3): envs.step(numpy.zeros(1, int))\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert "counting.py" in result.stderr and "in _misbehave" in result.stderr
    assert "EnvError: mine: environment 0 has not finished" in result.stderr


def test_a_failure_to_make_an_environment_in_its_process_is_told() -> None:
    home = os.getpid()

    def make_env() -> gym.Env[Any, Any]:
        if os.getpid() != home:
            raise OSError("the port is taken")
        return Counting()

    envs = make(make_env, "processes", num_envs=1)
    with pytest.raises(EnvError, match=r"environment 0, reset\(\) at step 0: OSError: the port is taken"):
        envs.reset()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_processes_leave_signals_to_the_trainer(sent: signal.Signals) -> None:
    envs = make(Counting, "processes", num_envs=1)
    envs.reset()
    process = envs._vector.processes[0]  # type: ignore[union-attr]
    assert process.pid is not None
    os.kill(process.pid, sent)
    envs.step(NEVER[:1])
    envs.close()
    assert not process.is_alive()


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "import os; os.kill(os.getpid(), 9)"])
def test_processes_end_with_the_trainer(end: str, tmp_path: Path) -> None:
    """Whether it ends by itself without `close`, or is killed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from phasicrl.envs.gymnasium_adapter import GymnasiumEnv, made_by_id\n"
        "if __name__ == '__main__':\n"
        "    envs = GymnasiumEnv(made_by_id('CartPole-v1'), num_envs=2, seed=1, name='mine', parallel='processes')\n"
        "    envs.reset()\n"
        "    print(*(process.pid for process in envs._vector.processes), flush=True)\n"
        f"    {end}\n"
    )
    started = time.monotonic()
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() - started < 20:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from phasicrl.envs.gymnasium_adapter import GymnasiumEnv, made_by_id\n"
        "GymnasiumEnv(made_by_id('CartPole-v1'), num_envs=1, seed=1, name='mine', parallel='processes')\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert "EnvError: mine: the process of environment 0 died in its start" in result.stderr
    assert "if __name__ == '__main__':" in result.stderr


def test_what_make_env_must_be() -> None:
    one, lock = Counting(), threading.Lock()
    with pytest.raises(ValueError, match="a function that makes an environment was expected"):
        make(one)
    with pytest.raises(ValueError, match=r"a gymnasium.Env was expected"):
        make(lambda: "environment")
    with pytest.raises(EnvError, match="mine cannot be made: RuntimeError: broken"):
        make(broken)
    shared = make(lambda: one)
    with pytest.raises(ValueError, match="the same environment twice; make a new one"):
        shared.reset()
    with pytest.raises(ValueError, match=r"env.parallel"):
        make(lambda: (lock, Counting())[1], "processes")


def broken() -> gym.Env[Any, Any]:
    raise RuntimeError("broken")


def test_environments_with_other_spaces_than_the_first_are_refused() -> None:
    made = iter([Counting, Counting, FromFive])
    envs = make(lambda: next(made)(), num_envs=2)
    with pytest.raises(EnvError, match=r"environment 1, reset.*other spaces"):
        envs.reset()


BOX = gym.spaces.Box(0, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (BOX, gym.spaces.Box(-1, 1, (2,)), "actions of the kind Box.*supported: Discrete"),
        (BOX, gym.spaces.MultiDiscrete([2, 2]), "actions of the kind MultiDiscrete"),
        (gym.spaces.Discrete(3), gym.spaces.Discrete(2), "observations of the kind Discrete.*supported: pictures"),
        (gym.spaces.Box(0, 1, (2, 2), np.float32), gym.spaces.Discrete(2), "observations of the kind Box"),
        (gym.spaces.Box(0, 255, (8, 8), np.uint8), gym.spaces.Discrete(2), "observations of the kind Box"),
        (gym.spaces.Box(0, 9, (2,), np.int64), gym.spaces.Discrete(2), "observations of the kind Box"),
        (gym.spaces.Dict({"a": BOX}), gym.spaces.Discrete(2), "observations of the kind Dict"),
    ],
)
def test_spaces_that_are_not_supported_are_refused_at_once(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], message: str
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=message):
        make(lambda: Spaces(observation_space, action_space))


def test_an_id_that_gymnasium_does_not_know_is_a_users_mistake() -> None:
    with pytest.raises(ValueError, match="Gymnasium does not find 'no_such_module:Thing-v0'"):
        made_by_id("no_such_module:Thing-v0")
