"""Beginning with the weights of another run."""

import math
import re
from pathlib import Path

import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.config import ObsNormConfig, ValueNormConfig
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.warm_start import load_matching_weights
from tests.helpers import OBS_NORM, VALUE_NORM, assert_same, corridor, open_run, tiny


def begun(tmp_path: Path, **changes: object) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a run, and the weights that it ends with."""
    run = train(tiny(tmp_path, obs_norm=OBS_NORM).with_updates(changes), make_env=corridor)
    return run.directory, run.agent.state_dict()


def test_all_weights_and_statistics_are_those_of_the_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, weights = begun(tmp_path)
    changes = {"init_from": str(other), "log.console": "plain", "obs_norm.clip": 2.0}
    for name, bound in (("low", -2.0), ("high", 2.0)):  # options stay those of the run
        weights[f"reader.normalizer.{name}"] = torch.full((2,), bound)
    with open_run(tiny(tmp_path, obs_norm=OBS_NORM, seed=5).with_updates(changes)) as run:
        assert_same(run.agent.state_dict(), weights)
    said = " ".join(capsys.readouterr().out.split())
    assert f"loaded {len(weights)} of {len(weights)} tensors" in said


def test_a_run_without_a_rollout_gives_its_weights(tmp_path: Path) -> None:
    """The bounds of its observations are still infinite."""
    config = tiny(tmp_path, obs_norm=OBS_NORM)
    with open_run(config) as other:
        other.save()
        weights = other.agent.state_dict()
    config = config.with_updates({"seed": 5, "init_from": str(other.directory)})
    with open_run(config) as run:
        assert_same(run.agent.state_dict(), weights)


def test_weights_that_do_not_fit_keep_their_initial_values(tmp_path: Path) -> None:
    """A larger last layer: heads and what feeds them differ, the first layer is the same."""
    other, weights = begun(tmp_path, **{"model.hidden_sizes": (8, 4)})
    config = tiny(tmp_path, obs_norm=OBS_NORM).with_updates({"model.hidden_sizes": (8, 6)})
    with open_run(config) as run:
        fresh = run.agent.state_dict()
    with open_run(config.with_updates({"init_from": str(other)})) as run:
        found = run.agent.state_dict()
    same = {name for name in found if torch.equal(found[name], weights.get(name, torch.zeros(0)))}
    anew = {name for name in found if torch.equal(found[name], fresh[name])}
    assert same | anew == found.keys()
    changed = {name for name in weights if weights[name].shape == found[name].shape} & same
    assert changed and any(name not in anew for name in changed)
    wrong = {name for name in found if weights[name].shape != found[name].shape}
    assert wrong and wrong <= anew


def test_statistics_are_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    """Observations of another shape: their count alone would fit."""
    other, _ = begun(tmp_path)
    files = RunDirectory(other)
    weights = files.load_weights()
    (mean,) = (name for name in weights if name.endswith("moments.mean"))
    weights[mean] = torch.zeros(7, dtype=torch.float64)
    files.save_weights(weights, env_steps=1)
    with open_run(tiny(tmp_path, obs_norm=OBS_NORM).with_updates({"init_from": str(other)})) as run:
        normalizer = run.agent.reader.normalizer
        assert normalizer is not None and normalizer.moments.count == 0


@pytest.mark.parametrize(("weights", "said"), [
    (None, "is not a run directory"),
    ({"of.something.else": 0.0}, "expected weights that fit"),
    ({"own.mask": -math.inf, "value_head.bias": math.nan}, r"not finite \(value_head\.bias\)"),
])  # fmt: skip
def test_a_run_that_gives_nothing_is_refused(
    tmp_path: Path, weights: dict[str, float] | None, said: str
) -> None:
    """Weights of NaN are those of a run that has diverged, which this one has not."""
    other, _ = begun(tmp_path / "other")
    if weights is None:
        (other / "config.json").unlink()
    else:
        tensors = {name: torch.full((1,), value) for name, value in weights.items()}
        RunDirectory(other).save_weights(tensors, env_steps=1)
    config = tiny(tmp_path / "new").with_updates({"init_from": str(other)})
    with pytest.raises(ValueError, match=f"{other}.*{said}") as caught:
        open_run(config)
    assert "diverged:" not in str(caught.value)
    assert not (tmp_path / "new").exists()


OFF = ValueNormConfig()


@pytest.mark.parametrize(
    ("before", "after"),
    [(VALUE_NORM, ValueNormConfig(statistics="ema")), (VALUE_NORM, OFF), (OFF, VALUE_NORM)],
)
def test_value_heads_stay_with_the_units_of_their_outputs(
    tmp_path: Path, before: ValueNormConfig, after: ValueNormConfig
) -> None:
    """Statistics of another kind are not taken over, not even the mean alone; so no heads."""
    other, weights = begun(tmp_path, value_norm=before)
    config = tiny(tmp_path, obs_norm=OBS_NORM).with_updates({"value_norm": after})
    with open_run(config) as run:
        fresh = run.agent.state_dict()
    with open_run(config.with_updates({"init_from": str(other)})) as run:
        found = run.agent.state_dict()
    for name, tensor in found.items():
        of_values = name.startswith(("value_normalizer.", "value_head.", "aux_value_head."))
        assert torch.equal(tensor, fresh[name] if of_values else weights[name]), name
    assert any(name.startswith("value_head.") for name in found)


NONE, MOMENTS, EMA = ObsNormConfig(), OBS_NORM, ObsNormConfig(statistics="ema")


@pytest.mark.parametrize(("before", "after", "way"), [
    (MOMENTS, NONE, "moments"), (EMA, NONE, "ema"), (EMA, MOMENTS, "ema"), (NONE, MOMENTS, "none"),
    (MOMENTS, ObsNormConfig(statistics="moments", clip=5.0), ""), (NONE, NONE, ""),
])  # fmt: skip
def test_first_layers_that_expect_other_observations_are_warned_of(
    tmp_path: Path, before: ObsNormConfig, after: ObsNormConfig, way: str
) -> None:
    other, _ = begun(tmp_path, obs_norm=before)
    with open_run(tiny(tmp_path, obs_norm=after)) as run:
        _, *warned = load_matching_weights(run.agent, str(other))
    assert len(warned) == bool(way)
    for text in warned:
        assert re.match(f"warning: .* expect obs_norm.statistics {way}$", text)
