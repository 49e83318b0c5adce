"""Functions that mkdocs calls: what `make site` adds to docs/ while it builds.

The pages of the repository's root, files that pages link to, and reference pages that are made from
the program. Nothing is written into docs/.
"""

from __future__ import annotations

import os
import posixpath
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
    "SECURITY.md": "SECURITY.md",
}
"""Pages of the repository's root, and their names on the site."""
MODULES = (
    "phasicrl.algorithm", "phasicrl.config", "phasicrl.presets", "phasicrl.phases",
    "phasicrl.objectives", "phasicrl.returns", "phasicrl.training.build",
    "phasicrl.training.evaluate", "phasicrl.training.acting", "phasicrl.lab.experiments.run_suite",
    "phasicrl.lab.experiments.batch_scale", "phasicrl.lab.film.video",
    "phasicrl.lab.analysis.plot", "phasicrl.lab.analysis.curves",
    "phasicrl.lab.analysis.compare", "phasicrl.lab.analysis.report", "phasicrl.lab.sweeps.sweep",
    "phasicrl.lab.sweeps.grid", "phasicrl.lab.sweeps.search", "phasicrl.lab.export.export",
    "phasicrl.lab.export.package", "phasicrl.runs.directory", "phasicrl.training.run",
)  # fmt: skip
"""Modules of the Python reference."""
_LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the files that any page links to."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    made = {"reference/commands.md": commands_page(), "reference/python.md": python_page()}
    made |= {page: rewrite_links((ROOT / name).read_text(), name) for name, page in OF_ROOT.items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    pages = [ROOT / name for name in OF_ROOT] + sorted((ROOT / "docs").rglob("*.md"))
    for path in sorted({file for page in pages for file in _linked_files(page)}):
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, site_path(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have the links of a page of docs/ lead to where the site has what they name."""
    name = f"docs/{page.file.src_uri}"
    return rewrite_links(markdown, name) if (ROOT / name).exists() else markdown


def rewrite_links(text: str, name: str) -> str:
    """Have the links of a page of the repository lead to the site's files."""
    folder = posixpath.dirname(site_path(name))

    def target(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        return match[1] + posixpath.relpath(site_path(_resolved(match[2], name)), folder or ".")

    return _LINK.sub(target, text)


def site_path(path: str) -> str:
    """Return the site's path of a file of the repository; code is shown as text."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OF_ROOT.get(path) or f"files/{path}.txt"


def _resolved(link: str, name: str) -> str:
    """Return the path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def _linked_files(page: Path) -> set[str]:
    """Return the files outside of docs/ that a page links to."""
    name = str(page.relative_to(ROOT))
    links = (target for _, target in _LINK.findall(page.read_text()) if "://" not in target)
    found = {_resolved(link, name) for link in links}
    return {path for path in found if site_path(path).startswith("files/")}


def commands_page() -> str:
    """Return the help of every command."""
    head = "# Commands\n\nThe options of `train` are [on a page](options.md).\n"
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


def python_page() -> str:
    """Return the page of the Python reference."""
    return "# Python\n" + "".join(f"\n::: {name}\n" for name in MODULES)
