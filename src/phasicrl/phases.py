"""The inner loops: targets, policy phase, auxiliary phase. Kind: state (change the agent through an optimiser, return numbers)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from time import perf_counter

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from phasicrl import objectives, returns
from phasicrl.compute import Compute
from phasicrl.config import AuxConfig, PPOConfig
from phasicrl.metrics import MeanAccumulator
from phasicrl.models.agent import Agent
from phasicrl.models.heads import CategoricalPolicy
from phasicrl.rollout import AuxiliarySamples, PhaseBuffer, PolicySamples, Rollout, Samples

Record = dict[str, float]


def compute_targets(rollout: Rollout, reward: Tensor, ppo: PPOConfig) -> tuple[PolicySamples, Record]:
    """Advantages by GAE and value targets `V̂ = V + A` (with the advantage before it is normalised), written into the rollout.

    Args:
        rollout: T steps of B environments.
        reward: `[B, T]`, the rewards to learn from, normalised or not.
        ppo: γ, λ and the kind of normalisation.
    """
    advantage = returns.gae(
        reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda
    )
    rollout.value_target.copy_(rollout.value + advantage)
    record = {"losses/explained_variance": returns.explained_variance(rollout.value, rollout.value_target)}
    if ppo.advantage_norm == "batch":
        advantage = returns.normalize(advantage)
    return rollout.policy_samples(advantage), record


def policy_phase(
    agent: Agent,
    optimizers: Mapping[str, Optimizer],
    samples: PolicySamples,
    ppo: PPOConfig,
    *,
    compute: Compute,
    generator: Generator,
    stage: Callable[[str], None] = lambda name: None,
) -> Record:
    """One iteration of the policy phase: E_π epochs on equation 1 and E_V epochs on equation 2 of the PPG paper.

    Args:
        agent: is trained in place.
        optimizers: `policy` for joint and policy epochs, `value` for value epochs of their own.
        samples: the rollout with its advantages.
        ppo: the knobs.
        compute: how gradient steps are executed.
        generator: source of the order of minibatches.
        stage: told what begins, for displays.

    Returns:
        Means over all samples and epochs, and the seconds spent.
    """
    means, seconds = MeanAccumulator(), {"time/policy": 0.0, "time/value": 0.0}
    for with_policy, with_value in ppo.passes:
        kind, start = "policy" if with_policy else "value", perf_counter()
        stage(kind)
        loss_of = partial(_policy_phase_loss, agent, ppo, means, with_policy=with_policy, with_value=with_value)
        for minibatch in samples.minibatches(ppo.num_minibatches, by=ppo.minibatch_by, generator=generator):
            if ppo.advantage_norm == "minibatch":
                minibatch = dataclasses.replace(minibatch, advantage=returns.normalize(minibatch.advantage))
            norm = compute.gradient_step(
                loss_of, minibatch, parameters=agent.parameters(), optimizer=optimizers[kind], max_grad_norm=ppo.max_grad_norm
            )
            means.add({f"gradients/{kind}_norm": norm}, weight=len(minibatch))
        seconds[f"time/{kind}"] += perf_counter() - start
    return means.result() | seconds


def auxiliary_phase(
    agent: Agent,
    optimizer: Optimizer,
    buffer: PhaseBuffer,
    aux: AuxConfig,
    *,
    compute: Compute,
    generator: Generator,
    stage: Callable[[str], None] = lambda name: None,
) -> Record:
    """The auxiliary phase: E_aux epochs on equations 3 and 2 of the PPG paper, over all data of the policy phase.

    Args:
        agent: has an auxiliary value head.
        optimizer: steps all its parameters.
        buffer: a full phase.
        aux: the knobs.
        compute: how gradient steps are executed.
        generator: source of the order of minibatches.
        stage: told what begins, for displays.

    Returns:
        Means over all samples and epochs, and the seconds spent.
    """
    means, start = MeanAccumulator(), perf_counter()
    samples = buffer.auxiliary_samples(policy_parameters(agent, buffer.segments(), compute=compute))
    loss_of = partial(_auxiliary_loss, agent, aux, means)
    num_minibatches = aux.num_minibatches * aux.every
    num_used = aux.num_minibatches * (aux.iterations_per_epoch or aux.every)
    for epoch in range(1, aux.epochs + 1):
        stage(f"auxiliary {epoch}/{aux.epochs}")
        # N < N_π: fewer minibatches, each still drawn from everything, because the order is shuffled over the whole phase.
        for minibatch in islice(samples.minibatches(num_minibatches, by=aux.minibatch_by, generator=generator), num_used):
            norm = compute.gradient_step(
                loss_of, minibatch, parameters=agent.parameters(), optimizer=optimizer, max_grad_norm=aux.max_grad_norm
            )
            means.add({"gradients/aux_norm": norm}, weight=len(minibatch))
    return means.result() | {"time/auxiliary": perf_counter() - start}


@torch.no_grad()
def policy_parameters(agent: Agent, segments: Samples, *, compute: Compute) -> Tensor:
    """Parameters `[S, L, P]` of the current policy for every stored observation, by the policy's network alone."""
    parameters = []
    for segment in range(len(segments)):
        one = segments.take(slice(segment, segment + 1))
        one = one if one.state.shape[-1] else one.as_transitions()
        pieces = [agent.policy(p.obs, p.first, p.state, p.action_mask)[0].parameters for p, _ in compute.pieces(one)]
        parameters.append(torch.cat(pieces).reshape(segments.first.shape[1], -1))
    return torch.stack(parameters)


def _policy_phase_loss(
    agent: Agent, ppo: PPOConfig, means: MeanAccumulator, samples: PolicySamples, *, with_policy: bool, with_value: bool
) -> Tensor:
    """Mean loss of the policy, the value function or both, running only the networks it needs."""
    conditions = (samples.obs, samples.first, samples.state)
    if not with_policy:
        return _value_loss(agent.value(*conditions), samples, ppo, means)
    if not with_value:
        return _policy_loss(agent.policy(*conditions, samples.action_mask)[0], samples, ppo, means)
    output = agent(*conditions, samples.action_mask)
    return _policy_loss(output.policy, samples, ppo, means) + _value_loss(output.value, samples, ppo, means)


def _policy_loss(policy: CategoricalPolicy, samples: PolicySamples, ppo: PPOConfig, means: MeanAccumulator) -> Tensor:
    """`E[surrogate] − c H(π) + k E[½ log² r]`; notes its parts in `means`."""
    log_prob, old = policy.log_prob(samples.action), samples.old_log_prob
    loss = objectives.surrogate_loss(log_prob, old, samples.advantage, clip=ppo.clip).mean()
    entropy = policy.entropy().mean()
    penalty = objectives.sampled_kl_penalty(log_prob, old).mean()
    with torch.no_grad():
        k1, k3 = objectives.approximate_kl(log_prob, old)
        clipped = objectives.clipped_fraction(log_prob, old, clip=ppo.clip)
    noted = {"policy_loss": loss, "entropy": entropy, "old_approx_kl": k1.mean(), "approx_kl": k3.mean(), "clipfrac": clipped.mean()}
    means.add({f"losses/{name}": value for name, value in noted.items()}, weight=len(samples))
    return loss - ppo.entropy_coef * entropy + ppo.kl_penalty * penalty


def _value_loss(value: Tensor, samples: PolicySamples, ppo: PPOConfig, means: MeanAccumulator) -> Tensor:
    """The weighted value loss; notes it in `means` before the weight."""
    loss = objectives.value_loss(value, samples.value_target, samples.old_value, clip=ppo.value_clip).mean()
    means.add({"losses/value_loss": loss}, weight=len(samples))
    return ppo.value_coef * loss


def _auxiliary_loss(agent: Agent, aux: AuxConfig, means: MeanAccumulator, samples: AuxiliarySamples) -> Tensor:
    """Mean joint loss; notes its parts in `means`."""
    output = agent(samples.obs, samples.first, samples.state, samples.action_mask)
    assert output.aux_value is not None, "the auxiliary phase needs an agent with an auxiliary head"
    kl = output.policy.kl_from(agent.policy_head.distribution(samples.old_policy)).mean()
    aux_loss = objectives.value_loss(output.aux_value, samples.value_target).mean()
    real_loss = objectives.value_loss(output.value, samples.value_target).mean()
    means.add(
        {"losses/aux/kl_loss": kl, "losses/aux/aux_value_loss": aux_loss, "losses/aux/real_value_loss": real_loss}, weight=len(samples)
    )
    return objectives.joint_auxiliary_loss(kl, aux_loss, real_loss, beta_clone=aux.beta_clone, value_coef=aux.value_coef)
