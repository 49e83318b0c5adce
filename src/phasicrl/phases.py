"""The inner loops: targets, policy phase, auxiliary phase. Kind: state (change the agent through an optimiser, return numbers)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.optim import Optimizer

from phasicrl import objectives, returns
from phasicrl.config import AuxConfig, PPOConfig
from phasicrl.execution.compute import Compute, StepSettings, diverged
from phasicrl.models.agent import Agent
from phasicrl.models.distributions import Policy
from phasicrl.rollout import AuxiliarySamples, PhaseBuffer, PolicySamples, Rollout, Samples

Record = dict[str, float]
Noted = dict[str, Tensor]
"""Parts of a loss by name, 0-d, for the metrics."""


class MeanAccumulator:
    """Means weighted by samples. They are added up on their device and read once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._weights: dict[tuple[str, ...], float] = {}

    def add(self, names: tuple[str, ...], values: Float[Tensor, " n"], weight: float) -> None:
        """Add means over `weight` samples, one for each name; copied at once, as they may be overwritten afterwards (CUDA graphs)."""
        assert values.shape == (len(names),), f"{len(names)} names, {names}, but values of shape {tuple(values.shape)}"
        with torch.inference_mode():  # one kernel, however many names
            if names not in self._sums:
                self._sums[names] = torch.zeros_like(values, dtype=torch.float64)
                self._weights[names] = 0.0
            self._sums[names].add_(values, alpha=weight)
        self._weights[names] += weight

    def result(self) -> dict[str, float]:
        """The mean of every name that was added, in alphabetical order; NaN where all weights are zero."""
        sums: dict[str, tuple[float, float]] = {}
        for names, tensor in self._sums.items():
            for name, total in zip(names, tensor.tolist(), strict=True):
                before, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (before + total, weights + self._weights[names])
        return {name: total / weights if weights else math.nan for name, (total, weights) in sorted(sums.items())}


@dataclass(frozen=True)
class PolicyPhaseLoss:
    """Mean loss of the policy, the value function or both, running only the networks that it needs.

    Attributes:
        module: the agent.
        ppo: the knobs.
        with_policy: whether the policy learns.
        with_value: whether the value function learns.
    """

    module: Agent
    ppo: PPOConfig
    with_policy: bool
    with_value: bool

    def prepare(self, samples: PolicySamples) -> PolicySamples:
        """Normalise the minibatch's advantages, if that is how they are normalised."""
        if self.ppo.advantage_norm != "minibatch":
            return samples
        return dataclasses.replace(samples, advantage=returns.normalize(samples.advantage, unbiased=self.ppo.advantage_std == "unbiased"))

    def __call__(self, samples: PolicySamples, *weights: Tensor) -> tuple[Tensor, Noted]:
        """The loss and its parts; the one weight is that of the divergence."""
        agent, conditions, (kl_penalty,) = self.module, (samples.obs, samples.first, samples.state), weights
        if not self.with_policy:
            return self._value_loss(agent.value(*conditions), samples)
        if not self.with_value:
            return self._policy_loss(agent.policy(*conditions, samples.action_mask)[0], samples, kl_penalty)
        output = agent(*conditions, samples.action_mask)
        policy_loss, noted = self._policy_loss(output.policy, samples, kl_penalty)
        value_loss, noted_of_value = self._value_loss(output.value, samples)
        return policy_loss + value_loss, noted | noted_of_value

    def _policy_loss(self, policy: Policy, samples: PolicySamples, kl_penalty: Tensor) -> tuple[Tensor, Noted]:
        """`E[surrogate] − c H(π) + k E[divergence]`."""
        ppo, log_prob, old = self.ppo, policy.log_prob(samples.action), samples.old_log_prob
        if ppo.objective == "surrogate":
            loss = objectives.surrogate_loss(log_prob, old, samples.advantage, clip=ppo.clip).mean()
        else:
            loss = objectives.log_prob_loss(log_prob, samples.advantage).mean()
        entropy = policy.entropy().mean()
        if samples.old_policy is None:
            penalty = objectives.sampled_kl_penalty(log_prob, old).mean()
        else:
            penalty = policy.kl_from(self.module.policy_head.distribution(samples.old_policy)).mean()
        with torch.no_grad():
            k1, k3 = objectives.approximate_kl(log_prob, old)
            clipped = objectives.clipped_fraction(log_prob, old, clip=ppo.clip)
        noted = {"policy_loss": loss, "entropy": entropy, "old_approx_kl": k1.mean(), "approx_kl": k3.mean(), "clipfrac": clipped.mean()}
        if policy.mean_std is not None:
            noted["action_std"] = policy.mean_std.mean()
        return loss - ppo.entropy_coef * entropy + kl_penalty * penalty, {f"losses/{name}": value for name, value in noted.items()}

    def _value_loss(self, value: Tensor, samples: PolicySamples) -> tuple[Tensor, Noted]:
        """The weighted value loss; it is noted before the weight."""
        value, target, old = (self.module.in_value_units(x) for x in (value, samples.value_target, samples.old_value))
        loss = objectives.value_loss(value, target, old, clip=self.ppo.value_clip).mean()
        return self.ppo.value_coef * loss, {"losses/value_loss": loss}


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Mean joint loss of the auxiliary phase.

    Attributes:
        module: the agent, with an auxiliary head.
        aux: the knobs.
    """

    module: Agent
    aux: AuxConfig

    def prepare(self, samples: AuxiliarySamples) -> AuxiliarySamples:
        """Nothing here depends on the minibatch as a whole."""
        return samples

    def __call__(self, samples: AuxiliarySamples, *weights: Tensor) -> tuple[Tensor, Noted]:
        """The loss and its parts."""
        agent, aux = self.module, self.aux
        output = agent(samples.obs, samples.first, samples.state, samples.action_mask)
        assert output.aux_value is not None, "the auxiliary phase needs an agent with an auxiliary head"
        kl = output.policy.kl_from(agent.policy_head.distribution(samples.old_policy)).mean()
        aux_value, value, target = (agent.in_value_units(x) for x in (output.aux_value, output.value, samples.value_target))
        aux_loss = objectives.value_loss(aux_value, target).mean()
        real_loss = objectives.value_loss(value, target).mean()
        noted = {"losses/aux/kl_loss": kl, "losses/aux/aux_value_loss": aux_loss, "losses/aux/real_value_loss": real_loss}
        return objectives.joint_auxiliary_loss(kl, aux_loss, real_loss, beta_clone=aux.beta_clone, value_coef=aux.value_coef), noted


def compute_targets(rollout: Rollout, reward: Tensor, ppo: PPOConfig) -> tuple[PolicySamples, Record]:
    """Advantages and value targets V̂, written into the rollout.

    By GAE `V̂ = V + A`, with the advantage before it is normalised, unless `value_target` says otherwise; else V̂ are the returns.

    Args:
        rollout: T steps of B environments.
        reward: `[B, T]`, the rewards to learn from, normalised or not.
        ppo: the estimator, γ, λ, what a time limit is, and the kind of normalisation.
    """
    advantage = _advantages(rollout, reward, ppo)
    record = {"losses/explained_variance": returns.explained_variance(rollout.value, rollout.value_target)} if ppo.baseline else {}
    if ppo.advantage_norm == "batch":
        advantage = returns.normalize(advantage, unbiased=ppo.advantage_std == "unbiased")
    return rollout.policy_samples(advantage), record


def _advantages(rollout: Rollout, reward: Tensor, ppo: PPOConfig) -> Tensor:
    """Advantages `[B, T]` by the estimator, not normalised; the value targets are written into the rollout."""
    ends = (rollout.terminated, rollout.truncated)
    if not ppo.bootstrap_truncation:
        ends = (rollout.terminated | rollout.truncated, torch.zeros_like(rollout.truncated))
    # Without a value function there is nothing to put in place of what comes after the rollout: those returns are cut short.
    next_value = rollout.next_value if ppo.baseline else torch.zeros_like(rollout.next_value)
    if ppo.estimator == "n_step":
        rollout.value_target.copy_(returns.n_step_return(reward, rollout.value, next_value, *ends, gamma=ppo.gamma, n=ppo.n_step))
    elif ppo.estimator == "monte_carlo" or ppo.value_target == "monte_carlo":
        rollout.value_target.copy_(returns.monte_carlo_return(reward, next_value, *ends, gamma=ppo.gamma))
    if ppo.estimator != "gae":
        return rollout.value_target - rollout.value if ppo.baseline else rollout.value_target.clone()
    advantage = returns.gae(reward, rollout.value, next_value, *ends, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda)
    if ppo.value_target == "gae":
        rollout.value_target.copy_(rollout.value + advantage)
    return advantage


@torch.no_grad()
def revalue(agent: Agent, rollout: Rollout, *, compute: Compute) -> None:
    """Value the rollout's observations anew, by the value function as it is now.

    What lies in no rollout keeps its value from when it was seen: the final observations of truncated episodes, and what came last.
    """
    value = compute.per_segment(rollout.segments(), lambda piece: agent.value(piece.obs, piece.first, piece.state))
    inside = ~(rollout.truncated | rollout.terminated)[:, :-1]
    rollout.value.copy_(value)
    rollout.next_value[:, :-1] = torch.where(inside, value[:, 1:], rollout.next_value[:, :-1])


def policy_phase(
    agent: Agent,
    optimizers: Mapping[str, Optimizer],
    samples: PolicySamples,
    ppo: PPOConfig,
    *,
    compute: Compute,
    generator: Generator,
    kl_penalty: float | None = None,
    renew: Callable[[], PolicySamples] | None = None,
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
        kl_penalty: weight of the divergence's penalty, if not `ppo.kl_penalty`.
        renew: makes the samples anew, for `ppo.recompute_advantages`.
        stage: told what begins, for displays.

    Returns:
        Means over all samples and epochs, and the seconds spent; `losses/epoch_kl` is measured after the last policy epoch.
    """
    means, seconds = MeanAccumulator(), {"time/policy": 0.0, "time/value": 0.0}
    weight = ppo.kl_penalty if kl_penalty is None else kl_penalty
    penalty = torch.tensor(weight, device=compute.device)
    old_policy = policy_parameters(agent, samples, compute=compute) if weight and ppo.kl_estimate == "exact" else None
    samples = dataclasses.replace(samples, old_policy=old_policy, old_value=samples.old_value.clone())  # `renew` writes into the rollout
    networks = agent.networks() if ppo.grad_norm_of == "networks" else [list(agent.parameters())]
    record: Record = {}
    too_far = False
    for number, (with_policy, with_value) in enumerate(ppo.passes):
        with_policy = with_policy and not too_far
        if not with_policy and (not with_value or (too_far and agent.value_path != "separate")):
            break
        kind, start = "policy" if with_policy else "value", perf_counter()
        stage(kind)
        if number and renew is not None:
            samples = dataclasses.replace(renew(), old_policy=old_policy, old_value=samples.old_value)
        loss = PolicyPhaseLoss(agent, ppo, with_policy, with_value)
        # Joint passes have one optimiser, of which half goes on after a stop.
        settings = StepSettings(kind, networks, optimizers.get(kind, optimizers["policy"]), ppo.max_grad_norm)
        for minibatch in samples.minibatches(ppo.num_minibatches, by=ppo.minibatch_by, generator=generator):
            means.add(*compute.gradient_step(loss, minibatch, penalty, settings=settings))
        if with_policy and ppo.follows_kl:
            record["losses/epoch_kl"] = divergence(agent, samples, compute=compute, estimate=ppo.epoch_kl)
            too_far = ppo.target_kl is not None and record["losses/epoch_kl"] > ppo.target_kl
        compute.wait()
        seconds[f"time/{kind}"] += perf_counter() - start
    return _finite(means.result()) | record | seconds


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
    stage("auxiliary")
    samples = buffer.auxiliary_samples(policy_parameters(agent, buffer.segments(), compute=compute, phase="aux"))
    loss = AuxiliaryLoss(agent, aux)
    num_minibatches = aux.num_minibatches * aux.every
    settings = StepSettings("aux", agent.networks(), optimizer, aux.max_grad_norm)
    num_used = aux.num_minibatches * (aux.iterations_per_epoch or aux.every)
    for epoch in range(1, aux.epochs + 1):
        stage(f"auxiliary {epoch}/{aux.epochs}")
        # N < N_π: fewer minibatches, each still drawn from everything, because the order is shuffled over the whole phase.
        for minibatch in islice(samples.minibatches(num_minibatches, by=aux.minibatch_by, generator=generator), num_used):
            means.add(*compute.gradient_step(loss, minibatch, settings=settings))
    return _finite(means.result()) | {"time/auxiliary": perf_counter() - start}


def _finite(record: Record) -> Record:
    """The means of a phase, if its losses and gradients were finite throughout.

    Raises:
        ValueError: they were not. No step was made by such a gradient, and nothing may be saved as if all were well.
    """
    bad = [name for name, value in record.items() if name.endswith(("_loss", "_norm")) and not math.isfinite(value)]
    if bad:
        raise diverged(bad)
    return record


@torch.no_grad()
def policy_parameters(agent: Agent, segments: Samples, *, compute: Compute, phase: str = "policy") -> Tensor:
    """Parameters `[S, L, P]` of the current policy for every stored observation, by the policy's network alone.

    They are to be compared with later ones in a phase, and so are asked for in its precision: else their divergence would have its
    minimum where weights make up for rounding, not at those that are to be kept.
    """

    def parameters(piece: Samples) -> Tensor:
        return agent.policy(piece.obs, piece.first, piece.state, piece.action_mask)[0].dist_params

    return compute.per_segment(segments, parameters, phase=phase)


@torch.no_grad()
def divergence(agent: Agent, samples: PolicySamples, *, compute: Compute, estimate: Literal["k1", "k3"]) -> float:
    """Mean KL divergence, by one of its estimates, of the policy as it is now from the one that drew the actions."""

    def log_prob(piece: Samples) -> Tensor:
        assert isinstance(piece, PolicySamples)
        return agent.policy(piece.obs, piece.first, piece.state, piece.action_mask)[0].log_prob(piece.action)

    k1, k3 = objectives.approximate_kl(compute.per_segment(samples, log_prob), samples.old_log_prob)
    return float((k1 if estimate == "k1" else k3).mean())
