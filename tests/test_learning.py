"""Learning is the proof: the presets for CartPole solve it on every seed (slow: `make test-slow`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phasicrl.config import LogConfig
from phasicrl.evaluate import evaluate
from phasicrl.metrics import read_metrics
from phasicrl.presets import get_preset
from phasicrl.train import train
from tests.golden import Picture
from tests.helpers import tiny, tiny_aux

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("preset", ["classic-ppo", "classic-ppg"])
def test_cartpole_is_solved_within_100_000_steps(preset: str, seed: int, tmp_path: Path) -> None:
    config = replace(get_preset(preset), seed=seed, output_dir=str(tmp_path), log=LogConfig(console="off", tensorboard=False))
    assert config.total_env_steps == 100_000
    run = train(config)
    assert max(row.get("charts/episodic_return_100", 0) for row in read_metrics(run.directory)) >= 475
    (greedy,) = evaluate(run.directory, episodes=20, policies=("greedy",))
    assert greedy.mean_return >= 475


@pytest.mark.parametrize("value_path", ["separate", "detached", "shared"])
def test_a_task_of_pictures_is_learnt_by_every_value_path(value_path: str, tmp_path: Path) -> None:
    """The side of a dot, five points an episode; chance is 1.67."""
    config = tiny(tmp_path, aux=tiny_aux(every=4), total_env_steps=16_384)
    model = replace(config.model, encoder="impala", channels=(8, 8), blocks=1, hidden_sizes=(32,), value_path=value_path)
    config = replace(config, model=model, ppo=replace(config.ppo, num_steps=32, num_minibatches=4, learning_rate=1e-3))
    run = train(config, make_env=Picture)
    assert run.collector.episodes.recent_mean > 4.5
