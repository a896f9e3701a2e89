"""The way of a prefix from its grant into a row: read, read ahead, loaded in parts, given back.

A sequence that waits for its slot has its cold blocks read ahead. Nothing is held for it meanwhile,
so with its slot it is looked up as every other one; what was read of that is not read again. While
rows decode, a step restores no more than ``SchedulerLimits.restore_tokens``, in the order of
arrival, and a long prefix takes several steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from omlx.cache.blocks import PackedTokens
from omlx.cache.tickets import BlockRef, Grant, Reason, ReuseEnded
from omlx.core.limits import SchedulerLimits
from omlx.core.outbox import Outbox
from omlx.core.plan import Admit, HostBlock, Load, LookUp, LostFile, Uid
from omlx.core.sequence import Sequence, State

AHEAD_MAX = 2
"""Sequences that are read ahead at once; more would only keep the disk from those with a slot."""


class Restores:
    def __init__(self, limits: SchedulerLimits, outbox: Outbox) -> None:
        self.limits = limits
        self._outbox = outbox
        self._to_read: list[tuple[Uid, tuple[BlockRef, ...]]] = []
        self._to_stop: list[Uid] = []
        self._to_unload: list[Uid] = []
        self._ahead: dict[Uid, Sequence] = {}
        """Sequences that wait for what is read ahead, or for the answer what that would be."""
        self._in_flight: set[Uid] = set()
        """Whose read was asked for and is not answered."""
        self._early: set[Uid] = set()
        """Sequences whose read was begun before they were granted anything."""
        self.ahead_bytes = 0
        """Read, or being read, for sequences without a slot."""

    def take_reads(self) -> list[tuple[Uid, tuple[BlockRef, ...]]]:
        reads, self._to_read = self._to_read, []
        return reads

    def take_stops(self) -> list[Uid]:
        stops, self._to_stop = self._to_stop, []
        return stops

    def take_unloads(self) -> list[Uid]:
        unloads, self._to_unload = self._to_unload, []
        return unloads

    # ── before there is a slot ───────────────────────────────────────────────────────────────

    def look_ahead(self, waiting: Iterable[Sequence]) -> list[LookUp]:
        """Of whom the cache is to be asked what to read, first come first; see ``read_ahead``."""
        look_ups: list[LookUp] = []
        if not self.limits.caching:
            return look_ups
        for sequence in waiting:
            if len(self._ahead) >= AHEAD_MAX or self.ahead_bytes >= self.limits.prefetch_bytes:
                break
            asks = sequence.request.caching and not sequence.index
            if asks and not sequence.asked_ahead:
                sequence.asked_ahead = True
                self._ahead[sequence.uid] = sequence
                packed = PackedTokens(bytes(sequence.packed))
                look_ups.append(LookUp(sequence.uid, packed, sequence.request.salt))
        return look_ups

    def read_ahead(self, uid: Uid, cold: Iterable[tuple[BlockRef, int]]) -> None:
        """What a waiting sequence would have read, with its bytes: read what there is room for."""
        sequence = self._ahead.get(uid)
        if sequence is None or sequence.state is not State.WAITING:
            self._ahead.pop(uid, None)
            return
        refs: list[BlockRef] = []
        for ref, nbytes in cold:
            if self.ahead_bytes + nbytes > self.limits.prefetch_bytes:
                break
            refs.append(ref)
            sequence.ahead_bytes += nbytes
            self.ahead_bytes += nbytes
        if refs:
            self._read(sequence, refs)
        else:
            del self._ahead[uid]

    def _no_longer_ahead(self, sequence: Sequence) -> None:
        self._ahead.pop(sequence.uid, None)
        self.ahead_bytes -= sequence.ahead_bytes
        sequence.ahead_bytes = 0

    # ── from the grant to the row ────────────────────────────────────────────────────────────

    def granted(self, sequence: Sequence, grant: Grant, now_s: float) -> None:
        sequence.grant, sequence.root = grant, grant.root
        sequence.ended = grant.ended
        sequence.times.granted = now_s
        self._no_longer_ahead(sequence)
        if sequence.state is State.CLOSING:
            self.give_back(sequence)
            return
        wanted = {ref.block_hash for ref in grant.cold}
        sequence.payloads = {n: p for n, p in sequence.payloads.items() if n in wanted}
        needed = wanted - sequence.payloads.keys()
        if sequence.reading and not all(ref.block_hash in needed for ref in sequence.reading):
            self._to_stop.append(sequence.uid)
            if not needed:
                sequence.reading = ()  # so nobody waits for it
        sequence.state = State.RESTORING
        if not sequence.reading:
            self._go_on(sequence, now_s)

    def was_read(
        self,
        uid: Uid,
        sequence: Sequence | None,
        payloads: Items[HostBlock],
        lost: LostFile | None,
        now_s: float,
        *,
        stuck: bool,
    ) -> None:
        """A read has ended; ``sequence`` may have as well."""
        if lost is not None:
            self._outbox.lost.append(lost)
        self._ahead.pop(uid, None)
        self._in_flight.discard(uid)
        early = uid in self._early
        self._early.discard(uid)
        if sequence is None or sequence.state is State.CLOSING:
            return
        read, sequence.reading = sequence.reading, ()
        names = (ref.block_hash for ref in read)
        sequence.payloads.update(zip(names, payloads, strict=False))
        if sequence.state is not State.RESTORING:
            return
        assert sequence.grant is not None, "only granted blocks are restored"
        # What was read ahead may have been stopped, or a part from the beginning: the rest is read.
        gone = lost is not None and any(
            ref.block_hash == lost.block_hash for ref in sequence.grant.cold
        )
        self._go_on(sequence, now_s, failed=not early or gone or stuck, lost=lost)

    def _go_on(
        self,
        sequence: Sequence,
        now_s: float,
        *,
        failed: bool = False,
        lost: LostFile | None = None,
    ) -> None:
        """Read what is missing of its grant, or do without it when that has ``failed``."""
        grant = sequence.grant
        assert grant is not None, "only granted blocks are restored"
        missing = tuple(ref for ref in grant.cold if ref.block_hash not in sequence.payloads)
        if missing and not failed:
            self._read(sequence, missing)
            return
        if missing and grant.checkpoint is None:
            reason = Reason.REJECTED_FILE if lost is not None else Reason.NO_BLOCK
            self._outbox.give_back(sequence.cut_grant(missing[0], reason), stored=False)
        elif missing:
            # Without one of its blocks a checkpoint is worth nothing: the next look-up finds the
            # one before. A file that is only out of reach would be found again, so then none is.
            payloads = sequence.payloads
            self.give_back(sequence)
            if lost is not None:
                sequence.payloads = payloads
                sequence.look_again()
                return
            sequence.ended = ReuseEnded(Reason.NO_CHECKPOINT, 0)
        self.ready(sequence, now_s)

    def _read(self, sequence: Sequence, refs: Items[BlockRef]) -> None:
        sequence.reading = tuple(refs)
        self._in_flight.add(sequence.uid)
        if sequence.state is State.WAITING:
            self._early.add(sequence.uid)
        self._to_read.append((sequence.uid, sequence.reading))

    def is_reading(self, sequence: Sequence) -> bool:
        """Whether an answer will come, if only to a read that was stopped."""
        return sequence.uid in self._in_flight

    def ready(self, sequence: Sequence, now_s: float) -> None:
        sequence.times.restored = now_s
        sequence.use_grant(self.limits.block_size, self.limits.checkpoint_interval)

    def give_back(self, sequence: Sequence, *, stored: bool = False) -> None:
        """The restore has ended: release what it held, and say whether it filled cold places."""
        if sequence.grant is not None:
            self._outbox.give_back(sequence.grant.refs, stored=stored)
            self._outbox.touch(sequence.grant.chain)
        sequence.grant, sequence.payloads, sequence.num_loaded = None, {}, 0

    def leave(self, sequence: Sequence) -> None:
        """It ends and has no row: nothing more is read or loaded for it, and it holds nothing."""
        self._no_longer_ahead(sequence)
        self._early.discard(sequence.uid)
        if sequence.reading:
            sequence.reading = ()
            self._to_stop.append(sequence.uid)
        if sequence.num_loaded:
            self._to_unload.append(sequence.uid)
        self.give_back(sequence)

    # ── into the engine ──────────────────────────────────────────────────────────────────────

    def next_rows(
        self, sequences: Iterable[Sequence], *, decoding: bool
    ) -> tuple[list[Load], list[Admit]]:
        """Who becomes a row in the next step, and of whom a part is restored before that."""
        room = self.limits.restore_tokens if decoding else None
        loads: list[Load] = []
        admits: list[Admit] = []
        for sequence in sequences:
            if sequence.state is not State.READY:
                continue
            left = sequence.num_to_load(hot_is_free=self.limits.hot_is_free)
            if room is None or left <= room:
                admits.append(sequence.admit())
                room = None if room is None else room - left
            elif room > 0:
                loads.append(sequence.load(room))
                room = 0
        return loads, admits

    @staticmethod
    def step_failed(sequences: Iterable[Sequence]) -> None:
        """What the engine had loaded is gone with its rows; it is loaded again."""
        for sequence in sequences:
            if sequence.state is State.READY:
                sequence.num_loaded = 0
