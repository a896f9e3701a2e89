"""A prefix is read while its request waits, loaded in parts, and given up when nobody wants it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omlx.cache.blocks import BlockHash
from omlx.core.plan import StepPlan, Uid
from omlx.core.restores import AHEAD_MAX
from omlx.core.sequence import State
from tests.core.stage import Setup, Stage
from tests.core.test_scheduler import LASTING, LONG, check_answer, request

OTHER = [0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0]
COLD = Setup(hot_blocks=0, block_size=4, max_running=1, ahead_blocks=1000)


class Watched(Stage):
    """It keeps every plan, and reads only when it is told to."""

    plans: list[StepPlan]
    reads_on = True

    def _step(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super()._step(plan)

    def _read_one(self) -> None:
        if self.reads_on:
            super()._read_one()

    def read_now(self) -> None:
        while self.reads:
            super()._read_one()

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def state(self, uid: Uid) -> State:
        return next(s.state for s in self.core.sequences() if s.uid == uid)

    def names_read(self, uid: Uid) -> list[BlockHash]:
        return [name for reader, name in self.was_read if reader == uid]


def stage_of(setup: Setup, *prompts: list[int]) -> Watched:
    """Each of the prompts is stored, and nobody asks at random."""
    stage = Watched(setup)
    stage.plans = []
    for prompt in prompts:
        stage.ask(request(prompt, max_tokens=1))
    stage.rng.random = lambda: 0.99  # nothing interferes
    stage.was_read.clear()
    stage.reads_on = False
    stage.plans.clear()
    return stage


def wait_for_a_slot(stage: Watched, *prompts: list[int]) -> tuple[Uid, list[Uid]]:
    """Somebody decodes in the only slot, and the others wait."""
    running = stage.submit(request(LASTING, max_tokens=12))
    while not stage.answers[running].tokens:
        stage.round()
    waiting = [stage.submit(request(prompt, max_tokens=1)) for prompt in prompts]
    stage.round()
    return running, waiting


def finish(stage: Watched) -> None:
    stage.reads_on = True
    stage.run()
    for answer in stage.answers.values():
        check_answer(stage, answer)
    stage.check_released()


# ── read ahead ───────────────────────────────────────────────────────────────────────────────


def test_who_waits_for_a_slot_is_read_meanwhile_and_not_again() -> None:
    stage = stage_of(COLD, LONG)
    running, (waiting,) = wait_for_a_slot(stage, LONG)
    stage.read_now()
    read = stage.names_read(waiting)
    assert len(read) == 4
    assert stage.answers[running].closed is None, "it decodes"

    finish(stage)

    assert stage.names_read(waiting) == read
    closed = stage.answers[waiting].closed
    assert closed is not None
    assert closed.cached_ssd == len(LONG) - 1


def test_looking_ahead_holds_nothing_and_counts_nothing() -> None:
    stage = stage_of(replace(COLD, hot_blocks=1000, ssd_blocks=1000), LONG)
    stage.cache.clear(hot=True, ssd=False)
    wait_for_a_slot(stage)
    hits, misses = stage.cache.stats.hits, stage.cache.stats.misses
    held = stage.cache.pool.num_held

    stage.submit(request(LONG))
    stage.round()
    assert stage.reads, "it is read ahead"

    assert (stage.cache.stats.hits, stage.cache.stats.misses) == (hits, misses)
    assert stage.cache.pool.num_held <= held
    finish(stage)


def test_what_became_known_while_it_waited_is_used_as_well() -> None:
    """K13: with its slot it is looked up as everybody else."""
    stage = stage_of(COLD, LONG[:8])
    _, (first, second) = wait_for_a_slot(stage, LONG, LONG)

    finish(stage)

    for uid, cached in ((first, 7), (second, len(LONG) - 1)):
        closed = stage.answers[uid].closed
        assert closed is not None
        assert closed.cached_tokens >= cached
    names = stage.names_read(second)
    assert len(names) == len(set(names)), "no file was read twice"


def test_a_slot_does_not_wait_for_what_turned_out_not_to_be_needed() -> None:
    stage = stage_of(replace(COLD, hot_blocks=1000), LONG)
    stage.cache.clear(hot=True, ssd=False)
    running, (waiting,) = wait_for_a_slot(stage, LONG)
    assert stage.reads, "its read has not ended, and does not"

    other = stage.submit(request(LONG, max_tokens=1))
    stage.cancel(running)
    stage.rounds(3)
    assert stage.state(waiting) is State.RESTORING, "the read is what it needs"
    stage.read_now()
    stage.rounds(6)
    assert stage.answers[waiting].closed is not None
    stage.rounds(6)
    assert stage.answers[other].closed is not None, "hot by now"
    finish(stage)


def test_the_rest_is_read_when_there_was_no_room_for_all_of_it() -> None:
    stage = stage_of(replace(COLD, ahead_blocks=2), LONG)
    _, (waiting,) = wait_for_a_slot(stage, LONG)
    stage.read_now()
    assert len(stage.names_read(waiting)) == 2
    assert stage.core.ahead_bytes == 8

    finish(stage)

    assert len(stage.names_read(waiting)) == 4
    assert len(set(stage.names_read(waiting))) == 4
    closed = stage.answers[waiting].closed
    assert closed is not None
    assert closed.cached_tokens == len(LONG) - 1


def test_room_to_read_ahead_goes_to_those_who_came_first() -> None:
    stage = stage_of(replace(COLD, ahead_blocks=5), LONG, OTHER)
    _, (first, second, third) = wait_for_a_slot(stage, LONG, OTHER, LONG)
    stage.read_now()
    stage.rounds(1)
    stage.read_now()

    read = [len(stage.names_read(uid)) for uid in (first, second, third)]

    assert read == [4, 1, 0]
    assert stage.core.ahead_bytes == 20
    finish(stage)


def test_few_are_read_ahead_at_once() -> None:
    """The disk is for those with a slot."""
    stage = stage_of(COLD, LONG)
    _, waiting = wait_for_a_slot(stage, *([LONG] * (AHEAD_MAX + 3)))

    assert {uid for uid, _ in stage.reads} == set(waiting[:AHEAD_MAX])

    finish(stage)


def test_a_file_lost_while_it_was_read_ahead_is_known_as_lost() -> None:
    """B49: once; and what comes before it is used."""
    stage = stage_of(COLD, LONG)
    third = list(stage.disk)[2]
    del stage.disk[third]
    _, (waiting,) = wait_for_a_slot(stage, LONG)
    stage.read_now()

    finish(stage)

    closed = stage.answers[waiting].closed
    assert closed is not None
    assert closed.cached_tokens == 8
    assert len(stage.names_read(waiting)) == 2


@pytest.mark.parametrize("read_first", [False, True])
def test_a_request_that_leaves_the_queue_lets_go_of_what_was_read_for_it(read_first: bool) -> None:
    """B35."""
    stage = stage_of(COLD, LONG)
    _, (waiting,) = wait_for_a_slot(stage, LONG)
    if read_first:
        stage.read_now()
    assert stage.core.ahead_bytes == 16

    stage.cancel(waiting)
    stage._take_events()

    assert stage.core.ahead_bytes == 0
    assert stage.answers[waiting].closed is not None, "at once"
    stage.reads += stage.core.take_reads()
    assert stage.core.take_stops() == ([] if read_first else [waiting])
    finish(stage)


def test_nothing_is_read_ahead_where_there_is_no_room_for_it() -> None:
    stage = stage_of(replace(COLD, ahead_blocks=0), LONG)

    wait_for_a_slot(stage, LONG)

    assert not stage.reads
    finish(stage)


# ── given up ─────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_leaves_while_it_is_read_ends_at_once_and_stops_the_read() -> None:
    """B35, B61: nobody waits for the disk any more."""
    stage = stage_of(replace(COLD, hot_blocks=1000), LONG)
    stage.cache.clear(hot=True, ssd=False)
    uid = stage.submit(request(LONG))
    stage.round()
    assert stage.state(uid) is State.RESTORING

    stage.cancel(uid)
    stage.rounds(1)

    assert stage.answers[uid].closed is not None
    assert stage.core.idle
    assert uid in stage.stopped
    finish(stage)
    assert stage.cache.pool.num_held == 0


def test_a_disk_that_does_not_answer_costs_a_computation_and_no_file() -> None:
    """K7: the file is not lost, so it serves the next request."""
    stage = stage_of(COLD, LONG)
    uid = stage.submit(request(LONG, max_tokens=1))
    stage.round()
    ((reader, _),) = stage.reads
    stage.reads.clear()

    stage.core.blocks_read(reader, (), None, 0.0, stuck=True)
    finish(stage)

    closed = stage.answers[uid].closed
    assert closed is not None
    assert closed.cached_tokens == 0
    again = stage.ask(request(LONG, max_tokens=1))
    assert again.closed is not None
    assert again.closed.cached_tokens == len(LONG) - 1


def test_who_was_read_ahead_in_vain_does_not_wait_a_second_time() -> None:
    stage = stage_of(COLD, LONG)
    running, (waiting,) = wait_for_a_slot(stage, LONG)
    stage.cancel(running)
    stage.rounds(3)
    assert stage.state(waiting) is State.RESTORING
    ((reader, refs),) = stage.reads
    stage.reads.clear()
    first = stage.disk[refs[0].block_hash]

    stage.core.blocks_read(reader, (first,), None, 0.0, stuck=True)
    stage.rounds(1)

    assert not stage.reads, "the disk is not asked again"
    finish(stage)
    closed = stage.answers[waiting].closed
    assert closed is not None
    assert closed.cached_tokens == 4, "what had come is used"


# ── in parts ─────────────────────────────────────────────────────────────────────────────────

PARTS = Setup(max_running=4, block_size=4, restore_tokens=5)


def decoding(stage: Watched) -> Uid:
    uid = stage.submit(request(LASTING, max_tokens=40))
    while not stage.answers[uid].tokens:
        stage.round()
    return uid


@pytest.mark.parametrize("hot_blocks", [0, 1000])
def test_while_others_decode_a_prefix_is_restored_in_parts(hot_blocks: int) -> None:
    stage = stage_of(replace(PARTS, hot_blocks=hot_blocks), LONG)
    running = decoding(stage)
    uid = stage.submit(request(LONG, max_tokens=1))
    stage.round()
    stage.read_now()
    stage.plans.clear()
    before = len(stage.answers[running].tokens)

    while stage.answers[uid].closed is None:
        stage.round()

    parts = [load.tokens for plan in stage.plans for load in plan.loads]
    admitted = [bool(plan.admits) for plan in stage.plans]
    assert parts == [5, 5, 5][: len(parts)] and len(parts) >= 2
    assert admitted.index(True) >= 2
    assert all(plan.decode for plan in stage.plans), "others decode in each of these steps"
    assert len(stage.answers[running].tokens) - before == len(stage.plans)
    finish(stage)


def test_what_the_device_joins_does_not_count() -> None:
    stage = stage_of(replace(PARTS, hot_is_free=True), LONG)
    decoding(stage)
    stage.plans.clear()

    stage.submit(request(LONG, max_tokens=1))
    stage.rounds(1)

    assert stage.plans[-1].admits and not stage.plans[-1].loads
    finish(stage)


def test_a_prefix_is_restored_at_once_when_nobody_decodes() -> None:
    stage = stage_of(PARTS, LONG)

    stage.submit(request(LONG, max_tokens=1))
    stage.round()

    assert stage.plans[0].admits and not stage.plans[0].loads
    finish(stage)


def test_the_rest_comes_at_once_when_the_last_decoding_row_has_gone() -> None:
    stage = stage_of(replace(PARTS, restore_tokens=1), LONG)
    running = decoding(stage)
    uid = stage.submit(request(LONG, max_tokens=1))
    stage.rounds(3)
    assert stage.engine.loading

    stage.cancel(running)
    stage.rounds(2)

    assert stage.answers[uid].tokens
    finish(stage)


def test_a_step_restores_no_more_for_two_than_for_one() -> None:
    stage = stage_of(PARTS, LONG, OTHER)
    decoding(stage)
    uids = [stage.submit(request(prompt, max_tokens=1)) for prompt in (LONG, OTHER)]
    stage.plans.clear()

    while not all(stage.answers[uid].closed for uid in uids):
        stage.round()

    for plan in stage.plans:
        admitted = sum(restore.take for admit in plan.admits for restore in admit.restores)
        loaded = sum(load.tokens for load in plan.loads)
        assert loaded <= 5
        assert not (loaded == 5 and admitted), "an admit does what is left, which counts too"
    finish(stage)


def test_a_prompt_without_a_prefix_does_not_wait_for_one_that_is_restored() -> None:
    stage = stage_of(replace(PARTS, restore_tokens=1), LONG)
    decoding(stage)
    stage.submit(request(LONG, max_tokens=1))
    fresh = stage.submit(request(LONG, max_tokens=1, salt="s"))

    stage.rounds(3)

    assert stage.engine.loading, "the other is still being restored"
    assert stage.answers[fresh].tokens
    finish(stage)


def test_others_prefill_and_decode_while_one_is_read() -> None:
    stage = stage_of(replace(PARTS, hot_blocks=0), LONG)
    running = decoding(stage)
    cold = stage.submit(request(LONG, max_tokens=1))
    fresh = stage.submit(request(LONG, max_tokens=1, salt="s"))
    tokens = len(stage.answers[running].tokens)

    stage.rounds(6)

    assert stage.state(cold) is State.RESTORING, "its files do not come"
    assert stage.answers[fresh].tokens
    assert len(stage.answers[running].tokens) == tokens + 6
    finish(stage)


@pytest.mark.parametrize("rounds", range(1, 6))
def test_who_leaves_while_it_is_restored_leaves_nothing_in_the_engine(rounds: int) -> None:
    """B35, B61."""
    stage = stage_of(PARTS, LONG)
    running = decoding(stage)
    uid = stage.submit(request(LONG))
    stage.rounds(rounds)

    stage.cancel(uid)
    stage.rounds(1)

    assert not stage.engine.loading
    assert stage.engine.rows.keys() <= {running, uid}
    stage.cancel(running)
    finish(stage)


def test_a_broken_step_loses_what_was_loaded_and_it_is_loaded_again() -> None:
    """B32: who had no row yet is served afterwards."""
    stage = stage_of(replace(PARTS, restore_tokens=2), LONG)
    decoding(stage)
    uid = stage.submit(request(LONG, max_tokens=1))
    stage.rounds(3)
    assert stage.engine.loading
    stage.setup.mishaps = 1.0
    stage.engine.mishaps.step_breaks = 1.0
    stage.engine.mishaps.rng.random = lambda: 0.5
    stage.round()
    stage.setup.mishaps = stage.engine.mishaps.step_breaks = 0.0
    assert not stage.engine.loading

    finish(stage)

    closed = stage.answers[uid].closed
    assert closed is not None
    assert closed.error is None
    assert closed.cached_tokens == len(LONG) - 1
