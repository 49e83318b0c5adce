"""The arithmetic of the benchmark beside others.

Which runs are compared, and what is made of runs that did not get there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phasicrl.cli import parse_config
from tools.result_tables import SHORT, speed_table

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def versus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("versus", ROOT / "benchmarks" / "versus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["versus"] = module
    spec.loader.exec_module(module)
    return module


def row(name: str, number: int, rate: float, seconds: float = math.nan) -> dict[str, Any]:
    return {"contestant": name, "round": number, "rate": rate, "seconds_to_threshold": seconds}


def test_ratios_are_of_the_same_round_and_of_the_same_group(versus: ModuleType) -> None:
    ours, other = (
        versus.Contestant("phasicrl", "phasicrl", (), "a"),
        versus.Contestant("other's settings", "phasicrl", (), "b"),
    )
    theirs, absent = (
        versus.Contestant("SB3", "sb3", (), "a"),
        versus.Contestant("gone", "sb3", (), "a"),
    )
    # Round 1 of theirs failed: by position its ratios would be 10/2 and 60/3.
    runs = [
        row("phasicrl", 0, 10.0),
        row("SB3", 0, 2.0),
        row("phasicrl", 1, 60.0),
        row("SB3", 2, 3.0),
        row("phasicrl", 2, 30.0),
    ]
    summary = versus.summary(
        [*runs, row("other's settings", 0, 1.0)], [ours, other, theirs, absent]
    )
    by_name = {line["contestant"]: line for line in summary}
    assert list(by_name) == ["phasicrl", "other's settings", "SB3"]
    assert by_name["SB3"]["ratios"] == {
        "phasicrl": {"ratio": 7.5, "interval": [5.0, 10.0], "rounds": 2}
    }
    assert by_name["phasicrl"]["ratios"] == by_name["other's settings"]["ratios"] == {}
    assert (
        by_name["phasicrl"]["rate"],
        by_name["phasicrl"]["least"],
        by_name["phasicrl"]["most"],
    ) == (30, 10, 60)


def test_a_run_that_never_got_there_is_the_slowest(versus: ModuleType) -> None:
    contestant = versus.Contestant("SB3", "sb3", ())
    for seconds, expected, reached in (
        ([4.0, math.nan, 5.0], 5.0, "2 of 3"),
        ([math.nan, math.nan, 5.0], None, "1 of 3"),
    ):
        (line,) = versus.summary(
            [row("SB3", number, 1.0, value) for number, value in enumerate(seconds)], [contestant]
        )
        assert (line["seconds_to_threshold"], line["reached_threshold"]) == (expected, reached)


def test_only_whole_rounds_of_the_same_machine_and_code_are_resumed(
    versus: ModuleType, tmp_path: Path
) -> None:
    contestants = [versus.Contestant(name, "sb3", ()) for name in "ab"]
    runs = [
        row("a", 0, 1.0),
        row("b", 0, 2.0),
        row("b", 1, 3.0),
        row("a", 2, 4.0),
        row("b", 2, 5.0),
    ]
    path = tmp_path / "work.json"
    path.write_text(json.dumps({"machine": {"commit": "x"}, "runs": runs}))
    assert [one["rate"] for one in versus.whole_rounds(path, {"commit": "x"}, contestants)] == [
        1.0,
        2.0,
    ]
    with pytest.raises(ValueError, match="other code"):
        versus.whole_rounds(path, {"commit": "y"}, contestants)


def test_all_our_contestants_have_presets_and_fields_that_exist(versus: ModuleType) -> None:
    ours = [
        contestant
        for work in versus.WORKS.values()
        for contestant in work
        if contestant.trainer == "phasicrl"
    ]
    for contestant in ours:
        parse_config([word.replace("{seed}", "3") for word in contestant.words])
    assert ours


def test_a_contestant_that_does_not_exist_is_refused(
    versus: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["versus.py", "cartpole", "--only", "SB4", "--output", str(tmp_path)]
    )
    with pytest.raises(SystemExit, match="nobody in cartpole is called SB4; there are phasicrl, "):
        versus.main()


def test_a_contestant_without_its_package_folder_or_python_is_left_out(
    versus: ModuleType, tmp_path: Path
) -> None:
    options = argparse.Namespace(venvs=tmp_path, cleanrl=tmp_path, purejaxrl=None)
    (python := tmp_path / "cleanrl" / "bin" / "python").parent.mkdir(parents=True)
    python.touch()
    for trainer, needs, there in (
        ("phasicrl", None, True), ("phasicrl", "numpy", True),
        ("phasicrl", "no_such_package", False), ("cleanrl", None, True), ("sb3", None, False),
        ("purejaxrl", None, False),
    ):  # fmt: skip
        assert (
            versus.command(versus.Contestant("it", trainer, (), needs=needs), options) is not None
        ) == there


def test_every_line_of_the_readme_is_a_contestant_and_every_result_is_in_the_table(
    versus: ModuleType,
) -> None:
    for _, work, ours, theirs in SHORT:
        assert {ours, *theirs} <= {contestant.name for contestant in versus.WORKS[work]}
    for path in (ROOT / "benchmarks" / "results" / "versus").glob("*.json"):
        for line in json.loads(path.read_text())["summary"]:
            assert f"| {path.stem} | {line['contestant']} |" in speed_table()
