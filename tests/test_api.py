"""The public names: they are what they say, whatever was imported before; importing the package does not wait for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import phasicrl


@pytest.mark.parametrize(
    "before", ["", "import phasicrl.train, phasicrl.evaluate", "from phasicrl.train import learn", "from phasicrl import evaluate"]
)  # fmt: skip
def test_functions_are_not_hidden_by_the_modules_of_their_names(before: str) -> None:
    code = f"{before}\nfrom phasicrl import evaluate, resume, train\nassert callable(train) and callable(evaluate) and callable(resume)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(phasicrl, name) is not None for name in phasicrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; public names: "):
        phasicrl.nonsense  # noqa: B018


def test_help_does_not_import_torch() -> None:
    code = "import sys, phasicrl.cli\nphasicrl.cli.main(['--help'])\nassert not {'torch', 'envpool', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
