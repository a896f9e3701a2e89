"""Which sequence gets what in the next step. Pure: it decides, others look up and compute.

One round is: ``settle_work`` to the cache, ``settled`` back; ``plan`` to the engine, ``apply``
back. A step decodes one token for every decoding row and computes a chunk of prompts, so a
running stream never waits for more than a chunk. Chunks end at multiples of ``chunk_tokens``
counted from the prompt's first token: where a prompt is cut depends on the prompt alone, never on
what was cached, so that cold and restored runs round alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items

from omlx.cache.blocks import TOKEN_BYTES, BlockId, PackedTokens
from omlx.cache.tickets import BlockRef, WriteTicket
from omlx.core.admission import Admission
from omlx.core.events import Closed, Delta, Event
from omlx.core.limits import SchedulerLimits
from omlx.core.outbox import Outbox
from omlx.core.plan import (
    Fault,
    HostBlock,
    LookUp,
    LostFile,
    Sampled,
    Seal,
    Settled,
    SettleWork,
    StepFailed,
    StepPlan,
    StepResult,
    Store,
    Uid,
    Written,
)
from omlx.core.prefills import Prefills, followers
from omlx.core.restores import Restores
from omlx.core.sequence import Request, Sequence, State
from omlx.core.text import Detokenizer, TextStream
from omlx.core.usage import MemoryGauges


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        eos_tokens: frozenset[int],
        hidden_tokens: frozenset[int],
        detokenizer: Callable[[], Detokenizer],
    ) -> None:
        self.limits = limits
        self._eos = eos_tokens
        self._hidden = hidden_tokens | eos_tokens
        self._detokenizer = detokenizer
        self._next_uid = 1
        self.admission = Admission(limits)
        self._running: OrderedDict[Uid, Sequence] = OrderedDict()
        """Sequences with a slot, in the order of their arrival."""
        self._outbox = Outbox()
        self._ending: set[Uid] = set()
        self._prefills = Prefills(limits)
        self._restores = Restores(limits, self._outbox)
        self._stores: list[Store] = []
        self._writes: list[WriteTicket] = []
        self._drops: list[BlockId] = []
        self._events: list[Event] = []

    def set_limits(self, limits: SchedulerLimits) -> None:
        """What bounds it from now on. What runs goes on, and what waits keeps its place."""
        self.limits = limits
        self._prefills.set_limits(limits)
        self._restores.limits = limits
        self.admission.set_limits(limits)

    # ── from clients ─────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request, now_s: float) -> Uid:
        """The uid of its first choice; the others follow it. Raises NeverFits or QueueFull."""
        assert request.prompt, "an empty prompt gives nothing to sample from"
        assert request.max_tokens > 0, "0 is run as 1 by the caller"
        self.admission.check(request, self.num_running)
        uid, self._next_uid = Uid(self._next_uid), self._next_uid + request.n
        stops, hidden, markup = request.stops, self._hidden, request.markup
        for index in range(request.n):
            text = TextStream(self._detokenizer(), stops=stops, hidden=hidden, markup=markup)
            self.admission.add(Uid(uid + index), request, text, index, now_s)
        return uid

    def cancel(self, uid: Uid, now_s: float) -> None:
        """End every choice of a request. Harmless for one that is unknown or has ended."""
        for sequence in self.admission.remove(uid):
            self._end(sequence, now_s, finish_reason="cancelled")
            self._events.append(Closed.of(sequence))
        for sequence in self._running.values():
            if sequence.leader == uid and not sequence.ending:
                self._end(sequence, now_s, finish_reason="cancelled")

    @property
    def num_waiting(self) -> int:
        return len(self.admission.waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self.admission.waiting and not self._running

    def sequences(self) -> list[Sequence]:
        """Everything that has not ended, oldest first. For the dashboard; changes nothing."""
        return [*self._running.values(), *self.admission.waiting]

    def memory(self, active_bytes: int, peak_bytes: int) -> MemoryGauges | None:
        """Who has the memory, with what MLX says of it; None when nobody counts."""
        return self.admission.gauges(self._running.values(), active_bytes, peak_bytes)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ── to and from the cache ────────────────────────────────────────────────────────────────

    def settle_work(self, now_s: float) -> SettleWork:
        """What to tell the cache before the next step; false when there is nothing."""
        self._make_room(now_s)
        self._fill_slots(now_s)
        limits, running = self.limits, self._running.values()
        look_ups, wishes = [], []
        for sequence in running:
            if sequence.state is State.LOOKING and sequence.times.looked_up is None:
                sequence.times.looked_up = now_s
                found_max = self.admission.restorable(sequence, running)
                packed = PackedTokens(bytes(sequence.packed[: TOKEN_BYTES * found_max]))
                look_ups.append(LookUp(sequence.uid, packed, sequence.request.salt))
            if not (limits.caching and sequence.request.caching):
                sequence.wishes_nothing()
                continue
            wanted = [(sequence.uid, at, wish) for at, wish in sequence.wishes(limits.block_size)]
            if wanted:
                self._outbox.touch(sequence.chain)  # what it extends is in use
            wishes += wanted
        ending = [
            (sequence.uid, tuple(sequence.owed))
            for sequence in running
            if limits.through
            and self._may_close(sequence)
            and not (sequence.filed or sequence.preempted)
        ]
        self._ending = {uid for uid, _ in ending}
        hot_allowed = self.admission.take_hot_allowed(running, self.ahead_bytes)
        return self._outbox.take(look_ups, wishes, ending, hot_allowed)

    def settled(self, answer: Settled, now_s: float) -> None:
        self._drops += answer.drops
        self._writes += answer.writes
        self.admission.pending_bytes = answer.pending_bytes
        for store in answer.stores:
            self._running[store.uid].stores_left += 1
            self._stores.append(store)
        for uid, grant in answer.grants:
            self._restores.granted(self._running[uid], grant, now_s)
        for uid, start in answer.refused:
            self._refused(self._running[uid], start, now_s)
        for uid in self._ending.difference(answer.unfiled):
            self._running[uid].filed = True

    def _refused(self, sequence: Sequence, start: int, now_s: float) -> None:
        limits, ended = self.limits, sequence.times.ended
        patient = limits.through or ended is None or now_s - ended < limits.patience_s
        if patient:
            sequence.refused(start, limits.block_size)
        else:
            self._outbox.given_up += 1

    @property
    def waits_for_files(self) -> bool:
        """Whether something has ended and only waits for the writer."""
        return any(
            s.state is State.CLOSING
            and ((s.in_engine and not s.all_wished) or (self._may_close(s) and not s.filed))
            for s in self._running.values()
        )

    # ── what is read from files ──────────────────────────────────────────────────────────────

    def take_reads(self) -> list[tuple[Uid, tuple[BlockRef, ...]]]:
        """Cold blocks to read, by sequence; each is answered by ``blocks_read``."""
        return self._restores.take_reads()

    def take_stops(self) -> list[Uid]:
        """Sequences whose read nobody needs any more; it is answered all the same."""
        return self._restores.take_stops()

    @property
    def ahead_bytes(self) -> int:
        """Read, or being read, for requests that wait."""
        return self._restores.ahead_bytes

    def look_ahead(self) -> list[LookUp]:
        """Whose cold blocks could be read while they wait; each is answered by ``read_ahead``."""
        if self.admission.memory_is_short:
            return []  # it would take the room that somebody waits for
        return self._restores.look_ahead(self.admission.waiting)

    def read_ahead(self, uid: Uid, cold: Items[tuple[BlockRef, int]]) -> None:
        """The cold blocks that a look-up would grant now, in order, with their bytes in RAM."""
        self._restores.read_ahead(uid, cold)

    def blocks_read(
        self,
        uid: Uid,
        payloads: Items[HostBlock],
        lost: LostFile | None,
        now_s: float,
        *,
        stuck: bool = False,
    ) -> None:
        """Payloads of the blocks asked for, in order, up to the first that is ``lost``.

        ``stuck``: the tier does not answer, so nothing more is asked of it.
        """
        sequence = self._running.get(uid)
        if sequence is None:
            sequence = next((s for s in self.admission.waiting if s.uid == uid), None)
        self._restores.was_read(uid, sequence, payloads, lost, now_s, stuck=stuck)

    # ── to and from the engine ───────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """The next step, or None when the engine has nothing to do."""
        removes = [
            s.uid
            for s in self._running.values()
            if s.state is State.CLOSING and s.in_engine and s.all_wished
        ]
        removes += self._restores.take_unloads()
        decoding = any(s.state is State.DECODE for s in self._running.values())
        loads, admits = self._restores.next_rows(self._running.values(), decoding=decoding)
        prefills, forks, starts = self._prefills.next(self._running, decoding=decoding)
        plan = StepPlan(
            tuple(self._drops),
            tuple(self._stores),
            tuple(self._writes),
            tuple(removes),
            tuple(loads),
            tuple(admits),
            tuple(prefills),
            tuple(forks),
            tuple(starts),
            decoding or bool(starts),
        )
        if plan == StepPlan():
            return None
        self._drops, self._stores, self._writes = [], [], []
        return plan

    def apply(self, plan: StepPlan, result: StepResult | StepFailed, now_s: float) -> None:
        """Record what a step did. Sequences that were cancelled meanwhile are closing already."""
        if isinstance(result, StepFailed):
            self._step_failed(plan, result, now_s)
            return
        self._prefills.ran(result, decoding=plan.decode)
        for fault in result.faults:
            self._fault(fault, now_s)
        faulty = {fault.uid for fault in result.faults}
        self._outbox.seals += result.seals
        self._outbox.written += result.written
        for store in plan.stores:
            self._running[store.uid].stores_left -= 1
        for load in plan.loads:
            if load.uid in self._running:
                self._running[load.uid].times.restored = now_s  # so far
        for admit in plan.admits:
            sequence = self._running[admit.uid]
            sequence.in_engine = admit.uid not in faulty
            sequence.restore_s = result.restore_s
            self._restores.give_back(sequence, stored=admit.uid not in faulty)
        for uid in plan.removes:
            if uid in self._running:
                self._running[uid].in_engine = False
        for prefill in plan.prefills:
            sequence = self._running[prefill.uid]
            if prefill.uid not in faulty:
                share = (prefill.stop - sequence.num_computed) / max(1, result.prefilled_tokens)
                sequence.num_computed = prefill.stop
                sequence.prefill_s += share * result.prefill_s
        for uid in plan.starts:
            if self._running[uid].state is State.PREFILL:
                self._running[uid].state = State.DECODE
        for sampled in result.sampled:
            sequence = self._running.get(sampled.uid)
            if sequence is not None and sequence.state is State.DECODE:
                self._emit(sequence, sampled, now_s)
            elif sequence is not None:
                sequence.adrift = True
        self.close_ended(now_s)

    # ── one sequence's way ───────────────────────────────────────────────────────────────────

    def _make_room(self, now_s: float) -> None:
        """Rows that have no room to grow go back to the queue, those that came last first."""
        while (sequence := self.admission.victim(self._running.values())) is not None:
            before = sequence.state
            sequence.preempt(now_s)
            self.admission.num_preempted += 1
            if before in (State.LOOKING, State.RESTORING, State.READY):
                self._restores.leave(sequence)

    def _fill_slots(self, now_s: float) -> None:
        """A request gets slots for all its choices at once, in the order of arrival."""
        while group := self.admission.take(self._running.values(), self.ahead_bytes):
            for sequence in group:
                self._running[sequence.uid] = sequence
                caching = self.limits.caching and sequence.request.caching
                if sequence.state is State.LOOKING and not caching:
                    sequence.times.looked_up = sequence.times.granted = now_s
                    self._restores.ready(sequence, now_s)

    def _emit(self, sequence: Sequence, sampled: Sampled, now_s: float) -> None:
        sequence.emit(sampled.token, fed=self.limits.feeds_ahead)
        if sequence.times.first_token is None:
            sequence.times.first_token = now_s
        shown = sequence.text.push(sampled.token)
        stopped = sampled.token in self._eos or sequence.text.ended
        full = sequence.is_full(self.admission.max_context)
        finish_reason = "stop" if stopped else "length" if full else None
        event = Delta(sequence.uid, shown, sampled, sequence.leader, sequence.index)
        self._events.append(event)
        if finish_reason is not None:
            self._end(sequence, now_s, finish_reason=finish_reason)

    def _fault(self, fault: Fault, now_s: float) -> None:
        sequence = self._running.get(fault.uid)
        if sequence is None:
            return
        sequence.in_engine = False
        if sequence.state is not State.CLOSING:
            self._end(sequence, now_s, error=fault.message)

    def _end(
        self,
        sequence: Sequence,
        now_s: float,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
    ) -> None:
        """No token will follow. What it holds outside the engine is given back here."""
        before, sequence.state = sequence.state, State.CLOSING
        sequence.preempted = False
        sequence.finish_reason, sequence.error = finish_reason, error
        sequence.times.ended = now_s
        if before in (State.WAITING, State.LOOKING, State.RESTORING, State.READY):
            self._restores.leave(sequence)
        for follower in followers(sequence, self._running):
            self._end(follower, now_s, finish_reason=finish_reason, error=error)

    def close_ended(self, now_s: float) -> None:
        """Tell the end of each sequence that holds nothing and whose blocks can be found.

        Called after each settle; harmless at any time.
        """
        for sequence in list(self._running.values()):
            back = sequence.preempted
            filed = back or sequence.filed or not self.limits.through
            waits = not filed or (back and self._restores.is_reading(sequence))
            if self._may_close(sequence) and not waits and not self._outbox.seals:
                del self._running[sequence.uid]
                self._outbox.touch(sequence.chain)
                self.admission.left(sequence)
                if not back:
                    self._events.append(Closed.of(sequence))

    @staticmethod
    def _may_close(sequence: Sequence) -> bool:
        """Whether it has ended and holds nothing."""
        looking = sequence.times.looked_up is not None and sequence.times.granted is None
        waits = sequence.in_engine or sequence.stores_left or sequence.grant is not None
        return sequence.state is State.CLOSING and not waits and not looking

    def _step_failed(self, plan: StepPlan, failed: StepFailed, now_s: float) -> None:
        """Every row is gone. Their requests end with the error; those still waiting do not."""
        self._outbox.seals += [Seal(store.ticket, False, False) for store in plan.stores]
        self._outbox.written += [Written(ticket, False) for ticket in plan.writes]
        self._drops = [*plan.drops, *self._drops]
        for store in plan.stores:
            self._running[store.uid].stores_left -= 1
        for admit in plan.admits:
            self._running[admit.uid].in_engine = True
            self._restores.give_back(self._running[admit.uid])
        self._restores.step_failed(self._running.values())
        for sequence in self._running.values():
            if sequence.in_engine:
                self._fault(Fault(sequence.uid, failed.message), now_s)
        self.close_ended(now_s)
