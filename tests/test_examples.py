"""The examples run as they stand and are short."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.session.build import start_run
from tests.helpers import OBS_NORM, VALUE_NORM, corridor, tiny, tiny_aux

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.long
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 50
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "true"}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    number = float(
        next(
            word.strip(",;") for word in last.split() if word.strip(",;").replace(".", "").isdigit()
        )
    )
    assert (
        number
        > {
            "first_run": 80,
            "own_environment_and_network": 14,
            "own_loop": 195,
            "masked_with_memory": 7,
            "trading": 35,
        }[path.stem]
    ), last


def test_the_expected_examples_are_there() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "first_run",
        "own_environment_and_network",
        "own_loop",
        "masked_with_memory",
        "trading",
    }


def test_the_market_pays_what_is_owned_and_ends_by_its_time_limit() -> None:
    market = runpy.run_path(str(EXAMPLES[0].with_name("trading.py")))
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
    buy_low = runpy.run_path(str(EXAMPLES[0].with_name("trading.py")))["buy_low"]
    seen = np.array([[-1.0, 0], [1.0, 0], [-1.0, 1], [1.0, 1]], np.float32)
    allowed = np.array([[1, 1, 0], [1, 1, 0], [1, 0, 1], [1, 0, 1]], bool)
    expected = [[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 1]]
    assert buy_low(seen, allowed).astype(int).tolist() == expected


@pytest.mark.parametrize("aux", [False, True])
def test_a_loop_of_ones_own_does_what_train_does_to_the_bit(tmp_path: Path, aux: bool) -> None:
    """Statistics, renewed advantages and the adapted weight of the KL penalty are not forgotten."""
    norms = {
        "obs_norm": OBS_NORM,
        "value_norm": VALUE_NORM,
    }
    config = tiny(tmp_path, aux=tiny_aux() if aux else None, **norms).with_updates(
        {
            "ppo.policy_epochs": 2,
            "ppo.value_epochs": 2,
            "ppo.recompute_advantages": True,
            "ppo.kl_penalty": 0.5,
            "ppo.kl_penalty_target": 1e-9,
        }
    )
    by_train = train(config, make_env=corridor)
    own_loop = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "own_loop.py"))
    with start_run(config, make_env=corridor) as run:
        own_loop["train_until_solved"](run, solved=math.inf)
    assert (
        run.agent.reader.normalizer is not None and run.agent.reader.normalizer.moments.count == 128
    )
    assert run.learner.kl_coef == by_train.learner.kl_coef == 0.5 * 2**4
    ours, theirs = run.agent.state_dict(), by_train.agent.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert (run.directory / "agent.safetensors").is_file()
