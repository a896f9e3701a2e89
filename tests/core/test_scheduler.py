"""Shared, evicted, cancelled, cold, broken: each request gets what it would get alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from omlx.cache.blocks import pack_tokens
from omlx.core.admission import QueueFull
from omlx.core.sequence import Request
from tests.core.stage import Answer, Setup, Stage
from tests.sim.fake_engine import alone


def request(prompt: list[int], max_tokens: int = 4, **changes: object) -> Request:
    return replace(Request("r", tuple(prompt), max_tokens), **changes)


def drawn_setup(rng: random.Random, **changes: object) -> Setup:
    setup = Setup(
        block_size=rng.randint(2, 5),
        hot_blocks=rng.choice([0, 2, 4, 8, 1000]),
        ssd_blocks=rng.choice([0, 0, 3, 8, 1000]),
        pending_blocks=rng.choice([1, 3, 1000]),
        chunk_tokens=rng.choice([1, 3, 4, 16]),
        max_running=rng.randint(1, 5),
        feeds_ahead=rng.random() < 0.5,
        cut_before_decode=rng.random() < 0.3,
        restore_tokens=rng.choice([None, 1, 3, 8]),
        hot_is_free=rng.random() < 0.5,
        ahead_blocks=rng.choice([0, 2, 1000]),
    )
    return replace(setup, **changes)


def drawn_requests(rng: random.Random, count: int) -> list[Request]:
    """Few tokens, few prompts: whole repeats, forks, and equal blocks behind different ones."""
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 14))] for _ in range(3)]
    prompts += [[*rng.choice(prompts), *([rng.randrange(2)] * rng.randint(0, 6))] for _ in "abc"]
    return [
        request(
            rng.choice(prompts),
            rng.randint(1, 9),
            stops=rng.choice([(), (), ("ab",), ("bba", "aa")]),
            salt=rng.choice(["", "", "s"]),
        )
        for _ in range(count)
    ]


def check_answer(stage: Stage, answer: Answer) -> None:
    closed, wanted = answer.closed, answer.request
    assert closed is not None, "it never ended"
    tokens, text, finish_reason = alone(wanted.prompt, wanted.max_tokens, wanted.stops)
    if closed.error is not None:
        assert {closed.uid, closed.leader} & stage.engine.hurt, "an error that was not its own"
        assert closed.finish_reason is None
        assert answer.tokens == tokens[: len(answer.tokens)]
        assert text.startswith(answer.text) or finish_reason == "stop"
    elif answer.cancelled:
        assert closed.finish_reason == "cancelled"
        assert answer.tokens == tokens[: len(answer.tokens)]
    else:
        assert answer.tokens == tokens
        assert answer.text == text
        assert closed.finish_reason == finish_reason
    assert closed.times.ended is not None
    assert closed.generated_tokens == len(answer.tokens)
    assert 0 <= closed.cached_tokens <= len(wanted.prompt) - 1
    assert closed.cached_tokens == closed.cached_ram + closed.cached_ssd
    assert closed.prefilled == bool(answer.tokens)
    if answer.tokens:
        computed = stage.engine.computed[closed.leader] + 1
        assert closed.cached_tokens + computed == len(wanted.prompt), "none twice, none skipped"


# ── under anything that can happen ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(300))
def test_each_request_gets_what_it_would_get_alone(seed: int) -> None:
    """K1, K3: while others come, go and fail, blocks are lost and limits change."""
    rng = random.Random(seed)
    mishaps = rng.choice([0.0, 0.5, 1.0, 2.0])
    stage = Stage(drawn_setup(rng, mishaps=mishaps, clears=rng.random() < 0.5), seed)
    stage.cancels = rng.choice([0.0, 0.1, 0.3])
    stage.to_submit = drawn_requests(rng, 15)

    stage.run()

    assert len(stage.answers) == 15
    for answer in stage.answers.values():
        check_answer(stage, answer)
    stage.check_released()


class Repeating(Stage):
    """At each end it looks how much a repeat, and a next turn, would find."""

    def on_closed(self, answer: Answer) -> None:
        closed, prompt = answer.closed, answer.request.prompt
        assert closed is not None
        if closed.finish_reason == "cancelled":
            return
        assert self.found(prompt, answer) == len(prompt) - 1
        turn = [*prompt, *answer.tokens]
        fed = len(turn) - (0 if self.setup.feeds_ahead else 1)
        assert self.found((*turn, 0), answer) >= fed

    def found(self, prompt: tuple[int, ...], answer: Answer) -> int:
        ram, ssd, _ = self.cache.probe(pack_tokens(prompt), answer.request.salt)
        return ram + ssd


@pytest.mark.parametrize("seed", range(100))
def test_a_repeat_right_after_the_end_finds_all_but_one_token(seed: int) -> None:
    """B67: what a request computed can be found before its end is told; the reply as well."""
    rng = random.Random(seed)
    setup = drawn_setup(rng, hot_blocks=1000, ssd_blocks=rng.choice([0, 5, 1000]))
    stage = Repeating(setup, seed)
    stage.cancels = rng.choice([0.0, 0.2])
    stage.to_submit = drawn_requests(rng, 12)

    stage.run()

    stage.check_released()


@pytest.mark.parametrize("seed", range(100))
def test_where_a_prompt_is_cut_does_not_depend_on_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    setup = drawn_setup(rng)
    requests = drawn_requests(rng, 12)
    cuts = []
    for caching in (False, True):
        stage = Stage(replace(setup, caching=caching), seed)
        stage.to_submit = list(requests)
        stage.run()
        stage.check_released()
        cuts.append(stage.engine.cuts)
    without, with_cache = cuts

    for prompt, places in without.items():
        chunk, last = setup.chunk_tokens, len(prompt) - 1
        assert places == {*range(chunk, last, chunk), last}
        assert with_cache[prompt] <= places


# ── one promise each ─────────────────────────────────────────────────────────────────────────

LONG = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1]

LASTING = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0]
"""The model's answer to this has no end within 40 tokens."""


def test_the_second_of_two_equal_prompts_computes_one_token() -> None:
    """B67."""
    stage = Stage(Setup())

    first, second = stage.ask(request(LONG)), stage.ask(request(LONG))

    assert first.closed is not None
    assert second.closed is not None
    assert first.closed.cached_tokens == 0
    assert second.closed.cached_tokens == len(LONG) - 1
    assert second.tokens == first.tokens


def test_prompts_that_diverge_share_exactly_what_is_common() -> None:
    """B01: to the token, in the middle of a block."""
    stage = Stage(Setup(block_size=4))
    stage.ask(request(LONG, max_tokens=1))
    other = [*LONG[:10], 1 - LONG[10], 0, 0, 0]

    answer = stage.ask(request(other))

    assert answer.closed is not None
    assert answer.closed.cached_tokens == 10
    assert answer.closed.reuse_ended.token == 10
    check_answer(stage, answer)


def test_eight_equal_prompts_at_once_leave_one_copy() -> None:
    """B67."""
    stage = Stage(Setup(max_running=8))
    for _ in range(8):
        stage.submit(request(LONG, max_tokens=1))

    stage.run()

    for answer in stage.answers.values():
        check_answer(stage, answer)
    stage.check_released()
    names = [payload.context for payload in stage.engine.blocks.values()]
    assert len(names) == len(set(names))
    tokens = sum(len(payload.context) - payload.start for payload in stage.engine.blocks.values())
    assert tokens <= len(LONG) + 1


def test_different_salts_share_nothing() -> None:
    stage = Stage(Setup())
    stage.ask(request(LONG, salt="ann"))

    answer = stage.ask(request(LONG, salt="bob"))

    assert answer.closed is not None
    assert answer.closed.cached_tokens == 0


def test_what_was_given_up_in_ram_is_read_from_its_file() -> None:
    stage = Stage(Setup(hot_blocks=2))
    stage.ask(request(LONG))

    answer = stage.ask(request(LONG))

    assert answer.closed is not None
    assert answer.closed.cached_tokens == len(LONG) - 1
    assert answer.closed.cached_ssd > 0
    check_answer(stage, answer)


def test_a_file_that_is_gone_costs_what_comes_behind_it() -> None:
    """B49: the prefix before it is used, and it is computed and written again."""
    stage = Stage(Setup(hot_blocks=0, block_size=4))
    stage.ask(request(LONG))
    third = list(stage.disk)[2]
    del stage.disk[third]

    answer = stage.ask(request(LONG))

    assert answer.closed is not None
    assert answer.closed.cached_tokens == 8
    assert str(answer.closed.reuse_ended.reason) == "rejected_file"
    check_answer(stage, answer)
    stage.check_released()
    assert third in stage.disk


def test_with_no_hot_tier_a_whole_prompt_is_kept_in_files() -> None:
    """B64, B65: blocks that are computed in one step follow each other to the disk."""
    stage = Stage(Setup(hot_blocks=0, chunk_tokens=1000))
    stage.ask(request(LONG))
    assert not stage.engine.blocks

    answer = stage.ask(request(LONG))

    assert answer.closed is not None
    assert answer.closed.cached_ssd == len(LONG) - 1


def test_a_prompt_larger_than_the_hot_tier_works() -> None:
    """B64."""
    stage = Stage(Setup(hot_blocks=2, ssd_blocks=0))

    answer = stage.ask(request(LONG * 5))

    check_answer(stage, answer)
    assert stage.cache.pool.hot_bytes <= 2 * 4


def test_a_conversation_in_use_keeps_its_place_in_ram() -> None:
    """What a running sequence extends is not older than what nobody has asked for since."""
    stage = Stage(Setup(hot_blocks=12, ssd_blocks=0, block_size=4, max_running=2))
    slow = stage.submit(request(LONG, max_tokens=16))
    for index in range(3):
        stage.submit(request([index % 2, 1, 1, 1, index // 2] * 2, max_tokens=1))
    stage.run()
    turn = [*LONG, *stage.answers[slow].tokens]

    found = stage.cache.probe(pack_tokens([*turn, 0]))

    assert found[0] == len(turn)


def test_nothing_is_looked_up_or_stored_without_caching() -> None:
    stage = Stage(Setup(caching=False))
    stage.ask(request(LONG))

    answer = stage.ask(request(LONG))

    assert answer.closed is not None
    assert answer.closed.cached_tokens == 0
    assert str(answer.closed.reuse_ended.reason) == "disabled"
    assert not stage.engine.blocks
    assert stage.cache.stats.misses == 0


def test_a_full_queue_refuses_and_says_what_is_full() -> None:
    """B89."""
    stage = Stage(Setup(max_running=1, max_queued=1))
    stage.submit(request(LONG))
    stage.submit(request(LONG))

    with pytest.raises(QueueFull, match="0 requests run and 2 wait; the limits are 1 and 1"):
        stage.submit(request(LONG))

    stage.run()
    assert stage.ask(request(LONG)).closed is not None, "there is room again"


def test_new_limits_hold_for_what_waits_and_what_comes() -> None:
    stage = Stage(Setup(max_running=1, max_queued=2))
    uids = [stage.submit(request(LONG, max_tokens=9)) for _ in range(3)]
    stage.round()

    stage.core.set_limits(replace(stage.core.limits, max_running=3, max_queued=1))

    stage.submit(request(LONG))
    with pytest.raises(QueueFull, match="the limits are 3 and 1"):
        stage.submit(request(LONG))
    stage.run()
    assert all(len(stage.answers[uid].tokens) == 9 for uid in uids)


def test_requests_get_their_slots_in_the_order_of_arrival() -> None:
    stage = Stage(Setup(max_running=1))
    ended: list[Answer] = []
    stage.on_closed = ended.append  # type: ignore[method-assign]
    for length in (5, 1, 3):
        stage.submit(request(LONG, max_tokens=length))

    stage.run()

    assert [answer.request.max_tokens for answer in ended] == [5, 1, 3]


def test_a_running_stream_waits_for_one_chunk_at_most() -> None:
    """However long somebody's prompt is, each step decodes a token and computes one chunk."""
    stage = Stage(Setup(max_running=3, chunk_tokens=4, caching=False))
    uid = stage.submit(request(LASTING, max_tokens=40))
    while not stage.answers[uid].tokens:
        stage.round()
    stage.submit(request(LONG * 3))
    stage.submit(request(LONG * 2))

    for _ in range(3):
        before = sum(stage.engine.computed.values())
        tokens = len(stage.answers[uid].tokens)
        stage.round()
        assert sum(stage.engine.computed.values()) - before == 4
        assert len(stage.answers[uid].tokens) == tokens + 1


def test_the_context_ends_where_it_ends() -> None:
    """B83."""
    stage = Stage(Setup(max_context=len(LASTING) + 3))

    answer = stage.ask(request(LASTING, max_tokens=40))

    assert answer.closed is not None
    assert answer.closed.finish_reason == "length"
    assert len(answer.tokens) == 3


@pytest.mark.parametrize("rounds", range(8))
def test_a_cancelled_request_ends_once_whenever_it_is_cancelled(rounds: int) -> None:
    """B35: while it waits, looks, computes or decodes; what it computed can be found."""
    stage = Stage(Setup(max_running=1, chunk_tokens=4))
    uid, waiting = stage.submit(request(LASTING, 40)), stage.submit(request(LASTING, 1))
    for _ in range(rounds):
        stage.round()
    answer = stage.answers[uid]
    tokens = list(answer.tokens)

    stage.cancel(uid)
    stage.cancel(uid)
    stage.run()
    stage.cancel(uid)

    assert answer.closed is not None
    assert answer.closed.finish_reason == "cancelled"
    assert answer.tokens == tokens, "nothing is generated after it"
    check_answer(stage, stage.answers[waiting])
    other = stage.answers[waiting].closed
    assert other is not None
    assert other.cached_tokens >= stage.engine.computed[uid]
    stage.check_released()


def test_a_request_cancelled_when_its_blocks_were_just_read_lets_go_of_them() -> None:
    """B35, B61: it has no row yet, and never gets one."""
    stage = Stage(Setup(hot_blocks=2))
    stage.ask(request(LONG))
    uid = stage.submit(request(LONG))
    stage.core.settled(stage.settle(stage.core.settle_work(0.0)), 0.0)
    stage.reads += stage.core.take_reads()
    assert stage.reads, "a part of it is cold"
    while stage.reads:
        stage._read_one()

    stage.cancel(uid)
    stage.run()

    check_answer(stage, stage.answers[uid])
    stage.check_released()


def test_a_broken_step_ends_the_rows_that_ran_and_no_other() -> None:
    """B32: those that wait are served afterwards."""
    stage = Stage(Setup(max_running=2, mishaps=0.0))
    running = [stage.submit(request(LONG, 9)) for _ in range(2)]
    waiting = stage.submit(request(LONG))
    stage.round()
    stage.engine.mishaps.step_breaks = 1.0
    stage.round()
    stage.engine.mishaps.step_breaks = 0.0

    stage.run()

    for uid in running:
        closed = stage.answers[uid].closed
        assert closed is not None
        assert closed.error == "the step broke"
    check_answer(stage, stage.answers[waiting])
    stage.check_released()


def test_a_row_that_fails_fails_alone() -> None:
    stage = Stage(Setup(max_running=2, caching=False))
    lucky = stage.submit(request(LONG, 9))
    stage.round()
    stage.round()
    stage.round()
    unlucky = stage.submit(request(LONG))
    stage.engine.mishaps.row_faults = 1.0
    stage.round()
    stage.engine.mishaps.row_faults = 0.0

    stage.run()

    closed = stage.answers[unlucky].closed
    assert closed is not None
    assert closed.error == "this row failed"
    check_answer(stage, stage.answers[lucky])


def test_kv_that_is_not_finite_is_not_stored() -> None:
    """K1: the request that computed it is answered, and nobody else reads it."""
    stage = Stage(Setup())
    stage.engine.mishaps.not_finite = 1.0
    stage.ask(request(LONG))
    stage.engine.mishaps.not_finite = 0.0

    answer = stage.ask(request(LONG))

    assert answer.closed is not None
    assert answer.closed.cached_tokens == 0
    check_answer(stage, answer)
