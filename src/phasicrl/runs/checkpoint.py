"""Checkpoints: one tree of everything that must survive, saved atomically. Kind: effects (files).

A checkpoint is a folder `step-000000123456` with `tensors.safetensors`, `state.json` and, in the
middle of a PPG phase, one file for each rollout of it. One that was made after two epochs of an
auxiliary phase has `-aux-002` in its name. Where several processes train the run, each writes its
part, from the second on into files that begin with `rank-001.`. `manifest.json` is written last: it
has the size and the SHA-256 of every file, and one of its own. Loading runs no code: files hold
numbers, strings and tensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phasicrl.config_io import SCHEMA, flush, pop_schema, read_json
from phasicrl.distributed import ALONE, RankError, World

MANIFEST = "manifest.json"
_LARGEST_STATE = 2**28
"""Bytes: more is not read into memory."""
_ROOM_BESIDE = 2**20
"""Bytes for all that is no tensor: names, numbers, the file system's own."""
_NAME = re.compile(r"step-(\d{12})(?:-aux-(\d{3}))?", re.ASCII)
_PREFIX = re.compile(r"rank-\d{3}\.", re.ASCII)
_TENSOR, _ITEMS = "__tensor__", "__items__"
_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)
"""What reading a damaged checkpoint may raise."""

Chunks = dict[str, Callable[[], dict[str, Tensor]]]
"""Big parts that never change once they exist, by a name that is used for nothing else.

They are called only when they must be written: once to be counted, and once more then.
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
                _begin(folder, temporary)
        with world.together("saving a checkpoint"):
            files = _write_part(folder, temporary, tree, chunks or {}, world)
        parts = world.gather(files)
        with world.together("saving a checkpoint"):
            if world.is_first:
                clock = {"env_steps": env_steps, "aux_epochs": aux_epochs, "processes": world.size}
                every_file = {file: said for part in parts for file, said in part.items()}
                manifest = {"schema": SCHEMA, "run": run, **clock, "files": every_file}
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


def _begin(folder: Path, temporary: Path) -> None:
    """Make the folder that a checkpoint is written into; what earlier attempts left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary.mkdir()


def _refuse_full_disk(
    folder: Path, tree: Any, chunks: Iterable[Callable[[], dict[str, Tensor]]]
) -> None:
    """Raise an `OSError` where a checkpoint needs more room than there is."""
    needed = _num_bytes([tree, *(make() for make in chunks)]) + _ROOM_BESIDE
    free = shutil.disk_usage(folder).free
    if needed > free:
        room = f"a checkpoint needs {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free"
        raise OSError(errno.ENOSPC, room, str(folder))


def _num_bytes(tree: Any) -> int:
    """Sum the sizes of all tensors in a tree."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    parts = tree.values() if isinstance(tree, dict) else tree
    return sum(map(_num_bytes, parts)) if isinstance(tree, dict | list | tuple) else 0


def _write_part(
    folder: Path, temporary: Path, tree: dict[str, Any], chunks: Chunks, world: World
) -> dict[str, Any]:
    """Write everything of one process but the manifest; returns what that says of each file."""
    before, known = _chunks_before(folder, world)
    of_rank = _prefix(world.rank)
    named = {f"{of_rank}{name}.safetensors": make for name, make in chunks.items()}
    _refuse_full_disk(folder, tree, [make for file, make in named.items() if file not in known])
    tensors: dict[str, Tensor] = {}
    state, file = _split(tree, "", tensors), f"{of_rank}tensors.safetensors"
    files = {file: _write(temporary / file, tensors)}
    for file, make in named.items():
        if file in known and _link(before / file, temporary / file):
            files[file] = known[file]
        else:
            files[file] = _write(temporary / file, make())
    file = f"{of_rank}state.json"
    files[file] = _write_json(temporary / file, state)
    return files


def _prefix(rank: int) -> str:
    """How the names of a process's files begin."""
    return f"rank-{rank:03d}." if rank else ""


def _prefix_of(file: str) -> tuple[str, str]:
    """How the name of a file of some process begins, and the rest of it."""
    found = _PREFIX.match(file)
    return (found.group(), file[found.end() :]) if found else ("", file)


def _chunks_before(folder: Path, world: World) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint, and what its manifest says of its files.

    Nothing, if it is damaged, or if other processes wrote it: they had other shares.
    """
    try:
        newest = checkpoints(folder)[-1]
        manifest = _manifest(newest)
        return newest, manifest["files"] if manifest["processes"] == world.size else {}
    except (IndexError, OSError, ValueError):
        return folder, {}


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
        except _DAMAGE as error:
            rejected.append(f"{path.name} cannot be used: {_said(error)}")
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
    except _DAMAGE as error:
        raise ValueError(f"{path.name}: {_said(error)}") from None


def num_processes(path: Path) -> int:
    """How many processes saved a checkpoint."""
    return _manifest(path)["processes"]


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


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
    manifest = _manifest(path)
    if run and manifest["run"] != run:
        raise ValueError(f"it is of another run ({manifest['run']}; this one is {run})")
    loaded: dict[str, dict[str, Tensor]] = {}
    for file, said in manifest["files"].items():
        prefix, name = _prefix_of(file)
        if rank and prefix != _prefix(rank):
            continue
        if not (path / file).is_file() or (path / file).is_symlink() or Path(file).name != file:
            raise ValueError(f"{file} is not there, or is no plain file")
        if said != _described(path / file):
            raise ValueError(f"{file} was changed or cut short since it was saved")
        if prefix == _prefix(rank) and name.endswith(".safetensors"):
            loaded[name.removesuffix(".safetensors")] = load_file(path / file)
    tensors = loaded.pop("tensors")
    state = read_json(path / f"{_prefix(rank)}state.json", _LARGEST_STATE)
    return Part(_join(state, tensors), loaded)


def _manifest(path: Path) -> dict[str, Any]:
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


def _write(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write tensors and flush them to the disk; returns the file's size and digest."""
    save_tensors(tensors, path)
    return _described(path)


def _write_json(path: Path, value: Any) -> dict[str, Any]:
    """Write JSON and flush it to the disk; returns the file's size and digest."""
    path.write_text(json.dumps(value), encoding="utf-8")
    flush(path)
    return _described(path)


def _link(source: Path, target: Path) -> bool:
    """Give a file that never changes a second name; False where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _described(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": digest_of_file(path)}


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
