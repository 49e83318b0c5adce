"""PPG with an LSTM on a masked environment of your own: a code of eight keys, and nothing shows how many were pressed."""

from dataclasses import replace

import gymnasium as gym
import numpy as np

from phasicrl import EnvConfig, evaluate, get_preset, train


class Keypad(gym.Env):
    """At each place four of sixty keys work, and one of them earns a point; any other key ends the episode."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(60)
    keys = np.random.default_rng(0).permuted(np.tile(np.arange(60), (8, 1)), axis=1)[:, :4]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._answer()

    def step(self, action):
        works, right = action in self.keys[self.place], action == self.keys[self.place, 0]
        self.place += 1
        obs, info = self._answer()
        return obs, float(right), self.place == 8 or not works, False, info

    def _answer(self):
        allowed = np.isin(np.arange(60), self.keys[self.place % 8])
        return np.array([self.place == 0], dtype=np.float32), {"action_mask": allowed}


config = get_preset("cartpolenovel-ppg")  # brings the LSTM; everything else about it is CartPole's
config = replace(config, env=EnvConfig(id="keypad", num_envs=16), total_env_steps=25_000)
run = train(config, make_env=Keypad)
print(evaluate(run.directory, episodes=50, make_env=Keypad)[0].mean_return, "of 8 points")
