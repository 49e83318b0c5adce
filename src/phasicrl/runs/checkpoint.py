"""Checkpoints: the state of a run, saved atomically. Kind: effects (files).

A checkpoint is a directory `step-000000123456` with `tensors.safetensors`, `state.json` and, within
a PPG phase, a file (a chunk) for each of its rollouts. After two epochs of an auxiliary phase, the
name ends in `-aux-002`; at the end of a run, after `on_end`, in `-end`. Each process of a run
writes its files; those of rank 1 begin with `rank-001.`. `manifest.json` is written last, with the
SHA-256 of every file. Loading runs no code: files hold numbers, strings and tensors.
"""

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

from phasicrl.config_io import SCHEMA, check_and_pop_schema, fsync_path
from phasicrl.distributed import SINGLE_PROCESS, RankError, World

MANIFEST_FILE = "manifest.json"
_CHECKPOINT_NAME = re.compile(r"step-\d{12}(-aux-\d{3})?(-end)?", re.ASCII)
_TENSOR, _ITEMS = "__tensor__", "__items__"

ChunkMakers = dict[str, Callable[[], dict[str, Tensor]]]
"""Functions that return tensors with a file of their own, by name.

The content of a name never changes, so that the file is linked from the previous checkpoint.
"""


class CheckpointError(ValueError):
    """Lack of a usable checkpoint in a run."""

    exit_code = 5


class RankState(NamedTuple):
    """State that one process saved in a checkpoint.

    `state` is nested dicts and lists of numbers, strings, None and tensors; `chunks` are the
    tensors by name in each further file, such as a rollout's.
    """

    state: dict[str, Any]
    chunks: dict[str, dict[str, Tensor]]


def save_checkpoint(
    folder: Path, state: dict[str, Any], *, env_steps: int, keep: int,
    aux_epoch: int | None = None, is_end: bool = False, chunk_makers: ChunkMakers | None = None,
    run_id: str = "", world: World = SINGLE_PROCESS,
) -> Path:  # fmt: skip
    """Save a checkpoint and delete all but the last `keep`; called by all processes of a run.

    It is written under a temporary name, flushed to the disk and renamed, so that a crash leaves
    all of it or nothing. One of the same name stays as it is.

    Args:
        folder: directory of the run's checkpoints.
        state: state of this process: nested dicts and lists of numbers, strings, None and tensors.
        env_steps: environment steps of the run so far.
        keep: number of checkpoints to keep.
        aux_epoch: number of finished epochs of an auxiliary phase that is due, under way or left
            out (0); None between them.
        is_end: whether the run has ended; it replaces the checkpoint of the same step.
        chunk_makers: tensors with a file of their own, see `ChunkMakers`.
        run_id: id of the run.
        world: processes of the run.

    Raises:
        OSError: the checkpoint cannot be written; earlier ones are unchanged.
        RankError: another process cannot write its files.
    """
    step = f"step-{env_steps:012d}" + ("" if aux_epoch is None else f"-aux-{aux_epoch:03}")
    name = step + "-end" * is_end
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
            digests = _write_rank_state(folder, temporary, state, chunk_makers or {}, world)
        parts = world.all_gather_object(digests)
        with world.sync_errors("saving a checkpoint"):
            if world.is_first:
                manifest = {"schema": SCHEMA, "run": run_id, "name": name, "files": parts}
                _write_flushed_json(temporary / MANIFEST_FILE, manifest)
                fsync_path(temporary)
                os.replace(temporary, final)
                fsync_path(folder)
    except (OSError, RankError):
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if world.is_first:
        if is_end:  # the one from before `on_end`
            shutil.rmtree(folder / step, ignore_errors=True)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)  # retried at the next checkpoint
    return final


def _write_rank_state(
    folder: Path, temporary: Path, state: dict[str, Any], chunk_makers: ChunkMakers, world: World
) -> dict[str, str]:
    """Write the files of one process, and return the SHA-256 of each."""
    previous, known = folder, {}
    with suppress(IndexError, OSError, ValueError):  # no checkpoint, or a damaged one
        previous = list_checkpoints(folder)[-1]
        parts = read_manifest(previous)["files"]
        # With another number of processes, parts differ.
        known = parts[world.rank] if len(parts) == world.size else {}
    prefix, tensors, digests = _get_rank_prefix(world.rank), {}, {}
    json_tree = extract_tensors(state, "", tensors)
    for name, make in {"tensors": lambda: tensors, **chunk_makers}.items():
        file = f"{prefix}{name}.safetensors"
        if name in chunk_makers and file in known:
            with suppress(OSError):  # a file system without hard links
                os.link(previous / file, temporary / file)
        if (temporary / file).exists():
            digests[file] = known[file]
        else:
            save_tensors(make(), temporary / file)
            digests[file] = hash_file(temporary / file)
    _write_flushed_json(temporary / f"{prefix}state.json", json_tree)
    return digests | {f"{prefix}state.json": hash_file(temporary / f"{prefix}state.json")}


def _get_rank_prefix(rank: int) -> str:
    """Return the prefix of the names of a process's files."""
    return f"rank-{rank:03d}." if rank else ""


def load_checkpoint(folder: Path, *, run_id: str = "") -> tuple[RankState, list[str]]:
    """Load the state that rank 0 saved in the newest usable checkpoint.

    Newer checkpoints, which are damaged or of another run, are renamed to `rejected-…`, because the
    resumed run may diverge from them.

    Args:
        folder: directory of the run's checkpoints.
        run_id: id of the run, to reject checkpoints of other runs; empty accepts all.

    Returns:
        The state, and a message about each rejected checkpoint.

    Raises:
        CheckpointError: there is no usable checkpoint; the message lists the reason for each.
    """
    rejections: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            part = load_rank_state(path, run_id=run_id)
        except Exception as error:
            rejections.append(f"{path.name} cannot be used: {error}")
            continue
        for newer in list_checkpoints(folder)[-len(rejections) :] if rejections else []:
            os.replace(newer, newer.with_name(f"rejected-{newer.name}-{time.time_ns()}"))
        return part, rejections
    reasons = "; ".join(rejections) or "the run ended before its first one; start it again"
    raise CheckpointError(f"{folder} has no usable checkpoint: {reasons}")


def load_rank_state(path: Path, *, rank: int = 0, run_id: str = "") -> RankState:
    """Load the state that one process saved in a checkpoint; rank 0 checks the files of all.

    Raises:
        Exception: of any type: the checkpoint is damaged, or belongs to another run.
    """
    manifest, prefix = read_manifest(path), _get_rank_prefix(rank)
    if run_id and manifest["run"] != run_id:
        raise ValueError(f"run is {manifest['run']}; expected {run_id}, of card.json")
    parts = manifest["files"]
    for file, digest in (ChainMap(*parts) if rank == 0 else parts[rank]).items():
        if Path(file).name != file or digest != hash_file(path / file):
            raise ValueError(f"{file} is changed or truncated; expected the file as saved")
    loaded = {
        Path(file).stem.removeprefix(prefix): load_file(path / file)
        for file in parts[rank]
        if file.endswith(".safetensors")
    }
    # Copies are aligned in memory, as in training: else sums may differ in the last bit.
    tensors = {name: tensor.clone() for name, tensor in loaded.pop("tensors").items()}
    json_tree = json.loads((path / f"{prefix}state.json").read_text(encoding="utf-8"))
    return RankState(_insert_tensors(json_tree, tensors), loaded)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the complete checkpoints in a directory, oldest first."""
    found = [path for path in folder.glob("step-*") if _CHECKPOINT_NAME.fullmatch(path.name)]
    # The end of an iteration sorts after its auxiliary epochs.
    return sorted(found, key=lambda path: (path.name[:17], "aux" not in path.name, path.name))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint: the run's id, and the files of each process.

    Raises:
        ValueError: the manifest is damaged or of another schema, or the directory was renamed.
        OSError: the manifest cannot be read.
    """
    manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    check_and_pop_schema(manifest)
    if folder.name != manifest["name"]:
        raise ValueError(f"folder is {folder.name}; expected {manifest['name']}, as saved")
    return manifest


def extract_tensors(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert nested dicts and lists to JSON values, and add their tensors to `tensors` by path.

    Keys of dicts may be of any JSON type; tuples become lists.
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().cpu().contiguous().clone()
        return {_TENSOR: path}
    if isinstance(tree, dict):
        return {_ITEMS: [[key, extract_tensors(x, f"{path}/{key}", tensors)]
                         for key, x in tree.items()]}  # fmt: skip
    if isinstance(tree, list | tuple):
        return [extract_tensors(x, f"{path}/{index}", tensors) for index, x in enumerate(tree)]
    return tree


def _insert_tensors(node: Any, tensors: dict[str, Tensor]) -> Any:
    """Restore what `extract_tensors` converted."""
    if isinstance(node, list):
        return [_insert_tensors(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if _TENSOR in node:
        return tensors[node[_TENSOR]]
    return {key: _insert_tensors(value, tensors) for key, value in node[_ITEMS]}


def save_tensors(
    tensors: dict[str, Tensor], path: Path, *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors as safetensors and flush them to the disk.

    Args:
        tensors: tensors by name.
        path: path of the file.
        metadata: texts to store in the file, by name.

    Raises:
        OSError: the file cannot be written.
    """
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # by the user's umask, which safetensors ignores
    try:
        save_file(whole, path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)
    fsync_path(path)


def _write_flushed_json(path: Path, value: Any) -> None:
    """Write JSON and flush it to the disk."""
    path.write_text(json.dumps(value), encoding="utf-8")
    fsync_path(path)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tensors(tensors: dict[str, Tensor], about: str = "") -> str:
    """Return the SHA-256 of a text and of tensors with name, dtype and shape."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
