"""Procgen's games, levels and settings, and the words for what is refused."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.config import EnvConfig
from phasicrl.envs.envpool import PROCGEN_GAMES, resolve_procgen_task
from phasicrl.envs.make import make_envs
from tests.envs.test_make import needs_envpool, refused


@needs_envpool
def test_every_game_has_its_distributions() -> None:
    for game in PROCGEN_GAMES:
        for mode in ("easy", "hard"):
            config = EnvConfig(distribution=mode)  # type: ignore[arg-type]
            task_id, _ = resolve_procgen_task(game, config)
            assert task_id == f"{game.capitalize()}{mode.capitalize()}-v0"
    refused("distribution is memory; expected .* easy, hard$", id="bigfish", distribution="memory")


@needs_envpool
def test_what_envpool_would_abort_on_is_refused() -> None:
    for given in ({"num_levels": 5}, {"options": {"start_level": 5}}):
        refused("one fixed level", id="procgen:maze", distribution="exploration", **given)


@needs_envpool
def test_levels_are_those_that_were_asked_for() -> None:
    config = EnvConfig(id="leaper", num_envs=16, num_levels=7, options={"start_level": 3})
    envs = make_envs(config, seed=1)
    envs.reset()
    seen = set(envs.step(torch.zeros(16, dtype=torch.int64)).info["level_seed"].tolist())
    envs.close()
    assert seen <= set(range(3, 10)) and len(seen) > 3


@needs_envpool
@pytest.mark.parametrize("option", ["use_backgrounds", "paint_vel_info"])
def test_images_change_with_the_options(option: str) -> None:
    images = []
    for value in (False, True):
        config = EnvConfig(id="coinrun", num_envs=8, num_levels=50, options={option: value})
        envs = make_envs(config, seed=1)
        envs.reset()
        images.append([envs.step(torch.full((8,), 7)).obs for _ in range(6)][-1])
        envs.close()
    assert not np.array_equal(*images)


def test_the_games_are_those_of_gymnasiums_registry_or_none() -> None:
    assert not set(PROCGEN_GAMES) & {name.lower() for name in gym.registry}
