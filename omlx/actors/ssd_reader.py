"""Reads block files in a few threads, several reads beside each other, and verifies them there."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import assert_never

import orjson

from omlx.actors.daemon_threads import DaemonThreads
from omlx.actors.disk_messages import (
    FileRead,
    FilesVerified,
    ReadBlocks,
    ReadQueued,
    ScanFiles,
    SsdReaderMessage,
    SsdWriterMessage,
    StopReading,
    StopVerifying,
    VerifyFiles,
)
from omlx.actors.messages import PagedCacheMessage, ReaderStuck
from omlx.cache.block_file import Identity, Unreadable
from omlx.cache.tickets import BlockRef
from omlx.core.plan import HostBlock, LostFile
from omlx.core.reads import NotRead, Read, ReadOutcome, ReadQueue
from omlx.disk.block_files import Files, InThread
from omlx.disk.census import CensusSlice
from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import ActorGone, Rejected, Tick

log = logging.getLogger(__name__)

READ_THREADS = 3
"""One may hang, and files are still read beside each other. Measured on two cores, 70 MB of KV in
files of 12 MB: 2, 3 and 4 threads read and verify 2.8 to 4.3, 3.8 and 3.6 GB/s from the page cache,
and from the disk what it gives."""
STUCK_S = 10.0
"""A file is some tens of megabytes: even a hard disk that spins up first has it by then."""


class Unlistable(Rejected):
    """The cache directory can't be listed now; the text says why."""


class Verifying(Rejected):
    """The files are being verified already."""


class SsdReader(Actor):
    """``in_pool`` has READ_THREADS threads; the census has one of its own, and holds up no read."""

    name = "ssd_reader"
    capacity = 64

    def __init__(
        self,
        files: Files,
        cache: Ref[PagedCacheMessage],
        writer: Ref[SsdWriterMessage] | None,
        in_pool: InThread,
        in_census: InThread,
    ) -> None:
        self._files = files
        self._cache = cache
        self._writer = writer
        self._in_pool = in_pool
        self._in_census = in_census
        self._queue = ReadQueue(READ_THREADS, STUCK_S)
        self._census: Iterator[CensusSlice] | None = None
        self._verifying: threading.Event | None = None
        """Set to stop it."""
        self._files_verified = 0

    async def on_start(self) -> None:
        self.every(1.0, Tick)

    async def receive(self, message: SsdReaderMessage) -> object:
        match message:
            case ReadBlocks(refs, number):
                answer: asyncio.Future[ReadOutcome] = self._loop.create_future()
                self._queue.add(Read(number, refs, partial(_settle, answer)))
                self._begin_files()
                return answer
            case StopReading(number):
                self._queue.stop(number)
                return None
            case FileRead(ticket, outcome):
                if isinstance(outcome, Exception):
                    raise outcome
                self._queue.file_read(ticket, outcome)
                self._begin_files()
                return None
            case ScanFiles(begin):
                if begin:
                    self._census = self._files.census()
                if self._census is None:
                    raise Unlistable("no census is under way")
                return asyncio.ensure_future(self._in_census(self._next_slice, self._census, begin))
            case VerifyFiles():
                return self._verify()
            case StopVerifying():
                self._stop_verifying()
                return None
            case FilesVerified():
                return None if self._verifying is None else self._files_verified
            case Tick():
                late = self._queue.expire(self._loop.time())
                if late:
                    reason = f"{late} reads did not end in {STUCK_S:g} s"
                    log.warning("%s; what they were for is computed", reason)
                    self._cache.offer(ReaderStuck(reason))
                return None
        assert_never(message)

    def _begin_files(self) -> None:
        for ticket, ref in self._queue.next_files(self._loop.time()):

            def done(outcome: object, ticket: int = ticket) -> FileRead:
                return FileRead(ticket, outcome)  # pyright: ignore[reportArgumentType]

            queued = ref.queued and self._writer is not None
            self.pipe(self._find(ref) if queued else self._in_pool(self._read, ref), wrap=done)

    async def _find(self, ref: BlockRef) -> HostBlock | NotRead:
        """A block that waits to be written is the writer's; it may have its file just now."""
        payload = None
        if self._writer is not None:
            with suppress(ActorGone, Rejected):
                payload = await self._writer.ask(ReadQueued(self._identity(ref)))
        if payload is not None:
            return payload
        return await self._in_pool(self._read, ref)

    def _identity(self, ref: BlockRef) -> Identity:
        return Identity(self._files.namespace, ref.block_hash, ref.parent, ref.tokens, ref.place)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _read(self, ref: BlockRef) -> HostBlock | NotRead:
        """Read and verify one file. In a thread of the pool."""
        try:
            return self._files.read(self._identity(ref))
        except Unreadable as damage:
            log.warning("a damaged cache file is removed and recomputed: %s", damage)
            return NotRead(str(damage), LostFile(ref.block_hash, corrupt=True))
        except FileNotFoundError:
            return NotRead("the file is gone", LostFile(ref.block_hash, corrupt=False))
        except OSError as error:
            # The file may be sound: it is a miss now and stays where it is.
            log.warning("a cache file can't be read now: %s", error.strerror)
            return NotRead(error.strerror or "unreadable")

    def _next_slice(self, census: Iterator[CensusSlice], begin: bool) -> CensusSlice:
        """In the thread of the census."""
        try:
            if begin:
                self._files.prepare()
            part = next(census, None)
        except OSError as error:
            raise Unlistable(f"the cache directory can't be listed: {error.strerror}") from None
        if part is None:
            raise Unlistable("the census has ended")
        return part

    # ── verifying ────────────────────────────────────────────────────────────────────────────

    async def on_stop(self) -> None:
        self._stop_verifying()

    def _verify(self) -> asyncio.Future[str]:
        """In a thread of its own, that ends with it: it takes minutes, and is asked for seldom."""
        if self._verifying is not None:
            raise Verifying("the files are being verified already")
        stop = self._verifying = threading.Event()
        self._files_verified = 0
        thread = DaemonThreads(1, "ssd-verify")
        verified = thread(self._verify_files, stop)
        thread.close(0.0)
        return asyncio.ensure_future(self._ended(verified))

    async def _ended(self, verified: asyncio.Future[str]) -> str:
        try:
            return await verified
        finally:
            self._stop_verifying()
            self._verifying = None

    def _stop_verifying(self) -> None:
        if self._verifying is not None:
            self._verifying.set()

    def _verify_files(self, stop: threading.Event) -> str:
        """In the thread."""

        def stopped() -> bool:
            self._files_verified = next(looked_at)
            return stop.is_set()

        looked_at = count()  # it is asked before each file
        try:
            return orjson.dumps(self._files.verify(stopped).as_json()).decode()
        except OSError as error:
            raise Unlistable(f"the cache directory can't be listed: {error.strerror}") from None


def _settle(answer: asyncio.Future[ReadOutcome], outcome: ReadOutcome) -> None:
    if not answer.done():
        answer.set_result(outcome)
