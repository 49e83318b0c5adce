"""Files with anything in them are read, or refused in a sentence: never a traceback."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.runs.checkpoint import load_checkpoint
from phasicrl.runs.directory import RunDirectory
from tests.faults.conftest import Fault
from tests.helpers import corridor, tiny, tiny_aux

STRANGE = (
    None, True, False, 0, -1, 1e308, -1e308, 10**40, 0.5, float("nan"), float("inf"), "", "none",
    "\x1b[31m", "../../x", "é" * 100, [], [[]], [None], {}, {"a": 1}, {"": {}}, ["x", 1], "1e5",
)  # fmt: skip


def _strange(draw: random.Random, depth: int = 0) -> Any:
    if depth > 2 or draw.random() < 0.8:
        return copy.deepcopy(draw.choice(STRANGE))
    return {draw.choice(("a", "env", "schema", "files")): _strange(draw, depth + 1)}


def _mutated_tree(tree: Any, draw: random.Random) -> Any:
    """Return the tree with one thing in it replaced, removed, added or moved."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items):
            places.append((node, key))
            if isinstance(value, dict | list):
                visit(value)

    visit(tree)
    node, key = draw.choice(places)
    way = draw.randrange(4)
    if way == 0:
        node[key] = _strange(draw)
    elif way == 1:
        del node[key]
    elif way == 2 and isinstance(node, dict):
        node[draw.choice(("x", "", "settled", str(key).upper(), "__tensor__"))] = _strange(draw)
    else:
        node[key] = {"x": node[key]}
    return tree


def _mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    where, way = draw.randrange(len(data) + 1), draw.randrange(4)
    if way == 0:
        return data[:where]
    if way == 1:
        return data[:where] + draw.randbytes(draw.randrange(1, 20)) + data[where:]
    if way == 2:
        return data[:where] + data[where + draw.randrange(1, 50) :]
    changed = bytearray(data)
    changed[where - 1] ^= 1 << draw.randrange(8)
    return bytes(changed)


READERS: dict[str, Callable[[RunDirectory], object]] = {
    "config.json": lambda files: files.config,
    "card.json": lambda files: (files.card, files.load_config(make_env=corridor)),
    "metrics.jsonl": lambda files: (files.metrics(), files.last_rows(3), files.metrics("x")),
    "agent.safetensors": lambda files: files.load_weights(),
    "manifest.json": lambda files: load_checkpoint(files.checkpoint_folder),
    "state.json": lambda files: load_checkpoint(files.checkpoint_folder),
    "tensors.safetensors": lambda files: load_checkpoint(files.checkpoint_folder),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was stopped within a phase."""
    config = tiny(tmp_path_factory.mktemp("fuzz"), aux=tiny_aux(every=3))
    return train(config, make_env=corridor).directory


@pytest.mark.parametrize("name", READERS)
@pytest.mark.fault("F-14", "a file mutated at random: read, or refused in a sentence", 40, 1500)
def test_mutated_files(tmp_path: Path, original: Path, name: str, fault: Fault) -> None:
    folder = tmp_path / "run"
    shutil.copytree(original, folder)
    (file,) = folder.rglob(name)
    checkpoint = file.parent
    data, draw = file.read_bytes(), random.Random(name)
    for _ in fault:
        if name.endswith(".json") and draw.random() < 0.7:
            mutated = json.dumps(_mutated_tree(json.loads(data), draw)).encode()
        else:
            mutated = _mutated_bytes(data, draw)
        file.write_bytes(mutated)
        try:
            READERS[name](RunDirectory(folder))
        except (ValueError, OSError) as error:
            assert str(error), mutated
        for rejected in checkpoint.parent.glob("rejected-*"):
            rejected.rename(checkpoint)


@pytest.mark.fault(
    "F-14", "a configuration of random values: made, or refused in a sentence", 200, 3000
)
def test_configurations_of_random_values(fault: Fault) -> None:
    draw, tree = random.Random(1), json.loads(Config().to_json())
    for _ in fault:
        mutated = json.loads(json.dumps(tree))
        for _ in range(draw.randrange(1, 6)):
            mutated = _mutated_tree(mutated, draw)
            if not mutated:
                break
        text = json.dumps(mutated)
        try:
            made = Config.from_json(text)
        except ValueError as error:
            assert str(error), text
        else:
            assert Config.from_json(made.to_json()) == made, text
