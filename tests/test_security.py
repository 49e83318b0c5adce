"""Calls that run code from data, or pass text to a shell, stay out of the code."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__",
    "torch.load", "torch.save", "np.load", "numpy.load", "np.fromfile",
    "os.system", "os.popen",
}  # fmt: skip
FORBIDDEN_IMPORTS = {
    "pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "torch.load",
}  # fmt: skip
# Functions of the user go to workers that we have just started; nothing is read from files.
ALLOWED = {("src/phasicrl/envs/processes.py", "cloudpickle")}


def forbidden(text: str) -> list[str]:
    """Return the forbidden calls and imports of a source text."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {word.arg for word in node.keywords} & {"shell", "allow_pickle"}
            found += [name] if name in FORBIDDEN_CALLS or options else []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            found += [
                name if name in FORBIDDEN_IMPORTS else name.partition(".")[0]
                for name in names
                if {name, name.partition(".")[0]} & FORBIDDEN_IMPORTS
            ]
    return found


def test_no_call_runs_code_from_data() -> None:
    found = {
        (str(path.relative_to(ROOT)), what)
        for path in (ROOT / "src").rglob("*.py")
        for what in forbidden(path.read_text(encoding="utf-8"))
    }
    assert found <= ALLOWED


def test_the_rule_finds_such_calls_and_no_others() -> None:
    for text in ("from pickle import loads", "import torch\ntorch.load(x)", "eval(x)",
                 "run(x, shell=True)", "def f():\n    from torch import load"):  # fmt: skip
        assert forbidden(text), text
    assert not forbidden("import re\nre.compile(x)\nmodel.eval()\nself.load(x)")
