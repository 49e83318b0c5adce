"""Trained agents in a loop of one's own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import flatten
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from phasicrl.algorithm import train
from phasicrl.seeding import derive_seed, env_seeds
from phasicrl.training.acting import TrainedAgent, load
from phasicrl.training.evaluate import evaluate
from tests.golden import BOTH, Echo, Image
from tests.helpers import OBS_NORM, Levers, mark_long, tiny

MakeEnv = Callable[[], gym.Env[Any, Any]]
LSTM = {"model.memory": "lstm", "model.memory_size": 6}
TREES = LSTM | {"model.value_path": "separate", "action.squash": "clip"}
IMAGES = {"model.encoder": "impala", "model.channels": (4,), "compute.policy_precision": "bf16"}
NORMALIZED = {"obs_norm": OBS_NORM, "action.squash": "tanh"}
CASES: dict[str, tuple[dict[str, Any], MakeEnv]] = {
    "discrete": ({}, Levers),
    "masks-and-memory": (LSTM, partial(Levers, masked=True)),
    "two-memories-of-trees": (TREES, partial(Echo, BOTH, tree=True)),
    "mixed-actions-normalized": (NORMALIZED, partial(Echo, BOTH, masked=True)),
    "images-bf16": (IMAGES, Image),
    "observe": ({"env.observe": (2, 0)}, Levers),
}


def trained(folder: Path, name: str) -> tuple[Path, MakeEnv]:
    changes, make_env = CASES[name]
    return train(tiny(folder).with_updates(changes), make_env=make_env).directory, make_env


def play(agent: TrainedAgent, env: gym.Env[Any, Any], seed: int) -> float:
    obs, info = env.reset(seed=seed)
    agent.reset()
    total, done = 0.0, False
    while not done:
        action = agent.act(obs, mask=info.get("action_mask"))
        assert env.action_space.contains(action)
        obs, reward, terminated, truncated, info = env.step(action)
        total, done = total + float(reward), terminated or truncated
    return total


@pytest.mark.parametrize("name", mark_long(CASES, "discrete", "masks-and-memory"))
def test_an_own_loop_has_the_returns_of_an_evaluation(name: str, tmp_path: Path) -> None:
    run, make_env = trained(tmp_path, name)
    (expected,) = evaluate(run, episodes=3, policies=("greedy",), make_env=make_env)
    agent = load(run, make_env=make_env)
    seeds = env_seeds(derive_seed(0, "evaluation"), 3)
    assert [play(agent, make_env(), seed) for seed in seeds] == pytest.approx(expected.returns)
    if not agent.network.state_size:
        agent.reset([False, True, True])  # without a memory, each call may have another number


@pytest.mark.parametrize("name", ["masks-and-memory", "two-memories-of-trees"])
def test_a_batch_has_the_actions_and_values_of_its_environments(name: str, tmp_path: Path) -> None:
    run, make_env = trained(tmp_path, name)
    together, *alone = (load(run, make_env=make_env) for _ in range(3))
    envs = [make_env(), make_env()]
    space: Any = envs[0].observation_space
    now = [env.reset(seed=seed) for seed, env in enumerate(envs)]
    for step in range(4):
        if step == 2:  # the first environment starts a new episode
            now[0] = envs[0].reset()
            alone[0].reset()
            together.reset(np.array([True, False]))
        obs, infos = zip(*now, strict=True)
        batch = concatenate(space, obs, create_empty_array(space, 2))
        masks = [info["action_mask"] for info in infos] if infos[0] else None
        values = [agent.value(each) for agent, each in zip(alone, obs, strict=True)]
        assert together.value(batch) == pytest.approx(values, rel=1e-5)
        both = iterate(batch_space(envs[0].action_space, 2), together.act(batch, mask=masks))
        for index, found in enumerate(both):
            action = alone[index].act(obs[index], mask=infos[index].get("action_mask"))
            flat: Any = [flatten(envs[0].action_space, each) for each in (found, action)]
            np.testing.assert_allclose(*flat, rtol=1e-5)
            obs_now, *_, info = envs[index].step(action)
            now[index] = obs_now, info


class Locks(gym.Env[Any, Any]):
    """Two locks, each of which one of three keys fits, with a mask of two parts."""

    observation_space = gym.spaces.Dict(
        action_mask=gym.spaces.Tuple([gym.spaces.MultiBinary(3)] * 2),
        door=gym.spaces.Discrete(4), view=gym.spaces.Box(-1, 1, (3,), np.float32),
    )  # fmt: skip
    action_space = gym.spaces.MultiDiscrete([3, 3])

    def __init__(self, key: int = 0) -> None:
        keys = np.eye(3, dtype=np.int8)
        self.obs = {"door": 2, "view": np.ones(3, np.float32), "action_mask": (keys[1], keys[key])}

    def reset(self, **_: Any) -> Any:
        return self.obs, {}

    def step(self, action: Any) -> Any:
        return self.obs, 0.0, False, True, {}


def test_masks_in_parts_and_numbers_in_brackets_are_read(tmp_path: Path) -> None:
    agent = load(train(tiny(tmp_path), make_env=Locks).directory, make_env=Locks)
    alone = [Locks(0).obs, Locks(2).obs]
    space: Any = Locks.observation_space
    assert [agent.act(obs).tolist() for obs in alone] == [[1, 0], [1, 2]]
    batch = concatenate(space, alone, create_empty_array(space, 2))
    assert agent.act(batch).tolist() == [[1, 0], [1, 2]]
    assert agent.value(alone[0] | {"door": np.array([2])}) == agent.value(alone[0])


def test_sampled_actions_follow_the_distribution_and_the_seed(tmp_path: Path) -> None:
    run, make_env = trained(tmp_path, "discrete")
    obs, _ = make_env().reset(seed=0)
    agents = [load(run, make_env=make_env, seed=seed) for seed in (1, 2**64 + 1, 2)]
    draws = [[int(each.act(obs, deterministic=False)) for _ in range(400)] for each in agents]
    assert draws[0] == draws[1] != draws[2]
    policy = load(run, make_env=make_env).distribution(obs)
    shares = torch.bincount(torch.tensor(draws[0] + draws[2]), minlength=3) / 800
    torch.testing.assert_close(shares, policy.dist_params.exp()[0], atol=0.06, rtol=0)
    for only in range(3):  # a mask holds also for an agent that was trained without
        assert agents[0].act(obs, mask=np.eye(3)[only]) == only


def test_a_checkpoint_has_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path).with_updates({"checkpoint.every_iterations": 1, "checkpoint.keep": 9})
    biases: list[float] = []
    note = lambda run, _: biases.append(run.agent.value_head.bias.item())  # noqa: E731
    run = train(config, make_env=Levers, callbacks=note)
    (run.directory / "agent.safetensors").unlink()  # a checkpoint has weights enough
    _, *saved = sorted((run.directory / "checkpoints").glob("step-*"))
    monkeypatch.chdir(saved[0])
    with pytest.raises(ValueError, match="weights is 'best'; expected last"):
        load(".", make_env=Levers, weights="best")
    agents = [load(path, make_env=Levers) for path in (".", *map(str, saved[1:]))]
    assert [agent.network.value_head.bias.item() for agent in agents] == biases


def test_what_an_agent_cannot_use_is_refused(tmp_path: Path) -> None:
    run, make_env = trained(tmp_path, "masks-and-memory")
    agent, obs = load(run, make_env=make_env), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="mask is missing"):
        agent.act(obs)
    with pytest.raises(ValueError, match="one allowed choice"):
        agent.act(obs, mask=[False, False, False])
    mask = [True, True, False]
    agent.value(np.stack([obs] * 3))  # leaves the memory as it is
    agent.act(obs, mask=mask)
    with pytest.raises(ValueError, match="2 observations are given after 1"):
        agent.act(np.stack([obs, obs]), mask=[mask, mask])
    agent.reset()
    for masks in ([mask], [mask] * 3, mask, True):  # one would hold for both observations
        with pytest.raises(ValueError, match="a mask for each observation"):
            agent.act(np.stack([obs, obs]), mask=masks)
    agent.reset([True] * 3)  # of all, whatever their number was
    with pytest.raises(ValueError, match="shape"):
        agent.act(np.zeros(4, np.float32), mask=mask)
    for given in ((obs, {}), (obs, 1.0, False, False, {"a": 1}), "abc", [[0, 0, 0], [0]]):
        with pytest.raises(ValueError, match=f"of type {type(given).__name__}; expected a whole"):
            agent.act(given, mask=mask)
    agent.act(np.stack([obs, obs])[::-1], mask=[mask, mask])
    for done in ([False], [True, False, True], "yes", [0, 2], [], None):
        with pytest.raises(ValueError, match=r"done is .*; expected True or False, or .* of 2 env"):
            agent.reset(done)
    for use in (agent.act, agent.distribution, lambda obs, mask: agent.value(obs)):
        with pytest.raises(ValueError, match="not finite"):
            use(np.full(3, np.nan, np.float32), mask=mask)
    with pytest.raises(ValueError, match=r"no-such-agent .*cartpole-ppg"):
        load("no-such-agent")
