"""The tree keeps its own rules: size, first lines, names, forbidden calls.

And the set-up never brings CUDA by accident.
"""

import ast
import importlib.util
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "phasicrl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 50
READING_PATH = ("algorithm", "phases", "learner", "objectives", "returns", "collect", "rollout")
# Lines of code by part. The design asks for 7,700, 3,400, 1,150, 400 and 18,000: lower these
# with each cut.
LIMITS = {
    "core": 9_816,
    "lab": 3_535,
    "reading path": 1_150,
    "largest file": 723,
    "tests": 23_568,
}

FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve"}
OPTIONAL_PACKAGES = {
    "envpool",
    "imageio_ffmpeg",
    "matplotlib",
    "optuna",
    "ray",
    "tensorboard",
    "torch.utils.tensorboard",
    "wandb",
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(node: ast.AST) -> Iterator[str]:
    """The modules that one statement imports, by their full names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code.

    Neither blank, nor only a comment, nor part of a docstring (every field and function has one).
    """
    silent = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in silent
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def test_lines_of_code_are_counted_without_words():
    assert code_lines(
        '"""Words,\nmore words."""\n\nx = 1  # one\n# a comment\ny = """a\nb"""\n'
    ) == {4, 6, 7}


def is_in(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def offences(tree: ast.AST) -> Iterator[str]:
    """What may not stand in the package: loading code as data, running text, a shell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: {name}()"
            for keyword in node.keywords:
                if (
                    keyword.arg in ("shell", "allow_pickle")
                    and ast.unparse(keyword.value) != "False"
                ):
                    yield f"line {node.lineno}: {keyword.arg}=True"
        for module in imports_of(node):
            if is_in(module, FORBIDDEN_IMPORTS | FORBIDDEN_CALLS):
                yield f"line {getattr(node, 'lineno', 0)}: import {module}"


def imported_at_start(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports.

    Everything outside functions, but not what is there for the type checker only.
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


@pytest.mark.parametrize("path", SOURCES, ids=named)
class TestEveryFile:
    def test_first_line_says_what_it_is(self, path: Path):
        body = ast.parse(path.read_text()).body
        assert body and ast.get_docstring(ast.Module(body, [])), f"{named(path)} has no docstring"
        assert body[0].lineno == 1, (
            f"{named(path)}: the docstring stands in line {body[0].lineno}, not 1"
        )

    def test_functions_fit_a_page(self, path: Path):
        text = path.read_text()
        lines = code_lines(text)
        lengths = {
            f"{node.name}, line {node.lineno}": len(
                lines & set(range(node.lineno, (node.end_lineno or 0) + 1))
            )
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}

    def test_holds_nothing_forbidden(self, path: Path):
        assert not list(offences(ast.parse(path.read_text())))

    def test_imports_optional_packages_where_they_are_needed(self, path: Path):
        assert not [
            module
            for module in imported_at_start(ast.parse(path.read_text()))
            if is_in(module, OPTIONAL_PACKAGES)
        ]


def test_every_part_stays_within_its_limit():
    lines = {path: len(code_lines(path.read_text())) for path in SOURCES}
    in_lab = {path for path in SOURCES if "lab" in path.relative_to(PACKAGE).parts}
    tests = (ROOT / "tests").rglob("*.py")
    found = {
        "core": sum(lines[path] for path in lines if path not in in_lab),
        "lab": sum(lines[path] for path in in_lab),
        "reading path": sum(lines[PACKAGE / f"{name}.py"] for name in READING_PATH),
        "largest file": max(lines.values()),
        "tests": sum(len(code_lines(path.read_text())) for path in tests),
    }
    assert not {part: found[part] for part in LIMITS if found[part] > LIMITS[part]}


def test_every_module_has_a_name_of_its_own():
    assert not [
        named(path) for path in SOURCES if path.stem in ("base", "common", "helpers", "utils")
    ]


@pytest.mark.parametrize("name", ["returns", "objectives"])
def test_mathematics_needs_torch_only(name: str):
    """They take numbers and tensors, never a configuration, and can be read and copied alone."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    roots = {module.partition(".")[0] for node in ast.walk(tree) for module in imports_of(node)}
    assert roots <= {
        "__future__",
        "collections",
        "dataclasses",
        "jaxtyping",
        "math",
        "torch",
        "typing",
    }


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import torch\n    return torch.load('x')",
        "from torch import load",
        "eval('1')",
        "subprocess.run('ls', shell=True)",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_offences_are_found(code: str):
    assert list(offences(ast.parse(code)))


HARMLESS = [
    "model.eval()",
    "re.compile('x')",
    "subprocess.run(['ls'], shell=False)",
    "from torch import nn",
    "json.load(f)",
]


@pytest.mark.parametrize("code", HARMLESS)
def test_harmless_calls_pass(code: str):
    assert not list(offences(ast.parse(code)))


@pytest.fixture
def install() -> Any:
    """`tools/install.py`, which is a script and in no package.

    Nothing is installed here: it decides from pip's report.
    """
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*requirements: str) -> dict[str, Any]:
    """A report of pip's form, with the keys that are read."""
    pairs = [requirement.split("==") for requirement in requirements]
    return {
        "version": "1",
        "install": [{"metadata": {"name": name, "version": version}} for name, version in pairs],
    }


CUDA = [
    "nvidia-cublas==13.1.1.3",
    "nvidia_nvtx==13.0.85",
    "triton==3.7.1",
    "cuda-toolkit==13.0.3.0",
    "cuda_bindings==13.5.0",
]


@pytest.mark.parametrize("package", CUDA)
def test_install_knows_each_cuda_package(install: Any, package: str):
    """Names and versions as pip listed them for the default build on Linux."""
    assert install.brings_cuda(report("torch==2.13.0", package, "filelock==4.2.11"))


def test_install_passes_names_that_only_look_like_cuda(install: Any):
    assert not install.brings_cuda(
        report("torch==2.13.0+cpu", "tritonclient==2.0", "cudatext==1.0", "networkx==3.7")
    )


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("brought", [[], CUDA])
def test_install_takes_either_build_and_tells_of_a_large_one_that_is_not_needed(
    install: Any,
    brought: list[str],
    gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(install, "what_would_come", lambda torch: report(torch, *brought))
    assert install.expected_size("torch==2.13.0") == (
        install.WITH_CUDA if brought else install.WITHOUT_CUDA
    )
    said, told = capsys.readouterr().out, bool(brought) and not gpu
    assert said.count("\n") == told, "one line where there is something to say"
    assert ("TORCH_INDEX" in said and f"{install.WITH_CUDA.load} GB" in said) == told


def test_install_does_not_ask_pip_where_the_index_is_given(
    install: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(install, "what_would_come", lambda torch: pytest.fail("pip was asked"))
    monkeypatch.setenv("TORCH_INDEX", "file:///wheels")
    assert install.expected_size("torch==2.13.0") == install.WITHOUT_CUDA


def test_install_refuses_only_what_does_not_fit(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is loaded lies in the temporary folder until it is installed.

    On one disk both must fit together.
    """
    size, free = install.WITH_CUDA, 0.0
    monkeypatch.setattr(
        install.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * 1e9)
    )
    free = size.load + size.disk + 0.001
    assert install.place_for_loading(size, environment=tmp_path, temporary=tmp_path) == tmp_path
    free = size.load + size.disk - 0.2
    assert install.place_for_loading(size, environment=tmp_path, temporary=tmp_path) is None
    message = install.no_room(size, tmp_path)
    assert (
        f"takes {size.disk} GB in {tmp_path} and {size.load} GB more" in message
        and f"{free:.1f} GB are free" in message
    )
    assert "TORCH_INDEX" in message
    assert "TORCH_INDEX" not in install.no_room(install.WITHOUT_CUDA, tmp_path)


def test_install_loads_to_the_environments_disk_where_the_temporary_one_is_small(
    install: Any, monkeypatch: pytest.MonkeyPatch
):
    size = install.WITHOUT_CUDA
    free = {1: 100.0, 2: 0.0}
    large, small = (
        SimpleNamespace(stat=lambda disk=disk: SimpleNamespace(st_dev=disk), disk=disk)
        for disk in (1, 2)
    )
    monkeypatch.setattr(
        install.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder.disk] * 1e9)
    )
    for room, place in ((size.load + 0.001, small), (size.load - 0.001, large)):
        free[2] = room
        assert install.place_for_loading(size, environment=large, temporary=small) is place
    free |= {1: size.disk + 0.001, 2: size.load + 0.001}
    assert install.place_for_loading(size, environment=large, temporary=small) is small, (
        "each disk has its part"
    )


def test_install_finds_the_pinned_versions(install: Any):
    constraints = (ROOT / "constraints.txt").read_text()
    assert install.pinned("torch", constraints).startswith("torch==")
    assert install.pinned("pip", constraints).startswith("pip==")


def test_every_requirement_is_pinned():
    """What a fresh `.venv` gets is what was tested, also for packages that are named only in an
    extra (W&B is not installed).
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: extra for name, extra in project["optional-dependencies"].items() if name != "track"
    }
    requirements = [
        requirement
        for group in [project["dependencies"], *extras.values()]
        for requirement in group
    ]
    names = {
        re.split(r"[\[>;]", requirement)[0].strip().lower()
        for requirement in requirements
        if not requirement.startswith("phasicrl[")
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if not line.startswith("#")}
    assert names <= pinned, f"not in constraints.txt: {sorted(names - pinned)}"
