"""Dataclasses of knobs as JSON and back, fields by name. Kind: effects. Imports nothing of ours."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import types
import typing
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

SCHEMA = 1
"""Schema number of `config.json` and of checkpoints, in their field `schema`."""


class ConfigError(ValueError):
    """A configuration that cannot work.

    Attributes:
        problems: everything that is wrong with it, a sentence each.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """How it comes out of another process: by its problems, not by its text."""
        return type(self), (self.problems,)


def to_tree(knobs: Any) -> dict[str, Any]:
    """Return the content of a dataclass's JSON file, with the schema number."""
    return {"schema": SCHEMA} | dataclasses.asdict(knobs)


def to_json(knobs: Any) -> str:
    """Return `to_tree` as indented JSON."""
    return json.dumps(to_tree(knobs), indent=2)


def from_json(kind: type[T], text: str) -> T:
    """Read back what `to_json` wrote of the dataclass `kind`.

    Raises:
        ConfigError: unknown fields (with the nearest name) and values of wrong types, all of them.
        ValueError: not JSON, or of another schema.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not a configuration written by phasicrl: {error}") from None
    if isinstance(tree, dict):
        pop_schema(typing.cast(dict[str, Any], tree))
    return _from_tree(kind, tree, "")


def pop_schema(tree: dict[str, Any]) -> None:
    """Remove the schema number from the content of a file.

    Raises:
        ValueError: another number, or none.
    """
    if (schema := tree.pop("schema", "missing")) != SCHEMA:
        raise ValueError(
            f"schema is {schema}; expected {SCHEMA}. "
            "Use the version of phasicrl that wrote the file; card.json of its run names it"
        )


def refuse_wrong_types(knobs: Any) -> None:
    """Refuse values of a dataclass that Python let pass: other types, and words of no choice.

    Raises:
        ConfigError: the values that `from_json` would not take, all of them.
    """
    _from_tree(typing.cast(type[Any], type(knobs)), dataclasses.asdict(knobs), "")


def read_text(path: Path, largest: int = 2**24) -> str:
    """Read a file of text that somebody else may have written.

    Args:
        path: of the file.
        largest: bytes; a larger one is not read into memory.

    Raises:
        ValueError: it is larger, no plain file, or not text.
        OSError: it cannot be read.
    """
    if not path.is_file() and path.exists():
        raise ValueError(f"{path} is no file")
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path} has {size:,} bytes; at most {largest:,} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None


def read_json(path: Path, largest: int = 2**24) -> dict[str, Any]:
    """Read a JSON object from a file that somebody else may have written; see `read_text`.

    Raises:
        ValueError: also if it holds something else.
        OSError: it cannot be read.
    """
    text = read_text(path, largest)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return typing.cast(dict[str, Any], value)


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object at once: a crash leaves the old text or the new one.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Another name to write a file under; what is there at the end replaces the file at once.

    It is on the disk then. A crash leaves the old file or the new one.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    # Others may write it at the same time.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: names in files may hold escape sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def nearest_name(given: str, known: Iterable[str]) -> str:
    """Part of an error message: ` (did you mean 'bigfish'?)`, or nothing if no name is near."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), lower, n=1, cutoff=0.6)
    return f" (did you mean {lower[close[0]]!r}?)" if close else ""


def _from_tree(kind: type[T], tree: Any, path: str) -> T:
    """Build the dataclass `kind` from nested dicts."""
    if not isinstance(tree, dict):
        what = path or "the configuration"
        raise ValueError(f"{what} is {tree!r}; a group of fields was expected")
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in typing.cast(dict[str, Any], tree).items():
        try:
            if name not in hints:
                raise ValueError(f"unknown field {path}{name}{nearest_name(name, hints)}")
            values[name] = _from_value(hints[name], value, f"{path}{name}")
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return kind(**values)


def _from_value(hint: Any, value: Any, path: str) -> Any:
    """Read one JSON value as the type `hint`."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _from_value(_member(hint, value), value, path)
    if dataclasses.is_dataclass(hint):
        return _from_tree(typing.cast(type[Any], hint), value, f"{path}.")
    if origin is Literal:
        if value not in (accepted := typing.get_args(hint)):
            raise ValueError(f"{path} is {value!r}; accepted: {', '.join(map(str, accepted))}")
        return value
    if origin is Mapping and isinstance(value, dict):
        return typing.cast(dict[str, Any], value)
    if origin is tuple and isinstance(value, list | tuple):
        item = typing.get_args(hint)[0]
        entries = typing.cast("list[Any] | tuple[Any, ...]", value)
        return tuple(_from_value(item, entry, path) for entry in entries)
    if hint is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if origin is None and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    kind = _KINDS.get(origin) or hint.__name__
    raise ValueError(f"{path} is {value!r}; {kind} was expected")


_KINDS: dict[Any, str] = {Mapping: "an object of options by name", tuple: "a list"}


def _member(union: Any, value: Any) -> Any:
    """The member of a union that a value is read as: a literal that has it, else the first."""
    options = [option for option in typing.get_args(union) if option is not type(None)]
    literals = [option for option in options if typing.get_origin(option) is Literal]
    return next((option for option in literals if value in typing.get_args(option)), options[0])
