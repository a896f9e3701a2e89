"""What the server did and does, put together for people: totals, history, requests, health. Pure.

The caller passes ``now``, Unix seconds. Everything kept is bounded: ``REQUESTS_KEPT`` ended
requests, and for each resolution of ``RESOLUTIONS`` so many buckets of so many seconds.

    resolution   bucket   buckets   covers
    1s           1 s      300       5 min
    10s          10 s     360       1 h
    1m           60 s     1440      24 h
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from itertools import islice, pairwise
from typing import Any

from omlx.core.usage import (
    CacheGauges,
    EngineGauges,
    GdnGauges,
    ModelFacts,
    RequestRecord,
    RunningRow,
    Totals,
)

REQUESTS_KEPT = 1000
RESOLUTIONS = {"1s": (1, 300), "10s": (10, 360), "1m": (60, 1440)}

SILENT_S = 5.0
"""An engine that reports each second and has been silent for so long is in trouble."""

STALLED_S = 30.0
"""Work that waits while no step was made for so long is stuck; /health says so too."""


class History:
    """Token counts in buckets of ``width_s`` seconds, without gaps; the newest ``length``."""

    COLUMNS = ("time", "computed", "cached", "generated", "requests")

    def __init__(self, width_s: int, length: int, now: float) -> None:
        self._width_s = width_s
        self._rows: deque[list[int]] = deque([self._blank(self._bucket(now))], maxlen=length)

    def add(self, record: RequestRecord, now: float) -> None:
        row = self._newest(now)
        if record.prefilled:
            row[1] += record.computed_tokens
            row[2] += record.cached_tokens
        row[3] += record.generated_tokens
        row[4] += 1

    def rows(self, now: float) -> list[list[int]]:
        """Every bucket up to now, empty ones as zeros, oldest first."""
        self._newest(now)
        return [row[:] for row in self._rows]

    def latest(self, now: float) -> list[list[int]]:
        """The bucket that fills now, and the one before it, which is complete."""
        self._newest(now)
        return [row[:] for row in islice(self._rows, max(0, len(self._rows) - 2), None)]

    def _newest(self, now: float) -> list[int]:
        # A clock that was set back counts into the newest bucket rather than into the past.
        bucket, newest = self._bucket(now), self._rows[-1][0]
        length = self._rows.maxlen
        assert length is not None
        first = max(newest + self._width_s, bucket - (length - 1) * self._width_s)
        for time in range(first, bucket + 1, self._width_s):
            self._rows.append(self._blank(time))
        return self._rows[-1]

    def _bucket(self, now: float) -> int:
        return int(now // self._width_s) * self._width_s

    @staticmethod
    def _blank(time: int) -> list[int]:
        return [time, 0, 0, 0, 0]


class Ledger:
    """Adds up records and keeps the last report of each actor."""

    def __init__(self, alltime: Totals, gdn: GdnGauges, now: float) -> None:
        self.session = Totals()
        self.alltime = alltime
        self._started_at = now
        self._ended: deque[RequestRecord] = deque(maxlen=REQUESTS_KEPT)
        self._history = {
            name: History(width_s, length, now) for name, (width_s, length) in RESOLUTIONS.items()
        }
        self._engine = EngineGauges()
        self._engine_reported_at: float | None = None
        self._running: tuple[RunningRow, ...] = ()
        self._cache = CacheGauges()
        self._gdn = gdn
        self._model = ModelFacts()

    def add(self, record: RequestRecord, now: float) -> None:
        """Count a request that ended."""
        self.session.add(record)
        self.alltime.add(record)
        for history in self._history.values():
            history.add(record, now)
        self._ended.appendleft(record)
        # The next report would say the same; till then it must not stand in both lists.
        self._running = tuple(row for row in self._running if row.id != record.id)

    def reject(self) -> None:
        """Count a request that was refused at admission."""
        self.session.reject()
        self.alltime.reject()

    def report_engine(self, gauges: EngineGauges, rows: tuple[RunningRow, ...], now: float) -> None:
        self._engine, self._running, self._engine_reported_at = gauges, rows, now

    def report_cache(self, gauges: CacheGauges, gdn: GdnGauges | None) -> None:
        self._cache = gauges
        self._gdn = gdn or self._gdn

    def serve(self, model: ModelFacts) -> None:
        self._model = model

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything that changes from second to second."""
        return {
            "time": now,
            "uptime_s": max(0.0, round(now - self._started_at, 1)),
            "health": self._health(now),
            "session": self.session.as_json(),
            "alltime": self.alltime.as_json(),
            "cache": self._cache.as_json(),
            "gdn": asdict(self._gdn),
            "engine": {**asdict(self._engine), "report_age_s": self._report_age_s(now)},
            "model": self._model.as_json(),
            "running": [row.as_json() for row in self._running],
            "latest": {name: history.latest(now) for name, history in self._history.items()},
        }

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
        rows = self._history[resolution].rows(now)
        return {
            "res": resolution,
            "start": rows[0][0],
            "columns": list(History.COLUMNS),
            "rows": rows,
        }

    def check(self) -> None:
        self.session.check()
        self.alltime.check()
        for history in self._history.values():
            times = [row[0] for row in history._rows]
            steps = {later - sooner for sooner, later in pairwise(times)}
            assert steps <= {history._width_s}, "no gap between buckets"

    def _report_age_s(self, now: float) -> float | None:
        if self._engine_reported_at is None:
            return None
        return max(0.0, round(now - self._engine_reported_at, 1))

    def _health(self, now: float) -> dict[str, str]:
        level, text = health(self._engine, self._cache, self._model, self._report_age_s(now))
        return {"level": level, "text": text}


def health(
    engine: EngineGauges, cache: CacheGauges, model: ModelFacts, report_age_s: float | None
) -> tuple[str, str]:
    """How things are, as a level (ok, wait, warn, bad) and one sentence; the worst first."""
    if not model.id:
        return "wait", "The model is loading."
    if report_age_s is None:
        return "wait", "The engine has not reported yet."
    if report_age_s > SILENT_S:
        return "bad", f"The engine has not reported for {report_age_s:.0f} s."
    if (engine.running or engine.waiting) and engine.last_step_age_s > STALLED_S:
        return "bad", f"Requests wait, and no step was made for {engine.last_step_age_s:.0f} s."
    if cache.tier_state == "degraded":
        return "warn", "The SSD tier is degraded: new blocks stay in RAM only."
    if cache.tier_state == "full":
        return "warn", "The SSD tier is full: it is read, but nothing new is written."
    damaged = cache.corrupt_blocks + sum(count for _, count in cache.rejected_files)
    if damaged:
        return "warn", f"The cache works; {damaged:,} damaged or foreign blocks counted as misses."
    if cache.tier_state == "off" and not cache.hot_limit_bytes:
        return "ok", "The cache is off: every prompt is computed in full."
    if cache.tier_state == "off":
        return "ok", "The cache works in RAM only: the SSD tier is off."
    return "ok", f"The cache stores and restores; {_looked_up(cache)}, no damaged blocks."


def _looked_up(cache: CacheGauges) -> str:
    looked_up = cache.hits + cache.misses
    return f"{cache.hits:,} of {looked_up:,} block look-ups hit" if looked_up else "no look-ups yet"
