"""Whatever is stored, lost and given up: no wrong token is credited, and no right one missed."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cache.world import World

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
