"""A disk in memory, and threads that take virtual time.

The disk keeps whole files, encoded and verified by the real format. It can be full, refuse to be
read, and damage what it keeps.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from omlx.cache.block_file import Identity, Unreadable, decode_header, encode_header
from omlx.cache.block_tensors import decode
from omlx.cache.blocks import BlockHash
from omlx.cache.checkpoints import Place
from omlx.core.plan import HostBlock
from omlx.disk.census import CensusSlice, DamagedFile, FoundFile
from omlx.disk.verify import Verified

SLICE = 5
"""Files; few, so that much can happen between two slices."""


class FakeThread:
    """Runs one call after another, each after ``delay()`` virtual seconds.

    As with a real thread, a call that was begun is carried out even if nobody waits for it.
    """

    def __init__(self, delay: Callable[[], float]) -> None:
        self.delay = delay
        self.free_at_s = 0.0

    def __call__(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self.free_at_s = max(self.free_at_s, loop.time()) + self.delay()

        def run() -> None:
            try:
                result = function(*args)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        loop.call_at(self.free_at_s, run)
        return done


class FakeThreads:
    """Several of them: each call goes to the one that is free first."""

    def __init__(self, count: int, delay: Callable[[], float]) -> None:
        self._threads = [FakeThread(delay) for _ in range(count)]

    def __call__(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        thread = min(self._threads, key=lambda thread: thread.free_at_s)
        return thread(function, *args)


class FakeDisk:
    """Block files of one namespace, by the block's name."""

    def __init__(self, namespace: str = "fake", capacity_bytes: int = 1 << 40) -> None:
        self.namespace = namespace
        self.capacity_bytes = capacity_bytes
        self.generation = 0
        self.unreadable = False
        self.used_at = 0.0
        self.files: dict[BlockHash, bytes] = {}
        self.times: dict[BlockHash, float] = {}
        self.writes = 0

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.files.values()))

    def configure(self, codec: str | None, floor_bytes: int | None) -> tuple[str, int]:
        return codec or "fp32", floor_bytes or 0

    def prepare(self) -> None:
        self._may_refuse()

    def check(self, *, write: bool) -> None:
        if self.nbytes >= self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, identity: Identity, tensors: HostBlock, carries: Place | None = None, /) -> int:
        assert identity.place is carries is None, "this disk keeps blocks, and no states"
        header = encode_header(identity, tensors, block_size=0, layer_kinds="kv")
        content = header + b"".join(tensor.data for tensor in tensors)
        others = self.nbytes - len(self.files.get(identity.block_hash, b""))
        if others + len(content) > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.writes += 1
        self.files[identity.block_hash] = content
        self._use(identity.block_hash)
        return len(content)

    def read(self, expected: Identity, /) -> HostBlock:
        self._may_refuse()
        if expected.block_hash not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        content = self.files[expected.block_hash]
        try:
            header = decode_header(content, len(content))
            wanted = [(name, dtype, shape) for name, dtype, shape, _, _ in header.tensors]
            tensors = decode(expected, wanted, memoryview(content))
        except Unreadable:
            del self.files[expected.block_hash]
            raise
        self._use(expected.block_hash)
        return tensors

    def remove(self, block_hash: BlockHash, /) -> None:
        self.files.pop(block_hash, None)

    def discard(self, path: str, /) -> None:
        raise AssertionError(f"this disk has no others, and none at {path}")

    def census(self) -> Iterator[CensusSlice]:
        """In slices of a few files; what happens between two of them shows in the later one."""
        self._may_refuse()
        names = list(self.files)
        while names:
            yield self._take([names.pop() for _ in range(min(len(names), SLICE))])
            self._may_refuse()
        yield CensusSlice(own_complete=True)
        yield CensusSlice(last=True)

    def verify(self, stopped: Callable[[], bool], /) -> Verified:
        raise AssertionError("nobody verifies this disk")

    def _take(self, names: list[BlockHash]) -> CensusSlice:
        found: list[FoundFile] = []
        damaged: list[DamagedFile] = []
        for name in names:
            if name not in self.files:
                continue
            content = self.files[name]
            try:
                identity = decode_header(content, len(content)).identity
                if (identity.namespace, identity.block_hash) != (self.namespace, name):
                    raise Unreadable("the file's name is not the block's")
            except Unreadable as damage:
                del self.files[name]
                damaged.append(DamagedFile(name.hex(), str(damage)))
            else:
                found.append(FoundFile(identity, len(content), self.times[name]))
        return CensusSlice(tuple(found), damaged=tuple(damaged))

    # ── what goes wrong ──────────────────────────────────────────────────────────────────────

    def damage(self, rng: random.Random) -> None:
        """Tear a file, flip a bit of it, or let it vanish."""
        if not self.files:
            return
        name = rng.choice(sorted(self.files))
        content = bytearray(self.files[name])
        match rng.choice(["tear", "flip", "vanish"]):
            case "tear":
                self.files[name] = bytes(content[: rng.randrange(len(content))])
            case "flip":
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                self.files[name] = bytes(content)
            case _:
                del self.files[name]

    def _may_refuse(self) -> None:
        if self.unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _use(self, name: BlockHash) -> None:
        self.used_at += 1.0
        self.times[name] = self.used_at
