"""The two phases: targets, epochs, minibatches. Kind: state (they train a learner).

They return numbers. What they minimize is in `objectives.py`, the advantages are in `returns.py`. A
loop of your own collects rollouts and calls `policy_phase` and `auxiliary_phase`, as
examples/own_loop.py does: they see to targets, learning rates, the renewal of advantages,
coefficients and statistics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from phasicrl import objectives, returns
from phasicrl.config import AuxConfig, PPOConfig, Precision
from phasicrl.distributed import ALONE, World
from phasicrl.execution.compute import Compute
from phasicrl.execution.plan import Phase
from phasicrl.learner import Learner, Record
from phasicrl.models.agent import Agent
from phasicrl.models.distributions import Policy
from phasicrl.normalize import EmaMoments
from phasicrl.optimize import diverged
from phasicrl.rollout import (
    AuxiliaryProgress,
    AuxiliarySamples,
    MeanAccumulator,
    Minibatch,
    PhaseBuffer,
    PolicySamples,
    Rollout,
    Samples,
)

Noted = dict[str, Tensor]
"""Parts of a loss by name, 0-d, for the metrics."""
Stage = Callable[[str], None]
"""Told the name of what begins, for displays."""


OnEpoch = Callable[[Phase, int, MeanAccumulator], None]
"""Told that an epoch has ended: of which kind, its number from 0, and the means so far."""


def _untold(*_: object) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class PolicyPhaseLoss:
    """Mean loss of the policy, the value function or both, running only the networks that it needs.

    Attributes:
        module: the agent.
        ppo: the knobs.
        with_policy: whether the policy learns.
        with_value: whether the value function learns.
        precision: of the encoders.
    """

    module: Agent
    ppo: PPOConfig
    with_policy: bool
    with_value: bool
    precision: Precision = "fp32"

    def __call__(self, samples: PolicySamples, *coefficients: Tensor) -> tuple[Tensor, Noted]:
        """The loss and its parts; the one coefficient is that of the divergence."""
        agent, precision, (kl_coef,) = self.module, self.precision, coefficients
        seen = (samples.obs, samples.first, samples.state)
        if not self.with_policy:
            return self._value_loss(agent.value(*seen, precision=precision), samples)
        if not self.with_value:
            policy, _ = agent.policy(*seen, samples.action_mask, precision=precision)
            return self._policy_loss(policy, samples, kl_coef)
        output = agent(*seen, samples.action_mask, precision=precision)
        policy_loss, noted = self._policy_loss(output.policy, samples, kl_coef)
        value_loss, noted_of_value = self._value_loss(output.value, samples)
        return policy_loss + value_loss, noted | noted_of_value

    def _policy_loss(
        self, policy: Policy, samples: PolicySamples, kl_coef: Tensor
    ) -> tuple[Tensor, Noted]:
        """`E[surrogate] − c H(π) + k E[divergence]`."""
        ppo, log_prob, old = self.ppo, policy.log_prob(samples.action), samples.old_log_prob
        advantage, near, old_policy = samples.advantage, old, None
        if samples.old_dist_params is not None:
            old_policy = self.module.policy_head.distribution(samples.old_dist_params)
        if ppo.proximal_decay is not None:
            assert old_policy is not None, "parameters of the proximal policy are missing"
            near = old_policy.log_prob(samples.action)
        if ppo.objective == "log_prob":
            loss = objectives.log_prob_loss(log_prob, advantage)
        elif ppo.proximal_decay is None:
            loss = objectives.surrogate_loss(log_prob, old, advantage, clip=ppo.clip)
        else:
            loss = objectives.decoupled_surrogate_loss(
                log_prob, near, old, advantage, clip=ppo.clip
            )

        def mean(values: Tensor) -> Tensor:
            return objectives.mean(values, samples.weight)

        loss, entropy = mean(loss), mean(policy.entropy())
        if ppo.kl_estimate == "exact" and old_policy is not None:
            penalty = mean(policy.kl_from(old_policy))
        else:
            penalty = mean(objectives.sampled_kl_penalty(log_prob, near))
        with torch.no_grad():
            k1, k3 = objectives.approximate_kl(log_prob, old)
            clipped = objectives.clipped_fraction(log_prob, near, clip=ppo.clip)
        noted = {
            "losses/policy_loss": loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": mean(k1),
            "losses/approx_kl": mean(k3),
            "losses/clipfrac": mean(clipped),
        }
        if policy.stds is not None:
            noted["losses/action_std"] = policy.stds.mean(-1).mean()
        return loss - ppo.entropy_coef * entropy + kl_coef * penalty, noted

    def _value_loss(self, value: Tensor, samples: PolicySamples) -> tuple[Tensor, Noted]:
        """The weighted value loss; it is noted before the weight."""
        in_units = self.module.in_value_units
        value, target, old = map(in_units, (value, samples.value_target, samples.old_value))
        loss = objectives.value_loss(value, target, old, clip=self.ppo.value_clip)
        loss = objectives.mean(loss, samples.weight)
        return self.ppo.value_coef * loss, {"losses/value_loss": loss}


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Mean joint loss of the auxiliary phase.

    Attributes:
        module: the agent, with an auxiliary head.
        aux: the knobs.
        precision: of the encoders.
    """

    module: Agent
    aux: AuxConfig
    precision: Precision = "fp32"

    def __call__(self, samples: AuxiliarySamples, *coefficients: Tensor) -> tuple[Tensor, Noted]:
        """The loss and its parts."""
        agent, aux = self.module, self.aux
        seen = (samples.obs, samples.first, samples.state, samples.action_mask)
        output = agent(*seen, precision=self.precision, in_aux_phase=True)
        assert output.aux_value is not None, "the auxiliary phase needs an auxiliary head"
        kl = output.policy.kl_from(agent.policy_head.distribution(samples.old_dist_params)).mean()
        values = (output.aux_value, output.value, samples.value_target)
        aux_value, value, target = map(agent.in_value_units, values)
        aux_loss = objectives.value_loss(aux_value, target).mean()
        real_loss = objectives.value_loss(value, target).mean()
        noted = {
            "losses/aux/kl_loss": kl,
            "losses/aux/aux_value_loss": aux_loss,
            "losses/aux/real_value_loss": real_loss,
        }
        weights = {"beta_clone": aux.beta_clone, "value_coef": aux.value_coef}
        return objectives.joint_auxiliary_loss(kl, aux_loss, real_loss, **weights), noted


def compute_targets(
    rollout: Rollout,
    reward: Tensor,
    ppo: PPOConfig,
    world: World = ALONE,
    moments: EmaMoments | None = None,
) -> tuple[PolicySamples, Record]:
    """Advantages and value targets V̂, which are written into the rollout.

    By GAE `V̂ = V + A`, with the advantage before it is normalized, unless `value_target` says
    otherwise; else V̂ are the returns.

    Args:
        rollout: T steps of B environments.
        reward: `[B, T]`, the rewards to learn from.
        ppo: the estimator, γ, λ, what a time limit is, and the kind of normalization.
        world: the processes whose rollouts are normalized together.
        moments: of the advantages of rollouts before this one, which is taken into them.
    """
    advantage, record = _advantages(rollout, reward, ppo), {}
    weight, told = None, (world.cat(rollout.value), world.cat(rollout.value_target))
    if ppo.collect_by == "episodes":
        flags = rollout.first, rollout.terminated | rollout.truncated
        counts = returns.in_whole_episodes(*map(world.cat, flags), at_most=ppo.max_episodes)
        record["charts/learned_fraction"] = fraction = float(counts.float().mean())
        weight = counts.to(advantage.dtype) / fraction
        told = told[0][counts], told[1][counts]
    if ppo.baseline:
        record["losses/explained_variance"] = returns.explained_variance(*told)
    if moments is not None:
        moments.update(advantage, world)
        advantage = (advantage - moments.mean) / (moments.variance.sqrt() + 1e-8)
        advantage = advantage.to(rollout.value.dtype)
    elif ppo.advantage_norm == "batch":
        advantage = world.cat(advantage)
        unbiased = ppo.advantage_std == "unbiased"
        advantage = returns.normalize(advantage, unbiased=unbiased, weight=weight)
        advantage = advantage[world.own(len(advantage))]
    weight = None if weight is None else weight[world.own(len(weight))]
    return rollout.policy_samples(advantage, weight), record


def normalize_minibatches(
    samples: PolicySamples, order: Tensor, ppo: PPOConfig, world: World = ALONE
) -> PolicySamples:
    """Normalize the advantages of each minibatch of an epoch, if that is how they are normalized.

    Args:
        samples: of the rollout.
        order: in which they are dealt out to the minibatches.
        ppo: the number of minibatches, and the kind of normalization.
        world: the processes of which each has a part of every minibatch.
    """
    if ppo.advantage_norm != "minibatch":
        return samples

    def dealt(values: Tensor) -> Tensor:
        return (values.flatten() if ppo.minibatch_by == "transitions" else values)[order]

    def by_minibatch(values: Tensor) -> Tensor:  # those of all ranks, rank by rank
        parts = world.cat(dealt(values).reshape(1, ppo.num_minibatches, -1))
        return parts.transpose(0, 1).flatten(1)

    weight = None if samples.weight is None else by_minibatch(samples.weight)
    unbiased = ppo.advantage_std == "unbiased"
    normalized = returns.normalize(
        by_minibatch(samples.advantage), unbiased=unbiased, by_row=True, weight=weight
    )
    own = normalized.unflatten(1, (world.size, -1))[:, world.rank]
    rows = dealt(samples.advantage)
    advantage = torch.empty_like(rows)
    advantage[order] = own.reshape(rows.shape)
    return dataclasses.replace(samples, advantage=advantage.view_as(samples.advantage))


def _targets_and_units(
    learner: Learner, rollout: Rollout, reward: Tensor
) -> tuple[PolicySamples, Record]:
    """The targets, which are taken into the statistics that values are normalized by, if they are.

    The first targets give the value heads their units. What the heads have said of this rollout is
    then read in these units, too, and the targets are computed once more from that: values, targets
    and what is learned have one meaning from the start.
    """
    agent, world = learner.agent, learner.compute.world
    samples, record = _targets(learner, rollout, reward)
    target = world.cat(rollout.value_target)
    if samples.weight is not None:
        target = target[world.cat(samples.weight) > 0]
    if agent.update_value_statistics(target):
        assert agent.value_normalizer is not None
        for value in (rollout.value, rollout.next_value):
            value.copy_(agent.value_normalizer.denormalize(value))
        samples, record = _targets(learner, rollout, reward)
    return samples, record


def _targets(learner: Learner, rollout: Rollout, reward: Tensor) -> tuple[PolicySamples, Record]:
    """`compute_targets` with what a learner has."""
    world, moments = learner.compute.world, learner.moments_before_rollout()
    return compute_targets(rollout, reward, learner.config.ppo, world, moments)


def _advantages(rollout: Rollout, reward: Tensor, ppo: PPOConfig) -> Tensor:
    """Advantages `[B, T]` by the estimator, not normalized.

    The value targets are written into the rollout.
    """
    value, target, gamma = rollout.value, rollout.value_target, ppo.gamma
    ends = (rollout.terminated, rollout.truncated)
    if not ppo.bootstrap_truncation:
        ends = (rollout.terminated | rollout.truncated, torch.zeros_like(rollout.truncated))
    # Without a value function there is nothing to put in place of what comes after the rollout:
    # those returns are cut short.
    next_value = rollout.next_value if ppo.baseline else torch.zeros_like(rollout.next_value)
    if ppo.estimator == "n_step":
        target.copy_(
            returns.n_step_return(reward, value, next_value, *ends, gamma=gamma, n=ppo.n_step)
        )
    elif ppo.estimator == "monte_carlo" or ppo.value_target == "monte_carlo":
        target.copy_(returns.monte_carlo_return(reward, next_value, *ends, gamma=gamma))
    if ppo.estimator != "gae":
        return target - value if ppo.baseline else target.clone()
    advantage = returns.gae(
        reward, value, next_value, *ends, gamma=gamma, gae_lambda=ppo.gae_lambda
    )
    if ppo.value_target == "gae":
        target.copy_(value + advantage)
    return advantage


@torch.no_grad()
def revalue(agent: Agent, rollout: Rollout, *, compute: Compute) -> None:
    """Value the rollout's observations anew, by the value function as it is now.

    What lies in another rollout, or in none, keeps its value from when it was seen: what came last,
    and the final observations of truncated episodes.
    """
    precision = compute.precision("value")

    def value_of(piece: Samples) -> Tensor:
        return agent.value(piece.obs, piece.first, piece.state, precision=precision)

    value = compute.per_segment(rollout.segments(), value_of)
    inside = ~(rollout.truncated | rollout.terminated)[:, :-1]
    rollout.value.copy_(value)
    rollout.next_value[:, :-1] = torch.where(inside, value[:, 1:], rollout.next_value[:, :-1])


def policy_phase(learner: Learner, rollout: Rollout, reward: Tensor | None = None, *,
                 stage: Stage = _untold, on_epoch: OnEpoch = _untold) -> Record:  # fmt: skip
    """One policy phase iteration: E_π epochs on equation 1, E_V on equation 2 of the PPG paper.

    Args:
        learner: is trained in place.
        rollout: T steps of B environments; value targets are written into it.
        reward: `[B, T]`, what to learn from in place of the rollout's rewards. It is not kept:
            `aux.recompute_targets` goes back to the rollout's, so add a bonus to those then.
        stage: told what begins, for displays.
        on_epoch: told what ends.

    Returns:
        Means over all samples and epochs, and seconds; `losses/epoch_kl` is of the last epoch.

    Raises:
        ValueError: training has diverged.
    """
    agent, compute, ppo = learner.agent, learner.compute, learner.config.ppo
    record = learner.start_iteration()
    if reward is None:
        reward, of_rewards = learner.learning_reward(rollout)
        record |= of_rewards
    samples, of_targets = _targets_and_units(learner, rollout, reward)
    record |= of_targets | learner.look_at_network(rollout)
    means, seconds = MeanAccumulator(), {"time/policy": 0.0, "time/value": 0.0}
    exact = learner.kl_coef and ppo.kl_estimate == "exact" and learner.proximal is None
    old_dist_params = dist_params(agent, samples, compute=compute) if exact else None
    # Recomputed values go into the rollout: the old ones are kept apart.
    kept = {"old_dist_params": old_dist_params, "old_value": samples.old_value.clone()}
    samples = dataclasses.replace(samples, **kept)
    kl_coef, too_far = torch.tensor(learner.kl_coef, device=compute.device), False
    for epoch, (with_policy, with_value) in enumerate(ppo.passes):
        if too_far and with_policy and not (with_value and agent.value_path != "shared"):
            continue  # the value half of a joint epoch on one network moves the policy as well
        with_policy = with_policy and not too_far
        phase: Phase = "policy" if with_policy else "value"
        start = perf_counter()
        stage(phase)
        if epoch and ppo.recompute_advantages:
            revalue(agent, rollout, compute=compute)
            renewed, _ = _targets(learner, rollout, reward)
            samples = dataclasses.replace(renewed, **kept)
        loss = PolicyPhaseLoss(agent, ppo, with_policy, with_value, compute.precision(phase))
        step = compute.gradient_step(loss, learner.settings(phase))
        minibatches = _dealt_out(learner, samples)
        for minibatch in _near_average(learner, minibatches) if with_policy else minibatches:
            means.add(*step(minibatch, kl_coef))
        if with_policy and ppo.follows_kl:
            kl = divergence(agent, samples, compute=compute, estimate=ppo.epoch_kl)
            record["losses/epoch_kl"] = kl
            too_far = ppo.target_kl is not None and kl > ppo.target_kl
        compute.wait()
        seconds["time/policy" if with_policy else "time/value"] += perf_counter() - start
        on_epoch(phase, epoch, means)
    if "losses/epoch_kl" in record:
        record |= learner.follow_kl(record["losses/epoch_kl"])
    if not learner.auxiliary_phase_is_due:
        learner.update_observation_statistics(rollout)
    return _finite(compute.world.mean_of(means.result())) | record | seconds


def _dealt_out(learner: Learner, samples: PolicySamples) -> Iterator[Minibatch[PolicySamples]]:
    """The minibatches of an epoch, in random order."""
    ppo, by = learner.config.ppo, learner.config.ppo.minibatch_by
    order = samples.random_order(by=by, generator=learner.generator)
    dealt = normalize_minibatches(samples, order, ppo, learner.compute.world)
    return dealt.minibatches(ppo.num_minibatches, order, by=by)


def auxiliary_phase(
    learner: Learner, buffer: PhaseBuffer, *, stage: Stage = _untold, on_epoch: OnEpoch = _untold,
    before_epoch: Callable[[], None] = lambda: None,
) -> Record:  # fmt: skip
    """The auxiliary phase: E_aux epochs on equations 3 and 2 of the PPG paper.

    They go over all data of the phase. How far it is stands in the buffer. If it is left by an
    exception, the next call goes on with the minibatch that was under way.

    Args:
        learner: is trained in place; its agent has an auxiliary value head.
        buffer: a full phase.
        stage: told what begins, for displays.
        on_epoch: told what ends.
        before_epoch: called when learner and buffer hold all that the rest of the phase needs.

    Returns:
        Means over all samples and epochs, and the seconds spent.

    Raises:
        ValueError: training has diverged.
    """
    agent, compute, aux = learner.agent, learner.compute, learner.config.aux
    assert aux is not None, "the configuration has no auxiliary phase"
    start = perf_counter()
    stage("auxiliary")
    if buffer.progress is None:
        if aux.recompute_targets:
            _recompute_targets(learner, buffer)
        old_dist_params = dist_params(agent, buffer.segments(), compute=compute, phase="aux")
        buffer.progress = AuxiliaryProgress(old_dist_params, MeanAccumulator())
    progress = buffer.progress
    start -= progress.seconds
    num_iterations = aux.iterations_per_epoch or aux.every
    last = num_iterations if aux.iterations_from == "last" else None
    samples = buffer.auxiliary_samples(progress.old_dist_params, last=last)
    loss = AuxiliaryLoss(agent, aux, compute.precision("aux"))
    step = compute.gradient_step(loss, learner.settings("aux"))
    num_minibatches = aux.num_minibatches * (last or aux.every)
    num_used = aux.num_minibatches * num_iterations
    while progress.epoch < aux.epochs:
        stage(f"auxiliary {progress.epoch + 1}/{aux.epochs}")
        if progress.order is None:
            progress.seconds = perf_counter() - start
            before_epoch()
            progress.order = samples.random_order(by=aux.minibatch_by, generator=learner.generator)
        # N < N_π: fewer minibatches, each still drawn from everything that is in the order.
        minibatches = samples.minibatches(num_minibatches, progress.order, by=aux.minibatch_by)
        for minibatch in islice(minibatches, progress.num_done, num_used):
            progress.means.add(*step(minibatch))
            progress.num_done += 1
        on_epoch("aux", progress.epoch, progress.means)
        progress.epoch, progress.num_done, progress.order = progress.epoch + 1, 0, None
    buffer.progress = None
    if learner.proximal is not None:
        learner.proximal.reset(agent)
    learner.update_observation_statistics(buffer.rollout(buffer.num_filled - 1))
    means = compute.world.mean_of(progress.means.result())
    return _finite(means) | {"time/auxiliary": perf_counter() - start}


def _recompute_targets(learner: Learner, buffer: PhaseBuffer) -> None:
    """Compute V̂ of a phase anew, by the value function and the scale of rewards of now.

    Done twice it gives the same: what is read is not written over.
    """
    rollouts = [buffer.rollout(slot) for slot in range(buffer.num_filled)]
    for rollout in rollouts:
        revalue(learner.agent, rollout, compute=learner.compute)
    for rollout, following in zip_longest(rollouts, rollouts[1:]):
        reward, kept = learner.in_units_of_now(rollout)
        next_value = torch.where(rollout.truncated, kept, rollout.next_value)
        next_value[:, -1] = kept[:, -1]
        if following is not None:
            goes_on = ~following.first[:, 0]
            next_value[:, -1] = torch.where(goes_on, following.value[:, 0], kept[:, -1])
        ahead = dataclasses.replace(rollout, next_value=next_value)
        _advantages(ahead, reward, learner.config.ppo)


def _finite(record: Record) -> Record:
    """The means of a phase, if its losses and gradients were finite throughout.

    Raises:
        ValueError: they were not. No step was made by such a gradient, and nothing may be saved as
            if all were well.
    """
    checked = {name: record[name] for name in record if name.endswith(("_loss", "_norm"))}
    if bad := [name for name, value in checked.items() if not math.isfinite(value)]:
        raise diverged(bad)
    return record


@torch.no_grad()
def dist_params(
    agent: Agent, segments: Samples, *, compute: Compute, phase: Phase = "policy"
) -> Tensor:
    """Parameters `[S, L, P]` of the policy's distribution for every stored observation.

    Only the policy's network runs. They are to be compared with later ones in a phase, and so are
    asked for in its precision: else their divergence would have its minimum where weights make up
    for rounding, not at those that are to be kept.
    """
    precision = compute.precision(phase)

    def of_piece(piece: Samples) -> Tensor:
        seen = (piece.obs, piece.first, piece.state, piece.action_mask)
        return agent.policy(*seen, precision=precision)[0].dist_params

    return compute.per_segment(segments, of_piece, phase=phase)


def _near_average(
    learner: Learner, minibatches: Iterable[Minibatch[PolicySamples]]
) -> Iterator[Minibatch[PolicySamples]]:
    """The minibatches with what the average of the weights says of each, before its step.

    It takes in the weights after each step. Without an average they are as they were.
    """
    if learner.proximal is None:
        yield from minibatches
        return
    for minibatch in minibatches:
        one = minibatch.gathered()
        near = dist_params(learner.proximal.agent, one.source, compute=learner.compute)
        yield dataclasses.replace(one, source=dataclasses.replace(one.source, old_dist_params=near))
        learner.proximal.follow(learner.agent)


@torch.no_grad()
def divergence(
    agent: Agent, samples: PolicySamples, *, compute: Compute, estimate: Literal["k1", "k3"]
) -> float:
    """Mean KL divergence of the policy of now from the one that drew the actions, estimated."""
    precision = compute.precision("policy")

    def log_prob(piece: Samples) -> Tensor:
        assert isinstance(piece, PolicySamples)
        seen = (piece.obs, piece.first, piece.state, piece.action_mask)
        policy, _ = agent.policy(*seen, precision=precision)
        return policy.log_prob(piece.action)

    k1, k3 = objectives.approximate_kl(compute.per_segment(samples, log_prob), samples.old_log_prob)
    mean = float(objectives.mean(k1 if estimate == "k1" else k3, samples.weight))
    return compute.world.mean_of({estimate: mean})[estimate]
