"""The tricks: each rung adds exactly its own."""

from pathlib import Path

import pytest

from phasicrl.algorithm import train
from phasicrl.lab.experiments.tricks import TRICKS, Mode, make_arms_for_env, make_trick_arms
from phasicrl.presets import differences, get_preset

BASE = get_preset("classic-ppo").with_updates({"reward_norm.per": "none"})


def test_each_rung_changes_the_fields_of_its_trick_and_no_others() -> None:
    steps = make_trick_arms(BASE)
    assert [name for name, _ in steps] == ["REINFORCE", *(f"+ {trick.name}" for trick in TRICKS)]
    for (_, below), (name, above), trick in zip(steps, steps[1:], TRICKS, strict=False):
        changed = {*differences(above, below)}
        assert changed and changed <= set(trick.on), name
    bottom = steps[0][1]
    ppo = bottom.ppo
    assert (ppo.objective, ppo.baseline, ppo.estimator, ppo.clip, ppo.policy_epochs) == (
        "log_prob", False, "monte_carlo", None, 1
    )  # fmt: skip
    assert (ppo.num_minibatches, ppo.advantage_norm, ppo.max_grad_norm) == (1, "none", None)
    assert bottom.obs_norm.statistics == bottom.value_norm.statistics == "none"


def test_the_top_of_the_ladder_is_everything_and_each_other_run_lacks_one_trick() -> None:
    top = make_trick_arms(BASE)[-1][1]
    alone = make_trick_arms(BASE, mode="leave-one-out")
    assert alone[0] == ("everything", top)
    for (name, config), trick in zip(alone[1:], TRICKS, strict=True):
        assert name == f"without {trick.name}"
        changed = {*differences(config, top)}
        assert changed and changed <= set(trick.off), name


def test_returns_without_values_are_those_of_whole_episodes() -> None:
    # 8 environments of 128 steps become one of 1,024, which holds two of the longest episodes.
    steps = dict(make_trick_arms(BASE, max_episode_steps=500))
    for name, config in steps.items():
        sums = name in ("REINFORCE", "+ baseline", "+ clipping")
        shape = (config.ppo.collect_by, config.env.num_envs, config.ppo.num_steps)
        assert shape == (("episodes", 1, 1024) if sums else ("steps", 8, 128)), name
    alone = dict(make_trick_arms(BASE, mode="leave-one-out", max_episode_steps=500))
    whole = {name for name, config in alone.items() if config.ppo.collect_by == "episodes"}
    assert whole == {"without baseline", "without TD(λ)"}
    assert all(config.ppo.collect_by == "steps" for _, config in make_trick_arms(BASE))


@pytest.mark.long
def test_a_rung_of_whole_episodes_can_be_trained(tmp_path: Path) -> None:
    name, config = make_arms_for_env(TAXI, make_trick_arms)[0]
    assert (name, config.ppo.collect_by, config.ppo.num_steps) == ("REINFORCE", "episodes", 512)
    short = {"output_dir": str(tmp_path), "total_env_steps": 1024, "log.console": "off"}
    run = train(config.with_updates({**short, "log.tensorboard": False}))
    assert 0.3 < run.record["charts/learned_fraction"] <= 1


TAXI = BASE.with_updates({"env.id": "gymnasium:Taxi-v4"})


@pytest.mark.parametrize("mode", ["ladder", "leave-one-out"])
def test_members_of_a_set_need_no_normalization_but_masks_are_a_rung(mode: Mode) -> None:
    names = [name for name, _ in make_arms_for_env(TAXI, make_trick_arms, mode=mode)]
    assert len(names) == len(TRICKS) and not any("state" in name for name in names)
    assert names[-1].endswith("action masking")  # Taxi says which actions do something


def test_rewards_are_not_normalized_on_any_rung() -> None:
    base = get_preset("pendulum-ppo")
    assert base.reward_norm.per != "none"
    arms = make_arms_for_env(base, make_trick_arms)
    assert all(config.reward_norm.per == "none" for _, config in arms)
