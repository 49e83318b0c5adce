"""The actions of the episodes under way, whatever their lengths, and however long a run is."""

import numpy as np
import pytest

from phasicrl.envs.bridge import EpisodeActions


@pytest.mark.parametrize("chance", [0.0, 0.01, 0.3, 1.0])
def test_actions_are_those_since_the_last_end(chance: float) -> None:
    rng, kept = np.random.default_rng(0), EpisodeActions(3, (2,), np.dtype(np.float32))
    plain: list[list[np.ndarray]] = [[], [], []]
    for number in range(700):
        action, ended = rng.normal(size=(3, 2)).astype(np.float32), rng.random(3) < chance
        kept.add(action, ended)
        action_before = action.copy()
        action[:] = np.nan  # the caller may use the memory again
        for env in range(3):
            plain[env] = [] if ended[env] else [*plain[env], action_before[env]]
        if number % 50 == 0 or number > 690:
            copy = EpisodeActions(3, (2,), np.dtype(np.float32))
            copy.set_actions(*kept.get_actions())
            for env, taken, again in zip(
                plain, kept.split_by_env(), copy.split_by_env(), strict=True
            ):
                np.testing.assert_array_equal(taken, np.reshape(env, (len(env), 2)))
                np.testing.assert_array_equal(again, taken)
    assert len(kept._steps) <= 2 * 64 or chance < 0.3, "memory follows the longest episode"
    kept.clear()
    assert [len(taken) for taken in kept.split_by_env()] == [0, 0, 0]


def test_restored_actions_can_be_extended() -> None:
    kept = EpisodeActions(2, (), np.dtype(np.int64))
    for number in range(100):
        kept.add(np.array([number, -number]), np.array([number == 96, False]))
    copy = EpisodeActions(2, (), np.dtype(np.int64))
    copy.set_actions(*kept.get_actions())
    for number in range(100, 300):
        for one in (kept, copy):
            one.add(np.array([number, -number]), np.array([False, number == 150]))
    expected = [[*range(97, 300)], [-number for number in range(151, 300)]]
    for one in (kept, copy):
        assert [taken.tolist() for taken in one.split_by_env()] == expected
