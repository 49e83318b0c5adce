"""Checkpoints: one tree of everything that must survive, saved atomically. Kind: effects (files).

A checkpoint is a folder `step-000000123456` with `tensors.safetensors`, `state.json` and, in the
middle of a PPG phase, one file for each rollout of it. Loading runs no code: files hold numbers,
strings and tensors, and every one is covered by a SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
_TENSOR, _ITEMS = "__tensor__", "__items__"

Chunks = dict[str, Callable[[], dict[str, Tensor]]]
"""Big parts that never change once they exist, by a name that is never used for anything else; called only when they must be written."""


def save_checkpoint(folder: Path, tree: dict[str, Any], *, env_steps: int, keep: int, chunks: Chunks | None = None) -> Path:
    """Save `tree` as the newest checkpoint in `folder`, and delete all but the last `keep`.

    It is written under a temporary name, flushed to the disk and renamed, so that a crash leaves
    all of it or nothing.

    Args:
        folder: holds the run's checkpoints.
        tree: nested dicts and lists of numbers, strings, None and tensors.
        env_steps: the run's clock; names the checkpoint.
        keep: how many checkpoints to keep.
        chunks: parts that the checkpoint before may hold already: those are linked, not written
            again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = checkpoints(folder)
    known = _read_state(before[-1])["files"] if before else {}
    final, temporary = folder / f"step-{env_steps:012d}", folder / f".step-{env_steps:012d}.tmp"
    if final.is_dir():
        return final  # the same clock, the same state: nothing may be deleted for it
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()

    tensors: dict[str, Tensor] = {}
    state = _split(tree, "", tensors)
    files = {"tensors.safetensors": _write(temporary / "tensors.safetensors", tensors)}
    for name, make in (chunks or {}).items():
        file = f"{name}.safetensors"
        if file in known and _link(before[-1] / file, temporary / file):
            files[file] = known[file]
        else:
            files[file] = _write(temporary / file, make())
    (temporary / "state.json").write_text(json.dumps({"format": FORMAT, "env_steps": env_steps, "files": files, "state": state}))
    flush(temporary / "state.json")
    flush(temporary)

    os.replace(temporary, final)
    flush(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], list[str]]:
    """Load the newest checkpoint in `folder` that is whole.

    Newer ones that are not are set aside as `rejected-…`: their steps will be taken again, with
    other experience, and nothing of theirs may be linked to.

    Returns:
        The tree, the chunks by name, and a sentence about each newer checkpoint that had to be
        passed over.

    Raises:
        CheckpointError: there is none, or none that is whole; every reason is given.
    """
    rejected = []
    for path in reversed(checkpoints(folder)):
        try:
            tree, chunks = _load(path)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            rejected.append(f"{path.name} cannot be used: {error}")
            continue
        for newer in checkpoints(folder)[-len(rejected) :] if rejected else []:
            os.replace(newer, newer.with_name(f"rejected-{newer.name}-{time.time_ns()}"))
        return tree, chunks, rejected
    reasons = "; ".join(rejected) or "there is none; the run ended before its first one"
    raise CheckpointError(f"no usable checkpoint in {folder}: {reasons}")


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


class CheckpointError(ValueError):
    """No checkpoint can be used; the message says why."""


def _load(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Read one checkpoint, checking every file against its digest."""
    record = _read_state(path)
    loaded = {}
    for file, digest in record["files"].items():
        if _digest(path / file) != digest:
            raise ValueError(f"{file} was changed or cut short since it was saved (its SHA-256 is another)")
        loaded[file.removesuffix(".safetensors")] = load_file(path / file)
    tensors = loaded.pop("tensors")
    return _join(record["state"], tensors), loaded


def _read_state(path: Path) -> dict[str, Any]:
    """The JSON of one checkpoint."""
    record = json.loads((path / "state.json").read_text())
    if record["format"] != FORMAT:
        raise ValueError(f"it has format {record['format']}, this version reads format {FORMAT}")
    return record


def _split(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, its tensors moved to `tensors` under their paths. Dicts keep keys that are not strings, tuples become lists."""
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().cpu().contiguous().clone()
        return {_TENSOR: path}
    if isinstance(tree, dict):
        return {_ITEMS: [[key, _split(value, f"{path}/{key}", tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return [_split(value, f"{path}/{index}", tensors) for index, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{path} is a {type(tree).__name__}: a checkpoint holds dicts, lists, numbers, strings, None and tensors")


def _join(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `_split`."""
    if isinstance(node, list):
        return [_join(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if _TENSOR in node:
        return tensors[node[_TENSOR]]
    return {key: _join(value, tensors) for key, value in node[_ITEMS]}


def _write(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors, flush them to the disk and return the file's digest."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    flush(path)
    return _digest(path)


def _link(source: Path, target: Path) -> bool:
    """Give a file that never changes a second name; False where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
