"""The hot tier's pool against the simplest thing that could be right: a list, oldest first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.cache.blocks import BlockHash, BlockId, BlockTable, CopyBlock
from omlx.cache.paged_cache import GROW_BY, NoRoom, PagedCacheManager

UNIT = 10
"""Bytes of a full block."""

NAMES = [BlockHash(bytes([n]) * 32) for n in range(8)]
PARENTS = {name: NAMES[n // 2] if n else None for n, name in enumerate(NAMES)}


@dataclass
class Known:
    """A block as the model sees it."""

    block_id: BlockId
    nbytes: int
    holders: int = 0
    """Readers, and tables it is in."""
    tables: int = 0


class Pool(RuleBasedStateMachine):
    """Blocks are taken, filled, shared, let go and given up."""

    @initialize(limit=st.integers(0, 6), max_blocks=st.sampled_from([2, 4, 8]))
    def begin(self, limit: int, max_blocks: int) -> None:
        self.limit = limit * UNIT
        self.max_blocks = max_blocks
        self.forgotten: list[BlockHash] = []
        self.pool = PagedCacheManager(
            limit_bytes=self.limit,
            initial_blocks=1,
            max_blocks=max_blocks,
            on_block_hash_dropped=self.forgotten.append,
        )
        self.filling: dict[BlockId, int] = {}
        self.protected: dict[BlockId, BlockHash | None] = {}  # the parents of what is filled
        self.known: dict[BlockHash, Known] = {}
        self.own: dict[BlockId, Known] = {}  # copies, without a name, that tables hold
        self.tables: list[BlockTable] = []
        self.cow_copies = 0
        self.free: list[BlockHash] = []  # nobody holds these; the first goes first
        self.to_drop: list[BlockId] = []

    # ── the model ────────────────────────────────────────────────────────────────────────────

    @property
    def hot_bytes(self) -> int:
        blocks = [*self.known.values(), *self.own.values()]
        return sum(self.filling.values()) + sum(block.nbytes for block in blocks)

    def name_of(self, block_id: BlockId) -> BlockHash | None:
        return next((n for n, block in self.known.items() if block.block_id == block_id), None)

    def block_of(self, block_id: BlockId) -> Known:
        name = self.name_of(block_id)
        return self.own[block_id] if name is None else self.known[name]

    def make_room(self, nbytes: int, protect: BlockHash | None) -> bool:
        def full() -> bool:
            places = len(self.known) + len(self.filling) + len(self.own)
            return self.hot_bytes + nbytes > self.limit or places == self.max_blocks

        if nbytes > self.limit:
            return False
        stay = {protect, *self.protected.values()}
        while full() and self.free and self.free[0] not in stay:
            self.forget(self.free[0])
        return not full()

    def let_go(self, block_id: BlockId) -> None:
        block, name = self.block_of(block_id), self.name_of(block_id)
        block.holders -= 1
        block.tables -= 1
        if name is not None and not block.holders:
            self.free.append(name)
        elif not block.holders:
            del self.own[block_id]
            self.to_drop.append(block_id)

    def forget(self, name: BlockHash) -> None:
        self.free.remove(name)
        self.to_drop.append(self.known.pop(name).block_id)

    def shrink(self) -> None:
        while self.hot_bytes > self.limit and self.free:
            self.forget(self.free[0])

    def expect_forgotten(self, before: set[BlockHash]) -> None:
        assert set(self.forgotten) == before - self.known.keys()
        assert len(self.forgotten) == len(set(self.forgotten))
        self.forgotten.clear()

    # ── what happens ─────────────────────────────────────────────────────────────────────────

    @rule(nbytes=st.sampled_from([UNIT, UNIT // 2]), protect=st.sampled_from([None, *NAMES]))
    def allocate(self, nbytes: int, protect: BlockHash | None) -> None:
        before = set(self.known)
        got = self.pool.allocate_block(nbytes, protect=protect)

        assert (got is not None) == self.make_room(nbytes, protect)
        if got is not None:
            assert got not in self.filling, "a place is given to one only"
            assert got not in {block.block_id for block in self.known.values()}
            self.filling[got] = nbytes
            self.protected[got] = protect
        self.expect_forgotten(before)

    @precondition(lambda self: self.filling and len(self.known) < len(NAMES))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(list(self.filling)), "place")
        unknown = [name for name in NAMES if name not in self.known]
        name = data.draw(st.sampled_from(unknown), "name")
        before = {*self.known, name}

        self.pool.seal(block_id, name, PARENTS[name])

        del self.protected[block_id]
        self.known[name] = Known(block_id, self.filling.pop(block_id))
        before_parent = [i for i, other in enumerate(self.free) if other == PARENTS[name]]
        self.free.insert(before_parent[0] if before_parent else len(self.free), name)
        self.shrink()
        self.expect_forgotten(before)

    @precondition(lambda self: len(self.known) < len(NAMES))
    @rule(data=st.data())
    def allocate_and_seal(self, data: st.DataObject) -> None:
        self.allocate(UNIT, None)
        if self.filling:
            self.seal(data)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(list(self.filling)), "place")

        self.pool.abandon(block_id)

        del self.filling[block_id], self.protected[block_id]
        self.to_drop.append(block_id)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)), "name")

        assert self.pool.acquire_cached_block(self.known[name].block_id, name) is True

        self.known[name].holders += 1
        if name in self.free:
            self.free.remove(name)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def acquire_what_it_no_longer_is(self, name: BlockHash, data: st.DataObject) -> None:
        block_id = BlockId(data.draw(st.integers(0, self.pool.num_blocks - 1)))
        if self.pool.get(name) != block_id:
            assert self.pool.acquire_cached_block(block_id, name) is False

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A chain, from its head to its tail."""
        held = [n for n, block in self.known.items() if block.holders > block.tables]
        chain = data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([]))
        before = set(self.known)

        self.pool.release(self.known[name].block_id for name in chain)

        for name in reversed(chain):
            self.known[name].holders -= 1
            if not self.known[name].holders:
                self.free.append(name)
        self.shrink()
        self.expect_forgotten(before)

    @rule(chain=st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=3))
    def hold_as_a_table(self, chain: list[BlockHash]) -> None:
        known = list(takewhile(self.known.__contains__, chain))
        ids = [self.known[name].block_id for name in known]
        assert self.pool.find_shared_prefix(chain) == list(zip(ids, known, strict=True))

        table = self.pool.get_computed_blocks(chain)

        assert table.block_ids == ids
        for name in known:
            self.known[name].holders += 1
            self.known[name].tables += 1
            if name in self.free:
                self.free.remove(name)
        if known:
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables), "table")

        forked = self.pool.fork_block_table(table)

        assert forked.block_ids == table.block_ids
        assert forked.block_ids is not table.block_ids
        for block_id in table.block_ids:
            self.block_of(block_id).holders += 1
            self.block_of(block_id).tables += 1
        self.tables.append(forked)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), nbytes=st.sampled_from([UNIT, UNIT // 2]))
    def write(self, data: st.DataObject, nbytes: int) -> None:
        table = data.draw(st.sampled_from(self.tables), "table")
        before, source = set(self.known), table.last
        alone = self.name_of(source) is None and self.block_of(source).holders == 1

        try:
            copy = self.pool.get_blocks_for_generation(table, nbytes)
        except NoRoom:
            assert not alone
            assert not self.make_room(nbytes, None)
            assert table.last == source
        else:
            assert (copy is None) == alone
            if copy is not None:
                assert self.make_room(nbytes, None)
                assert copy == CopyBlock(source, table.last)
                assert copy.target not in [*self.own, *self.filling, source]
                self.own[copy.target] = Known(copy.target, nbytes, 1, 1)
                self.let_go(source)
                self.cow_copies += 1
        assert self.pool.cow_copies == self.cow_copies
        self.expect_forgotten(before)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release_table(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables), "table")
        before = set(self.known)

        self.pool.release(table.block_ids)

        self.tables = [other for other in self.tables if other is not table]
        for block_id in reversed(table.block_ids):
            self.let_go(block_id)
        self.shrink()
        self.expect_forgotten(before)

    @rule(chain=st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    def touch(self, chain: list[BlockHash]) -> None:
        self.pool.touch(chain)

        for name in reversed(chain):
            if name in self.free:
                self.free.remove(name)
                self.free.append(name)

    @rule(name=st.sampled_from(NAMES[:4]))
    def evict(self, name: BlockHash) -> None:
        before = set(self.known)

        assert self.pool.evict_block_permanently(name) == (name in self.free)

        if name in self.free:
            self.forget(name)
        self.expect_forgotten(before)

    @rule(limit=st.integers(0, 6))
    def set_limit(self, limit: int) -> None:
        self.limit = limit * UNIT
        before = set(self.known)

        self.pool.set_limit(self.limit)

        self.shrink()
        self.expect_forgotten(before)

    @rule(how=st.sampled_from(["clear", "start over", *["not now"] * 4]))
    def lose_everything(self, how: str) -> None:
        if how == "clear":
            self.clear()
        elif how == "start over":
            self.start_over()

    def clear(self) -> None:
        before = set(self.known)

        assert self.pool.clear() == len(self.free)

        for name in list(self.free):
            self.forget(name)
        self.expect_forgotten(before)

    def start_over(self) -> None:
        places = self.pool.num_blocks

        self.pool.start_over()

        self.known.clear()
        self.free.clear()
        self.filling.clear()
        self.protected.clear()
        self.own.clear()
        self.tables.clear()
        self.to_drop.clear()
        assert self.pool.num_blocks == places
        assert not self.forgotten

    @rule()
    def take_dropped(self) -> None:
        assert list(self.pool.take_dropped()) == self.to_drop
        self.to_drop.clear()

    # ── what always holds ────────────────────────────────────────────────────────────────────

    @invariant()
    def it_is_sound(self) -> None:
        self.pool.check()

    @invariant()
    def the_same_blocks_are_known(self) -> None:
        known = {name: block.block_id for name, block in self.known.items()}
        assert {name: self.pool.get(name) for name in NAMES if self.pool.get(name) is not None} == (
            known
        )
        assert self.pool.hot_bytes == self.hot_bytes

    @invariant()
    def each_place_is_held_or_cached_or_blank(self) -> None:
        blocks = [*self.known.values(), *self.own.values()]
        held = len(self.filling) + sum(block.holders > 0 for block in blocks)
        assert self.pool.num_held == held
        assert self.pool.num_cached == len(self.free)
        assert self.pool.num_blank == self.pool.num_blocks - held - len(self.free)
        assert self.pool.num_blocks <= self.max_blocks
        assert self.pool.num_shared == sum(block.holders > 1 for block in blocks)

    def teardown(self) -> None:
        """What is left goes one by one, in the right order."""
        while getattr(self, "free", None):
            self.limit = self.hot_bytes - 1
            before = set(self.known)
            self.pool.set_limit(self.limit)
            self.shrink()
            self.expect_forgotten(before)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(pool: PagedCacheManager, name: BlockHash, parent: BlockHash | None = None) -> BlockId:
    block_id = pool.allocate_block(UNIT)
    assert block_id is not None
    pool.seal(block_id, name, parent)
    return block_id


def test_a_chain_that_nobody_uses_goes_from_its_tail_to_its_head() -> None:
    pool = PagedCacheManager(limit_bytes=3 * UNIT)
    head, middle, tail = NAMES[:3]
    filled(pool, head)
    filled(pool, middle, head)
    filled(pool, tail, middle)

    gone = []
    for name in NAMES[3:6]:
        filled(pool, name)
        gone.append(next(n for n in (tail, middle, head) if pool.get(n) is None and n not in gone))

    assert gone == [tail, middle, head]


def test_an_evicted_block_has_no_name_left() -> None:
    """B22: what comes back to the pool can't be found under its old name."""
    pool = PagedCacheManager(limit_bytes=UNIT)
    old = filled(pool, NAMES[0])

    new = pool.allocate_block(UNIT)

    assert new == old, "the one place there is room for"
    assert pool.get(NAMES[0]) is None
    assert not pool.acquire_cached_block(old, NAMES[0])


def test_a_block_that_somebody_reads_is_not_given_up() -> None:
    """B19."""
    pool = PagedCacheManager(limit_bytes=2 * UNIT)
    read = filled(pool, NAMES[0])
    assert pool.acquire_cached_block(read, NAMES[0])

    for name in NAMES[1:5]:
        filled(pool, name)
    pool.clear()

    assert not pool.evict_block_permanently(NAMES[0])
    assert pool.get(NAMES[0]) == read
    assert read not in pool.take_dropped()


def test_a_lowered_limit_holds_as_soon_as_blocks_are_let_go() -> None:
    """B64."""
    pool = PagedCacheManager(limit_bytes=3 * UNIT)
    read, filling = filled(pool, NAMES[0]), pool.allocate_block(UNIT)
    assert pool.acquire_cached_block(read, NAMES[0])
    assert filling is not None

    pool.set_limit(0)
    assert pool.hot_bytes == 2 * UNIT, "held by a reader and by a writer"
    pool.release([read])
    assert pool.hot_bytes == UNIT
    pool.seal(filling, NAMES[1], None)
    assert pool.hot_bytes == 0
    assert pool.take_dropped() == (read, filling)


def test_forty_prompts_pass_through_a_pool_of_thirty_two() -> None:
    """B61: nothing stays held, so nothing runs out."""
    pool = PagedCacheManager(limit_bytes=1000 * UNIT, max_blocks=32)

    for prompt in range(40):
        names = [BlockHash(bytes([prompt, block]) * 16) for block in range(10)]
        chain = [filled(pool, name) for name in names]
        for block_id, name in zip(chain, names, strict=True):
            assert pool.acquire_cached_block(block_id, name)
        pool.release(chain)
        assert pool.num_held == 0
        assert pool.num_blank + pool.num_cached == pool.num_blocks <= 32


def test_the_pool_grows_when_it_must() -> None:
    pool = PagedCacheManager(limit_bytes=10**6, initial_blocks=2)

    for n in range(GROW_BY):
        filled(pool, BlockHash(n.to_bytes(32)))

    assert pool.num_cached == GROW_BY
    assert pool.num_blocks == 2 + GROW_BY


def test_a_block_is_held_while_it_is_filled_and_sealed_once() -> None:
    pool = PagedCacheManager(limit_bytes=2 * UNIT)
    block_id = pool.allocate_block(UNIT)
    assert block_id is not None
    assert pool.num_held == 1
    pool.seal(block_id, NAMES[0], None)

    with pytest.raises(AssertionError, match="only its writer"):
        pool.seal(block_id, NAMES[1], None)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release([block_id])
    with pytest.raises(AssertionError, match="only its writer"):
        pool.abandon(block_id)
