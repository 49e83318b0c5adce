"""Another run's weights to begin with. Kind: effects (reads files)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from phasicrl.models.agent import Agent
from phasicrl.runs.directory import RunDirectory

_VALUE_HEADS = ("value_head.", "aux_value_head.")
_OBS_NORM = "reader.normalizer."


def take_over(agent: Agent, directory: str) -> list[str]:
    """Replace an agent's weights by another run's, as far as name and shape are the same.

    Statistics are taken over with all that belongs to them, or not at all.

    Args:
        agent: gets the weights.
        directory: of the other run.

    Returns:
        What was taken over and what was not, in words; and a warning, if the other run did not
        normalize observations as this one does.

    Raises:
        ValueError: not a run directory, there are no weights yet, or none of them fits.
    """
    files, own = RunDirectory(Path(directory)), agent.state_dict()
    theirs = files.weights()
    fits = {name for name in own.keys() & theirs.keys() if own[name].shape == theirs[name].shape}
    weights = {name for name, _ in agent.named_parameters()}
    if not fits & weights:
        raise ValueError(f"none of the weights of {directory} fits this network; leave them out")
    together: dict[str, set[str]] = defaultdict(set)
    for name in (own.keys() | theirs.keys()) - weights:
        together[name.rpartition(".")[0].removesuffix(".moments")].add(name)
    for owner, statistics in together.items():
        if not statistics <= fits:
            fits -= statistics
            if owner == "value_normalizer":  # the heads' outputs are in its units
                fits = {name for name in fits if not name.startswith(_VALUE_HEADS)}
    agent.load_state_dict({name: theirs[name] for name in fits}, strict=False)
    kept = [f"{name} {list(own[name].shape)}" for name in own if name not in fits]
    unused = [f"{name} {list(theirs[name].shape)}" for name in theirs if name not in fits]
    said = f"took {len(fits)} of {len(own)} tensors over from {directory}"
    for what, names in (("as initialized", kept), ("not used of it", unused)):
        said += f"; {what}: {', '.join(names)}" if names else ""
    normalizers = [{name for name in each if name.startswith(_OBS_NORM)} for each in (own, theirs)]
    if normalizers[0] == normalizers[1]:
        return [said]
    statistics = files.config.obs_norm.statistics
    return [
        said,
        f"warning: {directory} did not normalize observations as this run does; "
        f"its first layers expect what obs_norm.statistics {statistics} gives",
    ]
