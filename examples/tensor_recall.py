"""Memory and masks, as a function of tensors: the first step names the last action."""

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from phasicrl import get_preset, train


class TensorRecall:
    """B corridors of eight steps; reward 1 at the end for the action that the cue has named."""

    single_observation_space = Box(-1, 1, (2,), np.float32)
    single_action_space = Discrete(3)  # 0 walks; 1 and 2 answer
    length = 8
    is_pure = True  # so that steps are compiled

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, device
        self.cue, self.time = torch.zeros(2, num_envs, dtype=torch.int64, device=device)

    def reset(self, *, seed: int | None = None) -> tuple[Tensor, dict]:
        """Reset every environment, with PyTorch's global generator, which has been seeded."""
        return self.reset_rows(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))

    def reset_rows(self, ended: Tensor) -> tuple[Tensor, dict]:
        """Reset the environments where `ended` `[B]` is true."""
        self.cue = torch.where(ended, torch.randint_like(self.cue, 1, 3), self.cue)
        self.time = torch.where(ended, 0, self.time)
        return self._observe()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        """Walk, or answer in the last step; reset nothing."""
        is_last = self.time == self.length - 1
        reward = (is_last & (action == self.cue)).float()
        self.time = self.time + 1
        obs, info = self._observe()
        return obs, reward, is_last, torch.zeros_like(is_last), info

    def get_state(self) -> dict[str, Tensor]:
        """Return what `set_state` restores, so that runs are resumed exactly."""
        return {"cue": self.cue, "time": self.time}

    def set_state(self, state: dict[str, Tensor]) -> None:
        self.cue, self.time = state["cue"], state["time"]

    def _observe(self) -> tuple[Tensor, dict]:
        """Return the cue, −1 or 1 in the first step and else 0, and the progress, `[B, 2]`."""
        shown = torch.where(self.time == 0, 2 * self.cue - 3, 0)
        answers = self.time == self.length - 1
        mask = torch.stack([~answers, answers, answers], 1)
        return torch.stack([shown, self.time / self.length], 1), {"action_mask": mask}


if __name__ == "__main__":
    options = {"env.id": "tensor-recall", "env.num_envs": 64, "model.memory": "lstm"}
    options |= {"ppo.num_steps": 32, "total_env_steps": 40_000}
    run = train(get_preset("cartpole-ppo").with_updates(options), make_vector_env=TensorRecall)
    print(f"return {run.collector.episodes.recent_mean_return:.2f} after {run.env_steps:,} steps")
