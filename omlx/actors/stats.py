"""Counts every request once, from its record, and tells whoever asks, at once or as it happens.

The log line, the totals, the history, the request list and the feed of one request all come from
the one record, so they cannot disagree. The counting itself is ``core/usage_ledger.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, assert_never

import orjson

from omlx.actors.feed import Feeds
from omlx.actors.messages import (
    CacheReport,
    EngineReport,
    Feed,
    FindRequest,
    ModelServed,
    ReadHistory,
    RecentRequests,
    RequestEnded,
    RequestRejected,
    Snapshot,
    StatsMessage,
    Tick,
    TotalsSaved,
)
from omlx.core.usage import GdnGauges, RequestRecord, Totals
from omlx.core.usage_ledger import Ledger
from omlx.kernel.actor import Actor

log = logging.getLogger(__name__)

SAVE_EVERY_TICKS = 10
"""One tick a second."""

LOGGED_CHARACTERS_MAX = 120


class TotalsStore(Protocol):
    """Where the all-time totals are kept."""

    async def load(self) -> Totals:
        """What was saved last, or zeros."""
        ...

    async def save(self, totals: Totals) -> None:
        """Raises OSError when they could not be saved."""
        ...


class Stats(Actor):
    """``now`` is the wall clock, in Unix seconds."""

    name = "stats"
    capacity = 4096

    def __init__(
        self,
        store: TotalsStore,
        gdn: GdnGauges | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._now = now
        self._ledger = Ledger(Totals(), gdn or GdnGauges(), now())
        self._saved: Totals | None = None  # None: not loaded, so there is nothing to save
        self._saving = False
        self._saving_failed = False
        self._num_ticks = 0
        self._feeds = Feeds(first_id=int(now() * 1e6))

    async def on_start(self) -> None:
        totals = await self._store.load()
        self._ledger.alltime = totals
        self._saved = replace(totals)
        self.every(1.0, Tick)

    async def on_stop(self) -> None:
        self._feeds.end()
        if self._saved not in (None, self._ledger.alltime):
            self._note_saved(await self._save(replace(self._ledger.alltime)))

    async def receive(self, message: StatsMessage) -> object:
        match message:
            case RequestEnded(record):
                self._ledger.add(record, self._now())
                _log_end(record)
                self._feeds.publish("request", to_json(record.as_json()), keep=True)
                return None
            case RequestRejected():
                self._ledger.reject()
                return None
            case EngineReport(gauges, rows):
                self._ledger.report_engine(gauges, rows, self._now())
                return None
            case CacheReport(gauges, gdn):
                self._ledger.report_cache(gauges, gdn)
                return None
            case ModelServed(facts):
                self._ledger.serve(facts)
                return None
            case Snapshot():
                return self._snapshot()
            case RecentRequests(limit):
                return to_json(self._ledger.requests(limit))
            case ReadHistory(resolution):
                return to_json(self._ledger.history(resolution, self._now()))
            case FindRequest(request_id):
                found = self._ledger.request(request_id)
                return None if found is None else to_json(found)
            case Feed(after):
                return self._feeds.open(self._snapshot(), after)
            case TotalsSaved(error):
                self._saving = False
                self._note_saved(error)
                return None
            case Tick():
                self._tick()
                return None
        assert_never(message)

    def _tick(self) -> None:
        if len(self._feeds):
            self._feeds.publish("stats", self._snapshot())
        self._num_ticks += 1
        due = self._num_ticks % SAVE_EVERY_TICKS == 0
        if due and not self._saving and self._saved != self._ledger.alltime:
            self._saving = True
            self.pipe(self._save(replace(self._ledger.alltime)), _saved)

    async def _save(self, totals: Totals) -> Exception | None:
        try:
            await self._store.save(totals)
        except OSError as error:
            return error
        self._saved = totals
        return None

    def _note_saved(self, error: Exception | None) -> None:
        # Said when it begins and when it is over, not every ten seconds in between.
        if error is not None and not self._saving_failed:
            log.warning("the all-time totals could not be saved: %s; trying again", error)
        if error is None and self._saving_failed:
            log.info("the all-time totals are saved again")
        self._saving_failed = error is not None

    def _snapshot(self) -> str:
        return to_json(self._ledger.snapshot(self._now()))


def _saved(outcome: Exception | None) -> TotalsSaved:
    if outcome is not None and not isinstance(outcome, OSError):
        raise outcome
    return TotalsSaved(outcome)


def to_json(value: Any) -> str:
    """One line of JSON that means nothing where somebody takes it for HTML."""
    text = orjson.dumps(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _log_end(record: RequestRecord) -> None:
    # repr escapes control characters, so what a client sends cannot forge a line.
    log.info(
        "%s request=%r client=%r route=%s model=%r reason=%s prompt_tokens=%d cached_tokens=%d "
        "generated_tokens=%d queue_ms=%.0f restore_ms=%.0f prefill_ms=%.0f decode_ms=%.0f "
        "ttft_ms=%s total_ms=%.0f reuse_ended=%s reuse_token=%d%s",
        record.state,
        record.id[:LOGGED_CHARACTERS_MAX],
        record.client[:LOGGED_CHARACTERS_MAX],
        record.route,
        record.model[:LOGGED_CHARACTERS_MAX],
        record.finish_reason or "error",
        record.prompt_tokens,
        record.cached_tokens,
        record.generated_tokens,
        record.queue_ms,
        record.restore_ms,
        record.prefill_ms,
        record.decode_ms,
        "none" if record.ttft_ms is None else f"{record.ttft_ms:.0f}",
        record.total_ms,
        record.reuse_reason,
        record.reuse_token,
        "" if record.error is None else f" error={record.error[:LOGGED_CHARACTERS_MAX]!r}",
    )
