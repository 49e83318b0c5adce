"""What every back end must do alike: the contract of `envs/protocol.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.config import EnvConfig
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError, TimeStep, VectorEnv
from tests.envs.counting import Counting

B = 3
CASES: dict[str, tuple[EnvConfig, Callable[[], gym.Env[Any, Any]] | None]] = {
    "procgen": (EnvConfig(id="procgen:leaper", num_envs=B, num_threads=2), None),
    "envpool cartpole": (EnvConfig(id="envpool:CartPole-v1", num_envs=B), None),
    "envpool atari": (EnvConfig(id="envpool:Breakout-v5", num_envs=B), None),
    "gymnasium": (EnvConfig(id="gymnasium:CartPole-v1", num_envs=B), None),
    "gymnasium processes": (EnvConfig(id="gymnasium:CartPole-v1", num_envs=B, parallel="processes"), None),
    "own class": (EnvConfig(id="counting", num_envs=B), Counting),
    "own class processes": (EnvConfig(id="counting", num_envs=B, parallel="processes"), Counting),
}
STEPS = 250


def make(case: str, seed: int = 1) -> VectorEnv:
    config, make_env = CASES[case]
    if (config.id.startswith(("procgen", "envpool"))) and importlib.util.find_spec("envpool") is None:
        pytest.skip("EnvPool is not installed")
    return make_envs(config, seed=seed, make_env=make_env)


def actions(env: VectorEnv, steps: int) -> np.ndarray:
    assert isinstance(env.action_space, gym.spaces.Discrete)
    return np.random.default_rng(7).integers(0, env.action_space.n, (steps, env.num_envs))


def play(env: VectorEnv, steps: int = STEPS) -> tuple[np.ndarray, list[TimeStep]]:
    return env.reset(), [env.step(action) for action in actions(env, steps)]


@pytest.fixture(params=list(CASES), scope="module")
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def played(case: str) -> Iterator[tuple[VectorEnv, np.ndarray, list[TimeStep]]]:
    """One run of `STEPS` steps with seed 1, for the tests that only look at it."""
    env = make(case)
    yield env, *play(env)
    env.close()


def test_shapes_and_dtypes_are_those_of_the_contract(played: tuple[VectorEnv, np.ndarray, list[TimeStep]]) -> None:
    env, first_obs, steps = played
    space = env.observation_space
    assert env.num_envs == B and isinstance(env.action_space, gym.spaces.Discrete)
    assert first_obs.shape == (B, *space.shape) and first_obs.dtype == space.dtype  # type: ignore[misc]
    assert space.dtype in (np.uint8, np.float32)
    for step in steps:
        assert step.obs.shape == first_obs.shape and step.obs.dtype == first_obs.dtype
        assert step.reward.shape == (B,) and step.reward.dtype == np.float32
        for flag in (step.terminated, step.truncated):
            assert flag.shape == (B,) and flag.dtype == np.bool_
        for extra in step.info.values():
            assert extra.shape == (B,)
    assert all(space.contains(obs) for step in steps for obs in step.obs)


def test_final_observations_come_with_ends_and_only_then(played: tuple[VectorEnv, np.ndarray, list[TimeStep]]) -> None:
    env, _, steps = played
    ends = 0
    for step in steps:
        done = step.terminated | step.truncated
        ends += done.sum()
        assert not (step.terminated & step.truncated).any()
        if not done.any():
            assert step.final_obs is None
            continue
        assert step.final_obs is not None
        assert step.final_obs.shape == (done.sum(), *env.observation_space.shape) and step.final_obs.dtype == step.obs.dtype  # type: ignore[misc]
        assert not np.array_equal(step.final_obs, step.obs[done]), "the last observation of an episode is the first of the next"
    assert ends >= 2, "no episode ended: the test shows nothing"


def test_the_same_seed_gives_the_same_run_and_another_seed_another(case: str, played: tuple[VectorEnv, np.ndarray, list[TimeStep]]) -> None:
    _, first_obs, steps = played
    for seed, same in ((1, True), (2, False)):
        env = make(case, seed)
        again, steps_again = play(env, 60)
        env.close()
        equal = np.array_equal(first_obs, again) and all(
            np.array_equal(a.obs, b.obs) and np.array_equal(a.reward, b.reward) and np.array_equal(a.terminated, b.terminated)
            for a, b in zip(steps[:60], steps_again, strict=True)
        )
        assert equal is same


def test_environments_of_one_pool_differ(case: str, played: tuple[VectorEnv, np.ndarray, list[TimeStep]]) -> None:
    env, first_obs, steps = played
    obs = first_obs if "atari" not in case else steps[-1].obs  # every game of Breakout begins with the same picture
    assert len({obs[index].tobytes() for index in range(env.num_envs)}) == env.num_envs


def test_an_earlier_step_is_not_changed_by_a_later_one(case: str) -> None:
    env = make(case)
    kept, copies = [env.reset()], []
    copies = [kept[0].copy()]
    for action in actions(env, 80):
        step = env.step(action)
        arrays = [step.obs, step.reward, step.terminated, step.truncated, *step.info.values()]
        arrays += [] if step.final_obs is None else [step.final_obs]
        kept += arrays
        copies += [array.copy() for array in arrays]
    env.close()
    assert all(np.array_equal(array, copy) for array, copy in zip(kept, copies, strict=True))


def test_a_second_reset_starts_other_episodes(case: str) -> None:
    env = make(case)
    first, _ = play(env, 5)
    second = env.reset()
    third = env.step(np.zeros(B, np.int64)).obs
    env.close()
    assert first.shape == second.shape == third.shape
    if "atari" not in case:
        assert not np.array_equal(first, second)


def test_calls_at_the_wrong_time_are_refused(case: str) -> None:
    env = make(case)
    action = np.zeros(B, np.int64)
    with pytest.raises(EnvError, match=r"step\(\) before the first reset"):
        env.step(action)
    env.reset()
    env.close()
    env.close()
    with pytest.raises(EnvError, match=r"step\(\) after close"):
        env.step(action)
    with pytest.raises(EnvError, match=r"reset\(\) after close"):
        env.reset()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(B - 1, np.int64), r"shape \(2,\)"),
        (np.zeros(B + 1, np.int64), r"shape \(4,\)"),
        (np.zeros((B, 1), np.int64), r"shape \(3, 1\)"),
        (np.zeros(B), "float64"),
        (np.array([0, 99, 0]), "action 99 for environment 1 is outside of 0"),
        (np.array([0, 0, -1]), "action -1 for environment 2"),
        ([0, 0, 0], "a list"),
    ],
)
def test_bad_actions_are_refused_before_the_environments_see_them(
    played: tuple[VectorEnv, np.ndarray, list[TimeStep]], action: Any, message: str
) -> None:  # fmt: skip
    env, _, _ = played
    with pytest.raises(ValueError, match=message) as caught:
        env.step(action)
    assert str(caught.value).startswith(env.name)
    env.step(np.zeros(B, np.int32))  # still usable, and any integer dtype will do


def test_the_adapter_says_what_it_can_restore(case: str, played: tuple[VectorEnv, np.ndarray, list[TimeStep]]) -> None:
    expected = {"procgen": "replay", "envpool cartpole": "replay"}.get(case, "none")
    assert played[0].exact_state == expected
