"""What lies under the cache directory, looked at and not touched: no lock, no sweep, no repair.

For people who look after the files. A server takes a ``census`` instead, which knows the served
model and tidies up behind a former life.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from omlx.cache.block_file import HEADER_MAX, LENGTH, Outline, decode_outline
from omlx.cache.blocks import BlockHash
from omlx.cache.inspection import Named, check_name
from omlx.disk.directory import CacheDirectory
from omlx.disk.layout import (
    BLOCKS,
    LOCK,
    SIDECARS,
    SUFFIX,
    is_block_name,
    is_namespace_name,
    is_shard_name,
    owner_of_temporary,
)
from omlx.disk.whole_files import WholeFiles

_FIRST_READ = 16384
"""Most headers fit; longer ones cost a second read."""


class Kind(StrEnum):
    BLOCK = "block"
    CHECKPOINT = "checkpoint"
    TEMPORARY = "temporary"
    """What a write has not finished, or never will."""
    LOCK = "lock"
    FOREIGN = "foreign"
    """Everything else, whatever it is: links, other names, files elsewhere."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, or what has a file's place."""

    path: str
    """Relative to the root."""
    kind: Kind
    nbytes: int
    used_at: float
    """Unix seconds of its last use."""
    namespace: str = ""
    """Of a block, a checkpoint or a temporary."""

    @property
    def named(self) -> Named:
        """Of a block or a checkpoint: what its path says that it is."""
        name = self.path.rpartition("/")[2].removesuffix(SUFFIX)
        is_checkpoint = self.kind is Kind.CHECKPOINT
        return Named(self.namespace, BlockHash(bytes.fromhex(name)), is_checkpoint)


class Survey:
    """``entries`` goes through everything under the root, and no link."""

    def __init__(self, directory: CacheDirectory) -> None:
        self.files = WholeFiles(directory)
        self.folders: list[str] = []
        """Folders of ours met so far, each before those in it."""
        self.skipped = 0
        """Files and folders that could not be looked at."""
        self._fs = directory.fs
        self._root = directory.root

    def entries(self) -> Iterator[Entry]:
        """Every file. Raises OSError when the root itself can't be listed."""
        foreign: list[str] = []
        for path, name, is_folder in self._list(""):
            if is_folder and name == BLOCKS:
                yield from self._blocks(path, foreign)
            elif is_folder:
                foreign.append(path)
            else:
                yield from self._entry(path, Kind.LOCK if name == LOCK else Kind.FOREIGN)
        while foreign:
            for path, _, is_folder in self._list(foreign.pop()):
                if is_folder:
                    foreign.append(path)
                else:
                    yield from self._entry(path, Kind.FOREIGN)

    def outline(self, entry: Entry) -> Outline:
        """Who a block's or a checkpoint's file is, by its header.

        Raises Unreadable, OtherFormat among them, and OSError.
        """
        fd, status = self.files.open(entry.path)
        try:
            size = status.st_size
            start = self._read(fd, min(size, _FIRST_READ))
            if len(start) >= LENGTH.size:
                whole = LENGTH.size + LENGTH.unpack_from(start)[0]
                if len(start) < whole <= min(size, LENGTH.size + HEADER_MAX):
                    start = self._read(fd, whole)
        finally:
            with suppress(OSError):
                self._fs.close(fd)
        outline = decode_outline(start, size)
        check_name(outline.identity, entry.named)
        return outline

    def _blocks(self, blocks: str, foreign: list[str]) -> Iterator[Entry]:
        self.folders.append(blocks)
        for path, name, is_folder in self._list(blocks):
            if is_folder and is_namespace_name(name):
                yield from self._shards(path, Kind.BLOCK, name, foreign)
            elif is_folder:
                foreign.append(path)
            else:
                yield from self._entry(path, Kind.FOREIGN)

    def _shards(
        self, folder: str, kind: Kind, namespace: str, foreign: list[str]
    ) -> Iterator[Entry]:
        self.folders.append(folder)
        for path, name, is_folder in self._list(folder):
            if is_folder and is_shard_name(name):
                yield from self._files(path, name, kind, namespace, foreign)
            elif is_folder and name == SIDECARS and kind is Kind.BLOCK:
                yield from self._shards(path, Kind.CHECKPOINT, namespace, foreign)
            elif is_folder:
                foreign.append(path)
            else:
                yield from self._entry(path, Kind.FOREIGN)

    def _files(
        self, folder: str, shard: str, kind: Kind, namespace: str, foreign: list[str]
    ) -> Iterator[Entry]:
        self.folders.append(folder)
        for path, name, is_folder in self._list(folder):
            if is_folder:
                foreign.append(path)
            elif is_block_name(name, shard):
                yield from self._entry(path, kind, namespace)
            elif owner_of_temporary(name) is not None:
                yield from self._entry(path, Kind.TEMPORARY, namespace)
            else:
                yield from self._entry(path, Kind.FOREIGN)

    def _list(self, folder: str) -> list[tuple[str, str, bool]]:
        """(path, name, is a folder) of each entry, in the order of their names."""
        try:
            found = self._fs.listdir(f"{self._root}/{folder}" if folder else self._root)
        except FileNotFoundError:
            if not folder:
                raise
            return []  # it was removed meanwhile
        except OSError:
            if not folder:
                raise
            self.skipped += 1
            return []
        return [(f"{folder}/{name}".lstrip("/"), name, is_dir) for name, is_dir in sorted(found)]

    def _entry(self, path: str, kind: Kind, namespace: str = "") -> Iterator[Entry]:
        try:
            status = self._fs.lstat(f"{self._root}/{path}")
        except FileNotFoundError:
            return
        except OSError:
            self.skipped += 1
            return
        if not stat.S_ISREG(status.st_mode):
            kind, namespace = Kind.FOREIGN, ""
        yield Entry(path, kind, status.st_size, status.st_mtime, namespace)

    def _read(self, fd: int, count: int) -> memoryview:
        start = memoryview(bytearray(count))
        return start[: self.files.fill(fd, start)]
