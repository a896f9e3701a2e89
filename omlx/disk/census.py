"""What lies under the cache directory: every byte is counted, and nothing foreign is touched.

A census goes through the served namespace first, so that what can be reused is known while the rest
is still being counted. It comes in slices, and between two of them its thread is free for reads.

    found          a file of the served namespace whose header is sound
    damaged        a file of the served namespace that is not: removed
    others         a file under a block's name in another namespace, or of another format version
    foreign_bytes  everything else, links, the lock and what can't be read among it

Temporaries are removed when nobody writes them: those of ours that a failed write could not remove,
and those of others that are older than our lock, which they would have to hold. A younger one of
somebody else belongs to a process that ignores the lock. It is left alone and counted.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from omlx.cache.block_file import (
    HEADER_MAX,
    LENGTH,
    Identity,
    OtherFormat,
    Outline,
    Unreadable,
    decode_outline,
)
from omlx.cache.blocks import BlockHash, chain_hash, state_hash
from omlx.cache.checkpoints import Place
from omlx.disk.directory import CacheDirectory
from omlx.disk.layout import (
    BLOCKS,
    SIDECARS,
    SUFFIX,
    is_block_name,
    is_namespace_name,
    is_shard_name,
    owner_of_temporary,
)
from omlx.disk.whole_files import NotAFile, WholeFiles

log = logging.getLogger(__name__)

SLICE_FILES = 512

_FIRST_READ = 16384
"""A header of a 256-token block of 32 layers fits; longer ones cost a second read."""

_OUR_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""These say nothing about the file at hand: the next one would fail as well."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A valid block file of the served namespace."""

    identity: Identity
    nbytes: int
    used_at: float
    """Unix seconds of its last use."""
    carries: Place | None = None
    """Of a block: the checkpoint that is embedded in its file."""


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of ours that the served model can't use."""

    path: str
    """Relative to the root; see ``BlockFiles.discard``."""
    nbytes: int
    used_at: float
    """Unix seconds of its last use."""
    block_hash: BlockHash | None = None
    """None, as ``parent``: its header can't be read."""
    parent: BlockHash | None = None


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file of the served namespace that was removed, or was to be."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CensusSlice:
    """At most SLICE_FILES files."""

    found: tuple[FoundFile, ...] = ()
    others: tuple[OtherFile, ...] = ()
    damaged: tuple[DamagedFile, ...] = ()
    foreign_bytes: int = 0
    skipped: int = 0
    """Files and folders that could not be read. Files among them are foreign bytes."""
    own_complete: bool = False
    """With this slice the served namespace is known; true of one slice."""
    last: bool = False


def take_census(
    directory: CacheDirectory, files: WholeFiles, namespace: str
) -> Iterator[CensusSlice]:
    """Go through everything under the root.

    Raises OSError when the root or the namespace's folder can't be listed, or when this process
    is out of descriptors or memory. A census that has raised is void.
    """
    return _Census(directory, files, namespace).slices()


class _Census:
    def __init__(self, directory: CacheDirectory, files: WholeFiles, namespace: str) -> None:
        self._directory = directory
        self._fs = directory.fs
        self._root = directory.root
        self._files = files
        self._namespace = namespace
        self._buffer = memoryview(bytearray(_FIRST_READ))
        self._foreign_folders: list[str] = []
        self._clear()

    def _clear(self) -> None:
        self._found: list[FoundFile] = []
        self._others: list[OtherFile] = []
        self._damaged: list[DamagedFile] = []
        self._foreign_bytes = self._skipped = self._count = 0

    def slices(self) -> Iterator[CensusSlice]:
        namespaces: list[str] = []
        has_blocks = False
        for name, is_folder in self._fs.listdir(self._root):
            if is_folder and name == BLOCKS:
                has_blocks = True
            else:
                self._set_aside(name, is_folder)
        if has_blocks:
            for name, is_folder in self._fs.listdir(f"{self._root}/{BLOCKS}"):
                if is_folder and (name == self._namespace or is_namespace_name(name)):
                    namespaces.append(name)
                else:
                    self._set_aside(f"{BLOCKS}/{name}", is_folder)
        if self._namespace in namespaces:
            namespaces.remove(self._namespace)
            yield from self._walk_namespace(self._namespace, own=True)
        yield self._cut(own_complete=True)
        for name in namespaces:
            yield from self._walk_namespace(name, own=False)
        while self._foreign_folders:
            folder = self._foreign_folders.pop()
            for name, is_folder in self._list(folder):
                self._set_aside(f"{folder}/{name}", is_folder)
                if self._count >= SLICE_FILES:
                    yield self._cut()
        yield self._cut(last=True)

    def _cut(self, *, own_complete: bool = False, last: bool = False) -> CensusSlice:
        part = CensusSlice(
            tuple(self._found),
            tuple(self._others),
            tuple(self._damaged),
            self._foreign_bytes,
            self._skipped,
            own_complete,
            last,
        )
        self._clear()
        return part

    def _walk_namespace(self, namespace: str, *, own: bool) -> Iterator[CensusSlice]:
        base = f"{BLOCKS}/{namespace}"
        kinds = [base]
        while kinds:
            kind = kinds.pop()
            top = kind == base
            entries = self._fs.listdir(f"{self._root}/{kind}") if own and top else self._list(kind)
            for name, is_folder in entries:
                path = f"{kind}/{name}"
                if is_folder and is_shard_name(name):
                    yield from self._walk_shard(path, name, namespace if own else None, top)
                elif is_folder and top and name == SIDECARS:
                    kinds.append(path)
                else:
                    self._set_aside(path, is_folder)

    def _walk_shard(
        self, folder: str, shard: str, namespace: str | None, of_blocks: bool
    ) -> Iterator[CensusSlice]:
        for name, is_folder in self._list(folder):
            path = f"{folder}/{name}"
            if not is_folder and is_block_name(name, shard):
                self._look_at(path, name.removesuffix(SUFFIX), namespace, of_blocks)
            elif not is_folder and (owner := owner_of_temporary(name)) is not None:
                self._sweep(path, owner)
            else:
                self._set_aside(path, is_folder)
            self._count += 1
            if self._count >= SLICE_FILES:
                yield self._cut()

    def _look_at(self, path: str, name: str, namespace: str | None, of_block: bool) -> None:
        """``namespace``: the served one; None: the file is in another."""
        try:
            fd, status = self._files.open(path)
            try:
                outline = self._outline(fd, status.st_size)
            finally:
                with suppress(OSError):
                    self._fs.close(fd)
        except NotAFile:
            self._set_aside(path, is_folder=False)
            return
        except OSError as error:
            self._skip(path, error)
            self._set_aside(path, is_folder=False)
            return
        reason = ""
        if isinstance(outline, OtherFormat):
            namespace = None
        elif isinstance(outline, Unreadable):
            reason = str(outline)
        elif namespace is not None:
            reason = _mismatch(outline, name, namespace, of_block)
        nbytes, used_at = status.st_size, status.st_mtime
        if namespace is None:
            if isinstance(outline, Outline):
                names = outline.identity.block_hash, outline.identity.parent
                self._others.append(OtherFile(path, nbytes, used_at, *names))
            else:
                self._others.append(OtherFile(path, nbytes, used_at))
        elif reason:
            self._damaged.append(DamagedFile(path, reason))
            if not self._files.remove_damaged(path, status):
                self._set_aside(path, is_folder=False)
        elif isinstance(outline, Outline):
            self._found.append(FoundFile(outline.identity, nbytes, used_at, outline.carries))

    def _outline(self, fd: int, size: int) -> Outline | Unreadable:
        """Who the file is, or why it can't be told."""
        start = self._buffer[: min(size, _FIRST_READ)]
        start = start[: self._files.fill(fd, start)]
        if len(start) >= LENGTH.size:
            whole = LENGTH.size + LENGTH.unpack_from(start)[0]
            if len(start) < whole <= min(size, LENGTH.size + HEADER_MAX):
                start = memoryview(bytearray(whole))
                start = start[: self._files.fill(fd, start)]
        try:
            return decode_outline(start, size)
        except Unreadable as damage:
            return damage

    def _sweep(self, path: str, owner: str) -> None:
        directory = self._directory
        try:
            if owner == directory.owner:
                dead = path not in directory.writing
            else:
                dead = self._fs.lstat(f"{self._root}/{path}").st_mtime < directory.since
            if dead:
                self._files.remove(path)
            elif owner != directory.owner:
                self._set_aside(path, is_folder=False)
        except OSError as error:
            self._skip(path, error)
            self._set_aside(path, is_folder=False)

    def _set_aside(self, path: str, is_folder: bool) -> None:
        """Count something that is not ours, and never touch it."""
        if is_folder:
            self._foreign_folders.append(path)
            return
        try:
            self._foreign_bytes += self._fs.lstat(f"{self._root}/{path}").st_size
        except OSError as error:
            self._skip(path, error)

    def _list(self, folder: str) -> list[tuple[str, bool]]:
        try:
            return self._fs.listdir(f"{self._root}/{folder}")
        except OSError as error:
            self._skip(folder, error)
            return []

    def _skip(self, path: str, error: OSError) -> None:
        if error.errno in _OUR_SHORTAGE:
            raise error
        if isinstance(error, FileNotFoundError):
            return  # it was removed meanwhile
        self._skipped += 1
        log.debug("the census skipped %s: %s", ascii(path), error.strerror)


def _mismatch(outline: Outline, name: str, namespace: str, of_block: bool) -> str:
    """Why a file of the served namespace is not where it belongs; empty when it is."""
    identity = outline.identity
    if identity.block_hash.hex() != name or identity.namespace != namespace:
        return "the file's name is not the block's"
    if (identity.place is None) != of_block:
        return "a block among the checkpoints, or a checkpoint among the blocks"
    named = chain_hash if of_block else state_hash
    if named(identity.parent, identity.tokens) != identity.block_hash:
        return "the tokens in its header are not the block's"
    return ""
