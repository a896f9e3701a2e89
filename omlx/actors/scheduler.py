"""Drives the round: cache, engine, cache, engine; and writes what comes out to the streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import assert_never

from omlx.actors.admin_messages import CancelRequest
from omlx.actors.disk_messages import ReadBlocks, SsdReaderMessage, StopReading
from omlx.actors.limit_messages import Pace, SetPace
from omlx.actors.messages import (
    Accepted,
    BlocksRead,
    CacheSettled,
    Cancel,
    ChoiceEnded,
    ColdKnown,
    ColdOf,
    DrainExpired,
    Ended,
    GenerationStream,
    ModelRunnerMessage,
    PagedCacheMessage,
    Paused,
    RunStep,
    SchedulerMessage,
    Settle,
    StartOver,
    StepDone,
    Submit,
    TextDelta,
)
from omlx.actors.stats_messages import EngineReport, RequestEnded, StatsMessage
from omlx.core.admission import QueueFull
from omlx.core.events import Closed, Delta
from omlx.core.memory import NeverFits
from omlx.core.plan import LookUp, StepPlan, StepResult, Uid
from omlx.core.reads import ReadOutcome
from omlx.core.record import record_of
from omlx.core.running import running_row
from omlx.core.scheduler import Scheduler
from omlx.core.sequence import Sequence
from omlx.core.usage import EngineGauges
from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import ActorGone, Rejected, Tick

SPEED_MEMORY = 0.9
"""Weight of the past in the shown speeds."""


FLUSH_PAUSE_S = 0.02
"""A block is written in some milliseconds; looking again sooner finds the same."""


class TooManyRequests(Rejected):
    """As many requests run and wait as may."""


class TooLarge(Rejected):
    """It needs more memory than there is for any request; waiting would not help."""


class GenerationFailed(Exception):
    """A request could not be finished; the text may be shown to the client."""

    def __init__(self, message: str, code: str = "engine_error") -> None:
        super().__init__(message)
        self.code = code


class SchedulerActor(Actor):
    name = "scheduler"
    capacity = 256

    def __init__(
        self,
        core: Scheduler,
        cache: Ref[PagedCacheMessage],
        reader: Ref[SsdReaderMessage] | None,
        runner: Ref[ModelRunnerMessage],
        stats: Ref[StatsMessage],
        wall: Callable[[], float] = time.time,
        drain_s: float = 30.0,
    ) -> None:
        self._core = core
        self._cache = cache
        self._reader = reader
        self._runner = runner
        self._stats = stats
        self._wall = wall
        self._drain_s = drain_s
        self._streams: dict[Uid, GenerationStream] = {}
        """By the uid of the request's first choice."""
        self._closed: dict[Uid, list[Closed]] = {}
        """The choices that have ended, of requests that have not."""
        self._numbers = count()
        self._reads: dict[Uid, int] = {}
        """By which number each read can be stopped."""
        self._busy = False
        self._flush = False
        self._pausing = False
        self._cancelled = False
        """Whether other choices of a request that failed are to be taken out."""
        self._stopping = False
        self._last_step_s = 0.0
        self._prefill_tps = 0.0
        self._decode_tps = 0.0
        self._active_bytes = self._peak_bytes = 0

    async def on_start(self) -> None:
        # A former life may have left rows in the engine and blocks held in the cache.
        await self._runner.ask(StartOver())
        await self._cache.ask(StartOver())
        if self._reader is not None:
            self._reader.offer(StopReading(None))
        self._last_step_s = self._now()
        self.every(1.0, Tick)

    async def on_stopping(self) -> None:
        self._stopping = self._flush = True
        self.pipe(asyncio.sleep(self._drain_s), wrap=lambda _: DrainExpired())
        self._kick()

    async def on_stop(self) -> None:
        """Whoever still listens learns that nothing will follow."""
        for stream in self._streams.values():
            if self._stopping:
                stream.end(_shutdown())
            else:
                stream.end(GenerationFailed("the engine is restarting", "engine_restarting"))

    @property
    def idle(self) -> bool:
        return self._core.idle and not self._flush and not self._busy

    async def receive(self, message: SchedulerMessage) -> object:
        match message:
            case Submit(request, stream):
                if self._core.idle:
                    self._last_step_s = self._now()
                try:
                    uid = self._core.submit(request, self._now())
                except QueueFull as full:
                    raise TooManyRequests(str(full)) from None
                except NeverFits as refused:
                    raise TooLarge(str(refused)) from None
                self._streams[uid] = stream
                self._kick()
                return Accepted(uid)
            case Cancel(uid):
                self._core.cancel(uid, self._now())
                self._kick()
                return None
            case CancelRequest(request_id):
                return self._cancel_by_name(request_id)
            case SetPace(limits, drain_s):
                if limits is not None:
                    self._core.set_limits(limits)
                    self._kick()
                self._drain_s = self._drain_s if drain_s is None else drain_s
                return Pace(self._core.limits, self._drain_s)
            case CacheSettled(ActorGone()) | StepDone(_, ActorGone()) if self._stopping:
                return None  # everything ends at once: nothing can be asked any more
            case CacheSettled(outcome):
                if isinstance(outcome, Exception):
                    raise outcome
                self._core.settled(outcome, self._now())
                self._flush = outcome.flushing and (
                    self._stopping or (self._core.idle and (outcome.dirty or bool(outcome.writes)))
                )
                self._start_reads()
                self._core.close_ended(self._now())
                self._step()
                self._emit()
                return None
            case StepDone(plan, outcome):
                if isinstance(outcome, Exception):
                    raise outcome
                self._last_step_s = self._now()
                if isinstance(outcome, StepResult):
                    self._measure(plan, outcome)
                self._core.apply(plan, outcome, self._now())
                self._cancel_abandoned()
                self._busy = False
                self._kick()
                self._emit()
                return None
            case BlocksRead(uid, outcome):
                if isinstance(outcome, ActorGone | Rejected):
                    outcome = ReadOutcome((), reason=str(outcome))  # it is computed instead
                if isinstance(outcome, Exception):
                    raise outcome
                self._reads.pop(uid, None)
                self._core.blocks_read(
                    uid, outcome.payloads, outcome.lost, self._now(), stuck=outcome.stuck
                )
                self._kick()
                return None
            case ColdKnown(uid, outcome):
                if isinstance(outcome, ActorGone | Rejected):
                    outcome = ()
                if isinstance(outcome, Exception):
                    raise outcome
                self._core.read_ahead(uid, outcome)
                self._start_reads()
                return None
            case Paused():
                self._pausing = False
                self._kick(flush=True)
                return None
            case DrainExpired():
                for uid, stream in self._streams.items():
                    stream.end(_shutdown())
                    self._core.cancel(uid, self._now())
                self._kick()
                return None
            case Tick():
                self._cancel_abandoned()
                self._report()
                self._kick(flush=True)
                return None
        assert_never(message)

    # ── the round ────────────────────────────────────────────────────────────────────────────

    def _kick(self, *, flush: bool = False) -> None:
        """Begin a round, unless one is under way. ``flush``: even with nothing to tell."""
        if not self._busy:
            self._begin_round(flush=flush)
        self._start_reads()

    def _begin_round(self, *, flush: bool) -> None:
        work = self._core.settle_work(self._now())
        if work or flush or self._flush:
            self._busy = True
            self.pipe(self._cache.ask(Settle(work)), wrap=CacheSettled)
        else:
            self._core.close_ended(self._now())
            self._step()
            self._emit()

    def _step(self) -> None:
        plan = self._core.plan()
        if plan is not None:
            self._busy = True

            def done(outcome: object, plan: StepPlan = plan) -> StepDone:
                return StepDone(plan, outcome)  # pyright: ignore[reportArgumentType]

            self.pipe(self._runner.ask(RunStep(plan)), wrap=done)
        elif self._busy:
            self._busy = False
            if self._flush or self._core.waits_for_files:
                self._pause()
            else:
                self._kick()

    def _pause(self) -> None:
        """The writer has no room now for what is still to be written."""
        if not self._pausing:
            self._pausing = True
            self.pipe(asyncio.sleep(FLUSH_PAUSE_S), wrap=lambda _: Paused())

    def _start_reads(self) -> None:
        """Begin what is to be read, for those that wait as well, and stop what nobody needs."""
        if self._reader is None:
            return
        for look_up in self._core.look_ahead():
            self._look_ahead(look_up)
        for uid, refs in self._core.take_reads():
            number = self._reads[uid] = next(self._numbers)

            def done(outcome: object, uid: Uid = uid) -> BlocksRead:
                return BlocksRead(uid, outcome)  # pyright: ignore[reportArgumentType]

            self.pipe(self._reader.ask(ReadBlocks(refs, number)), wrap=done)
        for uid in self._core.take_stops():
            if uid in self._reads:
                self._reader.offer(StopReading(self._reads[uid]))

    def _look_ahead(self, look_up: LookUp) -> None:
        def done(outcome: object) -> ColdKnown:
            return ColdKnown(look_up.uid, outcome)  # pyright: ignore[reportArgumentType]

        self.pipe(self._cache.ask(ColdOf(look_up.tokens, look_up.salt)), wrap=done)

    # ── to the clients ───────────────────────────────────────────────────────────────────────

    def _emit(self) -> None:
        """After the next step has begun: the engine computes while the clients are written to."""
        for event in self._core.take_events():
            match event:
                case Delta():
                    stream = self._streams[event.leader]
                    if not stream.ended:
                        stream.write(TextDelta(event.pieces, (event.sampled,), event.index))
                case Closed():
                    self._end(event)
        if self._cancelled:
            self._cancelled = False
            self._kick()

    def _end(self, closed: Closed) -> None:
        stream = self._streams[closed.leader]
        ended = self._closed.setdefault(closed.leader, [])
        ended.append(closed)
        record = None
        if len(ended) == closed.request.n:
            record = record_of(ended, wall_s=self._wall(), now_s=self._now())
            if not closed.request.internal:
                self._stats.offer(RequestEnded(record))
            del self._streams[closed.leader], self._closed[closed.leader]
        if stream.ended:
            return  # it was told already that the server shuts down, or that a choice failed
        if closed.error is not None:
            stream.end(GenerationFailed(closed.error))
            self._core.cancel(closed.leader, self._now())
            self._cancelled = True
        elif record is None:
            stream.write(ChoiceEnded(closed.pieces, closed.finish_reason, closed.index))
        else:
            stream.write(Ended(closed.pieces, closed.finish_reason, record, closed.index))
            stream.end()

    def _cancel_by_name(self, request_id: str) -> bool:
        for sequence in self._core.sequences():
            if sequence.request.request_id == request_id and not sequence.ending:
                uid = sequence.leader
                self._streams[uid].end(GenerationFailed("it was cancelled by hand", "cancelled"))
                self._core.cancel(uid, self._now())
                self._emit()
                self._kick()
                return True
        return False

    def _cancel_abandoned(self) -> None:
        for uid, stream in self._streams.items():
            if stream.cancelled:
                self._core.cancel(uid, self._now())

    # ── what the dashboard shows ─────────────────────────────────────────────────────────────

    def _measure(self, plan: StepPlan, result: StepResult) -> None:
        self._active_bytes, self._peak_bytes = result.active_bytes, result.peak_bytes
        if result.prefilled_tokens and result.prefill_s > 0:
            speed = result.prefilled_tokens / result.prefill_s
            self._prefill_tps = _blend(self._prefill_tps, speed)
        if result.sampled and result.decode_s > 0:
            self._decode_tps = _blend(self._decode_tps, len(result.sampled) / result.decode_s)

    def _report(self) -> None:
        age = 0.0 if self._core.idle else self._now() - self._last_step_s
        gauges = EngineGauges(
            self._core.num_running,
            self._core.num_waiting,
            age,
            self._prefill_tps,
            self._decode_tps,
        )
        requests: dict[Uid, list[Sequence]] = {}
        for sequence in self._core.sequences():
            if sequence.request.internal:
                continue
            requests.setdefault(sequence.leader, []).append(sequence)
        now, wall = self._now(), self._wall()
        rows = tuple(running_row(each, now_s=now, wall_s=wall) for each in requests.values())
        memory = self._core.memory(self._active_bytes, self._peak_bytes)
        self._stats.offer(EngineReport(gauges, rows, memory))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _shutdown() -> GenerationFailed:
    return GenerationFailed("the server is shutting down", "server_shutdown")


def _blend(past: float, now: float) -> float:
    return now if past == 0 else SPEED_MEMORY * past + (1 - SPEED_MEMORY) * now
