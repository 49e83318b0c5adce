"""PPG with an LSTM and action masks: press the keys of a code in order, without a counter."""

from dataclasses import replace

import gymnasium as gym
import numpy as np

from phasicrl import EnvConfig, evaluate, get_preset, train


class Keypad(gym.Env):
    """Keypad with a code of twelve keys: one point for each; a masked key ends the episode."""

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
        return self._answer(float(right), self.place == 12 or not works, False)

    def _answer(self, *result):
        right = self.code[self.place % 12]
        others = self.np_random.choice(self.code[self.code != right], 3, replace=False)
        self.working = [right, *others]
        mask = np.isin(np.arange(1000), self.working)
        return np.array([self.place == 0], np.float32), *result, {"action_mask": mask}


config = get_preset("cartpole-masked-velocity-ppg")  # it brings the LSTM
config = replace(config, env=EnvConfig(id="keypad", num_envs=16), total_env_steps=25_000)
run = train(config, make_env=Keypad)
print(evaluate(run.directory, episodes=50, make_env=Keypad)[0].mean_return, "of 12 points")
