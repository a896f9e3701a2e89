"""Token counts over time, in buckets of several widths, and what of them goes into a file. Pure.

    resolution   bucket   buckets   covers
    1s           1 s      300       5 min
    10s          10 s     360       1 h
    1m           60 s     1440      24 h
    1h           3600 s   720       30 d

The file holds what is here and no more, so both are bounded alike: at most 2,820 rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from omlx.core.usage import RequestRecord, Totals

RESOLUTIONS = {"1s": (1, 300), "10s": (10, 360), "1m": (60, 1440), "1h": (3600, 720)}
SCOPES = {"1h": "10s", "24h": "1m"}
"""Which resolution a scope's totals are summed from: each covers just that time."""

MARKS_MAX = 200

COLUMNS = (
    *("time", "computed", "cached", "generated", "requests", "cancelled", "failed", "rejected"),
    *("unfinished", "attribution_stripped", "saved_ms"),
)
"""Of a bucket. ``requests`` are those that ended, however; ``unfinished`` tokens are in
``computed`` too, for they were."""

Row = list[int]
Mark = tuple[float, str]
"""Unix seconds, and what happened: ``model`` (one was loaded), ``settings``, ``evictions``."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a file holds of the history; and what has changed since it was last written."""

    rows: tuple[tuple[int, Row], ...] = ()
    """(width of the bucket in seconds, row)"""
    marks: tuple[Mark, ...] = ()
    speeds: tuple[tuple[str, int, float, float], ...] = ()
    """Namespace, and what ``PrefillCost.saved`` gives."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.marks or self.speeds)


class Series:
    """Buckets of ``width_s`` seconds, without gaps; the newest ``length``."""

    def __init__(
        self, width_s: int, length: int, now: float, known: Iterable[Sequence[int]] = ()
    ) -> None:
        """``known``: rows of an earlier life. Those of the future, and too old ones, are left out.

        Raises ValueError for rows that this class cannot have made.
        """
        self._width_s, self._length = width_s, length
        self._sums = [0] * len(COLUMNS)
        self._changed: set[int] = set()
        newest = self._bucket(now)
        oldest = newest - (length - 1) * width_s
        rows = {row[0]: list(row) for row in map(self._checked, known)}
        past = {time: row for time, row in rows.items() if oldest <= time <= newest}
        self._rows: deque[Row] = deque()
        for time in range(min(past, default=newest), newest + 1, width_s):
            self._append(past.get(time) or self._blank(time))

    def add(self, record: RequestRecord, now: float) -> None:
        state = record.state
        self._count(
            now,
            computed=record.computed_tokens,
            cached=record.cached_tokens if record.prefilled else 0,
            generated=record.generated_tokens,
            requests=1,
            cancelled=state == "cancelled",
            failed=state == "failed",
            unfinished=record.unfinished_tokens,
            attribution_stripped=record.attribution_stripped,
            saved_ms=record.saved_ms or 0,
        )

    def reject(self, now: float) -> None:
        self._count(now, rejected=1)

    def rows(self, now: float) -> list[Row]:
        """Every bucket up to now, empty ones as zeros, oldest first."""
        self._newest(now)
        return [row[:] for row in self._rows]

    def latest(self, now: float) -> list[Row]:
        """The bucket that fills now, and the one before it, which is complete."""
        self._newest(now)
        return [row[:] for row in islice(self._rows, max(0, len(self._rows) - 2), None)]

    def totals(self, now: float) -> Totals:
        """Of the whole time that is covered."""
        self._newest(now)
        sums = dict(zip(COLUMNS, self._sums, strict=True))
        return Totals(
            processed_tokens=sums["computed"] - sums["unfinished"] + sums["cached"],
            cached_tokens=sums["cached"],
            generated_tokens=sums["generated"],
            attribution_stripped=sums["attribution_stripped"],
            completed=sums["requests"] - sums["cancelled"] - sums["failed"],
            failed=sums["failed"],
            cancelled=sums["cancelled"],
            rejected=sums["rejected"],
            unfinished_tokens=sums["unfinished"],
            saved_ms=sums["saved_ms"],
        )

    def take_changed(self) -> list[Row]:
        """Buckets that changed since this was last asked, as they are now."""
        changed, self._changed = self._changed, set()
        return [row[:] for row in self._rows if row[0] in changed]

    def put_back(self, rows: Iterable[Sequence[int]]) -> None:
        """They could not be written: they are told again."""
        self._changed |= {row[0] for row in rows}

    def check(self) -> None:
        times = [row[0] for row in self._rows]
        assert {later - sooner for sooner, later in pairwise(times)} <= {self._width_s}, "no gap"
        assert len(times) <= self._length, "a bound"
        sums = [sum(column) for column in zip(*self._rows, strict=True)]
        assert self._sums[1:] == sums[1:], "the sums are those of the rows"

    def _count(self, now: float, **counts: int) -> None:
        row = self._newest(now)
        for column, count in counts.items():
            index = COLUMNS.index(column)
            row[index] += count
            self._sums[index] += count
        self._changed.add(row[0])

    def _newest(self, now: float) -> Row:
        # A clock that was set back counts into the newest bucket rather than into the past.
        bucket, newest = self._bucket(now), self._rows[-1][0]
        first = max(newest + self._width_s, bucket - (self._length - 1) * self._width_s)
        for time in range(first, bucket + 1, self._width_s):
            self._append(self._blank(time))
        return self._rows[-1]

    def _append(self, row: Row) -> None:
        if len(self._rows) == self._length:
            gone = self._rows.popleft()
            self._sums = [total - left for total, left in zip(self._sums, gone, strict=True)]
        self._rows.append(row)
        self._sums = [total + more for total, more in zip(self._sums, row, strict=True)]

    def _checked(self, row: Sequence[int]) -> Sequence[int]:
        counts = dict(zip(COLUMNS, row, strict=False))
        whole = all(isinstance(value, int) for value in row) and len(row) == len(COLUMNS)
        if not whole or any(v < 0 for name, v in counts.items() if name != "saved_ms"):
            raise ValueError(f"{row!r} is no bucket")
        if counts["time"] % self._width_s or counts["unfinished"] > counts["computed"]:
            raise ValueError(f"{row!r} is no bucket of {self._width_s} s")
        if counts["cancelled"] + counts["failed"] > counts["requests"]:
            raise ValueError(f"more requests ended badly than ended in {row!r}")
        return row

    def _bucket(self, now: float) -> int:
        return int(now // self._width_s) * self._width_s

    @staticmethod
    def _blank(time: int) -> Row:
        return [time] + [0] * (len(COLUMNS) - 1)


class History:
    """Every resolution at once, and the moments that explain a change."""

    def __init__(self, now: float, kept: Kept | None = None) -> None:
        """Raises ValueError when ``kept`` cannot have been kept."""
        kept = kept or Kept()
        by_width: dict[int, list[Row]] = {width_s: [] for width_s, _ in RESOLUTIONS.values()}
        for width_s, row in kept.rows:
            if width_s not in by_width:
                raise ValueError(f"there are no buckets of {width_s!r} s")
            by_width[width_s].append(row)
        self._series = {
            name: Series(width_s, length, now, by_width[width_s])
            for name, (width_s, length) in RESOLUTIONS.items()
        }
        for time, _ in kept.marks:
            if not math.isfinite(time):
                raise ValueError(f"{time!r} is no time")
        self._marks: deque[Mark] = deque(sorted(kept.marks), maxlen=MARKS_MAX)
        self._new_marks: list[Mark] = []

    def add(self, record: RequestRecord, now: float) -> None:
        for series in self._series.values():
            series.add(record, now)

    def reject(self, now: float) -> None:
        for series in self._series.values():
            series.reject(now)

    def mark(self, what: str, now: float) -> None:
        self._marks.append((now, what))
        self._new_marks.append((now, what))

    def rows(self, resolution: str, now: float) -> list[Row]:
        return self._series[resolution].rows(now)

    def marks(self, since: float) -> list[Mark]:
        return [mark for mark in self._marks if mark[0] >= since]

    def latest(self, now: float) -> dict[str, list[Row]]:
        """Of each resolution."""
        return {name: series.latest(now) for name, series in self._series.items()}

    def totals(self, scope: str, now: float) -> Totals:
        """``scope``: a key of ``SCOPES``."""
        return self._series[SCOPES[scope]].totals(now)

    def take_changed(self) -> Kept:
        rows = [
            (RESOLUTIONS[name][0], row)
            for name, series in self._series.items()
            for row in series.take_changed()
        ]
        marks, self._new_marks = self._new_marks, []
        return Kept(tuple(rows), tuple(marks))

    def put_back(self, kept: Kept) -> None:
        """It could not be written."""
        for name, series in self._series.items():
            width_s = RESOLUTIONS[name][0]
            series.put_back(row for of_s, row in kept.rows if of_s == width_s)
        self._new_marks = [*kept.marks, *self._new_marks][-MARKS_MAX:]

    def check(self) -> None:
        for series in self._series.values():
            series.check()
