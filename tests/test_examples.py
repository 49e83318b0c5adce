"""The examples run as they stand and are short."""

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.training.build import restore_run, start_run
from tests.helpers import OBS_NORM, VALUE_NORM, assert_same, corridor, stop_at, tiny, tiny_aux

FOLDER = Path(__file__).parents[1] / "examples"
LEAST = {
    "first_run": 475, "own_environment_and_network": 14, "own_loop": 195, "masked_with_memory": 7,
    "trading": 35, "callbacks": 195, "dict_observations": 13, "tensor_cartpole": 475,
    "tensor_recall": 0.95,
}  # fmt: skip
"""The examples, with what the first number of their last line has to reach."""


@pytest.mark.long
@pytest.mark.parametrize("name", LEAST)
def test_an_example_runs_and_learns(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "true"}
    options: Any = {"capture_output": True, "text": True}
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=environment, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    number = next(filter(None, re.findall(r"(?<!\S)(\d+\.?\d*)[,;]*(?!\S)", last)))
    assert float(number) > LEAST[name], last


def test_the_expected_examples_are_there() -> None:
    # Returns of the pendulum are negative.
    assert {path.stem for path in FOLDER.glob("*.py")} == {*LEAST, "tensor_pendulum"}


@pytest.mark.parametrize(("name", "kind", "env_id"), [
    ("tensor_cartpole", "TensorCartPole", "CartPole-v1"),
    ("tensor_pendulum", "TensorPendulum", "Pendulum-v1"),
])  # fmt: skip
def test_tensor_examples_step_as_gymnasium_does(name: str, kind: str, env_id: str) -> None:
    """From each state of the simulator, Gymnasium's step leads to the same, in single precision."""
    simulator = runpy.run_path(str(FOLDER / f"{name}.py"))[kind](64)
    env = gym.make(env_id).unwrapped
    env.reset(seed=0)
    torch.manual_seed(0)
    simulator.reset()
    ends = 0
    for _ in range(60):
        if kind == "TensorCartPole":
            before, action = simulator.obs, torch.randint(2, (64,))
        else:
            before = torch.stack([simulator.angle, simulator.speed], 1)
            action = torch.rand(64, 1) * 6 - 3
        obs, reward, terminated, truncated, _ = simulator.step(action)
        for index, state in enumerate(before.double().numpy()):
            env.state, env.steps_beyond_terminated = state, None  # type: ignore[attr-defined]
            expected = env.step(action[index].numpy())
            assert obs[index].numpy() == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
            assert reward[index].item() == pytest.approx(expected[1], rel=1e-6, abs=1e-6)
            assert terminated[index].item() == expected[2]
        ended = terminated | truncated
        ends += int(ended.sum())
        assert torch.equal(simulator.reset_rows(ended)[0][~ended], obs[~ended])
    assert ends or kind == "TensorPendulum"


def test_tensor_recall_pays_for_the_action_that_was_shown() -> None:
    simulator = runpy.run_path(str(FOLDER / "tensor_recall.py"))["TensorRecall"](32)
    obs, info = simulator.reset()
    shown = (obs[:, 0].long() + 3) // 2
    for time in range(8):
        assert info["action_mask"].tolist() == [[time < 7, time == 7, time == 7]] * 32
        action = torch.where(torch.arange(32) % 2 == 0, shown, 3 - shown) * (time == 7)
        obs, reward, terminated, _, info = simulator.step(action)
        assert terminated.all() == (time == 7) and (time == 7 or not obs[:, 0].any())
    assert reward.tolist() == [1.0, 0.0] * 16


def test_the_market_pays_what_is_owned_and_ends_by_its_time_limit() -> None:
    market = runpy.run_path(str(FOLDER / "trading.py"))
    env = market["Market"]()
    assert [*env.reset(seed=1)[1]["action_mask"]] == [True, True, False]  # nothing to sell
    price = env.price
    _, reward, terminated, truncated, info = env.step(market["BUY"])
    assert reward == pytest.approx(env.price - price - 0.1) and not terminated and not truncated
    assert [*info["action_mask"]] == [True, False, True]
    assert env.step(market["SELL"])[1] == -0.1 and env.step(market["WAIT"])[1] == 0
    for _ in range(247):
        _, _, terminated, truncated, _ = env.step(market["WAIT"])
    assert truncated and not terminated


def test_the_heuristic_of_the_market_buys_below_and_sells_above_the_mean() -> None:
    buy_low = runpy.run_path(str(FOLDER / "trading.py"))["buy_low"]
    seen = np.array([[-1.0, 0], [1.0, 0], [-1.0, 1], [1.0, 1]], np.float32)
    allowed = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 1], [1, 0, 1]], bool)
    expected = [[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 1]]
    assert buy_low(seen, allowed).astype(int).tolist() == expected


@pytest.mark.parametrize("aux", [False, True])
def test_a_custom_loop_does_what_train_does_to_the_bit(tmp_path: Path, aux: bool) -> None:
    """The run has statistics, recomputed advantages and an adapted KL penalty."""
    norms = {"obs_norm": OBS_NORM, "value_norm": VALUE_NORM}
    config = tiny(tmp_path, aux=tiny_aux() if aux else None, **norms).with_updates({
        "ppo.policy_epochs": 2, "ppo.value_epochs": 2, "ppo.recompute_advantages": True,
        "ppo.kl_penalty": 0.5, "ppo.kl_penalty_target": 1e-9,
    })  # fmt: skip
    by_train = train(config, make_env=corridor)
    own_loop = runpy.run_path(str(FOLDER / "own_loop.py"))
    with start_run(config, make_env=corridor, callbacks=stop_at(3)) as run:
        own_loop["train_until_solved"](run, solved=math.inf)
    assert run.iteration == 3 < by_train.iteration
    with restore_run(str(run.directory), make_env=corridor) as run:
        own_loop["train_until_solved"](run, solved=math.inf)
    assert run.learner.kl_coef == by_train.learner.kl_coef == 0.5 * 2**4
    ours, theirs = run.agent.state_dict(), by_train.agent.state_dict()
    # With a phase left out at the end, the last rollout is not counted yet.
    assert ours["reader.normalizer.moments.count"] == (96 if aux else 128)
    assert_same(ours, theirs)
    assert (run.directory / "agent.safetensors").is_file()
