"""CartPole as a function of tensors: thousands of environments at once, on a CPU or a GPU."""

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from phasicrl import get_preset, train


class TensorCartPole:
    """B environments of Gymnasium's `CartPole-v1`; observations are position, angle and speeds."""

    single_observation_space = Box(-np.inf, np.inf, (4,), np.float32)
    single_action_space = Discrete(2)
    is_pure = True  # so that steps are compiled

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, device
        self.obs = torch.zeros(num_envs, 4, device=device)
        self.length = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict]:
        """Reset every environment, with PyTorch's global generator, which has been seeded."""
        return self.reset_rows(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))

    def reset_rows(self, ended: Tensor) -> tuple[Tensor, dict]:
        """Reset the environments where `ended` `[B]` is true."""
        start = torch.rand_like(self.obs) * 0.1 - 0.05
        self.obs = torch.where(ended[:, None], start, self.obs)
        self.length = torch.where(ended, 0, self.length)
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        """Push each cart to the left (0) or right (1) for 0.02 s; reset nothing."""
        _, speed, angle, turn = self.obs.unbind(1)
        cos, sin, force = angle.cos(), angle.sin(), action * 20.0 - 10.0
        # Masses 1 and 0.1, half the pole's length 0.5, gravity 9.8.
        push = (force + 0.05 * turn.square() * sin) / 1.1
        angular = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        rates = torch.stack([speed, push - 0.05 * angular * cos / 1.1, turn, angular], 1)
        self.obs, self.length = self.obs + 0.02 * rates, self.length + 1
        terminated = (self.obs[:, 0].abs() > 2.4) | (self.obs[:, 2].abs() > math.radians(12))
        return self.obs, torch.ones_like(push), terminated, self.length >= 500, {}

    def get_state(self) -> dict[str, Tensor]:
        """Return what `set_state` restores, so that runs are resumed exactly."""
        return {"obs": self.obs, "length": self.length}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `get_state`."""
        self.obs, self.length = state["obs"], state["length"]


if __name__ == "__main__":
    config = get_preset("cartpole-ppo").with_updates({"env.id": "tensor-cartpole"})
    run = train(config, make_vector_env=TensorCartPole)
    print(f"return {run.collector.episodes.recent_mean_return:.1f} after {run.env_steps:,} steps")
