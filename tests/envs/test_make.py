"""From ids and settings to environments, and the words for what is refused."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError

import pytest

from phasicrl.config import EnvConfig
from phasicrl.envs import envpool as pools
from phasicrl.envs.envpool import PROCGEN_GAMES, get_family_by_task, import_envpool
from phasicrl.envs.make import get_time_limit, list_envs, make_envs, resolve_env_id
from phasicrl.envs.protocol import EnvError

needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed"
)


def refused(message: str, make_env: Any = None, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make_envs(EnvConfig(**{"num_envs": 2, **settings}), seed=1, make_env=make_env)


@needs_envpool
@pytest.mark.parametrize(("env_id", "expected"), [
    ("starpilot", ("procgen", "starpilot")),
    ("StarPilot", ("procgen", "starpilot")),
    ("procgen:Maze", ("procgen", "maze")),
    ("CartPole-v1", ("envpool", "CartPole-v1")),
    ("Pong-v5", ("envpool", "Pong-v5")),
    ("envpool:phys2d/CartPole-v1", ("envpool", "phys2d/CartPole-v1")),
    ("gymnasium:CartPole-v1", ("gymnasium", "CartPole-v1")),
    ("FrozenLake8x8-v1", ("gymnasium", "FrozenLake8x8-v1")),
    ("gymnasium:gymnasium.envs:CartPole-v1", ("gymnasium", "gymnasium.envs:CartPole-v1")),
])  # fmt: skip
def test_ids_find_their_back_end(env_id: str, expected: tuple[str, str]) -> None:
    if env_id.startswith("FrozenLake8x8") and "FrozenLake8x8-v1" in get_family_by_task():
        expected = ("envpool", "FrozenLake8x8-v1")
    assert resolve_env_id(env_id) == expected


@needs_envpool
@pytest.mark.parametrize(("env_id", "message"), [
    ("starpilto", r"env.id is 'starpilto', .*did you mean 'starpilot'.*phasicrl envs"),
    ("procgen:starpilto", "did you mean 'procgen:starpilot'"),
    ("Cartpole-v1", "did you mean 'CartPole-v1'"),
    ("envpool:Cartpole-v1", "did you mean 'envpool:CartPole-v1'"),
    ("gymnasium:Cartpole-v1", "did you mean 'gymnasium:CartPole-v1'.*`--import MODULE`"),
    ("gymnasium:starpilot", "did you mean 'procgen:starpilot'"),
    ("gymnasium:Pong-v6", "did you mean 'envpool:Pong-v5'.*ALE/Pong-v5 after `pip install ale"),
    ("PongNoFrameskip-v4", "did you mean 'Pong-v5'"),
    ("sb3:CartPole-v1", "'sb3:CartPole-v1'.*expected an id behind procgen:, envpool:, gymn"),
    ("StarpilotEasy-v0", "did you mean 'starpilot'"),
    ("envpool:MazeMemory-v0", "unknown"),
    ("qqqqqqqqqq", "env.id is 'qqqqqqqqqq', an unknown environment;"),
])  # fmt: skip
def test_unknown_ids_are_refused_with_the_nearest_name(env_id: str, message: str) -> None:
    refused(message, id=env_id)


@needs_envpool
@pytest.mark.parametrize(("env_id", "message"), [
    ("envpool:TicTacToe-v1", "env.id is envpool:TicTacToe-v1, for 2 players; expected one"),
    ("envpool:intersection-multi-agent-v1", "for 2 players"),
])  # fmt: skip
def test_spaces_that_are_not_supported_are_refused(
    env_id: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    envpool = import_envpool()
    monkeypatch.setattr(envpool, "make_gymnasium", lambda *_, **__: pytest.fail("a pool was made"))
    refused(message, id=env_id)


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for env_id in ("procgen:starpilot", "envpool:CartPole-v1"):
        with pytest.raises(ImportError, match=r"EnvPool is not installed: pip install"):
            make_envs(EnvConfig(id=env_id, num_envs=2), seed=1)
    assert resolve_env_id("CartPole-v1") == ("gymnasium", "CartPole-v1")
    refused(r"'Pong-v5', an unknown environment.*EnvPool is not installed: pip", id="Pong-v5")
    assert not any(env_id.startswith("envpool") for env_id in list_envs())


def test_a_download_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=URLError("no host"))
    games = SimpleNamespace(list_names=lambda: ["Game"], make_simulator=fail)
    monkeypatch.setattr("phasicrl.envs.make._import_backend", lambda _: games)
    with pytest.raises(EnvError, match=r"gymnax:Game cannot be made.*no host"):
        make_envs(EnvConfig(id="gymnax:Game"), seed=1)


@needs_envpool
def test_threads_are_never_more_than_environments_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    envpool = import_envpool()

    taken: list[int] = []
    real = envpool.make_gymnasium

    def make_gymnasium(*args: Any, **options: Any) -> Any:
        taken.append(options["num_threads"])
        return real(*args, **options)

    monkeypatch.setattr(envpool, "make_gymnasium", make_gymnasium)
    monkeypatch.setattr(pools, "num_cores", lambda: 4)
    cases = {
        "envpool:InvertedPendulum-v5": ((2, None), (8, None), (8, 3), (2, 3)),
        "envpool:CartPole-v1": ((8, None), (8, 3)),  # a second thread costs more than its step
    }
    for env_id, sizes in cases.items():
        for num_envs, num_threads in sizes:
            config = EnvConfig(id=env_id, num_envs=num_envs, num_threads=num_threads)
            make_envs(config, seed=1).close()
    assert taken == [2, 4, 3, 2, 1, 3]


@needs_envpool
def test_the_list_finds_by_parts_and_by_wildcards() -> None:
    assert list_envs("STARPILOT") == ["procgen:starpilot"]
    assert list_envs("*:cartpole-v1") == ["envpool:CartPole-v1", "gymnasium:CartPole-v1"]
    everything = list_envs()
    assert len(everything) > 1500 and len({*everything}) == len(everything)
    assert everything[:16] == [f"procgen:{game}" for game in PROCGEN_GAMES]
    assert list_envs("no such thing") == []
    for env_id in everything[::40]:
        assert resolve_env_id(env_id) == (env_id.partition(":")[0], env_id.partition(":")[2])


@pytest.mark.parametrize(("config", "limit"), [
    (EnvConfig(id="envpool:CartPole-v1"), 500),
    (EnvConfig(id="envpool:CartPole-v1", options={"max_episode_steps": 30}), 30),
    (EnvConfig(id="gymnasium:Taxi-v4"), 200),
    (EnvConfig(id="gymnasium:Taxi-v4", options={"max_episode_steps": 30}), 30),
    (EnvConfig(id="gymnasium:Taxi-v4", options={"max_episode_steps": "1e3"}), 1000),
    (EnvConfig(id="gymnasium:Taxi-v4", options={"max_episode_steps": -1}), None),
    (EnvConfig(id="procgen:starpilot"), None),
])  # fmt: skip
def test_the_limit_of_an_episode_is_known_without_playing(
    config: EnvConfig, limit: int | None
) -> None:
    assert get_time_limit(config) == limit
