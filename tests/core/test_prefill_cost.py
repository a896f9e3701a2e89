"""What a prefill would have taken is what such prefills took, and never flattered by short ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.core.prefill_cost import FIRST_RANGE, TOKENS_MIN, PrefillCost
from omlx.core.usage import GdnGauges, ModelFacts, Totals
from omlx.core.usage_ledger import Ledger
from tests.sim.records import record


def test_nothing_measured_is_no_number() -> None:
    cost = PrefillCost()
    cost.measured(0, TOKENS_MIN - 1, 1.0)

    assert cost.seconds(100) is None


@given(st.integers(TOKENS_MIN, 100_000), st.floats(1e-5, 1e-1))
def test_a_measured_prefill_costs_what_it_took(tokens: int, rate: float) -> None:
    cost = PrefillCost()
    cost.measured(0, tokens, tokens * rate)

    assert cost.seconds(tokens) == pytest.approx(tokens * rate)
    assert cost.seconds(0) == 0


def test_a_deep_token_costs_more_than_an_early_one() -> None:
    cost = PrefillCost()
    cost.measured(0, FIRST_RANGE, 1.0)
    cost.measured(8 * FIRST_RANGE, 9 * FIRST_RANGE, 4.0)

    early, deep = cost.seconds(FIRST_RANGE), cost.seconds(8 * FIRST_RANGE)

    assert early == pytest.approx(1.0)
    # What lies between was never measured, and is taken to cost what the early ones do.
    assert deep == pytest.approx(8.0)
    assert cost.seconds(9 * FIRST_RANGE) == pytest.approx(12.0)


def test_many_short_stretches_do_not_make_long_prompts_dear() -> None:
    cost = PrefillCost()
    cost.measured(0, FIRST_RANGE, 1.0)
    for _ in range(50):
        cost.measured(0, TOKENS_MIN, 1.0)  # sixteen times slower a token

    seconds = cost.seconds(FIRST_RANGE)

    assert seconds is not None and seconds < 4


def test_a_short_stretch_that_was_faster_says_that_the_machine_was_busy_before() -> None:
    cost = PrefillCost()
    cost.measured(0, FIRST_RANGE, 10.0)
    cost.measured(FIRST_RANGE - 16, FIRST_RANGE, 16 * 0.002)
    cost.measured(FIRST_RANGE - 16, FIRST_RANGE, 16 * 1.0)  # slower: it pays for the step

    assert cost.seconds(FIRST_RANGE) == pytest.approx(FIRST_RANGE * 0.002)


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(40, 9000), st.floats(0.01, 9))))
def test_what_is_saved_loads_again(spans: list[tuple[int, int, float]]) -> None:
    cost = PrefillCost()
    for start, tokens, seconds in spans:
        cost.measured(start, start + tokens, seconds)

    again = PrefillCost(cost.saved())

    assert again.seconds(5000) == cost.seconds(5000)


@pytest.mark.parametrize("bad", [(0, 0.0, 1.0), (0, 1.0, -1.0), (-1, 1.0, 1.0), (99, 1.0, 1.0)])
def test_what_cannot_have_been_saved_is_refused(bad: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError):
        PrefillCost([bad])


# ── what a request saved ─────────────────────────────────────────────────────────────────────


def ledger() -> Ledger:
    book = Ledger(Totals(), GdnGauges(), 1000.0)
    book.serve(ModelFacts(id="demo", namespace="00"), 1000.0)
    return book


COLD = {"prompt_tokens": 401, "cached_tokens": 0, "restore_ms": 0.0, "engine_ms": 4000.0}


def test_a_cold_request_only_pays_for_its_look_up() -> None:
    assert ledger().add(record(**COLD, lookup_ms=3.0), 1000.0).saved_ms == -3


def test_reuse_saves_the_prefill_less_what_it_took_itself() -> None:
    book = ledger()
    book.add(record(**COLD), 1000.0)  # 10 ms a token

    warm = book.add(
        record(prompt_tokens=401, cached_tokens=400, lookup_ms=5.0, restore_ms=95.0), 1001.0
    )
    slow = book.add(
        record(prompt_tokens=401, cached_tokens=16, lookup_ms=0.0, restore_ms=1000.0), 1002.0
    )

    assert (warm.saved_ms, slow.saved_ms) == (3900, -840)
    assert book.session.saved_ms == -round(0.5) + 3900 - 840


def test_a_measured_speed_is_kept_for_the_next_start_and_for_its_model_alone() -> None:
    first = ledger()
    first.add(record(**COLD), 1000.0)
    kept = first.take_changed()

    second = Ledger(Totals(), GdnGauges(), 2000.0, kept)
    other = second.add(record(cached_tokens=96), 2000.0)
    second.serve(ModelFacts(id="demo", namespace="00"), 2000.0)
    warm = second.add(record(prompt_tokens=401, cached_tokens=400), 2001.0)

    assert other.saved_ms is None
    assert warm.saved_ms == 3998
    assert not first.take_changed().speeds
