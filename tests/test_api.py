"""The public names: they are what they say, whatever was imported before.

Importing the package does not wait for torch.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import phasicrl


def test_no_public_name_is_a_modules_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(phasicrl.__path__)}
    assert {"algorithm", "collect", "config"} <= modules
    assert not modules & set(phasicrl.__all__)


@pytest.mark.parametrize(
    "before",
    ["", "import phasicrl.algorithm, phasicrl.training.evaluate", "import phasicrl.algorithm"],
)
def test_names_are_the_same_whatever_was_imported_before(before: str) -> None:
    code = f"""{before}
import phasicrl.algorithm as page, phasicrl.training.evaluate, inspect
from phasicrl import evaluate, resume, train
assert all(map(inspect.ismodule, (page, phasicrl.algorithm, phasicrl.training.evaluate)))
assert all(map(inspect.isfunction, (train, resume, evaluate, phasicrl.train, phasicrl.evaluate)))
assert page.train is train and "Start reading here" in page.__doc__"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(phasicrl, name) is not None for name in phasicrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; public names: "):
        phasicrl.nonsense  # noqa: B018


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys, phasicrl.cli\nphasicrl.cli.main(['--help'])\n"
        "assert not {'torch', 'envpool', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
