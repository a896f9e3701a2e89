"""Files below the root, each written whole or not at all, and read without being fooled.

**Writing.** Room is asked for first. Then a temporary is filled in the file's own folder, and
renamed. A failure on the way leaves nothing but, if it can't even be unlinked, a temporary that
nobody writes: the next census removes it.

**Why nothing is fsynced.** A rename without fsync promises other processes all or nothing, and
promises nothing about a power cut: the name may reach the disk before the data. Then the file is
short, or full of zeros, or a mixture. Each of these fails a check. The header tells the file's
size, has one spelling, and holds a checksum of every tensor's bytes; the file's name is the hash of
what the block is. So any prefix, zeros, and any mixture of old and new bytes are ``Unreadable``: a
miss, and the file goes. A power cut costs what had not reached the disk, some seconds of blocks,
which can be computed again. An fsync of the file and its folder would save those few, and would
cost more than the write itself, at each write.

**Reading.** No link is followed below the root, neither in a file's place nor in a folder's. A
pipe, a device or a folder that has a block's name is not waited for and not read. A file is removed
only when its bytes have proved it damaged and it is still the same file. An error of the system
says nothing about the file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

import numpy as np

from omlx.cache.block_file import Unreadable
from omlx.cache.block_tensors import TensorChecks
from omlx.disk.directory import CacheDirectory
from omlx.disk.layout import folders_above, temporary_path

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECE_BYTES = 512 << 10
"""Read and looked at at a time: it is in the core's second cache in between, which holds the page
cache's copy of it as well."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):
    """The volume is full, or its free space would fall below the floor. Nothing was left."""


class Obstructed(OSError):
    """Something that is no file has the file's name. It stays as it is."""


class NotAFile(Unreadable):
    """A link, folder, pipe or device has the file's name. It stays as it is."""


class WholeFiles:
    """Paths are relative to the root. Any thread; calls of several threads don't cross."""

    def __init__(self, directory: CacheDirectory, floor_bytes: int = 0) -> None:
        """``floor_bytes``: what writing leaves free on the volume; 0: nothing."""
        self._directory = directory
        self._fs = directory.fs
        self._root = directory.root
        self.floor_bytes = floor_bytes
        self._naming = Lock()
        """Held from the look at what has a name to the change of it."""

    def write(self, path: str, parts: Sequence[memoryview]) -> int:
        """Make or replace a file; returns its bytes.

        Raises NoRoom, Obstructed, or another OSError, and leaves nothing behind.
        """
        nbytes = sum(part.nbytes for part in parts)
        try:
            self._directory.ensure()
            self.ask_for(nbytes)
            self._make_folders(path)
            self._write(path, parts)
        except OSError as error:
            if error.errno in _FULL and not isinstance(error, NoRoom):
                raise NoRoom(errno.ENOSPC, error.strerror or "the volume is full") from None
            raise
        return nbytes

    def make_folder(self, folder: str) -> None:
        """Make a folder and those above it, for us alone. Raises OSError."""
        self._directory.ensure()
        self._make_folders(f"{folder}/")

    def read(self, path: str, most: int) -> tuple[memoryview, os.stat_result, TensorChecks]:
        """A whole file of at most ``most`` bytes, what it was when it was opened, what was checked.

        Marks it as used. Raises NotAFile, Unreadable when it is longer, and OSError.
        """
        self._check_folders(path)
        fd, status = self.open(path)
        try:
            size = status.st_size
            if size > most:
                self.remove_damaged(path, status)
                raise Unreadable(f"the file has {size} bytes, far more than the block")
            # Not bytearray: that fills with zeros what is about to be read.
            data = np.empty(size, np.uint8).data
            checks = TensorChecks(size)
            count = self.fill(fd, data, checks.update)
            with suppress(OSError):
                self._fs.touch(fd)  # recency survives a restart
        finally:
            with suppress(OSError):
                self._fs.close(fd)
        return data[:count], status, checks

    def open(self, path: str) -> tuple[int, os.stat_result]:
        """Open a file for reading; the caller closes it. Raises NotAFile or OSError."""
        try:
            fd = self._fs.open(f"{self._root}/{path}", _READ)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket or a dead device
                raise NotAFile("a link or a device has the file's name") from None
            raise
        try:
            status = self._fs.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise NotAFile("a folder, pipe or device has the file's name")
        except BaseException:
            with suppress(OSError):
                self._fs.close(fd)
            raise
        return fd, status

    def fill(
        self, fd: int, buffer: memoryview, seen: Callable[[memoryview], None] | None = None
    ) -> int:
        """Read into ``buffer`` from the file's start; returns fewer bytes only where it ends.

        ``seen``: read in pieces, and show it all that was read so far after each.
        """
        position, piece = 0, buffer.nbytes if seen is None else _PIECE_BYTES
        while position < buffer.nbytes:
            count = self._fs.preadv(fd, buffer[position : position + piece], position)
            if count == 0:
                if self._fs.fstat(fd).st_size > position:
                    raise OSError(errno.EIO, "the file can be read in part only")
                break
            position += count
            if seen is not None:
                seen(buffer[:position])
        return position

    def remove(self, path: str) -> None:
        """Remove a file; what is none stays. Harmless when it is gone already. Raises OSError."""
        with suppress(FileNotFoundError), self._naming:
            self._check_folders(path)
            if stat.S_ISREG(self._fs.lstat(f"{self._root}/{path}").st_mode):
                self._fs.unlink(f"{self._root}/{path}")

    def remove_damaged(self, path: str, status: os.stat_result) -> bool:
        """Remove a file that proved damaged, unless another has its name by now."""
        with suppress(OSError), self._naming:
            there = self._fs.lstat(f"{self._root}/{path}")
            if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino):
                self._fs.unlink(f"{self._root}/{path}")
                return True
        return False

    def ask_for(self, nbytes: int) -> None:
        if self.floor_bytes and self._fs.free_bytes(self._root) - nbytes < self.floor_bytes:
            raise NoRoom(errno.ENOSPC, f"less than {self.floor_bytes} bytes would be left free")

    def _write(self, path: str, parts: Sequence[memoryview]) -> None:
        fs, directory = self._fs, self._directory
        name = temporary_path(path, directory.owner)
        temporary = f"{self._root}/{name}"
        directory.writing.add(name)
        try:
            fd = fs.open(temporary, _CREATE, 0o600)
            try:
                self._fill_file(fd, parts)
            except BaseException:
                with suppress(OSError):
                    fs.close(fd)
                raise
            fs.close(fd)  # some file systems tell only now that there was no room
            with self._naming:
                self._make_way(path)
                fs.rename(temporary, f"{self._root}/{path}")
        except BaseException:
            with suppress(OSError):
                fs.unlink(temporary)
            raise
        finally:
            directory.writing.discard(name)

    def _fill_file(self, fd: int, parts: Sequence[memoryview]) -> None:
        waiting = list(parts)
        while waiting:
            count = self._fs.writev(fd, waiting)
            while waiting and count >= waiting[0].nbytes:
                count -= waiting[0].nbytes
                waiting.pop(0)
            if waiting and count:
                waiting[0] = waiting[0][count:]

    def _make_way(self, path: str) -> None:
        """Let a rename replace nothing but a file: an empty folder goes, the rest stays."""
        there = f"{self._root}/{path}"
        try:
            mode = self._fs.lstat(there).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            with suppress(OSError):
                self._fs.rmdir(there)
                return
        if not stat.S_ISREG(mode):
            raise Obstructed(errno.EEXIST, "something that is no file has the file's name")

    def _make_folders(self, path: str) -> None:
        for folder in folders_above(path):
            try:
                self._check_folder(folder)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    self._fs.mkdir(f"{self._root}/{folder}", 0o700)

    def _check_folders(self, path: str) -> None:
        for folder in folders_above(path):
            self._check_folder(folder)

    def _check_folder(self, folder: str) -> None:
        """A link would lead out of the root."""
        if not stat.S_ISDIR(self._fs.lstat(f"{self._root}/{folder}").st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "a link or a file is in a folder's place")
