"""The paged cache's dealings with the SSD tier: what it was told, what it said, if it works.

Part of the PagedCache actor and of nobody else. The writer works in the order in which it is
told, so whoever was asked to catch up has passed everything before: what was not reported by then
will not be.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from omlx.actors.disk_messages import (
    CatchUp,
    CheckTier,
    DeleteBlocks,
    ScanFiles,
    SsdReaderMessage,
    SsdWriterMessage,
    TierChecked,
)
from omlx.actors.messages import BlockLost, BlockWritten, FilesFound, TierLookedAt, WriterCaughtUp
from omlx.cache.blocks import BlockHash
from omlx.cache.other_files import OtherFiles
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.tickets import WriteTicket
from omlx.cache.tier_health import TierHealth, TierState
from omlx.core.plan import LostFile, Written
from omlx.disk.census import CensusSlice
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import Rejected

log = logging.getLogger(__name__)

SILENT_S = 20
"""A tier from which nothing comes for so long while it is looked at does not work."""

Pipe = Callable[[Awaitable[Any], Callable[[Any], Any]], None]


class ColdFiles:
    def __init__(
        self,
        cache: BlockAwarePrefixCache,
        reader: Ref[SsdReaderMessage] | None,
        writer: Ref[SsdWriterMessage] | None,
        pipe: Pipe,
    ) -> None:
        self._cache = cache
        self._files, self._cold = cache.files, cache.cold
        self._reader, self._writer = reader, writer
        self._pipe = pipe
        self._health = TierHealth(on=reader is not None)
        self.rejected: Counter[str] = Counter()
        self.scanned = reader is None
        self._counting = False
        self._count_due = reader is not None
        self._counted: dict[BlockHash, float] = {}
        """What the census under way has found, and when it was last used."""
        self._written_since: set[BlockHash] = set()
        self._count_failing = False
        self._writer_full = False
        self._looking = False
        self._silent_s = 0
        self._generation = 0
        self._handed_out: set[BlockHash] = set()
        """Dirty blocks that the runner may not have given to the writer yet."""
        self._catching_up = False
        self._unheard: set[BlockHash] = set()
        """Writes that were under way when the writer was asked to catch up, less the reported."""
        self._deleting: dict[BlockHash | str, None] = {}
        """Files that the writer was told to remove, until it has passed them."""
        self._passing: set[BlockHash | str] = set()
        """Deletes that it was told when it was asked to catch up."""
        # Nothing is written before every byte is known that the limit is about.
        self._cold.writable = False

    @property
    def state(self) -> TierState:
        return self._health.state

    def start_over(self) -> None:
        self._handed_out.clear()

    # ── what is written ──────────────────────────────────────────────────────────────────────

    def hand_out(self, most: int) -> tuple[WriteTicket, ...]:
        """Dirty blocks for the runner to give to the writer."""
        writes = () if self._writer_full else tuple(self._files.take_writes(most))
        self._handed_out.update(ticket.block_hash for ticket in writes)
        return writes

    def given(self, written: Written) -> None:
        """The runner gave one to the writer, or could not."""
        self._handed_out.discard(written.ticket.block_hash)
        if not written.writing:
            self._files.write_failed(written.ticket.block_hash)
            self._writer_full = True

    def written(self, message: BlockWritten) -> None:
        identity, nbytes = message.identity, message.nbytes
        self._writer_full = False
        self._silent_s = 0
        self._unheard.discard(identity.block_hash)
        self._written_since.add(identity.block_hash)
        if not self._files.written(identity.block_hash, nbytes):
            # Left by a former life, or given up too early. The file is there, so it counts.
            self._files.found(
                identity.block_hash,
                identity.parent,
                identity.tokens,
                nbytes,
                identity.place,
                message.carries,
            )
            self._cold.set_limit(self._cold.ledger.limit_bytes)
        self.delete()

    def not_written(self, message: BlockLost) -> None:
        self._writer_full = False
        self._silent_s = 0
        self._unheard.discard(message.block_hash)
        self._files.write_failed(message.block_hash)
        if message.tier_down:
            self.fails(message.reason, full=message.full)

    def not_read(self, lost: LostFile) -> None:
        self.rejected["corrupt" if lost.corrupt else "gone"] += 1
        self._files.lost(lost.block_hash, corrupt=lost.corrupt)

    # ── what is removed ──────────────────────────────────────────────────────────────────────

    def delete(self) -> None:
        """Have the writer remove what has to go."""
        blocks, paths = self._cold.take_deletes()
        if self._writer is None or not (blocks or paths):
            return
        if self._writer.offer(DeleteBlocks(tuple(blocks), tuple(paths))):
            self._deleting.update(dict.fromkeys([*blocks, *paths]))
            self._passing.difference_update([*blocks, *paths])
        else:
            self._cold.keep_deletes(blocks, paths)

    def set_limit(self, limit_bytes: int) -> None:
        """Have go what is beyond the limit. It is said before the first file is removed."""
        ledger = self._cold.ledger
        before, nbytes = len(ledger) + len(ledger.others), ledger.used_bytes
        self._cold.set_limit(limit_bytes)
        files = before - len(ledger) - len(ledger.others)
        if nbytes > limit_bytes:
            log.warning(
                "the cache directory holds %.1f MB more than its limit of %.1f MB: "
                "%d files of %d bytes are removed, those of other models and formats first",
                (nbytes - limit_bytes) / 1e6,
                limit_bytes / 1e6,
                files,
                nbytes - ledger.used_bytes,
            )
        self.delete()

    def writer_started(self) -> None:
        """It may have lost what it was told; what was written since is wanted."""
        blocks = [n for n in self._deleting if isinstance(n, bytes) and n not in self._cold.ledger]
        paths = [n for n in self._deleting if isinstance(n, str)]
        self._cold.keep_deletes(map(BlockHash, blocks), paths)
        self._deleting.clear()
        self.delete()

    def catch_up(self) -> None:
        """Ask the writer to pass what it was told: a write without an outcome by then has none."""
        waiting = self._cold.pending_bytes or self._deleting
        if self._writer is not None and waiting and not self._catching_up:
            self._catching_up = True
            self._unheard = set(self._files.pending) - self._handed_out
            self._passing = set(self._deleting)
            self._pipe(self._writer.ask(CatchUp()), WriterCaughtUp)

    def caught_up(self, outcome: Exception | None) -> None:
        self._catching_up = False
        self._silent_s = 0
        if isinstance(outcome, Rejected):
            return  # too busy; asked again
        self._files.writes_passed(self._unheard)
        if outcome is not None:
            self.fails(str(outcome), full=False)
        else:
            for name in self._passing:
                self._deleting.pop(name, None)

    # ── whether it works ─────────────────────────────────────────────────────────────────────

    def fails(self, reason: str, *, full: bool) -> None:
        """The tier takes no blocks for now. What it has can be read all the same."""
        if self._health.failed(full=full):
            log.warning("the SSD tier takes no blocks for now: %s", reason)
        self._cold.writable = False

    def tick(self) -> None:
        """A second went by."""
        self._writer_full = False
        if self._health.tick():
            self._look()
        self._silent_s += 1
        if self._looking and self._silent_s >= SILENT_S:
            self.fails("it does not answer", full=False)
        self.count()
        self.catch_up()
        self.delete()

    def _look(self) -> None:
        if self._writer is not None and not self._looking:
            self._looking, self._silent_s = True, 0
            check = CheckTier(write=self._health.state is not TierState.OK)
            self._pipe(self._writer.ask(check), TierLookedAt)

    def looked_at(self, outcome: TierChecked | Exception) -> None:
        self._looking = False
        if isinstance(outcome, Exception):
            return  # the writer is busy, or being restarted
        if outcome.reason is not None:
            self.fails(outcome.reason, full=outcome.full)
            self._health.look_again()
            return
        was_degraded = self._health.state is TierState.DEGRADED
        if self._health.works():
            log.info("the SSD tier takes blocks again")
        if was_degraded or outcome.generation != self._generation:
            # Files may have come, gone, or not gone although they should.
            self._count_due = True
        self._generation = outcome.generation
        self._cold.writable = not self._count_due and not self._counting
        self.count()

    # ── the census ───────────────────────────────────────────────────────────────────────────

    def count(self) -> None:
        """Have everything under the root listed, if that is due."""
        if self._reader is None or not self._count_due or self._counting:
            return
        self._count_due, self._counting = False, True
        self._counted, self._written_since = {}, set()
        self._cold.ledger.others, self._cold.ledger.foreign_bytes = OtherFiles(), 0
        self._pipe(self._begin_count(self._reader), FilesFound)

    async def _begin_count(self, reader: Ref[SsdReaderMessage]) -> CensusSlice:
        if self._writer is not None:
            await self._writer.ask(CatchUp())  # what a former life gave up is not to be found
        return await reader.ask(ScanFiles(begin=True))

    def found(self, outcome: CensusSlice | Exception) -> None:
        """A slice of the census; the next one is asked for."""
        if isinstance(outcome, Exception):
            if not self._count_failing:  # said once, not every second
                log.warning("the cache files are not known yet, trying again: %s", outcome)
            self._count_failing = self._count_due = True
            self._counting = False
            return
        ledger = self._cold.ledger
        for file in outcome.found:
            name = file.identity
            self._counted[name.block_hash] = file.used_at
            if name.block_hash not in self._deleting:  # it may still have been there
                self._files.found(
                    name.block_hash, name.parent, name.tokens, file.nbytes, name.place, file.carries
                )
        for other in outcome.others:
            if other.path not in self._deleting:
                ledger.others.add(
                    other.path, other.nbytes, other.used_at, other.block_hash, other.parent
                )
        ledger.foreign_bytes += outcome.foreign_bytes
        for damaged in outcome.damaged:
            self.rejected["corrupt"] += 1
            log.warning("removed a damaged cache file: %s", damaged.reason)
        if outcome.own_complete:
            self._own_counted()
        if outcome.last:
            self._all_counted()
        elif self._reader is not None:
            self._pipe(self._reader.ask(ScanFiles(begin=False)), FilesFound)

    def _own_counted(self) -> None:
        self._files.vanished(set(self._cold.ledger) - self._counted.keys() - self._written_since)
        self._files.order_files(self._counted)
        if not self.scanned:
            log.info("found %d cache files of this model", len(self._counted))
        self.scanned = True

    def _all_counted(self) -> None:
        ledger = self._cold.ledger
        self._counting = self._count_failing = False
        self.set_limit(ledger.limit_bytes)
        self._cold.writable = self._health.state is TierState.OK and not self._count_due
        self._counted, self._written_since = {}, set()
