"""PPO-EWMA and PPG-EWMA: the average of weights, the loss around it, and the rules of batches."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from phasicrl import phases
from phasicrl.algorithm import train
from phasicrl.config import AuxConfig, ObsNormConfig
from phasicrl.lab.experiments.batch_scale import scaled_batch
from phasicrl.models.agent import Agent
from phasicrl.models.proximal import ProximalPolicy
from phasicrl.objectives import decoupled_surrogate_loss, surrogate_loss
from phasicrl.phases import PolicyPhaseLoss, auxiliary_phase, policy_phase
from phasicrl.presets import get_preset
from tests.helpers import corridor, open_run, tiny, tiny_aux


@pytest.mark.parametrize("clip", [0.2, 1.5, None])
def test_around_the_old_policy_it_is_the_surrogate(clip: float | None) -> None:
    log_prob, old, advantage = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = surrogate_loss(log_prob, old, advantage, clip=clip)
    found = decoupled_surrogate_loss(log_prob, old, old, advantage, clip=clip)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_clip_is_around_the_proximal_policy() -> None:
    """By hand: r = 1.5 against the old policy, 1.5 / 1.4 against the proximal one."""
    old = torch.zeros(1)
    log_prob, proximal = torch.tensor([1.5]).log(), torch.tensor([1.4]).log()
    one = torch.ones(1)
    found = decoupled_surrogate_loss(log_prob, proximal, old, one, clip=0.2)
    assert found.tolist() == pytest.approx([-1.5])  # 1.5 / 1.4 is within 1.2: not clipped
    assert surrogate_loss(log_prob, old, one, clip=0.2).tolist() == pytest.approx([-1.2])
    found = decoupled_surrogate_loss(log_prob, proximal, old, one, clip=0.05)
    assert found.tolist() == pytest.approx([-1.4 * 1.05])


def test_a_ratio_is_never_larger_than_a_hundred() -> None:
    log_prob, old = torch.zeros(1, requires_grad=True), torch.tensor([-50.0])
    loss = decoupled_surrogate_loss(log_prob, log_prob.detach(), old, torch.ones(1), clip=None)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert loss.tolist() == pytest.approx([-100.0])
    assert gradient.tolist() == pytest.approx([-100.0])


def test_the_average_is_the_weighted_mean_of_all_weights_so_far(tmp_path: Path) -> None:
    agent = open_run(tiny(tmp_path)).agent
    proximal = ProximalPolicy(agent, 0.8)
    seen = [copy.deepcopy(agent.networks()[0])]
    for step in range(1, 6):
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter += 0.1 * step
        proximal.follow(agent)
        seen.append(copy.deepcopy(agent.networks()[0]))
    weights = [0.8 ** (5 - k) for k in range(6)]
    for index, averaged in enumerate(proximal.agent.networks()[0]):
        pairs = zip(weights, seen, strict=True)
        expected = torch.stack([w * each[index].detach() for w, each in pairs]).sum(0)
        torch.testing.assert_close(averaged.detach(), expected / sum(weights))
    proximal.reset(agent)
    for averaged, now in zip(proximal.agent.networks()[0], agent.networks()[0], strict=True):
        assert torch.equal(averaged, now)


def weights_after(tmp_path: Path, **changes: object) -> dict[str, torch.Tensor]:
    config = tiny(tmp_path, aux=tiny_aux() if changes.pop("aux", False) else None)
    return train(config.with_updates(changes), make_env=corridor).agent.state_dict()


def test_with_one_step_an_update_the_old_policy_is_the_same_as_no_average(tmp_path: Path) -> None:
    """Decay 0 and one minibatch: the average is the policy that has just acted."""
    once = {"ppo.num_minibatches": 1, "ppo.policy_epochs": 1, "ppo.value_epochs": 1}
    plain = weights_after(tmp_path, **once)
    averaged = weights_after(tmp_path, **once, **{"ppo.proximal_decay": 0.0})
    for name, expected in plain.items():
        torch.testing.assert_close(averaged[name], expected, rtol=1e-4, atol=1e-6)


def test_the_average_moves_what_is_learned(tmp_path: Path) -> None:
    more = {"ppo.policy_epochs": 3, "ppo.value_epochs": 3, "ppo.clip": 0.01}
    plain = weights_after(tmp_path, **more)
    averaged = weights_after(tmp_path, **more, **{"ppo.proximal_decay": 0.9})
    assert any(not torch.equal(plain[name], averaged[name]) for name in plain)


def test_moments_of_advantages_count_each_rollout_once(tmp_path: Path) -> None:
    """By hand: two batches, the first counts half; renewed advantages replace their own batch."""
    changes = {"ppo.advantage_decay": 0.5, "ppo.recompute_advantages": True,
               "ppo.policy_epochs": 2, "ppo.value_epochs": 2}  # fmt: skip
    run = open_run(tiny(tmp_path).with_updates(changes))
    learner = run.learner
    seen = []
    for batch in (torch.tensor([0.0, 2.0]), torch.tensor([3.0, 5.0])):
        learner.start_iteration()
        for again in (batch + 7, batch):  # computed twice, the second time anew
            moments = learner.moments_before_rollout()
            assert moments is not None
            moments.update(again)
        seen += batch.tolist()
    weights = [0.5, 0.5, 1.0, 1.0]
    mean = sum(w * x for w, x in zip(weights, seen, strict=True)) / 3
    square = sum(w * x * x for w, x in zip(weights, seen, strict=True)) / 3
    assert learner.advantage_moments is not None
    assert float(learner.advantage_moments.mean) == pytest.approx(mean)
    assert float(learner.advantage_moments.variance) == pytest.approx(square - mean**2)


def test_the_rules_of_batches_by_hand() -> None:
    config = get_preset("procgen-ppg").with_updates(
        {"ppo.proximal_decay": 0.9, "ppo.advantage_decay": 0.75,
         "obs_norm.statistics": "none", "ppo.learning_rate": 4e-4, "aux.learning_rate": 8e-4,
         "ppo.max_grad_norm": 0.5, "aux.max_grad_norm": 3.0}
    )  # fmt: skip
    scaled = scaled_batch(config, 4)
    assert scaled.env.num_envs == 4 * config.env.num_envs
    assert scaled.ppo.learning_rate == pytest.approx(8e-4)
    assert scaled.ppo.adam_betas == pytest.approx((0.9**4, 0.999**4))
    # Ages 9 and 3 steps become 9/4 and 3/4.
    assert scaled.ppo.proximal_decay == pytest.approx((9 / 4) / (1 + 9 / 4))
    assert scaled.ppo.advantage_decay == pytest.approx((3 / 4) / (1 + 3 / 4))
    assert scaled.aux.every == config.aux.every // 4
    assert scaled.aux.learning_rate == pytest.approx(1.6e-3)
    assert (scaled.ppo.max_grad_norm, scaled.aux.max_grad_norm) == (0.25, 1.5)
    # A phase has as much data as before, an iteration as many minibatches.
    assert scaled.batch_size * scaled.aux.every == config.batch_size * config.aux.every
    assert scaled.ppo.num_minibatches == config.ppo.num_minibatches


SCALED = ("ppo.learning_rate", "ppo.adam_betas", "ppo.proximal_decay", "aux.learning_rate")


@pytest.mark.parametrize("factor", [2, 0.5])
def test_scaled_there_and_back_is_the_same(factor: float) -> None:
    config = get_preset("procgen-ppg").with_updates({"ppo.proximal_decay": 0.889})
    there = scaled_batch(config, factor)
    back = scaled_batch(there, 1 / factor)
    for path, value in config.values().items():
        now = back.values()[path]
        expected = pytest.approx(value) if path in SCALED else value
        assert now == expected, path


@pytest.mark.parametrize(
    ("factor", "said"),
    [(0.0, "above zero"), (math.nan, "above zero"), (0.3, "env.num_envs 19.2"), (64, "aux.every")],
)
def test_a_batch_that_cannot_be_is_refused(factor: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scaled_batch(get_preset("procgen-ppg"), factor)


def test_decays_of_normalizers_scale_too(tmp_path: Path) -> None:
    norm = ObsNormConfig(statistics="ema", decay=0.9)
    scaled = scaled_batch(tiny(tmp_path, obs_norm=norm), 2)
    assert scaled.obs_norm is not None and scaled.obs_norm.decay == pytest.approx(0.81)
    assert AuxConfig(epochs=6).every == 32  # what the presets' phases are scaled from


def test_penalty_and_clip_fraction_are_around_the_proximal_policy(tmp_path: Path) -> None:
    """By hand, for a uniform proximal policy; the behavior policy is another one."""
    config = tiny(tmp_path).with_updates({"ppo.proximal_decay": 0.9, "ppo.clip": 0.01})
    run = open_run(config)
    rollout = run.collect(run.buffer.next_rollout())
    num_actions = run.agent.policy_head.num_dist_params
    uniform = torch.full((*rollout.log_prob.shape, num_actions), -math.log(num_actions))
    samples = replace(
        rollout.policy_samples(torch.zeros_like(rollout.value)),
        old_dist_params=uniform,
        old_log_prob=rollout.log_prob - 1.0,
    )
    loss = PolicyPhaseLoss(run.agent, config.ppo, with_policy=True, with_value=False)
    without, _ = loss(samples, torch.tensor(0.0))
    with_penalty, terms = loss(samples, torch.tensor(1.0))
    log_ratio = rollout.log_prob + math.log(num_actions)
    assert log_ratio.abs().max() > 0.01, "the policy is not uniform"
    torch.testing.assert_close(with_penalty - without, log_ratio.square().mean() / 2)
    clipped = ((log_ratio.exp() - 1).abs() > 0.01).float().mean()
    assert 0 < clipped < 1 and terms["losses/clipfrac"] == clipped


def test_the_average_follows_each_step_and_starts_again_after_an_auxiliary_phase(
    tmp_path: Path,
) -> None:
    """One minibatch: the loss sees the average of before the step, which then takes it in."""
    config = tiny(tmp_path, aux=tiny_aux(every=1, epochs=1)).with_updates(
        {"ppo.proximal_decay": 0.5, "ppo.num_minibatches": 1, "ppo.policy_epochs": 1}
    )
    run = open_run(config)
    assert run.learner.proximal is not None
    average = run.learner.proximal.agent

    def policy_weights(agent: Agent) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in agent.networks()[0]]

    seen: list[list[torch.Tensor]] = []
    params = phases.dist_params

    def spy(agent: Agent, *args: Any, **options: Any) -> torch.Tensor:
        if agent is average:
            seen.append(policy_weights(agent))
        return params(agent, *args, **options)

    start = policy_weights(run.agent)
    with patch.object(phases, "dist_params", spy):
        policy_phase(run.learner, run.collect(run.buffer.next_rollout()))
    (before,) = seen
    for at_start, averaged in zip(start, before, strict=True):
        assert torch.equal(at_start, averaged)
    for at_start, now, averaged in zip(
        start, policy_weights(run.agent), policy_weights(average), strict=True
    ):
        # (0.5 · start + now) / (0.5 + 1)
        torch.testing.assert_close(averaged, (0.5 * at_start + now) / 1.5)
    auxiliary_phase(run.learner, run.buffer)
    for now, averaged in zip(policy_weights(run.agent), policy_weights(average), strict=True):
        assert torch.equal(now, averaged)
