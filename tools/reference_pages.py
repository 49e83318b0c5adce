"""Write the pages of docs/reference, and the tables of results on the other pages."""

import csv
import dataclasses
import json
import os
import re
import typing
from functools import cache
from pathlib import Path

from phasicrl.config import Config, get_defaults, get_option_docs
from phasicrl.lab.experiments.suites import SUITES
from phasicrl.presets import PRESETS, differences
from phasicrl.runs.metrics import METRICS
from tools.result_tables import (
    blocks,
    describe_runs,
    format_suite,
    on_reacher,
    one_out,
    table,
    task_name,
)

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- written by tools/reference_pages.py; do not edit -->\n\n"


def pages() -> dict[str, str]:
    """Return the text of every page with generated content, by its path in docs/."""
    return {
        **pages_with_tables(),
        "reference/metrics.md": metrics_page(),
        "reference/options.md": options_page(),
        "reference/presets.md": presets_page(),
        "reference/tricks.md": tricks_page(),
        "../src/phasicrl/trained.json": trained_file(),
    }


def pages_with_tables() -> dict[str, str]:
    """Return every hand-written page that has tables of results, with its tables updated.

    Each stands between `<!-- table NAME -->` and `<!-- end -->`.
    """
    place = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.S)
    tables, found = blocks(), {}
    for path in (DOCS / "../README.md", *sorted(DOCS.rglob("*.md"))):
        text, count = place.subn(lambda at: at[1] + tables[at[2]] + at[3], path.read_text())
        if count:
            found[os.path.relpath(path, DOCS)] = text
    return found


def metrics_page() -> str:
    """Return the table of metric names."""
    head = (
        "# Metrics\n\nEach iteration writes one row to `metrics.jsonl`: `env_steps`, `iteration`, "
        "`phase`, `wall_time` and the metrics below. TensorBoard and Weights & Biases "
        "(`--log.wandb`) use the same names. Losses are means over all epochs and minibatches "
        "of the iteration, or of the auxiliary phase.\n\n"
    )
    rows = ((f"`{name}`", meaning) for name, meaning in METRICS.items())
    return NOTE + head + table([("name", "meaning"), *rows])


def options_page() -> str:
    """Return the page of options, each with its default and its sentence."""
    text = (
        "# Options\n\nThe path is the flag: `ppo.learning_rate` is `--ppo.learning-rate`. `none` "
        "switches off what can be off, and `--no-` what is on or off: `--env.no-action-masks`. In "
        "brackets is where an option or value comes from ([names](sources.md)); *ours*: phasicrl.\n"
    )
    groups = {
        name: kind
        for name, kind in typing.get_type_hints(Config).items()
        if dataclasses.is_dataclass(kind)
    }
    for group, kind in {"": Config, **groups}.items():
        text += f"\n## {group or 'the run'}\n\n{(kind.__doc__ or '').strip()}\n\n"
        rows = (
            (f"`{path}`", _show(get_defaults()[path]), _cell(sentence))
            for name, sentence in get_option_docs(kind).items()
            if (path := f"{group}.{name}".removeprefix(".")) in get_defaults()
        )
        text += table([("field", "default", "what it is"), *rows])
    return NOTE + text


def presets_page() -> str:
    """Return the page of presets, each with its source and its difference to its parent."""
    text = (
        "# Presets\n\n`phasicrl presets NAME` shows source, differences and runs. "
        "Results that name no seeds are of [report seeds](../../CONTRIBUTING.md#seeds), on "
        "which no setting was chosen. No preset for 25M steps or more was trained to its end; runs "
        "of two on Procgen [end early](../../benchmarks/results/procgen-25m/README.md).\n"
    )
    for name, preset in PRESETS.items():
        parent = Config() if preset.parent is None else PRESETS[preset.parent].config
        changes = differences(preset.config, parent)
        summary = f"{preset.summary[0].upper()}{preset.summary[1:]}"
        runs = "; ".join(f"{run} (`{place}`)" for run, place in describe_runs(name)["runs"])
        text += f"\n## {name}\n\n{summary}. Source: {_with_links(preset.source)}. "
        text += f"Trained: {runs}. " if runs else "Not trained here. "
        text += f"Like {f'`{preset.parent}`' if preset.parent else 'the defaults'}, but:\n\n"
        rows = ((f"`{field}`", _show(new), _show(old)) for field, (old, new) in changes.items())
        text += table([("field", "here", "there"), *rows])
    return NOTE + text


def trained_file() -> str:
    """Return what `phasicrl presets` reports of presets' runs, without commands of the checkout."""
    found = {name: describe_runs(name) for name in PRESETS}
    short = {name: of | {"runs": [run for run, _ in of["runs"]]} for name, of in found.items()}
    used = {name: of for name, of in short.items() if of["runs"]}
    return json.dumps(used, indent=1, ensure_ascii=False) + "\n"


TRICKS = list(csv.DictReader(Path(__file__).with_name("tricks.csv").read_text().splitlines()))
"""Every trick: source, function, option, and where it was measured.

`rung` is its name in the suite that leaves tricks out; `reacher` are the flags that change it back
on Reacher; `suites` are those that measure it, with the arm without it and the arm with it;
`elsewhere` are pages that measure it otherwise.
"""
_ONE_OUT = "../experiments.md#ppo-without-one-of-its-tricks"
_REACHER = "results.md#tricks-on-reacher"
SHOWN = ("procgen-ppg", "procgen-ppo", "cartpole-ppo", "halfcheetah-ppo", "atari-ppo")


def in_suites(row: dict[str, str]) -> list[str]:
    """Return what each suite that measures a trick has found."""
    return [format_suite(*re.split(": | → ", each)) for each in row["suites"].split("; ") if each]


def tricks_page() -> str:
    """Return the page of tricks: source, function, option, and its value in some presets."""
    apart = SUITES["tricks-one-out"].small_tasks
    text = (
        "# Tricks\n\nSource, function and option of each trick, its value in five presets, and "
        "what it is worth: the greedy return without it (and with it), means over seeds. "
        "Seeds, budgets and spans are on the pages of the links; many spans overlap.\n\n"
    )
    first, *others = map(task_name, apart)
    head = (
        "trick", "source", "here", "option", *(f"`{name}`" for name in SHOWN),
        f"[without it]({_ONE_OUT}): {first}", *others, f"[Reacher]({_REACHER})", "in other suites",
    )  # fmt: skip
    rows = (
        (
            row["trick"], _with_links(row["source"]), f"`{row['function']}`", f"`{row['option']}`",
            *(_show(PRESETS[name].config.values()[row["option"]]) for name in SHOWN),
            *(one_out(row["rung"], task) for task in apart), on_reacher(row["reacher"]),
            "; ".join(filter(None, (*in_suites(row), row["elsewhere"]))) or "–",
        )
        for row in TRICKS
    )  # fmt: skip
    return NOTE + text + table([head, *rows])


@cache
def cited_lines() -> list[tuple[str, str]]:
    """Return the lines of others' code on the page of sources, with their addresses."""
    page = (DOCS / "reference" / "sources.md").read_text()
    return re.findall(r"\[([^]]+\.py:[\d-]+)\]\((\S+)\) \|", page)


def _with_links(source: str) -> str:
    """Return a source with links at the lines of code that the page of sources has."""
    for cited, address in cited_lines():
        source = re.sub(rf"\b{re.escape(cited)}(?![\d-])", f"[{cited}]({address})", source)
    return source


def _cell(text: str) -> str:
    """Return the text of an option for a table cell, with each choice on its line."""
    return re.sub(r"\n(?=`[^`]+`: )", "<br>", text).replace("\n", " ")


def _show(value: object) -> str:
    """Format a value for a table cell."""
    return "–" if value is None or value == {} else f"`{value}`"


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
