"""Packages on the Hugging Face Hub. Kind: effects (network).

Only the files of a package are uploaded. A download is checked before it is put in place: names,
hashes, and that weights are safetensors. None of it is executed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from phasicrl.lab.export.package import FILES, HASHES_FILE, check_package
from phasicrl.system.machine import optional_module


def push(
    package: Path, repository: str, *, private: bool = False, dry_run: bool = False
) -> list[str]:
    """Upload a package of `phasicrl release`.

    Args:
        package: Folder of the package.
        repository: OWNER/NAME; it is created if it does not exist.
        private: Whether a new repository is hidden from others.
        dry_run: Check everything, upload nothing.

    Returns:
        The names of the files that were uploaded, or would be.

    Raises:
        ValueError: not a package, or one that was changed.
        ImportError: `huggingface_hub` is missing.
    """
    hub = optional_module("huggingface_hub", "the hub needs huggingface_hub")
    names = [*check_package(package), HASHES_FILE]
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
        output: New folder; else `hub/OWNER-NAME`.
        revision: A branch, a tag or a commit; none: the newest.

    Returns:
        The folder: `evaluate`, `video`, `export` and `--init-from` take it as a run directory.

    Raises:
        ValueError: the folder already exists, or the download is not a whole package.
        ImportError: `huggingface_hub` is missing.
    """
    hub = optional_module("huggingface_hub", "the hub needs huggingface_hub")
    output = output or Path("hub") / repository.replace("/", "-")
    if output.exists():
        raise ValueError(f"output {output} already exists; remove it or choose another")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".pull-") as folder:
        fetched = Path(folder) / "fetched"
        hub.snapshot_download(
            repository, revision=revision, local_dir=str(fetched),
            allow_patterns=[*FILES, HASHES_FILE],
        )  # fmt: skip
        shutil.rmtree(fetched / ".cache")  # of the client
        try:
            check_package(fetched)
        except ValueError as error:
            raise ValueError(f"{repository}: {error}") from None
        fetched.rename(output)
    return output
