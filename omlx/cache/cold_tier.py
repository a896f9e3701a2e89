"""What has a file, what is on its way to one, what may be written, and what must go.

It knows names and sizes; how blocks stand behind each other is the prefix tree's business, and
``on_file_gone`` tells it which files were given up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import StrEnum

from omlx.cache.blocks import BlockHash
from omlx.cache.checkpoints import Place
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager, Victims
from omlx.cache.pending import Pending
from omlx.cache.stats import CacheStats

SIGHTINGS = 1 << 16
"""Names that ``selective`` remembers to have been asked for once, 100 bytes each."""


class WritePolicy(StrEnum):
    BEHIND = "behind"
    """Everything is written, when there is room for it to wait."""
    SELECTIVE = "selective"
    """Only what was asked for twice."""
    THROUGH = "through"
    """Everything, and a request does not end before."""


class ColdTier:
    def __init__(
        self,
        *,
        limit_bytes: int,
        pending_limit_bytes: int,
        gdn_pending_limit_bytes: int,
        policy: WritePolicy,
        stats: CacheStats,
        on_file_gone: Callable[[BlockHash], None],
    ) -> None:
        self.ledger = PagedSSDCacheManager(limit_bytes)
        self.block_writes = Pending(max(1, pending_limit_bytes))
        self.checkpoint_writes = Pending(gdn_pending_limit_bytes)
        self.policy = policy
        self.writable = limit_bytes > 0
        """False while it can't be written: off, full, broken, or not listed yet."""
        self.patient = policy is WritePolicy.THROUGH
        """Who finds no room to wait for a file asks again, rather than do without one."""
        self._stats = stats
        self._on_file_gone = on_file_gone
        self._deletes: dict[BlockHash, None] = {}
        """Files to be removed. None of these is written before that."""
        self._deleted_paths: list[str] = []
        self._sighted: OrderedDict[BlockHash, None] = OrderedDict()

    # ── what is written ──────────────────────────────────────────────────────────────────────

    def sighted(self, block_hash: BlockHash) -> bool:
        """Whether a block that is to be stored is worth a file by the policy; remembers it."""
        if self.policy is not WritePolicy.SELECTIVE:
            return True
        before = block_hash in self._sighted
        self._sighted[block_hash] = None
        self._sighted.move_to_end(block_hash)
        if len(self._sighted) > SIGHTINGS:
            self._sighted.popitem(last=False)
        return before

    def queue_of(self, place: Place | None) -> Pending:
        """Where a block waits to be written, or a checkpoint."""
        return self.block_writes if place is None else self.checkpoint_writes

    @property
    def nbytes(self) -> int:
        """Of every file that is ours, of whatever model."""
        return self.ledger.total_bytes + self.ledger.others.total_bytes

    @property
    def pending_bytes(self) -> int:
        """Of blocks and checkpoints that wait to be written."""
        return self.block_writes.nbytes + self.checkpoint_writes.nbytes

    def is_to_be_removed(self, block_hash: BlockHash) -> bool:
        """Its file is given up and may still be there: it is not written before it is gone."""
        return block_hash in self._deletes

    def begin_write(self, parent: BlockHash, nbytes: int, place: Place | None) -> bool:
        """Reserve room for a file, giving up others for it. False: there is none."""
        victims = self.ledger.reserve(nbytes, protect=parent)
        if victims is None:
            return False
        self._remove(victims)
        self.queue_of(place).begin(nbytes)
        return True

    def end_write(self, nbytes: int, place: Place | None) -> None:
        self.queue_of(place).end(nbytes)
        self.ledger.settle(nbytes)

    def only_pending(self, nbytes: int, *, checkpoints: bool) -> None:
        """What was permitted is not written any more, but for ``nbytes`` that are under way."""
        queue = self.checkpoint_writes if checkpoints else self.block_writes
        self.ledger.settle(queue.nbytes - nbytes)
        queue.end(queue.nbytes - nbytes)

    # ── what must go ─────────────────────────────────────────────────────────────────────────

    def evict(self, block_hash: BlockHash) -> None:
        """Give up a file on purpose; it is among ``take_deletes``."""
        self.ledger.discard(block_hash)
        self._deletes[block_hash] = None
        self._on_file_gone(block_hash)

    def evict_others(self) -> None:
        """Give up every file that the served model can't use."""
        self._deleted_paths += self.ledger.others.give_up(self.ledger.others.total_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        self._remove(self.ledger.set_limit(limit_bytes))

    def _remove(self, victims: Victims) -> None:
        self._stats.evictions_ssd += len(victims.blocks) + len(victims.paths)
        self._deleted_paths += victims.paths
        for block_hash in victims.blocks:
            self.evict(block_hash)

    def take_deletes(self) -> Victims:
        """Files to remove. Forgets them."""
        deletes = Victims(list(self._deletes), self._deleted_paths)
        self._deletes, self._deleted_paths = {}, []
        return deletes

    def keep_deletes(self, blocks: Iterable[BlockHash], paths: Iterable[str] = ()) -> None:
        """Nobody could be told to remove these: they stay among ``take_deletes``."""
        self._deletes.update(dict.fromkeys(blocks))
        self._deleted_paths += paths

    def check(self) -> None:
        """Assert what this class promises about its own state. O(files): for tests and idle."""
        self.ledger.check()
        assert 0 <= self.pending_bytes == self.ledger.reserved_bytes
