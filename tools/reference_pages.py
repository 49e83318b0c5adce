"""Writes the pages of docs/ that are generated from the code: metrics, configuration, presets. `--check` only compares."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import typing
from itertools import pairwise
from pathlib import Path

from phasicrl import config as config_module
from phasicrl.config import Config
from phasicrl.metrics import METRICS
from phasicrl.presets import PRESETS, differences

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- written by tools/reference_pages.py; do not edit -->\n\n"


def pages() -> dict[str, str]:
    """Name and text of every generated page."""
    return {"metrics.md": metrics_page(), "configuration.md": configuration_page(), "presets.md": presets_page()}


def metrics_page() -> str:
    """The table of metric names."""
    head = (
        "# Metrics\n\nEvery iteration writes one object to `metrics.jsonl` with `env_steps`, `iteration`, `phase`, `wall_time` and the metrics below; "
        "the same names are in TensorBoard (x axis: environment steps) and, with `--log.wandb`, in Weights & Biases. Losses are means over *all* data "
        "of the iteration, or of the auxiliary phase, weighted by samples: over every epoch and minibatch, never the last one.\n\n"
        "| name | meaning |\n|---|---|\n"
    )
    return NOTE + head + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in METRICS.items())


def configuration_page() -> str:
    """Every field with its default and its sentence."""
    text = (
        "# Configuration\n\nEvery knob, as `config.py` has it. On the command line the path is the flag: `ppo.learning_rate` is `--ppo.learning-rate`. "
        "`none` switches off what can be off; `--aux none` makes PPG PPO, and naming any `--aux.…` field makes PPO PPG.\n"
    )
    hints = typing.get_type_hints(Config)
    groups = {field.name: _dataclass_of(hints[field.name]) for field in dataclasses.fields(Config)}
    text += _table("", Config, skip={name for name, kind in groups.items() if kind})
    for name, kind in groups.items():
        if kind is not None:
            text += _table(name, kind, skip=set())
    return NOTE + text


def presets_page() -> str:
    """Every preset with its source and its difference to its parent."""
    text = "# Presets\n\n`phasicrl presets` shows the same.\n"
    for name, preset in PRESETS.items():
        parent = Config() if preset.parent is None else PRESETS[preset.parent].config
        changes = differences(preset.config, parent)
        text += f"\n## {name}\n\n{preset.summary[0].upper()}{preset.summary[1:]}. Source: {preset.source}. "
        text += f"Like {f'`{preset.parent}`' if preset.parent else 'the defaults'}, but:\n\n| field | here | there |\n|---|---|---|\n"
        text += "".join(f"| `{field}` | {_show(new)} | {_show(old)} |\n" for field, (old, new) in changes.items())
    return NOTE + text


def _table(name: str, kind: type, *, skip: set[str]) -> str:
    """One group of fields."""
    sentences = _sentences(kind)
    text = f"\n## {name or 'the run'}\n\n{(kind.__doc__ or '').strip()}\n\n| field | default | what it is |\n|---|---|---|\n"
    for field in dataclasses.fields(kind):
        if field.name not in skip:
            path = f"{name}.{field.name}" if name else field.name
            text += f"| `{path}` | {_show(field.default)} | {sentences[field.name]} |\n"
    return text


def _sentences(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    tree = ast.parse(inspect.getsource(config_module))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__).body
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _dataclass_of(hint: object) -> type | None:
    """The dataclass in a field's type, if there is one."""
    options = typing.get_args(hint) or (hint,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _show(value: object) -> str:
    """A value in a table cell."""
    return "–" if value is None else f"`{value}`"


def main() -> int:
    """Write the pages, or say which of them are not what the code would write."""
    stale = [name for name, text in pages().items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != text]
    if "--check" in sys.argv:
        print("\n".join(f"docs/{name} is out of date: run tools/reference_pages.py" for name in stale) or "docs are up to date")
        return bool(stale)
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
