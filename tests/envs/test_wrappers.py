"""Wrappers: some components of an observation alone, and your own mask over the first steps."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.config import EnvConfig
from phasicrl.distributed import World
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.envs.wrappers import HeuristicMask, PartialObservation
from phasicrl.training import build
from tests.envs.acting import draw_action, make
from tests.envs.counting import Counting, MaskedInInfo, Spaces
from tests.helpers import corridor, tiny

B = 3
RNG = np.random.default_rng(1)


def cartpole(observe: tuple[int, ...] | None) -> VectorEnv:
    return make_envs(EnvConfig(id="gymnasium:CartPole-v1", num_envs=2, observe=observe), seed=3)


def test_the_same_episodes_are_seen_through_fewer_components() -> None:
    whole, part = cartpole(None), cartpole((2, 0))
    assert isinstance(part, PartialObservation)
    assert part.observation_space.shape == (2,)
    highs: Any = [envs.observation_space for envs in (part, whole)]
    np.testing.assert_array_equal(highs[0].high, highs[1].high[[2, 0]])
    np.testing.assert_array_equal(part.reset(), whole.reset()[:, [2, 0]])
    ended = 0
    for t in range(60):
        action = torch.tensor([t % 2, 1])
        seen, all_of_it = part.step(action), whole.step(action)
        np.testing.assert_array_equal(seen.obs, all_of_it.obs[:, [2, 0]])
        np.testing.assert_array_equal(seen.reward, all_of_it.reward)
        assert (seen.final_obs is None) == (all_of_it.final_obs is None)
        if seen.final_obs is not None and all_of_it.final_obs is not None:
            ended += 1
            np.testing.assert_array_equal(seen.final_obs, all_of_it.final_obs[:, [2, 0]])
    assert ended > 2 and part.action_mask is None and part.mask_size == 0
    part.close()


@pytest.mark.parametrize("observe", [(4,), (-1,), ()])
def test_components_that_are_not_there_are_refused(observe: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"env\.observe is \(.*expected components of a vector"):
        cartpole(observe)


def test_only_vectors_have_components() -> None:
    tile, config = gym.spaces.Discrete(3), EnvConfig(id="tile", num_envs=1, observe=(0,))
    with pytest.raises(ValueError, match=r"observations are Discrete\(3\)"):
        make_envs(config, seed=0, make_env=lambda: Spaces(tile, gym.spaces.Box(0, 1, (1,))))


def even(obs: np.ndarray, action_mask: np.ndarray | None) -> np.ndarray:
    """Forbid the first action in even steps."""
    assert action_mask is None
    return (np.arange(4) > 0) | (obs[:, 2:] % 2 == 1)


def test_it_counts_for_the_first_steps_of_all_environments_together() -> None:
    envs = HeuristicMask(make(Counting), even, mask_steps=15 * B)
    assert (envs.mask_size, envs.action_mask) == (4, None)
    obs = envs.reset()
    for number in range(18):
        assert envs.env_steps == number * B
        expected = even(obs.numpy(), None) if number < 15 else np.ones((B, 4), bool)
        np.testing.assert_array_equal(envs.action_mask, expected)
        obs = envs.step(draw_action(envs, RNG)).obs
    envs.close()


def test_a_resumed_run_continues_its_count() -> None:
    envs = HeuristicMask(make(Counting), even, mask_steps=5 * B, steps_before=4 * B)
    obs = envs.reset()
    np.testing.assert_array_equal(envs.action_mask, even(obs.numpy(), None))
    envs.step(draw_action(envs, RNG))
    assert envs.action_mask is not None and envs.action_mask.all()
    assert not even(envs.reset().numpy(), None).all()
    assert envs.action_mask.all(), "a reset does not count from 0 again"
    envs.close()


def test_the_environments_own_mask_stays() -> None:
    own, seen = make(MaskedInInfo), list[np.ndarray]()

    def last_option(obs: np.ndarray, action_mask: np.ndarray | None) -> np.ndarray:
        assert action_mask is not None
        seen.append(action_mask.copy())
        obs[:], action_mask[:] = np.nan, True  # of no consequence
        return np.broadcast_to(np.arange(7) != 3, (B, 7))

    envs = HeuristicMask(own, last_option, mask_steps=3 * B)
    envs.reset()
    for number in range(6):
        assert own.action_mask is not None
        allowed = torch.arange(7) != 3 if number < 3 else torch.ones(7, dtype=torch.bool)
        np.testing.assert_array_equal(envs.action_mask, own.action_mask & allowed)
        assert number >= 3 or np.array_equal(seen[-1], own.action_mask)
        assert envs.step(draw_action(envs, RNG)).obs.isfinite().all()
    assert len(seen) == 3
    envs.close()


def test_something_must_be_left() -> None:
    def not_for_the_second(obs: np.ndarray, action_mask: np.ndarray | None) -> np.ndarray:
        allowed = np.ones((B, 7), bool)
        if obs[0, 2] == 1:
            assert action_mask is not None
            allowed[1, 4:] = ~action_mask[1, 4:]  # each leaves something, both together nothing
        return allowed

    envs = HeuristicMask(make(MaskedInInfo), not_for_the_second, mask_steps=100)
    envs.reset()
    where = "nothing for environment 1 in component 1, step 3"
    with pytest.raises(EnvError, match=f"mine: mask_actions allows {where}"):
        envs.step(draw_action(envs, RNG))
    envs.close()


@pytest.mark.parametrize(("mask", "message"), [
    (np.ones(4, bool), r"bool of shape \(4,\); expected a NumPy array .* of shape \(3, 4\)"),
    (np.ones((B, 4)), r"float64 of shape \(3, 4\)"),
    ([[True] * 4] * B, "list of shape"),
])  # fmt: skip
def test_what_the_function_must_return(mask: Any, message: str) -> None:
    envs = HeuristicMask(make(Counting), lambda *_: mask, mask_steps=100)
    with pytest.raises(ValueError, match=f"mine: mask_actions returned {message}"):
        envs.reset()
    envs.close()


def test_there_must_be_something_to_mask() -> None:
    numbers = gym.spaces.Box(-1, 1, (2,))
    with pytest.raises(ValueError, match=r"actions are Box.*expected a discrete component"):
        HeuristicMask(make(lambda: Spaces(numbers, numbers)), even, mask_steps=1)


def test_processes_share_the_steps_of_a_heuristic_mask(tmp_path: Path) -> None:
    config = tiny(tmp_path).with_updates({"env.heuristic_mask_steps": 64})
    user = {"make_env": corridor, "make_vector_env": None, "mask_actions": even}
    envs = build._make_envs(config, user, World(1, 2), env_steps=32)
    assert isinstance(envs, HeuristicMask) and envs.num_envs == 2
    assert (envs.mask_steps, envs.env_steps) == (32, 16)
    envs.close()
