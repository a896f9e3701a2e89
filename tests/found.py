"""What a census finds of the served model."""

from __future__ import annotations

from omlx.disk.block_files import Files
from omlx.disk.census import FoundFile


def found_in(files: Files) -> list[FoundFile]:
    """The files of its own namespace. Raises OSError."""
    return [found for part in files.census() for found in part.found]
