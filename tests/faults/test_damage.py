"""Files that were damaged, swapped, made up or fought over (F-04, F-05, F-11, F-14, F-17)."""

import contextlib
import json
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasicrl.algorithm import resume, train
from phasicrl.config_io import SCHEMA
from phasicrl.runs.checkpoint import CheckpointError
from phasicrl.runs.directory import RunDirectory
from tests.faults.conftest import Fault
from tests.faults.harness import begin_or_resume, finish, left, small, start
from tests.helpers import assert_same, corridor, mark_long, rows_of, stop_at, tiny, tiny_aux

Stopped = tuple[Path, dict[str, Tensor], Any]
STOPPED, BEFORE = "step-000000000160-end", "step-000000000128"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Return a run stopped within a phase, and what becomes of it undamaged."""
    folder = tmp_path_factory.mktemp("stopped")
    config = tiny(folder, aux=tiny_aux(every=3), total_env_steps=192)
    config = config.with_updates({"checkpoint.every_minutes": 0.0, "log.console": "plain"})
    run = train(config, make_env=corridor, callbacks=stop_at(5))
    copy = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(run.directory, copy)
    resume(copy, make_env=corridor)
    files = RunDirectory(copy)
    return run.directory, files.load_weights(), rows_of(files)


SAVED = ("manifest.json", "state.json", "tensors.safetensors", "rollout-000002-000.safetensors")
FILES = (
    "config.json", "card.json", "metrics.jsonl", *(f"checkpoints/{STOPPED}/{x}" for x in SAVED)
)  # fmt: skip


def damages(path: Path, draw: random.Random, few: bool) -> Iterator[bytes | None]:
    """Yield contents to put in the file's place; None removes it."""
    whole = path.read_bytes()
    yield from (None, b"", b"\0" * len(whole), b"[1]")
    for _ in range(2 if few else 22):
        yield whole[: draw.randrange(len(whole))]
    for _ in range(2 if few else 200):
        at, flipped = draw.randrange(8 * len(whole)), bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        yield bytes(flipped)


@pytest.mark.filterwarnings("ignore:.*card.json says")
@pytest.mark.parametrize("name", mark_long(FILES, *FILES[:5]))
@pytest.mark.fault("F-04", "a damaged file of a run: named, or without effect", 8, 226)
def test_a_damaged_file_is_named_or_has_no_effect(
    tmp_path: Path, name: str, fault: Fault, is_full: bool, stopped: Stopped
) -> None:
    directory, weights, rows = stopped
    contents = list(damages(directory / name, random.Random(name), few=not is_full))
    for number in fault:
        copy = tmp_path / str(number)
        shutil.copytree(directory, copy)
        if (content := contents[number]) is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(content)
        with contextlib.suppress(ValueError):
            try:
                resume(copy, make_env=corridor)
            except ValueError as error:
                named = (Path(name).name, Path(name).parent.name, "not a run directory", "compute.")
                assert any(word in str(error) for word in named if word), error
                raise
            files = RunDirectory(copy)
            assert_same(files.load_weights(), weights)
            assert files.card["run"] == RunDirectory(directory).card["run"]
            if name != "metrics.jsonl":  # of the rows before a checkpoint only the size is known
                assert_same(rows_of(files), rows)
        shutil.rmtree(copy)


@pytest.mark.fault("F-05", "all checkpoints bad: every reason, nothing is deleted", 1, 1)
def test_all_checkpoints_bad(tmp_path: Path, fault: Fault, stopped: Stopped) -> None:
    for _ in fault:
        copy = tmp_path / "run"
        shutil.copytree(stopped[0], copy)
        for path in RunDirectory(copy).checkpoints:
            (path / "state.json").write_text("[]")
        before = sorted(path for path in copy.rglob("*") if path.name != ".lock")
        with pytest.raises(CheckpointError, match=f"{STOPPED} cannot be used.*{BEFORE} cannot"):
            resume(copy, make_env=corridor)
        assert sorted(path for path in copy.rglob("*") if path.name != ".lock") == before


class Canary:
    """Object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def malicious(canary: Path) -> Iterator[bytes]:
    """Yield contents that a careless reader would execute, or fill the memory with."""
    yield pickle.dumps(Canary(canary))
    torch_file = canary.with_suffix(".pt")
    torch.save({"weights": Canary(canary)}, torch_file)
    yield torch_file.read_bytes()
    torch.save({"weights": Canary(canary)}, torch_file, _use_new_zipfile_serialization=False)
    yield torch_file.read_bytes()
    yield (2**62).to_bytes(8, "little") + b"{}"
    header = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    yield len(header).to_bytes(8, "little") + header
    yield b"[" * 100_000
    yield b'{"a":' * 100_000
    yield json.dumps({"schema": SCHEMA, "files": {"../../../canary": {}}}).encode()


@pytest.mark.fault("F-11", "malicious files in the place of ours: no code is run", 14, 7 * 8)
def test_malicious_files_are_not_executed(tmp_path: Path, fault: Fault, stopped: Stopped) -> None:
    canary = tmp_path / "canary"
    cases = [(name, content) for name in FILES for content in malicious(canary)]
    for number in fault:
        name, content = cases[(number * 15) % len(cases)]  # all of them, in another order
        copy = tmp_path / str(number)
        shutil.copytree(stopped[0], copy)
        (copy / name).write_bytes(content)
        with contextlib.suppress(ValueError):
            resume(copy, make_env=corridor)
        assert not canary.exists()
        shutil.rmtree(copy)


@pytest.mark.long
@pytest.mark.fault("F-17", "two resumes at once: one continues, the other names its holder", 1, 50)
def test_two_resumes_at_once(tmp_path: Path, fault: Fault) -> None:
    whole = tmp_path / "whole"
    finish(whole, begin_or_resume, whole, "ppg")
    expected, begun = left(whole), tmp_path / "begun"
    train(small(begun, "ppg"), callbacks=stop_at(4))
    for number in fault:
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder)
        one, two = (start(folder, begin_or_resume, folder, "ppg") for _ in range(2))
        one.join(60)
        two.join(60)
        assert {one.exitcode, two.exitcode} == {0, 1}
        winner = one if one.exitcode == 0 else two
        assert f"in use by process {winner.pid}" in (folder / "errors.txt").read_text()
        assert_same(expected, left(folder))
