"""Configurations as JSON.

Read back as written, refused by field, and read though an earlier version wrote them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest

from phasicrl import config_io
from phasicrl.config import Config
from phasicrl.presets import PRESETS, get_preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_is_read_back_as_it_was_written(name: str) -> None:
    assert Config.from_json(get_preset(name).to_json()) == get_preset(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sed": 1}, r"unknown field sed .did you mean 'seed'"),
        (
            {"ppo": {"learning_rat": 1}},
            r"unknown field ppo.learning_rat .did you mean 'learning_rate'",
        ),
        ({"ppo": {"clip": "x"}}, "ppo.clip is 'x'; float was expected"),
        ({"ppo": {"num_steps": 2.5}}, "ppo.num_steps is 2.5; int was expected"),
        ({"ppo": {"num_steps": True}}, "ppo.num_steps is True; int was expected"),
        ({"ppo": 3}, "ppo. is 3; a group of fields was expected"),
        (
            {"model": {"value_path": "both"}},
            "model.value_path is 'both'; accepted: separate, detached, shared",
        ),
        ({"model": {"channels": 3}}, "model.channels is 3; a list was expected"),
    ],
)
def test_a_wrong_configuration_file_is_refused_by_field(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_json(json.dumps(change))


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not a configuration written by phasicrl"):
        Config.from_json("seed: 3")


@dataclass
class Compute:
    compile: Literal["auto", "on", "off"] = "off"


@dataclass
class Today:
    compute: Compute


def test_what_earlier_versions_wrote_is_read() -> None:
    """Fields that are gone are passed over.

    Words that are gone are read as what took their place.
    """
    written = json.loads(get_preset("classic-ppo").to_json())
    written["compute"] |= {"settled": [], "compile": "pools"}
    assert Config.from_json(json.dumps(written)).ppo == get_preset("classic-ppo").ppo
    old = {"compute": {"settled": ["cpu", "micro_batch"], "compile": "pools"}}
    assert config_io.from_json(Today, json.dumps(old)) == Today(Compute("auto"))
    with pytest.raises(ValueError, match=r"compute.compile is 'stones'; accepted: auto, on, off"):
        config_io.from_json(Today, json.dumps({"compute": {"compile": "stones"}}))
    with pytest.raises(ValueError, match="unknown field settled"):  # only within its group
        config_io.from_json(Today, json.dumps({"settled": []}))
