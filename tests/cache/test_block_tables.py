"""B19: a fork shares blocks until it writes, and then copies; whoever is left reads its own."""

from __future__ import annotations

import numpy as np
import pytest

from omlx.cache.blocks import BlockHash, BlockId, BlockTable
from omlx.cache.paged_cache import NoRoom, PagedCacheManager

UNIT = 16
"""Bytes of a block: as many tokens, of one byte each."""

NAMES = [BlockHash(bytes([n]) * 32) for n in range(8)]

Tokens = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Payloads:
    """The pool, and what lies under its ids, as the engine keeps it."""

    def __init__(self, limit_blocks: int) -> None:
        self.pool = PagedCacheManager(limit_bytes=limit_blocks * UNIT, max_blocks=limit_blocks)
        self.arrays: dict[BlockId, Tokens] = {}

    def fill(self, name: BlockHash, value: int, parent: BlockHash | None = None) -> BlockId:
        """Store and seal a block of equal bytes."""
        block_id = self.pool.allocate_block(UNIT)
        assert block_id is not None
        self.drop()
        self.arrays[block_id] = np.full(UNIT, value, np.uint8)
        self.pool.seal(block_id, name, parent)
        return block_id

    def drop(self) -> None:
        for block_id in self.pool.take_dropped():
            self.arrays.pop(block_id, None)

    def write(self, table: BlockTable, start: int, value: int) -> bool:
        """Write to a table's last block, from a token on. Whether its data was copied."""
        copy = self.pool.get_blocks_for_generation(table, UNIT)
        self.drop()
        if copy is not None:
            self.arrays[copy.target] = self.arrays[copy.source].copy()
        self.arrays[table.last][start:] = value
        return copy is not None

    def read(self, table: BlockTable) -> list[list[int]]:
        return [self.arrays[block_id].tolist() for block_id in table.block_ids]

    def evict(self, table: BlockTable) -> None:
        """A table ends; then whatever nobody holds is given up, and its places are used again."""
        self.pool.release(table.block_ids)
        self.pool.clear()
        self.drop()
        for name in NAMES[5:]:
            if self.pool.num_blank:
                self.fill(name, 99)


def chain(payloads: Payloads) -> BlockTable:
    parents = [None, *NAMES]
    for value, name in enumerate(NAMES[:3]):
        payloads.fill(name, value, parents[value])
    return payloads.pool.get_computed_blocks(NAMES[:3])


WRITTEN = [[0] * UNIT, [1] * UNIT, [2] * 4 + [7] * (UNIT - 4)]
PLAIN = [[0] * UNIT, [1] * UNIT, [2] * UNIT]


def test_a_child_reads_its_own_after_its_parent_was_evicted() -> None:
    payloads = Payloads(limit_blocks=4)
    parent = chain(payloads)
    child = payloads.pool.fork_block_table(parent)
    assert payloads.pool.num_shared == 3

    assert payloads.write(child, 4, 7)
    assert payloads.read(parent) == PLAIN
    payloads.evict(parent)

    assert payloads.pool.get(NAMES[2]) is None, "the parent's last block is gone"
    assert payloads.read(child) == WRITTEN
    assert payloads.pool.cow_copies == 1


def test_a_parent_reads_its_own_after_its_child_wrote_and_left() -> None:
    payloads = Payloads(limit_blocks=4)
    parent = chain(payloads)
    child = payloads.pool.fork_block_table(parent)

    assert payloads.write(child, 4, 7)
    payloads.evict(child)

    assert payloads.read(parent) == PLAIN
    assert payloads.pool.num_held == 3


def test_a_parent_that_writes_does_not_change_its_child() -> None:
    payloads = Payloads(limit_blocks=4)
    parent = chain(payloads)
    child = payloads.pool.fork_block_table(parent)

    assert payloads.write(parent, 4, 7)
    assert payloads.read(child) == PLAIN
    payloads.evict(child)

    assert payloads.read(parent) == WRITTEN


def test_data_is_copied_once_and_only_when_it_is_written() -> None:
    payloads = Payloads(limit_blocks=5)
    parent = chain(payloads)
    child = payloads.pool.fork_block_table(parent)
    assert payloads.pool.cow_copies == 0

    assert payloads.write(child, 4, 7)
    assert not payloads.write(child, 8, 8), "it is its own by now"
    grandchild = payloads.pool.fork_block_table(child)
    assert payloads.write(grandchild, 12, 9), "shared again, though it has no name"

    assert payloads.read(child)[2] == [2] * 4 + [7] * 4 + [8] * 8
    assert payloads.read(grandchild)[2] == [2] * 4 + [7] * 4 + [8] * 4 + [9] * 4
    assert payloads.pool.cow_copies == 2


def test_a_sealed_block_is_copied_even_by_its_only_holder() -> None:
    """Its name says what is in it."""
    payloads = Payloads(limit_blocks=4)
    table = chain(payloads)

    assert payloads.write(table, 4, 7)

    assert payloads.read(payloads.pool.get_computed_blocks(NAMES[:3])) == PLAIN


def test_without_room_for_a_copy_nothing_changes() -> None:
    payloads = Payloads(limit_blocks=3)
    parent = chain(payloads)
    child = payloads.pool.fork_block_table(parent)

    with pytest.raises(NoRoom):
        payloads.write(child, 4, 7)

    assert payloads.read(child) == PLAIN
    payloads.pool.release(child.block_ids)
    payloads.pool.release(parent.block_ids)
    assert payloads.pool.num_held == 0
    payloads.pool.check()


def test_what_was_given_up_between_look_up_and_claim_cuts_the_prefix() -> None:
    payloads = Payloads(limit_blocks=3)
    payloads.pool.release(chain(payloads).block_ids)
    found = payloads.pool.find_shared_prefix(NAMES[:4])
    assert [name for _, name in found] == NAMES[:3]

    payloads.fill(NAMES[5], 99)

    claimed = [payloads.pool.acquire_cached_block(*pair) for pair in found]
    assert claimed == [True, True, False]
    assert payloads.pool.find_shared_prefix(NAMES[:3]) == found[:2]


def test_copies_that_nobody_holds_any_more_are_blank() -> None:
    payloads = Payloads(limit_blocks=4)
    table = chain(payloads)
    payloads.write(table, 0, 7)
    own = table.last

    payloads.pool.release(table.block_ids)

    assert own in payloads.pool.take_dropped()
    assert payloads.pool.hot_bytes == 3 * UNIT
    payloads.pool.check()
