"""Collector: environments × agent → rollouts. Kind: effects (steps environments)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from phasicrl.config import Precision
from phasicrl.envs.protocol import TimeStep, VectorEnv
from phasicrl.episodes import EpisodeStatistics
from phasicrl.execution.compute import Compute
from phasicrl.models.agent import Agent
from phasicrl.optimize import diverged
from phasicrl.rollout import Rollout, Samples

Truncation = tuple[int, Tensor, Tensor, Tensor]
"""Truncated episodes of a step: its number, environments, final observations, memory states."""

Played = tuple[Tensor, Tensor, dict[str, Tensor]]
"""What environments said of a rollout, `[T, B]` each: rewards, ends of episodes, and more."""


class Collector:
    """Steps the environments with the agent's actions and writes what happens into rollouts.

    Args:
        envs: B environments.
        agent: acts, and values what it sees.
        generator: source of the actions, on the agent's device.
        compute: how the agent is executed.
        bootstrap_truncation: final observations of truncated episodes are valued; else nobody asks
            for those values.
    """

    def __init__(
        self,
        envs: VectorEnv,
        agent: Agent,
        *,
        generator: Generator,
        compute: Compute,
        bootstrap_truncation: bool,
    ) -> None:
        self.envs = envs
        self.agent = agent
        self.compute = compute
        self.generator = generator
        self.bootstrap_truncation = bootstrap_truncation
        self.episodes = EpisodeStatistics(compute.world.size * envs.num_envs)
        # A value network of its own is asked once a rollout, not at each step. With a memory it
        # must follow the episode, for truncated ones.
        self._values_afterwards = agent.value_path == "separate" and not agent.state_size
        self._precision: Precision = compute.precision("policy")
        # Only the shapes of its noise are of interest. All processes draw the noise of all
        # environments, so that an environment's does not depend on how many processes there are.
        num_envs = compute.world.size * envs.num_envs
        self._own_noise = compute.world.own(num_envs)
        self._blank_policy = agent.policy_head.distribution(
            torch.zeros(num_envs, 1, agent.policy_head.num_dist_params)
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Where the environments are, and what the agent remembers of them.

        None where the environments cannot be brought back.
        """
        envs = self.envs.state_dict()
        return None if envs is None else {"envs": envs, "first": self._first, "state": self._state}

    def load_state_dict(self, state: dict[str, Any], obs: Tensor) -> None:
        """Go on from `state_dict`, in place of `start`.

        The environments were brought there already, and show `obs`.
        """
        self._obs = self.compute.upload(obs)
        self._first = state["first"].to(self.compute.device)
        self._state = state["state"].to(self.compute.device)

    def start(self) -> None:
        """Reset the environments, and begin with an empty memory."""
        self._obs = self.compute.upload(self.envs.reset())
        self._first = torch.ones(self.envs.num_envs, dtype=torch.bool, device=self.compute.device)
        self._state = self.agent.initial_state(self.envs.num_envs)

    @torch.inference_mode()
    def collect(self, rollout: Rollout, *, begins_statistics: bool = False) -> None:
        """Fill `rollout` with the next T steps of every environment.

        Args:
            rollout: where to.
            begins_statistics: take its observations into the statistics that observations are
                normalized by, before anything is valued. Values, the values that targets bootstrap
                from, the memory's state after the rollout and the epochs over it then all use these
                statistics. Log-probabilities stay those of the policy that drew the actions, which
                saw raw observations: so the ratios of the surrogate remain those of importance
                sampling.

        Raises:
            MemoryError: it does not fit; the message names the knob that makes it smaller.
            ValueError: a network has diverged.
        """
        with self.compute.explaining_memory(
            "collecting a rollout", "fewer env.num_envs", whole=self.agent.state_size > 0
        ):
            with self.compute.world.together("a rollout"):
                truncations, played = self._play(rollout)
            self._tell_episodes(*played)
            self._value_rollout(rollout, truncations, begins_statistics=begins_statistics)
        with self.compute.world.together("a rollout"):
            _require_finite(
                policy=rollout.log_prob,
                value_function=torch.cat([rollout.value, rollout.next_value]),
            )

    def _play(self, rollout: Rollout) -> tuple[list[Truncation], Played]:
        """Act, step, write down; returns the truncated episodes, and what all of them did."""
        rollout.state.copy_(self._state)
        rollout.first[:, 0] = self._first
        finals: dict[int, tuple[Tensor, Tensor]] = {}
        outcomes, infos = [], []
        for t in range(rollout.first.shape[1]):
            rollout.obs[:, t] = self._obs
            step = self._step(rollout, t)
            if self.bootstrap_truncation and step.final_obs is not None:
                finals[t] = step.final_obs, self._state
            ended = step.terminated | step.truncated
            outcomes.append((step.reward, step.terminated, step.truncated, ended))
            infos.append(step.info)
            self._obs, self._first = self.compute.upload(step.obs), self.compute.upload(ended)
        # [T, B] each
        reward, terminated, truncated, ended = map(torch.stack, zip(*outcomes, strict=True))
        info = {name: torch.stack([info[name] for info in infos]) for name in infos[0]}
        rollout.first[:, 1:] = self.compute.upload(ended[:-1]).t()
        rooms = (rollout.reward, rollout.terminated, rollout.truncated)
        for room, values in zip(rooms, (reward, terminated, truncated), strict=True):
            room.copy_(self.compute.upload(values).t())
        return self._truncations(truncated, finals), (reward, ended, info)

    def _tell_episodes(self, reward: Tensor, ended: Tensor, info: dict[str, Tensor]) -> None:
        """Take what the environments of all processes did into the statistics of episodes."""

        def of_all(values: Tensor) -> Tensor:
            return self.compute.world.cat(values.t()).t()

        infos = {name: of_all(values) for name, values in info.items()}
        self.episodes.update(of_all(reward), of_all(ended), infos)

    def _value_rollout(
        self, rollout: Rollout, truncations: list[Truncation], *, begins_statistics: bool
    ) -> None:
        """Value what is left to be valued."""
        if begins_statistics:
            self.agent.reader.update(rollout.obs, self.compute.world)
            if self.agent.state_size:
                truncations = self._remember_anew(rollout, truncations)
        if self._values_afterwards or begins_statistics:
            rollout.value.copy_(self.compute.per_segment(rollout.segments(), self._value))
        self._fill_next_values(rollout, truncations)

    def _step(self, rollout: Rollout, t: int) -> TimeStep:
        """Act, and step the environments."""
        action = self.act(rollout, t).to(self.envs.device)
        try:
            return self.envs.step(action)
        except ValueError:
            # They refuse the action; if a network has diverged, then that is the reason to give.
            _require_finite(policy=rollout.log_prob[:, : t + 1])
            raise

    def act(self, rollout: Rollout, t: int) -> Tensor:
        """Draw the actions of step t, noting what is known of them by now.

        They are returned as the environments want them.
        """
        mask = None
        if rollout.action_mask is not None:
            assert self.envs.action_mask is not None, (
                f"{self.envs.name} has masks of width {self.envs.mask_size}, but none now"
            )
            rollout.action_mask[:, t] = mask = self.compute.upload(self.envs.action_mask)
        noise = self._blank_policy.noise(self.generator)[self._own_noise]
        inputs = [self._obs, self._first, self._state, noise, *([] if mask is None else [mask])]
        answer = self.compute.evaluate(self._answer, self.agent, inputs)
        action, env_action, log_prob, self._state, *values = answer
        rollout.action[:, t], rollout.log_prob[:, t] = action, log_prob
        for value in values:
            rollout.value[:, t] = value
        return env_action

    def _answer(
        self, obs: Tensor, first: Tensor, state: Tensor, noise: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Action, the environments' form of it, its log-probability `[B, …]`, and what follows.

        That is the memory's next state `[B, H]`, and the value `[B]` if it is due now.
        """
        mask = None if mask is None else mask.unsqueeze(1)
        inputs = (obs.unsqueeze(1), first.unsqueeze(1), state, mask)
        if self._values_afterwards:
            (policy, state), values = self.agent.policy(*inputs, precision=self._precision), ()
        else:
            output = self.agent(*inputs, precision=self._precision)
            policy, state, values = output.policy, output.state, (output.value[:, 0],)
        action = policy.draw(noise)
        env_action = self.agent.policy_head.env_action(action[:, 0])
        return action[:, 0], env_action, policy.log_prob(action)[:, 0], state, *values

    def _value(self, segments: Samples) -> Tensor:
        """V of segments, `[S, L]`."""
        seen = (segments.obs, segments.first, segments.state)
        return self.agent.value(*seen, precision=self._precision)

    def _truncations(
        self, truncated: Tensor, finals: dict[int, tuple[Tensor, Tensor]]
    ) -> list[Truncation]:
        """The truncated episodes, `[T, B]`, with their rows of what `finals` kept of each step.

        After the rollout, so that the environments' device is waited for once and not at every
        step.
        """
        cut: dict[int, list[int]] = {}
        for t, env in truncated.nonzero().tolist() if finals else ():
            cut.setdefault(t, []).append(env)
        found: list[Truncation] = []
        for t, envs in cut.items():
            (final_obs, state), rows = finals[t], torch.tensor(envs)
            there = self.compute.upload(rows)
            obs = self.compute.upload(final_obs[rows.to(final_obs.device)])
            found.append((t, there, obs, state[there]))
        return found

    def _remember_anew(self, rollout: Rollout, truncations: list[Truncation]) -> list[Truncation]:
        """Follow the rollout with the statistics of now.

        The memory's state after it is kept; the truncations are returned with their states of then.
        """
        cut = {t: (envs, final_obs) for t, envs, final_obs, _ in truncations}
        self._state, followed = rollout.state.clone(), []
        for t in range(rollout.first.shape[1]):
            now = slice(t, t + 1)
            seen = (rollout.obs[:, now], rollout.first[:, now], self._state)
            self._state = self.agent(*seen, precision=self._precision).state
            if t in cut:
                followed.append((t, *cut[t], self._state[cut[t][0]]))
        return followed

    def _fill_next_values(self, rollout: Rollout, truncations: list[Truncation]) -> None:
        """Value what each step led to.

        All observations that are in no rollout, the last ones and the final ones, are valued in one
        batch. A final observation still belongs to its episode: it is valued with the memory's
        state of that moment.
        """
        obs = torch.cat([self._obs, *(final_obs for _, _, final_obs, _ in truncations)])
        state = torch.cat([self._state, *(state for _, _, _, state in truncations)])
        first = torch.zeros(len(obs), 1, dtype=torch.bool, device=self.compute.device)
        first[: len(self._obs), 0] = self._first
        value = self.agent.value(obs.unsqueeze(1), first, state, precision=self._precision)[:, 0]
        rollout.next_value[:, :-1] = rollout.value[:, 1:]
        rollout.next_value[:, -1] = value[: len(self._obs)]
        start = len(self._obs)
        for t, envs, final_obs, _ in truncations:
            rollout.next_value[envs, t] = value[start : start + len(final_obs)]
            start += len(final_obs)


def _require_finite(**said: Tensor) -> None:
    """Refuse what a network says if it is not all finite.

    Its weights have diverged, and would be saved over good ones. Discrete actions do not show it,
    because the arg-max of NaN is action 0.

    Raises:
        ValueError: names the networks, and what to do.
    """
    good = torch.stack([numbers.isfinite().all() for numbers in said.values()]).tolist()
    bad = [name.replace("_", " ") for name, is_good in zip(said, good, strict=True) if not is_good]
    if bad:
        raise diverged([f"the {name}" for name in bad])
