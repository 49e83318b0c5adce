"""Their side where nothing else can be: our own run in one process, uncompiled."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from references import ours
from references.cases import Case
from references.quantities import Arrays, Quantities


class Side:
    """The package, imported in a precision.

    Args:
        path: unused.
        precision: `float32` or `float64`.
    """

    def __init__(self, path: Path, precision: str) -> None:
        self.ours = ours.Side(precision)

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool
    ) -> Quantities:
        """Run the case plainly.

        Args:
            case: the comparison.
            start: initial weights.
            orders: orders of all passes over samples, one after the other of each process.
            turned: whether each minibatch's samples are added up in the opposite order.
        """
        parts = [
            self._in_numbers_of_one(order, case, rank)
            for rank, of_rank in enumerate(np.split(np.array(orders, dtype=object), case.ranks))
            for order in of_rank
        ]
        count = len(parts) // case.ranks
        whole = [np.concatenate(parts[i::count], 1) for i in range(count)]
        given = [(order[:, ::-1] if turned else order).reshape(-1) for order in whole]
        changes = {name: x for name, x in case.changes.items() if name != "compute.compile"}
        found, _, _ = self.ours.quantities(replace(case, changes=changes, ranks=1), start, given)
        if "compute.compile" in case.changes:  # which tells the losses of no single step
            found.arrays = {name: x for name, x in found.arrays.items() if "|losses" not in name}
        return found

    @staticmethod
    def _in_numbers_of_one(order: np.ndarray, case: Case, rank: int) -> np.ndarray:
        """Return the minibatches of a process as rows of the numbers that one process gives."""
        share = case.num_envs // case.ranks
        env, step = np.divmod(order.astype(np.int64), case.num_steps)
        rollout, env = np.divmod(env, share)
        env += rollout * case.num_envs + rank * share
        return (env * case.num_steps + step).reshape(case.minibatches, -1)
