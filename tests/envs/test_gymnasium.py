"""Gymnasium's adapter: known episodes, seeds, spaces, and what makes environments."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from phasicrl.envs.gymnasium import made_by_id
from phasicrl.envs.protocol import EnvError
from phasicrl.spaces import ObservationLayout
from tests.envs.acting import NEVER, PARALLEL, Parallel, check_known_episodes, draw_action, make
from tests.envs.counting import (
    Counting,
    CountingInFloat32,
    FromFive,
    MaskedByMethod,
    MaskedInObservation,
    MaskedNumbers,
    Spaces,
    Structured,
)


@pytest.mark.parametrize("kind", [Counting, CountingInFloat32])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_known_episodes_come_out_whole(parallel: Parallel, kind: type[Counting]) -> None:
    """Every step of every episode of `Counting` is there once, with the right flags, ends and last
    observations.
    """
    check_known_episodes(make(kind, parallel))


@pytest.mark.parametrize("parallel", PARALLEL)
def test_each_environment_has_a_seed_of_its_own(parallel: Parallel) -> None:
    ids = []
    for seed in (1, 1, 2):
        envs = make(Counting, parallel, seed=seed)
        ids.append(envs.reset()[:, 0].tolist())
        assert envs.reset()[:, :2].tolist() == [[own, 1.0] for own in ids[-1]], (
            "a second reset goes on, it does not seed again"
        )
        envs.close()
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[0])) == 3 and not set(ids[0]) & set(ids[2])


def test_actions_are_counted_from_zero() -> None:
    envs = make(FromFive)
    assert envs.action_space == gym.spaces.Discrete(3, start=5)
    envs.reset()
    np.testing.assert_array_equal(envs.step(torch.arange(3)).reward, [5, 6, 7])
    envs.close()


@pytest.mark.parametrize("parallel", PARALLEL)
def test_all_kinds_of_spaces_at_once(parallel: Parallel) -> None:
    """Every part of the observations of `Structured` arrives, at the ends of episodes too, and
    every part of the actions.
    """
    envs = make(Structured, parallel)
    layout = ObservationLayout(envs.observation_space)

    def check(obs: Tensor, ids: np.ndarray, episode: np.ndarray, clock: np.ndarray) -> None:
        read = layout.unpack(obs)
        np.testing.assert_array_equal(read["counts"], np.stack([ids, episode, clock], axis=1))
        np.testing.assert_array_equal(
            read["image"], np.broadcast_to(clock[:, None, None, None], (len(obs), 4, 5, 3))
        )
        stage, flags = read["more"]
        np.testing.assert_array_equal(stage, clock)
        np.testing.assert_array_equal(flags @ torch.tensor([1, 2, 4], dtype=torch.uint8), clock)

    obs = envs.reset()
    ids, episode, clock = (
        layout.unpack(obs)["counts"][:, 0].numpy(),
        np.zeros(3, int),
        np.zeros(3, int),
    )
    rng = np.random.default_rng(1)
    for _ in range(20):
        check(obs, ids, episode, clock)
        action = draw_action(envs, rng)
        step = envs.step(action)
        expected = (action.double().numpy() + np.array([1, 0, 5, 0, 0])) @ [1, 10, 100, 1000, 10000]
        np.testing.assert_allclose(step.reward, expected, rtol=1e-6)
        clock += 1
        done = (step.terminated | step.truncated).numpy()
        np.testing.assert_array_equal(done, clock == 2 + (ids + episode) % 3)
        if done.any():
            assert step.final_obs is not None
            check(step.final_obs[done], ids[done], episode[done], clock[done])
        episode += done
        clock[done] = 0
        obs = step.obs
    envs.close()
    assert episode.min() >= 3


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(9, start=3),
        gym.spaces.Box(0, 9, (), np.int32),
        gym.spaces.Box(0, 9, (1,), np.float32),
    ],
)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_observations_of_one_number(parallel: Parallel, space: gym.Space[Any]) -> None:
    """Gymnasium unwraps the smallest arrays where it stores them as objects."""

    class OneNumber(Counting):
        def _observe(self) -> Any:
            return np.full(space.shape or (), 3 + self._time, space.dtype)

    OneNumber.observation_space = space  # type: ignore[assignment]
    envs = make(OneNumber, parallel)
    layout, first = ObservationLayout(space), 3 - getattr(space, "start", 0)
    np.testing.assert_array_equal(envs.reset(), np.full((3, *layout.shape), first, layout.dtype))
    for _ in range(4):
        step = envs.step(NEVER)
        if step.final_obs is not None:
            done = step.terminated | step.truncated
            assert step.final_obs.dtype == step.obs.dtype and step.final_obs.shape == step.obs.shape
            np.testing.assert_array_equal(
                step.final_obs[done].reshape(-1), first + step.reward[done]
            )
    envs.close()


def test_the_environment_that_is_only_looked_at_is_reset_where_that_is_needed() -> None:
    resets: list[tuple[int, int | None]] = []
    made: list[Any] = []

    def counted(kind: type[Counting]) -> gym.Env[Any, Any]:
        class Counted(kind):
            def reset(
                self, *, seed: int | None = None, options: dict[str, Any] | None = None
            ) -> Any:
                resets.append((made.index(self), seed))
                return super().reset(seed=seed, options=options)

            def close(self) -> None:
                resets.append((made.index(self), -1))

        made.append(Counted())
        return made[-1]

    for kind, expected in (
        (Counting, [(0, 0), (0, -1)]),
        (MaskedByMethod, [(0, -1)]),
        (MaskedInObservation, [(0, -1)]),
        (Structured, [(0, 0), (0, -1)]),
        (MaskedNumbers, [(0, -1)]),
    ):
        resets.clear()
        made.clear()
        envs = make(lambda kind=kind: counted(kind))
        assert resets == expected
        envs.close()


def test_what_make_env_must_be() -> None:
    one, lock = Counting(), threading.Lock()
    with pytest.raises(ValueError, match="expected a function that makes one"):
        make(one)
    with pytest.raises(ValueError, match=r"expected a gymnasium.Env"):
        make(lambda: "environment")
    with pytest.raises(EnvError, match="mine cannot be made: RuntimeError: broken"):
        make(broken)
    shared = make(lambda: one)
    with pytest.raises(ValueError, match="the same environment twice; make a new one"):
        shared.reset()
    with pytest.raises(ValueError, match=r"env.parallel"):
        make(lambda: (lock, Counting())[1], "processes")


def broken() -> gym.Env[Any, Any]:
    raise RuntimeError("broken")


def test_environments_with_other_spaces_than_the_first_are_refused() -> None:
    made = iter([Counting, Counting, FromFive])
    envs = make(lambda: next(made)(), num_envs=2)
    with pytest.raises(EnvError, match=r"environment 1, reset.*other spaces"):
        envs.reset()


BOX = gym.spaces.Box(0, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (
            gym.spaces.Text(5),
            gym.spaces.Discrete(2),
            r"observations of the kind Text\(.*\) are not supported; "
            "supported: Box .*Tuple of these$",
        ),
        (
            BOX,
            gym.spaces.Text(5),
            "actions of the kind Text.* are not supported; supported: Discrete",
        ),
        (
            BOX,
            gym.spaces.Box(0, 9, (2,), np.int64),
            "actions of the kind Box.*; write a Box of integers as a MultiDiscrete",
        ),
        (
            gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(2)}),
            gym.spaces.Discrete(2),
            "the space of observations .* is empty",
        ),
        (
            None,
            gym.spaces.Discrete(2),
            "observation_space is an object of type NoneType and action_space an object of type "
            "Discrete",
        ),
    ],
)
def test_spaces_that_are_not_supported_are_refused_at_once(
    observation_space: Any, action_space: gym.Space[Any], message: str
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=message):
        make(lambda: Spaces(observation_space, action_space))


def test_an_id_that_gymnasium_does_not_know_is_a_users_mistake() -> None:
    with pytest.raises(ValueError, match="Gymnasium does not find 'no_such_module:Thing-v0'"):
        made_by_id("no_such_module:Thing-v0")
