"""Checkpoints: one tree of everything that must survive, saved atomically. Kind: effects (files).

A checkpoint is a folder `step-000000123456` with `tensors.safetensors`, `state.json` and, in the
middle of a PPG phase, one file for each of its rollouts. One after two epochs of an auxiliary phase
has `-aux-002` in its name. Each process of a run writes its part, from the second on into files
that begin with `rank-001.`. `manifest.json` is written last, with the SHA-256 of every file.
Loading runs no code: files hold numbers, strings and tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasicrl.config_io import SCHEMA, fsync_path, pop_schema
from phasicrl.distributed import SINGLE_PROCESS, RankError, World

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{12}(-aux-\d{3})?", re.ASCII)
_TENSOR, _ITEMS = "__tensor__", "__items__"

Chunks = dict[str, Callable[[], dict[str, Tensor]]]
"""Functions that return large parts of the state, by names whose content never changes."""


class CheckpointError(ValueError):
    """No checkpoint can be used."""

    exit_code = 5


class Part(NamedTuple):
    """Part of a checkpoint that one process saved: its tree, and the tensors of its chunks."""

    tree: dict[str, Any]
    chunks: dict[str, dict[str, Tensor]]


def save_checkpoint(
    folder: Path, tree: dict[str, Any], *, env_steps: int, keep: int,
    aux_epochs: int | None = None, chunks: Chunks | None = None, run: str = "",
    world: World = SINGLE_PROCESS,
) -> Path:  # fmt: skip
    """Save the newest checkpoint, and delete all but the last `keep`.

    It is written under a temporary name, flushed to the disk and renamed, so that a crash leaves
    all of it or nothing. All processes of a run call this, each with its part.

    Args:
        folder: folder of the run's checkpoints.
        tree: nested dicts and lists of numbers, strings, None and tensors.
        env_steps: the run's clock.
        keep: number of checkpoints to keep.
        aux_epochs: finished epochs of the auxiliary phase, in the middle of one.
        chunks: parts that are linked, not written again, if the previous checkpoint has them.
        run: id of the run.
        world: processes of the run.

    Raises:
        OSError: it cannot be written; earlier checkpoints are still there.
        RankError: another process cannot write its part.
    """
    name = f"step-{env_steps:012d}" + ("" if aux_epochs is None else f"-aux-{aux_epochs:03d}")
    final, temporary = folder / name, folder / f".{name}.tmp"
    if world.broadcast_object(final.is_dir()):
        return final
    try:
        with world.sync_errors("saving a checkpoint"):
            if world.is_first:
                folder.mkdir(exist_ok=True)  # no parents: the run directory may be gone
                for left_over in folder.glob(".*.tmp"):
                    shutil.rmtree(left_over, ignore_errors=True)
                temporary.mkdir()
        with world.sync_errors("saving a checkpoint"):
            digests = _write_part(folder, temporary, tree, chunks or {}, world)
        parts = world.all_gather_object(digests)
        with world.sync_errors("saving a checkpoint"):
            if world.is_first:
                manifest = {"schema": SCHEMA, "run": run, "name": name, "files": parts}
                _write_json(temporary / MANIFEST, manifest)
                fsync_path(temporary)
                os.replace(temporary, final)
                fsync_path(folder)
    except (OSError, RankError):
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if world.is_first:
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)  # busy on a network: tried again next time
    return final


def _write_part(
    folder: Path, temporary: Path, tree: dict[str, Any], chunks: Chunks, world: World
) -> dict[str, str]:
    """Write the files of one process; returns the SHA-256 of each."""
    previous, known = folder, {}
    with suppress(IndexError, OSError, ValueError):  # none, or a damaged one
        previous = checkpoints(folder)[-1]
        parts = _read_manifest(previous)["files"]
        # Another number of processes had other shares.
        known = parts[world.rank] if len(parts) == world.size else {}
    prefix, tensors, digests = _prefix(world.rank), {}, {}
    state = flatten_tree(tree, "", tensors)
    for name, make in {"tensors": lambda: tensors, **chunks}.items():
        file = f"{prefix}{name}.safetensors"
        if name in chunks and file in known and _link(previous / file, temporary / file):
            digests[file] = known[file]
        else:
            save_tensors(make(), temporary / file)
            digests[file] = digest_of_file(temporary / file)
    _write_json(temporary / f"{prefix}state.json", state)
    return digests | {f"{prefix}state.json": digest_of_file(temporary / f"{prefix}state.json")}


def _prefix(rank: int) -> str:
    """Return the beginning of the names of a process's files."""
    return f"rank-{rank:03d}." if rank else ""


def load_checkpoint(folder: Path, *, run: str = "") -> tuple[Part, list[str]]:
    """Load the first process's part of the newest undamaged checkpoint.

    Damaged newer ones are renamed to `rejected-…`: their steps will be taken again, differently.

    Args:
        folder: folder of the run's checkpoints.
        run: id of the run; checkpoints of others are rejected. Empty takes any.

    Returns:
        The part, and a sentence about each newer checkpoint that was rejected.

    Raises:
        CheckpointError: no undamaged checkpoint; every reason is given.
    """
    rejected: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            part = load_part_of(path, run=run)
        except Exception as error:
            rejected.append(f"{path.name} cannot be used: {error}")
            continue
        for newer in checkpoints(folder)[-len(rejected) :] if rejected else []:
            os.replace(newer, newer.with_name(f"rejected-{newer.name}-{time.time_ns()}"))
        return part, rejected
    reasons = "; ".join(rejected) or "the run ended before its first one"
    raise CheckpointError(f"no usable checkpoint in {folder}: {reasons}")


def load_part_of(path: Path, *, rank: int = 0, run: str = "") -> Part:
    """Load one process's part of a checkpoint. The first process checks the files of all.

    Raises:
        Exception: of many kinds: the checkpoint is damaged, or of another run.
    """
    manifest, prefix = _read_manifest(path), _prefix(rank)
    if run and manifest["run"] != run:
        raise ValueError(f"it is of another run ({manifest['run']}; this one is {run})")
    parts = manifest["files"]
    for file, digest in (ChainMap(*parts) if rank == 0 else parts[rank]).items():
        if Path(file).name != file or digest != digest_of_file(path / file):
            raise ValueError(f"{file} was changed or cut short since it was saved")
    loaded = {
        Path(file).stem.removeprefix(prefix): load_file(path / file)
        for file in parts[rank]
        if file.endswith(".safetensors")
    }
    tensors = loaded.pop("tensors")
    state = json.loads((path / f"{prefix}state.json").read_text(encoding="utf-8"))
    return Part(_unflatten_tree(state, tensors), loaded)


def num_processes(path: Path) -> int:
    """Return the number of processes that saved a checkpoint."""
    return len(_read_manifest(path)["files"])


def checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    # The end of an iteration comes after all auxiliary epochs of it.
    return sorted(found, key=lambda path: path.name if "aux" in path.name else f"{path.name}~")


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Raises:
        ValueError: it is damaged, of another schema, or the folder was renamed.
        OSError: it cannot be read.
    """
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    pop_schema(manifest)
    if path.name != manifest["name"]:
        raise ValueError(f"it was saved as {manifest['name']}")
    return manifest


def flatten_tree(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a tree as JSON, its tensors moved to `tensors` under their paths.

    Dicts keep keys that are not strings; tuples become lists.
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().cpu().contiguous().clone()
        return {_TENSOR: path}
    if isinstance(tree, dict):
        return {_ITEMS: [[key, flatten_tree(x, f"{path}/{key}", tensors)]
                         for key, x in tree.items()]}  # fmt: skip
    if isinstance(tree, list | tuple):
        return [flatten_tree(x, f"{path}/{index}", tensors) for index, x in enumerate(tree)]
    return tree


def _unflatten_tree(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `flatten_tree`."""
    if isinstance(node, list):
        return [_unflatten_tree(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if _TENSOR in node:
        return tensors[node[_TENSOR]]
    return {key: _unflatten_tree(value, tensors) for key, value in node[_ITEMS]}


def save_tensors(
    tensors: dict[str, Tensor], path: Path, *, about: dict[str, str] | None = None
) -> None:
    """Write tensors as safetensors and flush them to the disk.

    Args:
        tensors: tensors by name.
        path: path of the file.
        about: texts to store with them.

    Raises:
        OSError: it cannot be written.
    """
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # the user's umask; safetensors would let nobody else read it
    try:
        save_file(whole, path, about)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)
    fsync_path(path)


def _write_json(path: Path, value: Any) -> None:
    """Write JSON and flush it to the disk."""
    path.write_text(json.dumps(value), encoding="utf-8")
    fsync_path(path)


def _link(source: Path, target: Path) -> bool:
    """Link a file that never changes; False if the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_tensors(tensors: dict[str, Tensor], about: str = "") -> str:
    """Return the SHA-256 of tensors, with their names, dtypes and shapes, and of a text."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
