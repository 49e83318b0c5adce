"""Procgen's games, levels and settings, and the words for what is refused."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.config import PROCGEN_FIELDS, EnvConfig
from phasicrl.envs.make import make_envs
from phasicrl.envs.procgen import GAMES, procgen_options, procgen_task
from tests.envs.test_make import needs_envpool, refused


@needs_envpool
def test_every_game_has_its_distributions() -> None:
    for game in GAMES:
        for distribution in ("easy", "hard"):
            config = EnvConfig(distribution=distribution)  # type: ignore[arg-type]
            assert (
                procgen_task(game, config) == f"{game.capitalize()}{distribution.capitalize()}-v0"
            )
    refused(
        "bigfish has no 'memory' levels.*it has easy, hard; "
        "games with 'memory' levels: caveflyer.*miner",
        id="bigfish",
        distribution="memory",
    )
    refused(
        "games with 'extreme' levels: chaser, dodgeball, leaper, starpilot",
        id="maze",
        distribution="extreme",
    )


@needs_envpool
def test_what_envpool_would_abort_on_is_refused() -> None:
    refused(
        "'exploration' is one fixed level",
        id="procgen:maze",
        distribution="exploration",
        num_levels=5,
    )
    refused(
        "'exploration' is one fixed level",
        id="procgen:maze",
        distribution="exploration",
        start_level=5,
    )
    refused("env.start_level = 3 has no meaning with env.num_levels = 0", start_level=3)
    refused("above 2147483647", start_level=5, num_levels=2**31 - 1)
    refused("must not be below zero", num_levels=-1)


@needs_envpool
def test_every_setting_of_procgen_reaches_the_game() -> None:
    config = EnvConfig(
        num_levels=7, start_level=3, center_agent=False, use_backgrounds=False,
        use_monochrome_assets=True, restrict_themes=True, use_generated_assets=True,
        paint_vel_info=True,
    )  # fmt: skip
    options = procgen_options("starpilot", config)
    assert set(options) == {*PROCGEN_FIELDS, "channel_first"} - {"distribution"}
    assert all(options[name] == getattr(config, name) for name in set(options) - {"channel_first"})
    seeds = []
    for num_levels, start_level in ((7, 3), (0, 0)):
        envs = make_envs(
            EnvConfig(id="leaper", num_envs=16, num_levels=num_levels, start_level=start_level),
            seed=1,
        )
        envs.reset()
        seeds.append(envs.step(torch.zeros(16, dtype=torch.int64)).info["level_seed"].numpy())
        envs.close()
    assert set(seeds[0]) <= set(range(3, 10)) and len(set(seeds[0])) > 3
    assert seeds[1].max() > 10_000


@needs_envpool
@pytest.mark.parametrize(
    "field",
    [
        "use_backgrounds",
        "center_agent",
        "use_monochrome_assets",
        "restrict_themes",
        "use_generated_assets",
        "paint_vel_info",
    ],
)
def test_images_change_with_the_settings(field: str) -> None:
    images = []
    for value in (False, True):
        config = EnvConfig(id="coinrun", num_envs=8, num_threads=2, num_levels=50)
        envs = make_envs(replace(config, **{field: value}), seed=1)
        envs.reset()
        images.append([envs.step(torch.full((8,), 7)).obs for _ in range(6)][-1])
        envs.close()
    assert not np.array_equal(*images)


def test_the_games_are_those_of_gymnasiums_registry_or_none() -> None:
    assert not set(GAMES) & {name.lower() for name in gym.registry}
