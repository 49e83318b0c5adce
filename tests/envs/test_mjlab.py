"""mjlab: true final observations, untouched rows, and generators."""

# pyright: reportMissingImports=false

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import phasicrl
from phasicrl.config import AuxConfig, EnvConfig
from phasicrl.envs.make import list_envs, make_envs
from tests.envs.mjlab_tasks import FALL, FINITE, LIMIT, LONG, NOISY, SHORT, register_mjlab_tasks
from tests.helpers import OFF, rows_of, tiny, tiny_aux

B = 3


@pytest.fixture(autouse=True)
def _tasks() -> None:
    register_mjlab_tasks()


def make(name: str, seed: int = 1, **options: Any) -> Any:
    config = EnvConfig(id=f"mjlab:{name}", num_envs=B, options={"device": "cpu"} | options)
    return make_envs(config, seed=seed)


def push(time: int) -> Tensor:
    return torch.tensor([[0.5], [-0.5], [1.0]]) * (1 + time)


def play(envs: Any, num_steps: int = LIMIT) -> Any:
    """Reset, make so many steps, and return the last one."""
    envs.reset()
    return [envs.step(push(time)) for time in range(num_steps)][-1]


def test_the_final_observation_is_that_of_a_longer_episode() -> None:
    short, long = make(SHORT), make(LONG)
    assert torch.equal(short.reset(), long.reset())
    for time in range(LIMIT):
        one, other = short.step(push(time)), long.step(push(time))
        assert torch.equal(one.reward, other.reward) or time >= FALL
        if time == FALL - 1:
            assert one.terminated.tolist() == [False, True, False] and not one.truncated.any()
            assert torch.equal(one.final_obs[1], other.obs[1])
            assert not torch.equal(one.obs[1], other.obs[1])
    assert one.truncated.tolist() == [True, False, True] and not one.terminated.any()
    for row in (0, 2):
        assert torch.equal(one.final_obs[row], other.obs[row])
        assert not torch.equal(one.obs[row], other.obs[row])


def test_a_reset_changes_no_observation_of_the_others() -> None:
    envs = make(NOISY)
    simulator, seen = envs._simulator, []

    def record(call: Any) -> Any:
        return lambda *args: seen.append(call(*args)) or seen[-1]

    simulator.step, simulator.reset_rows = record(simulator.step), record(simulator.reset_rows)
    step = play(envs, FALL)
    (*_, (raw, *_), (after, _)) = seen
    read = envs._layout.unpack(step.obs)
    for row in (0, 2):
        assert torch.equal(read["actor"][row], raw["actor"][row])
        assert not torch.equal(after["actor"][row], raw["actor"][row])  # new noise
    assert torch.equal(read["actor"][1], after["actor"][1])
    assert torch.equal(envs._layout.unpack(step.final_obs)["critic"], raw["critic"])


def test_an_episode_that_falls_at_its_time_limit_is_terminated() -> None:
    step = play(make(NOISY))
    assert step.terminated.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, False, True]


def test_the_end_of_a_finite_horizon_is_a_termination() -> None:
    step = play(make(FINITE))
    assert step.terminated.tolist() == [True, False, True] and not step.truncated.any()


def test_the_interface_of_rsl_rl_is_read_from_its_tensordicts() -> None:
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_env_cfg

    def make_vector_env(num_envs: int) -> RslRlVecEnvWrapper:
        cfg = load_env_cfg(SHORT)
        cfg.scene.num_envs = num_envs
        return RslRlVecEnvWrapper(ManagerBasedRlEnv(cfg, "cpu"))

    config = EnvConfig(id="rsl_rl", num_envs=B)
    envs: Any = make_envs(config, seed=1, make_vector_env=make_vector_env)
    assert envs.observation_space.keys() == make(SHORT).observation_space.keys()
    envs.reset()
    for time in range(LIMIT):
        step = envs.step(push(time))
        assert step.terminated.tolist() == [False, time == FALL - 1, False]
        assert step.final_obs is None
    assert step.truncated.tolist() == [True, False, True]


def test_no_generator_of_the_trainer_is_touched() -> None:
    numpy_state: Any = np.random.get_state
    drawn = []
    for seed in (1, 1, 2):
        for start in (random.seed, np.random.seed, torch.manual_seed):
            start(8 + len(drawn))
        before = random.getstate(), numpy_state()[1].tolist(), torch.get_rng_state()
        envs = make(NOISY, seed)
        obs = envs.reset()
        for time in range(LIMIT):
            step = envs.step(push(time))
        assert random.getstate() == before[0]
        assert numpy_state()[1].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
        drawn.append((envs._simulator._envs.drawn, obs.tolist(), step.obs.tolist()))
        envs.close()
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[1], drawn[2], strict=True))


@pytest.mark.parametrize("aux", [OFF, tiny_aux()], ids=["PPO", "PPG"])
def test_an_asymmetric_critic_is_trained(tmp_path: Path, aux: AuxConfig) -> None:
    config = tiny(tmp_path, aux=aux, total_env_steps=512).with_updates({
        "env.id": f"mjlab:{NOISY}", "env.num_envs": 16,
        "model.policy_obs": ("actor",), "model.value_obs": ("critic",),
    })  # fmt: skip
    run = phasicrl.train(config)
    rows = rows_of(run.files)
    assert run.env_steps == 512 and run.agent.value_encoder is not None
    assert any("losses/aux/kl_loss" in row for row in rows) == (aux is not OFF)
    assert not any("charts/learned_fraction" in row for row in rows)


def test_curricula_continue() -> None:
    config = EnvConfig(id=f"mjlab:{SHORT}", num_envs=B, options={"device": "cpu"})
    envs: Any = make_envs(config, seed=1, steps_before=700)
    envs.reset()
    envs.step(push(0))
    assert envs._simulator._envs.common_step_counter == 701


def test_ids_and_options_are_known() -> None:
    assert "mjlab:Mjlab-Cartpole-Balance" in list_envs("mjlab:*")
    assert make(SHORT, play=True).restore_method == "none"
    with pytest.raises(ValueError, match=r"env.options has limit, which does not exist"):
        make(SHORT, limit=3)
    with pytest.raises(ValueError, match=r"unknown environment.*Mjlab-Cartpole-Balance"):
        make("Mjlab-Cartpole-Balanced")
