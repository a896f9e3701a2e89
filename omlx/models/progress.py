"""How far a download is, read from the disk, because not every downloader says.

``Progress`` is called with what is being done, how many bytes or parts of it are done, and of how
many. It may be called from another thread, never from two at once, and must not raise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``; ``done`` never exceeds ``total``."""

_LOOK_EVERY_S = 0.25


@contextmanager
def watching_growth(
    folder: Path, what: str, total_bytes: int, progress: Progress
) -> Iterator[None]:
    """Report the bytes under ``folder`` four times a second until the block ends.

    Ends with ``total_bytes`` when the block ends well. What the folder holds already is counted: a
    download that goes on where it stopped starts there.
    """
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            progress(what, min(bytes_under(folder), total_bytes), total_bytes)

    progress(what, min(bytes_under(folder), total_bytes), total_bytes)
    thread = threading.Thread(target=look, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress(what, total_bytes, total_bytes)


def bytes_under(folder: Path) -> int:
    """The size of all files under ``folder``; one that vanishes meanwhile counts nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            if file.is_file():
                total += file.stat().st_size
        except OSError:
            continue
    return total
