"""What is given up next is a leaf, and of all leaves the one that the policy's definition names."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.cache.blocks import BlockHash, BlockId, CacheBlock
from omlx.cache.eviction import HEAP_SLACK, CostAwareOrder, EvictionOrder, LruOrder

Path = tuple[int, ...]
"""A block's place in a small tree. Its hash says it, so a block that comes back is the same one."""

paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def name(path: Path) -> BlockHash:
    return BlockHash(bytes(path))


def path_of(block: CacheBlock) -> Path:
    assert block.block_hash is not None
    return tuple(block.block_hash)


def sealed(path: Path, nbytes: int = 1) -> CacheBlock:
    return CacheBlock(BlockId(0), block_hash=name(path), nbytes=nbytes)


class Tree(RuleBasedStateMachine):
    """A pool's use of an order. ``model`` says by which key the queued blocks are compared."""

    order: EvictionOrder

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[Path, CacheBlock] = {}
        self.readers: list[Path] = []
        self.pins: list[Path] = []
        self.keys: dict[Path, tuple[float, int]] = {}
        """Of queued blocks: what the model gives up is the leaf with the least key."""
        self.ticks = 0

    def key(self, path: Path) -> tuple[float, int]:
        self.ticks += 1
        return (0.0, self.ticks)

    def prefix(self, path: Path) -> list[Path]:
        """What is stored of a chain without a gap, head first."""
        chain = [path[: i + 1] for i in range(len(path))]
        return [p for i, p in enumerate(chain) if all(q in self.blocks for q in chain[: i + 1])]

    def leaves(self) -> set[Path]:
        return {
            path
            for path in self.keys
            if path not in self.pins and not any(other[:-1] == path for other in self.keys)
        }

    @rule(path=paths)
    def hold(self, path: Path) -> None:
        chain = self.prefix(path)
        if not chain:
            return
        for held in chain:
            self.order.hold(self.blocks[held])
            self.keys.pop(held, None)
            self.used(held)
        self.readers.append(chain[-1])

    def used(self, path: Path) -> None:
        """The model's count of uses."""

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        end = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        for path in [end[: i + 1] for i in reversed(range(len(end)))]:
            if not any(reader[: len(path)] == path for reader in self.readers):
                self.order.release(self.blocks[path])
                self.keys[path] = self.key(path)

    @rule(path=paths)
    def touch(self, path: Path) -> None:
        for used in reversed(self.prefix(path)):
            if used in self.keys:
                self.order.touch(self.blocks[used])
                self.keys[used] = self.key(used)

    @rule()
    def give_up_the_front(self) -> None:
        front = self.order.front
        if front is not None:
            self.given_up(path_of(front))
            self.drop(front)

    def given_up(self, path: Path) -> None:
        """The model's clock."""

    def drop(self, block: CacheBlock) -> None:
        self.order.forget(block)
        del self.blocks[path_of(block)], self.keys[path_of(block)]
        block.block_hash = None

    @rule(path=paths)
    def pin(self, path: Path) -> None:
        self.order.pin(name(path))
        self.pins.append(path)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        path = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.order.unpin(name(path))

    @invariant()
    def its_books_are_right(self) -> None:
        self.order.check()
        assert len(self.order) == len(self.keys)

    @invariant()
    def all_are_given_up_leaf_first(self) -> None:
        turn = [path_of(block) for block in self.order]
        assert sorted(turn) == sorted(self.keys)
        for index, path in enumerate(turn):
            assert path[:-1] not in turn[:index], "a parent before its child"
        if self.order.front is not None:
            assert turn[0] == path_of(self.order.front)


class Lru(Tree):
    """Chains are stored, used and given up without gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.order = LruOrder()
        self.turn: list[Path] = []

    @rule(path=paths)
    def add(self, path: Path) -> None:
        above = path[:-1]
        if path in self.blocks or (above and above not in self.blocks):
            return
        self.blocks[path] = sealed(path)
        self.order.add(self.blocks[path], name(above) if above else None, 0.0)
        # It is as old as its parent: that was in use when the block was computed.
        self.keys[path] = self.keys[above] if above in self.keys else self.key(path)

    @invariant()
    def the_front_is_the_leaf_used_longest_ago(self) -> None:
        front = self.order.front
        leaves = self.leaves()
        if front is None:
            assert not self.keys or any(path in self.pins for path in self.keys)
        else:
            assert path_of(front) in leaves
            assert self.keys[path_of(front)] == min(self.keys[path] for path in leaves)


class CostAware(Tree):
    """Any block may be dropped, and come back under or above what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Path, int] = {}
        self.values: dict[Path, float] = {}
        self.clock = 0.0

    @initialize(uses_max=st.integers(1, 3))
    def begin(self, uses_max: int) -> None:
        self.order = CostAwareOrder(uses_max)
        self.uses_max = uses_max

    def key(self, path: Path) -> tuple[float, int]:
        self.ticks += 1
        uses = min(self.uses[path], self.uses_max)
        return (self.clock + uses * self.values[path], self.ticks)

    def used(self, path: Path) -> None:
        self.uses[path] += 1

    def given_up(self, path: Path) -> None:
        self.clock = max(self.clock, self.keys[path][0])

    @rule(path=paths, cost=st.sampled_from([0, 4, 8]), nbytes=st.sampled_from([1, 2, 4]))
    def add(self, path: Path, cost: int, nbytes: int) -> None:
        if path in self.blocks:
            return
        self.blocks[path] = sealed(path, nbytes)
        self.uses[path], self.values[path] = 1, cost / nbytes
        self.order.add(self.blocks[path], name(path[:-1]) if path[:-1] else None, cost)
        self.keys[path] = self.key(path)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def drop_any(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.keys)))
        if self.order.front is self.blocks[path]:
            self.given_up(path)
        # A reader may hold what is behind it: then its chain has a gap from now on.
        self.drop(self.blocks[path])

    @invariant()
    def the_front_is_the_leaf_that_costs_least(self) -> None:
        leaves = self.leaves()
        least = min(leaves, key=lambda path: self.keys[path], default=None)
        front = self.order.front
        assert (None if front is None else path_of(front)) == least

    @invariant()
    def the_clock_only_rises_to_what_was_given_up(self) -> None:
        assert isinstance(self.order, CostAwareOrder)
        assert self.order.clock == self.clock


TestLru = Lru.TestCase
TestLru.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCostAware = CostAware.TestCase
TestCostAware.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("order", [LruOrder(), CostAwareOrder()])
def test_a_chain_is_given_up_from_its_tail(order: EvictionOrder) -> None:
    chain = [sealed((1,) * (i + 1)) for i in range(4)]
    for i, block in enumerate(chain):
        order.add(block, chain[i - 1].block_hash if i else None, float(i))

    assert list(order) == chain[::-1]
    for block in reversed(chain):
        assert order.front is block
        order.forget(block)
    assert order.front is None


@pytest.mark.parametrize("order", [LruOrder(), CostAwareOrder()])
def test_the_chain_that_grows_is_not_given_up(order: EvictionOrder) -> None:
    head, tail = sealed((1,)), sealed((1, 1))
    order.add(head, None, 1.0)
    order.add(tail, head.block_hash, 1.0)

    order.pin(name((1, 1)))

    assert order.front is None
    assert list(order) == [tail, head]
    order.unpin(name((1, 1)))
    assert order.front is tail


def test_what_costs_more_per_byte_stays_longer() -> None:
    order = CostAwareOrder()
    cheap, dear, small = sealed((0,), 4), sealed((1,), 4), sealed((2,), 1)
    order.add(dear, None, 8.0)
    order.add(small, None, 4.0)
    order.add(cheap, None, 4.0)

    assert list(order) == [cheap, dear, small]


def test_what_is_never_used_again_is_overtaken() -> None:
    order = CostAwareOrder()
    dear = sealed((9,))
    order.add(dear, None, 10.0)

    given_up = 0
    while order.front is not dear:
        if order.front is not None:
            order.forget(order.front)
        order.add(sealed((given_up % 8,)), None, 1.0)
        given_up += 1
        assert given_up <= 11


def test_a_use_counts_and_a_touch_does_not() -> None:
    order = CostAwareOrder(uses_max=2)
    used, touched = sealed((0,)), sealed((1,))
    for block in (used, touched):
        order.add(block, None, 1.0)
    order.hold(used)
    order.release(used)

    for _ in range(3):
        order.touch(touched)

    assert list(order) == [touched, used]


def test_without_costs_it_is_lru() -> None:
    order = CostAwareOrder()
    blocks = [sealed((i,)) for i in range(3)]
    for block in blocks:
        order.add(block, None, 0.0)

    order.touch(blocks[0])

    assert list(order) == [blocks[1], blocks[2], blocks[0]]


def test_the_heap_does_not_grow_with_use() -> None:
    order = CostAwareOrder()
    blocks = [sealed((i,)) for i in range(10)]
    for block in blocks:
        order.add(block, None, 1.0)

    for _ in range(1000):
        for block in blocks:
            order.touch(block)
        order.check()

    assert len(order) == len(blocks)


def test_the_heap_shrinks_with_what_is_queued() -> None:
    order = CostAwareOrder()
    blocks = [sealed((i,)) for i in range(4 * HEAP_SLACK - 1)]
    for block in blocks:
        order.add(block, None, 1.0)

    for block in blocks:
        order.hold(block)
        order.check()

    assert len(order) == 0


def test_a_parent_is_offered_again_after_the_heap_was_cleaned() -> None:
    order = CostAwareOrder()
    parent, child, busy = sealed((1,)), sealed((1, 1)), sealed((0,))
    order.add(parent, None, 1.0)
    order.add(child, parent.block_hash, 1.0)
    order.add(busy, None, 9.0)
    for _ in range(2 * HEAP_SLACK):
        order.touch(busy)

    order.forget(child)

    order.check()
    assert order.front is parent
