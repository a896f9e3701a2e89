"""The cache's books behind a mailbox: one Settle a step, and what the disk reports."""

from __future__ import annotations

import logging
from collections import Counter
from typing import assert_never

from omlx.actors.messages import (
    BlockLost,
    BlockWritten,
    CacheReport,
    CatchUp,
    ClearCache,
    Cleared,
    DeleteBlocks,
    FilesFound,
    FoundFile,
    IsScanned,
    PagedCacheMessage,
    ProbeCache,
    Probed,
    ScanFiles,
    Settle,
    SsdReaderMessage,
    SsdWriterMessage,
    StartOver,
    StatsMessage,
    Tick,
    WriterCaughtUp,
    WriterStarted,
)
from omlx.cache.block_file import Identity
from omlx.cache.blocks import BlockHash
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.core.plan import Settled, SettleWork, Store
from omlx.core.usage import CacheGauges, GdnGauges
from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import Rejected

log = logging.getLogger(__name__)

WRITES_A_STEP = 4
"""Dirty blocks handed to the writer with one step; more would hold up a decoding step."""

RETRY_S = 30
"""Ticks between attempts to write to a tier that failed."""


class PagedCache(Actor):
    name = "paged_cache"
    capacity = 4096

    def __init__(
        self,
        cache: BlockAwarePrefixCache,
        stats: Ref[StatsMessage],
        reader: Ref[SsdReaderMessage] | None,
        writer: Ref[SsdWriterMessage] | None,
        gdn_storage: str = "ssd_sidecar",
        gdn_codec: str = "fp32",
    ) -> None:
        self._cache = cache
        self._gdn_storage, self._gdn_codec = gdn_storage, gdn_codec
        self._stats = stats
        self._reader = reader
        self._writer = writer
        self._scanned = reader is None
        self._scan_due = reader is not None
        self._scan_failing = False
        self._rejected: Counter[str] = Counter()
        self._tier_state = "off" if reader is None else "ok"
        self._retry_in = 0
        self._writer_full = False
        self._catching_up = False
        self._handed_out: set[BlockHash] = set()
        """Dirty blocks that the runner may not have given to the writer yet."""
        self._unheard: set[BlockHash] = set()
        """Writes that were under way when the writer was asked to catch up, less the reported."""
        self._deleting: dict[BlockHash, None] = {}
        """Files that the writer was told to remove, until it has passed them."""
        self._passing: set[BlockHash] = set()
        """Deletes that it was told when it was asked to catch up."""

    async def on_start(self) -> None:
        self.every(1.0, Tick)
        self._scan()

    async def receive(self, message: PagedCacheMessage) -> object:
        cache = self._cache
        match message:
            case StartOver():
                cache.start_over()
                self._handed_out.clear()
                self._delete()
                return None
            case Settle(work):
                return self._settle(work)
            case FilesFound(outcome):
                if isinstance(outcome, Exception):
                    self._scan_failed(outcome)
                else:
                    self._found(outcome)
                return None
            case BlockWritten(identity, nbytes):
                self._written(identity, nbytes)
                return None
            case BlockLost(block_hash, reason, tier_down):
                self._writer_full = False
                self._unheard.discard(block_hash)
                cache.write_failed(block_hash)
                if tier_down:
                    self._degrade(reason)
                return None
            case WriterStarted():
                self._delete_again()
                return None
            case WriterCaughtUp(outcome):
                self._caught_up(outcome)
                return None
            case ClearCache(hot, ssd):
                return self._clear(hot, ssd)
            case ProbeCache(tokens, salt):
                return Probed(*cache.probe(tokens, salt))
            case IsScanned():
                return self._scanned
            case Tick():
                self._tick()
                return None
        assert_never(message)

    def _settle(self, work: SettleWork) -> Settled:
        cache = self._cache
        for seal in work.seals:
            ticket = seal.ticket
            cache.seal(
                ticket.wish,
                ticket.block_id,
                stored=seal.stored,
                writing=seal.writing,
                write=ticket.write,
            )
        for promoted in work.promoted:
            cache.promoted(promoted.ref, stored=promoted.stored)
        for written in work.written:
            self._handed_out.discard(written.ticket.block_hash)
            if not written.writing:
                cache.write_failed(written.ticket.block_hash)
                self._writer_full = True
        for block_ids in work.releases:
            cache.pool.release(block_ids)
        for lost in work.lost:
            self._rejected["corrupt" if lost.corrupt else "gone"] += 1
            cache.lost(lost.block_hash, corrupt=lost.corrupt)
        for chain in work.touches:
            cache.touch(chain)
        grants = tuple(
            (wanted.uid, cache.look_up(wanted.tokens, wanted.salt)) for wanted in work.look_ups
        )
        stores: list[Store] = []
        for uid, start, wish in work.wishes:
            ticket = cache.store(wish)
            if ticket is not None:
                stores.append(Store(uid, start, start + len(wish.tokens) // 4, ticket))
        writes = () if self._writer_full else tuple(cache.take_writes(WRITES_A_STEP))
        self._handed_out.update(ticket.block_hash for ticket in writes)
        self._delete()
        flushing = bool(writes) or (cache.num_dirty > 0 and cache.pending_bytes > 0)
        return Settled(grants, tuple(stores), writes, cache.pool.take_dropped(), flushing)

    def _scan(self) -> None:
        if self._reader is not None and self._scan_due:
            self._scan_due = False
            self.pipe(self._list(self._reader), wrap=FilesFound)

    async def _list(self, reader: Ref[SsdReaderMessage]) -> tuple[FoundFile, ...]:
        if self._writer is not None:
            await self._writer.ask(CatchUp())  # what a former life gave up is not to be found
        return await reader.ask(ScanFiles())

    def _scan_failed(self, error: Exception) -> None:
        if not self._scan_failing:  # said once, not every second
            log.warning("the cache files are not known yet, trying again: %s", error)
        self._scan_failing = self._scan_due = True

    def _found(self, files: tuple[FoundFile, ...]) -> None:
        for file in files:
            name = file.identity
            if name.block_hash in self._deleting:
                continue  # it was still there when the files were listed
            self._cache.found(name.block_hash, name.parent, name.tokens, file.nbytes, name.place)
        self._cache.order_files({f.identity.block_hash: f.used_at for f in files})
        self._enforce_limit()
        self._scanned, self._scan_failing = True, False
        log.info("found %d cache files", len(files))

    def _written(self, identity: Identity, nbytes: int) -> None:
        self._writer_full = False
        self._unheard.discard(identity.block_hash)
        if self._tier_state == "degraded" and self._cache.writable:
            self._tier_state = "ok"
            log.info("the SSD tier takes blocks again")
        if not self._cache.written(identity.block_hash, nbytes):
            # Left by a former life, or given up too early. The file is there, so it counts.
            self._cache.found(
                identity.block_hash, identity.parent, identity.tokens, nbytes, identity.place
            )
            self._enforce_limit()
        self._delete()

    def _enforce_limit(self) -> None:
        self._cache.set_ssd_limit(self._cache.ledger.limit_bytes)
        self._delete()

    def _degrade(self, reason: str) -> None:
        if self._tier_state != "degraded":
            log.warning("the SSD tier takes no blocks for now: %s", reason)
        self._tier_state, self._retry_in = "degraded", RETRY_S
        self._cache.writable = False

    def _catch_up(self) -> None:
        """Ask the writer to pass what it was told: a write without an outcome by then has none."""
        waiting = self._cache.pending_bytes or self._deleting
        if self._writer is not None and waiting and not self._catching_up:
            self._catching_up = True
            self._unheard = set(self._cache.pending) - self._handed_out
            self._passing = set(self._deleting)
            self.pipe(self._writer.ask(CatchUp()), wrap=WriterCaughtUp)

    def _caught_up(self, outcome: Exception | None) -> None:
        self._catching_up = False
        if isinstance(outcome, Rejected):
            return  # too busy; asked again
        self._cache.writes_passed(self._unheard)
        if outcome is not None:
            self._degrade(str(outcome))
        else:
            for block_hash in self._passing:
                self._deleting.pop(block_hash, None)

    def _clear(self, hot: bool, ssd: bool) -> Cleared:
        cache = self._cache
        before = (cache.pool.hot_bytes if hot else 0) + (cache.ledger.total_bytes if ssd else 0)
        blocks = cache.clear(hot=hot, ssd=ssd)
        after = (cache.pool.hot_bytes if hot else 0) + (cache.ledger.total_bytes if ssd else 0)
        self._delete()
        return Cleared(before - after, blocks, cache.pool.num_held if hot else 0)

    def _delete(self) -> None:
        deletes = self._cache.take_deletes()
        if not deletes or self._writer is None:
            return
        if self._writer.offer(DeleteBlocks(deletes)):
            self._deleting.update(dict.fromkeys(deletes))
            self._passing.difference_update(deletes)
        else:
            self._cache.keep_deletes(deletes)

    def _delete_again(self) -> None:
        """The writer may have lost what it was told; what was written since is wanted."""
        self._cache.keep_deletes(n for n in self._deleting if n not in self._cache.ledger)
        self._deleting.clear()
        self._delete()

    def _tick(self) -> None:
        if self._retry_in:
            self._retry_in -= 1
            if not self._retry_in:
                self._cache.writable = True
        self._writer_full = False
        self._scan()
        self._catch_up()
        self._delete()
        cache, pool, ledger = self._cache, self._cache.pool, self._cache.ledger
        stats = cache.stats
        gauges = CacheGauges(
            hits=stats.hits,
            misses=stats.misses,
            cow_copies=stats.cow_copies,
            evictions_ram=stats.evictions_ram,
            evictions_ssd=stats.evictions_ssd,
            shared_blocks=stats.shared_blocks,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_blank,
            blocks_cached=pool.num_cached,
            hot_bytes=pool.hot_bytes,
            hot_limit_bytes=pool.limit_bytes,
            ssd_bytes=ledger.total_bytes,
            ssd_limit_bytes=ledger.limit_bytes,
            ssd_files=len(ledger),
            ssd_written_bytes=stats.ssd_written_bytes,
            ssd_restored_bytes=stats.ssd_restored_bytes,
            pending_bytes=cache.pending_bytes,
            pending_limit_bytes=cache.pending_limit_bytes,
            pending_stops=stats.pending_stops,
            corrupt_blocks=stats.corrupt_blocks,
            rejected_files=tuple(sorted(self._rejected.items())),
            tier_state=self._tier_state,
        )
        self._stats.offer(CacheReport(gauges, self._gdn_gauges()))

    def _gdn_gauges(self) -> GdnGauges | None:
        cache, stats = self._cache, self._cache.stats
        if not cache.checkpoint_bytes:
            return None
        return GdnGauges(
            self._gdn_storage,
            self._gdn_codec,
            cache.num_checkpoints,
            stats.gdn_checkpoint_loads,
            stats.gdn_checkpoint_walkbacks,
            stats.gdn_decode_failures,
            cache.checkpoint_writes.nbytes,
            cache.checkpoint_writes.limit_bytes,
        )
