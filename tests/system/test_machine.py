"""Cores that a process may use, by affinity and by control groups; the commit of a folder."""

import subprocess
from pathlib import Path

import pytest

from phasicrl.system import machine
from phasicrl.system.machine import cgroup_cpu_quota, find_commit, num_cores

GROUPS = {
    "version 2, no limit": ("0::/a/b\n", {"a/cpu.max": "max 100000"}, None),
    "version 2, a container's own": ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
    "version 2, named by the host": ("0::/docker/12ab\n", {"cpu.max": "300000 100000"}, 3.0),
    "version 2, the tightest of nested ones": (
        "0::/a/b/c\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 25000",
                        "a/b/c/cpu.max": "max 100000", "cpu.max": "400000 100000"}, 2.0),
    "version 2, an outer one": (
        "0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "800000 100000"}, 1.0),
    "version 1, a container's own": (
        "5:memory:/m\n1:cpu,cpuacct:/docker/12ab\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "120000", "cpu/cpu.cfs_period_us": "40000"}, 3.0),
    "version 1, no limit": (
        "1:cpu,cpuacct:/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "no name": ("", {"cpu.max": "200000 100000"}, 2.0),
    "damaged": ("what\n0::/a\n", {"a/cpu.max": "soon"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_the_tightest_limit_of_the_control_groups_counts(name: str, tmp_path: Path) -> None:
    lines, files, expected = GROUPS[name]
    groups, root = tmp_path / "groups", tmp_path / "mounted"
    groups.write_text(lines)
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    assert cgroup_cpu_quota(groups, root) == expected


def test_where_there_are_no_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_cpu_quota(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cores"), [(None, 4), (9.0, 4), (2.6, 3), (1.5, 2), (2.5, 3), (1.4, 1), (0.1, 1)]
)
def test_half_a_core_more_is_one_and_there_is_always_one(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5})
    monkeypatch.setattr(machine, "cgroup_cpu_quota", lambda: quota)
    assert num_cores() == cores


def git(folder: Path, *words: str) -> str:
    identity = ("user.name=somebody", "user.email=somebody@example.org", "commit.gpgsign=false")
    options = [word for setting in identity for word in ("-c", setting)]
    return subprocess.check_output(["git", *options, *words], cwd=folder, text=True).strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a repository with a package in it, committed."""
    package = tmp_path / "checkout" / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path / "checkout", "init", "--quiet")
    git(tmp_path / "checkout", "add", ".")
    git(tmp_path / "checkout", "commit", "--quiet", "--message", "all of it")
    return tmp_path / "checkout"


def test_a_checkout_names_its_commit_and_says_when_it_was_changed(checkout: Path) -> None:
    package, head = checkout / "src" / "package", git(checkout, "rev-parse", "--short", "HEAD")
    assert find_commit(package) == find_commit(checkout) == head
    git(checkout, "tag", "--annotate", "v1", "--message", "a release")
    assert find_commit(package) == head
    (package / "__init__.py").write_text("changed")
    assert find_commit(package) == f"{head}-dirty"


def test_a_folder_that_no_repository_tracks_has_no_commit(checkout: Path, tmp_path: Path) -> None:
    """An installed package: alone, or in an environment inside another project's checkout."""
    for installed in (tmp_path / "lib" / "package", checkout / ".venv" / "lib" / "package"):
        installed.mkdir(parents=True)
        assert find_commit(installed) is None


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_commit(checkout) is None
