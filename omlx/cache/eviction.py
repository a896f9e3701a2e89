"""Which cached block to give up next: one interface, two policies.

A block that others stand on is worth nothing without them and they nothing without it, so every
order is leaf first: whatever the policy, the front has no child that is cached too.

    LruOrder          the leaf that was used longest ago
    CostAwareOrder    the leaf whose loss costs least: GDSF, see there

An order knows a block from ``add`` to ``forget``, by its hash. In between it is queued, when
nobody holds it, or held. Blocks behind a hash that is not known here are leaves like any other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from omlx.cache.blocks import BlockHash, CacheBlock, FreeKVCacheBlockQueue

HEAP_SLACK = 64
"""Stale items a heap may have on top of twice the blocks that are queued."""


class EvictionOrder(Protocol):
    """What a pool needs to know of the blocks that nobody holds."""

    def __len__(self) -> int:
        """Blocks that are queued."""
        ...

    def __iter__(self) -> Iterator[CacheBlock]:
        """Queued blocks as they would be given up one by one, pinned ones included."""
        ...

    @property
    def front(self) -> CacheBlock | None:
        """The block to give up next: a leaf, not pinned. None when nothing can go now."""
        ...

    def add(self, block: CacheBlock, parent: BlockHash | None, cost_s: float) -> None:
        """Queue a block that was sealed just now; it would take ``cost_s`` to compute again."""
        ...

    def hold(self, block: CacheBlock) -> None:
        """It has one reader more: that is a use. It is not queued from now on."""
        ...

    def release(self, block: CacheBlock) -> None:
        """Its last reader left: queue it, as used just now. Of a chain, the tail goes first."""
        ...

    def touch(self, block: CacheBlock) -> None:
        """A queued block was in use until now. Counts as no further use."""
        ...

    def forget(self, block: CacheBlock) -> None:
        """A queued block loses its hash: it is given up if it is the front, else dropped."""
        ...

    def pin(self, block_hash: BlockHash) -> None:
        """A block behind this one is being filled: this one stays. Pins are counted."""
        ...

    def unpin(self, block_hash: BlockHash) -> None: ...

    def check(self) -> None: ...


class LruOrder:
    """The leaf that was used longest ago. O(1) for each operation on one block.

    Leaf first as long as a chain is held, released and touched from its head without a gap: then
    a child stands before its parent. A pinned front lets nothing go: whatever is behind it was
    used later than a chain that grows at this moment.
    """

    def __init__(self) -> None:
        self._queue = FreeKVCacheBlockQueue()
        self._queued: dict[BlockHash, CacheBlock] = {}
        self._pins: Counter[BlockHash] = Counter()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[CacheBlock]:
        return iter(self._queue)

    @property
    def front(self) -> CacheBlock | None:
        front = self._queue.front
        return None if front is None or front.block_hash in self._pins else front

    def add(self, block: CacheBlock, parent: BlockHash | None, cost_s: float) -> None:
        above = None if parent is None else self._queued.get(parent)
        if above is None:
            self._queue.append(block)
        else:
            self._queue.insert_before(block, above)
        self._queued[_name(block)] = block

    def hold(self, block: CacheBlock) -> None:
        if self._queued.pop(_name(block), None) is not None:
            self._queue.remove(block)

    def release(self, block: CacheBlock) -> None:
        self._queue.append(block)
        self._queued[_name(block)] = block

    def touch(self, block: CacheBlock) -> None:
        self._queue.remove(block)
        self._queue.append(block)

    def forget(self, block: CacheBlock) -> None:
        self._queue.remove(block)
        del self._queued[_name(block)]

    def pin(self, block_hash: BlockHash) -> None:
        self._pins[block_hash] += 1

    def unpin(self, block_hash: BlockHash) -> None:
        _take_one(self._pins, block_hash)

    def check(self) -> None:
        """Assert what this class promises about its own state. O(blocks): for tests and idle."""
        assert len(self._queue) == len(self._queued)
        assert {_name(block): block for block in self._queue} == self._queued
        assert all(count > 0 for count in self._pins.values())


@dataclass(slots=True, eq=False)
class Entry:
    """What a leaf-first heap knows of a block."""

    block: CacheBlock
    parent: BlockHash | None
    cost_s: float
    num_uses: int = 1
    is_queued: bool = False
    rank: float = 0.0
    stamp: int = 0
    """Unique. A heap item with another one is stale."""
    in_heap: bool = False
    """There is an item with this stamp."""


class LeafFirstHeap:
    """The leaf with the lowest rank, the one used longest ago among equals.

    A rank is computed when a block is queued or touched, and stands until it is again. O(log n)
    for each operation, amortised: an item that no longer says what is true stays in the heap
    until it comes to the front, or until there are more of them than blocks.
    """

    def __init__(self) -> None:
        self._entries: dict[BlockHash, Entry] = {}
        self._children: Counter[BlockHash] = Counter()
        """Queued blocks behind each hash."""
        self._pins: Counter[BlockHash] = Counter()
        self._heap: list[tuple[float, int, Entry]] = []
        self._num_queued = 0
        self._stamp = 0

    def rank(self, entry: Entry) -> float:
        raise NotImplementedError

    def given_up(self, entry: Entry) -> None:
        """The front is about to be forgotten."""

    def __len__(self) -> int:
        return self._num_queued

    def __iter__(self) -> Iterator[CacheBlock]:
        children = self._children.copy()
        heap = [
            self._turn(name, entry)
            for name, entry in self._entries.items()
            if entry.is_queued and name not in children
        ]
        heapq.heapify(heap)
        while heap:
            entry = heapq.heappop(heap)[-1]
            yield entry.block
            if entry.parent is None:
                continue
            above = self._entries.get(entry.parent)
            if _take_one(children, entry.parent) == 0 and above is not None and above.is_queued:
                heapq.heappush(heap, self._turn(entry.parent, above))

    @property
    def front(self) -> CacheBlock | None:
        entry = self._front()
        return None if entry is None else entry.block

    def add(self, block: CacheBlock, parent: BlockHash | None, cost_s: float) -> None:
        assert _name(block) not in self._entries, "a block is added once"
        assert cost_s >= 0
        entry = self._entries[_name(block)] = Entry(block, parent, cost_s)
        self._enqueue(entry)

    def hold(self, block: CacheBlock) -> None:
        entry = self._entries[_name(block)]
        entry.num_uses += 1
        if entry.is_queued:
            self._dequeue(entry)

    def release(self, block: CacheBlock) -> None:
        self._enqueue(self._entries[_name(block)])

    def touch(self, block: CacheBlock) -> None:
        entry = self._entries[_name(block)]
        assert entry.is_queued, "a held block is in use anyway"
        self._place(entry)

    def forget(self, block: CacheBlock) -> None:
        entry = self._entries[_name(block)]
        assert entry.is_queued, "a held block keeps its hash"
        if entry is self._front():
            self.given_up(entry)
        self._dequeue(entry)
        del self._entries[_name(block)]

    def pin(self, block_hash: BlockHash) -> None:
        self._pins[block_hash] += 1

    def unpin(self, block_hash: BlockHash) -> None:
        _take_one(self._pins, block_hash)
        self._offer(block_hash)

    def check(self) -> None:
        """Assert what this class promises about its own state. O(blocks): for tests and idle."""
        queued = [entry for entry in self._entries.values() if entry.is_queued]
        assert len(queued) == self._num_queued
        parents = Counter(entry.parent for entry in queued if entry.parent is not None)
        assert parents == self._children, "each queued child is counted once"
        assert all(
            count > 0 for counts in (self._children, self._pins) for count in counts.values()
        )
        assert len(self._heap) <= 2 * len(queued) + HEAP_SLACK, "the heap is bounded"
        assert len({stamp for _, stamp, _ in self._heap}) == len(self._heap), "one item a stamp"
        assert all(item[0] >= self._heap[(i - 1) // 2][0] for i, item in enumerate(self._heap) if i)
        live = [entry for _, stamp, entry in self._heap if self._is_live(stamp, entry)]
        assert set(map(id, live)) == {id(entry) for entry in queued if self._is_leaf(entry)}
        for name, entry in self._entries.items():
            assert entry.block.block_hash == name, "a block is forgotten before its hash changes"

    def _front(self) -> Entry | None:
        while self._heap:
            _, stamp, entry = self._heap[0]
            if self._is_live(stamp, entry):
                return entry
            heapq.heappop(self._heap)
            entry.in_heap = entry.in_heap and entry.stamp != stamp
        return None

    def _turn(self, name: BlockHash, entry: Entry) -> tuple[bool, float, int, Entry]:
        return name in self._pins, entry.rank, entry.stamp, entry

    def _enqueue(self, entry: Entry) -> None:
        assert not entry.is_queued, "the block is queued already"
        entry.is_queued = True
        self._num_queued += 1
        if entry.parent is not None:
            self._children[entry.parent] += 1
        self._place(entry)

    def _dequeue(self, entry: Entry) -> None:
        entry.is_queued = False
        self._num_queued -= 1
        if entry.parent is not None and _take_one(self._children, entry.parent) == 0:
            self._offer(entry.parent)
        self._compact()

    def _place(self, entry: Entry) -> None:
        self._stamp += 1
        entry.rank, entry.stamp, entry.in_heap = self.rank(entry), self._stamp, False
        self._offer(_name(entry.block))

    def _offer(self, block_hash: BlockHash) -> None:
        """Put a block into the heap, if it is a leaf and not in there."""
        entry = self._entries.get(block_hash)
        if entry is not None and entry.is_queued and not entry.in_heap and self._is_leaf(entry):
            entry.in_heap = True
            heapq.heappush(self._heap, (entry.rank, entry.stamp, entry))
            self._compact()

    def _compact(self) -> None:
        if len(self._heap) <= 2 * self._num_queued + HEAP_SLACK:
            return
        live = []
        for item in self._heap:
            _, stamp, entry = item
            if self._is_live(stamp, entry):
                live.append(item)
            elif entry.stamp == stamp:
                entry.in_heap = False
        heapq.heapify(live)
        self._heap = live

    def _is_live(self, stamp: int, entry: Entry) -> bool:
        return entry.stamp == stamp and entry.is_queued and self._is_leaf(entry)

    def _is_leaf(self, entry: Entry) -> bool:
        name = entry.block.block_hash
        return name not in self._children and name not in self._pins


class CostAwareOrder(LeafFirstHeap):
    """Greedy-Dual-Size-Frequency: what a block saves per byte, aged.

        rank = clock + min(uses, ``uses_max``) * seconds to recompute it / bytes

    The clock rises to the rank of each block that is given up, so a block that is not used again
    is overtaken in the end, whatever it cost. Without costs this is leaf-first LRU.

    The rule is Cherkasova's, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
    Caching Policy", HPL-98-69; the bound on uses is ours, so that a long conversation that
    has ended does not outlive many short ones.
    """

    def __init__(self, uses_max: int = 2) -> None:
        assert uses_max >= 1
        super().__init__()
        self.uses_max = uses_max
        self.clock = 0.0

    def rank(self, entry: Entry) -> float:
        uses = min(entry.num_uses, self.uses_max)
        return self.clock + uses * entry.cost_s / max(1, entry.block.nbytes)

    def given_up(self, entry: Entry) -> None:
        # A parent comes to the front with the rank of its last use, which may be below the clock.
        self.clock = max(self.clock, entry.rank)


def _name(block: CacheBlock) -> BlockHash:
    assert block.block_hash is not None, "only a sealed block is ordered"
    return block.block_hash


def _take_one(counts: Counter[BlockHash], key: BlockHash) -> int:
    """Count one less, and return how many are left. Keeps no zeros."""
    left = counts[key] - 1
    assert left >= 0, "taken more often than counted"
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left
