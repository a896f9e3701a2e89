"""Totals and history are the sums of the records, each request once, and never more than 100 %."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.core.usage import (
    CacheGauges,
    EngineGauges,
    GdnGauges,
    ModelFacts,
    RequestRecord,
    Totals,
)
from omlx.core.usage_ledger import REQUESTS_KEPT, RESOLUTIONS, History, Ledger, health
from tests.sim.records import record, running_row

MODEL = ModelFacts(id="demo", kv_layers=4, block_size=16, namespace="00")


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    prompt = draw(st.integers(1, 10_000))
    outcomes = ["stop", "length", "cancelled", None]
    finish_reason = draw(st.sampled_from(outcomes))
    return record(
        id=f"req-{draw(st.integers(0, 20))}",
        prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt - 1)),
        generated_tokens=draw(st.integers(0, 500)),
        prefilled=draw(st.booleans()),
        finish_reason=finish_reason,
        error="step_failed" if finish_reason is None else None,
        attribution_stripped=draw(st.booleans()),
    )


def ledger(now: float = 1000.0) -> Ledger:
    return Ledger(Totals(), GdnGauges(), now)


def test_nothing_processed_is_an_efficiency_of_zero() -> None:
    session = ledger().snapshot(1000.0)["session"]

    assert (session["processed_tokens"], session["cached_tokens"]) == (0, 0)
    assert session["efficiency"] == 0.0


def test_only_requests_whose_prefill_ended_count_as_processed() -> None:
    totals = Totals()
    first = record(cached_tokens=0)
    again = record(cached_tokens=96)
    cancelled_in_prefill = record(prefilled=False, finish_reason="cancelled", generated_tokens=0)
    failed_restore = record(cached_tokens=0, prompt_tokens=100)

    totals.add(first)
    totals.add(again)
    totals.add(cancelled_in_prefill)
    totals.reject()

    assert (totals.processed_tokens, totals.cached_tokens) == (200, 96)
    assert totals.efficiency == 0.48
    assert (totals.completed, totals.cancelled, totals.rejected) == (2, 1, 1)

    totals.add(failed_restore)

    assert (totals.processed_tokens, totals.cached_tokens) == (300, 96)


def test_a_request_cancelled_after_its_prefill_keeps_its_prompt_counted() -> None:
    totals = Totals()

    totals.add(record(finish_reason="cancelled"))

    assert (totals.processed_tokens, totals.cancelled, totals.completed) == (100, 1, 0)


@given(st.lists(records(), max_size=30), st.data())
def test_totals_and_history_are_the_sums_of_the_records(
    ended: list[RequestRecord], data: st.DataObject
) -> None:
    book, now = ledger(), 1000.0

    for each in ended:
        now += data.draw(st.floats(0, 5), "seconds until the next end")
        book.add(each, now)

    book.check()
    prefilled = [each for each in ended if each.prefilled]
    processed = sum(each.prompt_tokens for each in prefilled)
    cached = sum(each.cached_tokens for each in prefilled)
    generated = sum(each.generated_tokens for each in ended)
    assert book.session == book.alltime
    assert (book.session.processed_tokens, book.session.cached_tokens) == (processed, cached)
    assert book.session.attribution_stripped == sum(e.attribution_stripped for e in ended)
    assert book.session.completed + book.session.failed + book.session.cancelled == len(ended)
    for resolution in RESOLUTIONS:
        rows = book.history(resolution, now)["rows"]
        sums = [sum(column) for column in zip(*rows, strict=True)][1:]
        assert sums == [processed - cached, cached, generated, len(ended)]


@given(st.lists(records(), min_size=1, max_size=10))
def test_totals_only_grow(ended: list[RequestRecord]) -> None:
    totals = Totals()
    seen = [totals.saved()]

    for each in ended:
        totals.add(each)
        totals.check()
        seen.append(totals.saved())

    assert all(sooner[name] <= later[name] for sooner, later in pairwise(seen) for name in sooner)


@given(st.lists(records(), max_size=5))
def test_saved_totals_load_again(ended: list[RequestRecord]) -> None:
    totals = Totals()
    for each in ended:
        totals.add(each)

    assert Totals.load(json.loads(json.dumps(totals.saved()))) == totals


@pytest.mark.parametrize(
    "saved",
    [
        None,
        [],
        {"processed_tokens": -1},
        {"processed_tokens": 1.5},
        {"completed": True},
        {"processed_tokens": 10, "cached_tokens": 11},
    ],
)
def test_what_cannot_have_been_saved_is_not_loaded(saved: object) -> None:
    with pytest.raises(ValueError):
        Totals.load(saved)


@given(
    st.lists(st.floats(-100, 10_000, allow_nan=False), max_size=20),
    st.sampled_from([(1, 5), (10, 3)]),
)
def test_history_has_no_gap_no_past_and_a_bound(steps: list[float], shape: tuple[int, int]) -> None:
    width, length = shape
    now = latest = 1_000_000.0
    history = History(width, length, now)

    for step in steps:
        now = max(0.0, now + step)  # a clock may be set back
        latest = max(latest, now)
        history.add(record(), now)

    times = [row[0] for row in history.rows(now)]
    assert len(times) <= length
    assert all(later - sooner == width for sooner, later in pairwise(times))
    assert times[-1] <= latest < times[-1] + width
    assert history.latest(now) == history.rows(now)[-2:]


def test_idle_time_shows_as_zeros() -> None:
    history = History(1, 300, 1000.0)
    history.add(record(), 1000.0)

    rows = history.rows(1003.9)

    assert rows == [[1000, 52, 48, 20, 1], *([t, 0, 0, 0, 0] for t in (1001, 1002, 1003))]


def test_a_pause_longer_than_the_history_leaves_only_zeros() -> None:
    history = History(1, 300, 1000.0)
    history.add(record(), 1000.0)

    rows = history.rows(9000.0)

    assert (len(rows), rows[0][0], rows[-1][0]) == (300, 8701, 9000)
    assert not any(any(row[1:]) for row in rows)


def test_the_oldest_requests_are_forgotten_first() -> None:
    book = ledger()
    for number in range(REQUESTS_KEPT + 5):
        book.add(record(id=f"req-{number}"), 1000.0)

    kept = [row["id"] for row in book.requests(REQUESTS_KEPT + 100)["requests"]]

    assert len(kept) == REQUESTS_KEPT
    assert (kept[0], kept[-1]) == (f"req-{REQUESTS_KEPT + 4}", "req-5")
    assert book.request("req-4") is None


def test_a_request_is_running_until_it_ended_and_never_both() -> None:
    book = ledger()
    book.report_engine(EngineGauges(running=1), (running_row(id="a"),), 1000.0)
    assert [row["state"] for row in book.requests(10)["requests"]] == ["prefill"]

    book.add(record(id="a"), 1000.5)

    assert [row["state"] for row in book.requests(10)["requests"]] == ["completed"]
    assert book.snapshot(1000.5)["running"] == []


def test_running_and_ended_requests_have_the_same_keys() -> None:
    assert record().as_json().keys() == running_row().as_json().keys()


@pytest.mark.parametrize(
    ("engine", "cache", "age_s", "level", "words"),
    [
        (EngineGauges(), CacheGauges(), None, "wait", "not reported yet"),
        (EngineGauges(), CacheGauges(), 9.0, "bad", "not reported for 9 s"),
        (EngineGauges(running=1, last_step_age_s=31), CacheGauges(), 0.0, "bad", "31 s"),
        (EngineGauges(last_step_age_s=999), CacheGauges(tier_state="ok"), 0.0, "ok", "stores"),
        (EngineGauges(), CacheGauges(tier_state="degraded"), 0.0, "warn", "degraded"),
        (EngineGauges(), CacheGauges(tier_state="full"), 0.0, "warn", "full"),
        (EngineGauges(), CacheGauges(tier_state="ok", corrupt_blocks=2), 0.0, "warn", "2 damaged"),
        (EngineGauges(), CacheGauges(hot_limit_bytes=1), 0.0, "ok", "RAM only"),
        (EngineGauges(), CacheGauges(), 0.0, "ok", "cache is off"),
        (EngineGauges(), CacheGauges(tier_state="ok", hits=3, misses=1), 0.0, "ok", "3 of 4"),
    ],
)
def test_health_is_one_sentence_about_the_worst(
    engine: EngineGauges, cache: CacheGauges, age_s: float | None, level: str, words: str
) -> None:
    found_level, text = health(engine, cache, MODEL, age_s)

    assert found_level == level
    assert words in text


def test_without_a_model_the_health_is_loading() -> None:
    assert health(EngineGauges(), CacheGauges(), ModelFacts(), 99.0)[0] == "wait"
