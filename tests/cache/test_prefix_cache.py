"""Whatever is stored, lost and given up: no wrong token is credited, and no right one missed."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.cache.blocks import chain_hash, pack_tokens, root_hash
from omlx.cache.tickets import Reason, ReuseEnded, StoreWish
from tests.cache.world import BYTES_PER_TOKEN, NAMESPACE, Sequence, World

SALTS = st.sampled_from(["", "", "", "s"])
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
more = st.lists(st.integers(0, 1), max_size=5)
limits = st.sampled_from([0, 1, 2, 3, 5, 100])


class PrefixCache(RuleBasedStateMachine):
    """The cache in a world that remembers what each block was computed from."""

    @initialize(size=st.integers(2, 4), hot=limits, ssd=limits, pending=limits)
    def begin(self, size: int, hot: int, ssd: int, pending: int) -> None:
        self.world = World(size, hot, ssd, pending)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    @rule(salt=SALTS, tokens=prompts)
    def submit(self, salt: str, tokens: list[int]) -> None:
        self.world.submit(salt, tokens)

    @precondition(lambda self: any(not s.restored for s in self.world.sequences))
    @rule(data=st.data(), readable=st.sampled_from([99, 99, 0, 1]))
    def restore(self, data: st.DataObject, readable: int) -> None:
        waiting = [s for s in self.world.sequences if not s.restored]
        index = data.draw(st.integers(0, len(waiting) - 1), "sequence")
        self.world.restore(waiting[index], readable)

    @precondition(lambda self: any(s.restored for s in self.world.sequences))
    @rule(data=st.data(), continuation=more, tail=st.booleans(), persist=st.booleans())
    def compute(
        self, data: st.DataObject, continuation: list[int], tail: bool, persist: bool
    ) -> None:
        running = [s for s in self.world.sequences if s.restored]
        sequence = running[data.draw(st.integers(0, len(running) - 1), "sequence")]
        self.world.compute(sequence, continuation)
        self.world.wish(sequence, tail=tail, persist_tail=persist)

    @precondition(lambda self: any(s.restored for s in self.world.sequences))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        running = [s for s in self.world.sequences if s.restored]
        self.world.finish(running[data.draw(st.integers(0, len(running) - 1), "sequence")])

    @rule(salt=SALTS, tokens=prompts, continuation=more)
    def from_beginning_to_end(self, salt: str, tokens: list[int], continuation: list[int]) -> None:
        """What the other rules do in small steps."""
        sequence = self.world.submit(salt, tokens)
        self.world.restore(sequence, 99)
        self.world.compute(sequence, continuation)
        self.world.wish(sequence, tail=True, persist_tail=True)
        while self.world.tickets:
            self.world.export(good=True, accepted=True)
            self.world.seal()
        self.world.finish(sequence)

    # ── the engine and the disk ──────────────────────────────────────────────────────────────

    @precondition(lambda self: self.world.tickets)
    @rule(good=st.sampled_from([True, True, False]), accepted=st.sampled_from([True, True, False]))
    def export(self, good: bool, accepted: bool) -> None:
        self.world.export(good=good, accepted=accepted)

    @precondition(lambda self: self.world.tickets)
    @rule()
    def seal(self) -> None:
        self.world.seal()

    @rule(most=st.integers(1, 3), accepted=st.sampled_from([True, True, False]))
    def take_writes(self, most: int, accepted: bool) -> None:
        self.world.take_writes(most, accepted=accepted)

    @precondition(lambda self: self.world.to_writer)
    @rule(good=st.sampled_from([True, True, True, False]))
    def write(self, good: bool) -> None:
        self.world.write(good=good)

    @precondition(lambda self: self.world.to_writer)
    @rule()
    def write_everything(self) -> None:
        while self.world.to_writer:
            self.world.write(good=True)

    @rule()
    def the_writer_crashes(self) -> None:
        self.world.writer_crashes()

    @precondition(lambda self: self.world.disk)
    @rule(data=st.data(), vanishes=st.booleans())
    def a_file_is_damaged(self, data: st.DataObject, vanishes: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.disk)), "file")
        self.world.damage(name, vanishes=vanishes)

    # ── the operator ─────────────────────────────────────────────────────────────────────────

    @rule(hot=limits)
    def set_hot_limit(self, hot: int) -> None:
        self.world.set_hot_limit(hot)

    @rule(ssd=limits)
    def set_ssd_limit(self, ssd: int) -> None:
        self.world.set_ssd_limit(ssd)

    @rule(hot=st.booleans(), ssd=st.booleans())
    def clear(self, hot: bool, ssd: bool) -> None:
        self.world.clear(hot=hot, ssd=ssd)

    @rule()
    def the_scheduler_crashes(self) -> None:
        self.world.start_over()

    @rule()
    def the_process_restarts(self) -> None:
        self.world.begin()

    # ── what always holds ────────────────────────────────────────────────────────────────────

    @invariant()
    def everything_is_sound(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for sequence in world.sequences:
            if not sequence.restored:
                world.restore(sequence, 99)
        while world.tickets:
            world.export(good=True, accepted=True)
            world.seal()
        world.check()
        assert world.cache.pool.num_held == 0, "references return to zero"


TestPrefixCache = PrefixCache.TestCase
TestPrefixCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# ── one promise each ─────────────────────────────────────────────────────────────────────────

PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 1]


def make_world(*, hot: int = 100, ssd: int = 100, pending: int = 100) -> World:
    return World(block_size=4, hot=hot, ssd=ssd, pending=pending)


def answered(world: World, tokens: list[int], *, accepted: bool = True) -> Sequence:
    """A request from its beginning to its end; ``accepted``: the writer takes its blocks."""
    sequence = world.submit("", list(tokens))
    world.restore(sequence, 99)
    world.compute(sequence, [])
    world.wish(sequence, tail=True, persist_tail=True)
    while world.tickets:
        world.export(good=True, accepted=accepted)
        world.seal()
    world.finish(sequence)
    world.check()
    return sequence


def write_everything(world: World) -> None:
    while world.to_writer or world.cache.files.num_dirty:
        world.take_writes(99, accepted=True)
        world.write(good=True)
    world.check()


def cached(world: World, tokens: list[int]) -> tuple[int, int]:
    """Tokens in RAM and in files."""
    ram, ssd, _ = world.cache.probe(pack_tokens(tokens))
    return ram, ssd


def test_nothing_is_found_in_an_empty_cache() -> None:
    grant = make_world().submit("", PROMPT).grant

    assert (grant.blocks, grant.num_cached) == ((), 0)
    assert grant.ended == ReuseEnded(Reason.NO_BLOCK, 0)


def test_the_last_token_of_a_prompt_is_never_credited() -> None:
    """K1: or there would be nothing to sample from."""
    world = make_world()
    answered(world, PROMPT)

    for length in range(1, len(PROMPT) + 1):
        assert world.submit("", PROMPT[:length]).grant.num_cached == length - 1


def test_why_reuse_ended_is_told() -> None:
    """K13."""
    world = make_world()
    answered(world, PROMPT)

    def why(tokens: list[int]) -> ReuseEnded:
        return world.submit("", tokens).grant.ended

    assert why(PROMPT) == ReuseEnded(Reason.FULL, 8)
    assert why([*PROMPT, 0]) == ReuseEnded(Reason.FULL, 9)
    assert why([*PROMPT, 0, 0]) == ReuseEnded(Reason.NO_BLOCK, 9)
    assert why([*PROMPT[:6], 1, 1, 1]) == ReuseEnded(Reason.DIVERGED, 6)
    assert why([1, 1, 1]) == ReuseEnded(Reason.DIVERGED, 0)


def test_what_was_given_up_is_told_from_what_never_was() -> None:
    """K13."""
    world = make_world(ssd=0)
    answered(world, PROMPT)
    world.clear(hot=True, ssd=True)

    assert world.submit("", PROMPT).grant.ended == ReuseEnded(Reason.EVICTED, 0)
    assert world.submit("", [1] * 9).grant.ended == ReuseEnded(Reason.NO_BLOCK, 0)


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    """In RAM at once; on disk when it has its own file."""
    world = make_world()
    answered(world, PROMPT[:6])
    write_everything(world)
    assert len(world.ram) == len(world.disk) == 2

    answered(world, PROMPT[:7])
    assert len(world.ram) == 2
    assert cached(world, PROMPT) == (7, 0)
    write_everything(world)
    assert len(world.disk) == 2


def test_a_shorter_tail_is_not_stored_beside_a_longer_one() -> None:
    world = make_world()
    answered(world, PROMPT[:7])

    answered(world, PROMPT[:6])

    assert len(world.ram) == 2


def test_a_tail_that_was_not_worth_a_file_can_become_so() -> None:
    world = make_world()
    for persist in (False, True):
        sequence = world.submit("", PROMPT[:6])
        world.restore(sequence, 99)
        world.compute(sequence, [])
        world.wish(sequence, tail=True, persist_tail=persist)
        while world.tickets:
            world.export(good=True, accepted=True)
            world.seal()
        write_everything(world)
        assert len(world.disk) == 1 + persist


def test_what_the_writer_had_no_room_for_stays_and_is_offered_again() -> None:
    world = make_world(pending=1)
    answered(world, PROMPT)
    assert world.cache.stats.pending_stops > 0
    assert world.cache.files.num_dirty > 0

    write_everything(world)

    world.begin()
    assert cached(world, PROMPT) == (0, 8)


def test_what_failed_to_be_written_stays_and_is_offered_again() -> None:
    world = make_world()
    answered(world, PROMPT)
    while world.to_writer:
        world.write(good=False)
    assert not world.disk

    write_everything(world)

    assert len(world.disk) == 3


def test_a_child_whose_parent_was_not_stored_is_not_asked_for() -> None:
    """Nobody could reach it."""
    world = make_world()
    unknown = chain_hash(root_hash(NAMESPACE), pack_tokens([0, 0, 0, 0]))
    tokens = pack_tokens([1, 1, 1, 1])

    assert world.cache.store(StoreWish(unknown, chain_hash(unknown, tokens), tokens, True)) is None


def test_the_parent_of_what_is_being_stored_is_not_given_up_for_it() -> None:
    world = make_world(hot=1, ssd=0)

    answered(world, PROMPT)

    assert cached(world, PROMPT) == (4, 0)


def test_a_file_that_had_to_go_is_written_again_when_its_block_is_used() -> None:
    """Not before: or two blocks would push each other out for ever."""
    world = make_world(ssd=2)
    first, second = [0] * 5, [1] * 5
    for prompt in (first, second, [0, 1, 0, 1, 0]):
        answered(world, prompt)
        write_everything(world)
    assert cached(world, first) == (4, 0)
    assert world.cache.files.num_dirty == 0

    answered(world, first)
    write_everything(world)

    world.begin()
    assert cached(world, first)[1] == 4


def test_the_files_of_a_cleared_cache_do_not_come_back() -> None:
    """B22: not those that were on their way either."""
    world = make_world()
    answered(world, PROMPT)

    world.clear(hot=True, ssd=True)
    while world.to_writer:
        world.write(good=True)

    assert cached(world, PROMPT) == (0, 0)
    assert not world.disk
    assert world.cache.cold.pending_bytes == 0


def test_what_is_computed_again_after_a_clear_stays() -> None:
    """B22: although its former self was on its way to a file when that was cleared."""
    world = make_world()
    answered(world, PROMPT[:4])
    world.clear(hot=True, ssd=True)

    answered(world, PROMPT[:4])
    write_everything(world)

    assert len(world.disk) == 1


def test_a_child_that_is_written_after_its_parent_had_to_go_goes_too() -> None:
    """K5: what is persisted of a chain is a prefix of it."""
    world = make_world()
    answered(world, PROMPT)
    world.write(good=True)
    world.set_ssd_limit(0)
    world.set_ssd_limit(100)

    while world.to_writer:
        world.write(good=True)

    assert not world.disk
    assert len(world.cache.cold.ledger) == 0


def test_a_lower_limit_holds_for_what_was_on_its_way_as_well() -> None:
    """B55, K6."""
    world = make_world()
    answered(world, PROMPT)
    world.set_ssd_limit(1)

    while world.to_writer:
        world.write(good=True)
        world.check()

    assert len(world.disk) <= 1


def test_storing_what_is_there_adds_no_byte() -> None:
    """B56."""
    world = make_world()
    answered(world, PROMPT)
    write_everything(world)
    before = (world.cache.cold.ledger.total_bytes, world.cache.pool.hot_bytes, len(world.ram))

    answered(world, PROMPT)
    write_everything(world)

    assert (
        world.cache.cold.ledger.total_bytes,
        world.cache.pool.hot_bytes,
        len(world.ram),
    ) == before


def test_after_a_restart_every_byte_is_counted_at_once() -> None:
    """B56."""
    world = make_world()
    answered(world, PROMPT)
    write_everything(world)
    before = world.cache.cold.ledger.total_bytes

    world.begin()

    assert world.cache.cold.ledger.total_bytes == before > 0
    assert cached(world, PROMPT) == (0, 8)


def test_the_order_of_use_survives_a_restart() -> None:
    """B59."""
    world = make_world()
    old, new = [0] * 5, [1] * 5
    for prompt in (new, old):
        answered(world, prompt)
        write_everything(world)
    world.begin()
    times = {
        name: float(sum(block.content[1])) for name, block in world.disk.items()
    }  # those of ones are recent

    world.cache.files.order_files(times)
    world.set_ssd_limit(2)
    write_everything(world)

    assert cached(world, new) == (0, 4)
    assert cached(world, old) == (0, 0)


def test_a_hit_makes_a_chain_recent_in_both_tiers() -> None:
    """B59: LRU over reads and writes."""
    world = make_world(hot=3, ssd=3)
    first, second, third = [0] * 5, [1] * 5, [0, 1, 0, 1, 0]
    for prompt in (first, second, first, third):
        answered(world, prompt)
        write_everything(world)

    assert cached(world, first)[0] == 4
    world.begin()
    assert cached(world, first) == (0, 4)
    assert cached(world, second) == (0, 0)


def test_a_clear_says_how_much_it_cleared() -> None:
    world = make_world()
    answered(world, PROMPT)
    write_everything(world)

    assert world.cache.clear(hot=False, ssd=True) == 3
    assert world.cache.clear(hot=True, ssd=True) == 3
    assert world.cache.clear(hot=True, ssd=True) == 0


def test_a_chain_that_stops_being_persisted_is_counted() -> None:
    world = make_world()

    answered(world, PROMPT, accepted=False)

    assert world.cache.stats.pending_stops > 0
    assert world.cache.cold.pending_bytes == 0
    assert world.cache.files.num_dirty == 3


def test_the_counters_say_what_happened() -> None:
    """B65: hits and misses are block look-ups; bytes are what went over the disk's edge."""
    world = make_world(hot=2)
    stats = world.cache.stats
    answered(world, PROMPT)
    assert (stats.hits, stats.misses) == (0, 3)
    write_everything(world)
    assert stats.ssd_written_bytes == world.cache.cold.ledger.total_bytes > 0

    sequence = world.submit("", PROMPT)
    assert (stats.hits, stats.misses) == (2, 4)
    world.restore(sequence, 99)
    cold = [ref for ref in sequence.grant.blocks if ref.cold]
    assert stats.ssd_restored_bytes == sum(ref.num_tokens for ref in cold) * BYTES_PER_TOKEN

    world.submit("", [*PROMPT[:6], 1, 1, 1])
    assert stats.cow_copies == 1, "the rest of a block is about to be written differently"


def test_what_two_hold_at_once_is_shared() -> None:
    """B19: one block, two readers."""
    world = make_world()
    answered(world, PROMPT)

    one, other = world.submit("", PROMPT), world.submit("", PROMPT)

    assert [r.block_id for r in one.grant.blocks] == [r.block_id for r in other.grant.blocks]
    assert world.cache.stats.shared_blocks == 2


def test_evictions_are_counted_where_they_cost_something() -> None:
    world = make_world(hot=2, ssd=3)
    answered(world, [0] * 8)
    write_everything(world)
    answered(world, [1] * 8)
    assert world.cache.stats.evictions_ram == 0
    write_everything(world)
    assert world.cache.stats.evictions_ssd == 2

    no_files = make_world(hot=2, ssd=0)
    answered(no_files, [0] * 8)
    answered(no_files, [1] * 8)
    assert no_files.cache.stats.evictions_ram == 2


def test_damage_is_counted_and_a_file_that_is_gone_is_not_damage() -> None:
    """B49."""
    world = make_world(hot=0)
    answered(world, PROMPT)
    write_everything(world)
    first, second = list(world.disk)[:2]
    world.damage(second, vanishes=False)
    world.restore(world.submit("", PROMPT), 99)
    assert world.cache.stats.corrupt_blocks == 1
    assert cached(world, PROMPT) == (0, 4)

    world.damage(first, vanishes=True)
    world.restore(world.submit("", PROMPT), 99)
    assert world.cache.stats.corrupt_blocks == 1
    assert cached(world, PROMPT) == (0, 0)


def test_a_damaged_file_is_replaced_from_ram() -> None:
    world = make_world()
    answered(world, PROMPT)
    write_everything(world)
    name = next(iter(world.disk))
    del world.disk[name]
    world.cache.files.lost(name, corrupt=True)

    write_everything(world)

    assert name in world.disk
