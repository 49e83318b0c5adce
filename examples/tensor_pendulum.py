"""Pendulum as a function of tensors: continuous actions, and a time limit."""

import math

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from phasicrl import get_preset, train


class TensorPendulum:
    """B environments of Gymnasium's `Pendulum-v1`: every episode is cut after 200 steps."""

    single_observation_space = Box(-8, 8, (3,), np.float32)
    single_action_space = Box(-2, 2, (1,), np.float32)
    is_pure = True  # so that steps are compiled

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, device
        self.angle, self.speed = torch.zeros(2, num_envs, device=device)
        self.length = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict]:
        """Reset every environment, with PyTorch's global generator, which has been seeded."""
        return self.reset_rows(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))

    def reset_rows(self, ended: Tensor) -> tuple[Tensor, dict]:
        """Reset the environments where `ended` `[B]` is true."""
        angle, speed = torch.rand(2, self.num_envs, device=self.device) * 2 - 1
        self.angle = torch.where(ended, math.pi * angle, self.angle)
        self.speed = torch.where(ended, speed, self.speed)
        self.length = torch.where(ended, 0, self.length)
        return self._observe(), {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        """Apply the torques `[B, 1]` for 0.05 s; reset nothing."""
        torque = action[:, 0].clamp(-2, 2)
        from_top = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        cost = from_top.square() + 0.1 * self.speed.square() + 0.001 * torque.square()
        # Mass 1, length 1, gravity 10.
        change = 15 * self.angle.sin() + 3 * torque
        self.speed = (self.speed + 0.05 * change).clamp(-8, 8)
        self.angle, self.length = self.angle + 0.05 * self.speed, self.length + 1
        truncated = self.length >= 200
        return self._observe(), -cost, torch.zeros_like(truncated), truncated, {}

    def get_state(self) -> dict[str, Tensor]:
        """Return what `set_state` restores, so that runs are resumed exactly."""
        return {"angle": self.angle, "speed": self.speed, "length": self.length}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `get_state`."""
        self.angle, self.speed, self.length = state["angle"], state["speed"], state["length"]

    def _observe(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed], 1)


if __name__ == "__main__":
    config = get_preset("pendulum-ppo").with_updates({"env.id": "tensor-pendulum"})
    run = train(config, make_vector_env=TensorPendulum)
    print(f"return {run.collector.episodes.recent_mean_return:.1f} after {run.env_steps:,} steps")
