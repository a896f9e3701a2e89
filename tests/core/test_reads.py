"""Reads take turns, keep their order, and none waits for ever for a disk that is silent."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from omlx.cache.block_file import HostTensor
from omlx.cache.blocks import BlockHash, pack_tokens
from omlx.cache.tickets import BlockRef
from omlx.core.plan import HostBlock, LostFile
from omlx.core.reads import NotRead, Read, ReadOutcome, ReadQueue

DEADLINE_S = 10.0


def ref(number: int) -> BlockRef:
    name = BlockHash(number.to_bytes(32, "big"))
    return BlockRef(name, name, pack_tokens([number]), 1, None, cold=True)


def payload(ref: BlockRef) -> HostBlock:
    return (HostTensor("kv", "uint8", (32,), memoryview(ref.block_hash)),)


def refs_of(read: int, count: int) -> tuple[BlockRef, ...]:
    return tuple(ref(1000 * read + index) for index in range(count))


@dataclass
class Desk:
    """A queue, the files that its threads hold, and those that lie ready for them."""

    threads: int = 2
    now_s: float = 0.0
    held: dict[int, BlockRef] = field(default_factory=dict)
    ready: dict[int, BlockRef] = field(default_factory=dict)
    begun: list[BlockRef] = field(default_factory=list)
    outcomes: dict[int, ReadOutcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = ReadQueue(self.threads, DEADLINE_S)

    def ask(self, number: int, count: int) -> tuple[BlockRef, ...]:
        refs = refs_of(number, count)

        def ended(outcome: ReadOutcome) -> None:
            assert number not in self.outcomes, "it ended twice"
            self.outcomes[number] = outcome

        self.queue.add(Read(number, refs, ended))
        self.begin()
        return refs

    def begin(self) -> None:
        self.ready |= self.queue.next_files(self.now_s)
        while self.ready and len(self.held) < self.threads:
            ticket = min(self.ready)
            self.held[ticket] = self.ready.pop(ticket)
            self.begun.append(self.held[ticket])
        assert len(self.ready) <= 1, "more files than threads, and one that lies ready"

    def finish(self, ticket: int, result: HostBlock | NotRead | None = None) -> None:
        block = self.held.pop(ticket)
        self.queue.file_read(ticket, payload(block) if result is None else result)
        self.begin()

    def finish_block(self, block: BlockRef, result: NotRead | None = None) -> None:
        self.finish(next(t for t, held in self.held.items() if held == block), result)

    def finish_all(self) -> None:
        while self.held:
            self.finish(min(self.held))

    def wait(self, seconds: float) -> int:
        self.now_s += seconds
        late = self.queue.expire(self.now_s)
        self.begin()
        return late


def test_payloads_come_in_the_order_asked_for_however_files_finish() -> None:
    desk = Desk(threads=3)
    refs = desk.ask(1, 5)

    while desk.held:
        desk.finish(max(desk.held))

    assert desk.outcomes[1] == ReadOutcome(tuple(map(payload, refs)))


def test_a_short_read_does_not_wait_for_the_end_of_a_long_one() -> None:
    desk = Desk(threads=2)
    desk.ask(1, 100)
    desk.ask(2, 1)

    for _ in range(5):
        desk.finish(min(desk.held))

    assert 2 in desk.outcomes
    assert 1 not in desk.outcomes


def test_several_files_of_one_read_are_in_flight() -> None:
    desk = Desk(threads=3)

    desk.ask(1, 5)

    assert len(desk.held) == 3


def test_behind_a_lost_file_only_what_lay_ready_is_begun_and_nothing_is_told() -> None:
    """B49."""
    desk = Desk(threads=2)
    refs = desk.ask(1, 9)
    lost = LostFile(refs[1].block_hash, corrupt=True)
    desk.finish_block(refs[0])
    assert set(desk.held.values()) == {refs[1], refs[2]}

    desk.finish_block(refs[1], NotRead("torn", lost))

    assert desk.outcomes[1] == ReadOutcome((payload(refs[0]),), lost, "torn")
    desk.finish_all()
    assert desk.begun == list(refs[:4])


def test_what_comes_before_a_lost_file_is_waited_for() -> None:
    desk = Desk(threads=2)
    refs = desk.ask(1, 9)
    lost = LostFile(refs[1].block_hash, corrupt=False)

    desk.finish_block(refs[1], NotRead("gone", lost))
    assert 1 not in desk.outcomes
    desk.finish_block(refs[0])

    assert desk.outcomes[1] == ReadOutcome((payload(refs[0]),), lost, "gone")


def test_the_first_of_two_lost_files_counts() -> None:
    desk = Desk(threads=2)
    refs = desk.ask(1, 2)

    for block in reversed(refs):
        lost = LostFile(block.block_hash, corrupt=True)
        desk.finish_block(block, NotRead(f"{refs.index(block)}", lost))

    assert desk.outcomes[1] == ReadOutcome((), LostFile(refs[0].block_hash, True), "0")


def test_a_stopped_read_ends_with_the_files_in_flight() -> None:
    """B35: and others go on."""
    desk = Desk(threads=2)
    refs = desk.ask(1, 9)
    other = desk.ask(2, 2)

    desk.queue.stop(1)
    desk.finish_all()

    assert desk.outcomes[1] == ReadOutcome(tuple(map(payload, refs[:3])))
    assert desk.outcomes[2] == ReadOutcome(tuple(map(payload, other)))
    assert desk.begun == [*refs[:3], *other]


def test_a_read_that_is_stopped_before_its_turn_ends_at_once() -> None:
    desk = Desk(threads=1)
    desk.ask(1, 2)
    desk.ask(2, 2)

    desk.queue.stop(2)

    assert desk.outcomes[2] == ReadOutcome(())


def test_all_reads_can_be_stopped_at_once() -> None:
    desk = Desk(threads=1)
    for number in (1, 2, 3):
        desk.ask(number, 5)

    desk.queue.stop(None)
    desk.finish_all()

    assert desk.outcomes.keys() == {1, 2, 3}
    assert len(desk.begun) == 2


def test_a_file_that_does_not_come_ends_its_read_and_no_other() -> None:
    """K7: it is no loss: the file may be sound."""
    desk = Desk(threads=2)
    refs = desk.ask(1, 3)
    desk.finish_block(refs[0])
    desk.finish_block(refs[2])
    desk.ask(2, 1)
    assert desk.wait(DEADLINE_S - 1) == 0
    desk.finish_block(ref(2000))

    assert desk.wait(1) == 1

    outcome = desk.outcomes[1]
    assert outcome.payloads == (payload(refs[0]),)
    assert outcome.stuck and outcome.lost is None
    assert not desk.outcomes[2].stuck


def test_a_stuck_thread_holds_up_nobody_else() -> None:
    desk = Desk(threads=2)
    hung, _ = desk.ask(1, 2)
    desk.finish_block(ref(1001))
    desk.wait(DEADLINE_S)

    for number in range(2, 6):
        desk.ask(number, 3)
        for _ in range(3):
            (block,) = (b for b in desk.held.values() if b != hung)
            desk.finish_block(block)
        assert not desk.outcomes[number].stuck


def test_while_every_thread_is_stuck_reads_are_misses_at_once_until_one_comes_back() -> None:
    desk = Desk(threads=2)
    refs = desk.ask(1, 2)
    desk.ask(2, 1)
    assert desk.wait(DEADLINE_S) == 2
    assert desk.outcomes[1].stuck
    assert desk.outcomes[2] == ReadOutcome((), None, desk.outcomes[1].reason, stuck=True)

    desk.ask(3, 1)
    assert desk.outcomes[3].stuck

    desk.finish_block(refs[0])
    desk.ask(4, 1)
    desk.finish_block(ref(2000))  # it lay ready all the time, and nobody waits for it
    desk.finish_block(ref(4000))
    assert not desk.outcomes[4].stuck


def test_a_file_that_lies_ready_is_not_late() -> None:
    """The disk is slow, and not silent: each file takes most of the time that it may."""
    desk = Desk(threads=1)
    refs = desk.ask(1, 4)

    for block in refs:
        assert desk.wait(DEADLINE_S - 1) == 0
        desk.finish_block(block)

    assert desk.outcomes[1] == ReadOutcome(tuple(map(payload, refs)))


def test_a_read_of_nothing_ends_at_once() -> None:
    desk = Desk()

    desk.ask(1, 0)

    assert desk.outcomes[1] == ReadOutcome(())


@pytest.mark.parametrize("seed", range(200))
def test_every_read_ends_once_and_tells_the_truth(seed: int) -> None:
    """Whatever is lost, hangs, comes late or is stopped."""
    rng = random.Random(seed)
    desk = Desk(threads=rng.randint(1, 4))
    asked: dict[int, tuple[BlockRef, ...]] = {}
    bad: dict[BlockRef, NotRead] = {}
    stopped: set[int] = set()
    for _ in range(200):
        match rng.choice(["ask", "finish", "finish", "finish", "wait", "stop"]):
            case "ask":
                number = len(asked) + 1
                asked[number] = refs_of(number, rng.randint(0, 6))
                for block in asked[number]:
                    if rng.random() < 0.1:
                        lost = rng.choice([None, LostFile(block.block_hash, corrupt=True)])
                        bad[block] = NotRead("bad", lost)
                desk.ask(number, len(asked[number]))
            case "finish" if desk.held:
                ticket = rng.choice(list(desk.held))
                desk.finish(ticket, bad.get(desk.held[ticket]))
            case "wait":
                desk.wait(rng.choice([0.1, 1.0, 4.0]))
            case "stop" if asked:
                number = rng.choice(list(asked))
                stopped.add(number)
                desk.queue.stop(number)
            case _:
                pass
    while desk.held:
        ticket = min(desk.held)
        desk.finish(ticket, bad.get(desk.held[ticket]))

    assert desk.outcomes.keys() == asked.keys()
    assert desk.queue.num_stuck == 0
    for number, outcome in desk.outcomes.items():
        refs = asked[number]
        count = len(outcome.payloads)
        assert outcome.payloads == tuple(map(payload, refs[:count]))
        if outcome.lost is not None:
            assert outcome.lost.block_hash == refs[count].block_hash
        elif count < len(refs):
            assert outcome.stuck or number in stopped or refs[count] in bad
