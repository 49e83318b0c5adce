"""Checks of `phasicrl doctor`, and remedies."""

import contextlib
import importlib.metadata
import importlib.util
import io
import re
from collections import defaultdict

import pytest

from phasicrl.cli import print_table
from phasicrl.lab import doctor
from phasicrl.lab.doctor import Check, check_machine, make_check_rows


def text_of(checks: list[Check]) -> str:
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setenv("COLUMNS", "160")
        print_table("", ("", "", "", ""), make_check_rows(checks))
    return text.getvalue()


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed")
def test_this_machine_is_well() -> None:
    checks = {check.name: check for check in check_machine()}
    assert {"Python", "PyTorch", "GPU", "CPU", *doctor.PROBES, "memory", "disk"} == set(checks)
    for name, (_, extra, _) in doctor.PROBES.items():
        assert checks[name].status == "ok" or extra in ("wandb", "ray"), checks[name]
    assert all(check.remedy for check in checks.values() if check.status != "ok")
    assert "procgen:starpilot: " in (text := text_of([*checks.values()])) and "64 × 64" in text


@pytest.mark.parametrize(("code", "found", "remedy"), [
    ("import os; os.abort()", "SIGABRT", "--force-reinstall numpy"),
    ("raise ImportError('it needs Qt; pip install Qt')", "it needs Qt", "pip install Qt"),
    ("import time; time.sleep(60)", "no answer within 1 s", "idle"),
])  # fmt: skip
def test_a_broken_package_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, code: str, found: str, remedy: str
) -> None:
    monkeypatch.setattr(doctor, "PROBES", {"a probe": ("numpy", "all", code)})
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 1.0 if "sleep" in code else 60.0)
    check = doctor._run_probe("a probe")
    assert check.status == "broken" and found in check.found and remedy in check.remedy
    assert "broken" in text_of([check])


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = {each: (f"numpy missing-{each} torch", extra, "")
              for each, extra in (("a", "lab"), ("b", None))}  # fmt: skip
    monkeypatch.setattr(doctor, "PROBES", probes)
    for name, (_, extra, _) in probes.items():
        check = doctor._run_probe(name)
        remedy = f"pip install 'phasicrl[{extra}]'" if extra else f"pip install missing-{name}"
        assert (check.status, check.remedy) == ("missing", remedy)
        assert check.found == f"missing-{name} is not installed"


def test_every_optional_package_of_users_is_checked() -> None:
    """Export, hub and tracking among them; each is in an extra that installs it."""
    extras: dict[str, set[str]] = defaultdict(set)
    for line in importlib.metadata.requires("phasicrl") or []:
        if found := re.match(r"([\w-]+).*extra == .(\w+)", line):
            extras[found[2]].add(found[1].replace("-", "_"))
    probes = doctor.PROBES.values()
    checked = {x.replace("-", "_"): extra for many, extra, _ in probes for x in many.split()}
    for extra in ("lab", "mujoco", "wandb", "ray"):
        assert extras[extra] <= checked.keys()
    assert {"onnx", "huggingface_hub", "wandb"} <= checked.keys()
    assert all(package in extras[extra] for package, extra in checked.items() if extra)


def test_packages_without_a_program_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = {"both": ("numpy rich", "lab", ""), "no module": ("pytest-xdist", "lab", "")}
    monkeypatch.setattr(doctor, "PROBES", probes)
    assert doctor._run_probe("both").status == "ok"
    assert doctor._run_probe("no module").status == "broken"
