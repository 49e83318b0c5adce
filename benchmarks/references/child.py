"""Run one side of some cases in one precision, in a process of its own.

usage: child.py WHO PRECISION FOLDER PATH NUMBER …

WHO is `ours` or the name of a reference, PATH of its repository (`-` for ours), NUMBER that of a
case in cases.py. Our run in float32 writes the initial weights and the orders of samples,
which all others read. Baselines, whose networks cannot be run, reads our values.
"""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from references.cases import CASES
from references.substitute import compute_in


def main() -> None:
    """Run the cases, and write their quantities."""
    who, precision, folder, path = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    compute_in(precision)
    module = importlib.import_module(f"references.{who.replace('-', '_')}")
    side = module.Side(precision) if who == "ours" else module.Side(path, precision)
    for number in map(int, sys.argv[5:]):
        case = CASES[number]
        start, orders = (folder / f"{number}.{name}.npz" for name in ("start", "orders"))
        if who == "ours":
            given = None if precision == "float32" else dict(np.load(start))
            found, weights, shuffles = side.quantities(case, given)
            if os.environ.get("RANK", "0") != "0":
                continue
            if precision == "float32":
                np.savez(start, **weights)
                np.savez(orders, *shuffles)
            found.save(folder / f"{number}.ours.{precision}.npz")
            continue
        more = {}
        if who == "baselines":
            more["given"] = dict(np.load(folder / f"{number}.ours.{precision}.npz"))
        for turned in (False, True):
            found = side.quantities(
                case, dict(np.load(start)), list(np.load(orders).values()), turned=turned, **more
            )
            found.save(folder / f"{number}.theirs.{precision}{'.turned' if turned else ''}.npz")


if __name__ == "__main__":
    main()
