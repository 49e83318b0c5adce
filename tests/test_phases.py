"""The two phases: what they compute, on what, how often; PPO is PPG without its auxiliary phase."""

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Generator, Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from phasicrl import objectives, optimize, phases, returns
from phasicrl.algorithm import learn, resume, train
from phasicrl.config import ActionConfig, AuxConfig, Config, RewardNormConfig
from phasicrl.execution.step import AdamSettings
from phasicrl.phases import auxiliary_phase, compute_dist_params, compute_targets, policy_phase
from phasicrl.rollout import AuxiliarySamples, Minibatch, PolicySamples, Rollout
from phasicrl.training.build import start_run
from phasicrl.training.run import Run
from tests.helpers import OBS_NORM, VALUE_NORM, Levers, corridor, open_run, tiny, tiny_aux

EVERY_PATH = pytest.mark.parametrize("value_path", ["separate", "shared", "detached"])


def with_ppo(tmp_path: Path, aux: AuxConfig | None = None, **changes: Any) -> Config:
    return tiny(tmp_path, aux=aux).with_updates({f"ppo.{name}": x for name, x in changes.items()})


def weights(run: Run) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.agent.state_dict().items()}


def changed(run: Run, before: dict[str, Tensor]) -> set[str]:
    """Return the names of the weights that differ from those before."""
    return {name for name, tensor in weights(run).items() if not torch.equal(tensor, before[name])}


def filled(config: Config, make_env: Any = corridor) -> Run:
    """Start a run whose buffer holds a phase of rollouts with targets, before any training."""
    run = open_run(config, make_env)
    while not run.buffer.is_full:
        rollout = run.collect(run.buffer.next_rollout())
        compute_targets(rollout, run.learner.normalize_reward(rollout)[0], config.ppo)
    return run


def samples_of(run: Run, weight: Tensor | None = None) -> PolicySamples:
    """Return the first rollout with random advantages."""
    advantage = torch.randn(4, 8, generator=Generator().manual_seed(0))
    return run.buffer.rollout(0).policy_samples(advantage, weight)


def learn_from(run: Run, samples: PolicySamples, **options: Any) -> dict[str, float]:
    """Run a policy phase with these samples in place of the rollout's own."""
    with patch.object(phases, "compute_targets", lambda *_: (samples, {})):
        return policy_phase(run.learner, run.buffer.rollout(0), **options)


def loss_of(
    run: Run, samples: PolicySamples, kl_coef: float = 0.0, *, policy: bool = True,
    value: bool = True,
) -> Tensor:  # fmt: skip
    loss = phases.PolicyPhaseLoss(run.agent, run.config.ppo, policy, value)
    return loss(samples, torch.tensor(kl_coef), *run.learner.policy_loss_coefficients()[1:])[0]


def stages(run: Run) -> list[str]:
    """Return the stages of a policy phase on a new rollout."""
    seen: list[str] = []
    policy_phase(run.learner, run.collect(run.buffer.next_rollout()), on_stage=seen.append)
    return seen


def auxiliary_batches(run: Run) -> list[AuxiliarySamples]:
    """Run an auxiliary phase; return its minibatches."""
    seen: list[AuxiliarySamples] = []
    original = phases.AuxiliaryLoss.__call__

    def spy(loss: phases.AuxiliaryLoss, samples: AuxiliarySamples, *rest: Tensor) -> Any:
        seen.append(samples)
        return original(loss, samples, *rest)

    with patch.object(phases.AuxiliaryLoss, "__call__", spy):
        auxiliary_phase(run.learner, run.buffer)
    return seen


def targets_of(batches: list[AuxiliarySamples]) -> Tensor:
    return torch.cat([samples.value_target.flatten() for samples in batches])


def numbered(config: Config) -> Run:
    """Start a run with two filled rollouts, whose value targets number the 64 steps."""
    run = filled(config)
    run.buffer.rollouts.value_target.copy_(torch.arange(64.0).view(2, 4, 8))
    return run


def recurse(term: Tensor, factor: float) -> Tensor:
    """Return `x_t = term_t + factor · x_{t+1}` along the last axis, step by step."""
    result = term.clone()
    for t in range(term.shape[-1] - 2, -1, -1):
        result[..., t] += factor * result[..., t + 1]
    return result


# The policy phase


def test_ppo_is_ppg_without_auxiliary_epochs_to_the_bit(tmp_path: Path) -> None:
    ppo = train(tiny(tmp_path), make_env=corridor)
    ppg = train(tiny(tmp_path, aux=tiny_aux(epochs=0)), make_env=corridor)
    assert weights(ppo).keys() == weights(ppg).keys() and not changed(ppo, weights(ppg))


def test_value_epochs_come_first_and_leave_the_policy_alone(tmp_path: Path) -> None:
    run, seen = filled(with_ppo(tmp_path, policy_epochs=1, value_epochs=2)), []
    before = weights(run)
    note = lambda name: seen.append((name, changed(run, before)))  # noqa: E731
    learn_from(run, samples_of(run), on_stage=note)
    assert [name for name, _ in seen] == ["value", "value", "policy"]
    assert set(run.learner.optimizers) == {"policy", "value"}
    assert seen[2][1] and all(name.startswith("value_") for name in seen[2][1])
    of_value = {name: tensor for name, tensor in weights(run).items() if name in seen[2][1]}
    assert changed(run, before) > of_value.keys()


@pytest.mark.parametrize("norm", ["batch", "minibatch"])
def test_minibatches_cover_each_step_once_an_epoch(tmp_path: Path, norm: str) -> None:
    run, seen = filled(with_ppo(tmp_path, advantage_norm=norm)), []
    samples = run.buffer.rollout(0).policy_samples(torch.arange(32.0).reshape(4, 8))
    original = objectives.surrogate_loss

    def spy(log_prob: Tensor, old: Tensor, advantage: Tensor, *, clip: Tensor) -> Tensor:
        seen.append(advantage.flatten())
        return original(log_prob, old, advantage, clip=clip)

    with patch.object(objectives, "surrogate_loss", spy):
        learn_from(run, samples)
    assert len(seen) == run.config.ppo.num_minibatches
    if norm == "batch":
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(32.0))
    else:
        assert all(abs(advantage.mean()) < 1e-5 for advantage in seen)


@pytest.mark.parametrize(("norm", "has_numbers"), [
    ("none", False), ("batch", False), ("minibatch", False), ("batch", True),
])  # fmt: skip
def test_other_steps_than_whole_episodes_do_not_count(
    tmp_path: Path, norm: Any, has_numbers: bool
) -> None:
    num_steps, make_env = 24, corridor
    if has_numbers:  # whose standard deviations depend on the observation
        num_steps, make_env = 10, partial(Levers, discrete=False)
    config = with_ppo(tmp_path, collect_by="episodes", num_steps=num_steps, num_minibatches=1,
                      minibatch_by="transitions", advantage_norm=norm)  # fmt: skip
    run = open_run(config.with_updates({"action.std": "softplus"}), make_env)
    for _ in range(2):  # the second rollout begins in the middle of episodes
        run.buffer.clear()
        rollout = run.collect(run.buffer.next_rollout())
    samples, record = compute_targets(rollout, rollout.reward, config.ppo)
    normalized = phases.normalize_minibatches(samples, torch.arange(4 * num_steps), config.ppo)
    ended = rollout.terminated | rollout.truncated
    counts = returns.mark_whole_episodes(rollout.first, ended).flatten()
    assert 0.2 < counts.float().mean() < 0.9
    assert record["charts/learned_fraction"] == pytest.approx(counts.float().mean().item())
    # The judge: those steps alone, without weights.
    alone = replace(samples.as_transitions().take(counts.nonzero()[:, 0]), weight=None)
    raw, _ = compute_targets(rollout, rollout.reward, replace(config.ppo, advantage_norm="none"))
    advantage = raw.as_transitions().advantage[counts]
    if norm != "none":
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    loss = phases.PolicyPhaseLoss(run.agent, config.ppo, trains_policy=True, trains_value=True)
    coefficients = run.learner.policy_loss_coefficients()
    expected = loss(replace(alone, advantage=advantage), *coefficients)
    torch.testing.assert_close(loss(normalized.as_transitions(), *coefficients), expected)
    explained = returns.explained_variance(alone.old_value, alone.value_target)
    assert record["losses/explained_variance"] == pytest.approx(explained, rel=1e-4)


def test_metrics_are_means_over_all_minibatches_and_epochs(tmp_path: Path) -> None:
    """With a step size of (almost) zero the mean over minibatches is the mean over the data."""
    epochs: Any = {"policy_epochs": 2, "value_epochs": 2}
    run = filled(with_ppo(tmp_path, learning_rate=1e-30, num_minibatches=4, **epochs))
    rollout = run.buffer.rollout(0)
    record = learn_from(run, samples_of(run))
    error = 0.5 * (rollout.value - rollout.value_target).square().mean()
    assert record["losses/value_loss"] == pytest.approx(error.item(), rel=1e-4)
    assert record["losses/old_approx_kl"] == pytest.approx(0, abs=1e-6)
    assert record["losses/clipfrac"] == 0


def test_policy_epochs_first_learn_what_joint_epochs_learn(tmp_path: Path) -> None:
    """Each step moves one of two networks, so that their order does not matter."""
    joint, apart = (
        open_run(with_ppo(tmp_path, num_minibatches=1, epoch_order=order))
        for order in ("value_first", "policy_first")
    )
    assert (stages(joint), stages(apart)) == (["policy"], ["policy", "value"])
    for name, tensor in weights(joint).items():
        torch.testing.assert_close(weights(apart)[name], tensor)


@EVERY_PATH
@pytest.mark.parametrize("order", ["value_first", "policy_first"])
def test_policy_epochs_stop_early(tmp_path: Path, value_path: str, order: str) -> None:
    """In joint epochs only where they do not move the policy's network."""
    changes = {"policy_epochs": 3, "value_epochs": 3, "target_kl": 1e-12, "epoch_order": order}
    run = filled(with_ppo(tmp_path, **changes).with_updates({"model.value_path": value_path}))
    seen, samples = [], samples_of(run)
    record = learn_from(run, samples, on_stage=lambda name: seen.append((name, weights(run))))
    num_values = 3 if order == "policy_first" else 0 if value_path == "shared" else 2
    assert [name for name, _ in seen] == ["policy"] + ["value"] * num_values
    policy = run.agent.policy(samples.obs, samples.first, samples.state)[0]
    log_ratio = policy.log_prob(samples.action) - samples.old_log_prob
    if num_values and value_path == "separate":
        later = changed(run, seen[1][1])
        assert later and all(name.startswith("value_") for name in later)
        kl = (log_ratio.exp() - 1 - log_ratio).mean().item()
        assert record["losses/epoch_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)


def test_the_learning_rate_of_a_step_follows_the_kl_of_its_minibatch(tmp_path: Path) -> None:
    """PyTorch computes the weighted divergence from the policy before the phase."""
    options = {"learning_rate": 3e-3, "schedule": "adaptive_kl", "schedule_kl": 3e-4}
    run = filled(with_ppo(tmp_path, num_minibatches=4, policy_epochs=3, value_epochs=2, **options))
    weight = torch.tensor([[1.0, 0.0], [3.0, 3.0], [0.0, 0.0], [0.5, 0.5]]).repeat(1, 4)
    agent, make, rate = run.agent, run.executor.make_gradient_step, 3e-3
    behavior, found, expected = copy.deepcopy(agent), [], []

    def spied(loss: Any, settings: AdamSettings) -> Any:
        step = make(loss, settings)

        def checked(minibatch: Minibatch[PolicySamples], *coefficients: Tensor) -> Any:
            nonlocal rate
            if settings.phase == "policy":
                piece = minibatch.gather()
                inputs = piece.obs, piece.first, piece.state, piece.action_mask
                with torch.no_grad():
                    old, new = (
                        Categorical(logits=each.policy(*inputs)[0].dist_params)
                        for each in (behavior, agent)
                    )
                assert piece.weight is not None
                kl = float((kl_divergence(old, new) * piece.weight).sum() / piece.weight.sum())
                rate *= 1 / 1.5 if kl > 6e-4 else 1.5 if 0 < kl < 1.5e-4 else 1
                expected.append(rate)
                found.append(settings.optimizer.param_groups[0]["lr"])
            return step(minibatch, *coefficients)

        return checked

    with patch.object(run.executor, "make_gradient_step", spied):
        learn_from(run, samples_of(run, weight))
    assert found == pytest.approx(expected) and len(found) == 12
    assert max(found) > 3e-3 and any(after < before for before, after in pairwise(found))


def test_a_policy_that_has_not_moved_leaves_the_rate(tmp_path: Path) -> None:
    """Passes of other sizes round its outputs otherwise."""
    options = {"schedule": "adaptive_kl", "num_minibatches": 1, "policy_epochs": 1}
    run = filled(with_ppo(tmp_path, value_epochs=1, **options))
    outputs = torch.zeros(2, 4, 8, run.agent.policy_head.num_dist_params)
    outputs[1, ..., 0] = 0.01
    with patch.object(phases, "compute_dist_params", side_effect=[*outputs]):
        policy_phase(run.learner, run.buffer.rollout(0))
    assert run.learner.lr_multiplier == 1


def test_a_first_value_has_the_scale_of_its_targets(tmp_path: Path) -> None:
    aux = tiny_aux(recompute_targets=True)
    norms = {"reward_norm.per": "rollout", "value_norm": VALUE_NORM}
    run = open_run(tiny(tmp_path, aux=aux).with_updates(norms))
    rollout = run.collect(run.buffer.next_rollout())
    policy_phase(run.learner, rollout)
    normalizer: Any = run.learner.reward_normalizer
    before = normalizer.scale
    normalizer.moments.sum_of_squares.mul_(100)
    _, bootstrap = run.learner.to_current_reward_scale(rollout)
    expected = rollout.next_value * float(before / normalizer.scale)
    torch.testing.assert_close(bootstrap, expected)


def test_steps_that_do_not_count_are_in_no_divergence(tmp_path: Path) -> None:
    """The divergence is that after the last step."""
    run = filled(with_ppo(tmp_path, num_minibatches=1, learning_rate=0.05, kl_penalty=1.0,
                          kl_penalty_target=0.01))  # fmt: skip
    weight = torch.zeros(4, 8)
    weight[:2] = 2.0
    samples = samples_of(run, weight)
    record = learn_from(run, samples)
    policy, _ = run.agent.policy(samples.obs, samples.first, samples.state)
    log_ratio = (policy.log_prob(samples.action) - samples.old_log_prob)[:2]
    expected = (log_ratio.exp() - 1 - log_ratio).mean().item()
    assert expected > 1e-4 and record["losses/epoch_kl"] == pytest.approx(expected, rel=1e-3)
    adapted = objectives.adapt_kl_coef(1.0, expected, target=0.01)
    assert record["losses/kl_penalty"] == 1 != run.learner.kl_coef == adapted


def test_micro_batches_give_the_gradient_of_the_whole_minibatch(tmp_path: Path) -> None:
    run = filled(tiny(tmp_path))
    everything = Minibatch(samples_of(run).as_transitions(), torch.arange(32), as_steps=False)
    loss = phases.PolicyPhaseLoss(run.agent, run.config.ppo, trains_policy=True, trains_value=True)
    frozen, gradients = torch.optim.Adam(run.agent.parameters(), lr=0.0), []
    for size in (None, 5):  # 32 steps in pieces of 5: the last one is smaller
        sizes = dict.fromkeys(("policy", "value", "aux"), size)
        run.executor.plan = replace(run.executor.plan, micro_batch=sizes)
        settings = AdamSettings("policy", run.agent.params_per_network(), frozen, None)
        run.executor.make_gradient_step(loss, settings)(
            everything, *run.learner.policy_loss_coefficients()
        )
        gradients.append([p.grad.clone() for p in run.agent.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("norm_of", ["networks", "agent"])
def test_gradients_are_clipped_by_network_or_together(tmp_path: Path, norm_of: str) -> None:
    run, given = filled(with_ppo(tmp_path, max_grad_norm=0.5, grad_norm_of=norm_of)), []

    class Large(phases.PolicyPhaseLoss):
        def __call__(self, samples: PolicySamples, *_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            squares = [100 * parameter.square().sum() for parameter in run.agent.parameters()]
            return torch.stack(squares).sum(), {"seen": torch.tensor(7.0)}

    def keep(_: Any, parameters: list[Tensor], gradients: list[Tensor], **__: Any) -> None:
        given.append(dict(zip(parameters, gradients, strict=True)))

    norms = [200 * parameter.norm() for parameter in run.agent.parameters()]
    loss = Large(run.agent, run.config.ppo, trains_policy=True, trains_value=True)
    step = run.executor.make_gradient_step(loss, run.learner.make_adam_settings("policy"))
    minibatch = Minibatch(samples_of(run), torch.arange(4), as_steps=True)
    with patch.object(optimize, "eager_adam_step_", keep):
        names, (seen, norm), weight = step(minibatch, *run.learner.policy_loss_coefficients())
    assert (names, seen, weight) == (("seen", "gradients/policy_norm"), 7.0, 32)
    assert norm.item() == pytest.approx(torch.stack(norms).norm().item(), rel=1e-4)
    whole = [list(run.agent.parameters())]
    for network in whole if norm_of == "agent" else run.agent.params_per_network():
        clipped = torch.stack([given[0][parameter].norm() for parameter in network]).norm()
        assert clipped.item() == pytest.approx(0.5, rel=1e-4)


def test_reinforce_weighs_log_probabilities_by_plain_returns(tmp_path: Path) -> None:
    config = with_ppo(
        tmp_path, baseline=False, estimator="monte_carlo", objective="log_prob", clip=None,
        advantage_norm="none", num_minibatches=1, entropy_coef=0.0,
    )  # fmt: skip
    run = filled(config)
    rollout = run.buffer.rollout(0)
    samples, record = compute_targets(rollout, rollout.reward, config.ppo)
    # The return of each step, with nothing in place of what comes after the rollout, written out.
    expected = torch.zeros(4, 8)
    for env in range(4):
        for t in range(8):
            for k in range(t, 8):
                expected[env, t] += 0.9 ** (k - t) * rollout.reward[env, k]
                if rollout.terminated[env, k] or rollout.truncated[env, k]:
                    break
    torch.testing.assert_close(samples.advantage, expected)
    policy, _ = run.agent.policy(rollout.obs, rollout.first, rollout.state)
    written = -(expected * policy.log_prob(rollout.action)).mean()
    names, parameters = zip(*run.agent.named_parameters(), strict=True)
    wanted = torch.autograd.grad(written, parameters, allow_unused=True)
    before = weights(run)
    learn_from(run, samples)
    assert not record and not any(name.startswith("value_") for name in changed(run, before))
    for name, parameter, gradient in zip(names, parameters, wanted, strict=True):
        assert (gradient is None) == name.startswith("value_") == (parameter.grad is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_the_exact_penalty_is_the_divergence_from_the_old_policy(tmp_path: Path) -> None:
    run = filled(with_ppo(tmp_path, kl_penalty=2.0, kl_estimate="exact", entropy_coef=0.0))
    samples = samples_of(run)
    old = compute_dist_params(run.agent, samples, executor=run.executor)
    before = run.agent.policy(samples.obs, samples.first, samples.state)[0]
    with torch.no_grad():
        for parameter in run.agent.policy_head.parameters():
            parameter.add_(torch.randn_like(parameter))
    after = run.agent.policy(samples.obs, samples.first, samples.state)[0]
    samples, divergence = replace(samples, old_dist_params=old), after.kl_from(before).mean()
    assert divergence > 1e-3
    penalty = loss_of(run, samples, 2.0, value=False) - loss_of(run, samples, value=False)
    torch.testing.assert_close(penalty, 2 * divergence)


def test_the_exact_penalty_keeps_the_old_policy_over_all_epochs(tmp_path: Path) -> None:
    epochs: Any = {"policy_epochs": 3, "value_epochs": 3}
    run = filled(with_ppo(tmp_path, kl_penalty=1.0, kl_estimate="exact", **epochs))
    samples, seen, head = samples_of(run), [], run.agent.policy_head
    old = compute_dist_params(run.agent, samples, executor=run.executor)
    old = old.flatten(0, 1).sort(0).values
    original = head.distribution
    spy = lambda params: (seen.append(params), original(params))[1]  # noqa: E731
    with patch.object(head, "distribution", spy):
        learn_from(run, samples)
    # The head makes its own policies with it too, which have gradients.
    seen = [params.flatten(0, 1) for params in seen if not params.requires_grad][-6:]
    for epoch in range(3):
        torch.testing.assert_close(torch.cat(seen[2 * epoch : 2 * epoch + 2]).sort(0).values, old)


def test_advantages_are_recomputed_before_each_further_epoch(tmp_path: Path) -> None:
    run = filled(with_ppo(tmp_path, recompute_advantages=True, policy_epochs=3, value_epochs=3))
    rollout, original, calls = run.buffer.rollout(0), compute_targets, []
    kept = rollout.next_value.clone()

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

    with patch.object(phases, "compute_targets", spy):
        policy_phase(run.learner, rollout)
    assert len(calls) == 3 and not torch.equal(calls[1].advantage, calls[2].advantage)


def test_values_are_clipped_around_the_rollouts_even_if_they_are_recomputed(tmp_path: Path) -> None:
    run = filled(with_ppo(tmp_path, recompute_advantages=True, policy_epochs=3, value_epochs=3,
                          value_clip=0.2))  # fmt: skip
    rollout, seen, original = run.buffer.rollout(0), [], objectives.value_loss
    wanted = rollout.value.flatten().sort().values.clone()

    def spy(value: Tensor, target: Tensor, old: Tensor, *, clip: float | None) -> Tensor:
        seen.append(old.flatten())
        assert clip == 0.2
        return original(value, target, old, clip=clip)

    with patch.object(objectives, "value_loss", spy):
        policy_phase(run.learner, rollout, rollout.reward)
    for epoch in range(3):
        assert torch.equal(torch.cat(seen[2 * epoch : 2 * epoch + 2]).sort().values, wanted)


# Statistics


def test_value_statistics_are_of_the_steps_that_count(tmp_path: Path) -> None:
    config = with_ppo(tmp_path, collect_by="episodes", num_steps=24, num_minibatches=1,
                      minibatch_by="transitions")  # fmt: skip
    run = open_run(replace(config, value_norm=VALUE_NORM))
    rollout = run.collect(run.buffer.next_rollout())
    counts = returns.mark_whole_episodes(rollout.first, rollout.terminated | rollout.truncated)
    policy_phase(run.learner, rollout)
    assert run.agent.value_normalizer is not None
    count = run.agent.value_normalizer.state_dict()["moments.count"]
    assert int(count) == int(counts.sum()) < counts.numel()


def test_the_value_loss_is_in_the_units_of_normalized_values(tmp_path: Path) -> None:
    aux = tiny_aux(every=1)
    run = filled(tiny(tmp_path, aux=aux, value_norm=VALUE_NORM))
    assert run.agent.value_normalizer is not None
    run.agent.value_normalizer.update(torch.tensor([[0.0, 8.0]]))  # mean 4, deviation 4
    samples = samples_of(run)
    output = run.agent(samples.obs, samples.first, samples.state)
    assert output.aux_value is not None
    expected, of_aux = (
        0.5 * ((value - samples.value_target) / 4).square().mean()
        for value in (output.value, output.aux_value)
    )
    torch.testing.assert_close(loss_of(run, samples, policy=False), expected)
    old = run.buffer.auxiliary_samples(output.policy.dist_params.detach())
    _, terms = phases.AuxiliaryLoss(run.agent, aux)(old)
    torch.testing.assert_close(terms["losses/aux/real_value_loss"], expected)
    torch.testing.assert_close(terms["losses/aux/aux_value_loss"], of_aux)


def values(rollout: Rollout) -> Tensor:
    """Copy the values of all observations, and of the observations after them."""
    return torch.stack([rollout.value, rollout.next_value])


def test_values_of_the_first_rollout_are_read_in_the_units_of_its_targets(tmp_path: Path) -> None:
    run, seen = open_run(replace(tiny(tmp_path), value_norm=VALUE_NORM)), []
    rollout = run.collect(run.buffer.next_rollout())
    raw = values(rollout)  # the heads' outputs: nothing is normalized yet
    with patch.object(phases, "_shuffled_minibatches", lambda *_, **__: iter(())):
        policy_phase(run.learner, rollout, on_stage=lambda _: seen.append(values(rollout)))
    norm = run.agent.value_normalizer
    assert norm is not None
    mean, std = norm.mean.double(), norm.std.double()
    torch.testing.assert_close(seen[0], (raw * std + mean).float())
    assert not torch.allclose(seen[0], raw)


def test_observation_statistics_count_each_observation_once(tmp_path: Path) -> None:
    """The last rollout waits for an auxiliary phase that is left out."""
    seen: list[Tensor] = []

    def keep(run: Run, _: dict[str, float]) -> None:
        seen.append(run.buffer.rollout((run.iteration - 1) % 2).obs.double().flatten(0, 1))

    config = tiny(tmp_path, aux=tiny_aux(), total_env_steps=192, obs_norm=OBS_NORM)
    run = train(config, make_env=corridor, callbacks=keep)
    assert run.env_steps == 192
    for _ in range(2):
        moments = run.agent.reader.state_dict()
        assert moments["normalizer.moments.count"] == 32 * len(seen[:-1])
        torch.testing.assert_close(moments["normalizer.moments.mean"], torch.cat(seen[:-1]).mean(0))
        more = run.env_steps + 64
        run = resume(run.directory, total_env_steps=more, make_env=corridor, callbacks=keep)


# The auxiliary phase


def test_auxiliary_loss_and_gradient_equal_the_written_formula(tmp_path: Path) -> None:
    aux = tiny_aux(beta_clone=0.7, value_coef=0.3)
    run = filled(tiny(tmp_path, aux=aux))
    old = torch.randn(8, 8, 2, generator=Generator().manual_seed(0)).log_softmax(-1)
    samples = run.buffer.auxiliary_samples(old).as_transitions()
    out, target = run.agent(samples.obs, samples.first, samples.state), samples.value_target
    p_old = samples.old_dist_params.exp()
    kl = (p_old * (p_old.log() - out.policy.log_probs)).sum(-1).mean()
    assert out.aux_value is not None
    aux_loss, real_loss = (0.5 * (v - target).square().mean() for v in (out.aux_value, out.value))
    written = 0.7 * kl + aux_loss + 0.3 * real_loss
    loss, _ = phases.AuxiliaryLoss(run.agent, aux)(samples)
    torch.testing.assert_close(loss, written)
    ours, theirs = (torch.autograd.grad(x, list(run.agent.parameters())) for x in (loss, written))
    torch.testing.assert_close(ours, theirs)


def test_deviations_that_depend_on_the_state_are_cloned_in_the_auxiliary_phase(
    tmp_path: Path,
) -> None:
    config = tiny(tmp_path, aux=tiny_aux(), action=ActionConfig(std="softplus", max_std=1.0 + 1e-3))
    run = filled(config, partial(Levers, discrete=False))
    head, linear = run.agent.policy_head, run.agent.policy_head.linear
    old = compute_dist_params(run.agent, run.buffer.as_segments(), executor=run.executor)
    samples = run.buffer.auxiliary_samples(old).as_transitions()
    with torch.no_grad():  # the mean, and the raw deviation: below the bound, or not
        linear.bias[-2:] += torch.tensor([0.5, -0.3])
        linear.weight[-1] *= 40
    loss, terms = phases.AuxiliaryLoss(run.agent, config.aux)(samples)
    new = run.agent(samples.obs, samples.first, samples.state).policy.dist_params
    pair = [head.split_log_probs_means_stds(each) for each in (samples.old_dist_params, new)]
    logits, means, stds = zip(*pair, strict=True)
    normals = [Normal(mean, std) for mean, std in zip(means, stds, strict=True)]
    choices = [Categorical(logits=each) for each in logits]
    kl = kl_divergence(*choices) + kl_divergence(*normals).squeeze(-1)
    torch.testing.assert_close(terms["losses/aux/kl_loss"], kl.mean())
    at_bound = stds[1] == config.action.max_std
    assert at_bound.any() and not at_bound.all()
    (gradient,) = torch.autograd.grad(kl[at_bound.squeeze(-1)].sum(), linear.bias,
                                      retain_graph=True)  # fmt: skip
    assert gradient[-2:].all()  # beyond the bound, too
    loss.backward()
    assert linear.bias.grad is not None and linear.bias.grad[-1]


def test_each_segment_is_visited_once_an_auxiliary_epoch(tmp_path: Path) -> None:
    batches = auxiliary_batches(numbered(tiny(tmp_path, aux=tiny_aux(epochs=3))))
    assert len(batches) == 3 * 4  # epochs × (N_a per iteration × N_π)
    steps = targets_of(batches).view(3, -1)
    assert torch.equal(steps.sort().values, torch.arange(64.0).expand(3, -1))
    rows = steps.view(-1, 8)  # whole segments
    assert torch.equal(rows, rows[:, :1] + torch.arange(8)) and not (rows[:, 0] % 8).any()
    assert not torch.equal(steps[0], steps[1]), "epochs have the same order"


def test_fewer_minibatches_are_still_drawn_from_all_iterations(tmp_path: Path) -> None:
    run = numbered(tiny(tmp_path, aux=tiny_aux(epochs=8, iterations_per_epoch=1)))
    batches = auxiliary_batches(run)
    assert len(batches) == 8 * 2  # N · N_a minibatches instead of N_π · N_a
    is_first = targets_of(batches).view(8, -1) < 32
    # Four of eight segments: by chance one in 35 epochs uses one of the two iterations alone.
    assert sum(bool(epoch.any() and not epoch.all()) for epoch in is_first) >= 6


def test_the_last_iterations_alone_are_used_whole(tmp_path: Path) -> None:
    """Each epoch has all of the second rollout's targets, 32 to 63, and none of the first's."""
    aux = tiny_aux(iterations_per_epoch=1, iterations_from="last")
    batches = auxiliary_batches(numbered(tiny(tmp_path, aux=aux)))
    by_epoch = targets_of(batches).view(2, -1).sort().values
    assert torch.equal(by_epoch, torch.arange(32.0, 64.0).expand(2, -1))
    assert len(batches) == 2 * aux.num_minibatches


def test_the_old_policy_is_computed_once_a_phase_before_it_changes(tmp_path: Path) -> None:
    run = filled(tiny(tmp_path, aux=tiny_aux(epochs=3)))
    expected = compute_dist_params(run.agent, run.buffer.as_segments(), executor=run.executor)
    with patch.object(phases, "compute_dist_params", wraps=compute_dist_params) as calls:
        batches = auxiliary_batches(run)
    assert calls.call_count == 1
    last_epoch = torch.cat([samples.old_dist_params.flatten() for samples in batches[-4:]])
    assert torch.equal(last_epoch.sort().values, expected.flatten().sort().values)


@pytest.mark.parametrize(("aux", "changes", "num_iterations", "expected"), [
    ({}, {"total_env_steps": 192}, 6, [2, 4]),  # none after the sixth
    ({}, {"total_env_steps": 224}, 7, [2, 4, 6]),  # the seventh is trained all the same
    ({"run_every": 2}, {"total_env_steps": 320}, 10, [4, 8]),
    ({"every": 1}, {"total_env_steps": 100, "budget_rounding": "down"}, 3, [1, 2]),
    ({"every": 1}, {"total_env_steps": 100, "budget_rounding": "up"}, 4, [1, 2, 3]),
])  # fmt: skip
def test_auxiliary_phases_come_every_n_iterations_and_never_after_the_last(
    tmp_path: Path, aux: dict[str, Any], changes: dict[str, Any], num_iterations: int,
    expected: list[int],
) -> None:  # fmt: skip
    """Iterations have 32 steps."""
    run, seen = open_run(tiny(tmp_path, aux=tiny_aux(**aux), **changes)), []
    run.callbacks.on_iteration = lambda _, record: seen.append("losses/aux/kl_loss" in record)
    learn(run)
    assert len(seen) == run.iteration == num_iterations
    assert [number for number, ran in enumerate(seen, start=1) if ran] == expected


def test_an_interrupted_auxiliary_phase_continues_where_it_was(tmp_path: Path) -> None:
    """Stops before the first and the third epoch leave weights and metrics equal."""
    config = tiny(tmp_path, aux=tiny_aux(epochs=3), obs_norm=OBS_NORM)
    whole, broken = filled(config), filled(config)
    expected = auxiliary_phase(whole.learner, whole.buffer)

    def interrupt() -> None:
        assert broken.buffer.aux_progress is not None
        if broken.buffer.aux_progress.epoch == epoch:
            raise KeyboardInterrupt

    for epoch in (0, 2):
        with pytest.raises(KeyboardInterrupt):
            auxiliary_phase(broken.learner, broken.buffer, on_epoch_start=interrupt)
        assert broken.buffer.aux_progress is not None and broken.buffer.aux_progress.epoch == epoch
    found = auxiliary_phase(broken.learner, broken.buffer)
    assert broken.buffer.aux_progress is None and not changed(broken, weights(whole))
    del found["time/auxiliary"], expected["time/auxiliary"]
    assert found == expected


def test_recomputed_targets_are_those_of_the_phases_value_function(tmp_path: Path) -> None:
    """GAE by its recursion takes current values, and rewards by current statistics."""
    norm = RewardNormConfig(per="rollout")
    run = filled(tiny(tmp_path, aux=tiny_aux(epochs=1, recompute_targets=True), reward_norm=norm))
    normalizer, rollouts, ppo = run.learner.reward_normalizer, run.buffer.rollouts, run.config.ppo
    assert normalizer is not None
    normalizer.moments.update(torch.tensor([0.0, 6.0], dtype=torch.float64))
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    for flags in (rollouts.first, rollouts.terminated, rollouts.truncated):
        flags.zero_()
    rollouts.reward.uniform_()
    rollouts.next_value.uniform_()
    rollouts.reward_scale.copy_(normalizer.scale)
    last = rollouts.next_value[:, :, -1:].clone()
    inputs = (x.flatten(0, 1) for x in (rollouts.obs, rollouts.first, rollouts.state))
    with torch.no_grad():
        value = run.agent.value(*inputs).view(2, 4, 8)
    last[0] = value[1, :, :1]  # the second rollout continues the first
    reward = (rollouts.reward / normalizer.scale).clamp(-norm.clip, norm.clip)
    delta = reward + ppo.gamma * torch.cat([value[:, :, 1:], last], dim=-1) - value
    expected = value + recurse(delta, ppo.gamma * ppo.gae_lambda)
    found = targets_of(auxiliary_batches(run)).sort().values
    torch.testing.assert_close(found, expected.float().flatten().sort().values)
    for name, tensor in normalizer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("estimator", ["gae", "monte_carlo"])
def test_recomputed_targets_have_the_current_scale_of_rewards_throughout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    """Each step pays 1 and γ = 0.9: it is worth 10, over what rewards are divided by.

    Each rollout was valued by what had been learned before it, and moved the scale itself.
    """
    aux = tiny_aux(epochs=1, recompute_targets=True)
    run = filled(with_ppo(tmp_path, aux, gamma=0.9, estimator=estimator))
    normalizer, rollouts = run.learner.reward_normalizer, run.buffer.rollouts
    assert normalizer is not None
    rollouts.reward.fill_(1.0)
    for flags in (rollouts.first, rollouts.terminated, rollouts.truncated):
        flags.zero_()
    rollouts.truncated[:, 1, 3], rollouts.first[:, 1, 4] = True, True
    rollouts.truncated[:, 1, 2] = True  # its target, not its episode, ends: the next is not known
    rollouts.truncated[0, 2, -1], rollouts.first[1, 2, 0] = True, True
    rollouts.first[1, 3, 0] = True  # reset by a resumed run, and ended in no rollout
    normalizer.moments.sum_of_squares.copy_(normalizer.moments.count)
    scales = []
    for slot in range(2):
        scales.append(float(normalizer.scale))
        rollouts.next_value[slot] = 10 / scales[-1]
        run.learner.normalize_reward(run.buffer.rollout(slot))
    now = float(normalizer.scale)
    assert now > 1.1 * scales[1] > 1.2 * scales[0], "the scale moves, or nothing is shown"
    # The first environment continues: its next rollout has the value, whatever it was before.
    rollouts.next_value[0, 0, -1] = 99.0
    monkeypatch.setattr(  # the value of a new episode is not that of the one before
        type(run.agent), "value", lambda self, obs, first, *_, **_o: 10 / now + 4 * first.float()
    )
    torch.testing.assert_close(targets_of(auxiliary_batches(run)), torch.full((64,), 10 / now))


def test_values_of_an_unknown_scale_are_kept(tmp_path: Path) -> None:
    """Keep values of the first rollout, and of one with rewards from elsewhere, in any slot."""
    run = filled(tiny(tmp_path, reward_norm=RewardNormConfig(per="rollout")))
    first = run.buffer.rollout(0)
    first.next_value.fill_(3.0)
    assert torch.equal(run.learner.to_current_reward_scale(first)[1], first.next_value)
    first.reward.add_(torch.arange(8.0))
    run.learner.normalize_reward(first)
    assert not torch.allclose(run.learner.to_current_reward_scale(first)[1], first.next_value)
    run.buffer.clear()
    again = run.buffer.next_rollout()
    assert torch.equal(run.learner.to_current_reward_scale(again)[1], first.next_value)


def test_masks_hold_in_the_auxiliary_phase(tmp_path: Path) -> None:
    """The unchanged policy has a divergence of 0 from itself, which needs its masks."""
    aux = tiny_aux(every=1)
    with start_run(tiny(tmp_path, aux=aux), make_env=lambda: Levers(masked=True)) as run:
        rollout = run.collect(run.buffer.next_rollout())
        compute_targets(rollout, torch.zeros(4, 8), run.config.ppo)
        segments = run.buffer.as_segments()
        before = compute_dist_params(run.agent, segments, executor=run.executor, phase="aux")
        samples = run.buffer.auxiliary_samples(before)
        assert samples.action_mask is not None and not samples.action_mask.all()
        loss = phases.AuxiliaryLoss(run.agent, aux)
        assert loss(samples)[1]["losses/aux/kl_loss"].item() == pytest.approx(0, abs=1e-6)
        assert loss(replace(samples, action_mask=None))[1]["losses/aux/kl_loss"].item() > 1e-3


def test_the_divergence_begins_at_zero_if_only_the_auxiliary_phase_rounds(tmp_path: Path) -> None:
    aux = tiny_aux(every=1, epochs=1, num_minibatches=1)
    changes = {"compute.aux_precision": "bf16", "model.policy_head_scale": 10.0}
    run = filled(tiny(tmp_path, aux=aux).with_updates(changes))
    assert abs(auxiliary_phase(run.learner, run.buffer)["losses/aux/kl_loss"]) < 1e-7


def test_the_time_of_an_interrupted_auxiliary_phase_is_that_of_its_parts(tmp_path: Path) -> None:
    run = filled(tiny(tmp_path, aux=tiny_aux(every=1)))
    stop = Mock(side_effect=[None, KeyError])
    with pytest.raises(KeyError):
        auxiliary_phase(run.learner, run.buffer, on_epoch_start=stop)
    assert run.buffer.aux_progress is not None
    run.buffer.aux_progress.seconds = 1000.0
    assert auxiliary_phase(run.learner, run.buffer)["time/auxiliary"] > 1000


def test_an_update_uses_no_more_episodes_than_asked(tmp_path: Path) -> None:
    run = open_run(with_ppo(tmp_path, collect_by="episodes", num_steps=24, num_minibatches=1,
                            minibatch_by="transitions", max_episodes=2))  # fmt: skip
    rollout = run.collect(run.buffer.next_rollout())
    weight = compute_targets(rollout, rollout.reward, run.config.ppo)[0].weight
    assert weight is not None and int((rollout.first & (weight > 0)).sum()) == 2
