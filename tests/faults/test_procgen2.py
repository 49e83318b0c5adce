"""EnvPool's Procgen beside an independent build of the original (F-21)."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from phasicrl.config import EnvConfig
from phasicrl.envs.envpool import PROCGEN_GAMES
from phasicrl.envs.make import make_envs
from tests.faults.conftest import Fault

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "procgen2" / "bin" / "python"
PLAYER = Path(__file__).with_name("play_procgen2.py")
NUM_ENVS, SEED = 4, 5


@pytest.mark.skipif(
    not PYTHON.exists(), reason="no original to compare with; make .peers/procgen2/.ready gets it"
)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.fault("F-21", "EnvPool's Procgen, 10,000 steps: the original's, in each game", 8, 8)
def test_every_game_is_the_original(
    tmp_path: Path, half: int, fault: Fault, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take one seed for all environments; only EnvPool takes a list of seeds.

    `make test` plays 1,200 steps of each game.
    """
    monkeypatch.setattr("phasicrl.envs.bridge.env_seeds", lambda seed, num_envs, first: seed)
    num_steps, games = 2500 if is_full else 300, PROCGEN_GAMES[half::2]
    for index, game in enumerate(games):
        source = np.random.default_rng(index)
        actions = source.integers(15, size=(num_steps, NUM_ENVS), dtype=np.int32)
        np.save(tmp_path / f"{game}.npy", actions)
    subprocess.run([PYTHON, PLAYER, str(SEED), tmp_path], check=True)
    num_ended: list[int] = []
    for index in fault:
        game = games[index]
        config = EnvConfig(
            id=f"procgen:{game}", num_envs=NUM_ENVS, distribution="easy", num_levels=200
        )
        envs = make_envs(config, seed=SEED)
        envs.reset()
        steps = [envs.step(torch.from_numpy(x)) for x in np.load(tmp_path / f"{game}.npy")]
        envs.close()
        with np.load(tmp_path / f"{game}.npz") as original:
            ended = torch.stack([step.terminated | step.truncated for step in steps]).numpy()
            num_ended.append(ended.sum())
            np.testing.assert_array_equal(ended, original["ended"])
            reward = torch.stack([step.reward for step in steps]).numpy()
            np.testing.assert_array_equal(reward, original["reward"].astype(np.float32))
            # Ours are of the level that the step was taken in, its own of the one it leads to.
            level = torch.stack([step.info["level_seed"] for step in steps]).numpy()
            goes_on = ~ended[:-1]
            np.testing.assert_array_equal(level[1:], original["level_seed"][:-1])
            np.testing.assert_array_equal(level[1:][goes_on], level[:-1][goes_on])
            complete = torch.stack([step.info["level_complete"] for step in steps]).numpy()
            np.testing.assert_array_equal(complete[ended], original["complete"][ended])
    # Episodes of some games are longer than 300 steps.
    assert min(num_ended) > 0 if is_full else sum(num_ended) > 40, num_ended
