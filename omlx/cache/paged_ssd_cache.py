"""The cold tier's ledger: every byte under its root, and which to remove for room.

It knows names and sizes only; files are read and written by the actors. Files that the served
model can't use, of other models and other formats, go first. Then, and among those too, the least
recently used goes first, leaf before parent, as in the hot tier. What is not ours at all is
counted and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from omlx.cache.blocks import BlockHash, BlockId, CacheBlock, FreeKVCacheBlockQueue
from omlx.cache.other_files import OtherFiles, removal_order

NO_PLACE = BlockId(-1)


class Victims(NamedTuple):
    """What has to go: files of the served model by name, others by their path."""

    blocks: list[BlockHash]
    paths: list[str]


class PagedSSDCacheManager:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        """Of the served model's files."""
        self.reserved_bytes = 0
        """Of writes that were let in and have not ended yet."""
        self.others = OtherFiles()
        self.foreign_bytes = 0
        """Under our root and not ours: it takes room, and nobody here removes it."""
        self._files: dict[BlockHash, CacheBlock] = {}
        self._queue = FreeKVCacheBlockQueue()

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._files)

    @property
    def used_bytes(self) -> int:
        """Everything under the root."""
        return self.total_bytes + self.others.total_bytes + self.foreign_bytes

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._files

    def add(self, block_hash: BlockHash, nbytes: int, parent: BlockHash) -> None:
        """Count a file. It goes before its parent, which it is removed before."""
        if block_hash in self._files:
            return
        block = CacheBlock(NO_PLACE, block_hash=block_hash, nbytes=nbytes)
        self._files[block_hash] = block
        parent_block = self._files.get(parent)
        if parent_block is None:
            self._queue.append(block)
        else:
            self._queue.insert_before(block, parent_block)
        self.total_bytes += nbytes

    def discard(self, block_hash: BlockHash) -> int:
        """Stop counting a file; returns its bytes, 0 when it is unknown."""
        block = self._files.pop(block_hash, None)
        if block is None:
            return 0
        self._queue.remove(block)
        self.total_bytes -= block.nbytes
        return block.nbytes

    def touch(self, chain: Iterable[BlockHash]) -> None:
        """Make a chain, from its head to its tail, the last to be removed."""
        for block_hash in reversed(list(chain)):
            block = self._files.get(block_hash)
            if block is not None:
                self._queue.remove(block)
                self._queue.append(block)

    def order(
        self, used_at: Mapping[BlockHash, float], parents: Mapping[BlockHash, BlockHash]
    ) -> None:
        """Put the files in the order of their last use, as found at start.

        A chain is as recent as its most recent block, and is removed leaf first all the same.
        Only the order of the times counts, so clocks that were wrong do no harm.
        """
        known = {name: used_at[name] for name in used_at if name in self._files}
        self.touch(reversed(removal_order(known, parents)))

    def reserve(self, nbytes: int, protect: BlockHash) -> Victims | None:
        """Let a write of ``nbytes`` in; returns what to remove for it, taken off the ledger.

        None, and nothing changes, when there is no room even without every other file but
        ``protect``, the parent of what is to be written.
        """
        if nbytes > self.limit_bytes:
            return None
        excess = self.used_bytes + self.reserved_bytes + nbytes - self.limit_bytes
        excess_of_ours = excess - self.others.total_bytes
        blocks: list[BlockHash] = []
        for block in self._queue:
            if excess_of_ours <= 0:
                break
            assert block.block_hash is not None
            if block.block_hash == protect:
                break
            blocks.append(block.block_hash)
            excess_of_ours -= block.nbytes
        if excess_of_ours > 0:
            return None
        for block_hash in blocks:
            self.discard(block_hash)
        self.reserved_bytes += nbytes
        return Victims(blocks, self.others.give_up(excess))

    def settle(self, nbytes: int) -> None:
        """End a reservation: the write was done, or failed."""
        assert self.reserved_bytes >= nbytes, "more writes ended than were let in"
        self.reserved_bytes -= nbytes

    def set_limit(self, limit_bytes: int) -> Victims:
        """Returns what to remove so that the new limit holds, taken off the ledger."""
        self.limit_bytes = limit_bytes
        paths = self.others.give_up(self.used_bytes - limit_bytes)
        blocks: list[BlockHash] = []
        while self.used_bytes > limit_bytes and self._queue.front is not None:
            block_hash = self._queue.front.block_hash
            assert block_hash is not None
            self.discard(block_hash)
            blocks.append(block_hash)
        return Victims(blocks, paths)

    def check(self) -> None:
        """Assert what this class promises about its own state. O(files): for tests and idle."""
        assert self.total_bytes == sum(block.nbytes for block in self._files.values())
        assert [b.block_hash for b in self._queue if b.block_hash not in self._files] == []
        assert len(self._queue) == len(self._files)
        assert self.reserved_bytes >= 0
        assert self.foreign_bytes >= 0
        self.others.check()
