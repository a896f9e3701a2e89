"""The cache's books behind a mailbox: one Settle a step, and what the disk reports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import assert_never

from omlx.actors.cold_files import ColdFiles
from omlx.actors.disk_messages import (
    FilesVerified,
    SetWriting,
    SsdReaderMessage,
    SsdWriterMessage,
    StopVerifying,
    VerifyFiles,
)
from omlx.actors.limit_messages import CacheLimits, SetLimits
from omlx.actors.messages import (
    AskReuseBySize,
    BeginFlush,
    BlockLost,
    BlockWritten,
    CacheTree,
    ClearCache,
    Cleared,
    ColdOf,
    FilesFound,
    FindChain,
    ForgetChain,
    IsScanned,
    PagedCacheMessage,
    ProbeCache,
    Probed,
    ReaderStuck,
    Settle,
    StartOver,
    TierLookedAt,
    TokensOf,
    WriterCaughtUp,
    WriterStarted,
)
from omlx.actors.stats_messages import CacheReport, StatsMessage
from omlx.cache.blocks import num_tokens
from omlx.cache.one_chain import find_chain, forget_chain
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.reuse_by_size import ReuseDistances, Used
from omlx.cache.tickets import Grant
from omlx.core.plan import Settled, SettleWork, Store, Uid
from omlx.core.usage import CacheGauges, GdnGauges
from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import Rejected, Tick

log = logging.getLogger(__name__)

WRITES_A_STEP = 4
"""Dirty blocks handed to the writer with one step; more would hold up a decoding step."""


class TierOff(Rejected):
    """There is no SSD tier."""


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
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._reader, self._writer, self._wall = reader, writer, wall
        self._gdn_storage, self._gdn_codec = gdn_storage, gdn_codec
        self._stats = stats
        self._cold = ColdFiles(cache, reader, writer, self.pipe)
        self._written_before_flush: int | None = None
        self._distances = ReuseDistances()

    async def on_start(self) -> None:
        self.every(1.0, Tick)
        self._cold.count()

    async def on_stop(self) -> None:
        if self._written_before_flush is not None:
            files = self._cache.files
            flushed = self._cache.stats.ssd_written_files - self._written_before_flush
            dropped = files.num_dirty + len(files.pending)
            log.info("flushed=%d dropped=%d blocks to the SSD tier", flushed, dropped)

    async def receive(self, message: PagedCacheMessage) -> object:
        cache, cold = self._cache, self._cold
        match message:
            case Settle(work):
                return self._settle(work)
            case StartOver():
                cache.start_over()
                cold.start_over()
                cold.delete()
            case FilesFound(outcome):
                cold.found(outcome)
            case BlockWritten():
                cold.written(message)
            case BlockLost():
                cold.not_written(message)
            case WriterStarted():
                cold.writer_started()
            case WriterCaughtUp(outcome):
                cold.caught_up(outcome)
            case TierLookedAt(outcome):
                cold.looked_at(outcome)
            case ReaderStuck(reason):
                cold.fails(reason, full=False)
            case ClearCache(hot, ssd):
                return self._clear(hot, ssd)
            case SetLimits():
                self._set_limits(message)
                return asyncio.ensure_future(self._limits(message.writing or SetWriting()))
            case BeginFlush():
                self._written_before_flush = cache.stats.ssd_written_files
            case ProbeCache(tokens, salt):
                return Probed(*cache.probe(tokens, salt))
            case ColdOf(tokens, salt):
                return cache.cold_of(tokens, salt)
            case IsScanned():
                return cold.scanned
            case CacheTree(depth, most):
                return cache.view(depth=depth, most=most)
            case TokensOf(block_hash):
                node = cache.tree.get(block_hash)
                return None if node is None else node.tokens
            case AskReuseBySize():
                return self._distances.report(self._wall())
            case FindChain(tokens, salt):
                return find_chain(cache, tokens, salt)
            case ForgetChain(salt):
                forget_chain(cache, salt)
                cold.delete()
            case VerifyFiles():
                if self._reader is None:
                    raise TierOff("there is no SSD tier")
                return asyncio.ensure_future(self._reader.ask(message))
            case StopVerifying():
                if self._reader is not None:
                    self._reader.offer(message)
            case FilesVerified():
                if self._reader is not None:
                    return asyncio.ensure_future(self._reader.ask(message))
            case Tick():
                cold.tick()
                self._report()
            case _:
                assert_never(message)
        return None

    def _note_use(self, work: SettleWork, grants: list[Grant]) -> None:
        """What prompts found, and what was computed: once more, where it had been evicted."""
        size, now = self._cache.size_of, self._wall()
        for grant in grants:
            chain = [
                Used(ref.block_hash, size(ref.tokens, ref.place), ref.take) for ref in grant.refs
            ]
            self._distances.use(chain, now)
        for seal in work.seals:
            wish = seal.ticket.wish
            tokens = num_tokens(wish.tokens) if wish.place is None else 0
            used = Used(wish.block_hash, size(wish.tokens, wish.place), tokens)
            self._distances.use([used], now)

    def _settle(self, work: SettleWork) -> Settled:
        cache, cold = self._cache, self._cold
        cache.now = self._wall()
        if work.hot_allowed is not None:
            cache.pool.allow(work.hot_allowed)
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
            cold.given(written)
        for block_ids in work.releases:
            cache.pool.release(block_ids)
        for lost in work.lost:
            cold.not_read(lost)
        for chain in work.touches:
            cache.touch(chain)
        grants = tuple(
            (wanted.uid, cache.look_up(wanted.tokens, wanted.salt)) for wanted in work.look_ups
        )
        self._note_use(work, [grant for _, grant in grants])
        cache.stats.pending_stops += work.given_up
        stores: list[Store] = []
        refused: list[tuple[Uid, int]] = []
        for uid, start, wish in work.wishes:
            ticket = cache.store(wish)
            if ticket is not None:
                stores.append(Store(uid, start, start + len(wish.tokens) // 4, ticket))
            elif cache.files.may_ask_again(wish) and all(uid != other for other, _ in refused):
                refused.append((uid, start))
        unfiled = [uid for uid, names in work.ending if any(map(cache.files.is_coming, names))]
        writes = cold.hand_out(WRITES_A_STEP)
        cold.delete()
        flushing = bool(writes) or cache.cold.pending_bytes > 0
        return Settled(
            grants,
            tuple(stores),
            writes,
            cache.pool.take_dropped(),
            flushing,
            cache.files.num_dirty > 0,
            tuple(refused),
            tuple(unfiled),
            cache.cold.pending_bytes,
        )

    def _clear(self, hot: bool, ssd: bool) -> Cleared:
        cache = self._cache

        def count() -> int:
            return (cache.pool.hot_bytes if hot else 0) + (cache.cold.nbytes if ssd else 0)

        before = count()
        blocks = cache.clear(hot=hot, ssd=ssd)
        self._cold.delete()
        return Cleared(before - count(), blocks, cache.pool.num_held if hot else 0)

    def _set_limits(self, limits: SetLimits) -> None:
        cache = self._cache
        if limits.hot_bytes is not None or limits.hot_blocks is not None:
            cache.pool.set_limit(
                cache.pool.set_bytes if limits.hot_bytes is None else limits.hot_bytes,
                limits.hot_blocks,
            )
        if limits.ssd_bytes is not None:
            self._cold.set_limit(limits.ssd_bytes)
        if limits.pending_bytes is not None:
            cache.cold.block_writes.limit_bytes = max(1, limits.pending_bytes)
        if limits.gdn_pending_bytes is not None:
            cache.cold.checkpoint_writes.limit_bytes = limits.gdn_pending_bytes
        self._gdn_storage = limits.gdn_storage or self._gdn_storage
        cache.set_policy(limits.policy or cache.cold.policy)
        self._cold.delete()

    async def _limits(self, writing: SetWriting) -> CacheLimits:
        """What is so now, the writer's part as the writer says."""
        writer = None if self._writer is None else await self._writer.ask(writing)
        pool, cold = self._cache.pool, self._cache.cold
        if writer is not None:
            self._gdn_codec = writer.codec
        return CacheLimits(
            pool.set_bytes,
            pool.max_blocks,
            cold.ledger.limit_bytes,
            cold.block_writes.limit_bytes,
            cold.checkpoint_writes.limit_bytes,
            cold.policy,
            writer,
        )

    def _report(self) -> None:
        cache, pool, ledger = self._cache, self._cache.pool, self._cache.cold.ledger
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
            ssd_bytes=ledger.used_bytes,
            ssd_limit_bytes=ledger.limit_bytes,
            ssd_files=len(ledger) + len(ledger.others),
            incompatible_bytes=ledger.others.total_bytes,
            incompatible_files=len(ledger.others),
            ssd_written_bytes=stats.ssd_written_bytes,
            ssd_restored_bytes=stats.ssd_restored_bytes,
            pending_bytes=cache.cold.pending_bytes,
            pending_limit_bytes=cache.cold.block_writes.limit_bytes,
            pending_stops=stats.pending_stops,
            corrupt_blocks=stats.corrupt_blocks,
            rejected_files=tuple(sorted(self._cold.rejected.items())),
            tier_state=self._cold.state.value,
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
            cache.cold.checkpoint_writes.nbytes,
            cache.cold.checkpoint_writes.limit_bytes,
        )
