"""Configurations as JSON: read back as written, refused by field and by schema."""

import json

import pytest

from phasicrl.config import Config
from phasicrl.config_io import SCHEMA
from phasicrl.presets import PRESETS, get_preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_is_read_back_as_it_was_written(name: str) -> None:
    assert Config.from_json(get_preset(name).to_json()) == get_preset(name)


@pytest.mark.parametrize(("change", "match"), [
    ({"ppo": {"learning_rat": 1}}, "unknown field ppo.learning_rat .did you mean"),
    ({"ppo": {"clip": "x"}}, "ppo.clip is 'x'; expected float"),
    ({"ppo": {"num_steps": 2.5}}, "ppo.num_steps is 2.5; expected int"),
    ({"ppo": 3}, "ppo is 3"),
])  # fmt: skip
def test_wrong_files_are_refused_by_field(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Config.from_json(json.dumps({"schema": SCHEMA} | change))


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="expected JSON"):
        Config.from_json("seed: 3")


@pytest.mark.parametrize("found", [{"schema": SCHEMA + 1}, {"schema": None}, {}])
def test_another_schema_is_refused(found: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"schema is .*expected {SCHEMA}. Use the version"):
        Config.from_json(json.dumps(found))
