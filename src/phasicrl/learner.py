"""What learns: the agent, its optimizers, normalizers, coefficients and schedules. Kind: state.

All of it is in `state_dict`, and the same in every process of a run. A learner knows nothing of
files, clocks and displays.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Adam

from phasicrl import objectives, optimize
from phasicrl.config import Config
from phasicrl.execution.compute import Compute
from phasicrl.execution.plan import Phase
from phasicrl.execution.step import StepSettings
from phasicrl.models.agent import Agent
from phasicrl.models.encoders import in_precision
from phasicrl.models.proximal import ProximalPolicy
from phasicrl.normalize import EmaMoments, RewardNormalizer
from phasicrl.rollout import Rollout

Record = dict[str, float]
"""Metrics of one iteration by their full names."""

_LOOKS, _LOOKED_AT = 30, 128
"""How often the network is looked at in a run, about, and at how many observations at least."""


class Learner:
    """An agent and everything that its training remembers.

    Args:
        config: the run's configuration.
        agent: is trained; it is on the compute's device.
        compute: executes gradient steps.
        generator: source of the order of minibatches.

    Attributes:
        optimizers: an Adam over all parameters for each kind of step: `policy`, `value` if its
            epochs are counted apart, `aux`, which may be the policy's.
        reward_normalizer: None if rewards are not normalized.
        proximal: the policy that updates are kept near to; None if it is the one that acted.
        advantage_moments: what advantages are normalized by; None if that is of each batch alone.
        iteration: number of policy phases so far.
        kl_coef: weight of the divergence's penalty.
        rate_factor: what learning rates are multiplied by, if they follow the divergence.
    """

    def __init__(
        self, config: Config, agent: Agent, compute: Compute, generator: Generator
    ) -> None:
        self.config, self.agent, self.compute, self.generator = config, agent, compute, generator
        self.optimizers = _make_optimizers(config, agent)
        self.reward_normalizer: RewardNormalizer | None = None
        if (norm := config.reward_norm) is not None:
            normalizer = RewardNormalizer(
                config.env.num_envs,
                gamma=config.reward_gamma,
                clip=norm.clip,
                per_step=norm.per == "step",
            )
            self.reward_normalizer = normalizer.to(compute.device)
        decay = config.ppo.proximal_decay
        self.proximal = None if decay is None else ProximalPolicy(agent, decay)
        self.advantage_moments: EmaMoments | None = None
        if config.ppo.advantage_decay:
            self.advantage_moments = EmaMoments(config.ppo.advantage_decay).to(compute.device)
        self._moments_before = self.advantage_moments
        # Found once: every epoch asks for them.
        self._networks = agent.networks()
        of_agent = [list[nn.Parameter](agent.parameters())]
        self._clipped = of_agent if config.ppo.grad_norm_of == "agent" else self._networks
        self.iteration = 0
        self.kl_coef = config.ppo.kl_penalty
        self.rate_factor = 1.0

    @property
    def phase(self) -> int:
        """Number of the phase that the latest policy phase belongs to, from 1."""
        return max(self.iteration - 1, 0) // self.config.phase_length + 1

    @property
    def auxiliary_phase_is_due(self) -> bool:
        """Whether an auxiliary phase follows the latest policy phase.

        One does every k-th time that the buffer is full. None follows the run's last policy phase
        (OPPG ppg.py:259).
        """
        config = self.config
        is_under_way = 0 < self.iteration < config.num_iterations
        return config.has_auxiliary_phase and is_under_way and self.iteration % config.period == 0

    @property
    def begins_statistics(self) -> bool:
        """Whether the next rollout's observations enter their statistics before its targets."""
        norm = self.config.obs_norm
        return norm is not None and norm.from_first_rollout and self.iteration == 0

    def start_iteration(self) -> Record:
        """Count the iteration and set the learning rates, which are a function of progress.

        Returns those of the policy phase.
        """
        progress = self.iteration * self.config.batch_size / self.config.budget
        self.iteration += 1
        self._moments_before = copy.deepcopy(self.advantage_moments)
        for name, optimizer in self.optimizers.items():
            for network, group in enumerate(optimizer.param_groups):
                group["lr"] = self._learning_rate(name, network, progress)
        rates = [group["lr"] for group in self.optimizers["policy"].param_groups]
        record = {"charts/learning_rate": rates[0]}
        if self.config.ppo.value_learning_rate is not None:
            record["charts/value_learning_rate"] = rates[1]
        return record

    def moments_before_rollout(self) -> EmaMoments | None:
        """The moments of advantages as they were before this iteration's, to be updated once."""
        self.advantage_moments = copy.deepcopy(self._moments_before)
        return self.advantage_moments

    def learning_reward(self, rollout: Rollout) -> tuple[Tensor, Record]:
        """The rewards to learn from, `[B, T]`: clipped, normalized, both, or as they came.

        The statistics that they are normalized by include this rollout. The scale before is noted
        in it: the value function that acted has it.
        """
        norm, normalizer = self.config.reward_norm, self.reward_normalizer
        reward = self._clipped_reward(rollout)
        if normalizer is None:
            return reward, {}
        by_termination = norm is not None and norm.reset_at == "termination"
        starts_anew = rollout.terminated if by_termination else rollout.first
        world, moments = self.compute.world, normalizer.moments
        before = torch.where(moments.count > 0, normalizer.scale, 0.0)
        reward = normalizer(world.cat(reward), world.cat(starts_anew))
        rollout.reward_scale.copy_(before)
        clipped = float((reward.abs() >= normalizer.clip).float().mean())
        record = {"rewards/scale": float(normalizer.scale), "rewards/clipped_fraction": clipped}
        return reward[world.own(len(reward))], record

    def in_units_of_now(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The rewards of an earlier rollout and its `next_value`, `[B, T]`, in today's scale."""
        reward, normalizer = self._clipped_reward(rollout), self.reward_normalizer
        if normalizer is None:
            return reward, rollout.next_value
        scale = rollout.reward_scale
        ratio = torch.where(scale > 0, scale / normalizer.scale.float(), 1.0)
        return normalizer.scaled(reward), rollout.next_value * ratio.unsqueeze(1)

    def _clipped_reward(self, rollout: Rollout) -> Tensor:
        clip = self.config.ppo.reward_clip
        return rollout.reward if clip is None else rollout.reward.clamp(-clip, clip)

    def update_observation_statistics(self, rollout: Rollout) -> None:
        """Take a rollout's observations into their statistics, when all has been learned from it.

        So a rollout and all epochs over it see the same statistics. The first rollout may have
        begun them already.
        """
        norm = self.config.obs_norm
        if norm is not None and not (norm.from_first_rollout and self.iteration <= 1):
            self.agent.reader.update(rollout.obs, self.compute.world)

    @torch.no_grad()
    def look_at_network(self, rollout: Rollout) -> Record:
        """The shares of dormant features and of clipped observations, about 30 times in a run.

        Of some steps of every environment: a pass over them costs little, one over all does not.
        """
        if (self.iteration - 1) % max(1, self.config.num_iterations // _LOOKS):
            return {}
        world, reader = self.compute.world, self.agent.reader
        apart = max(1, self.config.batch_size // _LOOKED_AT)
        some = rollout.obs[:, ::apart].flatten(0, 1)
        with in_precision(self.compute.precision("policy"), some.device):
            features = self.agent.encoder(reader(some)).float().abs().mean(0)
        dormant = objectives.dormant_fraction(world.cat(features[None]).mean(0))
        record = {"network/dormant_fraction": float(dormant)}
        if reader.normalizer is not None:
            clipped = {"observations/clipped_fraction": reader.clipped_fraction(some)}
            record |= world.mean_of(clipped)
        return record

    def follow_kl(self, kl: float) -> Record:
        """Adapt what is steered by the divergence of an iteration's last epoch.

        Returns the penalty's weight that was used.
        """
        ppo, record = self.config.ppo, {}
        if ppo.kl_penalty_target is not None:
            record["losses/kl_penalty"] = self.kl_coef
            coef = objectives.adapted_kl_coef(self.kl_coef, kl, target=ppo.kl_penalty_target)
            self.kl_coef = coef
        if ppo.schedule == "adaptive_kl":
            rate = ppo.learning_rate * self.rate_factor
            rate = objectives.adapted_learning_rate(rate, kl, target=ppo.schedule_kl)
            self.rate_factor = rate / ppo.learning_rate
        return record

    def settings(self, phase: Phase) -> StepSettings:
        """How gradients become steps in a phase."""
        config, world = self.config, self.compute.world
        mean = world.mean_ if world.size > 1 else None  # without it, a step can be one call
        if phase == "aux":
            assert config.aux is not None, "there is no auxiliary phase"
            most = config.aux.max_grad_norm
            return StepSettings(phase, self._networks, self.optimizers["aux"], most, mean)
        # Joint passes have one optimizer, of which half goes on after a stop.
        optimizer = self.optimizers.get(phase, self.optimizers["policy"])
        return StepSettings(phase, self._clipped, optimizer, config.ppo.max_grad_norm, mean)

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive."""
        normalizer = self.reward_normalizer
        return {
            "agent": self.agent.state_dict(),
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "reward_normalizer": None if normalizer is None else normalizer.state_dict(),
            "proximal": None if self.proximal is None else self.proximal.state_dict(),
            "advantage_moments": (moments := self.advantage_moments) and moments.state_dict(),
            "generator": self.generator.get_state(),
            "iteration": self.iteration,
            "kl_coef": self.kl_coef,
            "rate_factor": self.rate_factor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back `state_dict`."""
        self.agent.load_state_dict(state["agent"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
            optimize.restore_layout_(optimizer)
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_state_dict(state["reward_normalizer"])
        if self.proximal is not None:
            self.proximal.load_state_dict(state["proximal"])
        if self.advantage_moments is not None:
            self.advantage_moments.load_state_dict(state["advantage_moments"])
        self.generator.set_state(state["generator"])
        self.iteration = state["iteration"]
        self.kl_coef, self.rate_factor = state["kl_coef"], state["rate_factor"]

    def _learning_rate(self, optimizer: str, network: int, progress: float) -> float:
        """Step size of an optimizer for one of the agent's networks, at a share of the budget."""
        ppo, aux = self.config.ppo, self.config.aux
        rate = (ppo.learning_rate, ppo.value_learning_rate or ppo.learning_rate)[network]
        if optimizer == "aux" and aux is not None and aux.optimizer == "own":
            rate = aux.learning_rate
        return rate * (1 - progress) if ppo.schedule == "linear" else rate * self.rate_factor


def _make_optimizers(config: Config, agent: Agent) -> dict[str, Adam]:
    """The optimizers by name; `optimize.step_` steps them."""

    def adam() -> Adam:
        ppo = config.ppo
        groups = [{"params": each, "eps_hat": ppo.adam_eps_hat} for each in agent.networks()]
        return Adam(groups, lr=ppo.learning_rate, betas=ppo.adam_betas, eps=ppo.adam_eps)

    optimizers = {"policy": adam()}
    if (False, True) in config.ppo.passes:
        optimizers["value"] = adam()
    if config.aux is not None and config.has_auxiliary_phase:
        optimizers["aux"] = adam() if config.aux.optimizer == "own" else optimizers["policy"]
    return optimizers
