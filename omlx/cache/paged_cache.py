"""The hot tier's pool: which places exist, who holds them, how many bytes they take.

The pool starts small and grows by steps; what it holds is limited in *bytes*, because a tail
block is smaller than a full one. Payloads live with the engine, under the block's id: the pool
only says which ids are to be dropped (``take_dropped``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from omlx.cache.blocks import BlockHash, BlockId, BlockTable, CacheBlock, CopyBlock
from omlx.cache.eviction import EvictionOrder, LruOrder

GROW_BY = 256


class NoRoom(Exception):
    """A block must be written to, is shared, and there is no room for a copy."""


class PagedCacheManager:
    """A block is held, cached or blank (see CacheBlock).

    ``on_block_hash_dropped(hash)`` is called whenever a hash stops being findable here, so that
    an index of hashes elsewhere never disagrees with this one.
    """

    def __init__(
        self,
        *,
        limit_bytes: int,
        initial_blocks: int = GROW_BY,
        max_blocks: int = 1 << 20,
        on_block_hash_dropped: Callable[[BlockHash], None] = lambda _hash: None,
        order: Callable[[], EvictionOrder] = LruOrder,
    ) -> None:
        assert max_blocks >= 1
        self._new_order = order
        self.max_blocks = max_blocks
        self._on_block_hash_dropped = on_block_hash_dropped
        self.set_bytes = limit_bytes
        """What the tier is set to take."""
        self.limit_bytes = limit_bytes
        """What it may take now: less, while live KV needs the room."""
        self._allowed_bytes: int | None = None
        self.cow_copies = 0
        self._begin(min(initial_blocks, max_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that can be found."""
        return len(self._order)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_cached - self.num_blank

    @property
    def num_shared(self) -> int:
        return sum(block.ref_count > 1 for block in self._blocks)

    def get(self, block_hash: BlockHash) -> BlockId | None:
        return self._by_hash.get(block_hash)

    def num_holders(self, block_hash: BlockHash) -> int:
        block_id = self._by_hash.get(block_hash)
        return 0 if block_id is None else self._blocks[block_id].ref_count

    def allocate_block(self, nbytes: int, protect: BlockHash | None = None) -> BlockId | None:
        """Take a block for a payload of ``nbytes``; it is held once and has no hash yet.

        Gives up cached blocks, leaf first, until the limit holds, but never ``protect``: that is
        the parent of the block to be stored. None when there is no room.
        """
        if nbytes > self.limit_bytes:
            return None
        if protect is not None:
            self._order.pin(protect)
        while self.hot_bytes + nbytes > self.limit_bytes or not self._has_blank():
            victim = self._order.front
            if victim is None:
                if protect is not None:
                    self._order.unpin(protect)
                return None
            self._forget(victim)
        block = self._blocks[self._blank.pop()]
        block.ref_count, block.nbytes = 1, nbytes
        if protect is not None:
            self._parents[block.block_id] = protect
        self.hot_bytes += nbytes
        return block.block_id

    def seal(
        self,
        block_id: BlockId,
        block_hash: BlockHash,
        parent: BlockHash | None,
        cost_s: float = 0.0,
    ) -> None:
        """Record that a held block is filled, name it and let it go: it can now be found.

        ``parent``: the block's parent, if that is cached too; the new block is given up first.
        """
        block = self._blocks[block_id]
        assert block.ref_count == 1, "only its writer holds a block that is being filled"
        assert block.block_hash is None, "a block is sealed once"
        assert block_hash not in self._by_hash, "one block a hash"
        block.block_hash = block_hash
        self._by_hash[block_hash] = block_id
        block.ref_count = 0
        self._unpin_parent(block_id)
        self._order.add(block, parent, cost_s)
        self._shrink()

    def abandon(self, block_id: BlockId) -> None:
        """Give back a held block that was never filled."""
        block = self._blocks[block_id]
        assert block.ref_count == 1, "only its writer holds a block that is being filled"
        assert block.block_hash is None, "a sealed block is released, not abandoned"
        block.ref_count = 0
        self._unpin_parent(block_id)
        self._blank_out(block)

    def acquire_cached_block(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Add a reader, if the block still is what the look-up saw; False when it is not."""
        block = self._blocks[block_id]
        if block.block_hash != block_hash:
            return False
        self._order.hold(block)
        block.ref_count += 1
        return True

    # ── tables: what one sequence holds ──────────────────────────────────────────────────────

    def find_shared_prefix(self, hashes: Iterable[BlockHash]) -> list[tuple[BlockId, BlockHash]]:
        """The leading blocks of a chain that are here now. Nothing is held by it.

        ``acquire_cached_block`` takes a pair and looks again: meanwhile it may be given up.
        """
        found: list[tuple[BlockId, BlockHash]] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append((block_id, block_hash))
        return found

    def get_computed_blocks(self, hashes: Iterable[BlockHash]) -> BlockTable:
        """Hold the leading blocks of a chain that are here; ``release`` its ids at the end."""
        table = BlockTable()
        for block_id, block_hash in self.find_shared_prefix(hashes):
            if not self.acquire_cached_block(block_id, block_hash):
                break
            table.append(block_id)
        return table

    def fork_block_table(self, table: BlockTable) -> BlockTable:
        """A second holder of the same blocks, the unsealed ones as well. Copies nothing."""
        for block_id in table.block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, "a table holds its blocks"
            if block.block_hash is not None:
                self._order.hold(block)
            block.ref_count += 1
        return BlockTable(list(table.block_ids))

    def get_blocks_for_generation(self, table: BlockTable, nbytes: int) -> CopyBlock | None:
        """Let a sequence write to its last block, of ``nbytes``. None: it may, as it is.

        A block that others hold, or that can be found by its name, is not written to: the table
        gets a block of its own in its place. What is answered is to be copied before the pool is
        asked for anything else, and after what it has dropped so far. Raises NoRoom.
        """
        shared = self._blocks[table.last]
        assert shared.ref_count > 0, "a table holds its blocks"
        if shared.ref_count == 1 and shared.block_hash is None:
            return None
        target = self.allocate_block(nbytes)
        if target is None:
            raise NoRoom
        self.cow_copies += 1
        table.block_ids[-1] = target
        self.release([shared.block_id])
        return CopyBlock(shared.block_id, target)

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Drop one holder from each block of a chain, given from its head to its tail.

        The tail goes into the queue first: it names the longest prefix, hence the one least
        likely to be asked for again, hence the first to give up.
        """
        for block_id in reversed(list(block_ids)):
            block = self._blocks[block_id]
            assert block.ref_count > 0, "released more often than held"
            block.ref_count -= 1
            if block.ref_count == 0 and block.block_hash is None:
                self._unpin_parent(block_id)
                self._blank_out(block)
            elif block.ref_count == 0:
                self._order.release(block)
        self._shrink()

    def touch(self, chain: Iterable[BlockHash]) -> None:
        """Make a chain, from its head to its tail, the last to be given up."""
        for block_hash in reversed(list(chain)):
            block_id = self._by_hash.get(block_hash)
            if block_id is not None and self._blocks[block_id].ref_count == 0:
                self._order.touch(self._blocks[block_id])

    def evict_block_permanently(self, block_hash: BlockHash) -> bool:
        """Forget a cached block now. False when it is unknown or held."""
        block_id = self._by_hash.get(block_hash)
        if block_id is None or self._blocks[block_id].ref_count > 0:
            return False
        self._forget(self._blocks[block_id])
        return True

    def set_limit(self, limit_bytes: int, max_blocks: int | None = None) -> None:
        """A lower limit holds at once, but for blocks that are held, until they are let go.

        The pool grows up to ``max_blocks`` from now on; one that is larger does not shrink.
        """
        self.set_bytes = limit_bytes
        self.max_blocks = max_blocks or self.max_blocks
        self.allow(self._allowed_bytes)

    def allow(self, nbytes: int | None) -> None:
        """Take no more than this from now on, whatever the limit is set to; None: just that."""
        self._allowed_bytes = nbytes
        self.limit_bytes = self.set_bytes if nbytes is None else min(nbytes, self.set_bytes)
        self._shrink()

    def clear(self, keep: Container[object] = ()) -> int:
        """Forget every cached block; returns how many. Held ones stay, and those to ``keep``."""
        cached = [block for block in self._order if block.block_hash not in keep]
        for block in cached:
            self._forget(block)
        return len(cached)

    def start_over(self) -> None:
        """Every payload is gone, and so is whoever held blocks. Reports no hash as dropped."""
        self._begin(self.num_blocks)

    def take_dropped(self) -> tuple[BlockId, ...]:
        """Ids whose payload is to be dropped, each once, in order. Forgets them."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def check(self) -> None:
        """Assert what this class promises about its own state. O(blocks): for tests and idle."""
        self._order.check()
        queued = [block.block_id for block in self._order]
        assert len(set(queued)) == len(queued) == len(self._order)
        assert set(queued).isdisjoint(self._blank)
        for block in self._blocks:
            assert (block.ref_count == 0) == (
                block.block_id in set(queued) or block.block_id in set(self._blank)
            ), "a block is held, cached or blank"
        assert all(self._blocks[i].block_hash is not None for i in queued)
        assert all(self._blocks[i].block_hash is None for i in self._blank)
        named = {b.block_hash: b.block_id for b in self._blocks if b.block_hash is not None}
        assert named == self._by_hash
        assert self.hot_bytes == sum(block.nbytes for block in self._blocks)
        held = sum(block.nbytes for block in self._blocks if block.ref_count > 0)
        assert self.hot_bytes <= max(self.limit_bytes, held)

    def _begin(self, num_blocks: int) -> None:
        self._blocks: list[CacheBlock] = []
        self._blank: list[BlockId] = []
        self._order = self._new_order()
        self._parents: dict[BlockId, BlockHash] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._dropped: list[BlockId] = []
        self.hot_bytes = 0
        self._grow(num_blocks)

    def _shrink(self) -> None:
        while self.hot_bytes > self.limit_bytes and len(self._order):
            # A lower limit holds for a chain that grows as well.
            self._forget(self._order.front or next(iter(self._order)))

    def _has_blank(self) -> bool:
        if not self._blank and self.num_blocks < self.max_blocks:
            self._grow(min(GROW_BY, self.max_blocks - self.num_blocks))
        return bool(self._blank)

    def _grow(self, count: int) -> None:
        first = len(self._blocks)
        self._blocks += [CacheBlock(BlockId(first + i)) for i in range(count)]
        self._blank += [BlockId(first + i) for i in reversed(range(count))]

    def _forget(self, block: CacheBlock) -> None:
        """Drop a cached block's name and payload together."""
        assert block.block_hash is not None
        block_hash = block.block_hash
        self._order.forget(block)
        del self._by_hash[block_hash]
        block.block_hash = None
        self._blank_out(block)
        self._on_block_hash_dropped(block_hash)

    def _unpin_parent(self, block_id: BlockId) -> None:
        parent = self._parents.pop(block_id, None)
        if parent is not None:
            self._order.unpin(parent)

    def _blank_out(self, block: CacheBlock) -> None:
        self.hot_bytes -= block.nbytes
        block.nbytes = 0
        self._blank.append(block.block_id)
        self._dropped.append(block.block_id)
