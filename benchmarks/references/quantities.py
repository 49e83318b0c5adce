"""Quantities of a run, by iteration, quantity and part."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from references.cases import Case

Arrays = dict[str, np.ndarray]


class Quantities:
    """Arrays by `iteration|quantity|part`.

    Each part (a layer's weights, for example) is compared by itself.
    """

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def put(self, iteration: int, quantity: str, value: Any, part: str = "") -> None:
        """Store a copy of an array."""
        value = value.detach().numpy() if hasattr(value, "detach") else value
        self.arrays[f"{iteration}|{quantity}|{part}"] = np.array(value, dtype=np.float64)

    def put_state(
        self,
        iteration: int,
        weights: Mapping[str, Any],
        start: Mapping[str, np.ndarray],
        optimizers: Mapping[str, Sequence[Any]],
        when: str,
    ) -> None:
        """Store how far all weights have moved, and Adam's two moments of each.

        Args:
            iteration: its number.
            weights: parameters by our names.
            start: initial parameters.
            optimizers: Adams by their task; one of each task has the parameter.
            when: `policy phase` or `auxiliary phase`.
        """
        for name, weight in weights.items():
            moved = weight.detach().double().numpy().reshape(start[name].shape) - start[name]
            self.put(iteration, f"weights after the {when}", moved, name)
        for task, adams in optimizers.items():
            for name, weight in weights.items():
                states = [adam.state[weight] for adam in adams if weight in adam.state]
                if states:
                    part = f"{task}: {name}"
                    self.put(iteration, f"steps of Adam, after the {when}", states[0]["step"], part)
                    for moment, order in (("exp_avg", "first"), ("exp_avg_sq", "second")):
                        value = states[0][moment].detach().numpy().reshape(start[name].shape)
                        self.put(iteration, f"Adam's {order} moment after the {when}", value, part)

    def put_initial(self, weights: Mapping[str, Any]) -> None:
        """Store the norms of a program's own initial weights."""
        for name, weight in weights.items():
            self.put(0, "norms of the initial weights", weight.detach().norm(), name)

    def begin(
        self, model: torch.nn.Module, start: Arrays, case: Case
    ) -> dict[str, torch.nn.Parameter]:
        """Copy the given weights into a model of theirs, after storing the norms of its own.

        Args:
            model: agent of the reference.
            start: weights by our names.
            case: comparison; has the names.

        Returns:
            Its parameters, by our names.
        """
        theirs = dict(model.named_parameters())
        weights = {ours: theirs[name] for ours, name in matched(start, theirs, case.names).items()}
        if case.initial:
            self.put_initial(weights)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(torch.from_numpy(start[name]).reshape(weight.shape))
        return weights

    def save(self, path: Path) -> None:
        """Write to a file."""
        np.savez(path, **self.arrays)  # pyright: ignore[reportArgumentType]  # names of arrays


def matched(
    ours: Iterable[str], theirs: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Return their name of each of our parameters, which have the same order under each beginning.

    Raises:
        ValueError: one side has more parameters.
    """
    found: dict[str, str] = {}
    ours = list(ours)
    for beginning, others in names.items():
        mine = [name for name in ours if f"{name}.".startswith(f"{beginning}.")]
        them = [x for other in others for x in theirs if f"{x}.".startswith(f"{other}.")]
        if mine and len(mine) != len(them):
            raise ValueError(
                f"{beginning} has {len(mine)} parameters here, "
                f"{' and '.join(others)} {len(them)} there"
            )
        found |= dict(zip(mine, them, strict=bool(mine)))
    if missing := [name for name in ours if name not in found]:
        raise ValueError(f"no names for {', '.join(missing)}")
    return {name: found[name] for name in ours}
