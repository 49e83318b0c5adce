"""The two phases of PPG: value targets, epochs, minibatches, losses. Kind: state (train a learner).

`policy_phase` is PPO; with `auxiliary_phase` it is PPG. The losses are in `objectives.py`, the
advantages in `returns.py`. examples/own_loop.py calls both phases from a custom loop.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from phasicrl import objectives, returns
from phasicrl.config import AuxConfig, PPOConfig, Precision
from phasicrl.distributed import SINGLE_PROCESS, World
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Phase
from phasicrl.learner import Learner, Record
from phasicrl.models.agent import Agent
from phasicrl.models.distributions import Policy
from phasicrl.normalize import EmaMoments
from phasicrl.optimize import MeanAccumulator, make_diverged_error
from phasicrl.rollout import (
    AuxiliaryProgress,
    AuxiliarySamples,
    Minibatch,
    PhaseBuffer,
    PolicySamples,
    Rollout,
    Samples,
)

LossTerms = dict[str, Tensor]
"""Terms of a loss, 0-d, by the names of their metrics."""
OnStage = Callable[[str], None]
"""Called with the name of each stage, such as `auxiliary 2/6`, as it starts."""
OnEpoch = Callable[[Phase, int, MeanAccumulator], None]
"""Called after each epoch with the phase, the epoch's index and the means of metrics so far."""


@dataclass(frozen=True)
class PolicyPhaseLoss:
    """Loss of the policy, the value function or both.

    Attributes:
        agent: agent that is trained.
        ppo: options of the policy phase.
        trains_policy: whether the policy is trained.
        trains_value: whether the value function is trained.
        precision: precision of the encoders.
    """

    agent: Agent
    ppo: PPOConfig
    trains_policy: bool
    trains_value: bool
    precision: Precision = "fp32"

    def __call__(self, samples: PolicySamples, *coefficients: Tensor) -> tuple[Tensor, LossTerms]:
        """Return the mean loss and its terms, by `Learner.policy_loss_coefficients`."""
        agent, precision = self.agent, self.precision
        # Run only the networks that are trained.
        if not self.trains_policy:
            return self._value_loss(agent.value(*samples.inputs, precision=precision), samples)
        if not self.trains_value:
            policy, _ = agent.policy(*samples.inputs, samples.action_mask, precision=precision)
            return self._policy_loss(policy, samples, coefficients)
        output = agent(*samples.inputs, samples.action_mask, precision=precision)
        policy_loss, policy_terms = self._policy_loss(output.policy, samples, coefficients)
        value_loss, value_terms = self._value_loss(output.value, samples)
        return policy_loss + value_loss, policy_terms | value_terms

    def _policy_loss(
        self, policy: Policy, samples: PolicySamples, coefficients: tuple[Tensor, ...]
    ) -> tuple[Tensor, LossTerms]:
        """Return `E[surrogate] − c H(π) + k E[KL]` (PPG paper, equation 1)."""
        ppo, (kl_coef, entropy_coef, clip) = self.ppo, coefficients
        log_prob, old_log_prob = policy.log_prob(samples.action), samples.old_log_prob
        old_policy, proximal_log_prob = None, old_log_prob
        if samples.old_dist_params is not None:
            old_policy = self.agent.policy_head.distribution(samples.old_dist_params)
        # PPO-EWMA clips around an average of the weights instead of the behavior policy.
        if ppo.proximal_decay is not None:
            assert old_policy is not None, "parameters of the proximal policy are missing"
            proximal_log_prob = old_policy.log_prob(samples.action)
        if ppo.objective == "log_prob":
            loss = objectives.log_prob_loss(log_prob, samples.advantage)
        elif ppo.proximal_decay is None:
            loss = objectives.surrogate_loss(log_prob, old_log_prob, samples.advantage, clip=clip)
        else:
            loss = objectives.decoupled_surrogate_loss(
                log_prob, proximal_log_prob, old_log_prob, samples.advantage, clip=clip
            )

        def mean(values: Tensor) -> Tensor:
            return objectives.weighted_mean(values, samples.weight)

        loss, entropy = mean(loss), mean(policy.entropy())
        if ppo.kl_estimate == "exact" and old_policy is not None:
            penalty = mean(policy.kl_from(old_policy))
        else:
            penalty = mean(objectives.estimate_kl_k2(log_prob, proximal_log_prob))
        with torch.no_grad():  # KL to the behavior policy, for the metrics
            k1, k3 = objectives.estimate_kl_k1_and_k3(log_prob, old_log_prob)
            clipped = objectives.mark_clipped_ratios(log_prob, proximal_log_prob, clip=clip)
        terms = {
            "losses/policy_loss": loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": mean(k1),
            "losses/approx_kl": mean(k3),
            "losses/clipfrac": mean(clipped),
        }
        if policy.stds is not None:
            terms["losses/action_std"] = mean(policy.stds.mean(-1))
        return loss - entropy_coef * entropy + kl_coef * penalty, terms

    def _value_loss(self, value: Tensor, samples: PolicySamples) -> tuple[Tensor, LossTerms]:
        """Return the weighted value loss (PPG paper, equation 2), and the plain one as a term."""
        rescale = self.agent.divide_by_value_std
        value, target, old_value = map(rescale, (value, samples.value_target, samples.old_value))
        loss = objectives.value_loss(value, target, old_value, clip=self.ppo.value_clip)
        loss = objectives.weighted_mean(loss, samples.weight)
        return self.ppo.value_coef * loss, {"losses/value_loss": loss}


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Loss `β KL(π_old ‖ π) + ½ (V_aux − V̂)² + c ½ (V − V̂)²` of the auxiliary phase.

    Source: PPG paper, equations 3 and 2; OPPG ppg.py:178-201.

    Attributes:
        agent: agent with an auxiliary value head.
        aux: options of the auxiliary phase.
        precision: precision of the encoders.
    """

    agent: Agent
    aux: AuxConfig
    precision: Precision = "fp32"

    def __call__(self, samples: AuxiliarySamples, *_: Tensor) -> tuple[Tensor, LossTerms]:
        """Return the mean loss of a minibatch, and its terms."""
        agent, aux, weight = self.agent, self.aux, samples.weight
        inputs = (*samples.inputs, samples.action_mask)
        output = agent(*inputs, precision=self.precision, in_aux_phase=True)
        assert output.aux_value is not None, "the auxiliary phase needs an auxiliary head"
        # Penalize changes of the policy, and train both value heads.
        kl = output.policy.kl_from(agent.policy_head.distribution(samples.old_dist_params)).mean()
        values = (output.aux_value, output.value, samples.value_target)
        aux_value, value, target = map(agent.divide_by_value_std, values)
        aux_loss = objectives.weighted_mean(objectives.value_loss(aux_value, target), weight)
        real_loss = objectives.weighted_mean(objectives.value_loss(value, target), weight)
        terms = {
            "losses/aux/kl_loss": kl,
            "losses/aux/aux_value_loss": aux_loss,
            "losses/aux/real_value_loss": real_loss,
        }
        loss = aux.beta_clone * kl + aux_loss
        if aux.value_coef:  # else the value head has no gradient, not a zero one
            loss = loss + aux.value_coef * real_loss
        return loss, terms


def compute_targets(
    rollout: Rollout, reward: Tensor, ppo: PPOConfig, world: World = SINGLE_PROCESS,
    advantage_moments: EmaMoments | None = None,
) -> tuple[PolicySamples, Record]:  # fmt: skip
    """Compute advantages Â and value targets V̂, and write V̂ into the rollout.

    Before Â is normalized, V̂ is V + Â of GAE, or the returns that `ppo.value_target` or
    `ppo.estimator` select.

    Args:
        rollout: T steps of B environments.
        reward: `[B, T]`, rewards after clipping and normalization.
        ppo: estimator, γ, λ, treatment of time limits and kind of normalization.
        world: processes whose advantages are normalized together.
        advantage_moments: running moments that normalize the advantages; updated with this rollout.

    Returns:
        Samples `[B, T, …]` with normalized advantages, and metrics.
    """
    advantage, value_target = _estimate_targets(rollout, reward, ppo)
    rollout.value_target.copy_(value_target)
    weight, record = None, {}
    value, target = map(world.all_gather_cat, (rollout.value, rollout.value_target))
    # Steps without a target, or outside complete episodes with `ppo.collect_by episodes`, get the
    # weight 0.
    mask = None if rollout.weight is None else world.all_gather_cat(rollout.weight) > 0
    if ppo.collect_by == "episodes":
        flags = map(world.all_gather_cat, (rollout.first, rollout.terminated | rollout.truncated))
        with world.sync_errors("marking whole episodes"):
            whole = returns.mark_whole_episodes(*flags, max_episodes=ppo.max_episodes)
        mask = whole if mask is None else whole & mask
    if mask is not None:
        fraction = float(mask.float().mean())
        record["charts/learned_fraction"] = fraction
        if not fraction:
            world.has_shared_error = True  # the mask is of all processes
            text = f"ppo.num_steps is {mask.shape[1]}, and no step has a target (no final_obs)"
            raise ValueError(f"{text}; expected more steps. Or return info['final_obs']")
        weight = mask.to(advantage.dtype) / fraction
        value, target = value[mask], target[mask]
    if ppo.baseline:
        record["losses/explained_variance"] = returns.explained_variance(value, target)
    # Normalize Â by running moments or over the batch; minibatches are normalized later.
    if advantage_moments is not None:
        gathered = world.all_gather_cat(advantage)
        advantage_moments.update(gathered if mask is None else gathered[mask])
        mean, std = advantage_moments.mean, advantage_moments.variance.sqrt()
        advantage = ((advantage - mean) / (std + 1e-8)).to(rollout.value.dtype)
    elif ppo.advantage_norm == "batch":
        advantage = world.all_gather_cat(advantage)
        unbiased = ppo.advantage_std == "unbiased"
        advantage = returns.normalize_advantages(advantage, unbiased=unbiased, weight=weight)
        advantage = advantage[world.local_slice(len(advantage))]
    weight = None if weight is None else weight[world.local_slice(len(weight))]
    return rollout.policy_samples(advantage, weight), record


def normalize_minibatches(
    samples: PolicySamples, order: Tensor, ppo: PPOConfig, world: World = SINGLE_PROCESS
) -> PolicySamples:
    """Normalize the advantages of each minibatch if `ppo.advantage_norm` is `minibatch`.

    Args:
        samples: samples of the rollout, `[B, T, …]`.
        order: `[M]`, order in which segments or transitions are split into minibatches.
        ppo: number of minibatches and kind of normalization.
        world: processes, each with an equal part of every minibatch.
    """
    if ppo.advantage_norm != "minibatch":
        return samples

    def all_gather_by_minibatch(values: Tensor) -> Tensor:  # of all ranks, in their order
        rows = values.flatten() if len(order) == values.numel() else values
        parts = world.all_gather_cat(rows[order].reshape(1, ppo.num_minibatches, -1))
        return parts.transpose(0, 1).flatten(1)

    raw, unbiased = all_gather_by_minibatch(samples.advantage), ppo.advantage_std == "unbiased"
    weight = None if samples.weight is None else all_gather_by_minibatch(samples.weight)
    advantage = returns.normalize_advantages(raw, unbiased=unbiased, rowwise=True, weight=weight)
    local = advantage.unflatten(1, (world.size, -1))[:, world.rank].reshape(len(order), -1)
    unshuffled = torch.empty_like(local)
    unshuffled[order] = local
    return replace(samples, advantage=unshuffled.view_as(samples.advantage))


def _compute_rollout_targets(
    learner: Learner, rollout: Rollout, reward: Tensor
) -> tuple[PolicySamples, Record]:
    """Compute advantages and value targets with the learner's options and moments."""
    world, advantage_moments = learner.executor.world, learner.rewind_advantage_moments()
    return compute_targets(rollout, reward, learner.config.ppo, world, advantage_moments)


def _compute_targets_and_update_value_norm(
    learner: Learner, rollout: Rollout, reward: Tensor
) -> tuple[PolicySamples, Record]:
    """Compute value targets, and update the value normalizer with them.

    After the very first update, targets are computed again, so that values and targets have one
    scale.
    """
    agent, world = learner.agent, learner.executor.world
    samples, record = _compute_rollout_targets(learner, rollout, reward)
    target = world.all_gather_cat(rollout.value_target)
    if samples.weight is not None:
        target = target[world.all_gather_cat(samples.weight) > 0]
    if agent.update_value_statistics(target):
        assert agent.value_normalizer is not None
        for value in (rollout.value, rollout.next_value):
            value.copy_(agent.value_normalizer.denormalize(value))
        if learner.reward_normalizer is not None:  # whose scale the targets have
            rollout.reward_scale.fill_(learner.reward_normalizer.scale)
        samples, record = _compute_rollout_targets(learner, rollout, reward)
    return samples, record


def _estimate_targets(rollout: Rollout, reward: Tensor, ppo: PPOConfig) -> tuple[Tensor, Tensor]:
    """Return advantages Â and value targets V̂, `[B, T]`."""
    value, gamma = rollout.value, ppo.gamma
    # A truncated episode bootstraps from V(final observation), a terminated one from 0.
    ends = (rollout.terminated, rollout.truncated)
    if not ppo.bootstrap_truncation:  # as in references that treat time limits as terminations
        ends = (rollout.terminated | rollout.truncated, torch.zeros_like(rollout.truncated))
    # Without a value function, returns stop at the end of the rollout.
    next_value = rollout.next_value if ppo.baseline else torch.zeros_like(rollout.next_value)
    if ppo.truncation_value == "rsl_rl" and ppo.baseline:
        next_value = torch.where(rollout.truncated, value, next_value)
    if ppo.estimator == "gae":
        advantage = returns.gae(
            reward, value, next_value, *ends, gamma=gamma, gae_lambda=ppo.gae_lambda
        )
        if ppo.value_target == "gae":
            return advantage, value + advantage
        return advantage, returns.monte_carlo_return(reward, next_value, *ends, gamma=gamma)
    if ppo.estimator == "n_step":
        target = returns.n_step_return(reward, value, next_value, *ends, gamma=gamma, n=ppo.n_step)
    else:
        target = returns.monte_carlo_return(reward, next_value, *ends, gamma=gamma)
    return target - value if ppo.baseline else target, target


@torch.no_grad()
def recompute_values(agent: Agent, rollout: Rollout, *, executor: Executor) -> None:
    """Recompute the rollout's values in place with the current value function.

    Bootstrap values after the last step and of final observations are left unchanged.
    """

    def compute_value(segments: Samples) -> Tensor:
        return agent.value(*segments.inputs, precision=executor.precision("value"))

    value = executor.infer_in_batches(rollout.as_segments(), compute_value)
    rollout.value.copy_(value)
    ended, next_value = rollout.first[:, 1:], rollout.next_value[:, :-1]
    next_value.copy_(torch.where(ended, next_value, value[:, 1:]))


def policy_phase(
    learner: Learner, rollout: Rollout, reward: Tensor | None = None, *,
    on_stage: OnStage = lambda stage: None, on_epoch: OnEpoch = lambda *_: None,
) -> Record:  # fmt: skip
    """Train the policy for E_π epochs and the value function for E_V epochs on one rollout.

    Args:
        learner: agent, optimizers and normalizers; trained in place.
        rollout: T steps of B environments; value targets are written into it.
        reward: `[B, T]`, rewards to use in place of the rollout's. With `aux.recompute_targets`,
            change the rollout's rewards instead: the auxiliary phase reads those.
        on_stage: callback at the start of each stage, see `OnStage`.
        on_epoch: callback at the end of each epoch, see `OnEpoch`.

    Returns:
        Metrics: means over all samples and epochs, and seconds; `losses/epoch_kl` is of the last
        epoch.

    Raises:
        ValueError: training has diverged.
    """
    agent, executor, ppo = learner.agent, learner.executor, learner.config.ppo
    record = learner.start_iteration()

    # Clip and normalize the rewards.
    if reward is None:
        reward, reward_record = learner.normalize_reward(rollout)
        record |= reward_record

    # Compute advantages Â and value targets V̂ from the rollout's own values.
    samples, target_record = _compute_targets_and_update_value_norm(learner, rollout, reward)
    record |= target_record | learner.diagnose_networks(rollout)

    # Store the old policy for an exact KL (PPO-EWMA computes its own before each step), and the
    # old values for value clipping: recomputed values overwrite the rollout's.
    needs_kl = (learner.kl_coef and ppo.kl_estimate == "exact") or ppo.schedule == "adaptive_kl"
    needs_kl = needs_kl and learner.proximal is None
    old_dist_params = compute_dist_params(agent, samples, executor=executor) if needs_kl else None
    old = {"old_dist_params": old_dist_params, "old_value": samples.old_value.clone()}
    samples = replace(samples, **old)

    means, seconds = MeanAccumulator(), {"time/policy": 0.0, "time/value": 0.0}
    coefficients, kl_exceeded = learner.policy_loss_coefficients(), False
    has_moved = learner.proximal is not None  # else the KL is 0, up to rounding
    for epoch, (trains_policy, trains_value) in enumerate(ppo.epoch_kinds):
        # After an early stop, a joint epoch trains the value function alone, and is skipped if
        # that would change the policy as well.
        if kl_exceeded and trains_policy:
            if not trains_value or agent.value_path == "shared":
                continue
            trains_policy = False
        phase: Phase = "policy" if trains_policy else "value"
        start = perf_counter()
        on_stage(phase)

        # Recompute advantages with the current value function, as in Tianshou.
        if epoch and ppo.recompute_advantages:
            recompute_values(agent, rollout, executor=executor)
            samples, _ = _compute_rollout_targets(learner, rollout, reward)
            samples = replace(samples, **old)

        # One gradient step per minibatch: forward, loss, backward, clipping, Adam.
        loss = PolicyPhaseLoss(agent, ppo, trains_policy, trains_value, executor.precision(phase))
        step = executor.make_gradient_step(loss, learner.make_adam_settings(phase))
        for minibatch in _shuffled_minibatches(learner, samples, trains_policy=trains_policy):
            _adapt_rate_to_kl(learner, minibatch, is_due=has_moved and trains_policy)
            has_moved |= trains_policy or agent.value_path == "shared"
            means.add(*step(minibatch, *coefficients))
            learner.update_proximal_policy(phase)

        # Stop early once the KL to the behavior policy is too large, as in Spinning Up.
        if trains_policy and ppo.uses_epoch_kl:
            kl = estimate_rollout_kl(agent, samples, executor=executor, estimate=ppo.epoch_kl)
            record["losses/epoch_kl"] = kl
            kl_exceeded = ppo.target_kl is not None and kl > ppo.target_kl
        executor.synchronize()
        seconds["time/policy" if trains_policy else "time/value"] += perf_counter() - start
        on_epoch(phase, epoch, means)

    # Adapt the KL penalty to the KL of the last epoch.
    if "losses/epoch_kl" in record:
        record |= learner.adapt_kl_penalty(record["losses/epoch_kl"])
    # If an auxiliary phase follows, it normalizes observations as this rollout did, and updates
    # their statistics at its end. After the last rollout it follows if the run is made longer.
    if not learner.ends_aux_interval:
        learner.update_observation_statistics(rollout)
    return _average_and_check(means.result(), executor.world) | record | seconds


def _shuffled_minibatches(
    learner: Learner, samples: PolicySamples, *, trains_policy: bool
) -> Iterator[Minibatch[PolicySamples]]:
    """Yield the minibatches of an epoch in random order.

    With PPO-EWMA, each has the parameters of the proximal policy just before its gradient step.
    """
    ppo = learner.config.ppo
    unit = learner.config.get_shuffle_unit(ppo)
    order = samples.random_order(unit=unit, generator=learner.generator)
    samples = normalize_minibatches(samples, order, ppo, learner.executor.world)
    proximal = learner.proximal if trains_policy else None
    for minibatch in samples.minibatches(ppo.num_minibatches, order, unit=unit):
        if proximal is not None:
            part = minibatch.gather()
            params = compute_dist_params(proximal.agent, part, executor=learner.executor)
            part, index = replace(part, old_dist_params=params), torch.arange(len(part))
            minibatch = Minibatch(part, index.to(order.device), as_steps=False)
        yield minibatch


@torch.no_grad()
def _adapt_rate_to_kl(
    learner: Learner, minibatch: Minibatch[PolicySamples], *, is_due: bool
) -> None:
    """With `adaptive_kl`, adapt the learning rate to the KL of the minibatch before its step.

    The KL is from the behavior policy, or from the proximal policy of PPO-EWMA.
    """
    if not is_due or learner.config.ppo.schedule != "adaptive_kl":
        return
    agent, executor, samples = learner.agent, learner.executor, minibatch.gather()
    assert samples.old_dist_params is not None, "parameters of the old policy are missing"
    params = compute_dist_params(agent, samples, executor=executor)
    policy, old_policy = map(agent.policy_head.distribution, (params, samples.old_dist_params))
    kl = policy.kl_from(old_policy)
    weight = torch.ones_like(kl) if samples.weight is None else samples.weight
    # Weights have a mean of 1 over the batch, not over each minibatch.
    sums = {"kl": float((kl * weight).mean()), "weight": float(weight.mean())}
    sums = executor.world.average_record(sums)
    if sums["weight"]:
        learner.adapt_learning_rate(sums["kl"] / sums["weight"])


def auxiliary_phase(
    learner: Learner, buffer: PhaseBuffer, *, on_stage: OnStage = lambda stage: None,
    on_epoch: OnEpoch = lambda *_: None, on_epoch_start: Callable[[], None] = lambda: None,
) -> Record:  # fmt: skip
    """Train policy, value and auxiliary heads for E_aux epochs on all rollouts of the phase.

    A phase that was interrupted continues with the epoch in `buffer.aux_progress`.

    Args:
        learner: agent with an auxiliary value head, and optimizers; trained in place.
        buffer: rollouts of a full phase.
        on_stage: callback at the start of each stage, see `OnStage`.
        on_epoch: callback at the end of each epoch, see `OnEpoch`.
        on_epoch_start: callback before each epoch, for checkpoints: learner and buffer then hold
            everything that the rest of the phase needs.

    Returns:
        Metrics: means over all samples and epochs, and seconds.

    Raises:
        ValueError: training has diverged.
    """
    agent, executor, aux = learner.agent, learner.executor, learner.config.aux
    start = perf_counter()
    on_stage("auxiliary")

    # Store the policy before the phase, π_old; the value targets V̂ are those of the policy phases,
    # unless they are recomputed here.
    if buffer.aux_progress is None:
        if aux.recompute_targets:
            _recompute_value_targets(learner, buffer)
        params = compute_dist_params(agent, buffer.as_segments(), executor=executor, phase="aux")
        buffer.aux_progress = AuxiliaryProgress(params, MeanAccumulator())
    progress = buffer.aux_progress
    start -= progress.seconds

    # An epoch uses all rollouts of the phase, or as much data as `iterations_per_epoch` have.
    num_iterations = aux.iterations_per_epoch or aux.every
    last = num_iterations if aux.iterations_from == "last" else None
    samples = buffer.auxiliary_samples(progress.old_dist_params, num_last=last)
    if samples.weight is not None:  # with a mean of 1 over the phase
        mean = executor.world.all_gather_cat(samples.weight).mean()
        samples = replace(samples, weight=samples.weight / mean)
    num_minibatches = aux.num_minibatches * (last or aux.every)
    num_used = aux.num_minibatches * num_iterations
    unit = learner.config.get_shuffle_unit(aux)
    step = executor.make_gradient_step(
        AuxiliaryLoss(agent, aux, executor.precision("aux")), learner.make_adam_settings("aux")
    )
    while progress.epoch < aux.epochs:
        on_stage(f"auxiliary {progress.epoch + 1}/{aux.epochs}")
        progress.seconds = perf_counter() - start
        on_epoch_start()
        order = samples.random_order(unit=unit, generator=learner.generator)
        minibatches = samples.minibatches(num_minibatches, order, unit=unit)
        for minibatch in islice(minibatches, num_used):
            progress.accumulator.add(*step(minibatch))
        on_epoch("aux", progress.epoch, progress.accumulator)
        progress.epoch += 1
    buffer.aux_progress = None

    # Restart the proximal policy at the current weights; update the observation statistics.
    if learner.proximal is not None:
        learner.proximal.reset(agent)
    learner.update_observation_statistics(buffer.rollout(buffer.num_filled - 1))
    means = _average_and_check(progress.accumulator.result(), executor.world)
    return means | {"time/auxiliary": perf_counter() - start}


def _recompute_value_targets(learner: Learner, buffer: PhaseBuffer) -> None:
    """Recompute the phase's value targets with the current value function and reward scale.

    Idempotent, so that an interrupted phase can start again.
    """
    rollouts = [buffer.rollout(slot) for slot in range(buffer.num_filled)]
    for rollout in rollouts:
        recompute_values(learner.agent, rollout, executor=learner.executor)
    for rollout, following in zip_longest(rollouts, rollouts[1:]):
        reward, bootstrap = learner.to_current_reward_scale(rollout)
        ended, next_value = rollout.first.roll(-1, dims=1), rollout.next_value.clone()
        ended[:, -1] = True
        if following is not None:  # its first value is that of the step after the last
            ended[:, -1], next_value[:, -1] = following.first[:, 0], following.value[:, 0]
        rescaled = replace(rollout, next_value=torch.where(ended, bootstrap, next_value))
        _, target = _estimate_targets(rescaled, reward, learner.config.ppo)
        rollout.value_target.copy_(target)


def _average_and_check(record: Record, world: World) -> Record:
    """Average the metrics of a phase over all processes, and return them if they are finite.

    Raises:
        ValueError: a loss or a gradient norm is not finite; the step was skipped.
    """
    record = world.average_record(record)
    bad = [x for x in record if x.endswith(("_loss", "_norm")) and not math.isfinite(record[x])]
    if bad:
        world.has_shared_error = True  # all fail alike, and know that all can save
        raise make_diverged_error(bad)
    return record


@torch.no_grad()
def compute_dist_params(
    agent: Agent, segments: Samples, *, executor: Executor, phase: Phase = "policy"
) -> Tensor:
    """Compute the distribution parameters `[S, L, P]` of the policy on S segments of L steps.

    `phase` is the phase that later computes the KL divergence from these parameters; both use
    its precision. With two precisions, the KL would be smallest not at the old weights, but at
    weights that compensate for the rounding.
    """

    def run_policy(segments: Samples) -> Tensor:
        inputs = (*segments.inputs, segments.action_mask)
        return agent.policy(*inputs, precision=executor.precision(phase))[0].dist_params

    return executor.infer_in_batches(segments, run_policy, phase=phase)


@torch.no_grad()
def estimate_rollout_kl(
    agent: Agent, samples: PolicySamples, *, executor: Executor, estimate: Literal["k1", "k3"]
) -> float:
    """Estimate the mean KL(behavior policy ‖ current policy) over all samples of a rollout."""
    params = compute_dist_params(agent, samples, executor=executor)
    log_prob = agent.policy_head.distribution(params).log_prob(samples.action)
    k1, k3 = objectives.estimate_kl_k1_and_k3(log_prob, samples.old_log_prob)
    mean = float(objectives.weighted_mean(k1 if estimate == "k1" else k3, samples.weight))
    return executor.world.average_record({estimate: mean})[estimate]
