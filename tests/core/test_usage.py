"""Totals are the sums of the records, each request once, and never more than 100 %."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.core.health import health
from omlx.core.history import COLUMNS, RESOLUTIONS
from omlx.core.usage import (
    CacheGauges,
    EngineGauges,
    GdnGauges,
    ModelFacts,
    RequestRecord,
    Totals,
)
from omlx.core.usage_ledger import REQUESTS_KEPT, Ledger
from tests.sim.records import record, running_row

MODEL = ModelFacts(id="demo", kv_layers=4, block_size=16, namespace="00")


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    prompt = draw(st.integers(1, 10_000))
    outcomes = ["stop", "length", "cancelled", None]
    finish_reason = draw(st.sampled_from(outcomes))
    cached = draw(st.integers(0, prompt - 1))
    prefilled = draw(st.booleans())
    unfinished = 0 if prefilled else draw(st.integers(0, prompt - 1 - cached))
    return record(
        id=f"req-{draw(st.integers(0, 20))}",
        prompt_tokens=prompt,
        cached_tokens=cached,
        unfinished_tokens=unfinished,
        generated_tokens=draw(st.integers(0, 500)),
        prefilled=prefilled,
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

    told = []
    for each in ended:
        now += data.draw(st.floats(0, 5), "seconds until the next end")
        told.append(book.add(each, now))

    book.check()
    prefilled = [each for each in ended if each.prefilled]
    processed = sum(each.prompt_tokens for each in prefilled)
    cached = sum(each.cached_tokens for each in prefilled)
    generated = sum(each.generated_tokens for each in ended)
    assert book.session == book.alltime
    assert (book.session.processed_tokens, book.session.cached_tokens) == (processed, cached)
    assert book.session.attribution_stripped == sum(e.attribution_stripped for e in ended)
    assert book.session.completed + book.session.failed + book.session.cancelled == len(ended)
    assert book.session.unfinished_tokens == sum(each.unfinished_tokens for each in ended)
    assert book.session.saved_ms == sum(each.saved_ms or 0 for each in told)
    for resolution in RESOLUTIONS:
        rows = book.history(resolution, now)["rows"]
        sums = dict(zip(COLUMNS, map(sum, zip(*rows, strict=True)), strict=True))
        assert sums["computed"] == sum(each.computed_tokens for each in ended)
        assert (sums["cached"], sums["generated"]) == (cached, generated)
        assert (sums["requests"], sums["cancelled"]) == (len(ended), book.session.cancelled)
    snapshot = book.snapshot(now)
    for scope in ("1h", "24h", "alltime"):
        assert snapshot[scope] == snapshot["session"]


@given(st.lists(records(), min_size=1, max_size=10))
def test_totals_only_grow(ended: list[RequestRecord]) -> None:
    totals = Totals()
    seen = [totals.saved()]

    for each in ended:
        totals.add(each)
        totals.check()
        seen.append(totals.saved())

    names = set(totals.saved()) - {"saved_ms"}
    assert all(sooner[name] <= later[name] for sooner, later in pairwise(seen) for name in names)


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
        (EngineGauges(), CacheGauges(tier_state="ok"), 0.0, "ok", "nothing was reused yet"),
    ],
)
def test_health_is_one_sentence_about_the_worst(
    engine: EngineGauges, cache: CacheGauges, age_s: float | None, level: str, words: str
) -> None:
    found = health(engine, cache, MODEL, age_s)

    assert found.level == level
    assert words in found.text


def test_a_working_cache_says_when_it_was_last_used() -> None:
    found = health(EngineGauges(), CacheGauges(tier_state="ok"), MODEL, 0.0, 12.4)

    assert (found.level, found.code, found.values) == ("ok", "works", {"seconds": 12.4})
    assert "12 s ago" in found.text


def test_without_a_model_the_health_is_loading() -> None:
    assert health(EngineGauges(), CacheGauges(), ModelFacts(), 99.0).code == "loading"
