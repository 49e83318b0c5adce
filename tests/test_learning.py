"""Presets reach the returns of their pages; memory and masks are worth what they should be.

Slow: `make test-slow`.
"""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.evaluate import evaluate
from tests.golden import Image
from tests.helpers import tiny, tiny_aux

pytestmark = pytest.mark.slow


def quiet(preset: str, tmp_path: Path, **changes: Any) -> Config:
    quiet = {"output_dir": str(tmp_path), "log.console": "off", "log.tensorboard": False}
    return get_preset(preset).with_updates({**quiet, **changes})


def greedy_return(config: Config, episodes: int, make_env: Any = None) -> float:
    """Train, and return the mean return of greedy episodes."""
    run = train(config, make_env=make_env)
    (greedy,) = evaluate(run.directory, episodes=episodes, policies=("greedy",), make_env=make_env)
    return greedy.mean_return


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("preset", ["classic-ppo", "classic-ppg"])
def test_cartpole_is_solved_within_100_000_steps(preset: str, seed: int, tmp_path: Path) -> None:
    config = quiet(preset, tmp_path, seed=seed)
    assert config.total_env_steps == 100_000
    assert greedy_return(config, 20) >= 475
    (folder,) = tmp_path.iterdir()
    rows = RunDirectory(folder).metrics()
    assert max(row.get("charts/episodic_return_100", 0) for row in rows) >= 475


@pytest.mark.parametrize("value_path", ["separate", "detached", "shared_in_aux", "shared"])
def test_a_task_of_images_is_learned_by_every_value_path(value_path: str, tmp_path: Path) -> None:
    """The side of a dot, five points an episode; chance is 1.67."""
    config = tiny(tmp_path, aux=tiny_aux(every=4), total_env_steps=16_384).with_updates({
        "model.encoder": "impala", "model.activation": "relu", "model.channels": (8, 8),
        "model.blocks": 1, "model.hidden_sizes": (32,), "model.value_path": value_path,
        "ppo.num_steps": 32, "ppo.num_minibatches": 4, "ppo.learning_rate": 1e-3,
    })  # fmt: skip
    assert train(config, make_env=Image).collector.episodes.recent_mean_return > 4.5


@pytest.mark.parametrize(("preset", "least"), [
    ("pendulum", -250), ("invertedpendulum", 950), ("acrobot", -85),
])  # fmt: skip
def test_small_tasks_are_learned(preset: str, least: float, tmp_path: Path) -> None:
    """The middle one of three seeds counts: one in ten may end below, by rounding."""
    configs = (quiet(f"{preset}-ppo", tmp_path, seed=seed) for seed in (101, 102, 103))
    assert np.median([greedy_return(config, 20) for config in configs]) >= least


@pytest.mark.parametrize(("memory", "low", "high"), [("lstm", 475, 501), ("none", 0, 300)])
def test_masked_cartpole_needs_a_memory(memory: str, low: int, high: int, tmp_path: Path) -> None:
    config = quiet("cartpole-masked-velocity-ppo", tmp_path, **{"model.memory": memory})
    assert low <= greedy_return(config, 20) < high


@pytest.mark.parametrize(("masks", "memory", "low", "high"), [
    (True, "lstm", 11.9, 12.1), (False, "lstm", 0, 7), (True, "none", 0, 6),
])  # fmt: skip
def test_a_long_code_needs_masks_and_memory(
    masks: bool, memory: str, low: float, high: float, tmp_path: Path
) -> None:
    """Twelve keys out of a thousand, as in `examples/masked_with_memory.py`.

    Four work at each place, and nothing shows the place.
    """
    source = (Path(__file__).parents[1] / "examples" / "masked_with_memory.py").read_text()
    names: dict[str, Any] = {}
    exec(source[: source.index("config = ")], names)  # its environment, not its training
    changes = {"env.action_masks": masks, "model.memory": memory, "total_env_steps": 100_000}
    config = quiet("cartpole-masked-velocity-ppg", tmp_path, **changes)
    config = config.with_updates({"env.id": "keypad", "env.observe": None})
    assert low <= greedy_return(config, 50, names["Keypad"]) < high


class Recall(gym.Env[np.ndarray, np.ndarray]):
    """Task of memory: a number is shown once and is to be given back in the next four steps.

    A point for each, less the distance. Without a memory nothing is better than zero, whose mean
    distance is ½: two points of four.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self.number, self.at = float(self.np_random.uniform(-1, 1)), 0
        return np.array([self.number, 1], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = 1 - abs(float(action[0]) - self.number) if self.at else 0.0
        self.at += 1
        return np.zeros(2, np.float32), reward, self.at == 5, False, {}


@pytest.mark.parametrize(
    ("memory", "low", "high"), [("lstm", 3.5, 4), ("gru", 3.5, 4), ("none", 0, 2.3)]
)
def test_a_number_is_remembered(memory: str, low: float, high: float, tmp_path: Path) -> None:
    """Memory with continuous actions."""
    changes = {"total_env_steps": 100_000, "env.id": "recall", "env.observe": None}
    config = quiet("cartpole-masked-velocity-ppo", tmp_path, **changes)
    assert low <= greedy_return(config.with_updates({"model.memory": memory}), 200, Recall) < high


class Safes(gym.Env[np.ndarray, Any]):
    """One of eight safes in each of five steps.

    Its key among 1,600, and the number that is shown, to be given at once.

    Only the right key earns a point, less the number's distance. The mask allows four keys at each
    safe.
    """

    observation_space = gym.spaces.Box(-1, 1, (9,), np.float32)
    action_space = gym.spaces.Dict(
        {"key": gym.spaces.Discrete(1600), "number": gym.spaces.Box(-2, 2, (1,), np.float32)}
    )

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self.at = 0
        return self._next()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        is_right = action["key"] == 200 * self.safe + 13
        reward = is_right * (1 - abs(float(action["number"][0]) - self.number))
        self.at += 1
        obs, info = self._next()
        return obs, reward, self.at == 5, False, info

    def _next(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.safe = int(self.np_random.integers(8))
        self.number = float(self.np_random.uniform(-1, 1))
        key = np.arange(1600) - 200 * self.safe
        obs = np.array([*(np.arange(8) == self.safe), self.number], np.float32)
        return obs, {"action_mask": (key >= 11) & (key < 15)}


@pytest.mark.parametrize(("masks", "low", "high"), [(True, 4.3, 5), (False, -1, 1.5)])
def test_numbers_and_masked_keys(masks: bool, low: float, high: float, tmp_path: Path) -> None:
    """Masks with continuous actions."""
    changes = {"total_env_steps": 60_000, "env.id": "safes", "env.action_masks": masks}
    assert low <= greedy_return(quiet("classic-ppo", tmp_path, **changes), 200, Safes) < high
