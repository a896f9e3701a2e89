"""A file system that fails when it is told to, and the blocks that the tests write to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from omlx.cache.block_file import HostTensor, Identity
from omlx.cache.blocks import chain_hash, pack_tokens, root_hash
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig
from omlx.core.plan import HostBlock
from omlx.disk.block_files import BlockFiles
from omlx.disk.directory import CacheDirectory
from omlx.disk.filesystem import FileSystem, LocalFileSystem

CONFIG = ModelCacheConfig(
    (LayerConfig(LayerKind.KV, kv_heads=1, key_dim=2, value_dim=2, dtype="float16"),)
)
NAMESPACE = "0123456789abcdef"
OTHER = "f" * 16
COUNT = 4

CODES = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOENT,
    errno.EINTR,
    errno.ESTALE,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
)


def identity(seed: int = 0, namespace: str = NAMESPACE) -> Identity:
    root, tokens = root_hash(namespace), pack_tokens([seed] * COUNT)
    return Identity(namespace, chain_hash(root, tokens), root, tokens)


def payload(seed: int = 0) -> HostBlock:
    return tuple(
        HostTensor(spec.name, spec.dtype, spec.shape(COUNT), memoryview(bytes([seed + i]) * 16))
        for i, spec in enumerate(CONFIG.tensors)
    )


def bytes_of(tensors: Sequence[HostTensor]) -> list[bytes]:
    return [bytes(tensor.data) for tensor in tensors]


_acquired: list[CacheDirectory] = []


def acquired(root: Path, fs: FileSystem | None = None) -> CacheDirectory:
    """Released at the test's end."""
    directory = CacheDirectory(root, fs=fs)
    directory.acquire()
    _acquired.append(directory)
    return directory


def release_all() -> None:
    while _acquired:
        _acquired.pop().release()


def block_files(
    directory: CacheDirectory, namespace: str = NAMESPACE, floor_bytes: int = 0
) -> BlockFiles:
    files = BlockFiles(directory, namespace, CONFIG, COUNT, floor_bytes=floor_bytes)
    files.prepare()
    return files


def below(folder: Path) -> list[str]:
    """Every file and link, and no folder."""
    found: list[str] = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            found.append(str(path.relative_to(folder)))
    return sorted(found)


class FaultyFileSystem(LocalFileSystem):
    """The local one. Calls are counted in ``calls``, as (kind, path), from ``watch`` on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.opened: dict[int, str] = {}
        self.chunk_bytes: int | None = None
        """``preadv`` and ``writev`` move at most so many bytes at once."""
        self.free: int | None = None
        self.before: Callable[[str, str], None] | None = None
        """Told each call, before it is made."""
        self._code = 0
        self._at = -1
        self._always: tuple[str, ...] = ()

    def watch(self, at: int = -1, code: int = 0, always: Sequence[str] = ()) -> None:
        """Count from here on. The call number ``at`` fails, and all of the kinds ``always``."""
        self.calls, self._at, self._code, self._always = [], at, code, tuple(always)

    def _step(self, kind: str, path: str) -> None:
        self.calls.append((kind, path))
        if self.before is not None:
            self.before(kind, path)
        if len(self.calls) - 1 == self._at or kind in self._always:
            raise OSError(self._code, os.strerror(self._code))

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._step("open", path)
        fd = super().open(path, flags, mode)
        self.opened[fd] = path
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)  # as Linux does: the descriptor is gone, whatever is reported
        self._step("close", self.opened.pop(fd))

    def fstat(self, fd: int) -> os.stat_result:
        self._step("fstat", self.opened[fd])
        return super().fstat(fd)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._step("preadv", self.opened[fd])
        return super().preadv(fd, buffer[: self.chunk_bytes], offset)

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int:
        self._step("writev", self.opened[fd])
        if self.chunk_bytes is not None:
            parts = [parts[0][: self.chunk_bytes]]
        return super().writev(fd, parts)

    def truncate(self, fd: int, length: int) -> None:
        self._step("truncate", self.opened[fd])
        super().truncate(fd, length)

    def touch(self, fd: int) -> None:
        self._step("touch", self.opened[fd])
        super().touch(fd)

    def flock(self, fd: int) -> None:
        self._step("flock", self.opened[fd])
        super().flock(fd)

    def stat(self, path: str) -> os.stat_result:
        self._step("stat", path)
        return super().stat(path)

    def lstat(self, path: str) -> os.stat_result:
        self._step("lstat", path)
        return super().lstat(path)

    def listdir(self, path: str) -> list[tuple[str, bool]]:
        self._step("listdir", path)
        return super().listdir(path)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        self._step("mkdir", path)
        super().mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        self._step("rmdir", path)
        super().rmdir(path)

    def rename(self, source: str, target: str) -> None:
        self._step("rename", source)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._step("unlink", path)
        super().unlink(path)

    def free_bytes(self, path: str) -> int:
        self._step("free_bytes", path)
        return super().free_bytes(path) if self.free is None else self.free
