"""What the processes of a run must have in common before it starts. Kind: effects (files)."""

from __future__ import annotations

import dataclasses
import time

from phasicrl.config import Config
from phasicrl.distributed import RankError, World
from phasicrl.execution.plan import Machine, Plan
from phasicrl.host.machine import versions
from phasicrl.host.provenance import commit
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.lock import LOCK_FILE

_SECONDS = 10.0
"""How long a file that another machine wrote may take to be seen on a network file system."""


def require_same_start(config: Config, world: World) -> None:
    """Refuse processes that would not train the same.

    Raises:
        RankError: their configurations, versions or commits differ; the message has the values.
    """
    world.require_same("configuration", config.values)
    world.require_same("versions", lambda: versions() | {"commit": commit()})


def require_shares(config: Config, world: World) -> None:
    """Refuse a configuration that so many processes cannot share equally.

    Raises:
        ValueError: what cannot be divided, and the numbers that can be.
    """
    if world.size == 1:
        return
    num_envs = world.share(config.env.num_envs, "env.num_envs")
    kinds = [("ppo", config.ppo), ("aux", config.aux)][: 1 + config.has_auxiliary_phase]
    for name, knobs in kinds:
        by_segments = knobs.minibatch_by == "segments"
        samples = num_envs * (1 if by_segments else config.ppo.num_steps)
        if samples % knobs.num_minibatches:
            fitting = [x for x in range(1, knobs.num_minibatches) if samples % x == 0]
            raise ValueError(
                f"{name}.num_minibatches is {knobs.num_minibatches}, but each of {world.size} "
                f"processes has {samples:,} of a rollout's {knobs.minibatch_by}, which do not "
                f"divide into them; try {fitting[-1]}, or another number of processes"
            )


def require_shared(files: RunDirectory, world: World) -> None:
    """Refuse a run directory that this process does not share with the first one.

    Raises:
        RankError: it is not there, or another one of the same name.
    """
    marker = files.path / LOCK_FILE

    def seen() -> str:
        return marker.read_text(encoding="utf-8") if marker.is_file() else ""

    expected, until = world.of_first(seen() if world.is_first else ""), time.monotonic() + _SECONDS
    while not world.is_first and seen() != expected:
        if time.monotonic() > until:
            raise RankError(
                f"rank {world.rank} does not see the run directory {files.path} that rank 0 has "
                "opened; --output-dir must be a folder that all machines share"
            )
        time.sleep(0.1)


def plan_here(plan: Plan, machine: Machine, world: World) -> Plan:
    """The plan that the first process has chosen, on the device and the cores of this one."""
    if world.size == 1:
        return plan
    threads = min(plan.num_threads, machine.num_cores)
    # Processes of one run that wait for each other's turn would wait for ever.
    return dataclasses.replace(plan, device=machine.device, num_threads=threads, take_turns=False)
