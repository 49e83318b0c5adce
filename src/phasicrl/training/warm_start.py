"""Initial weights from another run. Kind: effects (reads files)."""

from phasicrl.models.agent import Agent
from phasicrl.runs.directory import RunDirectory

_VALUE_HEADS = ("value_head.", "aux_value_head.")
_OBS_NORM, _VALUE_NORM = "reader.normalizer.", "value_normalizer."


def load_matching_weights(agent: Agent, directory: str) -> list[str]:
    """Load the weights of another run that match by name and shape.

    Statistics are loaded only if all tensors of a normalizer match.

    Args:
        agent: networks to initialize, in place.
        directory: directory of the other run, or name of an agent that comes with phasicrl.

    Returns:
        A message that lists loaded and other tensors, and a warning about observation statistics.

    Raises:
        ValueError: the directory is not a run directory, has no weights yet, or none that match.
    """
    run_directory, new = RunDirectory.find(directory), agent.state_dict()
    old = run_directory.load_weights()
    parameters = {name for name, _ in agent.named_parameters()}
    if bad := [name for name in old if name in parameters and not old[name].isfinite().all()]:
        given = f"init_from is {directory}, whose weights are not finite ({bad[0]})"
        raise ValueError(f"{given}; expected a run that has not diverged")
    fits = {name for name in new.keys() & old.keys() if new[name].shape == old[name].shape}
    if not fits & parameters:
        raise ValueError(f"init_from is {directory}; expected weights that fit this network")
    warnings: list[str] = []
    for owner in (_OBS_NORM, _VALUE_NORM):
        statistics = {name for name in new.keys() | old.keys() if name.startswith(owner)}
        if statistics <= fits:
            continue
        fits -= statistics
        if owner == _VALUE_NORM:  # the heads' outputs are in its units
            fits = {name for name in fits if not name.startswith(_VALUE_HEADS)}
        else:
            kind = run_directory.config.obs_norm.statistics
            text = f"warning: this run does not normalize observations as {directory} did"
            warnings.append(f"{text}; the loaded layers expect obs_norm.statistics {kind}")
    agent.load_state_dict({name: old[name] for name in fits}, strict=False)
    if (norm := agent.reader.normalizer) is not None and norm.high.isfinite().all():
        norm.low.fill_(-norm.clip)  # of this run
        norm.high.fill_(norm.clip)
    message = f"loaded {len(fits)} of {len(new)} tensors from {directory}"
    for what, tensors in (("as initialized", new), ("not used", old)):
        names = [f"{name} {list(tensors[name].shape)}" for name in tensors if name not in fits]
        message += f"; {what}: {', '.join(names)}" if names else ""
    return [message, *warnings]
