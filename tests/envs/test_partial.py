"""Partial observation: the chosen components and nothing else, final observations included."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.config import EnvConfig
from phasicrl.envs.make import make_envs
from phasicrl.envs.partial import PartialObservation


def make(observe: tuple[int, ...] | None) -> object:
    return make_envs(EnvConfig(id="gymnasium:CartPole-v1", num_envs=2, observe=observe), seed=3)


def test_the_same_episodes_are_seen_through_fewer_components() -> None:
    whole, part = make(None), make((2, 0))
    assert isinstance(part, PartialObservation)
    assert part.observation_space.shape == (2,)
    np.testing.assert_array_equal(part.observation_space.high, whole.observation_space.high[[2, 0]])  # type: ignore[attr-defined]
    np.testing.assert_array_equal(part.reset(), whole.reset()[:, [2, 0]])  # type: ignore[attr-defined]
    ended = 0
    for t in range(60):
        action = np.array([t % 2, 1])
        seen, all_of_it = part.step(action), whole.step(action)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(seen.obs, all_of_it.obs[:, [2, 0]])
        np.testing.assert_array_equal(seen.reward, all_of_it.reward)
        if all_of_it.final_obs is not None:
            ended += 1
            np.testing.assert_array_equal(seen.final_obs, all_of_it.final_obs[:, [2, 0]])
        else:
            assert seen.final_obs is None
    assert ended > 2 and part.action_mask is None and part.mask_size == 0
    part.close()


@pytest.mark.parametrize(("observe", "message"), [((4,), r"components 0 … 3 were expected"), ((-1,), "0 … 3"), ((), "at least one")])
def test_components_that_are_not_there_are_refused(observe: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(observe)


def test_what_is_not_a_vector_is_refused() -> None:
    class Tile(gym.Env):  # type: ignore[type-arg]
        observation_space, action_space = gym.spaces.Discrete(3), gym.spaces.Discrete(2)

        def reset(self, **_: object) -> tuple[int, dict[str, object]]:
            return 0, {}

    with pytest.raises(ValueError, match=r"env\.observe picks components of vectors"):
        make_envs(EnvConfig(id="tile", num_envs=1, observe=(0,)), seed=0, make_env=Tile)
