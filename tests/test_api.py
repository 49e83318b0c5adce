"""The public names: they are what they say, whatever was imported before.

Importing the package does not wait for torch.
"""

import dataclasses
import subprocess
import sys

import pytest

import phasicrl


@pytest.mark.long
def test_names_are_the_same_whatever_was_imported_before() -> None:
    """The package is imported again each time, but not its libraries."""
    code = """
import inspect, sys
for before in ("", "phasicrl.algorithm, phasicrl.training.evaluate", "phasicrl.algorithm"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "phasicrl"]:
        del sys.modules[name]
    exec(before and f"import {before}")
    import phasicrl.algorithm as page, phasicrl.training.evaluate
    from phasicrl import evaluate, resume, train
    modules = (page, phasicrl.algorithm, phasicrl.training.evaluate)
    functions = (train, resume, evaluate, phasicrl.train, phasicrl.evaluate)
    assert all(map(inspect.ismodule, modules)) and all(map(inspect.isfunction, functions))
    assert page.train is train and "Start reading here" in page.__doc__
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(phasicrl, name) is not None for name in phasicrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; public names: "):
        phasicrl.nonsense  # noqa: B018


def test_every_group_of_options_is_public() -> None:
    values = (getattr(phasicrl.Config(), each.name) for each in dataclasses.fields(phasicrl.Config))
    groups = {type(each).__name__: type(each) for each in values if dataclasses.is_dataclass(each)}
    assert len(groups) > 10
    public = {name: vars(phasicrl).get(name) for name in phasicrl.__all__}
    assert groups.items() <= public.items()
