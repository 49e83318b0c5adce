"""The games of Procgen as EnvPool has them: names, levels, options. Kind: effects."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, get_args

from phasicrl.config import EnvConfig, ProcgenDistribution
from phasicrl.envs.envpool import import_envpool, task_options

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip


def procgen_task(game: str, config: EnvConfig) -> str:
    """EnvPool's task id of a game: `StarpilotEasy-v0`.

    Raises:
        ValueError: the game does not have this distribution of levels; the message lists those that
            do.
    """
    task_ids = set(import_envpool(procgen=True).list_all_envs())
    task_id = _task_id(game, config.distribution)
    if task_id not in task_ids:
        having = [name for name in GAMES if _task_id(name, config.distribution) in task_ids]
        raise ValueError(
            f"procgen:{game} has no {config.distribution!r} levels (env.distribution); "
            f"it has {', '.join(distributions(game, task_ids))}; "
            f"games with {config.distribution!r} levels: {', '.join(having)}"
        )
    return task_id


def procgen_options(game: str, config: EnvConfig) -> dict[str, Any]:
    """EnvPool's options for a game of Procgen.

    Raises:
        ValueError: what EnvPool aborts the process on, or accepts and misunderstands.
    """
    options = task_options(procgen_task(game, config), config.options)
    if config.distribution == "exploration" and (config.num_levels or "start_level" in options):
        raise ValueError(
            f"procgen:{game}: env.distribution is exploration, which is one fixed level; leave "
            f"env.num_levels (now {config.num_levels}) at 0 and start_level out of env.options"
        )
    # The game draws HWC: no copy into another order, and the convolutions want it so.
    return options | {"num_levels": config.num_levels, "channel_first": False}


def distributions(game: str, task_ids: Container[str]) -> list[str]:
    """The distributions of levels that a game has among EnvPool's tasks."""
    return [mode for mode in get_args(ProcgenDistribution) if _task_id(game, mode) in task_ids]


def _task_id(game: str, distribution: str) -> str:
    return f"{game.capitalize()}{distribution.capitalize()}-v0"
