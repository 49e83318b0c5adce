"""The tree keeps its own rules: size, docstrings, imports; and the set-up fits its disk."""

import ast
import functools
import io
import itertools
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import install

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "phasicrl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 50
READING_PATH = ("algorithm", "phases", "learner", "objectives", "returns", "collect", "rollout")
# The table of limits; code is counted in lines without docstrings, comments and blanks. The design
# allows 8,700, 3,600, 1,150, 500, 400, 20,000, 5,000, 25,000 and 120: lower these with each cut.
LIMITS = {
    "core": 8_696, "lab": 3_594, "reading path": 1_106, "file of options": 480,
    "largest other file": 379, "tests": 19_956, "benchmarks + tools": 4_727,
    "words of docs": 24_994, "lines of README": 120,
}  # fmt: skip

OPTIONAL_PACKAGES = {
    "envpool", "imageio_ffmpeg", "matplotlib", "optuna", "ray", "tensorboard",
    "torch.utils.tensorboard", "wandb",
}  # fmt: skip


def imports_of(node: ast.AST) -> Iterator[str]:
    """Yield the modules that one statement imports, by their full names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold code.

    Neither blank, nor only a comment, nor part of a docstring (every field and function has one).
    """
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENDMARKER)  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def is_in(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imported_at_start(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that importing a module imports.

    Imports in functions and those for the type checker only do not count.
    """
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from imports_of(node)
        pending.extend(ast.iter_child_nodes(node))


def test_every_file_has_its_docstring_short_functions_and_few_imports():
    bad = []
    for path in SOURCES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        tree, lines = ast.parse(text), code_lines(text)
        if not ast.get_docstring(tree) or tree.body[0].lineno != 1:
            bad.append(f"{name} does not start with a docstring")
        if path.stem in ("base", "common", "helpers", "utils"):
            bad.append(f"{name} has a name that says nothing")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                if length > MAX_FUNCTION_LINES:
                    bad.append(f"{name}: {node.name} has {length} lines")
        optional = [each for each in imported_at_start(tree) if is_in(each, OPTIONAL_PACKAGES)]
        bad += [f"{name} imports {module} at its start" for module in optional]
    assert not bad


def test_every_part_stays_within_its_limit():
    def count(*paths: Path) -> int:
        return sum(len(code_lines(path.read_text())) for path in paths)

    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    written = [page.read_text() for page in pages if "reference" not in page.parts]
    lab = count(*(PACKAGE / "lab").rglob("*.py"))
    found = {
        "core": count(*SOURCES) - lab,
        "lab": lab,
        "reading path": count(*(PACKAGE / f"{name}.py" for name in READING_PATH)),
        "file of options": count(PACKAGE / "config.py"),
        "largest other file": max(count(path) for path in SOURCES if path.name != "config.py"),
        "tests": count(*(ROOT / "tests").rglob("*.py")),
        "benchmarks + tools": count(*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tools/**/*.py")),
        "words of docs": sum(len(text.split()) for text in written),
        "lines of README": len(written[0].splitlines()),
    }
    assert not {part: found[part] for part in LIMITS if found[part] > LIMITS[part]}


def test_mathematics_needs_torch_only():
    """Both modules take numbers and tensors, no configuration, and can be copied alone."""
    allowed = {"__future__", "collections", "dataclasses", "jaxtyping", "math", "torch", "typing"}
    for name in ("returns", "objectives"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        modules = (module for node in ast.walk(tree) for module in imports_of(node))
        assert {module.partition(".")[0] for module in modules} <= allowed


def report(*requirements: str) -> dict[str, Any]:
    """Return a report of pip's form, with the keys that are read."""
    pairs = (requirement.split("==") for requirement in requirements)
    return {"install": [{"metadata": {"name": name, "version": x}} for name, x in pairs]}


CUDA = ("nvidia-cublas==13.1.1.3", "nvidia_nvtx==13.0.85", "triton==3.7.1",
        "cuda-toolkit==13.0.3.0", "cuda_bindings==13.5.0")  # fmt: skip
"""Packages of the default build on Linux, as pip lists them."""


def test_install_reports_a_large_build_that_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    others = ("filelock==4.2.11", "tritonclient==2.0", "cudatext==1.0", "networkx==3.7")
    for gpu, package in itertools.product((False, True), (*CUDA, None)):
        found = report("torch==2.13.0+cpu", *others, *filter(None, [package]))
        monkeypatch.setattr(install, "has_nvidia_gpu", lambda gpu=gpu: gpu)
        monkeypatch.setattr(install, "get_pip_report", lambda _, found=found: found)
        size = install.WITH_CUDA if package else install.WITHOUT_CUDA
        assert install.expected_size("torch==2.13.0") == size
        assert ("TORCH_INDEX" in capsys.readouterr().out) == (package is not None and not gpu)
    monkeypatch.setattr(install, "get_pip_report", lambda _: pytest.fail("pip was called"))
    monkeypatch.setenv("TORCH_INDEX", "file:///wheels")
    assert install.expected_size("torch==2.13.0") == install.WITHOUT_CUDA


def test_install_downloads_where_it_fits(monkeypatch: pytest.MonkeyPatch):
    """Downloads lie in the temporary folder until they are installed: one disk must hold both."""
    size, free = install.WITH_CUDA, {1: 0.0, 2: 0.0}
    folders: Any = (
        SimpleNamespace(stat=lambda disk=disk: SimpleNamespace(st_dev=disk), disk=disk)
        for disk in (1, 1, 2)
    )
    large, same, small = folders
    monkeypatch.setattr(
        install.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder.disk] * 1e9)
    )
    both = size.load + size.disk
    for temporary, room, other_room, place in (
        (same, both + 0.001, 0, same), (same, both - 0.2, 0, None),
        (small, both + 0.001, size.load + 0.001, small), (small, both + 0.001, 0, large),
        (small, size.disk + 0.001, size.load + 0.001, small),
    ):  # fmt: skip
        free |= {1: room, 2: other_room}
        found = install.choose_download_folder(size, environment=large, temporary=temporary)
        assert found is place


def test_every_requirement_is_pinned():
    """A fresh `.venv` has the versions that were tested, also of packages of an extra.

    W&B is not installed, and mjlab and pgx have their own environments.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(x for name in extras if name not in ("wandb", "mjlab", "pgx") for x in extras[name]),
    ]
    names = {re.split(r"[\[>;]", each)[0].strip().lower() for each in needed}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if not line.startswith("#")}
    assert names - pinned <= {"phasicrl"}
