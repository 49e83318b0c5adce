"""Checks that the processes of a run can train it together. Kind: effects (files)."""

from __future__ import annotations

import time

from phasicrl.config import Config
from phasicrl.distributed import RankError, World
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.lock import LOCK_FILE

_SECONDS = 10.0
"""Time after which a network file system has shown a new file to all machines."""


def check_shares(config: Config, world: World) -> None:
    """Check that environments and minibatches can be shared equally by the processes.

    Raises:
        ValueError: they cannot be.
    """
    num_envs, rest = divmod(config.env.num_envs, world.size)
    if rest:
        raise ValueError(
            f"env.num_envs is {config.env.num_envs}; expected a multiple of the "
            f"{world.size} processes"
        )
    groups = [("ppo", config.ppo), ("aux", config.aux)][: 1 + config.has_auxiliary_phase]
    for name, group in groups:
        samples = num_envs * (1 if group.minibatch_by == "segments" else config.ppo.num_steps)
        if samples % group.num_minibatches:
            raise ValueError(
                f"{name}.num_minibatches is {group.num_minibatches}; expected a divisor of "
                f"{samples:,}, the {group.minibatch_by} of each of {world.size} processes"
            )


def check_shared(files: RunDirectory, world: World) -> None:
    """Check that this process sees the first one's run directory.

    Raises:
        RankError: the directory is missing here, or is another one of the same name.
    """
    marker = files.path / LOCK_FILE
    expected = world.broadcast_object(marker.read_text("utf-8") if world.is_first else "")
    until = time.monotonic() + _SECONDS
    while not (marker.is_file() and marker.read_text("utf-8") == expected):
        if time.monotonic() > until:
            raise RankError(
                f"rank {world.rank} does not see the run directory {files.path} of rank 0; "
                "--output-dir must be a folder that all machines share"
            )
        time.sleep(0.1)
