"""Play the original Procgen; run by the Python of an environment that has it.

usage: play_procgen2.py SEED FOLDER

For each file `GAME.npy` in the folder, which has actions `[T, B]`, a file `GAME.npz` gets arrays
`[T, B]`: reward, whether the step ended an episode, the seed of the level that is played now, and
whether the one before was solved. To start takes a second and a half, whatever the number of games.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np


def play(actions: Path, seed: int) -> None:
    """Step B environments."""
    procgen: Any = importlib.import_module("procgen")
    all_actions = np.load(actions)
    envs = procgen.ProcgenGym3Env(
        num=all_actions.shape[1], env_name=actions.stem, num_levels=200, start_level=0,
        distribution_mode="easy", rand_seed=seed,
    )  # fmt: skip
    rows = []
    for action in all_actions:
        envs.act(action)
        reward, _, first = envs.observe()
        told = [(info["level_seed"], info["prev_level_complete"]) for info in envs.get_info()]
        rows.append(np.stack([reward, first, *np.transpose(told)]))
    reward, first, level_seed, complete = np.stack(rows, axis=1)
    output = actions.with_suffix(".npz")
    np.savez(output, reward=reward, ended=first, level_seed=level_seed, complete=complete)


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[2]).glob("*.npy")):
        play(file, int(sys.argv[1]))
