"""Custom environment and network, passed as objects to `train` and `evaluate`."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
from torch import nn

from phasicrl import EnvConfig, evaluate, get_preset, train


class Lamps(gym.Env):
    """Say which of four lamps is lit; sixteen questions, one point each."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.lamp = 16, self.np_random.integers(4)
        return np.eye(4, dtype=np.float32)[self.lamp], {}

    def step(self, action):
        reward = float(action == self.lamp)
        self.left, self.lamp = self.left - 1, self.np_random.integers(4)
        return np.eye(4, dtype=np.float32)[self.lamp], reward, self.left == 0, False, {}


class Encoder(nn.Sequential):
    num_features = 32  # width of the output

    def __init__(self, space: gym.Space) -> None:
        super().__init__(nn.Linear(gym.spaces.flatdim(space), 32), nn.LayerNorm(32), nn.ReLU())


env = EnvConfig(id="lamps", num_envs=8)
config = replace(get_preset("classic-ppg"), env=env, total_env_steps=20_000)
run = train(config, make_env=Lamps, make_encoder=Encoder)
report = evaluate(run.directory, episodes=50, make_env=Lamps, make_encoder=Encoder)
print(report[0].mean_return, "of 16")
