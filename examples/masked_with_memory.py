"""PPG with an LSTM on a masked environment of your own.

A code of twelve keys, and nothing shows how many were pressed.
"""

from dataclasses import replace

import gymnasium as gym
import numpy as np

from phasicrl import EnvConfig, evaluate, get_preset, train


class Keypad(gym.Env):
    """A code of twelve keys out of a thousand.

    Four of the twelve work at each place: the right one, which earns a point, and three drawn anew,
    which earn nothing. Any other key ends the episode.
    """

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(1000)
    code = np.random.default_rng(0).permutation(1000)[:12]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._answer()

    def step(self, action):
        works, right = action in self.working, action == self.code[self.place]
        self.place += 1
        obs, info = self._answer()
        return obs, float(right), self.place == 12 or not works, False, info

    def _answer(self):
        right = self.code[self.place % 12]
        others = self.np_random.choice(self.code[self.code != right], 3, replace=False)
        self.working = [right, *others]
        mask = np.isin(np.arange(1000), self.working)
        return np.array([self.place == 0], dtype=np.float32), {"action_mask": mask}


# Brings the LSTM; everything else about it is CartPole's.
config = get_preset("cartpole-masked-velocity-ppg")
config = replace(config, env=EnvConfig(id="keypad", num_envs=16), total_env_steps=25_000)
run = train(config, make_env=Keypad)
print(evaluate(run.directory, episodes=50, make_env=Keypad)[0].mean_return, "of 12 points")
