"""The past is counted in buckets without gaps, bounded, and comes back as it was written."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.core.history import COLUMNS, MARKS_MAX, RESOLUTIONS, SCOPES, History, Kept, Series
from omlx.core.usage import CacheGauges, GdnGauges, Totals
from omlx.core.usage_ledger import Ledger
from tests.sim.records import record

NOW = 1_700_000_000.0


def row(time: int, **counts: int) -> list[int]:
    return [time, *(counts.get(name, 0) for name in COLUMNS[1:])]


@given(
    st.lists(st.floats(-100, 10_000, allow_nan=False), max_size=20),
    st.sampled_from([(1, 5), (10, 3)]),
)
def test_there_is_no_gap_no_past_and_a_bound(steps: list[float], shape: tuple[int, int]) -> None:
    width, length = shape
    now = latest = 1_000_000.0
    series = Series(width, length, now)

    for step in steps:
        now = max(0.0, now + step)  # a clock may be set back
        latest = max(latest, now)
        series.add(record(), now)
        series.check()

    times = [row[0] for row in series.rows(now)]
    assert len(times) <= length
    assert all(later - sooner == width for sooner, later in pairwise(times))
    assert times[-1] <= latest < times[-1] + width
    assert series.latest(now) == series.rows(now)[-2:]


def test_idle_time_shows_as_zeros() -> None:
    series = Series(1, 300, 1000.0)
    series.add(record(), 1000.0)

    rows = series.rows(1003.9)

    assert rows[0][:5] == [1000, 52, 48, 20, 1]
    assert rows[1:] == [row(time) for time in (1001, 1002, 1003)]


def test_a_pause_longer_than_it_covers_leaves_only_zeros() -> None:
    series = Series(1, 300, 1000.0)
    series.add(record(), 1000.0)

    rows = series.rows(9000.0)

    assert (len(rows), rows[0][0], rows[-1][0]) == (300, 8701, 9000)
    assert not any(any(row[1:]) for row in rows)


def test_totals_forget_what_left_the_window() -> None:
    history = History(NOW)
    history.add(record(), NOW)
    history.add(record(finish_reason="cancelled", saved_ms=-5), NOW + 3000)
    history.reject(NOW + 3000)

    day, hour = (history.totals(scope, NOW + 4000) for scope in ("24h", "1h"))

    assert (day.processed_tokens, day.cached_tokens, day.completed) == (200, 96, 1)
    assert (hour.processed_tokens, hour.completed, hour.cancelled) == (100, 0, 1)
    assert (hour.rejected, hour.saved_ms) == (1, -5)
    assert history.totals("24h", NOW + 200_000) == Series(60, 1440, NOW).totals(NOW)


def test_a_cancelled_prefill_was_computed_and_is_not_processed() -> None:
    history = History(NOW)
    history.add(
        record(prefilled=False, finish_reason="cancelled", cached_tokens=0, unfinished_tokens=64),
        NOW,
    )

    total = history.totals("1h", NOW)

    assert history.rows("1s", NOW)[0][:3] == [NOW, 64, 0]
    assert (total.processed_tokens, total.unfinished_tokens, total.cancelled) == (0, 64, 1)


@given(st.lists(st.tuples(st.floats(0, 4000), st.booleans()), max_size=12), st.floats(0, 90_000))
def test_what_changed_is_all_that_is_needed_to_begin_again(
    ends: list[tuple[float, bool]], pause_s: float
) -> None:
    first, file = History(NOW), {}
    now = NOW
    for pause, written in ends:
        now += pause
        first.add(record(), now)
        changed = first.take_changed()
        if written:
            file |= {(width, row[0]): row for width, row in changed.rows}
        else:
            first.put_back(changed)
    file |= {(width, row[0]): row for width, row in first.take_changed().rows}
    later = now + pause_s

    second = History(later, Kept(tuple((width, row) for (width, _), row in file.items())))

    second.check()
    assert not first.take_changed()
    for scope in SCOPES:
        assert second.totals(scope, later) == first.totals(scope, later)
    for name in RESOLUTIONS:
        rows = {row[0]: row for row in first.rows(name, later)}
        assert all(rows[row[0]] == row for row in second.rows(name, later) if any(row[1:]))


def test_rows_of_the_future_and_of_long_ago_are_left_out() -> None:
    kept = [row(900, cached=1), row(960, cached=2), row(1020, cached=4), row(1080, cached=8)]

    series = Series(60, 3, 1030.0, kept)

    assert [one[:3] for one in series.rows(1030.0)] == [[900, 0, 1], [960, 0, 2], [1020, 0, 4]]


@pytest.mark.parametrize(
    "bad",
    [
        (7, row(7)),
        (60, row(61)),
        (60, row(60, cached=-1)),
        (60, row(60, unfinished=1)),
        (60, row(60, failed=1)),
        (60, [60, 1]),
        (60, [60.0, *row(60)[1:]]),
        (60, [None, *row(60)[1:]]),
    ],
)
def test_what_cannot_have_been_kept_is_refused(bad: tuple[int, list[int]]) -> None:
    with pytest.raises(ValueError):
        History(NOW, Kept((bad,)))


def test_marks_are_bounded_and_told_from_where_a_chart_begins() -> None:
    history = History(NOW)
    for second in range(MARKS_MAX + 10):
        history.mark("model", NOW + second)

    assert len(history.marks(NOW)) == MARKS_MAX
    assert history.marks(NOW + MARKS_MAX + 9) == [(NOW + MARKS_MAX + 9, "model")]


def test_evictions_are_marked_when_they_begin_and_not_while_they_go_on() -> None:
    book = Ledger(Totals(), GdnGauges(), NOW)
    reports = [(0, 0), (10, 3), (20, 9), (900, 9), (901, 10), (902, 11)]
    for second, evicted in reports:
        book.report_cache(CacheGauges(evictions_ssd=evicted), None, NOW + second)
    book.mark("settings", NOW + 903)

    marks = book.history("1h", NOW + 1000)["marks"]

    assert [(time - NOW, what) for time, what in marks] == [
        (10, "evictions"),
        (901, "evictions"),
        (903, "settings"),
    ]
