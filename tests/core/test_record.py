"""A request's phases add up to its total, wherever it ended, and its parts to its prompt."""

from __future__ import annotations

from dataclasses import astuple, replace

from hypothesis import given
from hypothesis import strategies as st

from omlx.cache.tickets import Reason, ReuseEnded
from omlx.core.events import Closed
from omlx.core.plan import Uid
from omlx.core.record import phases_of, record_of
from omlx.core.sequence import Request, Times
from omlx.core.usage import RequestRecord

durations = st.floats(0, 1000, allow_nan=False)

CLOSED = Closed(
    Uid(1),
    Request("req", tuple(range(100)), 10),
    finish_reason="stop",
    error=None,
    pieces=(),
    generated_tokens=5,
    cached_tokens=48,
    cached_ram=32,
    cached_ssd=16,
    prefilled=True,
    reuse_ended=ReuseEnded(Reason.DIVERGED, 48),
    times=Times(10.0, 10.5, 10.6, 11.0, 13.0, 14.0),
    prefill_s=1.5,
    restore_s=0.25,
    leader=Uid(1),
    index=0,
)


def record(*choices: Closed) -> RequestRecord:
    return record_of(choices, wall_s=1000.0, now_s=20.0)


def parts(found: RequestRecord) -> list[float]:
    omlx = found.omlx()
    return [omlx[f"{name}_ms"] for name in ("queue", "lookup", "restore", "prefill", "decode")]


def test_each_phase_is_what_happened_in_it() -> None:
    found = record(CLOSED)

    assert [round(one) for one in parts(found)] == [500, 100, 650, 1750, 1000]
    assert (round(found.total_ms), round(found.ttft_ms or 0)) == (4000, 3000)


@given(
    st.lists(durations, min_size=5, max_size=5),
    st.integers(0, 4),
    st.floats(0, 5000, allow_nan=False),
)
def test_phases_add_up_to_the_total_wherever_it_ended(
    steps: list[float], reached: int, restore_s: float
) -> None:
    marks = [10.0]
    for step in steps[:reached]:
        marks.append(marks[-1] + step)
    times = Times(*marks, *[None] * (5 - len(marks)), ended=marks[-1] + steps[4])
    found = record(replace(CLOSED, times=times, restore_s=restore_s))

    assert min(parts(found)) >= 0
    assert abs(sum(parts(found)) - found.total_ms) <= 2
    assert abs(sum(parts(found)) - found.as_json()["total_ms"]) <= 2


def test_a_request_cancelled_in_the_queue_waited_all_its_time() -> None:
    found = record(replace(CLOSED, finish_reason="cancelled", times=Times(10.0, ended=12.0)))

    assert parts(found) == [2000, 0, 0, 0, 0]
    assert found.ttft_ms is None


def test_a_mark_that_was_set_after_the_end_takes_no_time() -> None:
    times = Times(10.0, 11.0, 19.0)  # the cache answered when the client had left

    assert astuple(phases_of(times, 12.0, 0.0)) == (1000, 1000, 0, 0, 0)


def test_all_choices_are_one_request_until_the_last_ends() -> None:
    late = replace(CLOSED, index=1, times=replace(CLOSED.times, ended=16.0))

    found = record(late, CLOSED)

    assert found.generated_tokens == 10
    assert (found.prompt_tokens, found.total_ms) == (100, 6000)
    assert abs(sum(parts(found)) - found.total_ms) <= 2


def test_a_prompt_is_what_was_cached_and_what_was_computed() -> None:
    found = record(CLOSED)
    cut_short = record(replace(CLOSED, prefilled=False, unfinished_tokens=16))

    assert found.cached_tokens + found.computed_tokens == found.prompt_tokens
    assert (cut_short.computed_tokens, cut_short.unfinished_tokens) == (16, 16)


def test_what_only_fills_the_cache_generated_nothing() -> None:
    request = replace(CLOSED.request, only_fills=True)

    found = record(replace(CLOSED, request=request, generated_tokens=1, stop="x"))

    assert (found.generated_tokens, found.finish_reason, found.stop) == (0, "length", None)
