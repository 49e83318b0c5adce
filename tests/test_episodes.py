"""Statistics of episodes: exact sums, whatever the rollouts, and a window that stays."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from phasicrl.episodes import EpisodeStatistics


def update(episodes: EpisodeStatistics, *rows: tuple[float, bool]) -> None:
    """Add steps of a single environment: reward, and whether the episode ends."""
    reward, ended = (torch.tensor(column)[:, None] for column in zip(*rows, strict=True))
    episodes.add_steps({"reward": reward, "terminated": ended, "ended": ended})


def test_a_report_clears_what_it_reported_but_keeps_the_window() -> None:
    episodes = EpisodeStatistics(1, window=2)
    assert episodes.pop_metrics() == {"charts/num_episodes": 0}
    assert math.isnan(episodes.recent_mean_return)
    update(episodes, (1, False), (2, True), (10, True), (100, True), (7, False))
    names = [f"charts/{x}" for x in ("num_episodes", "episodic_return", "episodic_length",
                                     "episodic_return_100")]  # fmt: skip
    first = (3, (3 + 10 + 100) / 3, (2 + 1 + 1) / 3, (10 + 100) / 2)
    assert episodes.pop_metrics() == dict(zip(names, map(pytest.approx, first), strict=True))
    assert episodes.pop_metrics() == {names[0]: 0, names[3]: pytest.approx(55)}
    update(episodes, (5, True))  # the episode that was under way during both reports
    assert episodes.pop_metrics() == dict(zip(names, (1, 12, 2, (100 + 12) / 2), strict=True))


def added_up(reward: Tensor, ended: Tensor) -> list[float]:
    """Return the returns of finished episodes in order of their ends, by plain additions."""
    so_far, finished = [0.0] * reward.shape[1], []
    for rewards, ends in zip(reward.tolist(), ended.tolist(), strict=True):
        for env, (number, end) in enumerate(zip(rewards, ends, strict=True)):
            so_far[env] += number
            if end:
                finished.append(so_far[env])
                so_far[env] = 0.0
    return finished


def test_no_digit_of_a_return_depends_on_where_rollouts_begin() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.randint(-6, 6, (120, 5), generator=generator)
    reward = sizes * torch.randn(120, 5, generator=generator)
    ended = torch.rand(120, 5, generator=generator) < 0.05
    expected = added_up(reward, ended)
    for length in (120, 24, 1):
        episodes = EpisodeStatistics(5, window=1000)
        for start in range(0, 120, length):
            part = {"reward": reward, "terminated": ended & False, "ended": ended}
            episodes.add_steps({name: x[start : start + length] for name, x in part.items()})
        assert episodes.state_dict()["recent"] == expected
        report = episodes.pop_metrics()
        assert report["charts/num_episodes"] == len(expected) > 15
        assert report["charts/episodic_return"] == float(np.mean(expected))


def test_new_episodes_begin_without_the_reward_of_old_ones() -> None:
    """The second of three processes could not restore its environment."""
    episodes, restored = EpisodeStatistics(3), EpisodeStatistics(3)
    ended = torch.tensor([[False] * 3])
    reward = torch.tensor([[5.0, math.inf, 5.0]])
    episodes.add_steps({"reward": reward, "terminated": ended, "ended": ended})
    restored.load_state_dict(episodes.state_dict(), same_episodes=[True, False, True])
    restored.add_steps({"reward": torch.full((1, 3), 7.0), "terminated": ~ended, "ended": ~ended})
    assert [each.total_reward for each in restored.finished] == [12.0, 7.0, 12.0]
