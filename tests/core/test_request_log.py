"""One line a request, which nobody can forge, and few about errors that repeat."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from omlx.core.request_log import ALIKE_MAX, KINDS_MAX, PERIOD_S, RequestLog, line_of, word
from tests.sim.records import record


def failed(error: str = "the step failed"):
    return record(error=error, finish_reason=None)


def test_the_line_says_where_the_prompt_came_from_and_how_fast_it_went() -> None:
    line = line_of(
        record(
            cached_tokens=48,
            cached_ram=16,
            cached_ssd=32,
            generated_tokens=21,
            decode_ms=400.0,
            ttft_ms=34.4,
        )
    )

    assert line.startswith("completed request=req-1 route=/v1/chat/completions client=curl/8.5 ")
    for part in (
        "prompt_tokens=100 cached_tokens=48 cached_ram=16 cached_ssd=32 computed_tokens=52",
        "generated_tokens=21 ttft_ms=34 tokens_per_s=50.0",
        "reason=stop",
        "reuse_ended=no_block reuse_token=48",
    ):
        assert part in line


def test_a_request_that_never_began_has_no_speed_and_computed_nothing() -> None:
    line = line_of(
        record(prefilled=False, ttft_ms=None, generated_tokens=0, finish_reason="cancelled")
    )

    assert line.startswith("cancelled ")
    assert "computed_tokens=0 generated_tokens=0 ttft_ms=none tokens_per_s=none" in line


def test_an_error_is_told_instead_of_a_reason() -> None:
    line = line_of(failed("no memory left"))

    assert line.startswith("failed ") and "reason=error" in line
    assert line.endswith("error='no memory left'")


@given(st.text())
def test_a_text_of_a_client_stays_one_printable_word_or_one_quoted_text(text: str) -> None:
    shown = word(text)

    assert shown.isprintable() and shown
    quoted = shown[0] in "'\"" and shown[-1] == shown[0]
    assert quoted or not set(shown) & set(" ='\"\\")


@given(st.text(), st.text(), st.text(), st.text())
def test_no_field_can_begin_a_line_or_pass_for_another(
    client: str, model: str, error: str, route: str
) -> None:
    evil = record(client=client, model=model, error=error, route=route, finish_reason=None)

    line = line_of(evil)

    assert line.isprintable()
    assert line.startswith("failed request=req-1 route=")


def test_a_name_that_looks_like_fields_is_quoted() -> None:
    line = line_of(record(client="x prompt_tokens=1\nERROR forged\u202e"))

    assert "client='x prompt_tokens=1\\nERROR forged\\u202e' " in line


def test_errors_that_repeat_are_told_a_few_times_and_then_counted() -> None:
    log = RequestLog()

    lines = [line for i in range(100) for line in log.ended(failed(f"row {i} failed"), 0.0)]
    later = log.due(PERIOD_S)

    assert len(lines) == ALIKE_MAX
    assert later == [f"{100 - ALIKE_MAX} more requests failed alike within 60 s: 'row # failed'"]
    assert log.due(10 * PERIOD_S) == []


def test_the_next_period_is_told_again() -> None:
    log = RequestLog()
    for _ in range(ALIKE_MAX + 1):
        log.ended(failed(), 0.0)

    lines = log.ended(failed(), PERIOD_S)

    assert len(lines) == 2
    assert "1 more requests failed alike" in lines[0] and lines[1].startswith("failed ")


def test_other_errors_and_good_ends_are_not_held_back() -> None:
    log = RequestLog()
    for _ in range(2 * ALIKE_MAX):
        log.ended(failed(), 0.0)

    assert len(log.ended(failed("something else"), 1.0)) == 1
    assert all(len(log.ended(record(), 1.0)) == 1 for _ in range(100))


def test_any_number_of_kinds_is_bounded() -> None:
    log = RequestLog()

    lines = [line for i in range(10_000) for line in log.ended(failed("x" * (i % 100) + "y"), 0.0)]

    assert len(lines) <= (KINDS_MAX + 1) * ALIKE_MAX
    told_later = sum(int(line.split()[0]) for line in log.due(math.inf))
    assert len(lines) + told_later == 10_000
