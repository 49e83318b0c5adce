"""Check the words of code, pages and names of tests; part of `make lint`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = ("src/phasicrl", "examples", "tests", "docs", "README.md", "CONTRIBUTING.md")
"""Files and folders to check; in `tests`, names only."""
WORDS = re.compile(
    r"\b(told|tells|anew|nobody|dealt|goes on|of now|looked at|looks at|what is known|passed over|"
    r"of its own|knobs?|as one call|of then|aloud|beside it)\b",
    re.IGNORECASE,
)
FIRST = re.compile(r"\s*(Whether|What|How|The same|Told|Of|It|As)\b")
"""Beginnings of docstrings that are neither a verb nor a noun."""


def find_problems(path: Path, text: str) -> Iterator[str]:
    """Yield a message for each word that is not plain English."""
    is_test = "tests" in path.parts
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found = WORDS.search(node.name.replace("_", " "))
            if is_test and found:
                yield f"{path}:{node.lineno}: {node.name} has {found[0]!r}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found = FIRST.match(str(node.value.value))
            if found and not is_test:
                yield f"{path}:{node.lineno}: the docstring begins {found[1]!r}"
    for number, line in enumerate(text.splitlines() if not is_test else (), start=1):
        if found := WORDS.search(line):
            yield f"{path}:{number}: {found[0]!r}; use the word of the field"


def main() -> int:
    """Print the problems of all files, and return 1 if there are any."""
    files = [path for name in CHECKED for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    paths = [path.relative_to(ROOT) for path in files if path.suffix in (".py", ".md")]
    problems = [each for path in paths for each in find_problems(path, (ROOT / path).read_text())]
    print("\n".join(problems), end="\n" * bool(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
