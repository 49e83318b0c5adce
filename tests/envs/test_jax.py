"""Environments of gymnax and pgx, where they are installed: what the contract's tests do not see.

`make test-jax` runs them, and the contract's, in an environment of their own.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

import phasicrl
from phasicrl.config import AuxConfig, EnvConfig
from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import VectorEnv
from phasicrl.spaces import ObservationLayout
from tests.envs.acting import draw_action
from tests.helpers import OFF, assert_same, assert_same_run, stop_at, tiny, tiny_aux

pytest.importorskip("gymnax")
pytest.importorskip("pgx")


def make(env_id: str, num_envs: int = 4, **options: Any) -> VectorEnv:
    return make_envs(EnvConfig(id=env_id, num_envs=num_envs, options=options), seed=1)


@pytest.mark.parametrize("limit", [500, 7])
def test_cartpole_is_that_of_gymnasium_also_where_episodes_end(limit: int) -> None:
    envs, other = make("gymnax:CartPole-v1", max_steps_in_episode=str(limit)), CartPoleEnv()
    rng, obs, lengths, ends = np.random.default_rng(3), envs.reset(), np.zeros(4, int), 0
    other.reset()
    for _ in range(80):
        action = draw_action(envs, rng)
        step = envs.step(action)
        lengths += 1
        for row in range(4):
            other.state, other.steps_beyond_terminated = obs[row].double().numpy(), None
            expected, reward, terminated, *_ = other.step(int(action[row]))
            assert step.reward[row] == reward and step.terminated[row] == terminated
            assert step.truncated[row] == (lengths[row] == limit and not terminated)
            found = step.obs
            if terminated or step.truncated[row]:
                assert step.final_obs is not None
                found = step.final_obs
                assert step.obs[row].abs().max() <= 0.05  # of a first state
                lengths[row], ends = 0, ends + 1
            np.testing.assert_allclose(found[row], expected, atol=1e-5)
        obs = step.obs
    assert ends >= 8


def test_where_both_flags_are_set_the_episode_terminates() -> None:
    from phasicrl.envs.gymnax import make_simulator

    name = "DeepSea-bsuite"
    envs, simulator = make(f"gymnax:{name}"), make_simulator(name, {}, EnvSlice(4, 1))
    envs.reset()
    simulator.reset(seed=1)
    action = torch.zeros(4, dtype=torch.int64)
    for t in range(1, 9):
        step, (*_, terminated, truncated, _) = envs.step(action), simulator.step(action)
        assert terminated.all() == truncated.all() == step.terminated.all() == (t == 8)
        assert not step.truncated.any()


def test_the_return_of_2048_is_what_its_final_board_was_merged_from() -> None:
    envs, rng, games = make("pgx:2048", 8), np.random.default_rng(3), 0
    envs.reset()
    returns, lengths = torch.zeros(8), torch.zeros(8)
    for _ in range(250):
        assert envs.action_mask is not None
        step = envs.step(draw_action(envs, rng))
        returns, lengths = returns + step.reward, lengths + 1
        if step.final_obs is not None:
            # A tile of 2^k was merged for 2^k (k - 1) points, 4 fewer for each 4 that appeared.
            # Two tiles are there at first, and one appears in each move.
            power = step.final_obs.flatten(1, 2).argmax(-1)
            tiles = torch.where(power > 0, 2.0**power, 0)
            fours = tiles.sum(1) / 2 - lengths - 2
            score = (tiles * (power - 1)).sum(1) - 4 * fours
            for row in step.terminated.nonzero().flatten():
                assert returns[row] == score[row] > 100
            games += int(step.terminated.sum())
            assert not step.truncated.any()
        returns, lengths = returns * ~step.terminated, lengths * ~step.terminated
    assert games >= 8


TRAPS = (
    "gymnax:FrozenLake-misc", "gymnax:FourRooms-misc", "gymnax:UmbrellaChain-bsuite",
    "gymnax:Catch-bsuite", "gymnax:Pendulum-v1", "pgx:minatar-asterix", "pgx:minatar-freeway",
    "pgx:minatar-seaquest", "pgx:minatar-space_invaders",
)  # fmt: skip
"""Discrete and integer observations, integer rewards, weak dtypes, states without numbers."""


@pytest.mark.parametrize("env_id", TRAPS)
def test_every_kind_is_compiled_once_and_restored(env_id: str) -> None:
    envs, twin, rng = make(env_id), make(env_id), np.random.default_rng(3)
    obs, layout = envs.reset(), ObservationLayout(envs.observation_space)
    assert obs.dtype == getattr(torch, layout.dtype.name) and obs.shape == (4, *layout.shape)
    assert envs.action_mask is None or (env_id.startswith("pgx:") and envs.action_mask.all())
    for _ in range(20):
        envs.step(draw_action(envs, rng))
    twin.load_state_dict(envs.state_dict() or {})
    for _ in range(20):
        action = draw_action(envs, rng)
        one, other = envs.step(action), twin.step(action)
        for name in ("obs", "reward", "terminated", "truncated"):
            assert_same(getattr(one, name), getattr(other, name))
        assert not (env_id.startswith("pgx:") and one.truncated.any()), "pgx has no time limits"
    for each in (envs, twin):
        assert each._simulator._jit_step._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("env_id", "options", "message"), [
    ("pgx:chess", {}, "pgx:chess, for 2 players; expected one"),
    ("pgx:minatar-freeway", {"sticky": 0}, "has sticky, .*sticky_action_prob=0.1"),
    ("gymnax:CartPole-v1", {"masspol": 5}, "has masspol, .*masspole=0.1.*max_steps_in_episode"),
    ("gymnax:CartPole-v1", {"tau": "high"}, "tau is 'high'; expected float"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused(env_id: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(env_id, **options)


def test_sticky_actions_can_be_turned_off() -> None:
    def play(prob: str) -> torch.Tensor:
        envs, rng = make("pgx:minatar-breakout", sticky_action_prob=prob), np.random.default_rng(3)
        envs.reset()
        return torch.stack([envs.step(draw_action(envs, rng)).obs for _ in range(20)])

    assert not torch.equal(play("0.9"), play("0"))


def test_jax_starts_without_reserving_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = importlib.import_module("phasicrl.envs.jax"), "XLA_PYTHON_CLIENT_PREALLOCATE"
    starts = list[str | None]()
    monkeypatch.setattr(module.jax, "devices", lambda: starts.append(os.environ.get(name)))
    assert module.import_without_jax_preallocation("json") and name not in os.environ
    monkeypatch.setenv(name, "true")
    module.import_without_jax_preallocation("json")
    assert starts == ["false"] and os.environ[name] == "true", "the user's choice stays"


CARTPOLE = "gymnax:CartPole-v1"


def test_large_arrays_come_through_dlpack_and_do_not_change_later() -> None:
    envs, push = make(CARTPOLE, num_envs=2**14), torch.zeros(2**14, dtype=torch.int64)
    first, step = envs.reset(), envs.step(push)  # observations of 256 KiB
    kept = step.obs.clone()
    envs.step(push)
    torch.testing.assert_close(kept[:, 0], first[:, 0] + 0.02 * first[:, 1])  # x + τ·v
    assert torch.equal(step.obs, kept)


@pytest.mark.parametrize(("env_id", "aux", "memory"), [
    (CARTPOLE, OFF, "none"), (CARTPOLE, tiny_aux(), "none"), (CARTPOLE, OFF, "lstm"),
    ("pgx:2048", tiny_aux(), "none"),
])  # fmt: skip
def test_a_run_is_resumed_to_the_same_bits(
    tmp_path: Path, env_id: str, aux: AuxConfig, memory: str
) -> None:
    config = tiny(tmp_path, aux=aux).with_updates({"env.id": env_id, "model.memory": memory})
    whole, part = phasicrl.train(config), phasicrl.train(config, callbacks=stop_at(2))
    assert part.iteration == 2
    assert_same_run(whole, phasicrl.resume(part.directory))
    (report,) = phasicrl.evaluate(whole.directory, episodes=4, policies=("sampled",))
    assert len(report.returns) == 4
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
