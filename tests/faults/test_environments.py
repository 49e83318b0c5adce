"""Environments that go wrong end a run in a sentence that names them, and lose nothing."""

import multiprocessing
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from phasicrl.algorithm import resume, train
from phasicrl.config import CheckpointConfig
from phasicrl.envs.protocol import EnvError
from phasicrl.runs.directory import RunDirectory
from tests.envs.counting import ANSWERS, Misbehaving
from tests.faults.conftest import Fault
from tests.helpers import Corridor, tiny

RAISES = ("raises", "exits", "dies")
MOMENTS = (1, 2, 8, 9, 21)
"""Steps of an environment; an iteration of `tiny` has eight."""


def _cases(mode: str) -> list[tuple[str, int | str]]:
    """Return faults of environments, and when they happen."""
    steps = [*product((*RAISES[:2], *ANSWERS), MOMENTS)]
    seen = [what for what in ANSWERS if what in ("shape", "dtype", "ragged", "keys", "None")]
    resets = product((*RAISES[:2], *seen), ("first reset", "later reset"))
    # Not at its first reset: the one that is made to learn the spaces lives in the trainer.
    deaths = product(RAISES[2:], (*MOMENTS, "later reset"))
    return [*steps, *resets, *(deaths if mode == "async" else ())]


def _try(folder: Path, what: str, at: int | str, mode: str) -> None:
    """Train until it goes wrong; nothing of what was finished may be lost."""
    rows: list[int] = []
    config = tiny(folder, total_env_steps=4 * 32, checkpoint=CheckpointConfig(every_minutes=None))
    call = "reset" if isinstance(at, str) else "step"
    how: Any = {"callbacks": lambda run, _: rows.append(run.env_steps)}
    config = config.with_updates({"env.vectorization": mode})
    with pytest.raises(EnvError) as error:
        train(config, make_env=lambda: Misbehaving(what, at), **how)
    said = str(error.value)
    named = rf"environment \d.*{call}\(\)|{call}\(\) of a first environment"
    assert re.search(named, said), (what, at, said)
    assert error.value.exit_code == 4
    assert not multiprocessing.active_children(), (what, at)
    found = list(folder.glob("tiny_*"))
    if at == "first reset":
        assert not found, (what, at)
        return
    if isinstance(at, int):
        assert len(rows) == (at - 1) // 8, (what, at)
    (path,) = found
    metrics = RunDirectory(path).metrics() if (path / "metrics.jsonl").stat().st_size else []
    assert [row["env_steps"] for row in metrics] == rows
    assert resume(path, make_env=Corridor).env_steps == 4 * 32, (what, at)


@pytest.mark.filterwarnings("ignore:.*do not follow their seeds")  # nor does a fault
@pytest.mark.parametrize(("mode", "few", "most"), [("sync", 10, 999), ("async", 2, 40)])
@pytest.mark.fault("F-09", "an environment goes wrong: it is named, nothing is lost", 10, 999)
def test_environments_that_go_wrong(
    tmp_path: Path, mode: str, few: int, most: int, fault: Fault, is_full: bool
) -> None:
    every = _cases(mode)
    cases = random.Random(2).sample(every, min(most if is_full else few, len(every)))
    fault.wanted = len(cases)
    for number in fault:
        _try(tmp_path / str(number), *cases[number], mode)
