"""The real scheduler and the real cache books around a fake engine and a disk in a dict.

Everything runs in lockstep on one thread. Between any two moves something else may happen, drawn
from a seed: a request comes or is cancelled, a block is read, written, lost or damaged.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from omlx.actors.disk_messages import DeleteBlocks
from omlx.actors.messages import BlockLost, BlockWritten, ClearCache, ColdOf, Settle
from omlx.actors.paged_cache import PagedCache
from omlx.cache.block_file import Identity
from omlx.cache.blocks import BlockHash
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.tickets import BlockRef, StoreTicket
from omlx.core.admission import QueueFull
from omlx.core.memory import MemoryPlan, RowMemory
from omlx.core.plan import (
    HostBlock,
    LostFile,
    Settled,
    SettleWork,
    StepFailed,
    StepPlan,
    StepResult,
    Uid,
)
from omlx.core.scheduler import Closed, Delta, Scheduler, SchedulerLimits
from omlx.core.sequence import Request
from omlx.kernel.mailbox import Mailbox, Ref
from tests.sim.fake_engine import EOS, Broken, Export, FakeEngine, Letters, Mishaps

T = TypeVar("T")
NAMESPACE = "fake"
ROUNDS_MAX = 3000

GROWTH = 2
"""Tokens that a row has room for beyond those that it has, where memory is counted."""


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited for something")


@dataclass
class Setup:
    """Sizes in blocks and tokens; ``mishaps`` scales whatever may go wrong."""

    block_size: int = 4
    hot_blocks: int = 1000
    ssd_blocks: int = 1000
    pending_blocks: int = 1000
    chunk_tokens: int = 8
    max_running: int = 4
    max_queued: int = 100
    max_context: int = 1000
    caching: bool = True
    feeds_ahead: bool = True
    cut_before_decode: bool = False
    mishaps: float = 0.0
    clears: bool = False
    restore_tokens: int | None = None
    hot_is_free: bool = False
    memory_tokens: int | None = None
    """Of one byte each, for rows and hot tier together; None: nobody counts."""
    ahead_blocks: int = 0
    """What may be read for requests without a slot."""


@dataclass
class Answer:
    request: Request
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    closed: Closed | None = None
    cancelled: bool = False
    """Before it ended otherwise."""


def memory_plan(setup: Setup) -> MemoryPlan | None:
    if setup.memory_tokens is None:
        return None
    row = RowMemory(1, (), 0, 0, 1, setup.chunk_tokens, growth_tokens=GROWTH)
    return MemoryPlan(setup.memory_tokens, 0, 0, setup.hot_blocks * setup.block_size, row)


class Stage:
    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self.rng = random.Random(seed)
        scale = setup.mishaps
        mishaps = Mishaps(self.rng, 0.02 * scale, 0.01 * scale, 0.05 * scale)
        self.engine = FakeEngine(setup.feeds_ahead, mishaps)
        self.cache = BlockAwarePrefixCache(
            namespace=NAMESPACE,
            block_size=setup.block_size,
            bytes_per_token=1,
            hot_limit_bytes=setup.hot_blocks * setup.block_size,
            ssd_limit_bytes=setup.ssd_blocks * setup.block_size,
            pending_limit_bytes=setup.pending_blocks * setup.block_size,
            initial_blocks=2,
        )
        self.deletes = Mailbox(1 << 16)
        self.actor = PagedCache(
            self.cache, Ref("stats", Mailbox(1)), None, Ref("ssd_writer", self.deletes)
        )
        self.cache.cold.writable = setup.ssd_blocks > 0  # there is nothing to be counted first
        self.core = Scheduler(
            SchedulerLimits(
                max_running=setup.max_running,
                max_queued=setup.max_queued,
                max_context=setup.max_context,
                chunk_tokens=setup.chunk_tokens,
                block_size=setup.block_size,
                caching=setup.caching,
                feeds_ahead=setup.feeds_ahead,
                cut_before_decode=setup.cut_before_decode,
                restore_tokens=setup.restore_tokens,
                hot_is_free=setup.hot_is_free,
                memory=memory_plan(setup),
                prefetch_bytes=setup.ahead_blocks * setup.block_size,
            ),
            eos_tokens=frozenset({EOS}),
            hidden_tokens=frozenset(),
            detokenizer=Letters,
        )
        self.disk: dict[BlockHash, HostBlock] = {}
        self.damaged: set[BlockHash] = set()
        self.to_writer: deque[Export | BlockHash] = deque()
        self.missing: set[BlockHash] = set()
        self.reads: list[tuple[Uid, tuple[BlockRef, ...]]] = []
        self.stopped: set[Uid] = set()
        self.was_read: list[tuple[Uid, BlockHash]] = []
        """Each file that was read to its end, and for whom."""
        self.answers: dict[Uid, Answer] = {}
        self.to_submit: list[Request] = []
        self.cancels = 0.0
        """How likely a cancel is, at each moment."""

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request) -> Uid:
        uid = self.core.submit(request, 0.0)
        for index in range(request.n):
            choice = Uid(uid + index)
            assert choice not in self.answers, "a uid names one sequence"
            self.answers[choice] = Answer(request)
        return uid

    def choices(self, uid: Uid) -> list[Answer]:
        """The answers of one request."""
        return [self.answers[Uid(uid + i)] for i in range(self.answers[uid].request.n)]

    def ask(self, request: Request) -> Answer:
        """One request, from its beginning to its end."""
        uid = self.submit(request)
        self.run()
        return self.answers[uid]

    def cancel(self, uid: Uid) -> None:
        for sequence in self.core.sequences():
            if sequence.leader == uid and not sequence.ending:
                self.answers[sequence.uid].cancelled = True
        self.core.cancel(uid, 0.0)

    def on_closed(self, answer: Answer) -> None:
        """Told at the very moment when a client learns of the end."""

    def _take_events(self) -> None:
        for event in self.core.take_events():
            answer = self.answers[event.uid]
            assert answer.closed is None, "something came after the end, or a second end"
            match event:
                case Delta(text=text, sampled=sampled):
                    answer.tokens.append(sampled.token)
                    answer.text += text
                case Closed():
                    answer.closed = event
                    answer.text += event.text
                    self.on_closed(answer)

    # ── the round ────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Rounds until everything has ended and nothing is left to be told, read or written."""
        for _ in range(ROUNDS_MAX):
            moved = self.round()
            self._submit_next()
            moved = self._move_the_disk() or moved
            if not moved and self.core.idle and not self.to_submit:
                return
        raise AssertionError("somebody waits for ever")

    def round(self) -> bool:
        """Settle, plan, compute, apply. False: there was nothing to do."""
        work = self.core.settle_work(0.0)
        self.interfere()
        if work or self.rng.random() < 0.2:
            self.core.settled(self.settle(work), 0.0)
        self._take_reads()
        self.core.close_ended(0.0)
        self._take_events()
        plan = self.core.plan()
        self.interfere()
        if plan is None:
            return bool(work)
        self._step(plan)
        self.cache.check()
        return True

    def _take_reads(self) -> None:
        """Ask for what is to be read: of those that wait as well."""
        for look_up in self.core.look_ahead():
            cold = at_once(self.actor.receive(ColdOf(look_up.tokens, look_up.salt)))
            self.core.read_ahead(look_up.uid, cast(Any, cold))
        self.reads += self.core.take_reads()
        self.stopped.update(self.core.take_stops())

    def settle(self, work: SettleWork) -> Settled:
        settled = cast(Settled, at_once(self.actor.receive(Settle(work))))
        self._take_deletes()
        return settled

    def _step(self, plan: StepPlan) -> None:
        try:
            output = self.engine.run(plan)
        except Broken:
            self.engine.reset()
            self.interfere()
            self.core.apply(plan, StepFailed("the step broke"), 0.0)
        else:
            result = output.result
            if self.happens(0.1):
                result = self._none_taken(result)  # the writer's mailbox is full
            else:
                self.to_writer.extend(output.exports)
            self.interfere()
            self.core.apply(plan, result, 0.0)
        self._take_events()

    @staticmethod
    def _none_taken(result: StepResult) -> StepResult:
        return replace(
            result,
            seals=tuple(replace(seal, writing=False) for seal in result.seals),
            written=tuple(replace(written, writing=False) for written in result.written),
        )

    # ── whatever else happens ────────────────────────────────────────────────────────────────

    def interfere(self) -> None:
        while self.rng.random() < 0.4:
            self.rng.choice(
                [
                    self._submit_next,
                    self._cancel_one,
                    self._read_one,
                    self._write_one,
                    self._lose_one,
                    self._change_limits,
                ]
            )()
            self._take_events()

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability * self.setup.mishaps

    def _submit_next(self) -> None:
        if self.to_submit:
            try:
                self.submit(self.to_submit[0])
            except QueueFull:
                return
            del self.to_submit[0]

    def _cancel_one(self) -> None:
        if self.answers and self.rng.random() < self.cancels:
            self.cancel(self.rng.choice(list(self.answers)))

    def _lose_one(self) -> None:
        if self.disk and self.happens(0.3):
            name = self.rng.choice(sorted(self.disk))
            if self.rng.random() < 0.5:
                del self.disk[name]
            else:
                self.damaged.add(name)

    def _change_limits(self) -> None:
        if self.setup.clears and self.happens(0.1):
            hot, ssd = self.rng.random() < 0.7, self.rng.random() < 0.5
            at_once(self.actor.receive(ClearCache(hot, ssd)))
        if self.setup.clears and self.happens(0.1):
            blocks = self.rng.randint(0, self.setup.hot_blocks)
            self.cache.pool.set_limit(blocks * self.setup.block_size)
        self._take_deletes()

    # ── the disk ─────────────────────────────────────────────────────────────────────────────

    def _move_the_disk(self) -> bool:
        """Whether there was anything to read or write."""
        moved = bool(self.reads or self.to_writer)
        self._read_one()
        self._write_one()
        return moved

    def _read_one(self) -> None:
        if not self.reads:
            return
        uid, refs = self.reads.pop(self.rng.randrange(len(self.reads)))
        payloads: list[HostBlock] = []
        lost = None
        stuck = False
        for ref in refs:
            if uid in self.stopped and self.rng.random() < 0.5:
                break  # nobody needs it any more
            if self.happens(0.05):
                stuck = self.rng.random() < 0.5
                break  # it can't be read now
            block = self.disk.get(ref.block_hash)
            if block is None and ref.queued:
                block = self._queued(ref.block_hash)
            damaged = ref.block_hash in self.damaged
            if block is None or damaged:
                self.disk.pop(ref.block_hash, None)
                self.damaged.discard(ref.block_hash)
                lost = LostFile(ref.block_hash, corrupt=damaged)
                break
            payloads.append(block)
            self.was_read.append((uid, ref.block_hash))
        self.stopped.discard(uid)
        self.core.blocks_read(uid, payloads, lost, 0.0, stuck=stuck)

    def _queued(self, name: BlockHash) -> HostBlock | None:
        """The payload of a block that waits to be written."""
        jobs = [job for job in self.to_writer if isinstance(job, Export)]
        return next((job.payload for job in jobs if job.ticket.block_hash == name), None)

    def _write_one(self) -> None:
        if not self.to_writer:
            return
        job = self.to_writer.popleft()
        if not isinstance(job, Export):
            self.disk.pop(job, None)
            return
        ticket = job.ticket
        block = ticket.wish if isinstance(ticket, StoreTicket) else ticket
        name = block.block_hash
        if block.parent in self.missing or self.happens(0.1):
            self.missing.add(name)
            at_once(self.actor.receive(BlockLost(name, "no luck", tier_down=False)))
        else:
            self.missing.discard(name)
            self.damaged.discard(name)
            self.disk[name] = job.payload
            identity = Identity(NAMESPACE, name, block.parent, block.tokens)
            at_once(self.actor.receive(BlockWritten(identity, len(block.tokens) // 4)))
        self._take_deletes()

    def _take_deletes(self) -> None:
        while len(self.deletes):
            message = at_once(self.deletes.get()).message
            assert isinstance(message, DeleteBlocks)
            self.to_writer.extend(message.block_hashes)

    # ── at the end ───────────────────────────────────────────────────────────────────────────

    def check_released(self) -> None:
        """Nothing is held, waits or lies about, and RAM holds what the books say."""
        self.setup.mishaps = 0.0
        self.engine.mishaps = Mishaps(self.rng)
        for _ in range(10):  # dirty blocks may be left; their writing is no end in itself
            while self._move_the_disk():
                pass
            self.core.settled(self.settle(self.core.settle_work(0.0)), 0.0)
            plan = self.core.plan()
            if plan is not None:
                self._step(plan)
        while self._move_the_disk():
            pass
        cache, pool = self.cache, self.cache.pool
        cache.check()
        assert not self.engine.rows, "a row outlived its sequence"
        assert not self.engine.loading, "a part of a prefix outlived its sequence"
        assert self.core.ahead_bytes == 0, "what was read ahead outlived its sequence"
        assert pool.num_held == 0, "references return to zero"
        assert cache.cold.pending_bytes == 0, "something is on its way for ever"
        assert len(self.engine.blocks) == pool.num_cached, "RAM holds what nobody knows"
        assert all(answer.closed is not None for answer in self.answers.values())
