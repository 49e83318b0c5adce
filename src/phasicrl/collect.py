"""Collector: environments × agent → rollouts. Kind: effects (steps environments)."""

from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from phasicrl.config import Precision
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.episodes import EpisodeStatistics
from phasicrl.execution.executor import Executor
from phasicrl.models.agent import Agent
from phasicrl.optimize import make_diverged_error
from phasicrl.rollout import Rollout, Samples


class StepTruncations(NamedTuple):
    """Truncated episodes of a step.

    Attributes:
        step: index of the step.
        envs: indices of the environments, `[n]`.
        final_obs: their final observations, `[n, …]`.
        state: their memory states, `[n, H]`.
    """

    step: int
    envs: Tensor
    final_obs: Tensor
    state: Tensor


class Collector:
    """Collector that steps the environments with the agent's actions and fills rollouts.

    Args:
        envs: B environments.
        agent: policy and value networks.
        generator: random generator of the actions, on the CPU for the same numbers on all devices.
        executor: runs the networks.
        bootstrap_truncation: whether values of truncated episodes' final observations are computed.
    """

    def __init__(
        self, envs: VectorEnv, agent: Agent, *, generator: Generator, executor: Executor,
        bootstrap_truncation: bool,
    ) -> None:  # fmt: skip
        self.envs, self.agent, self.executor, self.generator = envs, agent, executor, generator
        self.bootstrap_truncation = bootstrap_truncation
        num_envs = executor.world.size * envs.num_envs
        self.episodes = EpisodeStatistics(num_envs)
        # A separate value network without memory runs once per rollout instead of at each step.
        self._values_deferred = agent.value_path == "separate" and not agent.state_size
        self._precision: Precision = executor.precision("policy")
        # All processes draw the noise of all environments, so that an environment's actions do not
        # depend on the number of processes. The blank policy provides the shapes of the noise.
        self._noise_slice = executor.world.local_slice(num_envs)
        self._blank_policy = agent.policy_head.distribution(
            torch.zeros(num_envs, 1, agent.policy_head.num_dist_params)
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of environments and memory to save; None if it cannot be restored."""
        envs = self.envs.state_dict()
        return None if envs is None else {"envs": envs, "first": self._first, "state": self._state}

    def load_state_dict(self, state: dict[str, Any], obs: Tensor) -> None:
        """Restore memory states and first steps; `obs` is from the restored environments."""
        self._obs = self.executor.upload(obs)
        self._first = state["first"].to(self.executor.device)
        self._state = state["state"].to(self.executor.device)

    def reset(self) -> None:
        """Reset the environments and the memory states."""
        self._obs = self.executor.upload(self.envs.reset())
        self.agent.check_image_scale(self._obs)
        self._first = torch.ones(self.envs.num_envs, dtype=torch.bool, device=self.executor.device)
        self._state = self.agent.initial_state(self.envs.num_envs)

    @torch.inference_mode()
    def collect(self, rollout: Rollout, *, updates_obs_norm_before_values: bool = False) -> None:
        """Fill `rollout` with the next T steps of every environment.

        Args:
            rollout: T steps of B environments, written in place.
            updates_obs_norm_before_values: update the observation statistics with this rollout,
                then compute its values and recompute any memory states. All epochs over it also use
                the new statistics. Log-probabilities remain those of the policy that acted, so that
                ratios are importance weights.

        Raises:
            MemoryError: memory is exhausted; the message names the option to lower.
            ValueError: a network has diverged, or images of floats have values above 100.
        """
        with self.executor.explain_oom("collecting a rollout", "fewer env.num_envs"):
            with self.executor.world.sync_errors("a rollout"):
                truncations, steps = self._collect_steps(rollout)
            # Episode statistics are of the environments of all processes.
            gather = self.executor.world.all_gather_cat
            self.episodes.add_steps({name: gather(x.t()).t() for name, x in steps.items()})
            # Compute the values that acting left out, and all bootstrap values.
            if updates_obs_norm_before_values:
                self.agent.reader.update(rollout.obs, self.executor.world)
                if self.agent.state_size:
                    truncations = self._recompute_memory_after_obs_update(rollout, truncations)
            if self._values_deferred or updates_obs_norm_before_values:
                values = self.executor.infer_in_batches(rollout.as_segments(), self._compute_values)
                rollout.value.copy_(values)
            self._fill_next_values(rollout, truncations)
            # Without its final observation, a truncated episode ends one step earlier, at the last
            # observation that is known, and its last step is not trained on.
            if rollout.weight is not None:
                rollout.weight.copy_(~rollout.truncated)
                rollout.truncated[:, :-1] = rollout.truncated[:, :-1] | rollout.truncated[:, 1:]
        with self.executor.world.sync_errors("a rollout"):
            values = torch.cat([rollout.value, rollout.next_value])
            require_finite(policy=rollout.log_prob, value_function=values)
            self.agent.check_image_scale(rollout.obs.flatten(0, 1))

    def _collect_steps(self, rollout: Rollout) -> tuple[list[StepTruncations], dict[str, Tensor]]:
        """Act and step T times.

        Returns:
            The truncated episodes, and rewards, ends and infos of the steps, `[T, B]`.
        """
        rollout.state.copy_(self._state)
        rollout.first[:, 0] = self._first
        final_by_t, outcomes, infos = dict[int, tuple[Tensor, Tensor]](), [], []
        num_steps = rollout.first.shape[1]
        for t in range(num_steps):
            # Store the observation, sample an action, step the environments.
            rollout.obs[:, t] = self._obs
            action = self.sample_and_store_actions(rollout, t).to(self.envs.device)
            try:
                step = self.envs.step(action)
                if t + 1 == num_steps:
                    self.envs.check()
            except (ValueError, EnvError) as error:
                # The action may come from a diverged network.
                last = t - getattr(error, "steps_ago", 0)
                require_finite(policy=rollout.log_prob[:, : last + 1])
                raise
            # `step.obs` is already the next episode's first observation where one ended.
            if self.bootstrap_truncation and step.final_obs is not None:
                final_by_t[t] = step.final_obs, self._state
            ended = step.terminated | step.truncated
            outcomes.append((step.reward, step.terminated, step.truncated, ended))
            infos.append(step.info)
            self._obs, self._first = self.executor.upload(step.obs), self.executor.upload(ended)
        # Copy rewards and ends into the rollout in one go, instead of waiting for a GPU each step.
        reward, terminated, truncated, ended = map(torch.stack, zip(*outcomes, strict=True))
        info = {name: torch.stack([info[name] for info in infos]) for name in infos[0]}
        rollout.first[:, 1:] = self.executor.upload(ended[:-1]).t()
        buffers = (rollout.reward, rollout.terminated, rollout.truncated)
        for buffer, values in zip(buffers, (reward, terminated, truncated), strict=True):
            buffer.copy_(self.executor.upload(values).t())
        steps = {**info, "reward": reward, "terminated": terminated, "ended": ended}
        return self._find_truncations(truncated, final_by_t), steps

    def sample_and_store_actions(self, rollout: Rollout, t: int) -> Tensor:
        """Sample the actions of step t, and return them in the environments' format, `[B, …]`.

        The rollout stores log-probabilities, masks, any values and actions before `env_action`.
        """
        noise = self._blank_policy.sample_noise(self.generator)[self._noise_slice]
        inputs = [self._obs, self._first, self._state, self.executor.upload(noise)]
        if rollout.action_mask is not None:
            assert self.envs.action_mask is not None, f"{self.envs.name} returned no action masks"
            rollout.action_mask[:, t] = mask = self.executor.upload(self.envs.action_mask)
            inputs.append(mask)
        outputs = self.executor.call_compiled(self._compute_actions, self.agent, inputs)
        action, env_action, log_prob, self._state, *values = outputs
        rollout.action[:, t], rollout.log_prob[:, t] = action, log_prob
        for value in values:
            rollout.value[:, t] = value
        return env_action

    def _compute_actions(
        self, obs: Tensor, first: Tensor, state: Tensor, noise: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return actions, environment actions, log-probabilities and next memory states, `[B, …]`.

        Values `[B]` follow, unless they are computed after the rollout.
        """
        mask = None if mask is None else mask.unsqueeze(1)
        inputs = (obs.unsqueeze(1), first.unsqueeze(1), state, mask)
        if self._values_deferred:
            (policy, state), values = self.agent.policy(*inputs, precision=self._precision), ()
        else:
            output = self.agent(*inputs, precision=self._precision)
            policy, state, values = output.policy, output.state, (output.value[:, 0],)
        action = policy.draw(noise)
        env_action = self.agent.policy_head.env_action(action[:, 0])
        return action[:, 0], env_action, policy.log_prob(action)[:, 0], state, *values

    def _compute_values(self, segments: Samples) -> Tensor:
        """Compute the values `[S, L]` of segments."""
        return self.agent.value(*segments.inputs, precision=self._precision)

    def _find_truncations(
        self, truncated: Tensor, final_by_t: dict[int, tuple[Tensor, Tensor]]
    ) -> list[StepTruncations]:
        """Return the truncated episodes of a rollout, with final observations and memory states.

        Args:
            truncated: `[T, B]` bool.
            final_by_t: final observations and memory states `[B, …]` of steps that ended episodes.
        """
        truncations: list[StepTruncations] = []
        for t, pairs in groupby(truncated.nonzero().tolist() if final_by_t else [], lambda x: x[0]):
            (final_obs, state), rows = final_by_t[t], torch.tensor([env for _, env in pairs])
            envs, obs = map(self.executor.upload, (rows, final_obs[rows]))
            truncations.append(StepTruncations(t, envs, obs, state[envs]))
        return truncations

    def _recompute_memory_after_obs_update(
        self, rollout: Rollout, truncations: list[StepTruncations]
    ) -> list[StepTruncations]:
        """Recompute the memory's states with the current observation statistics.

        Returns:
            The truncations with recomputed states.
        """
        states = [rollout.state]
        for t in range(rollout.first.shape[1]):
            now = slice(t, t + 1)
            inputs = (rollout.obs[:, now], rollout.first[:, now], states[-1])
            states.append(self.agent(*inputs, precision=self._precision).state)
        self._state = states[-1]
        return [cut._replace(state=states[cut.step + 1][cut.envs]) for cut in truncations]

    def _fill_next_values(self, rollout: Rollout, truncations: list[StepTruncations]) -> None:
        """Fill in the value of the observation after each step.

        The observations after the last step and the final observations of truncated episodes go
        through the network in one batch. A final observation is evaluated with the memory state of
        the episode that ended.
        """
        obs = torch.cat([self._obs, *(each.final_obs for each in truncations)])
        state = torch.cat([self._state, *(each.state for each in truncations)])
        first = torch.zeros(len(obs), 1, dtype=torch.bool, device=self.executor.device)
        first[: len(self._obs), 0] = self._first
        value = self.agent.value(obs.unsqueeze(1), first, state, precision=self._precision)[:, 0]
        last, *finals = value.split([len(self._obs), *(len(each.envs) for each in truncations)])
        rollout.next_value[:, :-1] = rollout.value[:, 1:]
        rollout.next_value[:, -1] = last
        for cut, final in zip(truncations, finals, strict=True):
            rollout.next_value[cut.envs, cut.step] = final


def require_finite(**outputs: Tensor) -> None:
    """Check that outputs of the networks are finite; of NaN the arg-max is action 0, a valid one.

    Raises:
        ValueError: an output is not finite; the message names the network.
    """
    if bad := [name for name, numbers in outputs.items() if not numbers.isfinite().all()]:
        raise make_diverged_error([f"the {name.replace('_', ' ')}" for name in bad])
