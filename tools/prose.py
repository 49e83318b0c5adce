"""Check the words of code, pages and names of tests; part of `make lint`."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = (
    "src/phasicrl", "examples", "tests", "tools", "benchmarks", "docs", "README.md",
    "CONTRIBUTING.md",
)  # fmt: skip
"""Files and folders to check."""
IN_PART = ("tests", "tools", "benchmarks")
"""Folders with a check of names and of the first words of docstrings only."""
BANNED_WORDS = re.compile(
    r"\b(told|tells|anew|nobody|dealt|goes on|of now|looked at|looks at|what is known|passed over|"
    r"of its own|knobs?|as one call|of then|aloud|beside it)\b",
    re.IGNORECASE,
)
BAD_ERROR = re.compile(
    r"\(?(?=raise (Value|Type)Error\b|yield f?['\"]|raise .*\bexpected\b)(raise \w++\(?+|yield )"
    r"(?!f?['\"](?!(it|its|they|this|must|too) )(unknown |[a-z ]*\{[^{}]*\}: \{error\}['\"]|"
    r"(\{|returned |[^;]+ (are|belongs|has|imports|is|of|raises|returned|returns|with|without) )"
    r"[^;]*; expected ))"
)
"""Errors that do not name an option and its value before what is expected.

Exceptions: an `unknown` name, and `<place>: {error}`, which puts a place before another error.
"""
BAD_START = re.compile(r"\s*(Whether|What|How|The same|Told|Of|It|As|Which|That|If|Where|Those)\b")
"""Beginnings of docstrings that are neither a verb nor a noun."""
ARTICLE = re.compile(r"(A|An|The|All|Each|Every|Our|Their)\b")
"""Beginnings of nouns, with which the docstring of a function does not begin."""


def find_problems(path: Path, text: str) -> Iterator[str]:
    """Yield a message for each word that is not plain English."""
    in_part = path.parts[0] in IN_PART
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        match node:
            case ast.FunctionDef(
                name=name, body=[ast.Expr(ast.Constant(value=str(value))), *_]
            ) if not name.startswith("test_") and (found := ARTICLE.match(value)):
                yield f"{path}:{node.lineno}: the docstring begins {found[1]!r}; use a verb"
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if in_part:
                if found := BANNED_WORDS.search(name.replace("_", " ")):
                    yield f"{path}:{node.lineno}: {name} has {found[0]!r}"
            case ast.Expr(ast.Constant(value=str(value))):
                if found := BAD_START.match(value):
                    yield f"{path}:{node.lineno}: the docstring begins {found[1]!r}"
            case ast.Raise() | ast.Yield() if not in_part and BAD_ERROR.match(ast.unparse(node)):
                yield f"{path}:{node.lineno}: the error is not `<option> is <value>; expected …`"
    for number, line in enumerate(text.splitlines() if not in_part else (), start=1):
        if found := BANNED_WORDS.search(line):
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
