"""Who gets a slot and when, who has to give one back, and how much is left for the hot tier. Pure.

Requests wait in the order of arrival, and nobody passes the first. It gets slots for all its
choices at once, when these are free and its rows will find memory. Nobody knows how long an answer
will be, and clients ask for far more tokens than they get. So a row is reckoned with what answers
usually take: as long as nine of ten of the last ones were, twice what it has by now if that is
more, and never more than it asked for.

When that was too little, the rows that came last go back to the head of the queue, until the others
fit. What they computed is stored first, so most of it is restored later and not computed again. The
oldest row stays, so something always gets on; and nothing was admitted that could not end alone.

The hot tier gives way before anybody waits: it may have what the rows, as reckoned, leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from omlx.core.limits import SchedulerLimits
from omlx.core.memory import MemoryPlan
from omlx.core.plan import Uid
from omlx.core.sequence import Request, Sequence, State, Times
from omlx.core.text import TextStream
from omlx.core.usage import MemoryGauges

ANSWERS_KEPT = 64
"""Lengths of the last answers."""

ANSWERS_MIN = 10
"""Of fewer nothing is learned."""

USUAL_TOKENS = 512
"""Of an answer, until some are known."""

USUAL_SHARE = 0.9
"""Of the answers are no longer than what is reckoned with."""


class QueueFull(Exception):
    """As many requests run and wait as may."""


class Admission:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.set_limits(limits)
        self.waiting: deque[Sequence] = deque()
        self.pending_bytes = 0
        """What waits to be written, beside everything else."""
        self.num_preempted = 0
        self.hot_allowed: int | None = None
        """What the cache was told last."""
        self.memory_is_short = False
        """Whether the hot tier has less than it is set to."""
        self.waits_for_memory = False
        """Whether the head of the queue has its slots, but no memory."""
        self._answers: deque[int] = deque(maxlen=ANSWERS_KEPT)

    def set_limits(self, limits: SchedulerLimits) -> None:
        self.limits, plan, most = limits, limits.memory, limits.max_context
        self.max_context = most if plan is None else plan.longest(most)
        """Most tokens of a row: those that it may have, and that memory has room for."""

    def check(self, request: Request, num_running: int) -> None:
        """Raises NeverFits for what could not be served by an idle server either, or QueueFull."""
        limits, num_waiting = self.limits, len(self.waiting)
        if limits.memory is not None:
            limits.memory.check(len(request.prompt), request.n)
        room = limits.max_running + limits.max_queued - num_running - num_waiting
        if request.n > min(room, limits.max_running):
            raise QueueFull(
                f"{num_running} requests run and {num_waiting} wait; the limits "
                f"are {limits.max_running} and {limits.max_queued}, and this one is {request.n}"
            )

    def add(self, uid: Uid, request: Request, text: TextStream, index: int, now_s: float) -> None:
        """Let a choice of a request wait, the first one first."""
        self.waiting.append(
            Sequence(
                uid,
                request,
                text,
                Times(now_s),
                index,
                recurrent=self.limits.checkpoint_interval is not None,
                embedded=self.limits.embedded,
            )
        )

    def left(self, sequence: Sequence) -> None:
        """It holds nothing any more: it has ended, or waits again, before all that came later."""
        if sequence.preempted:
            sequence.resume()
            place = sum(other.uid < sequence.uid for other in self.waiting)
            self.waiting.insert(place, sequence)
        elif sequence.finish_reason in ("stop", "length"):
            self._answers.append(sequence.num_generated)

    def remove(self, leader: Uid) -> list[Sequence]:
        """Take every choice of a request out of the queue."""
        gone = [sequence for sequence in self.waiting if sequence.leader == leader]
        for sequence in gone:
            self.waiting.remove(sequence)
        return gone

    # ── who comes next ───────────────────────────────────────────────────────────────────────

    def take(self, running: Collection[Sequence], ahead_bytes: int) -> list[Sequence]:
        """The choices of the first request, if there are slots and memory for all of them.

        LOOKING or, those that wait for the first one's prompt, FORKING.
        """
        self.waits_for_memory = False
        group = self._first()
        if not group or len(group) > self.limits.max_running - len(running):
            return []
        if not self._fits(group, running, ahead_bytes):
            self.waits_for_memory = True
            return []
        for sequence in group:
            self.waiting.popleft()
            follows = sequence.index and not sequence.resumed
            sequence.state = State.FORKING if follows else State.LOOKING
        return group

    def _first(self) -> list[Sequence]:
        if not self.waiting:
            return []
        head = self.waiting[0]
        return [head] if head.resumed else [s for s in self.waiting if s.leader == head.uid]

    def _fits(self, group: list[Sequence], running: Collection[Sequence], ahead_bytes: int) -> bool:
        plan = self.limits.memory
        rows = _with_rows(running)
        if plan is None or not rows:
            return True  # what can't be alone was refused
        need = self._need((*rows, *group), plan)
        copies = self._copies((*rows, group[0]), plan)
        return need + copies + self._on_host(ahead_bytes, plan) <= plan.room_bytes

    def _need(self, rows: Items[Sequence], plan: MemoryPlan) -> int:
        """Of rows at their end, as reckoned now."""
        return plan.row.need([self._expected(s) for s in rows], *_prompts(rows))

    def _expected(self, sequence: Sequence) -> int:
        """Tokens of it at its end, as reckoned now."""
        request = sequence.request
        answer = min(request.max_tokens, max(self._usual(), 2 * sequence.num_generated))
        end = min(sequence.num_prompt + answer, self.max_context)
        return max(end, sequence.num_tokens + 1)

    def _usual(self) -> int:
        if len(self._answers) < ANSWERS_MIN:
            return USUAL_TOKENS
        return sorted(self._answers)[int(USUAL_SHARE * len(self._answers))]

    def _copies(self, sequences: Iterable[Sequence], plan: MemoryPlan) -> int:
        """Prefixes are there twice while they are restored: as blocks, and in their rows."""
        return plan.row.block_token_bytes * sum(map(self._restored_tokens, sequences))

    def _restored_tokens(self, sequence: Sequence) -> int:
        if sequence.grant is not None:
            return sum(ref.take for ref in sequence.grant.blocks)
        caching = self.limits.caching and sequence.request.caching
        looks = sequence.state in (State.WAITING, State.LOOKING) and caching
        return sequence.num_tokens if looks else 0

    def restorable(self, sequence: Sequence, running: Collection[Sequence]) -> int:
        """Of its tokens, those that a look-up may find: for more there is no room twice."""
        plan = self.limits.memory
        if plan is None:
            return sequence.num_tokens
        rows = _with_rows(running)
        others = self._copies((s for s in rows if s is not sequence), plan)
        now = plan.row.need([s.num_tokens + 1 for s in rows], *_prompts(rows))
        spare = plan.room_bytes - others - now
        return min(sequence.num_tokens, max(0, spare) // max(1, plan.row.block_token_bytes))

    # ── under pressure ───────────────────────────────────────────────────────────────────────

    def victim(self, running: Collection[Sequence]) -> Sequence | None:
        """Who goes back to the queue, because rows have outgrown what they were reckoned with."""
        plan = self.limits.memory
        rows = [s for s in running if s.state is not State.CLOSING]
        if plan is None or len(rows) < 2:
            return None
        now = plan.row.need([s.num_tokens + 1 for s in rows], *_prompts(rows))
        fits = now + self._copies(rows, plan) <= plan.room_bytes
        return None if fits else max(rows, key=lambda s: s.uid)

    def take_hot_allowed(self, running: Collection[Sequence], ahead_bytes: int) -> int | None:
        """What the hot tier may have, if that is not what was told last."""
        plan = self.limits.memory
        if plan is None or not self.limits.caching:
            return None
        taken = self.reserved_bytes(running) + self._on_host(ahead_bytes, plan)
        before, self.hot_allowed = self.hot_allowed, max(0, plan.room_bytes - taken)
        self.hot_allowed = min(self.hot_allowed, plan.hot_bytes)
        self.memory_is_short = self.hot_allowed < plan.hot_bytes
        return None if self.hot_allowed == before else self.hot_allowed

    def _on_host(self, ahead_bytes: int, plan: MemoryPlan) -> int:
        """What was read ahead, and what waits to be written."""
        return 0 if plan.host_is_apart else ahead_bytes + self.pending_bytes

    def reserved_bytes(self, running: Collection[Sequence]) -> int:
        """What the rows will have taken at their end, as reckoned now."""
        plan = self.limits.memory
        if plan is None:
            return 0
        rows = _with_rows(running)
        return self._need(rows, plan) + self._copies(rows, plan)

    def gauges(
        self, running: Collection[Sequence], active_bytes: int, peak_bytes: int
    ) -> MemoryGauges | None:
        """Who has the memory now; the last two numbers are measured. None: nobody counts."""
        plan = self.limits.memory
        if plan is None:
            return None
        lengths = [s.num_tokens for s in running if s.in_engine]
        return MemoryGauges(
            total_bytes=plan.total_bytes,
            weights_bytes=plan.weight_bytes,
            reserve_bytes=plan.reserve_bytes,
            live_kv_bytes=plan.row.caches(len(lengths), max(lengths, default=0)),
            reserved_bytes=self.reserved_bytes(running),
            hot_allowed_bytes=self.hot_allowed or 0,
            active_bytes=active_bytes,
            peak_bytes=peak_bytes,
            waiting=len(self.waiting) if self.waits_for_memory else 0,
            preempted=self.num_preempted,
        )


def _with_rows(running: Iterable[Sequence]) -> list[Sequence]:
    """Those that have a row in the engine, or will have one."""
    return [s for s in running if s.in_engine or s.state is not State.CLOSING]


def _prompts(rows: Iterable[Sequence]) -> tuple[int, int]:
    """(the longest of those that are still to be computed, how many they are)"""
    over = (State.DECODE, State.FORKING, State.CLOSING)
    lengths = [s.last_prompt_position for s in rows if s.state not in over]
    return max(lengths, default=0), len(lengths)
