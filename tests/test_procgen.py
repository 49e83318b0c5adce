"""Small runs on Procgen: training, level statistics, evaluation and film."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest

from phasicrl.algorithm import train
from phasicrl.config import AuxConfig, Config
from phasicrl.lab.film.video import film
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import METRICS
from phasicrl.training.evaluate import evaluate

pytestmark = pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="needs EnvPool")


def small(preset: str, tmp_path: Path, **env: object) -> Config:
    base = get_preset(preset)
    small_aux = AuxConfig(every=2, epochs=1, num_minibatches=4)
    return base.with_updates({
        "total_env_steps": 384, "output_dir": str(tmp_path), "env.id": "procgen:maze",
        "env.num_envs": 8, **{f"env.{name}": value for name, value in env.items()},
        "model.channels": (4, 8), "model.blocks": 1, "model.hidden_sizes": (16,),
        "ppo.num_steps": 16, "ppo.num_minibatches": 4, "log.console": "off",
        "log.tensorboard": False, "aux": small_aux if base.has_auxiliary_phase else base.aux,
    })  # fmt: skip


PRESETS = ("procgen-ppg", "procgen-ppg-single", "procgen-ppg-single-paper", "procgen-ppo")


@pytest.mark.long
@pytest.mark.parametrize("preset", [*PRESETS, "compat-cleanrl-ppg", "compat-baselines-ppo-procgen"])
def test_a_preset_trains_with_finite_numbers(preset: str, tmp_path: Path) -> None:
    run = train(small(preset, tmp_path))
    rows = RunDirectory(run.directory).metrics()
    assert [row["env_steps"] for row in rows] == [128, 256, 384]
    losses = {name: x for row in rows for name, x in row.items() if name.startswith("losses/")}
    assert losses and all(map(math.isfinite, losses.values()))
    assert ("losses/aux/kl_loss" in losses) == run.config.has_auxiliary_phase


@pytest.mark.long
def test_levels_are_counted_and_a_trained_agent_is_evaluated_and_filmed(tmp_path: Path) -> None:
    # Leaper's episodes are short: about 120 steps at random.
    config = small("procgen-ppg-single", tmp_path, **{"id": "procgen:leaper", "num_levels": 3})
    run = train(replace(config, total_env_steps=4096))
    rows = RunDirectory(run.directory).metrics()
    assert rows[-1]["procgen/num_levels_seen"] == 3
    assert any("procgen/level_complete" in row for row in rows)
    assert {"procgen/level_complete", "procgen/num_levels_seen"} <= set(METRICS)
    (result,) = evaluate(run.directory, episodes=2, policies=("sampled",))
    assert len(result.returns) == 2 and set(result.returns) <= {0.0, 10.0}
    path, _ = film(run.directory, episodes=1, size=64)
    assert path.stat().st_size > 1000
