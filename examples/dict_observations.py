"""Your own network on observations of several parts: an image, a number and a choice."""

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from phasicrl import get_preset, train


class Keys(gym.Env):
    """Press the key whose row is lit; one of the others is broken. Sixteen rounds, a point each."""

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        left=gym.spaces.Box(0, 1, (1,), np.float32),
        broken=gym.spaces.Discrete(4),
    )
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 16
        return self._answer()

    def step(self, action):
        self.left -= 1
        return self._answer(float(action == self.lit), self.left == 0, False)

    def _answer(self, *result):
        self.lit, broken = self.np_random.choice(4, 2, replace=False)
        image = np.zeros((8, 8, 3), np.uint8)
        image[2 * self.lit : 2 * self.lit + 2] = 255
        left = np.array([self.left / 16], np.float32)
        obs = {"image": image, "left": left, "broken": broken}
        return obs, *result, {"action_mask": np.arange(4) != broken}


class Network(nn.Module):
    num_features = 32

    def __init__(self, space):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)  # 8 × 8 to 3 × 3
        self.dense = nn.Linear(8 * 3 * 3 + 1 + 4, 32)

    def forward(self, obs):
        image = obs["image"].permute(0, 3, 1, 2) / 255
        broken = functional.one_hot(obs["broken"], 4)
        parts = [self.convolution(image).relu().flatten(1), obs["left"], broken]
        return self.dense(torch.cat(parts, dim=1)).relu()


changes = {"env.id": "keys", "total_env_steps": 20_000, "compute.num_threads": 1}
run = train(get_preset("classic-ppg").with_updates(changes), make_env=Keys, make_encoder=Network)
print(f"{run.collector.episodes.recent_mean_return:.1f} of 16")
