"""What is in the checkpoints of a run, for people. Kind: effects (reads files)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasicrl.runs.checkpoint import clock_of, leaves, load_at, problem_of
from phasicrl.runs.directory import BEST_FILE, EPOCHS_FILE, METRICS_FILE, RunDirectory
from phasicrl.runs.metrics import kept_rows


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint.

    Attributes:
        name: of its folder.
        env_steps: after which it was saved.
        num_bytes: of its files; chunks that others link count in each.
        problem: why it cannot be used; empty if nothing was found.
    """

    name: str
    env_steps: int
    num_bytes: int
    problem: str


def list_checkpoints(run_dir: Path, *, every_file: bool = False) -> list[CheckpointInfo]:
    """The checkpoints of a run, oldest first.

    Args:
        run_dir: Run directory.
        every_file: read them as a resumed run would, and not only what they say of themselves.

    Raises:
        ValueError: not a run directory.
    """
    files, found = RunDirectory(run_dir), []
    run = files.card.get("run", "") if files.config else ""
    for path in files.checkpoints:
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        problem = problem_of(path, run, every_file=every_file)
        found.append(CheckpointInfo(path.name, clock_of(path.name)[0], size, problem))
    return found


def verify_run(run_dir: Path) -> list[str]:
    """Read everything that a resumed run or an evaluation would read; returns what is wrong.

    Args:
        run_dir: Run directory.

    Raises:
        ValueError: not a run directory.
    """
    files, problems = RunDirectory(run_dir), []
    readers: tuple[Callable[[], object], ...] = (
        lambda: files.config, lambda: files.card, files.weights, files.metrics, files.refuse_links
    )  # fmt: skip
    if (run_dir / BEST_FILE).exists():
        readers = (*readers, lambda: files.weights("best"))
    for read in readers:
        try:
            read()
        except ValueError as error:
            problems.append(str(error))
    run = "" if problems else files.card.get("run", "")
    found = [(path, problem_of(path, run, every_file=True)) for path in files.checkpoints]
    whole = [path for path, problem in found if not problem]
    if whole and not problems:
        problems += _changed_since(files, whole[-1])
    problems += [f"{path.name}: {problem}" for path, problem in found if problem]
    return problems if found else [*problems, f"{run_dir} has no checkpoint"]


def _changed_since(files: RunDirectory, checkpoint: Path) -> list[str]:
    """What `resume` would find of the configuration and the rows, from this checkpoint."""
    state, problems = load_at(checkpoint).tree, []
    try:
        files.refuse_changes(state["config"])
    except ValueError as error:
        problems.append(str(error))
    for name, kept in ((METRICS_FILE, state["log"]), (EPOCHS_FILE, state["log"].get("epochs"))):
        path = files.path / name
        if kept and (not path.is_file() or kept_rows(path, kept) is None):
            problems.append(
                f"{path} is not what it was when {checkpoint.name} was saved; restore it, "
                "or let `phasicrl resume` keep the rows that it can read"
            )
    return problems


@dataclass(frozen=True)
class Difference:
    """One thing in which two checkpoints differ: tensors by their largest difference."""

    name: str
    one: str
    other: str


def diff_checkpoints(
    run_dir: Path, *, one: str | None = None, other: str | None = None
) -> tuple[str, str, list[Difference]]:
    """In what two checkpoints of a run differ.

    Args:
        run_dir: Run directory.
        one: Name of a checkpoint; none: the last but one, or the last if `--other` is older.
        other: Name of another one; none: the last, but for the one that `--one` names.

    Returns:
        Both names, and the differences.

    Raises:
        ValueError: they are not there, or damaged.
    """
    known = {path.name: path for path in RunDirectory(run_dir).checkpoints}
    if len(known) < 2 and not (one and other):
        raise ValueError(f"{run_dir} has {len(known)} checkpoints; two are compared")
    rest = [name for name in known if name not in (one, other)]
    other = other or rest.pop()
    names = (one or rest.pop(), other)
    for name in names:
        if name not in known:
            raise ValueError(f"{run_dir} has no checkpoint {name!r}; it has {', '.join(known)}")
    trees = []
    for name in names:
        tree, chunks = load_at(known[name])
        trees.append(dict(leaves(tree | {"rollouts": chunks})))
    before, after = trees
    paths = dict.fromkeys([*before, *after])
    found = [_difference(path, before.get(path), after.get(path)) for path in paths]
    return *names, [each for each in found if each is not None]


def _difference(path: str, one: Any, other: Any) -> Difference | None:
    """In what two leaves differ; None is one that is not there, and no difference is None."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape == other.shape and torch.equal(one, other):
            return None
        if one.shape == other.shape:
            most = float((one.double() - other.double()).abs().max())
            return Difference(path, "", f"differs by {most:.4g} at most")
    elif type(one) is type(other) and one == other:
        return None
    return Difference(path, _shown(one), _shown(other))


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"tensor {tuple(leaf.shape)}"
    text = "–" if leaf is None else str(leaf)
    return text if len(text) <= 40 else f"{text[:37]}…"
