"""EnvPool's adapter against environments stepped by hand, and the facts about EnvPool that it rests
on.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.config import EnvConfig
from phasicrl.envs import envpool as envpool_adapter
from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.envpool import EnvPoolEnv, get_task_spaces, import_envpool, make_step_and_reset
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError
from phasicrl.seeding import env_seeds
from phasicrl.spaces import ActionLayout, ObservationLayout
from phasicrl.system.machine import num_cores
from tests.envs.acting import draw_action
from tests.faults.harness import wait_for
from tests.helpers import skip_without_envpool

skip_without_envpool()

ATARI = {"episodic_life": True}
MASKED_RESETS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Procgen": ("LeaperEasy-v0", {"channel_first": False}, 400),
    "classic control": ("CartPole-v1", {}, 400),
    "classic control, all end together": ("MountainCar-v0", {}, 450),
    "Atari": ("Breakout-v5", ATARI, 250),
    "MuJoCo": ("Hopper-v4", {}, 300),
    "Box2D": ("LunarLander-v3", {}, 300),
    "toy text": ("FrozenLake-v1", {}, 200),
    "dm_control": ("CartpoleSwingup-v1", {"max_episode_steps": 30}, 100),
    "MiniGrid": ("MiniGrid-Empty-Random-5x5-v0", {}, 250),
    "Jumanji": ("Cleaner-v0", {}, 100),
}


def make(
    task_id: str, *, num_envs: int, seed: int = 1, num_threads: int = 1, **options: Any
) -> EnvPoolEnv:
    return EnvPoolEnv(task_id, f"envpool:{task_id}", options, num_threads, EnvSlice(num_envs, seed))


def raw_pool(task_id: str, options: dict[str, Any], num_envs: int) -> Any:
    return import_envpool(procgen=True).make_gymnasium(
        task_id, num_envs=num_envs, num_threads=2, seed=env_seeds(3, num_envs), **options
    )


def draw_actions(space: gym.Space[Any], num_envs: int, steps: int) -> Iterator[torch.Tensor]:
    envs: Any = SimpleNamespace(action_space=space, num_envs=num_envs, action_mask=None)
    rng = np.random.default_rng(5)
    for _ in range(steps):
        yield draw_action(envs, rng)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("family", MASKED_RESETS)
def test_fact_a_masked_reset_answers_in_order_and_leaves_no_reset_row(family: str) -> None:
    task_id, options, steps = MASKED_RESETS[family]
    num_envs = 4
    pool = raw_pool(task_id, options, num_envs)
    pool.reset()
    length, most, ends = np.zeros(num_envs, int), 0, 0
    for action in draw_actions(get_task_spaces(task_id)[1], num_envs, steps):
        _, _, terminated, truncated, info = pool.step(action.numpy())
        length += 1
        done = terminated | truncated
        np.testing.assert_array_equal(info["env_id"], np.arange(num_envs))
        if family != "Atari":  # which counts emulator frames and the steps before the first move
            np.testing.assert_array_equal(info["elapsed_step"], length)
        assert not (terminated & truncated).any()
        if done.any():
            _, info = pool.reset(options={"reset_mask": done})
            np.testing.assert_array_equal(info["env_id"], np.flatnonzero(done))
            length[done], most, ends = 0, max(most, int(done.sum())), ends + int(done.sum())
    assert ends >= 2
    assert most == num_envs or "together" not in family


@pytest.mark.parametrize("game", ["leaper", "bigfish", "coinrun"])
def test_procgen_is_the_native_pool_without_its_reset_rows(game: str) -> None:
    """One environment stepped in EnvPool's own mode, its reset rows dropped by hand, gives what the
    adapter gives.
    """
    num_envs, steps = 3, 220
    envs = make_envs(EnvConfig(id=f"procgen:{game}", num_envs=num_envs, num_levels=50), seed=3)
    actions = list(draw_actions(envs.action_space, num_envs, steps))
    first_obs = envs.reset()
    taken = [envs.step(action) for action in actions]
    envs.close()
    ends = np.zeros(num_envs, int)
    for index, env_seed in enumerate(env_seeds(3, num_envs)):
        pool = import_envpool().make_gymnasium(
            f"{game.capitalize()}Easy-v0", num_envs=1, num_threads=1, seed=[env_seed],
            num_levels=50, channel_first=False,
        )  # fmt: skip
        obs, info = pool.reset()
        np.testing.assert_array_equal(obs[0], first_obs[index])
        level = info["level_seed"][0]
        for step, action in zip(taken, actions, strict=True):
            obs, reward, terminated, truncated, info = pool.step(action[index : index + 1].numpy())
            flags = step.terminated[index], step.truncated[index]
            assert (step.reward[index], *flags) == (reward[0], terminated[0], truncated[0])
            assert step.info["level_seed"][index] == level
            if not (terminated[0] or truncated[0]):
                np.testing.assert_array_equal(step.obs[index], obs[0])
                assert not step.info["level_complete"][index]
                continue
            ends[index] += 1
            assert step.final_obs is not None
            np.testing.assert_array_equal(step.final_obs[index], obs[0])
            assert step.info["level_complete"][index] == bool(info["prev_level_complete"][0])
            # The reset row: it ignores the action.
            obs, reward, _, _, info = pool.step(np.zeros(1, np.int32))
            level = info["level_seed"][0]
            assert reward[0] == 0
            np.testing.assert_array_equal(step.obs[index], obs[0])
    assert ends.sum() >= 3 or game != "leaper"


@pytest.mark.parametrize(
    "task_id", ["CartPole-v1", "Pendulum-v1", "Hopper-v4", "StarpilotEasy-v0", "FrozenLake-v1"]
)
def test_a_direct_step_is_the_public_one(task_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = make(task_id, num_envs=3, seed=4)
    monkeypatch.setattr(envpool_adapter, "_UNCHANGED_ARRAYS_MODULE", "another")
    public = make(task_id, num_envs=3, seed=4)
    assert public._step_pool == public._pool.step and direct._step_pool != direct._pool.step
    np.testing.assert_array_equal(direct.reset(), public.reset())
    ended, rng = 0, np.random.default_rng(0)
    for _ in range(150):
        action = draw_action(direct, rng)
        a, b = direct.step(action), public.step(action)
        for name in ("obs", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert (a.final_obs is None) == (b.final_obs is None)
        if a.final_obs is not None and b.final_obs is not None:
            np.testing.assert_array_equal(a.final_obs, b.final_obs)
            ended += 1
        names = {"level_seed", "level_complete"} if "Starpilot" in task_id else set()
        assert a.info.keys() == b.info.keys() == names
        for name in names:
            np.testing.assert_array_equal(a.info[name], b.info[name])
    assert ended or task_id not in ("CartPole-v1", "Hopper-v4", "FrozenLake-v1")


class Arrays:
    """Four environments in the arrays of EnvPool's C++ layer, and its Python layer's public calls.

    In every step the first one goes on, the second ends by its rules, the third by its limit, the
    last by both at once.
    """

    VALUES = {  # noqa: RUF012
        "done": np.array([0, 1, 1, 1], bool),
        "trunc": np.array([0, 0, 1, 1], bool),
        "terminated": np.array([0, 1, 0, 1], bool),
        "reward": np.ones(4),
    }

    def __init__(self, version: str, reader: str = "envpool.python.gymnasium_envpool") -> None:
        self._state_keys = ["info:env_id", "elapsed_step", "done", "reward", "trunc", "obs"]
        if version == "1.2.7":
            self._state_keys.insert(3, "terminated")
        self.config, self._to = {"num_envs": 4}, SimpleNamespace(__module__=reader)
        self.spec = SimpleNamespace(_action_spec=[(np.dtype("int32"),)] * 3)
        self.chosen = np.arange(4)

    def _send(self, actions: list[np.ndarray]) -> None:
        self.chosen = actions[0]

    def _reset(self, env_ids: np.ndarray) -> None:
        self.chosen = env_ids

    def _recv(self) -> list[np.ndarray]:
        arrays = (self.VALUES.get(key, np.zeros((4, 4))) for key in self._state_keys)
        return [array[self.chosen].copy() for array in arrays]

    def reset(self, *, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros((4 if options is None else options["reset_mask"].sum(), 4)), {}

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        state = dict(zip(self._state_keys, self._recv(), strict=True))
        terminated = state.get("terminated", state["done"] & ~state["trunc"])
        return state["obs"], state["reward"], terminated, state["trunc"], {}


@pytest.mark.parametrize("reader", ["envpool.python.gymnasium_envpool", "envpool.mujoco.mjlab"])
@pytest.mark.parametrize("version", ["1.2.5", "1.2.7"])
def test_an_end_by_the_rules_at_the_time_limit(version: str, reader: str) -> None:
    """Worked out by hand: 1.2.5 cannot tell such an end from a truncation.

    1.2.7 can, and then nothing follows, so it is no truncation.
    """
    envs, pool = make("CartPole-v1", num_envs=4), Arrays(version, reader)
    envs._pool, (envs._step_pool, envs._reset_pool) = pool, make_step_and_reset(pool, ())
    assert (envs._step_pool == pool.step) == (reader == "envpool.mujoco.mjlab")
    envs.reset()
    step = envs.step(torch.zeros(4, dtype=torch.int64))
    assert step.terminated.tolist() == [False, True, False, version == "1.2.7"]
    assert step.truncated.tolist() == [False, False, True, version == "1.2.5"]
    assert step.final_obs is not None and step.final_obs.shape == (4, 4)


def test_level_complete_means_the_level_was_solved() -> None:
    """Leaper pays 10 when, and only when, the level is solved."""
    envs = make_envs(EnvConfig(id="procgen:leaper", num_envs=8, num_levels=20), seed=1)
    envs.reset()
    solved = failed = 0
    for action in draw_actions(envs.action_space, 8, 400):
        step = envs.step(action)
        done = step.terminated | step.truncated
        np.testing.assert_array_equal(step.info["level_complete"], step.reward == 10)
        assert not (step.info["level_complete"] & ~done).any()
        assert ((step.info["level_seed"] >= 0) & (step.info["level_seed"] < 20)).all()
        solved += int(step.info["level_complete"].sum())
        failed += int((done & ~step.info["level_complete"]).sum())
    envs.close()
    assert solved and failed


def test_cartpole_is_the_cartpole_of_gymnasium() -> None:
    """Each environment, stepped beside Gymnasium's physics.

    Observations, ends, and the true last observation.
    """
    num_envs = 4
    envs = make_envs(EnvConfig(id="envpool:CartPole-v1", num_envs=num_envs), seed=1)
    twins: list[Any] = [gym.make("CartPole-v1").unwrapped for _ in range(num_envs)]
    obs = envs.reset()
    for twin, state in zip(twins, obs, strict=True):
        twin.reset()
        twin.state = tuple(state.double().tolist())
    ends = 0
    for action in draw_actions(envs.action_space, num_envs, 300):
        step = envs.step(action)
        for index, twin in enumerate(twins):
            expected, reward, terminated, _, _ = twin.step(int(action[index]))
            assert step.terminated[index] == terminated and step.reward[index] == reward
            if terminated:
                assert step.final_obs is not None
                np.testing.assert_allclose(step.final_obs[index], expected, atol=1e-4)
                ends += 1
                twin.reset()
                twin.state = tuple(step.obs[index].double().tolist())
                assert step.obs[index].abs().max() <= 0.05, "not a first observation"
            else:
                np.testing.assert_allclose(step.obs[index], expected, atol=1e-4)
        assert (step.final_obs is None) == (not step.terminated.any())
    envs.close()
    assert ends > 20


STRUCTURED = {
    "dm_control": ("WalkerWalk-v1", 1),
    "Jumanji, nested": ("BinPack-v2", 0),
    "MiniGrid": ("MiniGrid-Empty-Random-5x5-v0", 0),
}


def with_rows(tree: Any, rows: np.ndarray, others: Any) -> Any:
    """Return a tree of arrays with other rows in some places."""
    if isinstance(tree, dict):
        return {key: with_rows(part, rows, others[key]) for key, part in tree.items()}
    tree[rows] = others
    return tree


@pytest.mark.parametrize("family", STRUCTURED)
def test_structured_observations_are_those_of_the_native_pool(family: str) -> None:
    task_id, one_number_parts = STRUCTURED[family]
    pool, envs = raw_pool(task_id, {}, 3), make(task_id, num_envs=3, seed=3, num_threads=2)
    layout = ObservationLayout(envs.observation_space)
    assert isinstance(envs.observation_space, gym.spaces.Dict)
    kinds = [(leaf.shape, leaf.dtype) for leaf in layout.leaves]
    assert kinds.count(((), np.dtype(np.float32))) == one_number_parts
    native, obs, rng = pool.reset()[0], envs.reset(), np.random.default_rng(1)
    for _ in range(5):
        read = layout.unpack(obs)
        for leaf in layout.leaves:
            expected, values = native, read
            for key in leaf.path:
                expected, values = expected[key], values[key]
            np.testing.assert_array_equal(values, expected.astype(leaf.dtype))
        action = draw_action(envs, rng)
        (native, _, terminated, truncated, _) = pool.step(action.numpy())
        obs = envs.step(action).obs
        if (done := terminated | truncated).any():
            native = with_rows(native, done, pool.reset(options={"reset_mask": done})[0])
    envs.close()


def test_an_observation_of_one_number_is_counted_from_zero() -> None:
    envs = make("FrozenLake-v1", num_envs=4)
    obs, rng = envs.reset(), np.random.default_rng(1)
    assert obs.shape == (4,) and obs.dtype == torch.int64 and not obs.any()
    ends = 0
    for _ in range(60):
        step = envs.step(draw_action(envs, rng))
        done = step.terminated | step.truncated
        ends += int(done.sum())
        assert not step.obs[done].any() and step.obs.max() < 16
        assert step.final_obs is None or step.final_obs.dtype == torch.int64
    assert ends


def test_fact_a_box_of_integers_is_several_choices_with_both_bounds_included() -> None:
    raw = import_envpool().make_spec("FlatPack-v0").gymnasium_action_space
    assert isinstance(raw, gym.spaces.Box) and raw.dtype == np.int32
    np.testing.assert_array_equal(raw.high, [24, 3, 8, 8])
    assert get_task_spaces("FlatPack-v0")[1] == gym.spaces.MultiDiscrete([25, 4, 9, 9])
    # Three cleaners; four moves each, as its own mask says.
    envs = make("Cleaner-v0", num_envs=2)
    assert envs.action_space == gym.spaces.MultiDiscrete([4, 4, 4])
    read: Any = ObservationLayout(envs.observation_space).unpack
    first = read(envs.reset())
    assert first["action_mask"].shape == (2, 3, 4)
    after = read(envs.step(first["action_mask"].int().argmax(dim=2)).obs)
    # Everybody made the first move that is allowed.
    assert (first["agents_locations"] != after["agents_locations"]).any(dim=2).all()


class Broken:
    """A pool that returns the given values."""

    def __init__(self, obs: Any, reward: Any, first_obs: Any, ended: tuple[bool, bool]) -> None:
        self._first_obs = first_obs
        self.result = obs, np.array(reward), np.array(ended), np.zeros(2, bool), {}

    def reset(self, **_: Any) -> Any:
        return self._first_obs, {}

    def step(self, _: np.ndarray) -> Any:
        return self.result


GOOD, NAN = np.zeros((2, 4)), np.array([[0.0] * 4, [0, np.nan, 0, 0]])
PARTS = {"position": np.zeros((2, 3)), "velocity": np.zeros((2, 2))}
BAD_PARTS = PARTS | {"velocity": np.array([[0, 0], [np.nan, 1]])}
GOING, ENDING = (False, False), (False, True)
UNUSABLE: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "observation": ("CartPole-v1", (NAN, [0, 0], GOOD, GOING), r"1, step\(\) at step 1.*an obs"),
    "reward": ("CartPole-v1", (GOOD, [np.inf, 0], GOOD, GOING), r"0, step\(\).* a reward"),
    "reset": ("CartPole-v1", (GOOD, [0, 0], NAN[1:], ENDING), r"1, reset\(\) at step 1.*an obs"),
    "part": ("CartpoleSwingup-v1", (BAD_PARTS, [0, 0], PARTS, GOING), r"1, .*\(at 'velocity'\)"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_numbers_that_are_not_finite_are_refused(case: str) -> None:
    task_id, values, message = UNUSABLE[case]
    envs = make(task_id, num_envs=2)
    envs.reset()
    envs._step_pool, envs._reset_pool = (pool := Broken(*values)).step, lambda _: pool.reset()[0]
    action = torch.zeros(2, *ActionLayout(envs.action_space).shape, dtype=torch.int64)
    with pytest.raises(EnvError, match=f"environment {message}"):
        envs.step(action)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_close_ends_the_threads() -> None:
    make("CartPole-v1", num_envs=8).close()
    before = set(os.listdir("/proc/self/task"))
    envs = make("CartPole-v1", num_envs=8, num_threads=6)
    step = envs.reset()
    added = {*os.listdir("/proc/self/task")} - before
    assert len(added) >= 6
    envs.close()
    # A thread that is joined leaves the kernel's list a moment later.
    wait_for(lambda: added.isdisjoint(os.listdir("/proc/self/task")))
    assert step.shape == (8, 4)


@pytest.mark.skipif(num_cores() < (os.cpu_count() or 1), reason="some cores are not usable")
def test_threads_have_a_core_each_if_there_are_as_many() -> None:
    before = set(os.listdir("/proc/self/task"))
    config = EnvConfig(id="envpool:HalfCheetah-v5", num_envs=num_cores())
    with closing(make_envs(config, seed=0)) as envs:
        envs.reset()
        found = list[set[int]]()
        for thread in set(os.listdir("/proc/self/task")) - before:
            with suppress(ProcessLookupError):  # one that has ended
                found.append(os.sched_getaffinity(int(thread)))
    assert all({core} in found for core in range(num_cores()))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_single_thread_follows_its_caller() -> None:
    cores = os.sched_getaffinity(0)
    before = set(os.listdir("/proc/self/task"))
    envs = make_envs(EnvConfig(id="envpool:CartPole-v1", num_envs=2, num_threads=1), seed=0)
    try:
        envs.reset()
        for core in sorted(cores)[:2]:
            os.sched_setaffinity(0, {core})
            envs.step(torch.zeros(2, dtype=torch.long))
            new = set(os.listdir("/proc/self/task")) - before
            assert {core} in [os.sched_getaffinity(int(thread)) for thread in new]
    finally:
        os.sched_setaffinity(0, cores)
        envs.close()
