"""At most ``max_restarts`` within any ``period_s`` seconds, then give up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlx.kernel.restart import RestartBudget


def test_the_budget_is_spent_by_one_crash_more_than_it_allows() -> None:
    budget = RestartBudget(3, 60.0)

    assert [budget.spend(now_s) for now_s in (0.0, 1.0, 2.0, 3.0)] == [True, True, True, False]


def test_a_crash_is_forgotten_after_exactly_one_period() -> None:
    budget = RestartBudget(1, 60.0)

    assert budget.spend(0.0)
    assert not budget.spend(59.9)
    assert not budget.spend(119.8), "the crash at 59.9 still counts"
    assert budget.spend(179.8)


@given(
    st.integers(0, 4),
    st.lists(st.integers(0, 30), max_size=30),
)
def test_it_gives_up_exactly_when_a_window_holds_too_many(limit: int, gaps: list[int]) -> None:
    budget = RestartBudget(limit, 60.0)
    crashes: list[int] = []
    now_s = 0
    for gap in gaps:
        now_s += gap
        crashes.append(now_s)
        in_window = sum(crash > now_s - 60 for crash in crashes)

        assert budget.spend(float(now_s)) == (in_window <= limit)
