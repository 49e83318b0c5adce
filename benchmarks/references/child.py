"""Runs one side of all cases of one reference in one precision, in a process of its own.

usage: child.py WHO PRECISION FOLDER [PATH]
"""
from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from references.cases import CASES
from references.substitute import compute_in

who, precision, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
torch.set_num_threads(1)
compute_in(precision)
if who == "ours":
    from references.ours import Side
    side = Side(precision)
    for number, case in enumerate(CASES):
        start = dict(np.load(folder / f"{number}.start.npz")) if precision == "float64" else None
        found, start, orders = side.quantities(case, start)
        if precision == "float32":
            np.savez(folder / f"{number}.start.npz", **start)
            np.savez(folder / f"{number}.orders.npz", *orders)
        found.save(folder / f"{number}.ours.{precision}.npz")
else:
    side = importlib.import_module(f"references.{who.replace('-', '_')}").Side(Path(sys.argv[4]), precision)
    for number, case in enumerate(CASES):
        if case.reference != who:
            continue
        start = dict(np.load(folder / f"{number}.start.npz"))
        orders = list(np.load(folder / f"{number}.orders.npz").values())
        for turned in (False, True):
            pass
            found = side.quantities(case, start, orders, turned=turned)
            found.save(folder / f"{number}.theirs.{precision}{'.turned' if turned else ''}.npz")
