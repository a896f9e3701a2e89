"""Counts every request once, from its record, and tells whoever asks, at once or as it happens.

The log line, the totals, the history, the request list and the feed of one request all come from
the one record, so they cannot disagree. The counting itself is ``core/usage_ledger.py``, and
which lines are logged ``core/request_log.py``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, assert_never

import orjson

from omlx.actors.feed import Feeds
from omlx.actors.history import HistoryStore, NoHistory
from omlx.actors.stats_messages import (
    CacheReport,
    EngineReport,
    Feed,
    FindRequest,
    HistorySaved,
    ModelServed,
    ReadHistory,
    ReadMetrics,
    RecentRequests,
    RequestEnded,
    RequestRejected,
    SettingsChanged,
    Snapshot,
    StatsMessage,
    TotalsSaved,
)
from omlx.core.history import Kept
from omlx.core.request_log import RequestLog
from omlx.core.usage import GdnGauges, Totals
from omlx.core.usage_ledger import Ledger
from omlx.kernel.actor import Actor
from omlx.kernel.message import Tick

log = logging.getLogger(__name__)

SAVE_EVERY_TICKS = 10
"""One tick a second."""


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
        history: HistoryStore | None = None,
    ) -> None:
        self._store = store
        self._history = history or NoHistory()
        self._now = now
        self._gdn = gdn or GdnGauges()
        self._ledger = Ledger(Totals(), self._gdn, now())
        self._request_log = RequestLog()
        self._saved: Totals | None = None  # None: not loaded, so there is nothing to save
        self._saving = False
        self._saving_history = False
        self._failing: set[str] = set()
        """What could not be saved when it was last tried."""
        self._num_ticks = 0
        self._feeds = Feeds(first_id=int(now() * 1e6))

    async def on_start(self) -> None:
        totals = await self._store.load()
        self._ledger = Ledger(totals, self._gdn, self._now(), await self._kept())
        self._saved = replace(totals)
        self.every(1.0, Tick)

    async def on_stop(self) -> None:
        self._tell(self._request_log.due(math.inf))
        self._feeds.end()
        if self._saved not in (None, self._ledger.alltime):
            self._note_saved(_TOTALS, await self._save(replace(self._ledger.alltime)))
        if self._saved is not None and (changed := self._ledger.take_changed()):
            self._note_saved(_HISTORY, await self._save_history(changed))

    async def receive(self, message: StatsMessage) -> object:
        match message:
            case RequestEnded(record):
                record = self._ledger.add(record, self._now())
                self._tell(self._request_log.ended(record, self._now()))
                self._feeds.publish("request", to_json(record.as_json()), keep=True)
                return None
            case RequestRejected():
                self._ledger.reject(self._now())
                return None
            case EngineReport(gauges, rows, memory):
                self._ledger.report_engine(gauges, rows, self._now())
                if memory is not None:
                    self._ledger.report_memory(memory)
                return None
            case CacheReport(gauges, gdn):
                self._ledger.report_cache(gauges, gdn, self._now())
                return None
            case ModelServed(facts):
                self._ledger.serve(facts, self._now())
                return None
            case SettingsChanged(names, time_s):
                self._ledger.mark("settings", self._now())
                text = to_json({"names": names, "time": time_s})
                self._feeds.publish("settings", text, keep=True)
                return None
            case Snapshot():
                return self._snapshot()
            case ReadMetrics():
                return to_json(self._ledger.metrics(self._now()))
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
                self._note_saved(_TOTALS, error)
                return None
            case HistorySaved(changed, error):
                self._saving_history = False
                self._note_saved(_HISTORY, error)
                if error is not None:
                    self._ledger.put_back(changed)
                return None
            case Tick():
                self._tick()
                return None
        assert_never(message)

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            log.info("%s", line)

    def _tick(self) -> None:
        self._tell(self._request_log.due(self._now()))
        if len(self._feeds):
            self._feeds.publish("stats", self._snapshot())
        self._num_ticks += 1
        if self._num_ticks % SAVE_EVERY_TICKS:
            return
        if not self._saving and self._saved != self._ledger.alltime:
            self._saving = True
            self.pipe(self._save(replace(self._ledger.alltime)), _saved)
        if not self._saving_history and (changed := self._ledger.take_changed()):
            self._saving_history = True
            self.pipe(
                self._save_history(changed),
                lambda outcome: HistorySaved(changed, _error_of(outcome)),
            )

    async def _kept(self) -> Kept:
        try:
            return await self._history.load()
        except OSError as error:
            self._note_saved(_HISTORY, error)
            return Kept()

    async def _save(self, totals: Totals) -> Exception | None:
        try:
            await self._store.save(totals)
        except OSError as error:
            return error
        self._saved = totals
        return None

    async def _save_history(self, changed: Kept) -> Exception | None:
        try:
            await self._history.save(changed)
        except OSError as error:
            return error
        return None

    def _note_saved(self, what: str, error: Exception | None) -> None:
        # Said when it begins and when it is over, not every ten seconds in between.
        if error is None:
            if what in self._failing:
                log.info("the %s are saved again", what)
            self._failing.discard(what)
        elif what not in self._failing:
            log.warning("the %s could not be saved: %s; trying again", what, error)
            self._failing.add(what)

    def _snapshot(self) -> str:
        return to_json(self._ledger.snapshot(self._now()))


_TOTALS, _HISTORY = "all-time totals", "charts"


def _saved(outcome: Exception | None) -> TotalsSaved:
    return TotalsSaved(_error_of(outcome))


def _error_of(outcome: Exception | None) -> OSError | None:
    """Raises what no disk is to blame for."""
    if outcome is not None and not isinstance(outcome, OSError):
        raise outcome
    return outcome


def to_json(value: Any) -> str:
    """One line of JSON that means nothing where somebody takes it for HTML."""
    text = orjson.dumps(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
