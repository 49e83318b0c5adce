"""The tricks: each rung adds exactly its own, and is checked before anything is trained."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phasicrl.algorithm import train
from phasicrl.config import Config, Task, field_paths
from phasicrl.lab.experiments import tricks
from phasicrl.lab.experiments.tricks import TRICKS, Mode, Trick, checked, rungs
from phasicrl.presets import get_preset

BASE = get_preset("classic-ppo").changed({"reward_norm": None})


def flat(config: Config) -> dict[str, Any]:
    """Groups that are off or on count as one field."""
    tree, found = dataclasses.asdict(config), {}
    for path in field_paths():
        group, _, name = path.partition(".")
        is_one = not name or group in ("obs_norm", "value_norm")
        found[path] = tree[group] if is_one else (tree[group] or {}).get(name)
    return found


def difference(before: Config, after: Config) -> set[str]:
    old, new = flat(before), flat(after)
    return {
        path.split(".")[0] if path.startswith(("obs_norm", "value_norm")) else path
        for path in old
        if old[path] != new[path]
    }


EVERYTHING = Task(has_masks=True, has_floats=True)
UNSCALED = {"model.policy_head_scale", "model.value_head_scale", "ppo.value_epochs"}
"""Knobs of the base without effect, and at their defaults, on some rungs.

They need a baseline, or weights that are drawn to scale.
"""


def test_each_rung_changes_the_fields_of_its_trick_and_no_others() -> None:
    steps = rungs(BASE, task=EVERYTHING)
    assert [name for name, _ in steps] == ["REINFORCE", *(f"+ {trick.name}" for trick in TRICKS)]
    for (_, below), (name, above), trick in zip(steps, steps[1:], TRICKS, strict=False):
        changed = difference(below, above)
        assert changed - UNSCALED and changed <= set(trick.on) | UNSCALED, name
    bottom = steps[0][1]
    assert (bottom.ppo.objective, bottom.ppo.baseline, bottom.ppo.estimator, bottom.ppo.clip) == (
        "log_prob",
        False,
        "monte_carlo",
        None,
    )
    assert (bottom.ppo.policy_epochs, bottom.ppo.num_minibatches, bottom.ppo.advantage_norm) == (
        1,
        1,
        "none",
    )
    assert (
        bottom.obs_norm
        is bottom.value_norm
        is bottom.ppo.max_grad_norm
        is bottom.reward_norm
        is None
    )


def test_the_top_of_the_ladder_is_everything_and_each_other_run_lacks_one_trick() -> None:
    top = rungs(BASE, task=EVERYTHING)[-1][1]
    alone = rungs(BASE, mode="leave-one-out", task=EVERYTHING)
    assert alone[0] == ("everything", top)
    for (name, config), trick in zip(alone[1:], TRICKS, strict=True):
        assert name == f"without {trick.name}"
        assert difference(top, config) and difference(top, config) <= set(trick.off) | UNSCALED, (
            name
        )
    assert (top.model.policy_head_scale, top.model.value_head_scale) == (0.01, 1.0)
    scales = {name: config.model.value_head_scale for name, config in alone}
    others = {name: scale for name, scale in scales.items() if scale != 1.0}
    assert others == {"without baseline": 0.1, "without initialization": 0.1}


def test_returns_without_values_are_those_of_whole_episodes() -> None:
    # 8 environments of 128 steps become one of 1,024, which holds two of the longest episodes.
    steps = dict(rungs(BASE, task=EVERYTHING, longest=500))
    for name, config in steps.items():
        sums = name in ("REINFORCE", "+ baseline", "+ clipping")
        shape = (config.ppo.collect_by, config.env.num_envs, config.ppo.num_steps)
        assert shape == (("episodes", 1, 1024) if sums else ("steps", 8, 128)), name
    alone = dict(rungs(BASE, mode="leave-one-out", task=EVERYTHING, longest=500))
    whole = {name for name, config in alone.items() if config.ppo.collect_by == "episodes"}
    assert whole == {"without baseline", "without TD(λ)"}
    assert all(config.ppo.collect_by == "steps" for _, config in rungs(BASE, task=EVERYTHING))


@pytest.mark.long
def test_a_rung_of_whole_episodes_can_be_trained(tmp_path: Path) -> None:
    name, config = checked(TAXI, rungs)[0]
    assert (name, config.ppo.collect_by, config.ppo.num_steps) == ("REINFORCE", "episodes", 512)
    short = {"output_dir": str(tmp_path), "total_env_steps": 1024, "log.console": "off"}
    run = train(config.changed({**short, "log.tensorboard": False}))
    assert 0.3 < run.record["charts/learned_fraction"] <= 1


def test_without_masks_there_is_no_rung_for_them() -> None:
    task = Task(has_masks=False, has_floats=True)
    assert rungs(BASE, task=task)[-1][0] == "+ entropy bonus" and len(
        rungs(BASE, mode="leave-one-out", task=task)
    ) == len(TRICKS)


TAXI = BASE.changed({"env.id": "gymnasium:Taxi-v4"})


@pytest.mark.parametrize("mode", ["ladder", "leave-one-out"])
def test_members_of_a_set_need_no_normalization_but_masks_are_a_rung(mode: Mode) -> None:
    names = [name for name, _ in checked(TAXI, partial(rungs, mode=mode))]
    assert len(names) == len(TRICKS) and not any("state" in name for name in names)
    assert names[-1].endswith("action masking")  # Taxi says which actions do something


def test_rewards_are_not_normalized_on_any_rung() -> None:
    base = get_preset("pendulum-ppo")
    assert base.reward_norm is not None
    assert all(config.reward_norm is None for _, config in checked(base, rungs))


def test_every_rung_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Trick(
        "memory",
        {"model.memory": "lstm", "ppo.minibatch_by": "segments", "action.squash": "clip"},
        {"action.squash": "none"},
    )
    monkeypatch.setattr(tricks, "missing", lambda paths, task: None)
    monkeypatch.setattr(tricks, "TRICKS", (*TRICKS[:2], last))
    monkeypatch.setattr(tricks, "episode_limit", lambda env: None)  # else there is one environment
    with pytest.raises(
        ValueError,
        match=r"arm '\+ memory' cannot be trained: .*action.squash is clip, which has no effect",
    ):
        checked(BASE, rungs)
