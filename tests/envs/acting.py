"""Environments of a user's own, and actions for any environment, for the tests of the adapters.

Kind: effects.
"""

from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from phasicrl.config import EnvConfig
from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.gymnasium import GymnasiumEnv
from phasicrl.envs.protocol import VectorEnv
from phasicrl.spaces import ActionLayout, get_nvec, leaves

Mode = Literal["sync", "async"]
MODES: tuple[Mode, ...] = ("sync", "async")
NEVER = torch.zeros(3, dtype=torch.int64)
"""Actions for three environments."""


def make(
    make_env: Any, mode: Mode = "sync", *, num_envs: int = 3, seed: int = 1, **options: Any
) -> GymnasiumEnv:
    """Make custom environments named `mine`."""
    config = EnvConfig(id="mine", vectorization=mode, **options)
    return GymnasiumEnv(make_env, "mine", config, EnvSlice(num_envs, seed))


def draw_action(envs: VectorEnv, rng: np.random.Generator) -> Tensor:
    """Draw a random allowed action for each environment, in the trainer's form."""
    layout, begin, columns = ActionLayout(envs.action_space), 0, []
    for _, leaf in leaves(envs.action_space):
        if isinstance(leaf, gym.spaces.Box):
            low, high = np.maximum(leaf.low, -9), np.minimum(leaf.high, 9)
            draws = rng.uniform(low, high, (envs.num_envs, *leaf.shape))
            columns.append(draws.reshape(envs.num_envs, -1))
        for width in get_nvec(leaf):
            draws = rng.random((envs.num_envs, width))
            if envs.action_mask is not None:
                draws = np.where(envs.action_mask[:, begin : begin + width].numpy(), draws, -1)
            columns.append(draws.argmax(axis=1)[:, None])
            begin += width
    actions = np.concatenate(columns, axis=1).astype(layout.dtype)
    return torch.from_numpy(actions.reshape(envs.num_envs, *layout.shape))


def check_known_masks(envs: VectorEnv) -> None:
    """Play three environments of `Masked`; each mask is that of the observations returned."""
    obs, ends, rng = envs.reset(), 0, np.random.default_rng(1)
    for _ in range(30):
        counts = obs.view(torch.float32) if obs.dtype == torch.uint8 else obs
        forbidden = (counts @ torch.tensor([1.0, 2.0, 1.0])).int().numpy()[:, None]
        parts = [np.arange(n) != forbidden % n for n in (4, 3)]
        np.testing.assert_array_equal(envs.action_mask, np.concatenate(parts, axis=1))
        step = envs.step(draw_action(envs, rng))
        obs, ends = step.obs, ends + int((step.terminated | step.truncated).sum())
    envs.close()
    assert ends > 10


def check_known_episodes(envs: VectorEnv) -> None:
    """Play three environments of `Counting`.

    Every step is there once, with the right flags, ends and last observations; then close them.
    """
    obs = envs.reset()
    assert obs.dtype == torch.float32
    ids, episode, clock = obs[:, 0].numpy().copy(), np.zeros(3, int), np.zeros(3, int)
    np.testing.assert_array_equal(obs[:, 1:], 0)
    for _ in range(40):
        step = envs.step(NEVER)
        clock += 1
        np.testing.assert_array_equal(step.reward, clock)
        done = clock == 2 + (ids + episode) % 3
        terminated = done & (episode % 2 == 0)  # where both flags are up, terminated wins
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, done & ~terminated)
        assert (step.final_obs is None) == (not done.any())
        if step.final_obs is not None:
            last = np.stack([ids, episode, clock], axis=1)
            np.testing.assert_array_equal(step.final_obs[done], last[done])
        episode += done
        clock[done] = 0
        np.testing.assert_array_equal(step.obs, np.stack([ids, episode, clock], axis=1))
    envs.close()
    assert episode.min() >= 8 and len(set(ids)) == 3
