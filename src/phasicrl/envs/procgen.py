"""Procgen's games in EnvPool: names, levels, options. Kind: effects."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, get_args

from phasicrl.config import EnvConfig, ProcgenDistribution
from phasicrl.envs.envpool import task_families, task_options

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip


def procgen_task(game: str, config: EnvConfig) -> tuple[str, dict[str, Any]]:
    """Return EnvPool's id of a game, such as `StarpilotEasy-v0`, and its options.

    Raises:
        ValueError: a distribution of levels that the game does not have, or options that EnvPool
            would abort on or misunderstand.
    """
    task_id, modes = _task_id(game, config.distribution), distributions(game, task_families())
    if config.distribution not in modes:
        what = f"procgen:{game}: env.distribution is {config.distribution}"
        raise ValueError(f"{what}; expected one of {', '.join(modes)}")
    options = task_options(task_id, config.options)
    if config.distribution == "exploration" and (config.num_levels or "start_level" in options):
        what = f"procgen:{game}: env.distribution is exploration, which is one fixed level"
        raise ValueError(f"{what}; leave out env.num_levels and start_level of env.options")
    # The game draws HWC: without another copy, in the layout that convolutions prefer.
    return task_id, options | {"num_levels": config.num_levels, "channel_first": False}


def distributions(game: str, task_ids: Container[str]) -> list[str]:
    """Return the distributions of levels that a game has among EnvPool's tasks."""
    return [mode for mode in get_args(ProcgenDistribution) if _task_id(game, mode) in task_ids]


def _task_id(game: str, distribution: str) -> str:
    return f"{game.capitalize()}{distribution.capitalize()}-v0"
