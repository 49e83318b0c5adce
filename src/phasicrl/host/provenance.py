"""Which code this is: the commit, and a digest of the files themselves.

Kind: effects (reads the package's files; asks git).
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_EMPTY = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Git's name of a folder without files, which it does not keep."""


def commit(package: Path = PACKAGE) -> str | None:
    """Commit of the package, with `-dirty` where the checkout was changed; None if nobody can tell.

    In a checkout git tells; in an archive that git made (`git archive`, a release's tarball) the
    file `commit.txt` does. A copy of the files alone has neither: `tree` tells what they are.
    """
    # A folder inside another project's checkout is not there.
    if _git(package, "rev-parse", "--verify", "--quiet", "HEAD:./"):
        return _git(package, "describe", "--always", "--dirty", "--exclude=*")
    written = package / "commit.txt"
    text = written.read_text().strip() if written.is_file() else ""
    return text if text and not text.startswith("$") else None


def commit_or_digest(folder: Path = PACKAGE) -> str:
    """The commit of a folder, with `-dirty` where it was changed; else a digest of its files."""
    return commit(folder) or f"files {tree(folder)[:12]}"


def tree(folder: Path = PACKAGE) -> str:
    """Git's name of a folder with these files.

    `git rev-parse COMMIT:src/phasicrl` prints the same for the commit that they are from. It is
    the same in a checkout, an installed wheel and a copy, and changes with every byte. What Python
    writes beside the files is left out.
    """
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            # Git sorts a folder as if its name ended with a slash.
            if (name := tree(path)) != _EMPTY:
                entries.append((f"{path.name}/", f"40000 {path.name}", name))
        else:
            mode = "100755" if path.stat().st_mode & 0o100 else "100644"
            content = path.read_bytes()
            if path.name == "commit.txt":  # archives have the commit in its place
                content = b"$Format:%h$\n"
            entries.append((path.name, f"{mode} {path.name}", _digest("blob", content)))
    lines = [f"{entry}\0".encode() + bytes.fromhex(name) for _, entry, name in sorted(entries)]
    return _digest("tree", b"".join(lines))


def _digest(kind: str, content: bytes) -> str:
    """Git's name of an object."""
    named = f"{kind} {len(content)}\0".encode() + content
    return hashlib.sha1(named, usedforsecurity=False).hexdigest()


def _git(folder: Path, *words: str) -> str | None:
    """What git prints; None where there is no git, or no such thing."""
    try:
        return subprocess.check_output(
            ["git", *words], cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None
