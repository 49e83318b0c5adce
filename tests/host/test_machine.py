"""What the machine is asked, and where its threads are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phasicrl.host import machine
from phasicrl.host.machine import (
    FollowingThreads,
    cgroup_quota,
    num_cores,
    thread_ids,
    usable_cores,
)

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or num_cores() < 2,
    reason="needs Linux and two cores to tell them apart",
)


@contextmanager
def a_waiting_thread() -> Iterator[int]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    before = thread_ids()
    thread.start()
    (number,) = thread_ids() - before
    assert number == thread.native_id
    try:
        yield number
    finally:
        done.set()
        thread.join()


@needs_affinity
def test_a_companion_goes_where_its_caller_is_and_nobody_else_is_moved() -> None:
    cores = os.sched_getaffinity(0)
    with a_waiting_thread() as worker, a_waiting_thread() as other:
        companion = FollowingThreads({worker})
        assert os.sched_getaffinity(worker) == cores, (
            "it moves when it is told to follow, not before"
        )
        try:
            for core in sorted(cores)[:2] * 2:
                os.sched_setaffinity(0, {core})
                companion.follow()
                assert os.sched_getaffinity(worker) == {core}
                assert os.sched_getaffinity(other) == cores
        finally:
            os.sched_setaffinity(0, cores)
        companion.follow()
        assert os.sched_getaffinity(0) == cores


@needs_affinity
def test_of_several_companions_those_that_have_ended_do_not_hold_the_others() -> None:
    cores = os.sched_getaffinity(0)
    with a_waiting_thread() as worker:
        with a_waiting_thread() as ended:
            companion = FollowingThreads({worker, ended})
        try:
            for core in sorted(cores)[:2]:
                os.sched_setaffinity(0, {core})
                companion.follow()
                assert os.sched_getaffinity(worker) == {core}
        finally:
            os.sched_setaffinity(0, cores)
    companion.follow()


def test_nobody_to_follow_is_no_error() -> None:
    FollowingThreads(set()).follow()


GROUPS = {
    "version 2, no limit": ("0::/a/b\n", {"a/cpu.max": "max 100000"}, None),
    "version 2, a container's own": ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
    "version 2, named by the host": ("0::/docker/12ab\n", {"cpu.max": "300000 100000"}, 3.0),
    "version 2, the tightest of nested ones": (
        "0::/a/b/c\n",
        {
            "a/cpu.max": "200000 100000",
            "a/b/cpu.max": "50000 25000",
            "a/b/c/cpu.max": "max 100000",
            "cpu.max": "400000 100000",
        },
        2.0,
    ),
    "version 2, an outer one": (
        "0::/a/b\n",
        {"a/cpu.max": "100000 100000", "a/b/cpu.max": "800000 100000"},
        1.0,
    ),
    "version 2 in unified": ("0::/a\n", {"unified/a/cpu.max": "250000 100000"}, 2.5),
    "version 1": (
        "5:memory:/m\n1:cpu,cpuacct:/a/b\n0::/\n",
        {
            "cpu,cpuacct/a/cpu.cfs_quota_us": "120000",
            "cpu,cpuacct/a/cpu.cfs_period_us": "40000",
            "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
        },
        3.0,
    ),
    "version 1, controllers in another order than their folder's": (
        "1:cpuacct,cpu:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
        0.5,
    ),
    "version 1, another controller's": (
        "1:cpuacct:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
        None,
    ),
    "damaged": ("what\n0::/a\n", {"a/cpu.max": "soon"}, None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_tightest_limit_of_the_control_groups_counts(name: str, tmp_path: Path) -> None:
    lines, files, expected = GROUPS[name]
    groups, root = tmp_path / "groups", tmp_path / "mounted"
    groups.write_text(lines)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    assert cgroup_quota(groups, root) == expected


def test_where_there_are_no_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cores"), [(None, 4), (9.0, 4), (2.6, 3), (1.5, 2), (2.5, 3), (1.4, 1), (0.1, 1)]
)
def test_half_a_core_more_is_one_and_there_is_always_one(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: {0, 1, 2, 5})
    monkeypatch.setattr(machine, "cgroup_quota", lambda: quota)
    assert num_cores() == cores


ASK = """
from phasicrl.host.machine import num_cores, usable_cores
print(num_cores(), *sorted(usable_cores()), len(os.sched_getaffinity(0)))
"""


def answer(code: str, cores: set[int], **variables: str) -> str:
    """What a Python of its own says, which may use these cores."""
    words = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores})\n{code}"]
    return subprocess.run(
        words, env=os.environ | variables, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.long
@needs_affinity
@pytest.mark.parametrize(
    "variable", ["OMP_PROC_BIND=true", "OMP_PROC_BIND=close", "OMP_PLACES=cores"]
)
def test_a_main_thread_bound_by_openmp_does_not_hide_the_other_cores(variable: str) -> None:
    """libgomp binds it to one core as soon as torch is loaded.

    A process that may use one core only has one, all the same.
    """
    bound = dict([variable.split("=")])
    first, second, *_ = sorted(usable_cores())
    assert answer(f"import torch\n{ASK}", {first, second}, **bound) == f"2 {first} {second} 1"
    assert answer(f"import torch\n{ASK}", {second}, **bound) == f"1 {second} 1"
    assert answer(ASK, {first, second}, **bound) == f"2 {first} {second} 2"
