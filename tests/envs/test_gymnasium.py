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
import torch

from phasicrl.envs.gymnasium import GymnasiumEnv, made_by_id
from phasicrl.envs.protocol import EnvError
from phasicrl.spaces import ObservationLayout
from tests.envs.counting import (
    Counting,
    CountingInFloat32,
    Faulty,
    FaultyMask,
    FaultyStructure,
    FromFive,
    Masked,
    MaskedByMethod,
    MaskedInInfo,
    MaskedInObservation,
    Spaces,
    Structured,
    draw_action,
)

Parallel = Literal["sync", "processes"]
PARALLEL: tuple[Parallel, ...] = ("sync", "processes")
NEVER = np.zeros(3, np.int64)


def make(make_env: Any, parallel: Parallel = "sync", *, num_envs: int = 3, seed: int = 1, **seconds: Any) -> GymnasiumEnv:
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
    assert envs.action_space == gym.spaces.Discrete(3, start=5)
    envs.reset()
    np.testing.assert_array_equal(envs.step(np.array([0, 1, 2])).reward, [5, 6, 7])
    envs.close()


@pytest.mark.parametrize("parallel", PARALLEL)
def test_all_kinds_of_spaces_at_once(parallel: Parallel) -> None:
    """Every part of the observations of `Structured` arrives, at the ends of episodes too, and every part of the actions."""
    envs = make(Structured, parallel)
    layout = ObservationLayout(envs.observation_space)

    def check(obs: np.ndarray, ids: np.ndarray, episode: np.ndarray, clock: np.ndarray) -> None:
        read = layout.unpack(torch.from_numpy(obs))
        np.testing.assert_array_equal(read["counts"], np.stack([ids, episode, clock], axis=1))
        np.testing.assert_array_equal(read["picture"], np.broadcast_to(clock[:, None, None, None], (len(obs), 4, 5, 3)))
        stage, flags = read["more"]
        np.testing.assert_array_equal(stage, clock)
        np.testing.assert_array_equal(flags @ torch.tensor([1, 2, 4], dtype=torch.uint8), clock)

    obs = envs.reset()
    ids, episode, clock = layout.unpack(torch.from_numpy(obs))["counts"][:, 0].numpy(), np.zeros(3, int), np.zeros(3, int)
    rng = np.random.default_rng(1)
    for _ in range(20):
        check(obs, ids, episode, clock)
        action = draw_action(envs, rng)
        step = envs.step(action)
        expected = (action.astype(float) + np.array([1, 0, 5, 0, 0])) @ [1, 10, 100, 1000, 10000]
        np.testing.assert_allclose(step.reward, expected, rtol=1e-6)
        clock += 1
        done = step.terminated | step.truncated
        np.testing.assert_array_equal(done, clock == 2 + (ids + episode) % 3)
        if done.any():
            assert step.final_obs is not None
            check(step.final_obs, ids[done], episode[done], clock[done])
        episode += done
        clock[done] = 0
        obs = step.obs
    envs.close()
    assert episode.min() >= 3


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(9, start=3), gym.spaces.Box(0, 9, (), np.int32), gym.spaces.Box(0, 9, (1,), np.float32)]
)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_observations_of_one_number(parallel: Parallel, space: gym.Space[Any]) -> None:
    """Gymnasium unwraps the smallest arrays where it stores them as objects."""

    class OneNumber(Counting):
        def _observe(self) -> Any:
            return np.full(space.shape or (), 3 + self._time, space.dtype)

    OneNumber.observation_space = space  # type: ignore[assignment]
    envs = make(OneNumber, parallel)
    layout, first = ObservationLayout(space), 3 - getattr(space, "start", 0)
    np.testing.assert_array_equal(envs.reset(), np.full((3, *layout.shape), first, layout.dtype))
    for _ in range(4):
        step = envs.step(NEVER)
        if step.final_obs is not None:
            assert step.final_obs.dtype == step.obs.dtype == layout.dtype
            np.testing.assert_array_equal(step.final_obs.reshape(-1), first + step.reward[step.terminated | step.truncated])
    envs.close()


MASKED: tuple[type[Masked], ...] = (MaskedInObservation, MaskedByMethod, MaskedInInfo)


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_masks_are_those_of_the_observations_returned(parallel: Parallel, kind: type[Masked]) -> None:
    """At the ends of episodes too, where the mask is that of the first observation of the next."""
    envs = make(kind, parallel)
    assert envs.mask_size == 7 and envs.action_mask is None
    expected_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)
    assert envs.observation_space == (gym.spaces.Dict(counts=expected_space) if kind is MaskedInObservation else expected_space)
    obs = envs.reset()
    rng, ends = np.random.default_rng(1), 0
    for _ in range(30):
        counts = obs.view(np.float32) if kind is MaskedInObservation else obs
        forbidden = (counts @ np.array([1, 2, 1], np.float32)).astype(int)[:, None]
        expected = np.concatenate([np.arange(4) != forbidden % 4, np.arange(3) != forbidden % 3], axis=1)
        np.testing.assert_array_equal(envs.action_mask, expected)
        step = envs.step(draw_action(envs, rng))
        obs, ends = step.obs, ends + int((step.terminated | step.truncated).sum())
    envs.close()
    assert ends > 10


def test_actions_that_are_not_allowed_are_refused() -> None:
    envs = make(MaskedInInfo)
    envs.reset()
    assert envs.action_mask is not None
    action = draw_action(envs, np.random.default_rng(1))
    action[2, 1] = np.argmin(envs.action_mask[2, 4:])
    with pytest.raises(ValueError, match=rf"mine: action {action[2, 1]} for environment 2, component 1 \(1\) is not allowed now"):
        envs.step(action)
    envs.close()


def test_the_observation_goes_before_the_method_and_the_method_before_info() -> None:
    class Twice(MaskedByMethod, MaskedInInfo):
        def action_masks(self) -> np.ndarray:
            return np.arange(7) > 0

    class Thrice(Twice, MaskedInObservation):
        observation_space = MaskedInObservation.observation_space

    for kind, from_method in ((Twice, True), (Thrice, False)):
        envs = make(kind)
        envs.reset()
        assert envs.action_mask is not None
        assert (envs.action_mask.sum() == 3 * 6) == from_method
        envs.close()


def test_masks_are_found_through_wrappers() -> None:
    envs = make(lambda: gym.wrappers.TimeLimit(MaskedByMethod(), 100))
    assert envs.mask_size == 7
    envs.reset()
    assert envs.action_mask is not None and not envs.action_mask.all()
    envs.close()


class Numbers(MaskedInObservation):
    action_space = gym.spaces.Box(-1, 1, (2,))  # type: ignore[assignment]


def test_numbers_are_not_masked() -> None:
    """Without a discrete component `action_mask` is nothing special."""
    envs = make(Numbers)
    assert envs.mask_size == 0 and "action_mask" in envs.observation_space.spaces  # type: ignore[attr-defined]
    envs.reset()
    envs.step(np.zeros((3, 2), np.float32))
    assert envs.action_mask is None
    envs.close()


def test_the_environment_that_is_only_looked_at_is_reset_where_that_is_needed() -> None:
    resets: list[tuple[int, int | None]] = []
    made: list[Any] = []

    def counted(kind: type[Counting]) -> gym.Env[Any, Any]:
        class Counted(kind):
            def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
                resets.append((made.index(self), seed))
                return super().reset(seed=seed, options=options)

            def close(self) -> None:
                resets.append((made.index(self), -1))

        made.append(Counted())
        return made[-1]

    for kind, expected in (
        (Counting, [(0, 0), (0, -1)]),
        (MaskedByMethod, [(0, -1)]),
        (MaskedInObservation, [(0, -1)]),
        (Structured, [(0, 0), (0, -1)]),
        (Numbers, [(0, -1)]),
    ):
        resets.clear()
        made.clear()
        envs = make(lambda kind=kind: counted(kind))
        assert resets == expected
        envs.close()


FAULTY_MASKS = {
    "missing": (None, "returned no 'action_mask' in its info, where it had one at first"),
    "too short": ([1, 1], r"gave an action mask of shape \(2,\); accepted for MultiDiscrete.*: shape \(5,\), or one mask for each part"),
    "no numbers": ("all", "gave an action mask of a str"),
    "values": ([0, 1, 2, 0, 1], r"gave an action mask with the values \[0 1 2\]; accepted: True and False"),
    "nothing left": ([[1, 1], [0, 0, 0]], r"gave an action mask that allows nothing in component 1: \[ True  True False False False\]"),
}


@pytest.mark.parametrize("fault", FAULTY_MASKS)
def test_faults_of_masks(fault: str) -> None:
    mask, message = FAULTY_MASKS[fault]
    made = iter([np.ones(5), np.ones(5), mask])
    envs = make(lambda: FaultyMask(next(made)), num_envs=2)
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros((2, 2), np.int64))
    with pytest.raises(EnvError, match=rf"mine: environment 1, step\(\) at step 3: {message}.*; give a mask of 5 values"):
        envs.step(np.zeros((2, 2), np.int64))


FAULTY_PARTS = {
    "missing": ("more", None, "without 'more', which its observation_space has"),
    "too few": ("more", (3,), "without 'more/1', which"),
    "shape": ("counts", np.zeros(4), r"shape \(4,\) \(at 'counts'\); its observation_space says \(3,\)"),
    "dtype": ("picture", np.zeros((4, 5, 3)), r"dtype float64 \(at 'picture'\); its observation_space says uint8"),
    "not finite": ("counts", [0, np.inf, 1], r"that is not finite \(at 'counts'\): \[ 0. inf  1.\]"),
    "above": ("more", (11, np.zeros(3, int)), r"is outside of Discrete\(9, start=2\) \(at 'more/0'\): 11"),
    "below": ("more", (1, np.zeros(3, int)), r"is outside of Discrete\(9, start=2\) \(at 'more/0'\): 1"),
    "no digit": ("more", (2, np.array([0, 2, 0])), r"is outside of MultiBinary\(3\) \(at 'more/1'\): \[0 2 0\]"),
}


@pytest.mark.parametrize("fault", FAULTY_PARTS)
def test_faults_of_parts(fault: str) -> None:
    part, value, message = FAULTY_PARTS[fault]
    envs = make(lambda: FaultyStructure(part, value), num_envs=1)
    envs.reset()
    action = np.array([[0, 0, 0, 0, 0]], np.float32)
    for _ in range(2):
        envs.step(action)
    with pytest.raises(EnvError, match=rf"mine: environment 0, step\(\) at step 3: returned an observation.*{message}"):
        envs.step(action)


def test_processes_do_not_wait_for_torch() -> None:
    class HasTorch(Structured):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:1], float("torch" in sys.modules), False, False, {}

    envs = make(HasTorch, "processes", num_envs=1)
    envs.reset()
    assert envs.step(draw_action(envs, np.random.default_rng(1))).reward == [0.0]
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
    "huge": "an observation that is not finite",
    "ragged": "an observation that is no array",
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
    home = os.getpid()
    for fault, message in {"reset raises": "RuntimeError: no level today", "reset without info": r"\(obs, info\) was expected"}.items():
        made = iter(["nothing", fault, fault])  # for the environment that is only looked at, then for those that are stepped
        envs = make(lambda fault=fault, made=made: Faulty(next(made) if os.getpid() == home else fault), parallel, num_envs=2)
        with pytest.raises(EnvError, match=rf"environment 0, reset\(\) at step 0: .*{message}"):
            envs.reset()
        with pytest.raises(EnvError, match=rf"mine: reset\(\) of the environment that was made to learn the spaces: .*{message}.*; repair"):
            make(lambda fault=fault: Faulty(fault))


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
        "from phasicrl.envs.gymnasium import GymnasiumEnv\n"
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


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be placed")
def test_processes_run_on_the_cores_of_the_trainer_and_not_only_on_that_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasicrl.envs.gymnasium.usable_cores", lambda: {max(os.sched_getaffinity(0))})
    envs = make(Counting, "processes", num_envs=1)
    assert os.sched_getaffinity(envs._vector.processes[0].pid) == {max(os.sched_getaffinity(0))}  # type: ignore[union-attr]
    envs.close()


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
        "from phasicrl.envs.gymnasium import GymnasiumEnv, made_by_id\n"
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
        "from phasicrl.envs.gymnasium import GymnasiumEnv, made_by_id\n"
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
        (
            gym.spaces.Text(5),
            gym.spaces.Discrete(2),
            r"observations of the kind Text\(.*\) are not supported; supported: Box .*Tuple of these$",
        ),
        (BOX, gym.spaces.Text(5), "actions of the kind Text.* are not supported; supported: Discrete"),
        (BOX, gym.spaces.Box(0, 9, (2,), np.int64), "actions of the kind Box.*; write a Box of integers as a MultiDiscrete"),
        (gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(2)}), gym.spaces.Discrete(2), "the space of observations .* is empty"),
        (None, gym.spaces.Discrete(2), "observation_space is an object of type NoneType and action_space an object of type Discrete"),
    ],
)
def test_spaces_that_are_not_supported_are_refused_at_once(
    observation_space: Any, action_space: gym.Space[Any], message: str
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=message):
        make(lambda: Spaces(observation_space, action_space))


def test_an_id_that_gymnasium_does_not_know_is_a_users_mistake() -> None:
    with pytest.raises(ValueError, match="Gymnasium does not find 'no_such_module:Thing-v0'"):
        made_by_id("no_such_module:Thing-v0")
