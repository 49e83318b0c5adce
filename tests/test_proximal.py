"""PPO-EWMA and PPG-EWMA: the average of weights, the loss around it, and the rules of batches."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from phasicrl import phases
from phasicrl.algorithm import train
from phasicrl.config import ObsNormConfig
from phasicrl.lab.experiments.batch_scale import scale_batch
from phasicrl.models.agent import Agent
from phasicrl.models.proximal import ProximalPolicy
from phasicrl.normalize import EmaMoments
from phasicrl.objectives import decoupled_surrogate_loss, surrogate_loss
from phasicrl.phases import PolicyPhaseLoss, auxiliary_phase, compute_targets, policy_phase
from phasicrl.presets import get_preset
from tests.helpers import OBS_NORM, assert_same, corridor, open_run, tiny, tiny_aux


@pytest.mark.parametrize("clip", [0.2, 1.5, math.inf])
def test_around_the_old_policy_it_is_the_surrogate(clip: float) -> None:
    log_prob, old, advantage = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = surrogate_loss(log_prob, old, advantage, clip=torch.tensor(clip))
    found = decoupled_surrogate_loss(log_prob, old, old, advantage, clip=torch.tensor(clip))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_ratio_is_never_larger_than_a_hundred() -> None:
    log_prob, old = torch.zeros(1, requires_grad=True), torch.tensor([-50.0])
    clip = torch.tensor(math.inf)
    loss = decoupled_surrogate_loss(log_prob, log_prob.detach(), old, torch.ones(1), clip=clip)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert loss.tolist() == pytest.approx([-100.0])
    assert gradient.tolist() == pytest.approx([-100.0])


def policy_weights(agent: Agent) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in agent.params_per_network()[0]]


def test_the_average_is_the_weighted_mean_of_all_weights_so_far(tmp_path: Path) -> None:
    agent = open_run(tiny(tmp_path)).agent
    proximal, seen = ProximalPolicy(agent, 0.8), [policy_weights(agent)]
    for step in range(1, 6):
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter += 0.1 * step
        proximal.update(agent)
        seen.append(policy_weights(agent))
    weights = torch.tensor([0.8 ** (5 - k) for k in range(6)])
    for averaged, *each in zip(policy_weights(proximal.agent), *seen, strict=True):
        expected = torch.einsum("k,k...->...", weights / weights.sum(), torch.stack(each))
        torch.testing.assert_close(averaged, expected)
    proximal.reset(agent)
    assert all(map(torch.equal, policy_weights(proximal.agent), policy_weights(agent)))


def weights_after(tmp_path: Path, **changes: object) -> dict[str, torch.Tensor]:
    return train(tiny(tmp_path).with_updates(changes), make_env=corridor).agent.state_dict()


def test_with_one_step_an_update_decay_zero_is_no_average(tmp_path: Path) -> None:
    """Decay 0 and one minibatch: the average is the policy that has just acted."""
    once = {"ppo.num_minibatches": 1, "ppo.policy_epochs": 1, "ppo.value_epochs": 1}
    plain = weights_after(tmp_path, **once)
    averaged = weights_after(tmp_path, **once, **{"ppo.proximal_decay": 0.0})
    torch.testing.assert_close(dict(averaged), dict(plain), rtol=1e-4, atol=1e-6)


def test_moments_of_advantages_count_each_rollout_once(tmp_path: Path) -> None:
    """By hand: two batches, the first counts half; recomputed advantages replace their batch."""
    changes = {"ppo.advantage_decay": 0.5, "ppo.recompute_advantages": True,
               "ppo.policy_epochs": 2, "ppo.value_epochs": 2}  # fmt: skip
    learner = open_run(tiny(tmp_path).with_updates(changes)).learner
    for batch in (torch.tensor([0.0, 2.0]), torch.tensor([3.0, 5.0])):
        learner.start_iteration()
        for again in (batch + 7, batch):  # computed twice
            moments = learner.rewind_advantage_moments()
            assert moments is not None
            moments.update(again)
    mean, square = (0 + 2 + 2 * 3 + 2 * 5) / 6, (0 + 4 + 2 * 9 + 2 * 25) / 6
    assert learner.advantage_moments is not None
    assert float(learner.advantage_moments.mean) == pytest.approx(mean)
    assert float(learner.advantage_moments.variance) == pytest.approx(square - mean**2)


def test_advantages_are_normalized_by_their_moments(tmp_path: Path) -> None:
    """Advantages of the first rollout are normalized by its own moments."""
    run = open_run(tiny(tmp_path))
    rollout = run.collect(run.buffer.next_rollout())
    found = compute_targets(
        rollout, rollout.reward, run.config.ppo, advantage_moments=EmaMoments(0.5)
    )[0]
    expected = compute_targets(rollout, rollout.reward, run.config.ppo)[0]
    torch.testing.assert_close(found.advantage, expected.advantage)


def test_the_rules_of_batches_by_hand() -> None:
    config = get_preset("procgen-ppg").with_updates({
        "ppo.proximal_decay": 0.9, "ppo.advantage_decay": 0.75, "obs_norm.statistics": "none",
        "ppo.learning_rate": 4e-4, "aux.learning_rate": 8e-4, "ppo.max_grad_norm": 0.5,
        "aux.max_grad_norm": 3.0,
    })  # fmt: skip
    scaled = scale_batch(config, 4)
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
    back = scale_batch(scale_batch(config, factor), 1 / factor)
    for path, value in config.values().items():
        now = back.values()[path]
        expected = pytest.approx(value) if path in SCALED else value
        assert now == expected, path


@pytest.mark.parametrize(("factor", "said"), [
    (0.0, "above 0"), (math.nan, "above 0"), (0.3, "env.num_envs 19.2"), (64, "aux.every"),
])  # fmt: skip
def test_a_batch_that_cannot_be_is_refused(factor: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scale_batch(get_preset("procgen-ppg"), factor)


def test_decays_of_normalizers_scale_too(tmp_path: Path) -> None:
    scaled = scale_batch(tiny(tmp_path, obs_norm=ObsNormConfig(statistics="ema", decay=0.9)), 2)
    assert scaled.obs_norm.decay == pytest.approx(0.81)


def test_loss_penalty_and_clip_fraction_are_around_the_proximal_policy(tmp_path: Path) -> None:
    """By hand, for a uniform proximal policy; the behavior policy is another one."""
    config = tiny(tmp_path).with_updates({"ppo.proximal_decay": 0.9, "ppo.clip": 0.01})
    run = open_run(config)
    rollout = run.collect(run.buffer.next_rollout())
    num_actions = run.agent.policy_head.num_dist_params
    uniform = torch.full((*rollout.log_prob.shape, num_actions), -math.log(num_actions))
    advantage, old = torch.linspace(-1, 1, 32).view(4, 8), rollout.log_prob - 1.0
    samples = rollout.policy_samples(advantage)
    samples = replace(samples, old_dist_params=uniform, old_log_prob=old)
    loss = PolicyPhaseLoss(run.agent, config.ppo, trains_policy=True, trains_value=False)
    _, *others = run.learner.policy_loss_coefficients()
    without, _ = loss(samples, torch.tensor(0.0), *others)
    with_penalty, terms = loss(samples, torch.tensor(1.0), *others)
    log_ratio = rollout.log_prob + math.log(num_actions)
    assert log_ratio.abs().max() > 0.01, "the policy is not uniform"
    torch.testing.assert_close(with_penalty - without, log_ratio.square().mean() / 2)
    clipped = ((log_ratio.exp() - 1).abs() > 0.01).float().mean()
    assert 0 < clipped < 1 and terms["losses/clipfrac"] == clipped
    # max(−A r, −A p clip(r / p)), with r = e against the old policy and p the proximal one's
    ratio, proximal = math.e, (1.0 - log_ratio).exp()
    around = proximal * log_ratio.exp().clamp(0.99, 1.01)
    written = torch.maximum(-advantage * ratio, -advantage * around).mean()
    torch.testing.assert_close(terms["losses/policy_loss"], written)


def test_the_average_follows_steps_and_restarts_after_the_aux_phase(tmp_path: Path) -> None:
    """One minibatch: the loss sees the average before the step, which then takes it in."""
    changes = {"ppo.proximal_decay": 0.5, "ppo.num_minibatches": 1, "ppo.policy_epochs": 1}
    run = open_run(tiny(tmp_path, aux=tiny_aux(every=1, epochs=1)).with_updates(changes))
    assert run.learner.proximal is not None
    average, seen, params = run.learner.proximal.agent, [], phases.compute_dist_params

    def spy(agent: Agent, *args: Any, **options: Any) -> torch.Tensor:
        seen.extend([policy_weights(agent)] if agent is average else [])
        return params(agent, *args, **options)

    start = policy_weights(run.agent)
    with patch.object(phases, "compute_dist_params", spy):
        policy_phase(run.learner, run.collect(run.buffer.next_rollout()))
    (before,) = seen
    assert all(map(torch.equal, start, before))
    expected = [(0.5 * x + y) / 1.5 for x, y in zip(start, policy_weights(run.agent), strict=True)]
    torch.testing.assert_close(policy_weights(average), expected)
    auxiliary_phase(run.learner, run.buffer)
    assert all(map(torch.equal, policy_weights(run.agent), policy_weights(average)))


def test_the_averaged_policy_reads_observations_as_the_agent_does(tmp_path: Path) -> None:
    config = tiny(tmp_path, obs_norm=OBS_NORM).with_updates({"ppo.proximal_decay": 0.5})
    run = train(config, make_env=corridor)
    assert run.learner.proximal is not None
    ours, averaged = run.agent.reader, run.learner.proximal.agent.reader
    assert ours.state_dict()
    assert_same(averaged.state_dict(), ours.state_dict())
