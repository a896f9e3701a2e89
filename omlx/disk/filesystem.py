"""What the file layer asks of the operating system, and nothing else.

Every call below the cache directory goes through a ``FileSystem``, so a test can fail any of them.
The calls are named as in ``os`` and raise OSError as there. Paths are strings: at some ten
thousand files a scan, pathlib would cost as much as the disk.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from typing import Protocol

Buffer = memoryview


class FileSystem(Protocol):
    """A failed call changes nothing, except that ``writev`` may have written a part."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int: ...

    def close(self, fd: int) -> None: ...

    def fstat(self, fd: int) -> os.stat_result: ...

    def preadv(self, fd: int, buffer: Buffer, offset: int) -> int:
        """Read into ``buffer``; returns how many bytes, 0 at the file's end."""
        ...

    def writev(self, fd: int, parts: Sequence[Buffer]) -> int:
        """Append ``parts``; returns how many bytes of them were written."""
        ...

    def truncate(self, fd: int, length: int) -> None: ...

    def touch(self, fd: int) -> None:
        """Set the file's times to now."""
        ...

    def flock(self, fd: int) -> None:
        """Lock the file for this open alone. Raises BlockingIOError when another has it."""
        ...

    def stat(self, path: str) -> os.stat_result:
        """Of what a link leads to."""
        ...

    def lstat(self, path: str) -> os.stat_result:
        """Of the link itself."""
        ...

    def listdir(self, path: str) -> list[tuple[str, bool]]:
        """(name, is a folder) of each entry, unordered; a link to a folder is none."""
        ...

    def mkdir(self, path: str, mode: int = 0o700) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int:
        """What the volume of ``path`` has left for us."""
        ...


class LocalFileSystem:
    """The operating system itself."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def preadv(self, fd: int, buffer: Buffer, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def writev(self, fd: int, parts: Sequence[Buffer]) -> int:
        return os.writev(fd, parts)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def touch(self, fd: int) -> None:
        os.utime(fd)

    def flock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def listdir(self, path: str) -> list[tuple[str, bool]]:
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
