"""Packages on the Hugging Face Hub. Kind: effects (network).

Up go the files of a package and nothing else. What comes down is checked before it is put in place:
names, hashes, and that weights are safetensors. Nothing of it is run.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from phasicrl.host.machine import optional_module
from phasicrl.lab.export.package import FILES, HASHES_FILE, check_package


def push(
    package: Path, repository: str, *, private: bool = False, dry_run: bool = False
) -> list[str]:
    """Upload a package of `phasicrl release`.

    Args:
        package: Its folder.
        repository: OWNER/NAME; it is made if there is none.
        private: Whether others cannot see one that is made.
        dry_run: Check everything, upload nothing.

    Returns:
        The names of the files that were uploaded, or would be.

    Raises:
        ValueError: not a package, one that was changed, or no name of a repository.
        ImportError: `huggingface_hub` is missing.
    """
    _check_name(repository)
    names = [*check_package(package), HASHES_FILE]
    hub = _hub()
    if not dry_run:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=str(package), allow_patterns=names,
            delete_patterns=[name for name in FILES if name not in names],
            commit_message="Upload a package of phasicrl",
        )  # fmt: skip
    return names


def pull(repository: str, *, output: Path | None = None, revision: str | None = None) -> Path:
    """Download a package.

    Args:
        repository: OWNER/NAME.
        output: The folder to be made; else `hub/OWNER-NAME`.
        revision: A branch, a tag or a commit; none: what is newest.

    Returns:
        The folder: `evaluate`, `video`, `export` and `--init-from` take it as a run directory.

    Raises:
        ValueError: there is such a folder already, or what came down is no whole package.
        ImportError: `huggingface_hub` is missing.
    """
    _check_name(repository)
    output = output or Path("hub") / repository.replace("/", "-")
    if output.exists():
        raise ValueError(f"{output} is there already; remove it, or choose another --output")
    hub = _hub()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".pull-") as folder:
        fetched = Path(folder) / "fetched"
        hub.snapshot_download(
            repository, revision=revision, local_dir=str(fetched),
            allow_patterns=[*FILES, HASHES_FILE],
        )  # fmt: skip
        shutil.rmtree(fetched / ".cache", ignore_errors=True)  # the client's own notes
        try:
            check_package(fetched)
        except ValueError as error:
            raise ValueError(f"{repository}: {error}") from None
        fetched.rename(output)
    return output


def _check_name(repository: str) -> None:
    """Refuse what is no name of a repository."""
    owner, slash, name = repository.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise ValueError(f"{repository!r} is no repository; give OWNER/NAME")


def _hub() -> Any:
    """The client's module."""
    return optional_module("huggingface_hub", "the hub needs huggingface_hub", "hub")
