"""Tiny runs whose numbers are committed. `python -m tests.golden` writes them anew: only in a commit that says why, with a *Numerics* line."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.config import Config, ModelConfig
from phasicrl.train import train
from tests.helpers import corridor, tiny, tiny_aux

FILE = Path(__file__).with_name("golden.json")


class Picture(gym.Env[np.ndarray, np.int64]):
    """A bright dot on a dark field of 16×16 colour bytes; reward for moving towards it from the middle, five steps an episode."""

    observation_space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._side)
        self._steps += 1
        return self._draw(), reward, self._steps == 5, False, {}

    def _draw(self) -> np.ndarray:
        self._side = int(self.np_random.integers(3))
        picture = np.zeros((16, 16, 3), dtype=np.uint8)
        picture[7:9, 1 + 5 * self._side : 4 + 5 * self._side] = 255
        return picture


def runs(folder: Path) -> dict[str, tuple[Config, Callable[[], gym.Env[Any, Any]]]]:
    """The runs, by name."""
    ppo = tiny(folder, total_env_steps=160)
    shared = replace(ppo, model=replace(ppo.model, value_path="shared", init="orthogonal"), reward_norm=None)
    clipped = replace(
        shared,
        ppo=replace(shared.ppo, minibatch_by="transitions", advantage_norm="minibatch", value_clip=0.2, max_grad_norm=0.5, schedule="linear"),
    )  # fmt: skip
    apart = replace(ppo, ppo=replace(ppo.ppo, policy_epochs=2, value_epochs=3, bootstrap_truncation=False, clip=None, kl_penalty=1.0))
    pictures = ModelConfig(value_path="detached", channels=(4, 8), blocks=1, hidden_sizes=(16,))
    return {
        "ppo-separate-segments": (ppo, corridor),
        "ppo-shared-transitions-clipped": (clipped, corridor),
        "ppo-value-epochs-first-kl": (apart, corridor),
        "ppg-separate": (replace(ppo, aux=tiny_aux()), corridor),
        "ppg-detached-pictures": (replace(ppo, model=pictures, aux=tiny_aux(optimizer="shared")), Picture),
    }


def measure(config: Config, make_env: Callable[[], gym.Env[Any, Any]]) -> list[dict[str, float]]:
    """Every metric of every iteration that does not depend on the clock, and a sum over the final weights."""
    rows: list[dict[str, float]] = []

    def note(run: Any, record: dict[str, float]) -> None:
        rows.append({name: value for name, value in record.items() if not name.startswith("time/") and name != "charts/SPS"})

    run = train(config, make_env=make_env, on_iteration=note)
    rows.append({name: float(tensor.double().sum()) for name, tensor in run.agent.state_dict().items()})
    return [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps({name: measure(*run) for name, run in runs(Path(folder)).items()}, indent=1) + "\n")
