"""Checks that the processes of a run agree. Kind: effects (files)."""

from __future__ import annotations

from phasicrl.config import Config
from phasicrl.distributed import RankError, World
from phasicrl.runs.directory import RunDirectory


def check_divisible_by_ranks(config: Config, world: World) -> None:
    """Check that each process gets equally many environments and equal minibatches.

    Raises:
        ValueError: a number is not divisible.
    """
    num_envs, rest = divmod(config.env.num_envs, world.size)
    if rest:
        raise ValueError(
            f"env.num_envs is {config.env.num_envs}; expected a multiple of the "
            f"{world.size} processes"
        )
    try:
        config.with_updates({"env.num_envs": num_envs})
    except ValueError as error:
        raise ValueError(f"in each of {world.size} processes, {error}") from None


def check_directory_is_shared(files: RunDirectory, world: World) -> None:
    """Check that rank 0's run directory is on a file system that this process shares.

    Raises:
        RankError: the directory is missing here.
    """
    if not files.path.is_dir():
        raise RankError(
            f"output_dir is {files.path.parent}, and rank {world.rank} does not see the run "
            "directory of rank 0 in it; expected a folder that all machines share"
        )
