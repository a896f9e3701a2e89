"""Block files on disk: made, read, listed and removed. Called in the reader's and writer's threads.

    <root>/lock
    <root>/blocks.noindex/<namespace>/<first 2 hex>/<sha256 of the block>.safetensors
    <root>/blocks.noindex/<namespace>/_gdn_sidecars/<first 2 hex>/<sha256>.safetensors

A file is written under a temporary name in its own folder and renamed when it is whole. It is not
fsynced: after a power cut it may be missing, short or full of zeros, and each of these is found by
its size or its checksums when it is read, and is a miss. Names that are not our own pattern are
never touched, and symbolic links are never followed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from omlx.actors.messages import FoundFile
from omlx.cache.block_file import (
    HEADER_MAX,
    LENGTH,
    Header,
    HostTensor,
    Identity,
    Unreadable,
    decode,
    decode_header,
    encode_header,
)
from omlx.cache.blocks import BlockHash, chain_hash
from omlx.cache.checkpoint_file import decode_embedded, decode_states, encode_states
from omlx.cache.checkpoints import Place
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.core.plan import HostBlock

log = logging.getLogger(__name__)

BLOCKS = "blocks.noindex"
"""Spotlight leaves folders alone that end in .noindex."""

SIDECARS = "_gdn_sidecars"

_BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{64}\.([0-9]+-[0-9a-f]{16})\.[0-9a-f]{16}\.tmp")
_PROCESS = f"{os.getpid()}-{secrets.token_hex(8)}"
"""The number alone would not do: in a container each server has the same one."""
_FOLDER_NAME = re.compile(r"[0-9a-f]{2}")
_FIRST_READ = 8192
"""A header of a 256-token block fits; longer ones cost a second read."""


InThread = Callable[..., Awaitable[Any]]
"""``await in_thread(function, *args)`` calls it where waiting for a disk holds nobody up."""


class Files(Protocol):
    """What the reader and the writer use of BlockFiles."""

    namespace: str

    def prepare(self) -> None: ...

    def write(
        self, identity: Identity, tensors: HostBlock, carries: Place | None = None, /
    ) -> int: ...

    def read(self, expected: Identity, /) -> HostBlock: ...

    def remove(self, block_hash: BlockHash, /) -> None: ...

    def scan(self) -> Iterable[FoundFile]: ...


class CacheDirectoryLocked(Exception):
    """Another server uses this cache directory."""


class CacheDirectoryUnusable(Exception):
    """The cache directory can't be made or written; the text names path and reason."""


class DirectoryLock:
    """Keeps a second server out of one cache directory. The kernel frees it when we die."""

    def __init__(self, root: Path) -> None:
        """Raises CacheDirectoryLocked or CacheDirectoryUnusable."""
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(root / "lock", flags, 0o600)
        except OSError as error:
            raise CacheDirectoryUnusable(
                f"the cache directory {root} can't be used: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._fd, 32).decode(errors="replace").strip()
            os.close(self._fd)
            raise CacheDirectoryLocked(
                f"the cache directory {root} is used by process {owner or 'unknown'}; "
                "stop that server or name another directory with --ssd-cache-dir"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


class BlockFiles:
    """The files of one namespace under one root."""

    def __init__(
        self,
        root: Path,
        namespace: str,
        config: ModelCacheConfig,
        block_size: int,
        codec: str = "fp32",
    ) -> None:
        self.namespace = namespace
        self._base = root / BLOCKS / namespace
        self._config = config
        self._block_size = block_size
        self.codec = codec
        """What checkpoints are written with; each is read by its own metadata."""
        self._layer_kinds = ",".join(layer.kind for layer in config.layers)

    def prepare(self) -> None:
        """Make the folder and sweep temporaries of former processes. Raises OSError."""
        _make_folder(self._base)
        for folder in self._folders():
            for entry in os.scandir(folder):
                match = _TEMPORARY_NAME.fullmatch(entry.name)
                if match and match[1] != _PROCESS:  # the lock keeps others out: it is dead
                    with suppress(OSError):
                        Path(entry.path).unlink()

    def path(self, block_hash: BlockHash, *, checkpoint: bool = False) -> Path:
        name = block_hash.hex()
        base = self._base / SIDECARS if checkpoint else self._base
        return base / name[:2] / f"{name}.safetensors"

    def write(self, identity: Identity, tensors: HostBlock, carries: Place | None = None) -> int:
        """Make the block's file; returns its bytes. Raises OSError and leaves nothing behind."""
        more: dict[str, str] = {}
        place = carries if identity.place is None else identity.place
        if place is not None:
            states = self._config.states
            block, raw = tensors[: -len(states)], tensors[-len(states) :]
            encoded, more = encode_states(self.codec, identity, place, raw, states)
            tensors = (*block, *encoded)
        header = encode_header(
            identity,
            tensors,
            block_size=self._block_size,
            layer_kinds=self._layer_kinds,
            more=more,
        )
        target = self.path(identity.block_hash, checkpoint=identity.place is not None)
        name = f".{target.stem}.{_PROCESS}.{secrets.token_hex(8)}.tmp"
        temporary = target.parent / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            _make_folder(target.parent)
            fd = os.open(temporary, flags, 0o600)
        try:
            try:
                written = _write_all(fd, [memoryview(header), *(t.data for t in tensors)])
            finally:
                os.close(fd)
            temporary.rename(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        return written

    def read(self, expected: Identity) -> tuple[HostTensor, ...]:
        """The tensors, verified and decoded. Raises Unreadable (proven damage) or OSError."""
        count = len(expected.tokens) // 4
        checkpoint = expected.place is not None
        payload_bytes = count * self._config.bytes_per_token + self._config.checkpoint_bytes
        embedded = False
        path = self.path(expected.block_hash, checkpoint=checkpoint)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if not checkpoint:
                raise
            embedded = True
            path = self.path(chain_hash(expected.parent, expected.tokens))
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size > payload_bytes + HEADER_MAX + LENGTH.size:
                raise Unreadable(f"the file has {size} bytes, far more than the block")
            data = _read_all(fd, size)
            with suppress(OSError):
                os.utime(fd)  # recency survives a restart
        finally:
            os.close(fd)
        if embedded:
            return decode_embedded(expected, data, self._config.states)
        if checkpoint:
            return decode_states(expected, data, self._config.states)
        wanted = [(spec.name, spec.dtype, spec.shape(count)) for spec in self._config.tensors]
        return decode(expected, wanted, data)

    def remove(self, block_hash: BlockHash) -> None:
        """Harmless when it is gone already."""
        with suppress(FileNotFoundError):
            self.path(block_hash).unlink()
        with suppress(FileNotFoundError):
            self.path(block_hash, checkpoint=True).unlink()

    def scan(self) -> Iterator[FoundFile]:
        """Every file with a sound header, unordered. Damaged ones are removed."""
        for folder in self._folders():
            for entry in os.scandir(folder):
                if not _BLOCK_NAME.fullmatch(entry.name):
                    continue
                try:
                    found = self._found(Path(entry.path))
                except Unreadable as damage:
                    log.warning("removed a damaged cache file: %s", damage)
                    with suppress(OSError):
                        Path(entry.path).unlink()
                except OSError as error:
                    log.warning("skipped a cache file: %s", error.strerror)
                else:
                    yield found

    def _found(self, path: Path) -> FoundFile:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            header = _read_header(fd, status.st_size)
        finally:
            os.close(fd)
        identity = header.identity
        if (identity.place is not None) != (path.parent.parent.name == SIDECARS):
            raise Unreadable("a block among the checkpoints, or a checkpoint among the blocks")
        if identity.namespace != self.namespace or identity.block_hash.hex() != path.stem:
            raise Unreadable("the file's name is not the block's")
        carries = Place[header.metadata["carries"]] if "carries" in header.metadata else None
        return FoundFile(identity, status.st_size, status.st_mtime, carries)

    def _folders(self) -> list[str]:
        folders: list[str] = []
        for base in (self._base, self._base / SIDECARS):
            with suppress(FileNotFoundError):
                folders += [
                    entry.path
                    for entry in os.scandir(base)
                    if _FOLDER_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        return folders


def _read_header(fd: int, size: int) -> Header:
    start = os.pread(fd, _FIRST_READ, 0)
    if len(start) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(start)
        if len(start) < LENGTH.size + length <= HEADER_MAX:
            start = os.pread(fd, LENGTH.size + length, 0)
    return decode_header(start, size)


def _read_all(fd: int, size: int) -> memoryview:
    """The whole file. Short when it shrank meanwhile: then its size does not fit its header."""
    data = memoryview(bytearray(size))
    position = 0
    while position < size:
        count = os.preadv(fd, [data[position:]], position)
        if count == 0:
            break
        position += count
    return data[:position]


def _write_all(fd: int, parts: list[memoryview]) -> int:
    total = 0
    while parts:
        count = os.writev(fd, parts)
        total += count
        while parts and count >= parts[0].nbytes:
            count -= parts[0].nbytes
            parts.pop(0)
        if parts and count:
            parts[0] = parts[0][count:]
    return total


def _make_folder(folder: Path) -> None:
    """For us alone at every level; ``mkdir`` with ``parents`` lets others into those."""
    if not folder.parent.exists():
        _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
