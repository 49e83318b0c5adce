"""State of each process in the checkpoints of a run. Kind: effects (files).

Rank 0 saves the common state. Environments, their rollouts and the generators that shuffle
minibatches differ between processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from phasicrl.distributed import World
from phasicrl.runs import checkpoint
from phasicrl.runs.checkpoint import RankState
from phasicrl.runs.directory import RunDirectory
from phasicrl.seeding import derive_seed

OLD_POLICY_PREFIX = "old-policy"
"""Prefix of the name of the chunk with the policy before an auxiliary phase."""


def read_newest_state(files: RunDirectory, world: World) -> tuple[RankState, list[str], int]:
    """Load this process's state from the newest usable checkpoint.

    Args:
        files: run directory.
        world: processes of the run; their number may differ from that of the checkpoint.

    Returns:
        The state with the run's id, a message about each rejected checkpoint, and the number of
        processes that saved the checkpoint.

    Raises:
        CheckpointError: there is no usable checkpoint; the message lists the reason for each.
    """
    part, rejections, folder = RankState({}, {}), [], files.checkpoint_folder
    with world.sync_errors("loading the checkpoint"):
        if world.is_first:
            part, rejections = checkpoint.load_checkpoint(folder, run_id=files.card.get("run", ""))
    path = folder / world.broadcast_object(files.checkpoints[-1].name if world.is_first else "")
    with world.sync_errors("loading the checkpoint"):
        manifest = checkpoint.read_manifest(path)
        if (saved_by := len(manifest["files"])) != world.size:
            parts = [checkpoint.load_rank_state(path, rank=rank) for rank in range(saved_by)]
            part = _reshard(parts, world)
        elif not world.is_first:
            part = checkpoint.load_rank_state(path, rank=world.rank)
    learner = world.broadcast_object(part.state["learner"]) | part.state["learner"]
    common = {"learner": learner, "run": manifest["run"]}  # without card.json, too
    return RankState(part.state | common, part.chunks), rejections, saved_by


def _reshard(parts: list[RankState], world: World) -> RankState:
    """Return this process's state after a change of their number, without environments."""
    first = parts[0].state
    chunks = {
        name: {
            key: _local_rows(name, [part.chunks[name][key] for part in parts], first, world)
            for key in tensors
        }
        for name, tensors in parts[0].chunks.items()
    }
    learner = dict(first["learner"])
    if 0 < world.rank < len(parts):
        learner["generator"] = parts[world.rank].state["learner"]["generator"]
    elif world.rank:
        seed = derive_seed(int(first["env_steps"]), "shuffle", world.rank)
        learner["generator"] = Generator().manual_seed(seed).get_state()
    return RankState(first | {"learner": learner, "collector": None}, chunks)


def _local_rows(name: str, parts: list[Tensor], state: dict[str, Any], world: World) -> Tensor:
    """Return the rows of this process's environments from what each process saved.

    The tensor is `[B, …]`, or `[K·B, …]` with all K rollouts of a phase.
    """
    num_rollouts = state["num_filled"] if name.startswith(OLD_POLICY_PREFIX) else 1
    by_rollout = torch.cat([part.unflatten(0, (num_rollouts, -1)) for part in parts], dim=1)
    return by_rollout[:, world.local_slice(by_rollout.shape[1])].flatten(0, 1)
