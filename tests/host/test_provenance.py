"""Which code made a run: in a checkout, an archive, a copy, and inside another project."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from phasicrl.host import provenance
from tests.helpers import open_run, tiny

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *words: str) -> str:
    identity = (
        "-c",
        "user.name=somebody",
        "-c",
        "user.email=somebody@example.org",
        "-c",
        "commit.gpgsign=false",
    )
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that holds the package, committed."""
    root = tmp_path / "checkout"
    shutil.copytree(
        ROOT / "src" / "phasicrl",
        root / "src" / "phasicrl",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / ".gitattributes", root)
    (root / "src" / "phasicrl" / "collect.py").chmod(0o755)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all of it")
    return root


def test_the_tree_has_the_name_that_git_gives_it(checkout: Path) -> None:
    package = checkout / "src" / "phasicrl"
    name = git(checkout, "rev-parse", "HEAD:src/phasicrl")
    (package / "envs" / "__pycache__").mkdir()
    (package / "envs" / "__pycache__" / "make.cpython-311.pyc").write_bytes(b"compiled")
    # What is left of folders whose files are gone; git has no empty ones.
    for left in ("gone/__pycache__", "empty/in/empty"):
        (package / left).mkdir(parents=True)
    (package / "gone" / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"compiled")
    assert provenance.tree(package) == name
    (package / "envs" / "make.py").write_text((package / "envs" / "make.py").read_text() + "\n")
    assert provenance.tree(package) != name


def test_a_checkout_names_its_commit_and_says_when_it_was_changed(checkout: Path) -> None:
    package, head = checkout / "src" / "phasicrl", git(checkout, "rev-parse", "--short", "HEAD")
    assert provenance.commit(package) == head
    (package / "collect.py").write_text("changed")
    assert provenance.commit(package) == f"{head}-dirty"


@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")
def test_an_archive_names_the_commit_and_a_copy_only_the_tree(
    checkout: Path, tmp_path: Path
) -> None:
    name, head = (
        git(checkout, "rev-parse", "HEAD:src/phasicrl"),
        git(checkout, "rev-parse", "--short", "HEAD"),
    )
    git(checkout, "archive", "--output", str(tmp_path / "archive.tar"), "HEAD")
    shutil.unpack_archive(tmp_path / "archive.tar", tmp_path / "archive")
    package = tmp_path / "archive" / "src" / "phasicrl"
    assert (provenance.commit(package), provenance.tree(package)) == (head, name)
    copy = shutil.copytree(checkout / "src" / "phasicrl", tmp_path / "copy")
    assert (provenance.commit(copy), provenance.tree(copy)) == (None, name)


def test_inside_another_project_its_commit_is_not_taken_for_ours(
    checkout: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    package = shutil.copytree(checkout / "src" / "phasicrl", project / ".venv" / "lib" / "phasicrl")
    (project / "paper.tex").write_text("…")
    git(project, "init", "--quiet")
    git(project, "add", "paper.tex")
    git(project, "commit", "--quiet", "--message", "a paper")
    assert provenance.commit(package) is None


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.commit(checkout / "src" / "phasicrl") is None


def test_the_card_of_a_run_says_both(tmp_path: Path) -> None:
    with open_run(tiny(tmp_path)) as run:
        card = json.loads((run.directory / "card.json").read_text())
    assert (card["commit"], card["source"]) == (provenance.commit(), provenance.tree())
