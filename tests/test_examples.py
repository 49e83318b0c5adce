"""The examples run as they stand and are short."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.config import ObsNormConfig, ValueNormConfig
from phasicrl.session.build import start_run
from tests.helpers import corridor, tiny, tiny_aux

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
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
        }[path.stem]
    ), last


def test_the_expected_examples_are_there() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "first_run",
        "own_environment_and_network",
        "own_loop",
        "masked_with_memory",
    }


@pytest.mark.parametrize("aux", [False, True])
def test_a_loop_of_ones_own_does_what_train_does_to_the_bit(tmp_path: Path, aux: bool) -> None:
    """Statistics, renewed advantages and the adapted weight of the KL penalty are not forgotten."""
    norms = {"obs_norm": ObsNormConfig(), "value_norm": ValueNormConfig()}
    config = tiny(tmp_path, aux=tiny_aux() if aux else None, **norms).changed(
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
