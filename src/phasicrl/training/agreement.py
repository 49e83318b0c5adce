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
    groups = [("ppo", config.ppo), ("aux", config.aux)][: 1 + config.has_auxiliary_phase]
    for name, group in groups:
        unit = config.get_minibatch_unit(group)
        samples = num_envs * (1 if unit == "segments" else config.ppo.num_steps)
        if samples % group.num_minibatches:
            raise ValueError(
                f"{name}.num_minibatches is {group.num_minibatches}; expected a divisor of "
                f"{samples:,}, the {unit} of each of {world.size} processes"
            )


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
