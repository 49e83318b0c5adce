"""Checkpoints: one tree of everything that must survive, saved atomically. Kind: effects (files).

A checkpoint is a folder `step-000000123456` with `tensors.safetensors`, `state.json` and, in the
middle of a PPG phase, one file for each rollout of it. One that was made after two epochs of an
auxiliary phase has `-aux-002` in its name. Where several processes train the run, each writes its
part, from the second on into files that begin with `rank-001.`. `manifest.json` is written last: it
has the SHA-256 of every file, and one of its own. Loading runs no code: files hold numbers, strings
and tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasicrl.config_io import SCHEMA, flush, pop_schema, read_json
from phasicrl.distributed import ALONE, RankError, World

MANIFEST = "manifest.json"
"""Bytes: more is not read into memory."""
_NAME = re.compile(r"step-(\d{12})(?:-aux-(\d{3}))?", re.ASCII)
_TENSOR, _ITEMS = "__tensor__", "__items__"

Chunks = dict[str, Callable[[], dict[str, Tensor]]]
"""Big parts that never change once they exist, by a name that is used for nothing else.

They are called only when they must be written.
"""


def save_checkpoint(
    folder: Path,
    tree: dict[str, Any],
    *,
    env_steps: int,
    keep: int,
    aux_epochs: int | None = None,
    chunks: Chunks | None = None,
    run: str = "",
    world: World = ALONE,
) -> Path:
    """Save `tree` as the newest checkpoint in `folder`, and delete all but the last `keep`.

    It is written under a temporary name, flushed to the disk and renamed, so that a crash leaves
    all of it or nothing. All processes of a run call this, each with its part.

    Args:
        folder: holds the run's checkpoints.
        tree: nested dicts and lists of numbers, strings, None and tensors.
        env_steps: the run's clock; names the checkpoint.
        keep: how many checkpoints to keep.
        aux_epochs: epochs of the auxiliary phase that are done, in the middle of one.
        chunks: parts that the checkpoint before may hold already: those are linked, not written
            again.
        run: the run's id; a checkpoint of another run is not taken for one of this.
        world: the processes of the run.

    Raises:
        OSError: it cannot be written; what was there before is still there.
        RankError: another process cannot write its part.
    """
    name = _name(env_steps, aux_epochs)
    final, temporary = folder / name, folder / f".{name}.tmp"
    if world.of_first(final.is_dir()):
        return final  # the same clock, the same state: nothing may be deleted for it
    try:
        with world.together("saving a checkpoint"):
            if world.is_first:
                _make_empty(temporary)
        with world.together("saving a checkpoint"):
            files = _write_part(folder, temporary, tree, chunks or {}, world)
        parts = world.gather(files)
        with world.together("saving a checkpoint"):
            if world.is_first:
                clock = {"env_steps": env_steps, "aux_epochs": aux_epochs}
                manifest = {"schema": SCHEMA, "run": run, **clock, "files": parts}
                _write_json(temporary / MANIFEST, manifest | {"sha256": digest_of_json(manifest)})
                flush(temporary)
                os.replace(temporary, final)
                flush(folder)
    except (OSError, RankError):
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if world.is_first:
        for old in checkpoints(folder)[:-keep]:
            # One that cannot be removed, as its file is open over a network, is tried again next.
            shutil.rmtree(old, ignore_errors=True)
    return final


def _make_empty(temporary: Path) -> None:
    """Make the folder to write a checkpoint into; remove what earlier attempts left."""
    temporary.parent.mkdir(exist_ok=True)  # no parents: the run directory may be gone
    for left_over in temporary.parent.glob(".*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary.mkdir()


def _write_part(
    folder: Path, temporary: Path, tree: dict[str, Any], chunks: Chunks, world: World
) -> dict[str, str]:
    """Write everything of one process but the manifest; returns the SHA-256 of each file."""
    newest, known = _files_before(folder, world)
    prefix, tensors, digests = _prefix(world.rank), {}, {}
    state = _split(tree, "", tensors)
    for name, make in {"tensors": lambda: tensors, **chunks}.items():
        file = f"{prefix}{name}.safetensors"
        if name in chunks and file in known and _link(newest / file, temporary / file):
            digests[file] = known[file]
        else:
            save_tensors(make(), temporary / file)
            digests[file] = digest_of_file(temporary / file)
    file = f"{prefix}state.json"
    _write_json(temporary / file, state)
    return digests | {file: digest_of_file(temporary / file)}


def _prefix(rank: int) -> str:
    """Return the beginning of the names of a process's files."""
    return f"rank-{rank:03d}." if rank else ""


def _files_before(folder: Path, world: World) -> tuple[Path, dict[str, str]]:
    """Return the newest checkpoint, and the SHA-256 of each file of this process in it.

    No files, if it is damaged, or if another number of processes saved it: they had other shares.
    """
    try:
        newest = checkpoints(folder)[-1]
        parts = _read_manifest(newest)["files"]
    except (IndexError, OSError, ValueError):
        return folder, {}
    return newest, parts[world.rank] if len(parts) == world.size else {}


class Part(NamedTuple):
    """What one process had saved in a checkpoint.

    Attributes:
        tree: numbers, tensors and what holds them.
        chunks: tensors by the names of the chunks.
    """

    tree: dict[str, Any]
    chunks: dict[str, dict[str, Tensor]]


def load_checkpoint(
    folder: Path, *, run: str = ""
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], list[str]]:
    """Load the newest checkpoint in `folder` that is whole, as the first process saved it.

    Newer ones that are not are set aside as `rejected-…`: their steps will be taken again, with
    other experience, and nothing of theirs may be linked to. So it is the newest one, then.

    Args:
        folder: holds the run's checkpoints.
        run: the run's id; checkpoints of others are passed over. Empty takes any.

    Returns:
        The tree, the chunks by name, and a sentence about each newer checkpoint that had to be
        passed over.

    Raises:
        CheckpointError: there is none, or none that is whole; every reason is given.
    """
    rejected: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            tree, chunks = _load(path, run)
        except Exception as error:
            rejected.append(f"{path.name} cannot be used: {error}")
            continue
        for newer in checkpoints(folder)[-len(rejected) :] if rejected else []:
            os.replace(newer, newer.with_name(f"rejected-{newer.name}-{time.time_ns()}"))
        return tree, chunks, rejected
    reasons = "; ".join(rejected) or "there is none; the run ended before its first one"
    raise CheckpointError(f"no usable checkpoint in {folder}: {reasons}")


def load_at(path: Path, *, rank: int = 0) -> Part:
    """Load what one process saved in a checkpoint, of any run.

    Raises:
        ValueError: it is damaged; the message names it.
    """
    try:
        return _load(path, "", rank)
    except Exception as error:
        raise ValueError(f"{path.name}: {error}") from None


def num_processes(path: Path) -> int:
    """How many processes saved a checkpoint."""
    return len(_read_manifest(path)["files"])


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, oldest first; a copy under another name is none."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: clock_of(path.name))


def clock_of(name: str) -> tuple[int, float]:
    """When a checkpoint was made, by its name: steps, and auxiliary epochs that were done then.

    The end of an iteration comes after all epochs of it.
    """
    found = _NAME.fullmatch(name)
    assert found is not None, f"{name} is no name of a checkpoint"
    steps, epochs = found.groups()
    return int(steps), math.inf if epochs is None else int(epochs)


def _name(env_steps: int, aux_epochs: int | None) -> str:
    """The folder of a checkpoint."""
    return f"step-{env_steps:012d}" + ("" if aux_epochs is None else f"-aux-{aux_epochs:03d}")


class CheckpointError(ValueError):
    """No checkpoint can be used; the message says why."""

    exit_code = 5


def _load(path: Path, run: str, rank: int = 0) -> Part:
    """Read the part of one process, checking its files against the manifest.

    The first process checks those of all.
    """
    manifest = _read_manifest(path)
    if run and manifest["run"] != run:
        raise ValueError(f"it is of another run ({manifest['run']}; this one is {run})")
    parts, prefix = manifest["files"], _prefix(rank)
    checked = ChainMap(*parts) if rank == 0 else parts[rank]
    for file, digest in checked.items():
        if not (path / file).is_file() or (path / file).is_symlink() or Path(file).name != file:
            raise ValueError(f"{file} is not there, or is no plain file")
        if digest != digest_of_file(path / file):
            raise ValueError(f"{file} was changed or cut short since it was saved")
    own = [file for file in parts[rank] if file.endswith(".safetensors")]
    loaded = {Path(file).stem.removeprefix(prefix): load_file(path / file) for file in own}
    tensors = loaded.pop("tensors")
    state = read_json(path / f"{prefix}state.json")
    return Part(_join(state, tensors), loaded)


def _read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        ValueError: it is damaged, of another schema, or of other steps than the folder's name says.
    """
    if not (path / MANIFEST).is_file():
        raise ValueError(f"it has no {MANIFEST}")
    manifest = read_json(path / MANIFEST)
    if manifest.pop("sha256", None) != digest_of_json(manifest):
        raise ValueError(f"{MANIFEST} was changed or cut short since it was saved")
    pop_schema(manifest)
    name = _name(manifest["env_steps"], manifest["aux_epochs"])
    if path.name != name:
        raise ValueError(f"it was saved as {name}, and was renamed since")
    return manifest


def _split(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, its tensors moved to `tensors` under their paths.

    Dicts keep keys that are not strings, tuples become lists.
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().cpu().contiguous().clone()
        return {_TENSOR: path}
    if isinstance(tree, dict):
        items = [[key, _split(value, f"{path}/{key}", tensors)] for key, value in tree.items()]
        return {_ITEMS: items}
    if isinstance(tree, list | tuple):
        return [_split(value, f"{path}/{index}", tensors) for index, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(
        f"{path} is a {type(tree).__name__}: a checkpoint holds dicts, "
        "lists, numbers, strings, None and tensors"
    )


def _join(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `_split`."""
    if isinstance(node, list):
        return [_join(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if _TENSOR in node:
        return tensors[node[_TENSOR]]
    return {key: _join(value, tensors) for key, value in node[_ITEMS]}


def save_tensors(
    tensors: dict[str, Tensor], path: Path, *, about: dict[str, str] | None = None
) -> None:
    """Write tensors as safetensors and flush them to the disk.

    Args:
        tensors: by name.
        path: of the file.
        about: texts that are kept beside them.

    Raises:
        OSError: it cannot be written.
    """
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()  # who may read it is the user's choice; safetensors lets nobody else
    mode = path.stat().st_mode
    try:
        save_file(whole, path, about)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)
    flush(path)


def _write_json(path: Path, value: Any) -> None:
    """Write JSON and flush it to the disk."""
    path.write_text(json.dumps(value), encoding="utf-8")
    flush(path)


def _link(source: Path, target: Path) -> bool:
    """Give a file that never changes a second name; False where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_tensors(tensors: dict[str, Tensor], about: str = "") -> str:
    """SHA-256 of tensors, with their names, dtypes and shapes, and of a text."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest_of_json(value: dict[str, Any]) -> str:
    """SHA-256 of an object of JSON, in whatever order it was written."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
