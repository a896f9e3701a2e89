"""Bring a Hugging Face repository under the model directory: resumable, and whole or not there.

Files arrive in ``<model_dir>/.partial/<org>--<name>``, which stays when a download breaks off, so
that the next one goes on from there. Only a complete directory is renamed to its final name.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import cast

from omlx.models.locate import ModelUnavailable, locate, what_is_missing
from omlx.models.progress import Progress, watching_growth

PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jinja",
    "LICENSE*",
]
"""What mlx-lm reads, and the licence; not the same weights again in other formats."""

_AGAIN = "files that arrived are kept, and the next omlx pull goes on from there"


def fetch(repo_id: str, model_dir: Path, progress: Progress) -> Path:
    """Download ``repo_id`` (org/name) into ``<model_dir>/<org>/<name>`` and return that path.

    Returns at once when it is there and whole. Raises ModelUnavailable when the hub cannot be
    reached, refuses, has no such repository, or has no weights that mlx-lm reads.
    """
    located = locate(repo_id, model_dir, allow_path=False)
    if located.to_fetch is None:
        return located.path

    partial = model_dir / ".partial" / repo_id.replace("/", "--")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _download(repo_id, partial, progress)
        return _move(repo_id, partial, located.path)
    except OSError as error:
        raise ModelUnavailable(f"{repo_id} cannot be written to {model_dir}: {error}") from error


def _move(repo_id: str, partial: Path, target: Path) -> Path:
    for unfinished in (partial / ".cache").rglob("*.incomplete"):
        unfinished.unlink()  # Left by an attempt at an older revision; everything else is there.
    missing = what_is_missing(partial)
    if missing is not None:
        raise ModelUnavailable(f"{repo_id} is not a model that mlx-lm loads: {missing}")

    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.replace(target)
    except OSError:
        # Another process fetched the same model and was first.
        if what_is_missing(target) is not None:
            raise
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _download(repo_id: str, folder: Path, progress: Progress) -> None:
    # Imported here: it costs a third of a second, and most starts fetch nothing.
    from huggingface_hub import DryRunFileInfo, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        plan = cast(
            list[DryRunFileInfo],
            snapshot_download(repo_id, local_dir=folder, allow_patterns=PATTERNS, dry_run=True),
        )
        total_bytes = sum(file.file_size or 0 for file in plan)
        with watching_growth(folder, repo_id, total_bytes, progress):
            snapshot_download(repo_id, local_dir=folder, allow_patterns=PATTERNS)
    except Exception as error:
        # The hub's client raises its own, its HTTP library's and its Xet library's exceptions,
        # which share no base class. Whatever it was, the download did not happen.
        raise ModelUnavailable(_why(repo_id, error)) from error

    # The client answers with what is here when the hub goes away between the two calls.
    for file in plan:
        here = folder / file.filename
        if not here.is_file() or here.stat().st_size != (file.file_size or here.stat().st_size):
            raise ModelUnavailable(f"{repo_id}: {file.filename} did not arrive whole; {_AGAIN}")


def _why(repo_id: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # A dry run wraps what went wrong.
    match error.__cause__ or error:
        case GatedRepoError():
            return f"{repo_id} asks you to accept its terms at Hugging Face; then set HF_TOKEN"
        case RepositoryNotFoundError():
            return f"Hugging Face has no repository {repo_id} that you may read; a typing error?"
        case HfHubHTTPError() | PermissionError() | FileNotFoundError() as cause:
            return f"{repo_id} cannot be fetched: {_first_line(cause)}; {_AGAIN}"
        case OSError(errno=errno.ENOSPC):
            return f"{repo_id} cannot be fetched: the disk is full; {_AGAIN}"
        case cause:
            return (
                f"{repo_id} is not here and Hugging Face cannot be reached "
                f"({_first_line(cause) or type(cause).__name__}); check the network, or copy the "
                f"model's directory into the model directory; {_AGAIN}"
            )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
