"""The cold tier's ledger counts every byte, and knows which file is the next to go."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.cache.blocks import BlockHash
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager, Victims

UNIT = 10
ROOT = BlockHash(b"r" * 32)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32))


TREE = {name(n): name(n // 2) if n > 1 else ROOT for n in range(1, 10)}
"""1 is the head of a binary tree of blocks."""

names = st.sampled_from(sorted(TREE))


def chain_to(block: BlockHash) -> list[BlockHash]:
    """From the head to ``block``."""
    chain = [block]
    while TREE[chain[-1]] != ROOT:
        chain.append(TREE[chain[-1]])
    return chain[::-1]


def order_of_removal(ledger: PagedSSDCacheManager) -> list[BlockHash]:
    """Empties the ledger."""
    return ledger.set_limit(0).blocks


class Ledger(RuleBasedStateMachine):
    """The ledger against a list of files, the next to go first."""

    @initialize(limit=st.integers(0, 6))
    def begin(self, limit: int) -> None:
        self.ledger = PagedSSDCacheManager(limit * UNIT)
        self.sizes: dict[BlockHash, int] = {}
        self.files: list[BlockHash] = []
        self.writes: list[int] = []
        self.others: list[tuple[str, int]] = []
        self.foreign_bytes = self.clock = 0

    @property
    def used(self) -> int:
        others = sum(nbytes for _, nbytes in self.others)
        return sum(self.sizes.values()) + others + self.foreign_bytes

    def discarded(self, victims: Victims) -> None:
        paths = [path for path, _ in self.others]
        assert victims.paths == paths[: len(victims.paths)], "the oldest go first"
        del self.others[: len(victims.paths)]
        gone = victims.blocks
        assert not gone or not self.others, "what the model can't use goes before what it can"
        assert gone == self.files[: len(gone)], "the oldest go first"
        for block in gone:
            del self.sizes[block]
        del self.files[: len(gone)]

    @rule(block=names, nbytes=st.integers(1, UNIT))
    def add(self, block: BlockHash, nbytes: int) -> None:
        self.ledger.add(block, nbytes, TREE[block])

        if block not in self.sizes:
            parent = TREE[block]
            at = self.files.index(parent) if parent in self.sizes else len(self.files)
            self.files.insert(at, block)
            self.sizes[block] = nbytes

    @rule(block=names)
    def discard(self, block: BlockHash) -> None:
        assert self.ledger.discard(block) == self.sizes.pop(block, 0)
        if block in self.files:
            self.files.remove(block)

    @rule(block=names)
    def touch(self, block: BlockHash) -> None:
        self.ledger.touch(chain_to(block))

        for used in reversed(chain_to(block)):
            if used in self.sizes:
                self.files.remove(used)
                self.files.append(used)

    @rule(nbytes=st.integers(1, UNIT))
    def other(self, nbytes: int) -> None:
        """A file of another model, used later than those before."""
        self.clock += 1
        self.ledger.others.add(str(self.clock), nbytes, float(self.clock), None, None)
        self.others.append((str(self.clock), nbytes))

    @rule(nbytes=st.integers(0, UNIT))
    def foreign(self, nbytes: int) -> None:
        self.ledger.foreign_bytes = self.foreign_bytes = nbytes

    @rule(nbytes=st.integers(1, 2 * UNIT), protect=names)
    def reserve(self, nbytes: int, protect: BlockHash) -> None:
        room = self.ledger.limit_bytes - sum(self.writes) - nbytes
        before = list(self.files)

        victims = self.ledger.reserve(nbytes, protect)

        if victims is None:
            at = before.index(protect) if protect in before else len(before)
            left = sum(self.sizes[block] for block in before[at:]) + self.foreign_bytes
            assert left > room or nbytes > self.ledger.limit_bytes, "there was room"
        else:
            assert protect not in victims.blocks
            self.discarded(victims)
            self.writes.append(nbytes)
            assert self.used <= room
            some = victims.blocks or victims.paths
            assert not some or self.used + UNIT > room, "no more than needed"

    @precondition(lambda self: self.writes)
    @rule()
    def settle(self) -> None:
        self.ledger.settle(self.writes.pop())

    @rule(limit=st.integers(0, 6))
    def set_limit(self, limit: int) -> None:
        victims = self.ledger.set_limit(limit * UNIT)

        self.discarded(victims)
        assert self.used <= limit * UNIT or not (self.files or self.others)

    @invariant()
    def it_counts_every_byte(self) -> None:
        self.ledger.check()
        assert self.ledger.total_bytes == sum(self.sizes.values())
        assert self.ledger.used_bytes == self.used
        assert self.ledger.reserved_bytes == sum(self.writes)
        assert len(self.ledger) == len(self.sizes)
        assert {block for block in TREE if block in self.ledger} == self.sizes.keys()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def full_ledger(count: int) -> PagedSSDCacheManager:
    """Files 1 to ``count``, each of a conversation of its own, and room for no more."""
    ledger = PagedSSDCacheManager(count * UNIT)
    for number in range(1, count + 1):
        ledger.add(name(number), UNIT, ROOT)
    return ledger


def test_what_was_used_longest_ago_goes_first() -> None:
    """B59: reads and writes count alike, and what was written last is not the first victim."""
    ledger = full_ledger(10)
    for number in (1, 2, 3):
        ledger.touch([name(number)])

    victims = []
    for number in (11, 12):
        made = ledger.reserve(UNIT, protect=ROOT)
        assert made is not None
        victims += made.blocks
        ledger.settle(UNIT)
        ledger.add(name(number), UNIT, ROOT)

    assert victims == [name(4), name(5)]
    assert ledger.total_bytes == 10 * UNIT


@given(
    st.sets(names, min_size=1),
    st.lists(st.sampled_from([0.0, 1e9, 4e9]), min_size=9, max_size=9),
)
def test_after_a_restart_a_chain_still_goes_leaf_first(
    present: set[BlockHash], times: list[float]
) -> None:
    """B59: whatever the clock said when, and in whatever order the files are found."""
    ledger = PagedSSDCacheManager(100 * UNIT)
    for block in present:
        ledger.add(block, UNIT, TREE[block])
    used_at = {block: times[number] for number, block in enumerate(sorted(present))}

    ledger.order(used_at, TREE)

    order = order_of_removal(ledger)
    assert sorted(order) == sorted(present)
    place = {block: index for index, block in enumerate(order)}
    for block in present:
        if TREE[block] in present:
            assert place[block] < place[TREE[block]], "the leaf goes first"
    recency = {
        block: max(used_at[other] for other in present if reaches(block, other, present))
        for block in present
    }
    assert [recency[block] for block in order] == sorted(recency[block] for block in order)


def reaches(block: BlockHash, other: BlockHash, present: set[BlockHash]) -> bool:
    """Whether ``other`` is ``block`` or hangs on it, with every file in between."""
    while other != block:
        if other not in present:
            return False
        other = TREE.get(other, ROOT)
    return True


def test_a_clock_that_was_wrong_makes_no_file_immortal() -> None:
    """B59: a time in the future counts as the latest, no more."""
    ledger = full_ledger(3)
    year_2099 = 4_070_908_800.0
    ledger.order({name(1): 1e9, name(2): year_2099, name(3): 0.0}, {})
    ledger.touch([name(3)])
    ledger.touch([name(1)])

    assert order_of_removal(ledger) == [name(2), name(3), name(1)]


def test_the_parent_of_what_is_to_be_written_stays() -> None:
    ledger = full_ledger(2)

    assert ledger.reserve(UNIT, protect=name(2)) == Victims([name(1)], [])
    assert ledger.reserve(UNIT, protect=name(2)) is None
    assert name(2) in ledger


def test_room_that_is_reserved_is_not_given_twice() -> None:
    ledger = PagedSSDCacheManager(2 * UNIT)

    assert ledger.reserve(UNIT, protect=ROOT) == Victims([], [])
    assert ledger.reserve(UNIT, protect=ROOT) == Victims([], [])
    assert ledger.reserve(UNIT, protect=ROOT) is None
    ledger.settle(UNIT)
    assert ledger.reserve(UNIT, protect=ROOT) == Victims([], [])


def test_what_can_never_fit_costs_no_file() -> None:
    ledger = full_ledger(3)

    assert ledger.reserve(3 * UNIT + 1, protect=ROOT) is None
    assert len(ledger) == 3


def test_a_write_that_was_not_let_in_cannot_end() -> None:
    ledger = PagedSSDCacheManager(UNIT)

    with pytest.raises(AssertionError, match="more writes ended"):
        ledger.settle(1)


@given(
    st.sets(names, min_size=1),
    st.lists(st.sampled_from([0.0, 1e9, 4e9]), min_size=9, max_size=9),
)
def test_chains_of_other_models_go_leaf_first_too(
    present: set[BlockHash], times: list[float]
) -> None:
    """Who comes back to the other model finds beginnings, not ends that hang in the air."""
    ledger = PagedSSDCacheManager(100 * UNIT)
    for number, block in enumerate(sorted(present)):
        ledger.others.add(block.hex(), UNIT, times[number], block, TREE[block])

    order = [BlockHash(bytes.fromhex(path)) for path in ledger.set_limit(0).paths]

    assert sorted(order) == sorted(present)
    place = {block: index for index, block in enumerate(order)}
    for block in present:
        assert TREE[block] not in present or place[block] < place[TREE[block]]


def test_what_is_not_ours_takes_room_and_stays() -> None:
    """Somebody put a film into our folder: it is not removed, and the limit holds all the same."""
    ledger = full_ledger(3)
    ledger.foreign_bytes = 2 * UNIT

    assert ledger.set_limit(3 * UNIT) == Victims([name(1), name(2)], [])
    ledger.foreign_bytes = 3 * UNIT
    assert ledger.reserve(UNIT, protect=ROOT) is None


def test_files_that_the_model_cannot_use_go_first() -> None:
    """B55: 503 GB of unusable blocks, and 0 usable ones."""
    ledger = full_ledger(2)
    ledger.others.add("old/a", UNIT, 9e9, None, None)
    ledger.set_limit(3 * UNIT)

    assert ledger.reserve(UNIT, protect=ROOT) == Victims([], ["old/a"])
    assert ledger.reserve(UNIT, protect=ROOT) == Victims([name(1)], [])
