"""Calls that run code from data, or pass text to a shell, stay out of the code."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__",
    "torch.load", "torch.save", "np.load", "numpy.load", "np.fromfile",
    "os.system", "os.popen",
}  # fmt: skip
ALLOWED = {
    # Functions of the user go to workers that we have just started; nothing is read from files.
    ("src/phasicrl/envs/processes.py", "cloudpickle"),
}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "yaml"}


def forbidden(text: str) -> list[str]:
    """The forbidden calls and imports of a source text."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            shell = any(word.arg == "shell" for word in node.keywords)
            allow = any(word.arg == "allow_pickle" for word in node.keywords)
            called = ast.unparse(node.func)
            found += [called] if called in FORBIDDEN_CALLS or shell or allow else []
        names = [alias.name for alias in getattr(node, "names", ())] if _is_import(node) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.partition(".")[0] in FORBIDDEN_IMPORTS]
    return found


def test_no_call_runs_code_from_data() -> None:
    found = {
        (str(path.relative_to(ROOT)), what)
        for path in (ROOT / "src").rglob("*.py")
        for what in forbidden(path.read_text(encoding="utf-8"))
    }
    assert found <= ALLOWED


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_call_runs_code_from_data(source: Path) -> None:
    name = str(source.relative_to(ROOT))
    found = forbidden(source.read_text(encoding="utf-8"))
    assert [what for what in found if (name, what) not in ALLOWED] == []


@pytest.mark.parametrize(
    "text", [
        "import pickle", "from pickle import loads", "import torch\ntorch.load(x)", "eval(x)",
        "import subprocess\nsubprocess.run(x, shell=True)", "import yaml.reader", "os.system(x)",
        "np.load(x, allow_pickle=True)", "def f():\n    import dill as d",
    ],
)  # fmt: skip
def test_the_rule_sees_such_calls_alone(text: str) -> None:
    assert forbidden(text)
    assert not forbidden("import re\nre.compile(x)\nmodel.eval()\nself.load(x)")
