"""EnvPool's adapter against environments stepped by hand, and the facts about EnvPool that it rests
on.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from phasicrl.config import EnvConfig
from phasicrl.envs import envpool as envpool_adapter
from phasicrl.envs.bridge import Bridge
from phasicrl.envs.envpool import EnvPoolEnv, import_envpool, task_families, task_spaces
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError
from phasicrl.seeding import env_seeds
from phasicrl.spaces import ObservationLayout
from tests.envs.acting import draw_action
from tests.faults.harness import wait_for

if importlib.util.find_spec("envpool") is None:
    pytest.skip("EnvPool is not installed", allow_module_level=True)

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


def make(task_id: str, **settings: Any) -> Bridge:
    return Bridge(EnvPoolEnv(task_id, **settings))


def inside(envs: Bridge) -> Any:
    """The adapter, whose parts are looked at."""
    return envs.backend


def raw_pool(task_id: str, options: dict[str, Any], num_envs: int, seed: int = 3) -> Any:
    envpool = import_envpool(procgen=True)
    return envpool.make_gymnasium(
        task_id, num_envs=num_envs, num_threads=2, seed=env_seeds(seed, num_envs), **options
    )


def random_actions(
    space: gym.Space[Any], num_envs: int, steps: int, seed: int = 5
) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        if isinstance(space, gym.spaces.Discrete):
            yield rng.integers(0, space.n, num_envs).astype(np.int32)
        elif np.dtype(space.dtype).kind == "i":
            assert isinstance(space, gym.spaces.Box)
            yield rng.integers(
                space.low, space.high, (num_envs, *space.shape), endpoint=True
            ).astype(space.dtype)
        else:
            assert isinstance(space, gym.spaces.Box)
            yield rng.uniform(space.low, space.high, (num_envs, *space.shape)).astype(space.dtype)


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("family", MASKED_RESETS)
def test_fact_a_masked_reset_answers_in_order_and_leaves_no_reset_row(family: str) -> None:
    task_id, options, steps = MASKED_RESETS[family]
    num_envs = 4
    pool = raw_pool(task_id, options, num_envs)
    pool.reset()
    length, most, ends = np.zeros(num_envs, int), 0, 0
    for action in random_actions(pool.action_space, num_envs, steps):
        _, _, terminated, truncated, info = pool.step(action)
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
    actions = list(random_actions(envs.action_space, num_envs, steps))
    first_obs = envs.reset()
    taken = [envs.step(torch.from_numpy(action)) for action in actions]
    envs.close()
    ends = np.zeros(num_envs, int)
    for index, env_seed in enumerate(env_seeds(3, num_envs)):
        pool = import_envpool().make_gymnasium(
            f"{game.capitalize()}Easy-v0",
            num_envs=1,
            num_threads=1,
            seed=[env_seed],
            num_levels=50,
            channel_first=False,
        )
        obs, info = pool.reset()
        np.testing.assert_array_equal(obs[0], first_obs[index])
        level = info["level_seed"][0]
        for step, action in zip(taken, actions, strict=True):
            obs, reward, terminated, truncated, info = pool.step(action[index : index + 1])
            assert (step.reward[index], step.terminated[index], step.truncated[index]) == (
                reward[0],
                terminated[0],
                truncated[0],
            )
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
    """Both are made here; that neither is skipped is held by what they are."""
    direct = make(task_id, num_envs=3, seed=4, num_threads=1)
    monkeypatch.setattr(envpool_adapter, "_direct_calls", lambda pool, info: None)
    public = make(task_id, num_envs=3, seed=4, num_threads=1)
    assert (
        inside(direct)._step.__module__ == envpool_adapter.__name__
        and inside(public)._step == inside(public)._pool.step
    )
    assert (
        "_direct_calls" in inside(direct)._reset.__qualname__
        and "_public_calls" in inside(public)._reset.__qualname__
    )
    np.testing.assert_array_equal(direct.reset(), public.reset())
    ended = 0
    rng = np.random.default_rng(0)
    for _ in range(150):
        action = draw_action(direct, rng)
        a, b = direct.step(action), public.step(action)
        for name in ("obs", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert (a.final_obs is None) == (b.final_obs is None)
        if a.final_obs is not None and b.final_obs is not None:
            np.testing.assert_array_equal(a.final_obs, b.final_obs)
        assert (
            a.info.keys()
            == b.info.keys()
            == ({"level_seed", "level_complete"} if "Starpilot" in task_id else set())
        )
        for name in a.info:
            np.testing.assert_array_equal(a.info[name], b.info[name])
        ended += 0 if a.final_obs is None else len(a.final_obs)
    assert ended or task_id not in ("CartPole-v1", "Hopper-v4", "FrozenLake-v1")


class Arrays:
    """Four environments in the arrays of EnvPool's C++ layer, and the public call of its Python
    layer, as in 1.2.5 or 1.2.7.

    In every step the first one goes on, the second ends by its rules, the third by its limit, the
    last by both at once.
    """

    DONE, TRUNC, TERMINATED = (
        np.array(row, bool) for row in ((0, 1, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1))
    )

    def __init__(
        self, keys: tuple[str, ...], *, reader: str = "envpool.python.gymnasium_envpool"
    ) -> None:
        self._state_keys, self.config = keys, {"num_envs": 4}
        self.spec = SimpleNamespace(
            _action_keys=["env_id", "players.env_id", "action"],
            _action_spec=[(np.dtype("int32"),)] * 3,
        )
        self._to = SimpleNamespace(__module__=reader)
        self.chosen = np.arange(4)

    def _send(self, actions: list[np.ndarray]) -> None:
        self.chosen = actions[0]

    def _reset(self, env_ids: np.ndarray) -> None:
        self.chosen = env_ids

    def _recv(self) -> list[np.ndarray]:
        values = {
            "done": self.DONE,
            "trunc": self.TRUNC,
            "terminated": self.TERMINATED,
            "reward": np.ones(4),
        }
        return [values.get(key, np.zeros((4, 4)))[self.chosen].copy() for key in self._state_keys]

    def reset(self, *, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros((4 if options is None else options["reset_mask"].sum(), 4)), {}

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        state = dict(zip(self._state_keys, [values.copy() for values in self._recv()], strict=True))
        return (
            state["obs"],
            state["reward"],
            state.get("terminated", state["done"] & ~state["trunc"]),
            state["trunc"],
            {},
        )


KEYS = {
    "1.2.5": (
        "info:env_id",
        "elapsed_step",
        "done",
        "reward",
        "discount",
        "step_type",
        "trunc",
        "obs",
    ),
    "1.2.7": (
        "info:env_id",
        "elapsed_step",
        "done",
        "reward",
        "discount",
        "step_type",
        "trunc",
        "terminated",
        "obs",
    ),
}


@pytest.mark.parametrize("way", ["public", "direct"])
@pytest.mark.parametrize("version", KEYS)
def test_an_end_by_the_rules_at_the_time_limit_is_what_the_version_tells(
    version: str, way: str
) -> None:
    """Worked out by hand: 1.2.5 cannot tell such an end from a cut.

    1.2.7 can, and then nothing follows, so it is no truncation.
    """
    envs, pool = make("CartPole-v1", num_envs=4, seed=1, num_threads=1), Arrays(KEYS[version])
    calls = (
        envpool_adapter._public_calls(pool)
        if way == "public"
        else envpool_adapter._direct_calls(pool, ())
    )
    assert calls is not None
    inside(envs)._pool, (inside(envs)._step, inside(envs)._reset) = pool, calls
    envs.reset()
    step = envs.step(torch.zeros(4, dtype=torch.int64))
    assert step.terminated.tolist() == [False, True, False, version == "1.2.7"]
    assert step.truncated.tolist() == [False, False, True, version == "1.2.5"]
    assert step.final_obs is not None and step.final_obs.shape == (4, 4)


def test_a_pool_whose_arrays_are_others_is_stepped_by_the_public_call() -> None:
    def direct(pool: Any) -> Any:
        return envpool_adapter._direct_calls(pool, ())

    def with_actions(*keys: str) -> Arrays:
        pool = Arrays(KEYS["1.2.5"])
        pool.spec._action_keys = list(keys)
        return pool

    assert direct(Arrays(KEYS["1.2.5"])) is not None and direct(Arrays(KEYS["1.2.7"])) is not None
    assert direct(Arrays((*KEYS["1.2.7"][:-1], "obs:first"))) is None
    assert direct(Arrays(("obs", "done", "reward"))) is None
    assert direct(Arrays((*KEYS["1.2.7"], "failed"))) is None, (
        "what nobody has read may change what the others mean"
    )
    assert direct(Arrays(KEYS["1.2.7"], reader="envpool.mujoco.mjlab")) is None
    assert direct(with_actions("players.env_id", "env_id", "action")) is None
    assert direct(with_actions("env_id", "players.env_id", "arm", "leg")) is None
    assert direct(SimpleNamespace(spec=SimpleNamespace())) is None


def tells_terminated(task_id: str) -> bool:
    """Whether this EnvPool has the task, and its arrays hold `terminated`."""
    return (
        task_id in task_families()
        and "terminated" in import_envpool().make_spec(task_id)._state_keys
    )


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("way", ["public", "direct"])
def test_fact_from_127_on_some_tasks_end_by_their_rules_at_the_time_limit(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = "Intersection-v2"
    if not tells_terminated(task_id):
        pytest.skip(
            f"EnvPool {import_envpool().__version__} does not tell how {task_id} ended; 1.2.7 does"
        )
    if way == "public":
        monkeypatch.setattr(envpool_adapter, "_direct_calls", lambda pool, info: None)
    pool, envs = raw_pool(task_id, {}, 32), make(task_id, num_envs=32, seed=3, num_threads=1)
    assert (inside(envs)._step.__module__ == envpool_adapter.__name__) == (way == "direct")
    np.testing.assert_array_equal(pool.reset()[0], envs.reset())
    at_once = 0
    for action in random_actions(envs.action_space, 32, 60):
        obs, _, terminated, truncated, _ = pool.step(action)
        step = envs.step(torch.from_numpy(action))
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, truncated & ~terminated)
        at_once += int((terminated & truncated).sum())
        if (done := terminated | truncated).any():
            assert step.final_obs is not None
            np.testing.assert_array_equal(step.final_obs[done], obs[done])
            pool.reset(options={"reset_mask": done})
    assert at_once


def test_a_family_that_cuts_its_observations_itself_is_stepped_by_the_public_call() -> None:
    task_id = "Mjlab-Cartpole-Balance-v0"
    if task_id not in task_families():
        pytest.skip(f"EnvPool {import_envpool().__version__} has no MJLab; 1.2.7 does")
    envs = make(task_id, num_envs=2, seed=1, num_threads=1)
    assert inside(envs)._step == inside(envs)._pool.step and isinstance(
        envs.observation_space, gym.spaces.Dict
    )
    envs.reset()
    assert envs.step(torch.zeros(2, 1)).obs.any()


def test_level_complete_means_the_level_was_solved() -> None:
    """Leaper pays 10 when, and only when, the level is solved."""
    envs = make_envs(EnvConfig(id="procgen:leaper", num_envs=8, num_levels=20), seed=1)
    envs.reset()
    solved = failed = 0
    for action in random_actions(envs.action_space, 8, 400):
        step = envs.step(torch.from_numpy(action))
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
    for action in random_actions(envs.action_space, num_envs, 300):
        step = envs.step(torch.from_numpy(action))
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


def test_pendulum_is_the_pendulum_of_gymnasium() -> None:
    """Torques arrive as they are, clipped or not by the task and not by us."""
    envs = make_envs(EnvConfig(id="envpool:Pendulum-v1", num_envs=3), seed=1)
    twins: list[Any] = [gym.make("Pendulum-v1").unwrapped for _ in range(3)]
    for twin, (cosine, sine, speed) in zip(twins, envs.reset().numpy(), strict=True):
        twin.reset()
        twin.state = np.array([np.arctan2(sine, cosine), speed], float)
    rng = np.random.default_rng(1)
    for _ in range(20):
        action = rng.uniform(-4, 4, (3, 1)).astype(np.float32)
        step = envs.step(torch.from_numpy(action))
        for index, twin in enumerate(twins):
            expected, reward, *_ = twin.step(action[index])
            np.testing.assert_allclose(step.obs[index], expected, atol=1e-3)
            np.testing.assert_allclose(step.reward[index], reward, atol=1e-3)
    envs.close()


STRUCTURED = {
    "dm_control": ("WalkerWalk-v1", 1),
    "Jumanji, nested": ("BinPack-v2", 0),
    "MiniGrid": ("MiniGrid-Empty-Random-5x5-v0", 0),
}


def with_rows(tree: Any, rows: np.ndarray, others: Any) -> Any:
    """A tree of arrays with other rows in some places."""
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
    assert (
        sum(leaf.shape == () and leaf.dtype == np.float32 for leaf in layout.leaves)
        == one_number_parts
    )
    native, obs, rng = pool.reset()[0], envs.reset(), np.random.default_rng(1)
    for _ in range(5):
        read = layout.unpack(obs)
        for leaf in layout.leaves:
            expected, values = native, read
            for key in leaf.path:
                expected, values = expected[key], values[key]
            np.testing.assert_array_equal(values, expected.astype(leaf.dtype))
        action = draw_action(envs, rng)
        (native, _, terminated, truncated, _), obs = (
            pool.step(action.numpy()),
            envs.step(action).obs,
        )
        if (done := terminated | truncated).any():
            native = with_rows(native, done, pool.reset(options={"reset_mask": done})[0])
    envs.close()


def test_an_observation_of_one_number_is_counted_from_zero() -> None:
    envs = make("FrozenLake-v1", num_envs=4, seed=1, num_threads=1)
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
    assert task_spaces("FlatPack-v0")[1] == gym.spaces.MultiDiscrete([25, 4, 9, 9])
    # Three cleaners; four moves each, as its own mask says.
    envs = make("Cleaner-v0", num_envs=2, seed=1, num_threads=1)
    assert envs.action_space == gym.spaces.MultiDiscrete([4, 4, 4])
    layout = ObservationLayout(envs.observation_space)

    def read(obs: Tensor) -> Any:
        return layout.unpack(obs)

    first = read(envs.reset())
    assert first["action_mask"].shape == (2, 3, 4)
    after = read(envs.step(first["action_mask"].int().argmax(dim=2)).obs)
    assert (first["agents_locations"] != after["agents_locations"]).any(dim=2).all(), (
        "everybody made the first move that is allowed"
    )


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
def test_fact_dm_control_does_not_keep_its_bounds() -> None:
    pool = raw_pool("CartpoleSwingup-v1", {}, 2)
    assert pool.observation_space["position"].low.min() > 0 > pool.reset()[0]["position"].min()


def test_fact_several_players_are_several_rows() -> None:
    pool = raw_pool("TicTacToe-v1", {}, 3)
    obs, _ = pool.reset()
    _, reward, terminated, *_ = pool.step(np.zeros(3, np.int32))
    assert (len(obs), len(reward), len(terminated)) == (6, 6, 3)


def break_down(envs: Bridge, pool: Broken) -> None:
    inside(envs)._pool = pool
    inside(envs)._step, inside(envs)._reset = envpool_adapter._public_calls(pool)


def test_a_part_that_is_not_finite_is_refused() -> None:
    envs = make("CartpoleSwingup-v1", num_envs=2, seed=1, num_threads=1)
    good = {"position": np.zeros((2, 3)), "velocity": np.zeros((2, 2))}
    bad = {**good, "velocity": np.array([[0, 0], [np.nan, 1]])}
    break_down(envs, Broken(bad, np.zeros(2), first_obs=good))
    envs.reset()
    with pytest.raises(
        EnvError,
        match=r"environment 1, .*: returned an observation that is not finite \(at 'velocity'\)",
    ):
        envs.step(torch.zeros(2, 1))


def test_time_limits_are_truncations() -> None:
    envs = make_envs(EnvConfig(id="envpool:MountainCar-v0", num_envs=3), seed=1)
    envs.reset()
    steps = [envs.step(torch.zeros(3, dtype=torch.int64)) for _ in range(400)]
    envs.close()
    for number, step in enumerate(steps, 1):
        assert step.truncated.all() == (number % 200 == 0) and not step.terminated.any()
    assert (
        steps[199].final_obs is not None
        and (steps[199].final_obs != steps[199].obs).any(dim=1).all()
    )


def test_fact_an_end_in_the_last_allowed_step_counts_as_truncated() -> None:
    """CartPole falls in step n.

    With a limit of n steps EnvPool calls that a truncation, which nobody can tell apart afterwards.
    """
    envs = make("CartPole-v1", num_envs=1, seed=1, num_threads=1)
    envs.reset()
    length = next(
        number
        for number in range(1, 100)
        if envs.step(torch.ones(1, dtype=torch.int64)).terminated[0]
    )
    limited = make(
        "CartPole-v1", num_envs=1, seed=1, num_threads=1, options={"max_episode_steps": length}
    )
    limited.reset()
    last = [limited.step(torch.ones(1, dtype=torch.int64)) for _ in range(length)][-1]
    assert last.truncated[0] and not last.terminated[0]


REPLAYED = {
    "Procgen": ("LeaperEasy-v0", {"channel_first": False}, 300),
    "classic control": ("CartPole-v1", {}, 300),
    "MuJoCo": ("Hopper-v4", {}, 200),
}


def play(pool: Any, actions: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Step with masked resets.

    Return observations and rewards in turn, how often each was reset, and when each last began.
    """
    answers, resets, began = [], np.zeros(len(actions[0]), int), np.zeros(len(actions[0]), int)
    for number, action in enumerate(actions, 1):
        obs, reward, terminated, truncated, _ = pool.step(action)
        answers += [obs, reward]
        done = terminated | truncated
        if done.any():
            answers.append(pool.reset(options={"reset_mask": done})[0])
            resets[done] += 1
            began[done] = number
    return answers, resets, began


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("family", REPLAYED)
def test_fact_seed_resets_and_actions_restore_an_environment(family: str) -> None:
    """What `exact_state = "replay"` promises.

    Resets as many as before, then the actions of the current episode.
    """
    task_id, options, steps = REPLAYED[family]
    num_envs = 3
    pool, twin = (raw_pool(task_id, options, num_envs) for _ in range(2))
    actions = list(random_actions(pool.action_space, num_envs, steps + 40))
    pool.reset()
    _, resets, began = play(pool, actions[:steps])
    assert resets.min() >= 1
    for count in range(resets.max() + 1):
        twin.reset(options={"reset_mask": resets >= count})
    for index in range(num_envs):
        for action in actions[began[index] : steps]:
            twin.step(action[index : index + 1], env_id=np.array([index], np.int32))
    for expected, answer in zip(
        play(pool, actions[steps:])[0], play(twin, actions[steps:])[0], strict=True
    ):
        np.testing.assert_array_equal(answer, expected)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals are told apart on Linux")
def test_fact_a_short_batch_aborts_the_process() -> None:
    code = (
        "from phasicrl.envs.envpool import import_envpool; import numpy as np; "
        "pool = import_envpool().make_gymnasium('CartPole-v1', num_envs=3); pool.reset();"
        "pool.step(np.full(3, 99, np.int32)); print('99 accepted', flush=True); "
        "pool.step(np.zeros(2, np.int32))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "99 accepted" in result.stdout
    assert result.returncode < 0


class Broken:
    """A pool that returns what it is told to."""

    def __init__(
        self,
        obs: Any,
        reward: np.ndarray,
        *,
        first_obs: Any,
        terminated: tuple[bool, bool] = (False, False),
    ) -> None:
        self._first_obs, self._answer = (
            first_obs,
            (obs, reward, np.array(terminated), np.zeros(2, bool), {}),
        )

    def reset(self, **_: Any) -> Any:
        return self._first_obs, {}

    def step(self, _: np.ndarray) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("obs", "reward", "message"),
    [
        (
            np.array([[0.0] * 4, [0, np.nan, 0, 0]]),
            np.zeros(2),
            "environment 1, .*: returned an observation that is not finite",
        ),
        (
            np.zeros((2, 4)),
            np.array([np.inf, 0]),
            "environment 0, .*: returned a reward that is not finite",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    obs: np.ndarray, reward: np.ndarray, message: str
) -> None:
    envs = make("CartPole-v1", num_envs=2, seed=1, num_threads=1)
    break_down(envs, Broken(obs, reward, first_obs=np.zeros((2, 4))))
    assert envs.reset().dtype == torch.float32
    with pytest.raises(EnvError, match=message) as caught:
        envs.step(torch.zeros(2, dtype=torch.int64))
    assert "step 1" in str(caught.value)


def test_an_environment_that_breaks_down_in_its_reset_is_named() -> None:
    envs = make("CartPole-v1", num_envs=2, seed=1, num_threads=1)
    envs.reset()
    break_down(
        envs,
        Broken(
            np.zeros((2, 4)),
            np.zeros(2),
            first_obs=np.full((1, 4), np.inf),
            terminated=(False, True),
        ),
    )
    with pytest.raises(
        EnvError,
        match=r"environment 1, reset\(\) at step 1: returned an observation that is not finite",
    ):
        envs.step(torch.zeros(2, dtype=torch.int64))


def test_neighboring_seeds_share_no_environment() -> None:
    first, second = (
        {
            obs.tobytes()
            for obs in make("CartPole-v1", num_envs=16, seed=seed, num_threads=1).reset().numpy()
        }
        for seed in (1, 2)
    )
    assert len(first) == len(second) == 16 and not first & second


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    runs = []
    for threads in (1, 3):
        envs = make(
            "LeaperEasy-v0",
            num_envs=6,
            seed=1,
            num_threads=threads,
            options={"channel_first": False},
        )
        envs.reset()
        runs.append(
            torch.stack(
                [
                    envs.step(torch.from_numpy(action)).obs
                    for action in random_actions(envs.action_space, 6, 60)
                ]
            )
        )
    np.testing.assert_array_equal(*runs)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_close_ends_the_threads() -> None:
    make("CartPole-v1", num_envs=8, seed=1, num_threads=1).close()
    before = set(os.listdir("/proc/self/task"))
    envs = make("CartPole-v1", num_envs=8, seed=1, num_threads=6)
    step = envs.reset()
    added = {*os.listdir("/proc/self/task")} - before
    assert len(added) >= 6
    envs.close()
    # A thread that is joined leaves the kernel's list a moment later.
    wait_for(lambda: added.isdisjoint(os.listdir("/proc/self/task")))
    assert step.shape == (8, 4)


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
