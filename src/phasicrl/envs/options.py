"""Options of environments, `env.options`: what a task takes, and what was given. Kind: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasicrl.config import OptionValue
from phasicrl.config_io import nearest_name


def checked_options(
    name: str,
    given: Mapping[str, OptionValue],
    takes: Mapping[str, Any],
    *,
    takes_more: bool = False,
) -> dict[str, Any]:
    """The options that were given, each in the type of its default.

    Args:
        name: of the environment, for messages.
        given: by key; texts are read as the type of the default.
        takes: every option that there is, with its default; None where the type is not known.
        takes_more: whether other keys are accepted too.

    Raises:
        ValueError: an option that does not exist, or a value of a wrong type.
    """
    for key in given:
        if key not in takes and not takes_more:
            known = ", ".join(f"{option}={default}" for option, default in sorted(takes.items()))
            what = f"{name} has no option {key!r}{nearest_name(key, takes)} (env.options)"
            raise ValueError(f"{what}; with their defaults it has: {known or 'none at all'}")
    return {key: _as_default(name, key, value, takes.get(key)) for key, value in given.items()}


def _as_default(name: str, key: str, value: OptionValue, default: Any) -> Any:
    """One value in the type of its default."""
    if not isinstance(default, bool | int | float | str | None):
        what = f"{name}: env.options cannot set {key}, which is {default!r}"
        raise ValueError(f"{what}; make the environment yourself, with make_env")
    kind = type(default)
    read = value if not isinstance(value, str) or kind is str else _read(value, kind)
    if kind is float and isinstance(read, int) and not isinstance(read, bool):
        read = float(read)
    if default is not None and type(read) is not kind:
        words = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
        expected = f"{words[kind]} was expected (its default is {default!r})"
        raise ValueError(f"{name}: env.options has {key} = {value!r}; {expected}")
    return read


def _read(text: str, kind: type) -> OptionValue:
    """The value that a text spells, if it is one of `kind`; else the text itself.

    Where `kind` is not known, it may be of any type.
    """
    words = {"true": True, "false": False}
    if kind is not int and kind is not float and text.lower() in words:
        return words[text.lower()]
    for number in (int, float) if kind is not bool else ():
        try:
            return number(text)
        except ValueError:
            continue
    return text
