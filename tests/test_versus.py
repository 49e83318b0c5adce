"""The benchmark beside other trainers: its arithmetic, and contestants that exist."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import versus
from phasicrl.cli import parse_config


def row(name: str, number: int, rate: float) -> dict[str, Any]:
    return {"contestant": name, "round": number, "rate": rate, "seconds_to_threshold": math.nan}


def test_ratios_are_of_the_same_round_and_of_the_same_group() -> None:
    trainers = {"phasicrl": ("phasicrl", "a"), "other settings": ("phasicrl", "b"),
                "SB3": ("sb3", "a"), "gone": ("sb3", "a")}  # fmt: skip
    contestants = [versus.Contestant(x, t, "", g) for x, (t, g) in trainers.items()]
    # Round 1 of theirs failed: by position its ratios would be 10/2 and 60/3.
    runs = [row("phasicrl", number, rate) for number, rate in enumerate((10.0, 60.0, 30.0))]
    runs += [row("SB3", 0, 2.0), row("SB3", 2, 3.0), row("other settings", 0, 1.0)]
    found = {line["contestant"]: line for line in versus.summarize(runs, contestants)}
    assert list(found) == ["phasicrl", "other settings", "SB3"]
    ratio = {"ratio": 7.5, "interval": [5.0, 10.0], "rounds": 2}
    assert [line["ratios"] for line in found.values()] == [{}, {}, {"phasicrl": ratio}]
    assert [found["phasicrl"][key] for key in ("rate", "least", "most")] == [30, 10, 60]


@pytest.mark.long
def test_contestants_have_fields_that_exist_and_need_their_python_and_folder(
    tmp_path: Path,
) -> None:
    (python := tmp_path / "cleanrl" / "bin" / "python").parent.mkdir(parents=True)
    python.touch()
    folders = {"cleanrl": tmp_path, "purejaxrl": None}
    for contestant in (contestant for work in versus.WORKS.values() for contestant in work):
        words = versus.command(contestant, tmp_path, folders)
        assert (words is not None) == (contestant.trainer in ("phasicrl", "cleanrl"))
        if contestant.trainer == "phasicrl":
            fields = contestant.words.replace("{seed}", "3").split()
            parse_config(fields[2:] if fields[0] == "--tensors" else fields)
