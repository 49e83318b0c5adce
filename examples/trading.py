"""Trading of a mean-reverting stock, with action masks and a heuristic for the first steps."""

from dataclasses import replace

import gymnasium as gym
import numpy as np

from phasicrl import EnvConfig, evaluate, get_preset, train

WAIT, BUY, SELL = range(3)


class Market(gym.Env):
    """Market of 250 days; rewards are percent of the capital, and each order costs 0.1."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.day, self.owned, self.price = 0, False, self.np_random.normal(0, 4.6)
        return self._answer()

    def step(self, action):
        self.owned = action == BUY if action != WAIT else self.owned
        before, self.price = self.price, 0.9 * self.price + self.np_random.normal(0, 2)
        gain = self.owned * (self.price - before) - 0.1 * (action != WAIT)
        self.day += 1  # a time limit, not an end: the market stays open
        return self._answer(float(gain), False, self.day == 250)

    def _answer(self, *result):
        seen = np.array([self.price / 5, self.owned], np.float32)  # in percent from the mean
        allowed = np.array([True, not self.owned, self.owned])
        return seen, *result, {"action_mask": allowed}


def buy_low(seen, allowed):
    """Buy below the mean only, and sell above it only."""
    below = seen[:, :1] < 0
    return allowed & np.concatenate([np.ones_like(below), below, ~below], axis=1)


config = replace(
    get_preset("classic-ppg"), total_env_steps=100_000,
    env=EnvConfig(id="market", num_envs=16, heuristic_mask_steps=20_000),
)  # fmt: skip
if __name__ == "__main__":
    run = train(config, make_env=Market, mask_actions=buy_low)
    greedy = evaluate(run.directory, episodes=100, make_env=Market)[0]
    print(f"{greedy.mean_return:.1f} % of the capital in 250 days")
