"""What the server did and does, put together for people: totals, history, requests, health. Pure.

The caller passes ``now``, Unix seconds. Everything kept is bounded: ``REQUESTS_KEPT`` ended
requests here, and what ``core/history.py`` and ``core/prefill_cost.py`` keep.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from omlx.core.health import health
from omlx.core.histograms import Distributions
from omlx.core.history import COLUMNS, SCOPES, History, Kept
from omlx.core.prefill_cost import PrefillCost
from omlx.core.usage import (
    CacheGauges,
    EngineGauges,
    GdnGauges,
    MemoryGauges,
    ModelFacts,
    RequestRecord,
    RunningRow,
    Totals,
)

REQUESTS_KEPT = 1000

QUIET_S = 600.0
"""Evictions are marked in the charts when there were none for so long."""


class Ledger:
    """Adds up records and keeps the last report of each actor."""

    def __init__(
        self, alltime: Totals, gdn: GdnGauges, now: float, kept: Kept | None = None
    ) -> None:
        """``kept``: the history of earlier lives. Raises ValueError when it can't have been."""
        kept = kept or Kept()
        self.session = Totals()
        self.alltime = alltime
        self._started_at = now
        self._ended: deque[RequestRecord] = deque(maxlen=REQUESTS_KEPT)
        self._history = History(now, kept)
        self._distributions = Distributions()
        self._speeds: dict[str, PrefillCost] = {}
        """By namespace: another model takes another time."""
        for namespace in dict.fromkeys(namespace for namespace, *_ in kept.speeds):
            self._speeds[namespace] = PrefillCost(
                [(depth, w, s) for name, depth, w, s in kept.speeds if name == namespace]
            )
        self._saved_speeds = kept.speeds
        self._reused_at: float | None = None
        self._evicted_at: float | None = None
        self._engine = EngineGauges()
        self._engine_reported_at: float | None = None
        self._running: tuple[RunningRow, ...] = ()
        self._memory = MemoryGauges()
        self._cache = CacheGauges()
        self._gdn = gdn
        self._model = ModelFacts()

    def add(self, record: RequestRecord, now: float) -> RequestRecord:
        """Count a request that ended; returns its record with what the reuse saved."""
        record = replace(record, saved_ms=self._saved_ms(record))
        self.session.add(record)
        self.alltime.add(record)
        self._history.add(record, now)
        self._distributions.add(record)
        if record.prefilled and record.cached_tokens:
            self._reused_at = now
        self._ended.appendleft(record)
        # The next report would say the same; till then it must not stand in both lists.
        self._running = tuple(row for row in self._running if row.id != record.id)
        return record

    def reject(self, now: float) -> None:
        """Count a request that was refused at admission."""
        self.session.reject()
        self.alltime.reject()
        self._history.reject(now)

    def report_engine(self, gauges: EngineGauges, rows: tuple[RunningRow, ...], now: float) -> None:
        self._engine, self._running, self._engine_reported_at = gauges, rows, now

    def report_memory(self, gauges: MemoryGauges) -> None:
        self._memory = gauges

    def report_cache(self, gauges: CacheGauges, gdn: GdnGauges | None, now: float) -> None:
        evicted = gauges.evictions_ram + gauges.evictions_ssd
        if evicted > self._cache.evictions_ram + self._cache.evictions_ssd:
            if self._evicted_at is None or now - self._evicted_at > QUIET_S:
                self._history.mark("evictions", now)
            self._evicted_at = now
        self._cache = gauges
        self._gdn = gdn or self._gdn

    def serve(self, model: ModelFacts, now: float) -> None:
        self._model = model
        self._history.mark("model", now)

    def mark(self, what: str, now: float) -> None:
        """Something happened that may explain a change in the charts."""
        self._history.mark(what, now)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything that changes from second to second."""
        return {
            "time": now,
            "uptime_s": max(0.0, round(now - self._started_at, 1)),
            "health": self._health(now),
            "session": self.session.as_json(),
            "alltime": self.alltime.as_json(),
            **{scope: self._history.totals(scope, now).as_json() for scope in SCOPES},
            "cache": self._cache.as_json(),
            "gdn": asdict(self._gdn),
            "memory": {**asdict(self._memory), "hot_bytes": self._cache.hot_bytes},
            "engine": {**asdict(self._engine), "report_age_s": self._report_age_s(now)},
            "model": self._model.as_json(),
            "running": [row.as_json() for row in self._running],
            "latest": self._history.latest(now),
        }

    def metrics(self, now: float) -> dict[str, Any]:
        """The snapshot, and how the requests since the start are spread."""
        return {**self.snapshot(now), "distributions": self._distributions.as_json()}

    def requests(self, limit: int) -> dict[str, Any]:
        """At most ``limit`` requests: those that run, then those that ended, newest first."""
        running = sorted(self._running, key=lambda row: row.time, reverse=True)
        rows = [row.as_json() for row in running[:limit]]
        rows += [record.as_json() for record in islice(self._ended, limit - len(rows))]
        return {"requests": rows}

    def request(self, request_id: str) -> dict[str, Any] | None:
        for row in (*self._running, *self._ended):
            if row.id == request_id:
                return row.as_json()
        return None

    def history(self, resolution: str, now: float) -> dict[str, Any]:
        rows = self._history.rows(resolution, now)
        return {
            "res": resolution,
            "start": rows[0][0],
            "columns": list(COLUMNS),
            "rows": rows,
            "marks": [list(mark) for mark in self._history.marks(rows[0][0])],
        }

    def take_changed(self) -> Kept:
        """What of the history changed since this was last asked: to be written."""
        speeds = tuple(
            (namespace, *one)
            for namespace, cost in self._speeds.items()
            for one in cost.saved()
            if namespace
        )
        changed = self._history.take_changed()
        if speeds != self._saved_speeds:
            self._saved_speeds = speeds
            changed = replace(changed, speeds=speeds)
        return changed

    def put_back(self, kept: Kept) -> None:
        """It could not be written."""
        self._history.put_back(kept)
        if kept.speeds:
            self._saved_speeds = ()

    def check(self) -> None:
        self.session.check()
        self.alltime.check()
        self._history.check()

    def _saved_ms(self, record: RequestRecord) -> int | None:
        """A cold prefill of what was cached, less what finding and restoring it took."""
        cost = self._speeds.setdefault(self._model.namespace, PrefillCost())
        start = record.cached_tokens
        # The last prompt token is fed by the first decoding step.
        num_prefilled = record.computed_tokens - record.prefilled
        cost.measured(start, start + num_prefilled, record.engine_ms / 1000)
        if not record.prefilled:
            return 0
        spent_ms = record.lookup_ms + record.restore_ms
        if not record.cached_tokens:
            return round(-spent_ms)
        cold_s = cost.seconds(record.cached_tokens)
        return None if cold_s is None else round(1000 * cold_s - spent_ms)

    def _report_age_s(self, now: float) -> float | None:
        if self._engine_reported_at is None:
            return None
        return max(0.0, round(now - self._engine_reported_at, 1))

    def _health(self, now: float) -> dict[str, Any]:
        age = None if self._reused_at is None else max(0.0, now - self._reused_at)
        report_age = self._report_age_s(now)
        return asdict(health(self._engine, self._cache, self._model, report_age, age))
