"""What a learner says of its network: dormant features, clipped observations, how often."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from phasicrl.config import ObsNormConfig
from phasicrl.models.diagnostics import dormant_fraction
from phasicrl.session.run import Run
from tests.helpers import open_run, tiny


def test_dormant_units_by_hand() -> None:
    """Mean 1, so that 0.025 is the bound; and where nothing moves, all are dormant."""
    sizes = torch.tensor([3.95, 0.0, 0.025, 0.025])
    assert dormant_fraction(sizes) == pytest.approx(3 / 4)
    assert dormant_fraction(torch.tensor([3.9, 0.0, 0.026, 0.074])) == 1 / 4
    assert dormant_fraction(torch.zeros(3)) == 1
    assert dormant_fraction(torch.ones(3)) == 0


def looked_at(run: Run) -> dict[str, float]:
    """What is said of the rollout after the first one."""
    rollout = run.collect(run.buffer.next_rollout())
    run.learner.start_iteration()
    run.learner.update_observation_statistics(rollout)
    return run.learner.network_diagnostics(rollout)


def test_features_that_are_cut_off_are_counted(tmp_path: Path) -> None:
    with open_run(tiny(tmp_path)) as run:
        last = [each for each in run.agent.encoder.modules() if isinstance(each, nn.Linear)][-1]
        with torch.no_grad():
            last.weight[:3] = 0
            last.bias[:3] = 0
        found = looked_at(run)
        assert found == {"network/dormant_fraction": pytest.approx(3 / len(last.weight))}


def test_observations_that_are_cut_are_counted(tmp_path: Path) -> None:
    config = tiny(
        tmp_path, obs_norm=ObsNormConfig(statistics="moments", clip=0.5, from_first_rollout=False)
    )
    with open_run(config) as run:
        looked_at(run)
        rollout = run.buffer.rollout(0)
        normalizer = run.agent.reader.normalizer
        assert normalizer is not None
        numbers = rollout.obs.flatten(0, 1).float()
        cut = ((numbers - normalizer.shift) / normalizer.scale).abs() >= 0.5
        said = run.learner.network_diagnostics(rollout)["observations/clipped_fraction"]
        assert 0 < said < 1 and said == pytest.approx(float(cut.float().mean()))


def test_before_there_are_statistics_nothing_is_clipped(tmp_path: Path) -> None:
    config = tiny(
        tmp_path, obs_norm=ObsNormConfig(statistics="moments", clip=0.01, from_first_rollout=False)
    )
    with open_run(config) as run:
        rollout = run.collect(run.buffer.next_rollout())
        run.learner.start_iteration()
        said = run.learner.network_diagnostics(rollout)
        assert rollout.obs.abs().max() > 0.01 and said["observations/clipped_fraction"] == 0


def test_a_long_run_is_looked_at_thirty_times(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config = config.with_updates({"total_env_steps": 90 * config.batch_size})
    with open_run(config) as run:
        rollout, found = run.collect(run.buffer.next_rollout()), []
        for _ in range(90):
            run.learner.start_iteration()
            found.append(bool(run.learner.network_diagnostics(rollout)))
        assert found == [True, False, False] * 30
