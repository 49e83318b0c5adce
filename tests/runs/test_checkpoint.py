"""Checkpoints: what goes in comes out, whole or not at all; the newest whole one is taken.

Nothing is executed.
"""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phasicrl.distributed import World
from phasicrl.runs import checkpoint
from phasicrl.runs.checkpoint import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_rank_state,
)
from tests.helpers import assert_same

TREE: dict[str, Any] = {
    "weights": {"w": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0, 4),
                "byte": torch.tensor(3, dtype=torch.uint8)},
    "optimizer": {"state": {0: {"step": torch.tensor(5.0)}, 1: {}},
                  "groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "amsgrad": False}]},
    "none": None, "counter": 2**60, "text": "γ",
}  # fmt: skip


def sign(path: Path, **changes: Any) -> None:
    """Make a manifest for a checkpoint as it is now: whoever plants a file can plant its digest."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (files,) = manifest["files"]
    manifest["files"] = [{name: checkpoint.hash_file(path / name) for name in files}]
    (path / "manifest.json").write_text(json.dumps(manifest))


def save(folder: Path, steps: int, tree: Any = TREE, *, keep: int = 3, **more: Any) -> Path:
    return checkpoint.save_checkpoint(folder, tree, env_steps=steps, keep=keep, **more)


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tree, chunks), rejections = load_checkpoint(tmp_path)
    assert_same(TREE, tree)
    assert chunks == {} and rejections == []


def test_views_and_shared_memory_are_saved_as_their_own_numbers(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    save(tmp_path, 1, {"row": base[1], "column": base[:, 1], "all": base, "again": base})
    (tree, _), _ = load_checkpoint(tmp_path)
    assert_same(tree, {"row": base[1], "column": base[:, 1], "all": base, "again": base})


def test_loaded_tensors_lie_where_sums_have_the_same_bits(tmp_path: Path) -> None:
    save(tmp_path, 1, {f"{size} numbers": torch.ones(size) for size in (1, 5, 16, 40)})
    tree = load_checkpoint(tmp_path)[0].state
    assert {tensor.data_ptr() % 64 for tensor in tree.values()} == {0}


def test_files_of_tensors_may_be_read_by_whom_the_user_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        checkpoint.save_tensors({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o640


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for steps in (5, 100, 20):
        save(tmp_path, steps, keep=2)
    assert [path.name[-3:] for path in list_checkpoints(tmp_path)] == ["020", "100"]


def test_they_are_in_the_order_of_the_run(tmp_path: Path) -> None:
    endings = ("10-aux-000", "10-aux-000-end", "10-aux-001", "10", "10-end", "20-aux-000")
    order = [f"step-0000000000{ending}" for ending in endings]
    for name in random.Random(0).sample(order, len(order)):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == order
    save(tmp_path, 20, is_end=True, aux_epoch=0, keep=2)
    assert [path.name[15:] for path in list_checkpoints(tmp_path)] == ["10-end", "20-aux-000-end"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", ["delete", "future", "renamed"])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1, {"which": "old", "x": torch.ones(3)})
    newest = save(tmp_path, 2, {"which": "new", "x": torch.ones(3)})
    if damage == "delete":
        (newest / "tensors.safetensors").unlink()
    elif damage == "renamed":
        newest.rename(newest.with_name("step-000000000003"))
    else:
        sign(newest, schema=99)
    (tree, _), (rejection,) = load_checkpoint(tmp_path)
    assert tree["which"] == "old"
    assert ("step-000000000003" if damage == "renamed" else newest.name) in rejection


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    """In any file of a checkpoint, the manifest and the file of the state included."""
    for steps in (1, 2):
        tree = {"which": steps, "x": torch.ones(3)}
        save(tmp_path, steps, tree, chunk_makers={"a": lambda: {"x": torch.ones(2)}}, run_id="a")
    newest, numbers = tmp_path / "step-000000000002", random.Random(0)

    def is_read_as_it_was() -> bool:
        try:
            tree, chunks = load_rank_state(newest, run_id="a")
        except Exception:
            return False
        assert_same([tree, chunks], [{"which": 2, "x": torch.ones(3)}, {"a": {"x": torch.ones(2)}}])
        return True

    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for _ in range(40):
            flip(path, numbers.randrange(8 * len(whole)))
            assert not is_read_as_it_was() or path.name == "manifest.json"  # in a space, perhaps
            path.write_bytes(whole)
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert not is_read_as_it_was()
        path.write_bytes(whole)
    assert load_checkpoint(tmp_path)[0].state["which"] == 2


def test_what_is_damaged_does_not_stand_in_the_way_of_the_next_save(tmp_path: Path) -> None:
    path = save(tmp_path, 1, chunk_makers={"a": lambda: {"x": torch.ones(2)}})
    (path / "manifest.json").write_text("[")
    save(tmp_path, 2, chunk_makers={"a": lambda: {"x": torch.ones(2)}})
    assert load_checkpoint(tmp_path)[0].chunks["a"]["x"].tolist() == [1.0, 1.0]


def test_a_copy_under_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    shutil.copytree(path, tmp_path / "step-best")
    assert list_checkpoints(tmp_path) == [path]


def test_a_checkpoint_of_another_run_is_skipped(tmp_path: Path) -> None:
    save(tmp_path, 1, {"which": "ours"}, run_id="a")
    save(tmp_path, 2, {"which": "theirs"}, run_id="b")
    (tree, _), (rejection,) = load_checkpoint(tmp_path, run_id="a")
    assert tree["which"] == "ours" and "run is b; expected a" in rejection
    with pytest.raises(CheckpointError, match="run is a; expected c"):
        load_checkpoint(tmp_path, run_id="c")


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


def test_a_cut_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, {"which": "old"})

    def crash(*_: object) -> None:
        raise OSError(5, "power cut")

    for function in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, crash)
            with pytest.raises(OSError, match="power cut"):
                save(tmp_path, 2, {"which": "new"})
        assert load_checkpoint(tmp_path)[0].state["which"] == "old"
        assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000000001"]
    save(tmp_path, 2, {"which": "new"})  # what the crash left does not stand in the way
    assert load_checkpoint(tmp_path)[0].state["which"] == "new"
    assert not list(tmp_path.glob(".*tmp"))


def test_chunks_are_written_once_and_linked_afterwards(tmp_path: Path) -> None:
    calls: list[float] = []

    def make(value: float) -> dict[str, torch.Tensor]:
        calls.append(value)
        return {"x": torch.full((3,), value)}

    a, b = partial(make, 1.0), partial(make, 2.0)
    save(tmp_path, 1, chunk_makers={"a": a}, keep=1)
    save(tmp_path, 2, chunk_makers={"a": a, "b": b}, keep=1)
    assert calls == [1.0, 2.0]
    # The checkpoint that wrote `a` is gone, the chunk is not.
    (_, chunks), _ = load_checkpoint(tmp_path)
    assert chunks["a"]["x"].tolist() == [1.0] * 3 and chunks["b"]["x"].tolist() == [2.0] * 3


def test_chunks_are_copied_where_files_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    for steps in (1, 2):
        save(tmp_path, steps, chunk_makers={"a": lambda: {"x": torch.ones(2)}})
    assert load_checkpoint(tmp_path)[0].chunks["a"]["x"].tolist() == [1.0, 1.0]


def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save(tmp_path, 1, {"a": [{1, 2}]})
    assert not list(tmp_path.glob("step-*"))


def test_a_pickle_in_the_place_of_a_file_is_not_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (canary.touch, ())

    path = save(tmp_path, 1)
    (path / "tensors.safetensors").write_bytes(pickle.dumps(Bomb()))
    sign(path)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize("room", [0, 100, 10_000, 500_000])
def test_a_full_disk_leaves_what_was_saved_before_and_no_temporary_folder(
    tmp_path: Path, room: int
) -> None:
    """No file may have more than so many bytes."""
    first, before = save(tmp_path, 1), sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save(tmp_path, 2, chunk_makers={"a": lambda: {"x": torch.zeros(250_000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.rglob("*")) == before and list_checkpoints(tmp_path) == [first]
    save(tmp_path, 2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for names")
def test_files_are_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace_ = os.fsync, os.replace

    def fsync_(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        done.append(f"{source.name} → {target.name}")
        replace_(source, target)

    monkeypatch.setattr(os, "fsync", fsync_)
    monkeypatch.setattr(os, "replace", replaced)
    final = save(tmp_path, 1, chunk_makers={"a": lambda: {"x": torch.zeros(3)}})
    temporary = f".{final.name}.tmp"
    named = done.index(f"{temporary} → {final.name}")
    assert set(done[: named - 1]) == {path.name for path in final.iterdir()}
    assert done[named - 2] == "manifest.json", "the manifest is last: it says that all is there"
    assert done[named - 1] == temporary and done[named + 1 :] == [tmp_path.name]


def test_a_chunk_of_another_number_of_processes_is_not_linked(tmp_path: Path) -> None:
    """Their shares were others, though the name is the same."""

    class OneOfTwo(World):
        def all_gather_object(self, value: Any) -> list[Any]:
            return [value, {} if isinstance(value, dict) else value]

    many, few = torch.arange(4.0), torch.arange(2.0)
    save(tmp_path, 1, chunk_makers={"a": lambda: {"x": few}}, world=OneOfTwo(size=2))
    for steps in (2, 3):
        save(tmp_path, steps, chunk_makers={"a": lambda: {"x": many}})
        assert load_checkpoint(tmp_path)[0].chunks["a"]["x"].tolist() == many.tolist()


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another machine has open, on a network file system."""
    save(tmp_path, 1)
    plain = os.unlink

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith("state.json"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        plain(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        newest = save(tmp_path, 2, keep=1)
    assert list_checkpoints(tmp_path)[-1] == newest
