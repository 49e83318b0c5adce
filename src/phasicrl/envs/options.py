"""Conversion of `env.options` to the types of their defaults. Kind: pure."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from phasicrl.config import OptionValue
from phasicrl.config_io import convert, suggest_name


def convert_options(
    env_name: str, given: Mapping[str, OptionValue], defaults: Mapping[str, Any],
    accepts_any: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Convert an environment's given options to the types of their defaults.

    Args:
        env_name: name of the environment, for messages.
        given: options by name; strings are parsed.
        defaults: defaults of all options; None for an unknown type.
        accepts_any: whether options without a default are accepted.

    Raises:
        ValueError: an option does not exist, or its value has a wrong type.
    """
    for key in given:
        if key not in defaults and not accepts_any:
            options = ", ".join(f"{option}={value}" for option, value in sorted(defaults.items()))
            text = f"env.options has {key}, which does not exist{suggest_name(key, defaults)}"
            raise ValueError(f"{env_name}: {text}; expected some of {options}")
    return {key: _convert_option(env_name, key, x, defaults.get(key)) for key, x in given.items()}


def _convert_option(env_name: str, key: str, value: OptionValue, default: Any) -> Any:
    """Convert the value of an environment's option to the type of its default."""
    kind = type(default)
    read = _parse_scalar(value) if isinstance(value, str) and kind is not str else value
    return read if default is None else convert(kind, read, f"{env_name}: env.options.{key}")


def _parse_scalar(text: str) -> OptionValue:
    """Parse a boolean or a number; return any other text unchanged."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
