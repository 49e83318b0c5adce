"""State of each process in the checkpoints of a run. Kind: effects (files).

Rank 0 saves the common state. Environments, their rollouts and the generators that shuffle
minibatches differ between processes.
"""

import torch
from torch import Generator, Tensor

from phasicrl.distributed import World
from phasicrl.runs.checkpoint import RankState, load_checkpoint, load_rank_state, read_manifest
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
            part, rejections = load_checkpoint(folder, run_id=files.card.get("run", ""))
    path = folder / world.broadcast_object(files.checkpoints[-1].name if world.is_first else "")
    with world.sync_errors("loading the checkpoint"):
        manifest = read_manifest(path)
        if (saved_by := len(manifest["files"])) != world.size:
            parts = [load_rank_state(path, rank=rank) for rank in range(saved_by)]
            part = _reshard(parts, world)
        elif not world.is_first:
            part = load_rank_state(path, rank=world.rank)
    learner = world.broadcast_object(part.state["learner"]) | part.state["learner"]
    common = {"learner": learner, "run": manifest["run"]}  # without card.json, too
    return RankState(part.state | common, part.chunks), rejections, saved_by


def _reshard(parts: list[RankState], world: World) -> RankState:
    """Return this process's state after a change of their number, without environments."""
    # Each rank keeps the generator that it began with.
    first = {name: x for name, x in parts[0].state.items() if name != "torch_generator"}
    if auxiliary := first.get("auxiliary"):  # a phase is under way: share its sums equally
        by_rank = (part.state["auxiliary"]["means"] for part in parts)
        means = [
            each[0] | {key: sum(x[key] for x in each) / world.size for key in ("sums", "weight")}
            for each in zip(*by_rank, strict=True)
        ]
        first["auxiliary"] = auxiliary | {"means": means}
    chunks: dict[str, dict[str, Tensor]] = {name: {} for name in parts[0].chunks}
    for name, tensors in chunks.items():  # [B, …], or [K·B, …] with all K rollouts of a phase
        num_rollouts = first["num_filled"] if name.startswith(OLD_POLICY_PREFIX) else 1
        for key in parts[0].chunks[name]:
            saved = (part.chunks[name][key].unflatten(0, (num_rollouts, -1)) for part in parts)
            joined = torch.cat([*saved], dim=1)
            tensors[key] = joined[:, world.local_slice(joined.shape[1])].flatten(0, 1)
    learner = dict(first["learner"])
    if 0 < world.rank < len(parts):
        learner["generator"] = parts[world.rank].state["learner"]["generator"]
    elif world.rank:
        seed = derive_seed(int(first["env_steps"]), "shuffle", world.rank)
        learner["generator"] = Generator().manual_seed(seed).get_state()
    return RankState(first | {"learner": learner, "collector": None}, chunks)
