"""Writes and removes block files, one after another, in a thread of its own.

The order in which it is told is the order on disk, so a parent's file is there before its child's.
What waits can be asked for: a block is readable from the moment it was handed over.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import OrderedDict, deque
from typing import assert_never

from omlx.actors.disk_messages import (
    BatchDone,
    CatchUp,
    CheckTier,
    DeleteBlocks,
    ReadQueued,
    SetWriting,
    SsdWriterMessage,
    TierChecked,
    WriteBlock,
    WriterJob,
    WriterLimits,
)
from omlx.actors.messages import BlockLost, BlockWritten, PagedCacheMessage, WriterStarted
from omlx.cache.block_file import Identity
from omlx.cache.blocks import BlockHash, chain_hash
from omlx.cache.checkpoint_file import is_state
from omlx.cache.codecs import NotFinite
from omlx.core.plan import HostBlock
from omlx.disk.block_files import Files, InThread
from omlx.disk.whole_files import Obstructed
from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref

log = logging.getLogger(__name__)

BATCH = 16
"""Jobs that go to the thread together: going there takes longer than writing a small block."""

BATCH_S = 0.1
"""After this the thread reports what it has done."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Promise = asyncio.Future[object]

MISSING = 2048
"""Names of blocks that could not be written. What still waits hangs on the younger ones."""


class SsdWriter(Actor):
    name = "ssd_writer"
    capacity = 1024

    def __init__(self, files: Files, cache: Ref[PagedCacheMessage], in_thread: InThread) -> None:
        self._files = files
        self._cache = cache
        self._in_thread = in_thread
        self._jobs: deque[tuple[WriterJob, Promise | None]] = deque()
        self._batch: list[tuple[WriterJob, Promise | None]] = []
        """What the thread is at."""
        self._waiting: dict[BlockHash, WriteBlock] = {}
        """Blocks that have no file yet."""
        self._missing: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that could not be written: what hangs on them is not written either."""

    async def on_start(self) -> None:
        self._cache.offer(WriterStarted())

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._batch

    async def receive(self, message: SsdWriterMessage) -> object:
        match message:
            case WriteBlock():
                self._waiting[message.ticket.block_hash] = message
                self._take(message)
                return None
            case DeleteBlocks():
                self._take(message)
                return None
            case CatchUp() | CheckTier():
                promise = asyncio.get_running_loop().create_future()
                self._take(message, promise)
                return promise
            case SetWriting(codec, floor_bytes):
                return WriterLimits(*self._files.configure(codec, floor_bytes))
            case ReadQueued(identity):
                return self._queued(identity)
            case BatchDone(outcomes):
                if isinstance(outcomes, Exception):
                    raise outcomes
                batch, self._batch = self._batch, []
                self._jobs.extendleft(reversed(batch[len(outcomes) :]))
                for (job, promise), outcome in zip(batch, outcomes, strict=False):
                    self._done(job, promise, outcome)
                self._work()
                return None
        assert_never(message)

    def _take(self, job: WriterJob, promise: Promise | None = None) -> None:
        self._jobs.append((job, promise))
        self._work()

    def _work(self) -> None:
        if self._batch or not self._jobs:
            return
        self._batch = [self._jobs.popleft() for _ in range(min(BATCH, len(self._jobs)))]
        jobs, missing = tuple(job for job, _ in self._batch), frozenset(self._missing)
        self.pipe(self._in_thread(self._do, jobs, missing), wrap=BatchDone)

    def _queued(self, identity: Identity) -> HostBlock | None:
        """The payload of a block, or of a checkpoint that waits by itself or with its block."""
        job = self._waiting.get(identity.block_hash)
        if job is not None:
            states = identity.place is not None
            return tuple(t for t in job.payload if is_state(t) is states)
        if identity.place is not None:
            job = self._waiting.get(chain_hash(identity.parent, identity.tokens))
            if job is not None and job.ticket.carries is not None:
                return tuple(t for t in job.payload if is_state(t))
        return None

    def _done(self, job: WriterJob, promise: Promise | None, outcome: object) -> None:
        match outcome:
            case BlockWritten(identity):
                self._missing.pop(identity.block_hash, None)
                self._cache.offer(outcome)
            case BlockLost(block_hash):
                self._missing[block_hash] = None
                if len(self._missing) > MISSING:
                    self._missing.popitem(last=False)
                self._cache.offer(outcome)
            case _:
                pass
        if isinstance(job, WriteBlock) and self._waiting.get(job.ticket.block_hash) is job:
            del self._waiting[job.ticket.block_hash]
        if promise is not None and not promise.done():
            promise.set_result(outcome)

    # ── in the thread ────────────────────────────────────────────────────────────────────────

    def _do(self, jobs: tuple[WriterJob, ...], missing: frozenset[BlockHash]) -> list[object]:
        """One outcome for each job that was done; on a slow disk that may not be all of them."""
        failed = set(missing)
        outcomes: list[object] = []
        until = time.monotonic() + BATCH_S
        for job in jobs:
            if outcomes and time.monotonic() > until:
                break
            match job:
                case WriteBlock(ticket):
                    outcome = self._write(job, failed)
                    if isinstance(outcome, BlockLost):
                        failed.add(ticket.block_hash)
                    else:
                        failed.discard(ticket.block_hash)
                    outcomes.append(outcome)
                case DeleteBlocks():
                    outcomes.append(self._delete(job))
                case CheckTier(write):
                    outcomes.append(self._check(write))
                case CatchUp():
                    outcomes.append(None)
        return outcomes

    def _write(self, job: WriteBlock, failed: set[BlockHash]) -> BlockWritten | BlockLost:
        block = job.ticket
        if block.parent in failed:
            return BlockLost(block.block_hash, "its parent has no file")
        identity = Identity(
            self._files.namespace, block.block_hash, block.parent, block.tokens, block.place
        )
        try:
            nbytes = self._files.write(identity, job.payload, block.carries)
        except (NotFinite, Obstructed) as error:
            return BlockLost(block.block_hash, str(error))
        except OSError as error:
            # Whatever it is, the next write would most likely fail as well.
            reason, full = error.strerror or "unwritable", error.errno in NO_ROOM
            return BlockLost(block.block_hash, reason, tier_down=True, full=full)
        return BlockWritten(identity, nbytes, block.carries)

    def _delete(self, job: DeleteBlocks) -> None:
        problem: str | None = None
        for block_hash in job.block_hashes:
            try:
                self._files.remove(block_hash)
            except OSError as error:
                problem = error.strerror
        for path in job.paths:
            try:
                self._files.discard(path)
            except OSError as error:
                problem = error.strerror
        if problem is not None:  # once for all of them, they fail together
            log.warning("some cache files were not removed: %s", problem)

    def _check(self, write: bool) -> TierChecked:
        try:
            self._files.check(write=write)
        except OSError as error:
            reason, full = error.strerror or "unusable", error.errno in NO_ROOM
            return TierChecked(self._files.generation, reason, full)
        return TierChecked(self._files.generation)
