"""What `phasicrl doctor` finds, and that nothing it tries can end it."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from phasicrl.host import doctor, machine
from phasicrl.host.doctor import Check, as_table, diagnose


def text_of(checks: list[Check]) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(as_table(checks))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed")
def test_this_machine_is_well() -> None:
    checks = {check.name: check for check in diagnose()}
    for name in (
        "Python",
        "PyTorch",
        "GPU",
        "CPU",
        "EnvPool",
        "EnvPool Procgen",
        "EnvPool Atari",
        "EnvPool MuJoCo",
        "Qt",
        "Gymnasium",
        "memory",
        "disk",
    ):
        assert name in checks
    assert all(
        check.status == "ok"
        for name, check in checks.items()
        if name.startswith(("EnvPool", "Qt", "Gymnasium"))
    ), checks
    assert all(check.remedy for check in checks.values() if check.status != "ok")
    assert "StarpilotEasy-v0: 3 × 64 × 64 uint8" in text_of(list(checks.values()))


def probe_that(monkeypatch: pytest.MonkeyPatch, code: str) -> list[Check]:
    monkeypatch.setattr(doctor, "PROBES", {"Procgen": "x"})
    monkeypatch.setattr(
        doctor,
        "_start_probe",
        lambda _: subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ),
    )
    return [check for check in doctor._envpool() if check.name != "EnvPool"]


BLANK = json.dumps(
    {"shape": [3, 64, 64], "dtype": "uint8", "blank": True, "qt": "wheel", "graphics": "system"}
)


@pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="EnvPool is not installed")
@pytest.mark.parametrize(
    ("code", "found", "remedy"),
    [
        ("import os; os.abort()", "SIGABRT", "--force-reinstall envpool"),
        (
            "raise ImportError('Procgen draws with Qt 5')",
            "ImportError: Procgen draws with Qt 5",
            "pip install PyQt5-Qt5",
        ),
        (f"print('PROBE' + {BLANK!r})", "black", "--force-reinstall envpool"),
        ("import time; time.sleep(60)", "no answer within 1 s", "idle"),
    ],
)
def test_what_is_broken_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, code: str, found: str, remedy: str
) -> None:
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 1.0 if "sleep" in code else 60.0)
    check = probe_that(monkeypatch, code)[0]
    assert check.status == "broken" and found in check.found and remedy in check.remedy
    assert "broken" in text_of([check])


def test_what_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_version", lambda _: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    checks: list[Any] = [
        *doctor._envpool(),
        doctor._package("plotting", "matplotlib", "plot"),
        doctor._video(),
    ]
    assert [check.status for check in checks] == ["missing"] * 3
    assert [check.remedy for check in checks] == [
        f"pip install 'phasicrl[{extra}]'" for extra in ("procgen", "plot", "video")
    ]


def test_the_table_shows_names_and_remedies_as_they_are() -> None:
    check = Check("[b]", "missing", "no [video] here", "pip install 'phasicrl[plot]'")
    shown = text_of([check])
    assert all(text in shown for text in (check.name, check.found, check.remedy))


def test_little_memory_and_disk_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 2**30)
    monkeypatch.setattr(doctor, "ENOUGH_DISK", 2**70)
    assert doctor._memory().status == doctor._disk().status == "warning"
    assert doctor._memory().found == "1.0 GiB free"


ALLOWED = "the container allows the time"


@pytest.mark.parametrize(
    ("cores", "quota", "found"),
    [
        ({0, 1, 2, 3}, None, "4 cores are used (4 in the machine)"),
        ({1, 3}, None, "2 cores are used (4 in the machine, this process may use 2)"),
        ({0, 1, 2, 3}, 1.25, f"1 core is used (4 in the machine, {ALLOWED} of 1.25)"),
        (
            {0, 1, 2},
            8.0,
            f"3 cores are used (4 in the machine, this process may use 3, {ALLOWED} of 8)",
        ),
    ],
)
def test_the_cores_that_are_used_and_why(
    cores: set[int], quota: float | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(machine, "cgroup_quota", lambda: quota)
    check = doctor._cpu()
    assert (check.status, check.found) == ("ok", found)
