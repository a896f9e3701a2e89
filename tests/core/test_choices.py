"""Several choices of one request: the prompt is computed once, then each goes its own way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from omlx.core.admission import QueueFull
from omlx.core.plan import Fork, Sampling, StepPlan, Uid
from omlx.core.sequence import State
from tests.core.stage import Setup, Stage
from tests.core.test_scheduler import LONG, check_answer, drawn_requests, drawn_setup, request


def planned(stage: Stage) -> list[StepPlan]:
    """Every plan that the engine is given from now on."""
    plans: list[StepPlan] = []
    run = stage.engine.run

    def recorded(plan: StepPlan):
        plans.append(plan)
        return run(plan)

    stage.engine.run = recorded
    return plans


def rounds_until_decoding(stage: Stage, uid: int) -> None:
    while not any(s.uid == uid and s.state is State.DECODE for s in stage.core.sequences()):
        stage.round()


@pytest.mark.parametrize("seed", range(200))
def test_each_choice_gets_what_it_would_get_alone(seed: int) -> None:
    """While others come, go and fail, blocks are lost and limits change."""
    rng = random.Random(seed)
    mishaps = rng.choice([0.0, 0.5, 1.0, 2.0])
    stage = Stage(drawn_setup(rng, mishaps=mishaps, clears=rng.random() < 0.5), seed)
    stage.cancels = rng.choice([0.0, 0.1, 0.3])
    most = stage.setup.max_running
    stage.to_submit = [replace(r, n=rng.randint(1, most)) for r in drawn_requests(rng, 12)]
    count = sum(asked.n for asked in stage.to_submit)

    stage.run()

    assert len(stage.answers) == count
    for answer in stage.answers.values():
        check_answer(stage, answer)
    stage.check_released()


@pytest.mark.parametrize("cut_before_decode", [False, True])
@pytest.mark.parametrize("feeds_ahead", [False, True])
def test_the_prompt_is_computed_once(cut_before_decode: bool, feeds_ahead: bool) -> None:
    stage = Stage(Setup(cut_before_decode=cut_before_decode, feeds_ahead=feeds_ahead))
    plans = planned(stage)

    uid = stage.submit(request(LONG, n=3, max_tokens=3))
    stage.run()

    assert sum(stage.engine.computed.values()) == len(LONG) - 1
    assert stage.engine.forked == {uid + 1: uid, uid + 2: uid}
    forking = [plan for plan in plans if plan.forks]
    assert len(forking) == 1
    assert forking[0].starts == (uid, uid + 1, uid + 2), "all of them start in one step"
    assert stage.cache.stats.misses == -(-len(LONG) // 4), "one look-up"
    for answer in stage.choices(uid):
        check_answer(stage, answer)
    stage.check_released()


def test_what_is_reused_is_reused_once_for_all() -> None:
    stage = Stage(Setup())
    stage.ask(request(LONG))
    computed = sum(stage.engine.computed.values())

    uid = stage.submit(request(LONG, n=4))
    stage.run()

    assert sum(stage.engine.computed.values()) == computed
    cached = [answer.closed.cached_tokens for answer in stage.choices(uid) if answer.closed]
    assert cached == [len(LONG) - 1] * 4


def test_choices_of_one_answer_leave_one_copy_of_it() -> None:
    stage = Stage(Setup())
    uid = stage.submit(request(LONG, n=4, max_tokens=6))

    stage.run()

    assert [answer.closed is not None for answer in stage.choices(uid)] == [True] * 4
    names = [payload.context for payload in stage.engine.blocks.values()]
    assert len(names) == len(set(names))
    stage.check_released()


def test_with_a_seed_each_choice_has_the_next_one() -> None:
    stage = Stage(Setup())
    plans = planned(stage)

    stage.submit(request(LONG, n=3, sampling=Sampling(temperature=1.0, seed=7)))
    stage.run()

    admits = [admit.sampling.seed for plan in plans for admit in plan.admits]
    forks = [fork.sampling.seed for plan in plans for fork in plan.forks]
    assert (admits, forks) == ([7], [8, 9])


def test_without_a_seed_choices_are_sampled_alike() -> None:
    stage = Stage(Setup())
    plans = planned(stage)
    sampling = Sampling(temperature=1.0)

    uid = stage.submit(request(LONG, n=2, sampling=sampling))
    stage.run()

    forks = [fork for plan in plans for fork in plan.forks]
    assert forks == [Fork(uid, Uid(uid + 1), sampling)]


def test_every_choice_counts_against_the_limits() -> None:
    stage = Stage(Setup(max_running=3, max_queued=2))
    stage.submit(request(LONG, n=3))

    with pytest.raises(QueueFull, match="0 requests run and 3 wait"):
        stage.submit(request(LONG, n=3))
    stage.submit(request(LONG, n=2))
    stage.run()

    assert [answer.closed is not None for answer in stage.answers.values()] == [True] * 5


def test_more_choices_than_can_ever_run_are_refused() -> None:
    stage = Stage(Setup(max_running=3, max_queued=100))

    with pytest.raises(QueueFull, match="the limits are 3 and 100, and this one is 4"):
        stage.submit(request(LONG, n=4))


def test_a_request_waits_until_all_its_choices_have_slots() -> None:
    """And nobody overtakes it meanwhile."""
    stage = Stage(Setup(max_running=3))
    stage.submit(request(LONG, n=2, max_tokens=3))
    second = stage.submit(request([1, 0, 1], n=2, max_tokens=3))
    third = stage.submit(request([0, 0, 1], max_tokens=3))

    stage.round()

    waiting = [s.uid for s in stage.core.sequences() if s.state is State.WAITING]
    assert waiting == [second, second + 1, third]
    stage.run()
    for answer in stage.answers.values():
        check_answer(stage, answer)


@pytest.mark.parametrize("rounds", range(8))
def test_a_cancel_ends_every_choice_once(rounds: int) -> None:
    """Before the look-up, while the prompt is computed, after the fork."""
    stage = Stage(Setup(chunk_tokens=4))
    uid = stage.submit(request(LONG, n=3, max_tokens=20))
    for _ in range(rounds):
        stage.round()

    stage.cancel(uid)
    stage.run()

    for answer in stage.choices(uid):
        check_answer(stage, answer)
    stage.check_released()


@pytest.mark.parametrize("hurt", ["restore", "prefill", "fork", "start"])
def test_what_fails_before_the_fork_fails_for_all(hurt: str) -> None:
    stage = Stage(Setup())
    uid = stage.submit(request(LONG, n=3))
    turn = {"restore": 1, "prefill": 2, "fork": 4, "start": 6}[hurt]
    calls = 0
    faulty = stage.engine._faulty

    def at_its_turn(uid, faults):
        nonlocal calls
        calls += 1
        stage.engine.mishaps.row_faults = 1.0 if calls == turn else 0.0
        return faulty(uid, faults)

    stage.engine._faulty = at_its_turn
    stage.run()

    errors = [answer.closed.error for answer in stage.choices(uid) if answer.closed]
    failed = [error is not None for error in errors]
    if hurt in ("restore", "prefill"):
        assert failed == [True] * 3
    else:
        assert failed.count(True) == 1, "a choice that fails later fails alone"
    for answer in stage.choices(uid):
        check_answer(stage, answer)
    stage.check_released()


def test_after_the_fork_each_choice_ends_for_itself() -> None:
    stage = Stage(Setup())
    uid = stage.submit(request(LONG, n=2, max_tokens=8))
    rounds_until_decoding(stage, uid)
    assert {s.state for s in stage.core.sequences()} == {State.DECODE}

    follower = stage.core.sequences()[1]
    stage.core._end(follower, 0.0, finish_reason="stop")
    stage.run()

    first, second = stage.choices(uid)
    check_answer(stage, first)
    assert len(second.tokens) < len(first.tokens)
    stage.check_released()
