"""Rows and hot tier share one memory: it is never exceeded, and everybody gets the right answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from omlx.core import admission
from omlx.core.plan import StepPlan
from omlx.core.sequence import Request, State
from tests.core.stage import GROWTH, Answer, Setup, Stage
from tests.core.test_scheduler import drawn_requests, drawn_setup, request
from tests.sim.fake_engine import alone


@pytest.fixture(params=[1, admission.USUAL_TOKENS])
def usual(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What is reckoned with at first: far too little, or what was asked for."""
    monkeypatch.setattr(admission, "USUAL_TOKENS", request.param)
    return request.param


class Counting(Stage):
    """Looks after each step whether what is there fits into what there is."""

    most = 0
    smallest_hot = 1 << 30

    def _step(self, plan: StepPlan) -> None:
        super()._step(plan)
        longest = max((len(row.kv) for row in self.engine.rows.values()), default=0)
        live = len(self.engine.rows) * longest
        hot = sum(len(payload.context) - payload.start for payload in self.engine.blocks.values())
        self.most = max(self.most, live)
        self.smallest_hot = min(self.smallest_hot, self.cache.pool.limit_bytes)
        assert self.setup.memory_tokens is not None
        leaving = [s for s in self.core.sequences() if s.state is State.CLOSING and s.in_engine]
        if not leaving:
            assert live + hot <= self.setup.memory_tokens


def check(stage: Stage, answer: Answer) -> None:
    """As alone, however often it had to give its row back."""
    closed, wanted = answer.closed, answer.request
    assert closed is not None, "it never ended"
    tokens, text, finish_reason = alone(wanted.prompt, wanted.max_tokens, wanted.stops)
    if closed.error is not None:
        assert {closed.uid, closed.leader} & stage.engine.hurt, "an error that was not its own"
        assert answer.tokens == tokens[: len(answer.tokens)]
    elif answer.cancelled:
        assert closed.finish_reason == "cancelled"
        assert answer.tokens == tokens[: len(answer.tokens)]
    else:
        assert (answer.tokens, answer.text) == (tokens, text)
        assert closed.finish_reason == finish_reason
    assert 0 <= closed.cached_tokens <= len(wanted.prompt) - 1
    assert closed.cached_tokens == closed.cached_ram + closed.cached_ssd
    assert closed.prefilled == bool(answer.tokens)
    assert closed.unfinished_tokens >= 0


def fits(stage: Stage, wanted: Request) -> bool:
    """Whether it can be served, and alone even to its end."""
    assert stage.setup.memory_tokens is not None
    whole = len(wanted.prompt) + wanted.max_tokens + GROWTH
    return max(whole, wanted.n * (len(wanted.prompt) + 1 + GROWTH)) <= stage.setup.memory_tokens


@pytest.mark.parametrize("seed", range(150))
def test_each_request_gets_what_it_would_get_alone(seed: int, usual: int) -> None:
    rng = random.Random(seed)
    mishaps = rng.choice([0.0, 0.5, 1.0])
    setup = drawn_setup(rng, mishaps=mishaps, clears=rng.random() < 0.5)
    stage = Counting(replace(setup, memory_tokens=rng.randint(34, 90)), seed)
    stage.cancels = rng.choice([0.0, 0.1, 0.3])
    stage.to_submit = [
        replace(one, n=rng.choice([1, 1, 1, min(3, setup.max_running)]))
        for one in drawn_requests(rng, 12)
    ]
    stage.to_submit = [one for one in stage.to_submit if fits(stage, one)]

    stage.run()

    for answer in stage.answers.values():
        check(stage, answer)
    stage.check_released()


# ── one promise each ─────────────────────────────────────────────────────────────────────────


def greedy_clients(count: int, max_tokens: int) -> list[Request]:
    """They ask for far more than they get: an answer has 11 tokens on average."""
    rng = random.Random(3)
    prompts = [[rng.randrange(2) for _ in range(14)] for _ in range(count)]
    return [request(prompt, max_tokens) for prompt in prompts]


def steps_for(monkeypatch: pytest.MonkeyPatch, usual: int, learns: bool) -> tuple[int, int]:
    """(steps until all are answered, rows that were sent back)"""
    monkeypatch.setattr(admission, "USUAL_TOKENS", usual)
    monkeypatch.setattr(admission, "ANSWERS_MIN", 10 if learns else 1 << 30)
    stage = Counting(Setup(memory_tokens=400, max_running=16), seed=1)
    wanted = greedy_clients(100, 300)
    stage.to_submit = list(wanted)
    stage.run()
    assert [answer.request for answer in stage.answers.values()] == wanted
    for answer in stage.answers.values():
        check(stage, answer)
    return stage.engine.steps, stage.core.admission.num_preempted


def test_clients_that_ask_for_far_too_much_are_served_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worst, none = steps_for(monkeypatch, 300, learns=False)
    learned, sent_back = steps_for(monkeypatch, 300, learns=True)

    assert none == 0
    assert learned < worst / 2
    assert sent_back < 100 / 5, "few have to wait again"


def test_nobody_passes_the_first_in_the_queue() -> None:
    stage = Counting(Setup(memory_tokens=60))
    long, short = request([0, 1] * 12, 9), request([1, 1, 0], 2)
    first, second, *others = [stage.submit(one) for one in (long, long, *[short] * 6)]

    started: list[int] = []
    while not stage.core.idle:
        stage.round()
        stage._move_the_disk()
        seen = [s.uid for s in stage.core.sequences() if s.in_engine and s.uid not in started]
        started += sorted(seen)

    assert started == [first, second, *others]


def test_the_hot_tier_gives_way_before_anybody_waits() -> None:
    stage = Counting(Setup(memory_tokens=100, hot_blocks=25))
    for seed in range(6):
        rng = random.Random(seed)
        stage.ask(request([rng.randrange(2) for _ in range(16)], 4))
    full = stage.cache.pool.hot_bytes

    stage.ask(request([0, 1, 1] * 20, 9))

    assert full > 60
    assert stage.smallest_hot < 40
    stage.check_released()
    assert stage.cache.pool.limit_bytes == 100, "it grows back"


def test_a_limit_that_is_set_while_memory_is_short_holds_afterwards() -> None:
    stage = Counting(Setup(memory_tokens=100, hot_blocks=20))
    pool = stage.cache.pool
    pool.allow(30)
    assert pool.limit_bytes == 30

    pool.set_limit(60)
    assert (pool.set_bytes, pool.limit_bytes) == (60, 30)

    pool.allow(80)
    assert pool.limit_bytes == 60
    pool.allow(None)
    assert pool.limit_bytes == 60


def test_a_prompt_that_has_no_room_twice_is_computed_instead() -> None:
    """Alone, and its prefix is known, but blocks and row together are more than there is."""
    prompt = [0, 1, 1, 0] * 10
    stage = Counting(Setup(memory_tokens=2000))
    stage.ask(request(prompt, 2))
    plan = stage.core.limits.memory
    assert plan is not None
    stage.setup.memory_tokens = 60
    stage.core.set_limits(
        replace(stage.core.limits, memory=replace(plan, total_bytes=60, hot_bytes=60))
    )

    again = stage.ask(request(prompt, 2))

    check(stage, again)
    assert again.closed is not None
    assert again.closed.cached_tokens <= 60 - len(prompt)
    stage.check_released()
