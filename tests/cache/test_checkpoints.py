"""Checkpoints are where the next request begins, and age without losing what others share."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from omlx.cache.checkpoints import (
    HINT_GAIN,
    NEWEST_KEPT,
    SHARED,
    Mark,
    Place,
    cuts,
    next_cut,
    thin,
)

INTERVAL = 8
lengths = st.integers(1, 200)
intervals = st.integers(1, 40)


@dataclass(frozen=True)
class Prompt:
    """What ``cuts`` is asked about."""

    num_prompt: int
    num_cached: int
    interval: int
    num_system: int
    branch: int | None
    hints: tuple[int, ...] = ()

    @property
    def cuts(self) -> dict[int, Place]:
        return cuts(
            self.num_prompt,
            self.num_cached,
            interval=self.interval,
            num_system=self.num_system,
            branch=self.branch,
            hints=self.hints,
        )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    length = draw(lengths)
    near = st.integers(0, length + 2)
    return Prompt(
        length,
        draw(st.integers(0, length - 1)),
        draw(intervals),
        draw(near),
        draw(st.none() | near),
        tuple(draw(st.lists(near, max_size=4))),
    )


# ── where ────────────────────────────────────────────────────────────────────────────────────


@given(prompts())
def test_cuts_lie_behind_what_is_restored_and_before_the_last_token(prompt: Prompt) -> None:
    positions = list(prompt.cuts)

    assert positions == sorted(positions)
    assert all(prompt.num_cached < position < prompt.num_prompt for position in positions)


@given(prompts())
def test_the_position_before_the_last_token_is_kept_unless_it_is_restored(prompt: Prompt) -> None:
    last = prompt.num_prompt - 1

    assert (last in prompt.cuts) == (last > prompt.num_cached)


@given(prompts())
def test_every_reason_that_is_new_gets_its_cut(prompt: Prompt) -> None:
    new = range(prompt.num_cached + 1, prompt.num_prompt)
    wanted = {position for position in new if position % prompt.interval == 0}
    wanted |= {prompt.num_prompt - 1, prompt.num_system, prompt.branch or 0} & set(new)

    assert set(prompt.cuts) == wanted


@pytest.mark.parametrize("edge", [INTERVAL, 2 * INTERVAL])
@pytest.mark.parametrize("beside", [-1, 0, 1, 2])
def test_a_prompt_that_ends_at_an_edge_is_cut_below_it(edge: int, beside: int) -> None:
    """An exact multiple of the interval once found nothing: its last state is at the edge."""
    length = edge + beside
    found = cuts(length, 0, interval=INTERVAL)

    assert max(found) == length - 1
    assert found[length - 1] is Place.LAST
    assert [p for p, place in found.items() if place is Place.LATTICE] == [
        p for p in (INTERVAL, 2 * INTERVAL) if p < length - 1
    ]


def test_where_two_reasons_meet_the_stronger_counts() -> None:
    assert cuts(17, 0, interval=16, num_system=16, branch=16) == {16: Place.SYSTEM}
    assert cuts(17, 0, interval=16, branch=16) == {16: Place.BRANCH}
    assert cuts(33, 0, interval=16, branch=16) == {16: Place.BRANCH, 32: Place.LAST}


def test_a_prompt_of_one_token_has_no_cut() -> None:
    assert cuts(1, 0, interval=1, num_system=1, branch=1) == {}


@given(prompts(), st.integers(1, 50))
def test_going_from_cut_to_cut_misses_none(prompt: Prompt, chunk: int) -> None:
    wanted, last, position = prompt.cuts, prompt.num_prompt - 1, prompt.num_cached
    stops: list[int] = []
    while position < last:
        position = next_cut(wanted, position, min(last, position + chunk))
        stops.append(position)

    assert set(wanted) <= set(stops)
    assert stops == sorted(set(stops))


# ── for how long ─────────────────────────────────────────────────────────────────────────────


places = st.sampled_from(list(Place))
chains = st.dictionaries(st.integers(1, 4000), places, max_size=60).map(
    lambda found: [Mark(position, place) for position, place in found.items()]
)


@given(chains, intervals)
def test_what_others_share_is_never_let_go(chain: list[Mark], interval: int) -> None:
    assert not any(mark.place in SHARED for mark in thin(chain))


@given(chains, intervals)
def test_the_newest_are_kept(chain: list[Mark], interval: int) -> None:
    newest = sorted(chain, key=lambda mark: mark.position)[-NEWEST_KEPT:]

    assert not set(newest) & set(thin(chain))


@given(chains, intervals)
def test_only_what_is_there_is_let_go_and_once(chain: list[Mark], interval: int) -> None:
    dropped = thin(chain)

    assert len(set(dropped)) == len(dropped)
    assert set(dropped) <= set(chain)


@given(chains, intervals)
def test_to_thin_again_lets_go_of_nothing(chain: list[Mark], interval: int) -> None:
    kept = set(chain) - set(thin(chain))

    assert thin(list(kept)) == []


@given(chains, intervals, st.randoms())
def test_the_order_does_not_matter(chain: list[Mark], interval: int, random: Random) -> None:
    shuffled = list(chain)
    random.shuffle(shuffled)

    assert set(thin(shuffled)) == set(thin(chain))


@given(chains, intervals)
def test_about_the_logarithm_of_a_chain_is_kept(chain: list[Mark], interval: int) -> None:
    kept = set(chain) - set(thin(chain))
    private = [mark for mark in kept if mark.place not in SHARED]
    end = max((mark.position for mark in chain), default=0)

    assert len(private) <= NEWEST_KEPT + 2 * (end // interval).bit_length() + 2


def aged(length: int, interval: int) -> list[Mark]:
    """A chain whose lattice grew to ``length`` and was thinned each time."""
    chain: list[Mark] = []
    for position in range(interval, length + 1, interval):
        chain.append(Mark(position, Place.LATTICE))
        dropped = set(thin(chain))
        chain = [mark for mark in chain if mark not in dropped]
    return chain


@pytest.mark.parametrize("count", [5, 8, 9, 16, 33, 64, 100, 257, 1000])
def test_a_divergence_recomputes_about_its_own_distance(count: int) -> None:
    """What is lost to age by a prompt that leaves the chain d tokens before its end is O(d)."""
    end = count * INTERVAL
    positions = [0, *(mark.position for mark in aged(end, INTERVAL))]
    for leaves_at in range(INTERVAL, end + 1, INTERVAL):
        below = max(position for position in positions if position <= leaves_at)
        distance = end - leaves_at
        assert leaves_at - below <= 2 * distance + INTERVAL


@pytest.mark.parametrize("count", [64, 1000])
def test_a_lattice_that_grows_is_kept_logarithmically(count: int) -> None:
    assert len(aged(count * INTERVAL, INTERVAL)) <= NEWEST_KEPT + 2 * count.bit_length()


# ── hints ────────────────────────────────────────────────────────────────────────────────────


def test_a_hint_is_a_cut_at_exactly_its_position() -> None:
    found = cuts(1000, 0, interval=2000, num_system=300, hints=(100, 500))

    assert found == {
        100: Place.SYSTEM,
        300: Place.SYSTEM,
        500: Place.LAST,
        999: Place.LAST,
    }


@given(prompts())
def test_a_hint_takes_no_cut_away_and_is_never_next_to_one(prompt: Prompt) -> None:
    plain = cuts(
        prompt.num_prompt,
        prompt.num_cached,
        interval=prompt.interval,
        num_system=prompt.num_system,
        branch=prompt.branch,
    )
    added = sorted(set(prompt.cuts) - set(plain))

    assert plain.items() <= prompt.cuts.items()
    assert set(added) <= set(prompt.hints)
    for position in added:
        others = {0, prompt.num_cached, *prompt.cuts} - {position}
        assert min(abs(position - other) for other in others) >= HINT_GAIN


def test_a_hint_in_what_is_restored_is_no_cut() -> None:
    assert list(cuts(1000, 400, interval=2000, hints=(100, 400))) == [999]
