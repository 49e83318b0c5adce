"""Learner: agent, optimizers, normalizers, coefficients and schedules. Kind: state.

`state_dict` holds all of it, and is equal in every process of a run.
"""

import copy
import math
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Adam

from phasicrl import objectives, optimize
from phasicrl.config import Config, ScheduleFunction
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Phase
from phasicrl.execution.step import AdamSettings
from phasicrl.models.agent import Agent, diagnose_networks
from phasicrl.models.proximal import ProximalPolicy
from phasicrl.normalize import EmaMoments, RewardNormalizer
from phasicrl.rollout import Rollout

Record = dict[str, float]
"""Metrics of one iteration by their full names."""

_DIAGNOSTICS_PER_RUN, _MIN_OBS = 30, 128
"""Approximate number of network diagnostics per run, and minimum observations for each."""
_SAVED_FIELDS = ("iteration", "env_steps", "kl_coef", "lr_multiplier")
_SAVED_MODULES = ("agent", "reward_normalizer", "proximal", "advantage_moments")


class Learner:
    """Agent and all state of its training.

    Args:
        config: configuration of the run.
        agent: networks to train, on the device of `executor`.
        executor: runs gradient steps.
        generator: random generator that shuffles the minibatches.
        schedule: function of the user that changes options.

    Attributes:
        optimizers: Adam over all parameters by kind of step: `policy`, `value` if value epochs are
            separate, and `aux`, which may be the policy's.
        reward_normalizer: running scale of the rewards; None if they are not normalized.
        proximal: average of the weights that PPO-EWMA clips around; None without PPO-EWMA.
        advantage_moments: running moments of the advantages; None if each batch has its own.
        scheduled_config: configuration with the current values of options that follow schedules.
        iteration: number of rollouts since the start of the run, each with its policy phase.
        env_steps: number of environment steps of these rollouts, over all processes.
        kl_coef: weight of the KL penalty.
        lr_multiplier: factor of the policy phase's learning rates, adapted to the KL.
    """

    def __init__(
        self, config: Config, agent: Agent, executor: Executor, generator: Generator,
        schedule: ScheduleFunction | None = None,
    ) -> None:  # fmt: skip
        self.config, self.agent, self.executor, self.generator = config, agent, executor, generator
        self.schedule, self.scheduled_config = schedule, config.with_scheduled_values(schedule, 0.0)
        self.optimizers = _make_optimizers(config, agent)
        self.reward_normalizer: RewardNormalizer | None = None
        if (norm := config.reward_norm).per != "none":
            options = {"gamma": config.reward_norm_gamma, "clip": norm.clip}
            per_step, num_envs = norm.per == "step", config.env.num_envs
            normalizer = RewardNormalizer(num_envs, **options, per_step=per_step)
            self.reward_normalizer = normalizer.to(executor.device)
        decay = config.ppo.proximal_decay
        self.proximal = None if decay is None else ProximalPolicy(agent, decay)
        decay = config.ppo.advantage_decay if config.ppo.advantage_norm == "batch" else None
        self.advantage_moments = EmaMoments(decay).to(executor.device) if decay else None
        self._previous_moments = self.advantage_moments
        # Gradients are clipped by the norm of each network, or by their common norm.
        self._network_params = agent.params_per_network()
        whole = [list[nn.Parameter](agent.parameters())]
        self._clip_groups = whole if config.ppo.grad_norm_of == "agent" else self._network_params
        self.iteration, self.env_steps = 0, 0
        self.kl_coef = config.ppo.kl_penalty
        self.lr_multiplier = 1.0

    @property
    def phase_number(self) -> int:
        """Number of the PPG phase that the latest policy phase belongs to, from 1."""
        return max(self.iteration - 1, 0) // self.config.rollouts_per_phase + 1

    @property
    def is_auxiliary_phase_due(self) -> bool:
        """Return whether an auxiliary phase follows the latest policy phase.

        One follows every `config.aux_phase_interval` iterations, but none at the run's end (OPPG
        ppg.py:259).
        """
        return self.ends_aux_interval and self.env_steps < self.config.budget

    @property
    def is_last_auxiliary_phase_skipped(self) -> bool:
        """Return whether an auxiliary phase would be due if the run were longer."""
        return self.ends_aux_interval and not self.is_auxiliary_phase_due

    @property
    def ends_aux_interval(self) -> bool:
        """Return whether an auxiliary phase is due, or skipped as the run is at its end."""
        is_last = self.iteration > 0 and self.iteration % self.config.aux_phase_interval == 0
        return self.config.has_auxiliary_phase and is_last

    @property
    def updates_obs_norm_before_values(self) -> bool:
        """Return whether the next rollout updates the observation statistics before its values."""
        norm = self.config.obs_norm
        return norm.statistics != "none" and norm.from_first_rollout and self.iteration == 0

    def start_iteration(self) -> Record:
        """Count the iteration, apply the schedules, and return the values as metrics."""
        self._apply_schedules(self.env_steps)
        self.iteration += 1
        self.env_steps += self.config.batch_size
        self._previous_moments = copy.deepcopy(self.advantage_moments)
        rates = [group["lr"] for group in self.optimizers["policy"].param_groups]
        record = {"charts/learning_rate": rates[0]}
        if self.scheduled_config.ppo.value_learning_rate is not None and len(rates) > 1:
            record["charts/value_learning_rate"] = rates[1]
        if self.schedule or self.config.ppo.clip_schedule != "constant":
            record["charts/clip"] = self.scheduled_config.ppo.clip or math.inf
        if self.schedule or self.config.ppo.entropy_schedule != "constant":
            record["charts/entropy_coef"] = self.scheduled_config.ppo.entropy_coef
        return record

    def rewind_advantage_moments(self) -> EmaMoments | None:
        """Restore and return the advantage moments as they were before this iteration."""
        self.advantage_moments = copy.deepcopy(self._previous_moments)
        return self.advantage_moments

    def update_proximal_policy(self, phase: Phase) -> None:
        """Update the average of PPO-EWMA after a gradient step, if the step trained the policy."""
        if self.proximal is not None and phase == "policy":
            self.proximal.update(self.agent)

    def normalize_reward(self, rollout: Rollout) -> tuple[Tensor, Record]:
        """Clip and normalize the rewards `[B, T]`, and return them with metrics.

        The running statistics are updated first; the previous scale, which the rollout's values
        refer to, is stored in the rollout.
        """
        reward, normalizer = self._clip_reward(rollout), self.reward_normalizer
        if normalizer is None:
            return reward, {}
        by_termination = self.config.reward_norm.reset_at == "termination"
        reset_before = rollout.terminated if by_termination else rollout.first
        world, moments = self.executor.world, normalizer.moments
        previous_scale = torch.where(moments.count > 0, normalizer.scale, 0.0)
        reward = normalizer(world.all_gather_cat(reward), world.all_gather_cat(reset_before))
        rollout.reward_scale.copy_(previous_scale)
        clipped = float((reward.abs() >= normalizer.clip).float().mean())
        record = {"rewards/scale": float(normalizer.scale), "rewards/clipped_fraction": clipped}
        return reward[world.local_slice(len(reward))], record

    def to_current_reward_scale(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Scale an earlier rollout's raw rewards, and rescale its `next_value`, `[B, T]` each."""
        reward, normalizer = self._clip_reward(rollout), self.reward_normalizer
        if normalizer is None:
            return reward, rollout.next_value
        before, now = rollout.reward_scale, normalizer.scale
        ratio = torch.where(before > 0, before / now.float(), 1.0)
        return normalizer.scale_reward(reward, now), rollout.next_value * ratio.unsqueeze(1)

    def _clip_reward(self, rollout: Rollout) -> Tensor:
        clip = self.config.ppo.reward_clip
        return rollout.reward if clip is None else rollout.reward.clamp(-clip, clip)

    def update_observation_statistics(self, rollout: Rollout) -> None:
        """Update the observation statistics after all epochs over a rollout.

        A rollout and all epochs over it use the same statistics. A first rollout that has updated
        them before its values were computed is not added twice.
        """
        if self.iteration > 1 or not self.config.obs_norm.from_first_rollout:
            self.agent.reader.update(rollout.obs, self.executor.world)

    def diagnose_networks(self, rollout: Rollout) -> Record:
        """Measure the fractions of dormant features and clipped inputs, about 30 times per run."""
        if (self.iteration - 1) % max(1, self.config.num_iterations // _DIAGNOSTICS_PER_RUN):
            return {}
        obs = rollout.obs[:, :: max(1, self.config.batch_size // _MIN_OBS)].flatten(0, 1)
        precision, world = self.executor.precision("policy"), self.executor.world
        return diagnose_networks(self.agent, obs, precision=precision, world=world)

    def adapt_learning_rate(self, minibatch_kl: float) -> None:
        """Adapt the learning rates of the policy phase to the KL of a minibatch."""
        ppo = self.config.ppo
        rate = ppo.learning_rate * self.lr_multiplier
        rate = objectives.adapt_learning_rate(rate, minibatch_kl, target=ppo.schedule_kl)
        self.lr_multiplier = rate / ppo.learning_rate
        self._set_learning_rates()

    def policy_loss_coefficients(self) -> list[Tensor]:
        """Return the weights of KL penalty and entropy bonus, and the clip range ε, 0-d each.

        ε is float64, so that 1 ± ε is rounded once, and infinite without clipping.
        """
        ppo, device = self.scheduled_config.ppo, self.executor.device
        weights = [torch.tensor(x, device=device) for x in (self.kl_coef, ppo.entropy_coef)]
        return [*weights, torch.tensor(ppo.clip or math.inf, dtype=torch.float64, device=device)]

    def adapt_kl_penalty(self, last_epoch_kl: float) -> Record:
        """Adapt the weight of the KL penalty after a phase; return the old weight as a metric.

        Without `ppo.kl_penalty_target` or a penalty, change nothing and return no metric.
        """
        used, target = self.kl_coef, self.config.ppo.kl_penalty_target
        if target is None or not used:
            return {}
        self.kl_coef = objectives.adapt_kl_coef(used, last_epoch_kl, target=target)
        return {"losses/kl_penalty": used}

    def make_adam_settings(self, phase: Phase) -> AdamSettings:
        """Return optimizer, clipping and mean over processes for the gradient steps of a phase."""
        config, world = self.config, self.executor.world
        # A single process needs no mean, and compiles the whole step.
        mean = world.all_reduce_mean_ if world.size > 1 else None
        if phase == "aux":
            max_norm, adam = config.aux.max_grad_norm, self.optimizers["aux"]
            return AdamSettings(phase, self._network_params, adam, max_norm, mean)
        # Joint epochs use the policy's optimizer, also for the value half after an early stop.
        optimizer = self.optimizers.get(phase, self.optimizers["policy"])
        return AdamSettings(phase, self._clip_groups, optimizer, config.ppo.max_grad_norm, mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of networks, optimizers, statistics and counters to save."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _SAVED_FIELDS}
        modules = {name: getattr(self, name) for name in _SAVED_MODULES}
        state |= {name: each and each.state_dict() for name, each in modules.items()}
        optimizers = {name: each.state_dict() for name, each in self.optimizers.items()}
        return state | {"optimizers": optimizers, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        ppo = self.config.ppo  # its options hold, also where they have been changed
        for name in _SAVED_FIELDS:
            setattr(self, name, state[name])
        if not (ppo.kl_penalty and ppo.kl_penalty_target and self.kl_coef):
            self.kl_coef = ppo.kl_penalty
        if ppo.schedule != "adaptive_kl":
            self.lr_multiplier = 1.0
        for name in _SAVED_MODULES:
            if (module := getattr(self, name)) is not None:
                module.load_state_dict(state[name])
        # The policy's state last: it holds if the optimizer is shared from now on.
        for name, optimizer in reversed(self.optimizers.items()):
            optimize.load_state_(optimizer, state["optimizers"][name])
        self.generator.set_state(state["generator"])
        # As when the iteration started, for the auxiliary phase that is left of it.
        self._apply_schedules(max(self.env_steps - self.config.batch_size, 0))

    def _apply_schedules(self, env_steps: int) -> None:
        """Set the options and learning rates of the iteration that starts after `env_steps`."""
        progress = env_steps / self.config.budget
        with self.executor.world.sync_errors("schedule"):
            self.scheduled_config = self.config.with_scheduled_values(self.schedule, progress)
        self._set_learning_rates()

    def _set_learning_rates(self) -> None:
        """Set the learning rate of each optimizer and network."""
        ppo, aux = self.scheduled_config.ppo, self.scheduled_config.aux
        for name, optimizer in self.optimizers.items():
            is_own = name == "aux" and aux.optimizer == "own"
            for network, group in enumerate(optimizer.param_groups):
                rate = (ppo.learning_rate, ppo.value_learning_rate or ppo.learning_rate)[network]
                group["lr"] = aux.learning_rate if is_own else rate * self.lr_multiplier


def _make_optimizers(config: Config, agent: Agent) -> dict[str, Adam]:
    """Make the optimizers, by name."""

    def make_adam() -> Adam:
        ppo = config.ppo
        groups = [{"params": x, "eps_hat": ppo.adam_eps_hat} for x in agent.params_per_network()]
        return Adam(groups, lr=ppo.learning_rate, betas=ppo.adam_betas, eps=ppo.adam_eps)

    optimizers = {"policy": make_adam()}
    if (False, True) in config.ppo.epoch_kinds:
        optimizers["value"] = make_adam()
    if config.has_auxiliary_phase:
        optimizers["aux"] = make_adam() if config.aux.optimizer == "own" else optimizers["policy"]
    return optimizers
