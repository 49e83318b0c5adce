"""Packages on the Hugging Face Hub. Kind: effects (network).

Only the files of a package are uploaded. Names and hashes of a download are checked before it is
moved to its place; nothing in it is executed.
"""

import shutil
import tempfile
from pathlib import Path

from phasicrl.lab.export.package import HASHES_FILE, PACKAGE_FILES, check_package_hashes
from phasicrl.system.machine import import_optional


def push(
    package: Path, repository: str, *, private: bool = False, dry_run: bool = False
) -> list[str]:
    """Upload a package of `phasicrl release` to the Hugging Face Hub.

    Args:
        package: Directory of the package.
        repository: OWNER/NAME, created if it does not exist.
        private: Hide a new repository from others.
        dry_run: Check everything, upload nothing.

    Returns:
        Names of the uploaded files.

    Raises:
        ValueError: the directory is not a package of `release`, its files were changed, or the
            repository cannot have this name.
        ImportError: `huggingface_hub` is missing.
    """
    hub = import_optional("huggingface_hub", "the hub needs huggingface_hub")
    from huggingface_hub.utils import validate_repo_id  # no attribute of `hub` before

    validate_repo_id(repository)
    names = [*check_package_hashes(package), HASHES_FILE]
    if not dry_run:
        try:
            hub.create_repo(repository, private=private, exist_ok=True)
            hub.upload_folder(
                repo_id=repository, folder_path=str(package), allow_patterns=names,
                delete_patterns=[name for name in PACKAGE_FILES if name not in names],
                commit_message="Upload a package of phasicrl",
            )  # fmt: skip
        except Exception as error:  # such as the HTTP client's own errors
            raise OSError(f"{repository}: {error}") from error
    return names


def pull(repository: str, *, output: Path | None = None, revision: str | None = None) -> Path:
    """Download a package from the Hugging Face Hub.

    Args:
        repository: OWNER/NAME.
        output: New directory; none: `hub/OWNER-NAME`.
        revision: A branch, a tag or a commit; none: the newest.

    Returns:
        The directory, a run directory for `evaluate`, `video`, `export` and `--init-from`.

    Raises:
        ValueError: the directory exists, or the download is not a whole package.
        ImportError: `huggingface_hub` is missing.
    """
    hub = import_optional("huggingface_hub", "the hub needs huggingface_hub")
    output = output or Path("hub") / repository.replace("/", "-")
    if output.exists():
        raise ValueError(f"output is {output}, which exists; expected a new folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".pull-") as folder:
        (downloaded := Path(folder) / "downloaded").mkdir()
        hub.snapshot_download(
            repository, revision=revision, local_dir=str(downloaded),
            allow_patterns=[*PACKAGE_FILES, HASHES_FILE],
        )  # fmt: skip
        shutil.rmtree(downloaded / ".cache", ignore_errors=True)  # of the client
        try:
            check_package_hashes(downloaded)
        except ValueError as error:
            raise ValueError(f"{repository}: {error}") from None
        downloaded.rename(output)
    return output
