"""The two phases: what they compute, on what, how often.

That PPO is PPG without its auxiliary phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from phasicrl import objectives, optimize, phases, returns
from phasicrl.algorithm import learn, train
from phasicrl.config import Config, RewardNormConfig
from phasicrl.execution.step import StepSettings
from phasicrl.phases import auxiliary_phase, compute_targets, dist_params, policy_phase
from phasicrl.rollout import AuxiliarySamples, Minibatch, PolicySamples
from phasicrl.session.build import start_run
from phasicrl.session.run import Run
from tests.helpers import OBS_NORM, VALUE_NORM, Levers, corridor, open_run, tiny, tiny_aux


def weights(run: Run) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.agent.state_dict().items()}


def filled(config: Config) -> Run:
    """A run whose buffer holds a phase of rollouts with targets, nothing trained yet."""
    run = open_run(config)
    while not run.buffer.is_full:
        rollout = run.collect(run.buffer.next_rollout())
        compute_targets(rollout, run.learner.normalize_reward(rollout)[0], config.ppo)
    return run


def learn_from(run: Run, samples: PolicySamples, **options: Any) -> dict[str, float]:
    """A policy phase on the first rollout, with these samples in place of those that its rewards
    make.
    """
    with patch.object(phases, "compute_targets", lambda *_: (samples, {})):
        return policy_phase(run.learner, run.buffer.rollout(0), **options)


def test_no_auxiliary_phase_and_one_without_epochs_give_the_same_policy_to_the_bit(
    tmp_path: Path,
) -> None:
    ppo = train(tiny(tmp_path), make_env=corridor)
    ppg = train(tiny(tmp_path, aux=tiny_aux(epochs=0)), make_env=corridor)
    assert weights(ppo).keys() == weights(ppg).keys()
    for name, tensor in weights(ppo).items():
        assert torch.equal(tensor, weights(ppg)[name]), name


@pytest.mark.parametrize("value_path", ["separate", "detached", "shared"])
def test_the_auxiliary_phase_changes_the_policy_network(tmp_path: Path, value_path: str) -> None:
    config = tiny(tmp_path)
    config = replace(config, model=replace(config.model, value_path=value_path))
    ppo = train(config, make_env=corridor)
    ppg = train(replace(config, aux=tiny_aux()), make_env=corridor)
    assert not torch.equal(
        weights(ppo)["encoder.dense.layers.0.weight"], weights(ppg)["encoder.dense.layers.0.weight"]
    )


def test_targets_are_the_rollouts_values_plus_advantages_before_normalization(
    tmp_path: Path,
) -> None:
    config = tiny(tmp_path)
    run = open_run(config)
    rollout = run.buffer.next_rollout()
    run.collect(rollout)
    samples, record = compute_targets(rollout, rollout.reward, config.ppo)
    plain, _ = compute_targets(rollout, rollout.reward, replace(config.ppo, advantage_norm="none"))
    torch.testing.assert_close(rollout.value_target, rollout.value + plain.advantage)
    assert (
        samples.advantage.mean().abs() < 1e-6
        and (samples.advantage.var(correction=0) - 1).abs() < 1e-4
    )
    expected = 1 - (rollout.value_target - rollout.value).var() / rollout.value_target.var()
    assert record["losses/explained_variance"] == pytest.approx(expected.item(), abs=1e-5)


def test_value_epochs_come_first_with_their_own_optimizer_and_leave_the_policy_alone(
    tmp_path: Path,
) -> None:
    config = tiny(tmp_path)
    config = replace(config, ppo=replace(config.ppo, policy_epochs=1, value_epochs=2))
    run = filled(config)
    samples = run.buffer.rollout(0).policy_samples(torch.zeros(4, 8))
    before, seen = weights(run), []
    learn_from(run, samples, on_stage=seen.append)
    assert seen == ["value", "value", "policy"]
    assert set(run.learner.optimizers) == {"policy", "value"}
    run = filled(config)
    samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8))
    before = weights(run)
    loss, _ = phases.PolicyPhaseLoss(run.agent, config.ppo, with_policy=False, with_value=True)(
        samples.as_transitions(), torch.tensor(0.0)
    )
    loss.backward()
    run.learner.optimizers["value"].step()
    changed = {
        name for name, tensor in weights(run).items() if not torch.equal(tensor, before[name])
    }
    assert changed and all(name.startswith("value_") for name in changed), changed


def test_minibatches_of_the_policy_phase_cover_each_step_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path)
    run = filled(config)
    samples = run.buffer.rollout(0).policy_samples(torch.arange(32.0).reshape(4, 8))
    seen: list[Tensor] = []
    original = objectives.surrogate_loss

    def spy(log_prob: Tensor, old: Tensor, advantage: Tensor, *, clip: float | None) -> Tensor:
        seen.append(advantage.flatten())
        return original(log_prob, old, advantage, clip=clip)

    monkeypatch.setattr(phases.objectives, "surrogate_loss", spy)
    learn_from(run, samples)
    assert len(seen) == config.ppo.num_minibatches
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(32.0))


@pytest.mark.parametrize("norm", ["none", "batch", "minibatch"])
def test_whole_episodes_are_learned_from_as_if_the_other_steps_were_not_there(
    tmp_path: Path, norm: Literal["none", "batch", "minibatch"]
) -> None:
    config = tiny(tmp_path).with_updates({
        "ppo.collect_by": "episodes", "ppo.num_steps": 24, "ppo.num_minibatches": 1,
        "ppo.minibatch_by": "transitions", "ppo.advantage_norm": norm,
    })  # fmt: skip
    run = open_run(config)
    for _ in range(2):  # the second rollout begins in the middle of episodes
        run.buffer.clear()
        rollout = run.collect(run.buffer.next_rollout())
    samples, record = compute_targets(rollout, rollout.reward, config.ppo)
    steps = samples.as_transitions()
    dealt = phases.normalize_minibatches(samples, torch.arange(96), config.ppo).as_transitions()
    ended = rollout.terminated | rollout.truncated
    counts = returns.complete_episode_mask(rollout.first, ended).flatten()
    assert 0.2 < counts.float().mean() < 0.9
    assert record["charts/learned_fraction"] == pytest.approx(counts.float().mean().item())
    # The judge: those steps alone, without weights.
    alone = replace(steps.take(counts.nonzero()[:, 0]), weight=None)
    raw, _ = compute_targets(rollout, rollout.reward, replace(config.ppo, advantage_norm="none"))
    advantage = raw.as_transitions().advantage[counts]
    if norm != "none":
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    loss = phases.PolicyPhaseLoss(run.agent, config.ppo, with_policy=True, with_value=True)
    none = torch.tensor(0.0)
    expected, parts = loss(replace(alone, advantage=advantage), none)
    found, noted = loss(dealt, none)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(noted, parts)
    value, target = alone.old_value, alone.value_target
    assert record["losses/explained_variance"] == pytest.approx(
        returns.explained_variance(value, target), rel=1e-4
    )


def test_metrics_are_means_over_all_minibatches_and_epochs(tmp_path: Path) -> None:
    """With a step size of (almost) zero every epoch sees the same network, so that the mean over
    minibatches is the mean over the data.
    """
    config = tiny(tmp_path)
    config = replace(
        config,
        ppo=replace(
            config.ppo, learning_rate=1e-30, policy_epochs=2, value_epochs=2, num_minibatches=4
        ),
    )
    run = filled(config)
    rollout = run.buffer.rollout(0)
    record = learn_from(run, rollout.policy_samples(torch.randn(4, 8)))
    error = 0.5 * (rollout.value - rollout.value_target).square().mean()
    assert record["losses/value_loss"] == pytest.approx(error.item(), rel=1e-4)
    assert record["losses/old_approx_kl"] == pytest.approx(0, abs=1e-6)
    assert record["losses/clipfrac"] == 0


def test_gradient_of_the_divergence_is_exactly_zero_before_the_first_auxiliary_step(
    tmp_path: Path,
) -> None:
    run = filled(tiny(tmp_path, aux=tiny_aux()))
    old = dist_params(run.agent, run.buffer.segments(), executor=run.executor)
    samples = run.buffer.auxiliary_samples(old)
    # One segment at a time, as the parameters were computed: equal shapes run equal kernels.
    for segment in range(len(samples)):
        one = samples.take(slice(segment, segment + 1)).as_transitions()
        output = run.agent(one.obs, one.first, one.state)
        kl = output.policy.kl_from(run.agent.policy_head.distribution(one.old_dist_params))
        assert torch.equal(kl, torch.zeros_like(kl))
        run.agent.zero_grad()
        kl.sum().backward()
        gradients = [
            parameter.grad for parameter in run.agent.parameters() if parameter.grad is not None
        ]
        assert gradients and all(
            torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients
        )


def test_auxiliary_loss_and_gradient_equal_the_written_formula(tmp_path: Path) -> None:
    aux = tiny_aux(beta_clone=0.7, value_coef=0.3)
    run = filled(tiny(tmp_path, aux=aux))
    old = torch.randn(8, 8, 2).log_softmax(-1)
    samples = run.buffer.auxiliary_samples(old).as_transitions()
    loss, _ = phases.AuxiliaryLoss(run.agent, aux)(samples)
    run.agent.zero_grad()
    loss.backward()
    ours = {
        name: parameter.grad.clone()
        for name, parameter in run.agent.named_parameters()
        if parameter.grad is not None
    }

    run.agent.zero_grad()
    out = run.agent(samples.obs, samples.first, samples.state)
    p_old = samples.old_dist_params.exp()
    kl = (p_old * (p_old.log() - out.policy.log_probs)).sum(-1).mean()
    assert out.aux_value is not None
    written = (
        0.7 * kl
        + 0.5 * ((out.aux_value - samples.value_target) ** 2).mean()
        + 0.3 * 0.5 * ((out.value - samples.value_target) ** 2).mean()
    )
    written.backward()
    torch.testing.assert_close(loss, written)
    for name, parameter in run.agent.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, msg=name)


def spy_on_auxiliary_batches(monkeypatch: pytest.MonkeyPatch) -> list[AuxiliarySamples]:
    seen: list[AuxiliarySamples] = []
    original = phases.AuxiliaryLoss.__call__

    def spy(
        loss: phases.AuxiliaryLoss, samples: AuxiliarySamples, *coefficients: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(samples)
        return original(loss, samples, *coefficients)

    monkeypatch.setattr(phases.AuxiliaryLoss, "__call__", spy)
    return seen


def test_policy_epochs_first_learn_what_joint_ones_learn_if_each_is_one_step(
    tmp_path: Path,
) -> None:
    """Of two networks each step moves its own, so that their order does not matter."""
    base = tiny(tmp_path).with_updates({"ppo.num_minibatches": 1})
    seen: list[str] = []
    joint, apart = (
        open_run(base.with_updates({"ppo.epoch_order": order}))
        for order in ("value_first", "policy_first")
    )
    for run in (joint, apart):
        rollout = run.collect(run.buffer.next_rollout())
        policy_phase(run.learner, rollout, on_stage=seen.append)
    assert seen == ["policy", "policy", "value"]
    for name, tensor in weights(joint).items():
        torch.testing.assert_close(weights(apart)[name], tensor)


@pytest.mark.parametrize("value_path", ["separate", "shared", "detached"])
def test_values_are_learned_after_policy_epochs_that_were_stopped(
    tmp_path: Path, value_path: str
) -> None:
    """A divergence above any bound ends the policy's part after one of its three epochs."""
    changes = {"ppo.policy_epochs": 3, "ppo.value_epochs": 2, "ppo.target_kl": 1e-12}
    changes |= {"ppo.epoch_order": "policy_first", "model.value_path": value_path}
    run = open_run(tiny(tmp_path).with_updates(changes))
    seen: list[str] = []
    policy_phase(run.learner, run.collect(run.buffer.next_rollout()), on_stage=seen.append)
    assert seen == ["policy", "value", "value"]


def test_each_segment_is_visited_once_an_auxiliary_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aux = tiny_aux(epochs=3)
    run = filled(tiny(tmp_path, aux=aux))
    # 8 segments of 8 steps, each step known by its number.
    run.buffer.rollouts.value_target.copy_(torch.arange(64.0).reshape(2, 4, 8))
    seen = spy_on_auxiliary_batches(monkeypatch)
    auxiliary_phase(run.learner, run.buffer)
    batches = [samples.value_target.flatten() for samples in seen]
    assert len(batches) == 3 * 4  # epochs × (N_a per iteration × N_π)
    for epoch in range(3):
        steps = torch.cat(batches[4 * epoch : 4 * epoch + 4])
        assert torch.equal(steps.sort().values, torch.arange(64.0))
        # Whole segments.
        assert all(
            torch.equal(batch[:8], torch.arange(8) + batch[0]) and batch[0] % 8 == 0
            for batch in batches
        )
    assert not torch.equal(torch.cat(batches[:4]), torch.cat(batches[4:8])), (
        "epochs have the same order"
    )


def test_fewer_minibatches_are_still_drawn_from_all_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aux = tiny_aux(epochs=8, iterations_per_epoch=1)
    run = filled(tiny(tmp_path, aux=aux))
    run.buffer.rollouts.value_target.copy_(torch.arange(64.0).reshape(2, 4, 8))
    seen = spy_on_auxiliary_batches(monkeypatch)
    auxiliary_phase(run.learner, run.buffer)
    assert len(seen) == 8 * 2  # N · N_a minibatches instead of N_π · N_a
    epochs = [
        torch.cat([seen[2 * epoch + part].value_target.flatten() for part in range(2)])
        for epoch in range(8)
    ]
    both = [bool((steps < 32).any() and (steps >= 32).any()) for steps in epochs]
    # Four of eight segments: by chance one in 35 epochs does.
    assert sum(both) >= 6, "epochs used one of the two iterations alone"


def test_the_old_policy_is_computed_once_a_phase_by_the_policy_network_before_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aux = tiny_aux(epochs=3)
    run = filled(tiny(tmp_path, aux=aux))
    expected = dist_params(run.agent, run.buffer.segments(), executor=run.executor)
    calls = []
    original = phases.dist_params
    monkeypatch.setattr(phases, "dist_params", lambda *a, **k: calls.append(1) or original(*a, **k))
    seen = spy_on_auxiliary_batches(monkeypatch)
    auxiliary_phase(run.learner, run.buffer)
    assert len(calls) == 1
    last_epoch = (
        torch.cat([samples.old_dist_params.flatten() for samples in seen[-4:]]).sort().values
    )
    assert torch.equal(last_epoch, expected.flatten().sort().values)


def test_a_larger_beta_keeps_the_policy_nearer_to_what_it_was(tmp_path: Path) -> None:
    divergence = {}
    for beta in (0.0, 100.0):
        aux = tiny_aux(epochs=20, beta_clone=beta, learning_rate=1e-2)
        run = filled(tiny(tmp_path, aux=aux))
        old = dist_params(run.agent, run.buffer.segments(), executor=run.executor)
        auxiliary_phase(run.learner, run.buffer)
        new = run.agent.policy_head.distribution(
            dist_params(run.agent, run.buffer.segments(), executor=run.executor)
        )
        divergence[beta] = new.kl_from(run.agent.policy_head.distribution(old)).mean().item()
    assert divergence[100.0] < 0.1 * divergence[0.0]


def phases_run(config: Config) -> list[int]:
    """Iterations after which an auxiliary phase ran."""
    ran = []
    run = open_run(config)
    learn(
        run,
        on_iteration=lambda run, record: (
            ran.append(run.iteration) if "losses/aux/kl_loss" in record else None
        ),
    )
    return ran


def test_auxiliary_phases_come_every_n_iterations_and_never_after_the_budget(
    tmp_path: Path,
) -> None:
    config = tiny(tmp_path, aux=tiny_aux())  # 32 steps an iteration, phases of 2
    # 6 iterations: none after the sixth.
    assert phases_run(replace(config, total_env_steps=192)) == [
        2,
        4,
    ]
    # The seventh is trained, though its phase is not full.
    assert phases_run(replace(config, total_env_steps=224)) == [
        2,
        4,
        6,
    ]


def test_every_kth_auxiliary_phase_can_be_run_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux(run_every=2), total_env_steps=320)
    assert phases_run(config) == [4, 8]


def test_leftover_iterations_are_trained(tmp_path: Path) -> None:
    # 5 iterations, one phase of 4.
    config = tiny(tmp_path, aux=tiny_aux(every=4), total_env_steps=160)
    seen: list[dict[str, Tensor]] = []
    run = train(
        config, make_env=corridor, on_iteration=lambda run, record: seen.append(weights(run))
    )
    assert run.iteration == 5 and run.env_steps == 160
    assert not torch.equal(
        seen[3]["policy_head.linear.weight"], seen[4]["policy_head.linear.weight"]
    )


def test_a_shared_auxiliary_optimizer_is_the_policys(tmp_path: Path) -> None:
    run = open_run(tiny(tmp_path, aux=tiny_aux(optimizer="shared")))
    assert run.learner.optimizers["aux"] is run.learner.optimizers["policy"]
    run = open_run(tiny(tmp_path, aux=tiny_aux()))
    assert run.learner.optimizers["aux"] is not run.learner.optimizers["policy"]


def test_learning_rates_follow_progress_in_both_phases(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux(learning_rate=2e-3), total_env_steps=128)
    config = replace(config, ppo=replace(config.ppo, schedule="linear", learning_rate=1e-3))
    rates: list[tuple[float, float]] = []

    def note(run: Run, record: dict[str, float]) -> None:
        rates.append(
            (record["charts/learning_rate"], run.learner.optimizers["aux"].param_groups[0]["lr"])
        )

    train(config, make_env=corridor, on_iteration=note)
    assert rates == [pytest.approx((1e-3 * part, 2e-3 * part)) for part in (1.0, 0.75, 0.5, 0.25)]


def everything(samples: PolicySamples) -> Minibatch[PolicySamples]:
    return Minibatch(samples, torch.arange(len(samples)), split=False)


def test_micro_batches_give_the_gradient_of_the_whole_minibatch(tmp_path: Path) -> None:
    run = filled(tiny(tmp_path))
    samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8)).as_transitions()
    gradients = []
    for size in (None, 5):  # 32 steps in pieces of 5: the last one is smaller
        run.executor.plan = replace(
            run.executor.plan, micro_batch=dict.fromkeys(("policy", "value", "aux"), size)
        )
        loss = phases.PolicyPhaseLoss(run.agent, run.config.ppo, with_policy=True, with_value=True)
        frozen = torch.optim.Adam(run.agent.parameters(), lr=0.0)
        step = run.executor.gradient_step(
            loss, StepSettings("policy", run.agent.networks(), frozen, None)
        )
        step(everything(samples), torch.tensor(0.0))
        gradients.append(
            [
                parameter.grad.clone()
                for parameter in run.agent.parameters()
                if parameter.grad is not None
            ]
        )
    for whole, pieces in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_clipped_by_the_norm_of_each_network_or_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    run = filled(tiny(tmp_path))
    samples = run.buffer.rollout(0).policy_samples(100 * torch.randn(4, 8)).as_transitions()

    class Large(phases.PolicyPhaseLoss):
        def __call__(
            self, samples: PolicySamples, *coefficients: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            loss = torch.stack(
                [100 * parameter.square().sum() for parameter in run.agent.parameters()]
            ).sum()
            return loss, {"seen": torch.tensor(7.0)}

    optimizer, given = torch.optim.Adam(run.agent.parameters(), lr=0.0), []
    monkeypatch.setattr(
        optimize,
        "step_",
        lambda optimizer, parameters, gradients, **_: given.append(
            dict(zip(parameters, gradients, strict=True))
        ),
    )
    networks = [list(run.agent.parameters())] if together else run.agent.networks()
    unclipped = [200 * parameter.norm() for network in networks for parameter in network]
    loss = Large(run.agent, run.config.ppo, with_policy=True, with_value=True)
    step = run.executor.gradient_step(loss, StepSettings("policy", networks, optimizer, 0.5))
    names, (seen, norm), weight = step(everything(samples))
    assert (names, seen, weight) == (("seen", "gradients/policy_norm"), 7.0, 32)
    assert norm.item() == pytest.approx(torch.stack(unclipped).norm().item(), rel=1e-4)
    assert len(networks) == (1 if together else 2)
    for network in networks:
        clipped = torch.stack([given[0][parameter].norm() for parameter in network]).norm()
        assert clipped.item() == pytest.approx(0.5, rel=1e-4)


def with_ppo(config: Config, **changes: object) -> Config:
    return replace(config, ppo=replace(config.ppo, **changes))


def test_targets_of_the_other_estimators_are_returns(tmp_path: Path) -> None:
    run = filled(tiny(tmp_path))
    rollout, reward = run.buffer.rollout(0), torch.randn(4, 8)
    args = (reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated)
    settings = with_ppo(run.config, estimator="n_step", n_step=3, advantage_norm="none").ppo
    samples, _ = compute_targets(rollout, reward, settings)
    torch.testing.assert_close(rollout.value_target, returns.n_step_return(*args, gamma=0.9, n=3))
    torch.testing.assert_close(samples.advantage, rollout.value_target - rollout.value)
    settings = with_ppo(run.config, estimator="monte_carlo", advantage_norm="none").ppo
    samples, _ = compute_targets(rollout, reward, settings)
    torch.testing.assert_close(
        rollout.value_target, returns.monte_carlo_return(reward, *args[2:], gamma=0.9)
    )
    torch.testing.assert_close(samples.advantage, rollout.value_target - rollout.value)


def test_reinforce_weighs_log_probabilities_by_plain_returns_and_leaves_values_alone(
    tmp_path: Path,
) -> None:
    plain = dict(
        baseline=False,
        estimator="monte_carlo",
        objective="log_prob",
        clip=None,
        advantage_norm="none",
        num_minibatches=1,
        entropy_coef=0.0,
    )
    config = with_ppo(tiny(tmp_path), **plain)
    run = filled(config)
    rollout = run.buffer.rollout(0)
    samples, record = compute_targets(rollout, rollout.reward, config.ppo)
    assert not record
    # The return of each step, with nothing in place of what comes after the rollout, written out.
    expected = torch.zeros(4, 8)
    for env in range(4):
        for t in range(8):
            for k in range(t, 8):
                expected[env, t] += 0.9 ** (k - t) * rollout.reward[env, k]
                if rollout.terminated[env, k] or rollout.truncated[env, k]:
                    break
    torch.testing.assert_close(samples.advantage, expected)
    before = weights(run)
    policy, _ = run.agent.policy(rollout.obs, rollout.first, rollout.state)
    written = -(expected * policy.log_prob(rollout.action)).mean()
    wanted = dict(
        zip(
            before,
            torch.autograd.grad(written, list(run.agent.parameters()), allow_unused=True),
            strict=True,
        )
    )
    learn_from(run, samples)
    for name, parameter in run.agent.named_parameters():
        assert (parameter.grad is None) == (wanted[name] is None), name
        if wanted[name] is not None:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-7, msg=name)
        else:
            assert name.startswith("value_") and torch.equal(before[name], parameter)


def test_the_exact_penalty_is_the_divergence_from_the_policy_before_the_update(
    tmp_path: Path,
) -> None:
    config = with_ppo(tiny(tmp_path), kl_penalty=2.0, kl_estimate="exact", entropy_coef=0.0)
    run = filled(config)
    samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8))
    old = dist_params(run.agent, samples, executor=run.executor)
    before = run.agent.policy(samples.obs, samples.first, samples.state)[0]
    with torch.no_grad():
        for parameter in run.agent.policy_head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    after = run.agent.policy(samples.obs, samples.first, samples.state)[0]
    divergence = after.kl_from(before).mean()

    def loss(weight: float) -> Tensor:
        with_old = replace(samples, old_dist_params=old)
        return phases.PolicyPhaseLoss(run.agent, config.ppo, with_policy=True, with_value=False)(
            with_old, torch.tensor(weight)
        )[0]

    assert divergence > 1e-3
    torch.testing.assert_close(loss(2.0) - loss(0.0), 2 * divergence)


def test_the_exact_penalty_keeps_the_old_policy_over_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_ppo(
        tiny(tmp_path), kl_penalty=1.0, kl_estimate="exact", policy_epochs=3, value_epochs=3
    )
    run = filled(config)
    samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8))
    old = dist_params(run.agent, samples, executor=run.executor)
    seen: list[Tensor] = []
    original = run.agent.policy_head.distribution
    monkeypatch.setattr(
        run.agent.policy_head,
        "distribution",
        lambda parameters: (seen.append(parameters), original(parameters))[1],
    )
    learn_from(run, samples)
    # The head makes its own policies with it too.
    seen = [parameters for parameters in seen if not parameters.requires_grad][-6:]
    for epoch in range(3):
        rows = torch.cat(
            [batch.reshape(-1, old.shape[-1]) for batch in seen[2 * epoch : 2 * epoch + 2]]
        )
        torch.testing.assert_close(
            rows.sort(0).values, old.reshape(-1, old.shape[-1]).sort(0).values
        )


@pytest.mark.parametrize("value_path", ["separate", "shared", "detached"])
def test_epochs_stop_when_the_divergence_after_one_is_too_large(
    tmp_path: Path, value_path: str
) -> None:
    config = with_ppo(
        tiny(tmp_path), policy_epochs=5, value_epochs=5, learning_rate=0.05, target_kl=1e9
    )
    config = replace(config, model=replace(config.model, value_path=value_path))

    def after(target: float, epochs: int = 5) -> tuple[list[str], float, Run]:
        torch.manual_seed(0)
        run, seen = (
            filled(with_ppo(config, target_kl=target, policy_epochs=epochs, value_epochs=epochs)),
            [],
        )
        samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8))
        record = learn_from(run, samples, on_stage=seen.append)
        with torch.no_grad():
            log_prob = run.agent.policy(samples.obs, samples.first, samples.state)[0].log_prob(
                samples.action
            )
        log_ratio = log_prob - samples.old_log_prob
        assert record["losses/epoch_kl"] == pytest.approx(
            (log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-3, abs=1e-7
        )
        return seen, record["losses/epoch_kl"], run

    seen, last, _ = after(1e9)
    assert seen == ["policy"] * 5 and last > 1e-3
    # The first epoch after which the divergence is above the target is the last one of the policy.
    divergences = [after(1e-12)[1], *(after(1e9, epochs=n)[1] for n in range(2, 6))]
    target = divergences[1] * 0.999
    first = next(n for n, kl in enumerate(divergences, start=1) if kl > target)
    seen, stopped_at, stopped = after(target)
    assert seen == ["policy"] * first + (["value"] * (5 - first) if value_path != "shared" else [])
    assert stopped_at == divergences[first - 1]
    if value_path == "separate":
        _, _, unfinished = after(1e9 if first > 1 else 1e-12, epochs=max(first, 2))
        for name, tensor in weights(stopped).items():
            assert torch.equal(tensor, weights(unfinished)[name]) != name.startswith("value_"), name


def test_with_one_minibatch_the_divergence_is_that_after_the_step(tmp_path: Path) -> None:
    config = with_ppo(
        tiny(tmp_path),
        num_minibatches=1,
        learning_rate=0.05,
        kl_penalty=1.0,
        kl_penalty_target=0.01,
    )
    run = filled(config)
    samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8))
    record = learn_from(run, samples)
    assert (
        record["losses/approx_kl"] == pytest.approx(0, abs=1e-6)
        and record["losses/epoch_kl"] > 1e-4
    )


def test_steps_that_do_not_count_are_in_no_divergence(tmp_path: Path) -> None:
    steered = {"kl_penalty": 1.0, "kl_penalty_target": 0.01}
    run = filled(with_ppo(tiny(tmp_path), num_minibatches=1, learning_rate=0.05, **steered))
    weight = torch.zeros(4, 8)
    weight[:2] = 2.0
    samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8), weight)
    record = learn_from(run, samples)
    with torch.no_grad():
        policy, _ = run.agent.policy(samples.obs, samples.first, samples.state)
    log_ratio = (policy.log_prob(samples.action) - samples.old_log_prob)[:2]
    expected = (log_ratio.exp() - 1 - log_ratio).mean().item()
    assert expected > 1e-4 and record["losses/epoch_kl"] == pytest.approx(expected, rel=1e-3)


def test_value_statistics_are_of_the_steps_that_count(tmp_path: Path) -> None:
    run = open_run(
        tiny(tmp_path).with_updates({
            "ppo.collect_by": "episodes", "ppo.num_steps": 24, "ppo.num_minibatches": 1,
            "ppo.minibatch_by": "transitions", "value_norm": VALUE_NORM,
        })
    )  # fmt: skip
    rollout = run.collect(run.buffer.next_rollout())
    counts = returns.complete_episode_mask(rollout.first, rollout.terminated | rollout.truncated)
    phases.policy_phase(run.learner, rollout)
    assert run.agent.value_normalizer is not None
    (count,) = (
        value for name, value in run.agent.value_normalizer.state_dict().items()
        if name.endswith("count")
    )  # fmt: skip
    assert int(count) == int(counts.sum()) < counts.numel()


def test_advantages_are_made_anew_before_each_further_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_ppo(tiny(tmp_path), recompute_advantages=True, policy_epochs=3, value_epochs=3)
    run = filled(config)
    rollout = run.buffer.rollout(0)
    kept = rollout.next_value.clone()
    calls: list[PolicySamples] = []
    original = compute_targets

    def spy(*args: Any) -> tuple[PolicySamples, dict[str, float]]:
        with torch.no_grad():
            value = run.agent.value(rollout.obs, rollout.first, rollout.state)
        samples, record = original(*args)
        calls.append(samples)
        torch.testing.assert_close(rollout.value, value)
        ended = rollout.terminated | rollout.truncated
        expected = torch.where(ended[:, :-1], kept[:, :-1], value[:, 1:])
        torch.testing.assert_close(rollout.next_value, torch.cat([expected, kept[:, -1:]], dim=1))
        return samples, record

    monkeypatch.setattr(phases, "compute_targets", spy)
    policy_phase(run.learner, rollout)
    assert len(calls) == 3
    assert not torch.equal(calls[1].advantage, calls[2].advantage)


def test_values_are_clipped_around_the_rollouts_even_if_they_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_ppo(
        tiny(tmp_path), recompute_advantages=True, policy_epochs=3, value_epochs=3, value_clip=0.2
    )
    run = filled(config)
    rollout = run.buffer.rollout(0)
    wanted, seen = rollout.value.flatten().sort().values.clone(), []
    original = objectives.value_loss

    def spy(value: Tensor, target: Tensor, old: Tensor, *, clip: float | None) -> Tensor:
        seen.append(old.flatten())
        return original(value, target, old, clip=clip)

    monkeypatch.setattr(phases.objectives, "value_loss", spy)
    policy_phase(run.learner, rollout, rollout.reward)
    for epoch in range(3):
        assert torch.equal(torch.cat(seen[2 * epoch : 2 * epoch + 2]).sort().values, wanted)


def test_the_value_loss_is_in_the_units_of_normalized_values(tmp_path: Path) -> None:
    config = replace(tiny(tmp_path), value_norm=VALUE_NORM)
    run = filled(config)
    assert run.agent.value_normalizer is not None
    run.agent.value_normalizer.update(torch.tensor([[0.0, 8.0]]))  # mean 4, deviation 4
    samples = run.buffer.rollout(0).policy_samples(torch.zeros(4, 8))
    loss, _ = phases.PolicyPhaseLoss(run.agent, config.ppo, with_policy=False, with_value=True)(
        samples, torch.tensor(0.0)
    )
    value = run.agent.value(samples.obs, samples.first, samples.state)
    torch.testing.assert_close(loss, 0.5 * ((value - samples.value_target) / 4).square().mean())


def test_an_auxiliary_phase_that_was_left_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left twice, in the first epoch and in the third.

    The same weights and metrics as without a break.
    """
    config = tiny(tmp_path, aux=tiny_aux(epochs=3), obs_norm=OBS_NORM)
    whole, broken = filled(config), filled(config)
    expected = auxiliary_phase(whole.learner, whole.buffer)
    step, count = broken.executor.gradient_step, 0

    def interrupted(*args: Any) -> Callable[..., Any]:
        make = step(*args)

        def counted(*minibatch: Any) -> Any:
            nonlocal count
            count += 1
            if count in (3, 12):
                raise KeyboardInterrupt
            return make(*minibatch)

        return counted

    monkeypatch.setattr(broken.executor, "gradient_step", interrupted)
    for epoch, done in ((0, 2), (2, 2)):  # four minibatches an epoch
        with pytest.raises(KeyboardInterrupt):
            auxiliary_phase(broken.learner, broken.buffer)
        assert broken.buffer.progress is not None
        assert (broken.buffer.progress.epoch, broken.buffer.progress.num_done) == (epoch, done)
    found = auxiliary_phase(broken.learner, broken.buffer)
    assert broken.buffer.progress is None
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(broken)[name]), name
    assert {name: value for name, value in found.items() if not name.startswith("time/")} == {
        name: value for name, value in expected.items() if not name.startswith("time/")
    }


def spied_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> tuple[Run, list[AuxiliarySamples]]:
    """A run after its first auxiliary phase, and the minibatches of that."""
    seen: list[AuxiliarySamples] = []
    plain = phases.AuxiliaryLoss.__call__

    def spy(loss: phases.AuxiliaryLoss, samples: AuxiliarySamples, *coefficients: Tensor) -> Any:
        seen.append(samples)
        return plain(loss, samples, *coefficients)

    monkeypatch.setattr(phases.AuxiliaryLoss, "__call__", spy)
    run = filled(tiny(tmp_path, aux=tiny_aux(every=2, epochs=2), **changes))
    run.buffer.rollouts.value_target.copy_(torch.arange(64.0).view(2, 4, 8))
    return run, seen


def test_the_last_iterations_alone_are_dealt_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch has all of the second rollout's targets, 32 to 63, and none of the first's."""
    run, seen = spied_phase(tmp_path, monkeypatch)
    aux = replace(tiny_aux(every=2, epochs=2), iterations_per_epoch=1, iterations_from="last")
    run.learner.config = replace(run.config, aux=aux)
    auxiliary_phase(run.learner, run.buffer)
    targets = torch.cat([samples.value_target.flatten() for samples in seen])
    by_epoch = targets.view(2, -1).sort().values
    assert torch.equal(by_epoch, torch.arange(32.0, 64.0).expand(2, -1))
    assert len(seen) == 2 * aux.num_minibatches


def test_targets_of_a_phase_can_be_those_of_its_value_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against GAE by its sum, from values of now and rewards by the statistics of now."""
    norm = RewardNormConfig(per="rollout")
    run, seen = spied_phase(tmp_path, monkeypatch, reward_norm=norm)
    run.learner.config = replace(
        run.config, aux=replace(tiny_aux(every=2, epochs=1), recompute_targets=True)
    )
    normalizer = run.learner.reward_normalizer
    assert normalizer is not None
    normalizer.moments.update(torch.tensor([0.0, 6.0], dtype=torch.float64))
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    rollouts, ppo = run.buffer.rollouts, run.config.ppo
    rollouts.reward.copy_(torch.rand(2, 4, 8))
    rollouts.terminated.zero_()
    rollouts.truncated.zero_()
    rollouts.first.zero_()
    rollouts.next_value.copy_(torch.rand(2, 4, 8))
    last = rollouts.next_value[:, :, -1].clone()
    reward = (rollouts.reward / normalizer.scale).clamp(-norm.clip, norm.clip)
    with torch.no_grad():
        value = run.agent.value(
            rollouts.obs.flatten(0, 1), rollouts.first.flatten(0, 1), rollouts.state.flatten(0, 1)
        ).view(2, 4, 8)
    last[0] = value[1, :, 0]  # the second rollout goes on where the first stops
    rollouts.reward_scale.copy_(normalizer.scale)
    following = torch.cat([value[:, :, 1:], last.unsqueeze(-1)], dim=-1)
    delta = reward + ppo.gamma * following - value
    decay = ppo.gamma * ppo.gae_lambda
    expected = torch.empty_like(value)
    for t in range(8):
        weights = decay ** torch.arange(8.0 - t)
        expected[:, :, t] = value[:, :, t] + (delta[:, :, t:] * weights).sum(-1)
    auxiliary_phase(run.learner, run.buffer)
    told = torch.cat([samples.value_target.flatten() for samples in seen]).sort().values
    torch.testing.assert_close(told, expected.flatten().sort().values)
    for name, tensor in normalizer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("estimator", ["gae", "monte_carlo"])
def test_new_targets_have_the_scale_of_rewards_of_now_throughout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: Literal["gae", "monte_carlo"]
) -> None:
    """Each step pays 1 and γ = 0.9: it is worth 10, over what rewards are divided by.

    Each rollout was valued by what had been learned before it, and moved the scale itself.
    """
    run, seen = spied_phase(tmp_path, monkeypatch, reward_norm=RewardNormConfig(per="rollout"))
    run.learner.config = replace(
        run.config,
        ppo=replace(run.config.ppo, gamma=0.9, estimator=estimator),
        aux=replace(tiny_aux(every=2, epochs=1), recompute_targets=True),
    )
    normalizer, rollouts = run.learner.reward_normalizer, run.buffer.rollouts
    assert normalizer is not None
    rollouts.reward.fill_(1.0)
    for flags in (rollouts.first, rollouts.terminated, rollouts.truncated):
        flags.zero_()
    rollouts.truncated[:, 1, 3], rollouts.first[:, 1, 4] = True, True
    rollouts.truncated[0, 2, -1], rollouts.first[1, 2, 0] = True, True
    rollouts.first[1, 3, 0] = True  # begun anew by a resumed run, and ended in no rollout
    normalizer.moments.sum_of_squares.copy_(normalizer.moments.count)
    scales = []
    for slot in range(2):
        scales.append(float(normalizer.scale))
        rollouts.next_value[slot] = 10 / scales[-1]
        run.learner.normalize_reward(run.buffer.rollout(slot))
    now = float(normalizer.scale)
    assert now > 1.1 * scales[1] > 1.2 * scales[0], "the scale moves, or nothing is shown"
    # The first environment goes on: its next rollout has the value, whatever it was before.
    rollouts.next_value[0, 0, -1] = 99.0
    monkeypatch.setattr(  # the value of a new episode is not that of the one before
        type(run.agent), "value", lambda self, obs, first, *_, **_o: 10 / now + 4 * first.float()
    )
    auxiliary_phase(run.learner, run.buffer)
    told = torch.cat([samples.value_target.flatten() for samples in seen])
    assert len(told) == rollouts.reward.numel()
    torch.testing.assert_close(told, torch.full((len(told),), 10 / now))


def test_values_of_a_scale_that_is_not_known_are_kept(tmp_path: Path) -> None:
    """Those of the first rollout; and where rewards came from elsewhere, in whatever slot."""
    run = filled(tiny(tmp_path, reward_norm=RewardNormConfig(per="rollout")))
    first = run.buffer.rollout(0)
    first.next_value.fill_(3.0)
    assert torch.equal(run.learner.rescale_to_current(first)[1], first.next_value)
    first.reward.add_(torch.arange(8.0))
    run.learner.normalize_reward(first)
    assert not torch.allclose(run.learner.rescale_to_current(first)[1], first.next_value)
    run.buffer.clear()
    again = run.buffer.next_rollout()
    assert torch.equal(run.learner.rescale_to_current(again)[1], first.next_value)


def test_a_step_says_of_how_many_steps_it_is_a_mean(tmp_path: Path) -> None:
    run = filled(tiny(tmp_path))
    samples = run.buffer.rollout(0).policy_samples(torch.randn(4, 8))
    minibatch = Minibatch(samples, torch.arange(4), split=True)
    loss = phases.PolicyPhaseLoss(run.agent, run.config.ppo, with_policy=True, with_value=True)
    step = run.executor.gradient_step(loss, run.learner.settings("policy"))
    for one in (minibatch, minibatch.materialize()):
        assert step(one, torch.tensor(0.0))[2] == 32


def test_observation_statistics_count_each_observation_once(tmp_path: Path) -> None:
    """Over policy and auxiliary phases."""
    config = tiny(tmp_path, aux=tiny_aux(every=2), total_env_steps=192)
    run = train(replace(config, obs_norm=OBS_NORM), make_env=corridor)
    counts = [
        tensor.item()
        for name, tensor in run.agent.reader.state_dict().items()
        if name.endswith("count")
    ]
    assert counts == [run.env_steps] == [192]


def test_masks_hold_in_the_auxiliary_phase(tmp_path: Path) -> None:
    """The unchanged policy has a divergence of 0 from itself, which needs its masks."""
    config = tiny(tmp_path, aux=tiny_aux(every=1))
    with start_run(config, make_env=lambda: Levers(masked=True)) as run:
        compute_targets(run.collect(run.buffer.next_rollout()), torch.zeros(4, 8), config.ppo)
        before = dist_params(run.agent, run.buffer.segments(), executor=run.executor, phase="aux")
        samples = run.buffer.auxiliary_samples(before)
        assert samples.action_mask is not None and not samples.action_mask.all()
        loss = phases.AuxiliaryLoss(run.agent, config.aux)
        _, terms = loss(samples)
        assert terms["losses/aux/kl_loss"].item() == pytest.approx(0, abs=1e-6)
        _, terms = loss(replace(samples, action_mask=None))
        assert terms["losses/aux/kl_loss"].item() > 1e-3


def test_values_of_the_first_rollout_are_read_in_the_units_of_its_targets(tmp_path: Path) -> None:
    config = replace(tiny(tmp_path), value_norm=VALUE_NORM)
    run = open_run(config)
    rollout = run.collect(run.buffer.next_rollout())
    raw = rollout.value.clone()  # the heads' outputs: nothing is normalized yet
    seen: list[Tensor] = []
    with patch.object(phases, "_shuffled_minibatches", lambda *_, **__: iter(())):
        policy_phase(run.learner, rollout, on_stage=lambda _: seen.append(rollout.value.clone()))
    normalizer = run.agent.value_normalizer
    assert normalizer is not None
    mean, std = normalizer.units
    torch.testing.assert_close(seen[0], (raw * std + mean).float())
    assert not torch.allclose(seen[0], raw)
