"""Collector: environments × agent → rollouts, and statistics of finished episodes. Kind: effects (steps environments)."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Generator, Tensor

from phasicrl.config import Precision
from phasicrl.envs.protocol import TimeStep, VectorEnv
from phasicrl.execution.compute import Compute
from phasicrl.models.agent import Agent
from phasicrl.optimize import diverged
from phasicrl.rollout import Rollout, Samples


class EpisodeStatistics:
    """Returns and lengths of finished episodes, in the environment's own reward.

    Args:
        num_envs: B.
        window: how many episodes the moving mean goes back.
    """

    def __init__(self, num_envs: int, *, window: int = 100) -> None:
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, dtype=np.int64)
        self._finished: list[tuple[float, int]] = []
        self._recent: deque[float] = deque(maxlen=window)
        self._completed: list[bool] = []
        self._levels: set[int] = set()

    def update(self, step: TimeStep) -> None:
        """Take one step of every environment in."""
        self._return += step.reward
        self._length += 1
        if "level_seed" in step.info:
            self._levels.update(step.info["level_seed"].tolist())
        if step.final_obs is None:
            return
        ended = np.flatnonzero(step.terminated | step.truncated)
        self._finished += zip(self._return[ended].tolist(), self._length[ended].tolist(), strict=True)
        self._recent.extend(self._return[ended].tolist())
        if "level_complete" in step.info:
            self._completed += (step.info["level_complete"][ended] != 0).tolist()
        self._return[ended] = 0
        self._length[ended] = 0

    def report(self) -> dict[str, float]:
        """Means over the episodes finished since the last report; nothing is said of what did not happen."""
        record: dict[str, float] = {"charts/num_episodes": len(self._finished)}
        if self._finished:
            returns, lengths = zip(*self._finished, strict=True)
            record["charts/episodic_return"] = float(np.mean(returns))
            record["charts/episodic_length"] = float(np.mean(lengths))
        if self._recent:
            record["charts/episodic_return_100"] = self.recent_mean
        if self._completed:
            record["procgen/level_complete"] = float(np.mean(self._completed))
        if self._levels:
            record["procgen/num_levels_seen"] = len(self._levels)
        self._finished.clear()
        self._completed.clear()
        return record

    @property
    def recent_mean(self) -> float:
        """Mean return over the window; NaN before the first episode has finished."""
        return float(np.mean(self._recent)) if self._recent else float("nan")

    def state_dict(self) -> dict[str, list[float] | list[int]]:
        """What a resumed run needs; episodes under way are not part of it, because its environments start new ones."""
        return {"recent": list(self._recent), "levels": sorted(self._levels)}

    def load_state_dict(self, state: dict[str, list[float] | list[int]]) -> None:
        """Take back `state_dict`."""
        self._recent.extend(state["recent"])
        self._levels.update(int(level) for level in state["levels"])


Truncation = tuple[int, np.ndarray, Tensor, Tensor]
"""Episodes that were cut in one step: its number t, their environments, their final observations, and the memory's states after the step."""


class Collector:
    """Steps the environments with the agent's actions and writes what happens into rollouts.

    Args:
        envs: B environments.
        agent: acts, and values what it sees.
        generator: source of the actions; on the CPU, whatever the device, so that runs are alike.
        compute: how the agent is executed.
        bootstrap_truncation: final observations of truncated episodes are valued; else nobody asks for those values.
    """

    def __init__(self, envs: VectorEnv, agent: Agent, *, generator: Generator, compute: Compute, bootstrap_truncation: bool) -> None:
        self.envs = envs
        self.agent = agent
        self.compute = compute
        self.generator = generator
        self.bootstrap_truncation = bootstrap_truncation
        self.episodes = EpisodeStatistics(envs.num_envs)
        self._obs = self.compute.upload(envs.reset())
        self._first = torch.ones(envs.num_envs, dtype=torch.bool, device=compute.device)
        self._state = agent.initial_state(envs.num_envs)
        # A value network of its own is asked once a rollout, not at each step. With a memory it must follow the episode, for truncated ones.
        self._values_afterwards = agent.value_path == "separate" and not agent.state_size
        self._precision: Precision = compute.precision("policy")
        # Only the shapes of its noise are of interest.
        self._blank_policy = agent.policy_head.distribution(torch.zeros(envs.num_envs, 1, agent.policy_head.num_dist_params))

    @torch.inference_mode()
    def collect(self, rollout: Rollout, *, begins_statistics: bool = False) -> None:
        """Fill `rollout` with the next T steps of every environment.

        Args:
            rollout: where to.
            begins_statistics: take its observations into the statistics that observations are normalized by, before anything is valued.
                Values, the values that targets bootstrap from, the memory's state after the rollout and the epochs over it then all use
                these statistics. Log-probabilities stay those of the policy that drew the actions, which saw raw observations: so the
                ratios of the surrogate remain those of importance sampling.

        Raises:
            MemoryError: it does not fit; the message names the knob that makes it smaller.
            ValueError: a network has diverged.
        """
        with self.compute.explaining_memory("collecting a rollout", "fewer env.num_envs"):
            self._fill(rollout, begins_statistics=begins_statistics)
        _require_finite(policy=rollout.log_prob, value_function=torch.cat([rollout.value, rollout.next_value]))

    def _fill(self, rollout: Rollout, *, begins_statistics: bool) -> None:
        """Act, step, write down; then value what is left to be valued."""
        rollout.state.copy_(self._state)
        truncations: list[Truncation] = []
        ends = []
        num_steps = rollout.first.shape[1]
        rewards = np.empty((num_steps, self.envs.num_envs), dtype=np.float32)
        for t in range(num_steps):
            rollout.obs[:, t] = self._obs
            rollout.first[:, t] = self._first
            step = self._step(rollout, t)
            self.episodes.update(step)
            rewards[t] = step.reward
            ended = step.terminated | step.truncated
            if self.bootstrap_truncation and step.final_obs is not None and step.truncated.any():
                truncated = np.flatnonzero(step.truncated)
                final_obs = self.compute.upload(step.final_obs[step.truncated[ended]])
                truncations.append((t, truncated, final_obs, self._state[self.compute.upload(truncated)]))
            ends.append((step.terminated, step.truncated))
            self._obs, self._first = self.compute.upload(step.obs), self.compute.upload(ended)
        terminated, truncated = (np.stack(kind, axis=1) for kind in zip(*ends, strict=True))
        rollout.reward.copy_(self.compute.upload(rewards.T))
        rollout.terminated.copy_(self.compute.upload(terminated))
        rollout.truncated.copy_(self.compute.upload(truncated))
        if begins_statistics:
            self.agent.reader.update(rollout.obs)
            if self.agent.state_size:
                truncations = self._remember_anew(rollout, truncations)
        if self._values_afterwards or begins_statistics:
            rollout.value.copy_(self.compute.per_segment(rollout.segments(), self._value))
        self._fill_next_values(rollout, truncations)

    def _step(self, rollout: Rollout, t: int) -> TimeStep:
        """Act, and step the environments."""
        action = self.act(rollout, t).cpu().numpy()
        try:
            return self.envs.step(action)
        except ValueError:  # they refuse the action; if a network has diverged, then that is the reason to give
            _require_finite(policy=rollout.log_prob[:, : t + 1])
            raise

    def act(self, rollout: Rollout, t: int) -> Tensor:
        """Draw the actions of step t, noting what is known of them by now; returns them as the environments want them."""
        mask = None
        if rollout.action_mask is not None:
            assert self.envs.action_mask is not None, f"{self.envs.name} has masks of width {self.envs.mask_size}, but none now"
            rollout.action_mask[:, t] = mask = self.compute.upload(self.envs.action_mask)
        noise = self.compute.upload(self._blank_policy.noise(self.generator))
        inputs = [self._obs, self._first, self._state, noise, *([] if mask is None else [mask])]
        action, env_action, log_prob, self._state, *values = self.compute.evaluate(self._answer, self.agent, inputs)
        rollout.action[:, t], rollout.log_prob[:, t] = action, log_prob
        for value in values:
            rollout.value[:, t] = value
        return env_action

    def _answer(self, obs: Tensor, first: Tensor, state: Tensor, noise: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Action, the environments' form of it, its log-probability `[B, …]`, the memory's next state `[B, H]`, and the value `[B]` if it is due now."""
        inputs = (obs.unsqueeze(1), first.unsqueeze(1), state, None if mask is None else mask.unsqueeze(1))
        if self._values_afterwards:
            (policy, state), values = self.agent.policy(*inputs, precision=self._precision), ()
        else:
            output = self.agent(*inputs, precision=self._precision)
            policy, state, values = output.policy, output.state, (output.value[:, 0],)
        action = policy.draw(noise)
        log_prob = policy.log_prob(action)
        return action[:, 0], self.agent.policy_head.env_action(action[:, 0]), log_prob[:, 0], state, *values

    def _value(self, segments: Samples) -> Tensor:
        """V of segments, `[S, L]`."""
        return self.agent.value(segments.obs, segments.first, segments.state, precision=self._precision)

    def _remember_anew(self, rollout: Rollout, truncations: list[Truncation]) -> list[Truncation]:
        """Follow the rollout with the statistics of now: the memory's state after it, and the truncations with their states of then."""
        cut = {t: (envs, final_obs) for t, envs, final_obs, _ in truncations}
        self._state, followed = rollout.state.clone(), []
        for t in range(rollout.first.shape[1]):
            now = slice(t, t + 1)
            self._state = self.agent(rollout.obs[:, now], rollout.first[:, now], self._state, precision=self._precision).state
            if t in cut:
                followed.append((t, *cut[t], self._state[self.compute.upload(cut[t][0])]))
        return followed

    def _fill_next_values(self, rollout: Rollout, truncations: list[Truncation]) -> None:
        """Value what each step led to. All observations that are in no rollout are valued in one batch: the last ones and the final ones.

        A final observation still belongs to its episode: it is valued with the memory's state of that moment.
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
            rollout.next_value[self.compute.upload(envs), t] = value[start : start + len(final_obs)]
            start += len(final_obs)


def _require_finite(**said: Tensor) -> None:
    """Refuse what a network says if it is not all finite: its weights have diverged, and would be saved over good ones.

    Discrete actions do not show it, because the arg-max of NaN is action 0.

    Raises:
        ValueError: names the networks, and what to do.
    """
    good = torch.stack([numbers.isfinite().all() for numbers in said.values()]).tolist()
    bad = [name.replace("_", " ") for name, is_good in zip(said, good, strict=True) if not is_good]
    if bad:
        raise diverged([f"the {name}" for name in bad])
