"""Streams keep their share, a short prompt waits for chunks and not for prompts, none starves."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given

from omlx.core.limits import SchedulerLimits
from omlx.core.plan import StepResult, Uid
from omlx.core.prefills import SLOWER_BETWEEN, Prefills
from omlx.core.sequence import Request, Sequence, State, Times
from omlx.core.text import TextStream
from omlx.core.wave import most_chunks
from tests.sim.fake_engine import Letters

CHUNK = 8
TOKEN_S, DECODE_S = 0.01, 0.02
"""A chunk takes four decoding steps."""


def make(decode_share: float = 0.5) -> Prefills:
    return Prefills(
        SchedulerLimits(
            max_running=8,
            max_queued=8,
            max_context=10_000,
            chunk_tokens=CHUNK,
            block_size=4,
            caching=False,
            decode_share=decode_share,
        )
    )


def prompts(*lengths: int) -> dict[Uid, Sequence]:
    """Sequences whose prompts have so many tokens to compute; the oldest first."""
    running: dict[Uid, Sequence] = {}
    for number, length in enumerate(lengths, 1):
        text = TextStream(Letters(), stops=(), hidden=frozenset())
        sequence = Sequence(Uid(number), Request("r", (0,) * (length + 1), 9), text, Times(0.0))
        sequence.state = State.PREFILL
        running[Uid(number)] = sequence
    return running


def step(prefills: Prefills, running: Mapping[Uid, Sequence], *, decoding: bool) -> list[int]:
    """One step; the uids whose prompts got on. Rows that can decode leave."""
    chunks, _, starts = prefills.next(running, decoding=decoding)
    computed = 0
    for chunk in chunks:
        computed += chunk.stop - running[chunk.uid].num_computed
        running[chunk.uid].num_computed = chunk.stop
    assert computed <= CHUNK * most_chunks(len(running)), "no stream waits for more"
    for uid in starts:
        running[uid].state = State.DECODE
    result = StepResult((), prefill_s=computed * TOKEN_S, decode_s=DECODE_S * decoding)
    prefills.ran(result, decoding=decoding)
    return [chunk.uid for chunk in chunks]


def unfinished(running: Mapping[Uid, Sequence]) -> list[int]:
    return [s.uid for s in running.values() if s.state is State.PREFILL]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.9])
def test_running_streams_keep_their_share_of_the_time(share: float) -> None:
    """The rate of a stream during a long prompt, against its rate alone: what it is to have, and
    less than a step a chunk more."""
    prefills, running = make(share), prompts(4000)
    decoded = elapsed = 0.0
    while unfinished(running):
        elapsed += DECODE_S + TOKEN_S * CHUNK * bool(step(prefills, running, decoding=True))
        decoded += DECODE_S

    owed_s = SLOWER_BETWEEN * share / (1 - share) * CHUNK * TOKEN_S
    most = (owed_s + DECODE_S) / (owed_s + DECODE_S + CHUNK * TOKEN_S)
    assert share - 0.001 <= decoded / elapsed < most


def test_another_share_holds_from_the_next_step_on() -> None:
    prefills, running = make(0.9), prompts(80)
    step(prefills, running, decoding=True)
    assert step(prefills, running, decoding=True) == [], "the streams are owed a lot"

    prefills.set_limits(make(0.0).limits)
    step(prefills, running, decoding=False)

    assert [step(prefills, running, decoding=True) for _ in range(3)] == [[1]] * 3


def decoding_since(running: dict[Uid, Sequence], first_token: float) -> None:
    """Add a stream that had its first token then."""
    stream = next(iter(prompts(1).values()))
    stream.state, stream.times.first_token = State.DECODE, first_token
    running[Uid(99)] = stream


def test_nothing_is_owed_for_short_prompts_that_came_before_the_streams_began() -> None:
    prefills, running = make(0.9), prompts(3 * CHUNK, 3 * CHUNK)  # at 0.0
    decoding_since(running, 0.5)

    chunks = [step(prefills, running, decoding=True) for _ in range(6)]

    assert all(chunks), "a chunk in each step, until both are done"
    assert not unfinished(running)


@pytest.mark.parametrize(
    ("waiting", "together"), [(1, 1), (4, 1), (7, 1), (8, 2), (12, 3), (16, 4), (40, 4)]
)
def test_a_step_computes_a_quarter_of_those_that_came_together(waiting: int, together: int) -> None:
    chunks = step(make(), prompts(*[CHUNK] * waiting), decoding=False)

    assert chunks == list(range(1, together + 1))


@pytest.mark.parametrize("many", [8, 16])
def test_a_stream_that_ran_before_waits_for_one_chunk_however_many_come(many: int) -> None:
    running = prompts(*[CHUNK] * many)
    decoding_since(running, -0.5)

    assert len(step(make(0.0), running, decoding=True)) == 1


def test_a_row_that_comes_back_is_short_if_little_of_it_is_to_be_computed() -> None:
    """Its ``num_cached`` is what the first look-up found."""
    prefills, running = make(0.9), prompts(9 * CHUNK)
    running[Uid(1)].num_cached = 8 * CHUNK
    decoding_since(running, 0.5)

    assert step(prefills, running, decoding=True) == [1]
    assert step(prefills, running, decoding=True) == [], "nine chunks are to be computed"


def test_a_long_prompt_does_not_share_a_wide_step() -> None:
    running = prompts(8000, *[CHUNK] * 8)
    prefills = make()

    steps = [step(prefills, running, decoding=False) for _ in range(4)]

    assert steps == [[1], [2, 3], [1], [4]], "of the wave two, until fewer than eight wait"


@pytest.mark.parametrize(("length", "first_token"), [(3 * CHUNK, -0.5), (5 * CHUNK, 0.5)])
def test_streams_are_owed_for_who_comes_later_and_for_long_prompts(
    length: int, first_token: float
) -> None:
    prefills, running = make(0.9), prompts(length)
    decoding_since(running, first_token)

    assert step(prefills, running, decoding=True) == [1]
    assert step(prefills, running, decoding=True) == []


def test_without_a_share_each_step_computes_a_chunk() -> None:
    prefills, running = make(0.0), prompts(80)

    assert [step(prefills, running, decoding=True) for _ in range(10)] == [[1]] * 10


def test_nobody_waits_when_nothing_decodes() -> None:
    prefills, running = make(0.9), prompts(80)
    step(prefills, running, decoding=True)
    step(prefills, running, decoding=False)

    assert [step(prefills, running, decoding=False) for _ in range(5)] == [[1]] * 5


def test_a_short_prompt_waits_for_chunks_and_not_for_the_long_one() -> None:
    prefills, running = make(), prompts(8000, 3 * CHUNK)

    steps = 0
    while 2 in unfinished(running):
        step(prefills, running, decoding=False)
        steps += 1

    assert steps <= 2 * 3 + 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_the_oldest_gets_every_other_chunk_at_least(lengths: list[int]) -> None:
    """Whoever comes later with less to do: it always gets on."""
    prefills, running = make(), prompts(*lengths)

    waited = 0
    while unfinished(running):
        oldest = unfinished(running)[0]
        got = step(prefills, running, decoding=False)
        waited = 0 if oldest in got else waited + 1
        assert got, "something is always computed"
        assert waited <= 1


def test_small_rests_are_computed_together() -> None:
    """Repeats have a token or two each."""
    prefills, running = make(), prompts(2, 1, 3, 2)

    assert sorted(step(prefills, running, decoding=True)) == [1, 2, 3, 4]


def test_a_chunk_ends_where_it_would_end_alone() -> None:
    """Or the same prompt would round differently beside others."""
    prefills, running = make(), prompts(5 * CHUNK + 3, 2 * CHUNK + 5)
    stops: dict[int, list[int]] = {1: [], 2: []}
    while unfinished(running):
        for uid in step(prefills, running, decoding=False):
            stops[uid].append(running[Uid(uid)].num_computed)

    assert stops == {1: [8, 16, 24, 32, 40, 43], 2: [8, 16, 21]}
