"""Rollouts from pure simulators, several steps in one compiled call. Kind: effects."""

from functools import partial

import torch
from torch import Tensor

from phasicrl.collect import Collector, StepTruncations, require_finite
from phasicrl.envs.protocol import EnvError
from phasicrl.envs.tensor import TensorVectorEnv
from phasicrl.rollout import Rollout

MAX_STEPS_PER_CALL = 8
"""Maximum number of steps in a call. Twice as many save a tenth of the time, and compile for twice
as long."""


class FusedCollector(Collector):
    """Collector that compiles several steps of agent and simulator (`is_pure`) into one call.

    Where networks are small, Python's calls take longer than what they compute.
    """

    envs: TensorVectorEnv

    def _collect_steps(self, rollout: Rollout) -> tuple[list[StepTruncations], dict[str, Tensor]]:
        """Act and step T times, see `Collector`."""
        rollout.state.copy_(self._state)
        num_steps, chunks = rollout.first.shape[1], []
        size = max(size for size in range(1, MAX_STEPS_PER_CALL + 1) if num_steps % size == 0)
        names = ["obs", "first", "action", "log_prob", "reward", "terminated", "truncated"]
        names += ["action_mask"] if self.envs.mask_size else []
        self._names = names if self._values_deferred else [*names, "value"]
        call = partial(self.executor.call_compiled, self._run_steps, self.agent)
        for start in range(0, num_steps, size):
            draws = [self._blank_policy.sample_noise(self.generator) for _ in range(size)]
            noise = self.executor.upload(torch.stack(draws)[:, self._noise_slice])
            *columns, self._first, self._state = self.envs.run_fused_steps(
                call, [noise, self._first, self._state], size
            )
            for name, values in zip(self._names, columns[:-3], strict=True):
                getattr(rollout, name)[:, start : start + size] = values
            chunks.append(columns[-3:])
        self._obs = self.envs.obs
        try:
            self.envs.raise_unless_valid(torch.cat([is_valid for *_, is_valid in chunks]))
        except EnvError as error:
            # A diverged network may have acted before the simulator's first wrong number.
            require_finite(policy=rollout.log_prob[:, : num_steps - error.steps_ago])
            raise
        finals = dict[int, tuple[Tensor, Tensor]]()
        if self.bootstrap_truncation:
            for t in rollout.truncated.any(0).nonzero().flatten().tolist():
                final_obs, memory, _ = chunks[t // size]
                finals[t] = final_obs[:, t % size], memory[:, t % size]
        truncated, ended = rollout.truncated.t(), (rollout.terminated | rollout.truncated).t()
        steps = {"reward": rollout.reward.t(), "terminated": rollout.terminated.t(), "ended": ended}
        return self._find_truncations(truncated, finals), steps

    def _run_steps(
        self, noise: Tensor, first: Tensor, memory: Tensor, *state: Tensor
    ) -> tuple[Tensor, ...]:
        """Act and step once for each row of `noise` `[N, B, …]`.

        Returns:
            Columns of the rollout `[B, N, …]` in the order of `_names`, final observations and
            memory states of all steps `[B, N, …]`, whether the simulator's numbers are valid
            `[N, 4]`, and the next arguments.
        """
        rows, validity = [], []
        for draw in noise:
            obs, mask = state[0], state[1] if self.envs.mask_size else None
            output = self._compute_actions(obs, first, memory, draw, mask)
            action, env_action, log_prob, memory, *values = output
            step, is_valid, state = self.envs.step_from(state, env_action)
            columns = {
                "obs": obs, "first": first, "action": action, "action_mask": mask,
                "log_prob": log_prob, "value": values[0] if values else None,
                "reward": step.reward, "terminated": step.terminated, "truncated": step.truncated,
            }  # fmt: skip
            rows.append([*map(columns.get, self._names), step.final_obs, memory])
            validity.append(is_valid)
            first = step.terminated | step.truncated
        stacked = [torch.stack(column, 1) for column in zip(*rows, strict=True)]
        return (*stacked, torch.stack(validity), first, memory, *state)
