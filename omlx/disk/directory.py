"""The root of the SSD tier: for us alone, one server's at a time, and still the one we took.

The lock is a flock on ``<root>/lock``. The kernel frees it when the process dies, however it dies;
the number in the file only tells people who has it. The file is also how we know the root again:
while we hold it open no other file can have its device and inode. So one ``lstat`` before a write
tells whether the root was removed, replaced, or unmounted, which leaves an empty folder of another
volume behind: into that one nothing is ever written.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from omlx.disk.filesystem import FileSystem, LocalFileSystem
from omlx.disk.layout import LOCK

log = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class CacheDirectoryLocked(Exception):
    """Another server uses this cache directory."""


class CacheDirectoryUnusable(Exception):
    """The cache directory can't be made or written; the text names path and reason."""


class CacheDirectory:
    """A root, its lock and its identity. ``ensure`` may be called in any thread."""

    def __init__(self, root: Path, *, fs: FileSystem | None = None) -> None:
        """Touches nothing yet. One that is never acquired is not locked, and sweeps nothing."""
        self.root = str(root)
        self.fs: FileSystem = LocalFileSystem() if fs is None else fs
        self.owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        """Names our temporaries. The number alone would not do: in containers all have the same."""
        self.writing: set[str] = set()
        """Temporaries, relative to the root, that are being written now."""
        self.generation = 0
        """How often the root was made or taken anew while we used it: then files are lost."""
        self.since = float("-inf")
        """When it became ours, by the clock of its file system: older temporaries are dead."""
        self._fd: int | None = None
        self._device = 0
        self._identity = (0, 0)
        self._warned = False
        self._taking = Lock()

    def acquire(self) -> None:
        """Make the directory and keep others out.

        Raises CacheDirectoryLocked or CacheDirectoryUnusable.
        """
        try:
            Path(self.root).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._device = self.fs.stat(self.root).st_dev
            self._lock()
        except OSError as error:
            raise CacheDirectoryUnusable(
                f"the cache directory {self.root} can't be used: {error.strerror}"
            ) from error
        self.warn_if_open([""])

    def release(self) -> None:
        with self._taking:
            if self._fd is not None:
                fd, self._fd = self._fd, None
                with suppress(OSError):
                    self.fs.close(fd)

    def ensure(self) -> None:
        """See to it that the root is there and ours. Made anew, it raises ``generation``.

        Raises OSError when it can't be, when another server has taken it, or when there is
        another volume in its place.
        """
        if self._fd is not None and not self._is_the_one():
            with self._taking:
                if self._fd is not None and not self._is_the_one():
                    self._take_anew()

    def warn_if_open(self, folders: Iterable[str]) -> None:
        """Say once which of these folders, relative to the root, others may look into."""
        for folder in folders:
            path = f"{self.root}/{folder}".rstrip("/")
            try:
                mode = stat.S_IMODE(self.fs.stat(path).st_mode)
            except OSError:
                continue  # whoever needs the folder will say so
            if mode & _OTHERS and not self._warned:
                self._warned = True
                log.warning(
                    "others may look into the cache: %s has mode %03o; to close it: "
                    "chmod -R go= %s",
                    path,
                    mode,
                    shlex.quote(path),
                )

    def _is_the_one(self) -> bool:
        try:
            status = self.fs.lstat(f"{self.root}/{LOCK}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def _take_anew(self) -> None:
        try:
            device = self.fs.stat(self.root).st_dev
        except FileNotFoundError:
            device = self.fs.stat(str(Path(self.root).parent)).st_dev
            if device == self._device:
                self.fs.mkdir(self.root, 0o700)
        if device != self._device:
            raise OSError(
                errno.ENODEV, f"another volume is in the place of the cache directory {self.root}"
            )
        try:
            self._lock()
        except CacheDirectoryLocked as error:
            raise OSError(errno.EBUSY, str(error)) from None
        self.generation += 1
        log.warning("the cache directory %s was gone and is made anew", self.root)

    def _lock(self) -> None:
        """Take the lock, and let go of a former one. Raises OSError or CacheDirectoryLocked."""
        path, fs = f"{self.root}/{LOCK}", self.fs
        fd = fs.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            try:
                fs.flock(fd)
            except BlockingIOError:
                raise CacheDirectoryLocked(
                    f"the cache directory {self.root} is used by process {self._owner_of(fd)}; "
                    "stop that server or name another directory with --ssd-cache-dir"
                ) from None
            status = fs.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, f"{path} is no file")
            fs.truncate(fd, 0)
            fs.writev(fd, [memoryview(f"{os.getpid()}\n".encode())])
            status, there = fs.fstat(fd), fs.lstat(path)
            if (status.st_dev, status.st_ino) != (there.st_dev, there.st_ino):
                raise OSError(errno.EBUSY, f"{path} was replaced while it was locked")
        except BaseException:
            with suppress(OSError):
                fs.close(fd)
            raise
        former, self._fd = self._fd, fd
        self._identity, self.since = (status.st_dev, status.st_ino), status.st_mtime
        if former is not None:
            with suppress(OSError):
                fs.close(former)

    def _owner_of(self, fd: int) -> str:
        line = bytearray(32)
        try:
            count = self.fs.preadv(fd, memoryview(line), 0)
        except OSError:
            count = 0
        number = line[:count].decode("ascii", "replace").strip()
        return number if number.isdecimal() else "unknown"
