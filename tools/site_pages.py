"""Functions that mkdocs calls: what `make site` adds to docs/ while it builds.

The pages of the repository's root, files that pages link to, and reference pages that are made from
the program. Nothing is written into docs/.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mkdocs is in an environment of its own
    from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.files import Files  # pyright: ignore[reportMissingImports]
    from mkdocs.structure.pages import Page  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
OF_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
"""Pages of the repository's root, and their names on the site."""
MODULES = (
    "phasicrl.algorithm", "phasicrl.config", "phasicrl.presets", "phasicrl.phases",
    "phasicrl.objectives", "phasicrl.returns", "phasicrl.training.evaluate",
    "phasicrl.lab.experiments.run_suite", "phasicrl.lab.film.video",
    "phasicrl.lab.analysis.plot", "phasicrl.lab.analysis.curves",
    "phasicrl.lab.analysis.compare", "phasicrl.lab.analysis.report", "phasicrl.lab.sweeps.sweep",
    "phasicrl.lab.sweeps.search", "phasicrl.lab.export.export",
    "phasicrl.lab.export.package", "phasicrl.runs.directory",
)  # fmt: skip
"""Modules of the Python reference."""
_LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the files that any page links to."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    made = {"cli.md": cli_page(), "api.md": api_page()}
    for name, page in OF_ROOT.items():
        made[page] = from_root((ROOT / name).read_text())
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    pages = [*made.values(), *(moved(path.read_text()) for path in (ROOT / "docs").glob("*.md"))]
    wanted = {target for text in pages for target in _linked(text) if target.startswith("files/")}
    for target in sorted(wanted):
        source = ROOT / target.removeprefix("files/").removesuffix(".txt")
        files.append(File.generated(config, target, content=source.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have the links of a page of docs/ lead to where the site has what they name."""
    return moved(markdown)


def moved(text: str) -> str:
    """Change the links of a page of docs/ that lead out of that folder."""
    return _LINK.sub(lambda match: match[1] + _target(match[2].removeprefix("../"))
                     if match[2].startswith("../") else match[0], text)  # fmt: skip


def from_root(text: str) -> str:
    """Change the links of a page of the root."""
    return _LINK.sub(
        lambda match: match[0] if "://" in match[2] else match[1] + _target(match[2]), text
    )


def _target(path: str) -> str:
    """Return the site's path of a file of the repository; code is shown as text."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OF_ROOT.get(path) or f"files/{path}.txt"


def _linked(text: str) -> list[str]:
    return [target for _, target in _LINK.findall(text)]


def cli_page() -> str:
    """Return the help of every command."""
    head = (
        "# Command line\n\nThe output of `--help`; options of `train`: [here](configuration.md).\n"
    )
    return head + "".join(
        f"\n## {' '.join(command)}\n\n```text\n{text}\n```\n"
        for command, text in _helps("phasicrl")
    )


def _helps(*command: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the help of a command, then of those below it."""
    done = subprocess.run(
        [str(ROOT / ".venv" / "bin" / command[0]), *command[1:], "--help"],
        check=True, capture_output=True, text=True,
        env=os.environ | {"COLUMNS": "96", "NO_COLOR": "1"},
    )  # fmt: skip
    yield command, done.stdout.strip()
    _, found, below = done.stdout.partition("\ncommands:\n")
    for line in below.split("\n\n")[0].splitlines() if found else ():
        yield from _helps(*command, line.split()[0])


def api_page() -> str:
    """Return the page of the Python reference."""
    return "# Python\n" + "".join(f"\n::: {name}\n" for name in MODULES)
