"""From ids and settings to environments, and the words for what is refused."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

from phasicrl.config import EnvConfig
from phasicrl.envs import make as make_module
from phasicrl.envs.envpool import import_envpool, task_families
from phasicrl.envs.make import episode_limit, list_envs, make_envs, resolve
from phasicrl.envs.procgen import GAMES
from phasicrl.envs.protocol import VectorEnv
from tests.envs.counting import Counting, Spaces

needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed"
)


def refused(message: str, make_env: Any = None, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make_envs(EnvConfig(**{"num_envs": 2, **settings}), seed=1, make_env=make_env)


@needs_envpool
@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("starpilot", ("procgen", "starpilot")),
        ("StarPilot", ("procgen", "starpilot")),
        ("procgen:Maze", ("procgen", "maze")),
        ("CartPole-v1", ("envpool", "CartPole-v1")),
        ("Pong-v5", ("envpool", "Pong-v5")),
        ("envpool:phys2d/CartPole-v1", ("envpool", "phys2d/CartPole-v1")),
        ("gymnasium:CartPole-v1", ("gymnasium", "CartPole-v1")),
        ("FrozenLake8x8-v1", ("gymnasium", "FrozenLake8x8-v1")),
        ("gymnasium:gymnasium.envs:CartPole-v1", ("gymnasium", "gymnasium.envs:CartPole-v1")),
    ],
)
def test_ids_find_their_back_end(env_id: str, expected: tuple[str, str]) -> None:
    if env_id.startswith("FrozenLake8x8") and "FrozenLake8x8-v1" in task_families():
        expected = ("envpool", "FrozenLake8x8-v1")
    assert resolve(env_id) == expected


@needs_envpool
@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("starpilto", r"env.id is 'starpilto', .*did you mean 'starpilot'.*phasicrl envs"),
        ("procgen:starpilto", "did you mean 'starpilot'"),
        ("Cartpole-v1", "did you mean 'CartPole-v1'"),
        ("envpool:Cartpole-v1", "did you mean 'CartPole-v1'"),
        ("gymnasium:Cartpole-v1", "did you mean 'CartPole-v1'.*`--import MODULE` adds"),
        ("gymnasium:starpilot", "did you mean 'starpilot'"),
        ("sb3:CartPole-v1", "'sb3:CartPole-v1'; expected an id behind procgen:, envpool: or"),
        ("StarpilotEasy-v0", "did you mean 'starpilot'"),
        ("envpool:MazeMemory-v0", "unknown"),
        ("qqqqqqqqqq", "env.id is 'qqqqqqqqqq', an unknown environment. `phasicrl envs`"),
    ],
)
def test_unknown_ids_are_refused_with_the_nearest_name(env_id: str, message: str) -> None:
    refused(message, id=env_id)


@needs_envpool
@pytest.mark.parametrize(("field", "value"), [("num_levels", 200), ("distribution", "hard")])
@pytest.mark.parametrize("env_id", ["envpool:CartPole-v1", "gymnasium:CartPole-v1"])
def test_settings_of_procgen_are_refused_elsewhere(env_id: str, field: str, value: Any) -> None:
    refused(
        rf"{env_id}: env.{field} is {value}, which has no effect without a game of Procgen",
        id=env_id,
        **{field: value},
    )
    refused(
        rf"mine: env.{field} is {value}, which has no effect without a game of Procgen",
        id="mine",
        make_env=Counting,
        **{field: value},
    )


@needs_envpool
@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("envpool:TicTacToe-v1", "envpool:TicTacToe-v1 has 2 players; expected a task of one"),
        ("envpool:intersection-multi-agent-v1", "has 2 players"),
        (
            "gymnasium:texts",
            "gymnasium:texts: observations of the kind Text.* are not supported; supported: Box",
        ),
    ],
)
def test_spaces_that_are_not_supported_are_refused(
    env_id: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    envpool = import_envpool()

    spaces = gym.spaces.Text(5), gym.spaces.Discrete(2)
    monkeypatch.setitem(
        gym.registry, "texts", EnvSpec("texts", entry_point=lambda **_: Spaces(*spaces))
    )
    monkeypatch.setattr(envpool, "make_gymnasium", lambda *_, **__: pytest.fail("a pool was made"))
    refused(message, id=env_id)


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for env_id, extra in (("procgen:starpilot", "procgen"), ("envpool:CartPole-v1", "envpool")):
        with pytest.raises(
            ImportError, match=rf"EnvPool is not installed.*pip install 'phasicrl\[{extra}\]'"
        ):
            make_envs(EnvConfig(id=env_id, num_envs=2), seed=1)
    assert resolve("CartPole-v1") == ("gymnasium", "CartPole-v1")
    refused(r"'Pong-v5', an unknown environment.*EnvPool is missing: pip install", id="Pong-v5")
    assert all(listing.backend != "envpool" for listing in list_envs())


def test_num_envs_of_the_call_goes_before_that_of_the_configuration() -> None:
    config = EnvConfig(id="gymnasium:CartPole-v1", num_envs=2)
    sizes = [make_envs(config, seed=1, num_envs=num_envs).num_envs for num_envs in (None, 5)]
    assert sizes == [2, 5]


def test_your_own_environment_needs_no_known_id() -> None:
    envs: VectorEnv = make_envs(EnvConfig(id="mine", num_envs=2), seed=1, make_env=Counting)
    assert envs.name == "mine" and envs.reset().shape == (2, 3)
    envs.close()


@needs_envpool
def test_threads_are_never_more_than_environments_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    envpool = import_envpool()

    taken: list[int] = []
    real = envpool.make_gymnasium
    monkeypatch.setattr(
        envpool,
        "make_gymnasium",
        lambda *args, **options: taken.append(options["num_threads"]) or real(*args, **options),
    )
    monkeypatch.setattr(make_module, "num_cores", lambda: 4)
    for num_envs, num_threads in ((2, None), (8, None), (8, 3), (2, 3)):
        make_envs(
            EnvConfig(id="envpool:InvertedPendulum-v5", num_envs=num_envs, num_threads=num_threads),
            seed=1,
        )
    assert taken == [2, 4, 3, 2]
    taken.clear()
    for num_threads in (None, 3):  # a second thread costs more than CartPole's step
        make_envs(EnvConfig(id="envpool:CartPole-v1", num_envs=8, num_threads=num_threads), seed=1)
    assert taken == [1, 3]


@needs_envpool
def test_the_list_finds_by_parts_and_by_wildcards() -> None:
    assert [listing.id for listing in list_envs("STARPILOT")] == ["procgen:starpilot"]
    assert "easy, hard, extreme" in list_envs("starpilot")[0].description
    cartpole = [listing.id for listing in list_envs("*:cartpole-v1")]
    assert cartpole == ["envpool:CartPole-v1", "gymnasium:CartPole-v1"]
    assert list_envs("envpool:Ant-v4")[0].description == "EnvPool, mujoco, gym"
    everything = list_envs()
    assert len(everything) > 1500 and len({listing.id for listing in everything}) == len(everything)
    assert [listing.id for listing in everything[:16]] == [f"procgen:{game}" for game in GAMES]
    assert list_envs("no such thing") == []


@needs_envpool
def test_what_is_listed_is_found_again() -> None:
    for listing in list_envs()[::40]:
        assert resolve(listing.id) == (listing.backend, listing.id.partition(":")[2])


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (EnvConfig(id="envpool:CartPole-v1"), 500),
        (EnvConfig(id="envpool:CartPole-v1", options={"max_episode_steps": 30}), 30),
        (EnvConfig(id="gymnasium:Taxi-v4"), 200),
        (EnvConfig(id="gymnasium:Taxi-v4", options={"max_episode_steps": 30}), 30),
        (EnvConfig(id="gymnasium:Taxi-v4", options={"max_episode_steps": -1}), None),
        (EnvConfig(id="procgen:starpilot"), None),
    ],
)
def test_the_limit_of_an_episode_is_known_without_playing(
    config: EnvConfig, limit: int | None
) -> None:
    assert episode_limit(config) == limit
