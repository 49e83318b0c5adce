"""What each process of a run saves in a checkpoint, and goes on from. Kind: effects (files).

What is the same in all of them is saved by the first. The rest is each one's own: rollouts of its
environments, where these are, the order in which it deals out its minibatches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from phasicrl.distributed import World
from phasicrl.runs.checkpoint import Part, checkpoints, load_at, load_checkpoint, num_processes
from phasicrl.runs.directory import RunDirectory
from phasicrl.seeding import derive_seed

_OWN = ("generator",)
"""What of a learner's state is not the same in all processes."""
OLD_POLICY = "old-policy"
"""How the name of the chunk begins that holds the policy before an auxiliary phase."""


def own_part(state: dict[str, Any], world: World) -> dict[str, Any]:
    """What this process saves of the state of a run."""
    if world.is_first:
        return state
    return state | {"learner": {name: state["learner"][name] for name in _OWN}}


def load_part(files: RunDirectory, world: World) -> tuple[Part, list[str], int]:
    """Load what this process goes on from: of the newest checkpoint that is whole.

    Args:
        files: of the run.
        world: the processes of the run, which may be more or fewer than those that saved it.

    Returns:
        The part; a sentence about each newer checkpoint that had to be passed over; and how many
        processes had saved it.

    Raises:
        CheckpointError: there is none, or none that is whole; every reason is given.
    """
    part, rejected, folder = Part({}, {}), [], files.checkpoint_folder
    with world.together("loading the checkpoint"):
        if world.is_first:
            *loaded, rejected = load_checkpoint(folder, run=files.card.get("run", ""))
            part = Part(*loaded)
    path = folder / world.of_first(checkpoints(folder)[-1].name if world.is_first else "")
    with world.together("loading the checkpoint"):
        saved_by = num_processes(path)
        if saved_by != world.size:
            part = _dealt_anew([load_at(path, rank=rank) for rank in range(saved_by)], world)
        elif not world.is_first:
            part = load_at(path, rank=world.rank)
    learner = world.of_first(part.tree["learner"])
    return (
        Part(part.tree | {"learner": learner | part.tree["learner"]}, part.chunks),
        rejected,
        saved_by,
    )


def _dealt_anew(parts: list[Part], world: World) -> Part:
    """This process's part, if the rollouts of all are dealt out to another number of processes.

    The environments cannot be: they start anew.
    """
    first = parts[0].tree
    chunks = {
        name: {
            key: _rows(name, [part.chunks[name][key] for part in parts], first, world)
            for key in tensors
        }
        for name, tensors in parts[0].chunks.items()
    }
    learner = dict(first["learner"])
    if 0 < world.rank < len(parts):
        learner["generator"] = parts[world.rank].tree["learner"]["generator"]
    elif world.rank:
        seed = derive_seed(int(first["env_steps"]), "shuffle", world.rank)
        learner["generator"] = Generator().manual_seed(seed).get_state()
    return Part(first | {"learner": learner, "collector": None}, chunks)


def _rows(name: str, parts: list[Tensor], state: dict[str, Any], world: World) -> Tensor:
    """This process's rows of a tensor of which each process had saved its own.

    They are environments, `[B, …]`, or `[K·B, …]` where all rollouts of a phase are one tensor.
    """
    if not name.startswith(OLD_POLICY):
        whole = torch.cat(parts)
        return whole[world.own(len(whole))].clone()
    by_rollout = torch.cat([part.unflatten(0, (state["num_filled"], -1)) for part in parts], dim=1)
    return by_rollout[:, world.own(by_rollout.shape[1])].flatten(0, 1)
