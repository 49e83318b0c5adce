"""The commit of a folder: in a checkout, in a copy, and inside another project."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from phasicrl.system.machine import find_commit


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
