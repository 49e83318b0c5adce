"""Gymnasium's adapter: known episodes, seeds, spaces, and what makes environments."""

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from phasicrl.envs.protocol import EnvError
from phasicrl.spaces import ObservationLayout
from tests.envs.acting import MODES, NEVER, Mode, check_known_episodes, draw_action, make
from tests.envs.counting import (
    Counting,
    CountingInFloat32,
    MaskedByMethod,
    MaskedInObservation,
    MaskedNumbers,
    Spaces,
    Structured,
)


@pytest.mark.parametrize("kind", [Counting, CountingInFloat32])
@pytest.mark.parametrize("mode", MODES)
def test_known_episodes_come_out_whole(mode: Mode, kind: type[Counting]) -> None:
    """Every step of every episode of `Counting` is there once, with the right flags, ends and last
    observations.
    """
    check_known_episodes(make(kind, mode))


@pytest.mark.parametrize("mode", MODES)
def test_all_kinds_of_spaces_at_once(mode: Mode) -> None:
    """Every part of the observations of `Structured` arrives, at the ends of episodes too, and
    every part of the actions.
    """
    envs = make(Structured, mode)
    layout = ObservationLayout(envs.observation_space)

    def check(obs: Tensor, ids: np.ndarray, episode: np.ndarray, clock: np.ndarray) -> None:
        read = layout.unpack(obs)
        np.testing.assert_array_equal(read["counts"], np.stack([ids, episode, clock], axis=1))
        image = np.broadcast_to(clock[:, None, None, None], (len(obs), 4, 5, 3))
        np.testing.assert_array_equal(read["image"], image)
        stage, flags = read["more"]
        np.testing.assert_array_equal(stage, clock)
        np.testing.assert_array_equal(flags @ torch.tensor([1, 2, 4], dtype=torch.uint8), clock)

    obs = envs.reset()
    ids = layout.unpack(obs)["counts"][:, 0].numpy()
    episode, clock = np.zeros((2, 3), int)
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


SMALLEST = (
    gym.spaces.Discrete(9, start=3), gym.spaces.Box(0, 9, (), np.int32),
    gym.spaces.Box(0, 9, (1,), np.float32),
)  # fmt: skip


@pytest.mark.parametrize("space", SMALLEST)
@pytest.mark.parametrize("mode", MODES)
def test_observations_of_one_number(mode: Mode, space: gym.Space[Any]) -> None:
    """Gymnasium unwraps the smallest arrays where it stores them as objects."""

    class OneNumber(Counting):
        def _observe(self) -> Any:
            return np.full(space.shape or (), 3 + self._time, space.dtype)

    OneNumber.observation_space = space  # type: ignore[assignment]
    envs = make(OneNumber, mode)
    layout, first = ObservationLayout(space), 3 - getattr(space, "start", 0)
    np.testing.assert_array_equal(envs.reset(), np.full((3, *layout.shape), first, layout.dtype))
    for _ in range(4):
        step = envs.step(NEVER)
        if step.final_obs is not None:
            done = step.terminated | step.truncated
            assert step.final_obs.dtype == step.obs.dtype and step.final_obs.shape == step.obs.shape
            last = step.final_obs[done].reshape(-1)
            np.testing.assert_array_equal(last, first + step.reward[done])
    envs.close()


def test_the_environment_made_for_its_spaces_is_reset_if_needed() -> None:
    resets: list[tuple[int, int | None]] = []
    made: list[Any] = []

    def counted(kind: type[Counting]) -> gym.Env[Any, Any]:
        class Counted(kind):
            def reset(self, *, seed: int | None = None, **given: Any) -> Any:
                resets.append((made.index(self), seed))
                return super().reset(seed=seed, **given)

            def close(self) -> None:
                resets.append((made.index(self), -1))

        made.append(Counted())
        return made[-1]

    for kind in (Counting, MaskedByMethod, MaskedInObservation, Structured, MaskedNumbers):
        resets.clear()
        made.clear()
        envs = make(lambda kind=kind: counted(kind))
        assert resets == [*([(0, 0)] if kind in (Counting, Structured) else []), (0, -1)]
        envs.close()


def test_what_make_env_must_be() -> None:
    one, lock = Counting(), threading.Lock()
    cases: list[tuple[Any, type[Exception], str]] = [
        (one, EnvError, "make_env"),
        (lambda: "environment", EnvError, "returned an object of type str"),
        (lambda: gym.make_vec("CartPole-v1", 2), EnvError, "make_vector_env takes vector"),
        (broken, EnvError, "RuntimeError: broken"),
        (lambda: one, ValueError, "the same environment twice"),
    ]
    for make_env, kind, message in cases:
        with pytest.raises(kind, match=f"mine.*{message}"):
            make(make_env).reset()
    with pytest.raises(EnvError, match=r"can be pickled"):
        make(lambda: (lock, Counting())[1], "async")


def broken() -> gym.Env[Any, Any]:
    raise RuntimeError("broken")


BOX = gym.spaces.Box(0, 1, (2,), np.float32)


PAIR = gym.spaces.Discrete(2)
MASK_ONLY = gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(2)})


@pytest.mark.parametrize(("observation_space", "action_space", "message"), [
    (MASK_ONLY, PAIR, "observation_space is .*; expected at least one number"),
    (None, PAIR, "observation_space is None; expected Box"),
    (BOX, None, "action_space is None; expected Discrete"),
])  # fmt: skip
def test_spaces_that_are_not_supported_are_refused(
    observation_space: Any, action_space: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"mine: .*{message}"):
        make(lambda: Spaces(observation_space, action_space))
