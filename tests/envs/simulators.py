"""Simulators of tensors over the environments of `counting`, for the tests. Kind: state."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from torch import Tensor

from phasicrl.spaces import assemble, get_part, leaves, map_leaves
from tests.envs.counting import PlainCounting


class TensorEnvs:
    """Environments stepped one by one, which return views of reused memory, on the CPU.

    `end` is "raw" (`reset_rows`), the name of final observations in `info`, or "lost".
    """

    device = "cpu"

    def __init__(self, kind: type[gym.Env[Any, Any]], num_envs: int, end: str) -> None:
        self.envs: list[Any] = [kind() for _ in range(num_envs)]
        self.num_envs, self._end = num_envs, end
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        if end == "raw":
            self.reset_rows = self._reset_rows
        if end == "lost":
            self.has_final_obs = False
        self._buffers = [self._empty() for _ in range(2)]
        self._rewards = np.zeros(num_envs)
        self._flags = np.zeros((2, num_envs), bool)
        self._mask: list[Any] = []
        self._obs: list[Any] = []

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        seeds = [None if seed is None else seed + index for index in range(self.num_envs)]
        results = [env.reset(seed=seed) for env, seed in zip(self.envs, seeds, strict=True)]
        self._obs = [self._copy(obs) for obs, _ in results]
        self._mask = [info.get("action_mask") for _, info in results]
        return self._hand_over()

    def step(self, action: Any) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        torch.rand(3)  # as simulators that use the global generator
        space = self.single_action_space
        for index, env in enumerate(self.envs):
            parts = {
                path: get_part(action, path)[index].numpy().astype(leaf.dtype)
                for path, leaf in leaves(space)
            }
            obs, reward, *flags, info = env.step(assemble(space, parts))
            self._rewards[index], self._flags[:, index] = reward, flags
            self._obs[index] = self._copy(obs)
            self._mask[index] = info.get("action_mask", self._mask[index])
        info, ended = {}, self._flags.any(0)
        if self._end != "raw":
            if self._end != "lost" and ended.any():
                info[self._end] = self._tensors(1)
            for index in np.flatnonzero(ended):
                self._reset_one(int(index))
        obs, info = self._hand_over(info)
        rewards, flags = torch.from_numpy(self._rewards), torch.from_numpy(self._flags)
        return obs, rewards, flags[0], flags[1], info

    def _reset_rows(self, ended: Tensor) -> tuple[Any, dict[str, Any]]:
        for index in ended.nonzero().flatten().tolist():
            self._reset_one(index)
        obs, info = self._hand_over()
        # Rows that go on may be anything.
        for path, _ in leaves(self.single_observation_space):
            get_part(obs, path)[~ended] = 1
        return obs, info

    def _reset_one(self, index: int) -> None:
        obs, info = self.envs[index].reset()
        self._obs[index], self._mask[index] = self._copy(obs), info.get("action_mask")

    def _hand_over(self, info: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        info = info or {}
        if self._mask[0] is not None:
            info["action_mask"] = torch.from_numpy(np.stack(self._mask).astype(bool))
        return self._tensors(0), info

    def _empty(self) -> Any:
        return create_empty_array(self.single_observation_space, self.num_envs)

    def _tensors(self, which: int) -> Any:
        """Write the current observations into one of the buffers, and return tensors of it."""
        space = self.single_observation_space
        filled = concatenate(space, self._obs, self._buffers[which])
        return map_leaves(batch_space(space, self.num_envs), torch.from_numpy, filled)

    def _copy(self, obs: Any) -> Any:
        return map_leaves(self.single_observation_space, np.array, obs)


class RslRlEnvs:
    """rsl_rl's `VecEnv`, which resets itself first, with Isaac Lab's final observations."""

    device, num_actions, cfg = "cpu", 1, SimpleNamespace(compute_final_obs=True)

    def __init__(self, kind: type[gym.Env[Any, Any]], num_envs: int, end: str) -> None:
        self.num_envs, self._envs = num_envs, TensorEnvs(kind, num_envs, end)
        self._obs, _ = self._envs.reset(seed=int(torch.randint(1000, ())))

    def get_observations(self) -> dict[str, Tensor]:
        return {"policy": self._obs}

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        choice = torch.zeros(self.num_envs, dtype=torch.int64)
        self._obs, reward, terminated, truncated, info = self._envs.step(choice)
        final = {name: {"policy": obs} for name, obs in info.items()}
        dones = (terminated | truncated).long()
        return self.get_observations(), reward, dones, {"time_outs": truncated} | final


class RestoredEnvs(TensorEnvs):
    """`TensorEnvs` over `Counting`, whose state can be saved."""

    def get_state(self) -> dict[str, Tensor]:
        return {"counts": torch.tensor([[env._id, env._episode, env._time] for env in self.envs])}

    def set_state(self, state: dict[str, Tensor]) -> None:
        for env, row in zip(self.envs, state["counts"].tolist(), strict=True):
            env._id, env._episode, env._time = row
        self._obs = [self._copy(env._observe()) for env in self.envs]
        self._mask = [None] * self.num_envs


def make_counting(num_envs: int) -> TensorEnvs:
    return TensorEnvs(PlainCounting, num_envs, "raw")
