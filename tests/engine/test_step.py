"""A row's answer is a function of its prompt and its sampling alone.

Not of what is cached, of who shares the batch, of who left it, or of what went wrong beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx.cache.tickets import Reason
from omlx.core.plan import Admit, Prefill, Sampling, StepPlan, Uid
from omlx.engine.load import LoadedModel, load
from omlx.engine.step import Engine
from tests import tiny
from tests.engine.rig import BLOCK, Answer, Rig, greatest_difference
from tests.found import found_in

Loaded = Callable[[str], LoadedModel]

MODELS = ("llama", "gemma3")
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
NEAR = 1e-3
LENGTHS = (2, 15, 16, 17, 18, 32, 33, 34, 35, 64, 65, 66, 67, 97, 98, 99, 131)
"""Around the edges of blocks, chunks and the window, with one token that decode feeds."""


def alone(
    model: LoadedModel, prompt: tuple[int, ...], count: int = 8, sampling: Sampling | None = None
) -> Answer:
    """The oracle: nothing cached, nobody else."""
    return Rig(model, caching=False).ask(prompt, count, sampling or Sampling())


def assert_near(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert greatest_difference(one, other) <= NEAR


# ── cached or not ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", LENGTHS)
@AHEAD
def test_cold_and_warm_answers_are_equal_bit_for_bit(
    loaded: Loaded, name: str, length: int, ahead: bool, tmp_path: Path
) -> None:
    """B13: from RAM, from files in a new process's eyes, and without a cache."""
    model = loaded(name)
    prompt = tiny.tokens(length)
    oracle = Rig(model, caching=False, ahead=ahead).ask(prompt)

    rig = Rig(model, files=tmp_path, ahead=ahead)
    cold, warm = rig.ask(prompt), rig.ask(prompt)
    reread = Rig(model, files=tmp_path, ahead=ahead).ask(prompt)

    assert (cold.cached, warm.cached, reread.cached) == (0, length - 1, length - 1)
    for answer in (cold, warm, reread):
        assert answer.tokens == oracle.tokens
        assert greatest_difference(answer, oracle) == 0.0


@AHEAD
def test_half_precision_is_cached_without_a_cast(
    model_path: Callable[[str], Path], tmp_path: Path, ahead: bool
) -> None:
    """B28: weights that are too large to be converted stay bfloat16, and so does their KV."""
    model = load(model_path("llama-bf16"), 0)
    prompt = tiny.tokens(70)

    rig = Rig(model, files=tmp_path, ahead=ahead)
    cold, warm = rig.ask(prompt), rig.ask(prompt)
    reread = Rig(model, files=tmp_path, ahead=ahead).ask(prompt)

    assert model.cache.layers[0].dtype == "bfloat16"
    assert (warm.cached, reread.cached) == (69, 69)
    assert greatest_difference(warm, cold) == greatest_difference(reread, cold) == 0.0


@pytest.mark.parametrize("name", MODELS)
def test_a_cold_block_that_was_promoted_serves_the_next_request_from_memory(
    loaded: Loaded, name: str, tmp_path: Path
) -> None:
    model = loaded(name)
    prompt = tiny.tokens(100)
    oracle = Rig(model, files=tmp_path).ask(prompt)

    rig = Rig(model, files=tmp_path)
    first, second = rig.ask(prompt), rig.ask(prompt)

    assert first.closed is not None and second.closed is not None
    assert (first.closed.cached_ssd, first.closed.cached_ram) == (99, 0)
    assert (second.closed.cached_ssd, second.closed.cached_ram) == (0, 99)
    assert greatest_difference(first, oracle) == greatest_difference(second, oracle) == 0.0


@pytest.mark.parametrize("name", MODELS)
def test_without_room_in_memory_files_serve_all_the_same(
    loaded: Loaded, name: str, tmp_path: Path
) -> None:
    model = loaded(name)
    prompt = tiny.tokens(100)

    rig = Rig(model, files=tmp_path, hot_bytes=0)
    cold, warm = rig.ask(prompt), rig.ask(prompt)

    assert len(rig.engine.store) == 0
    assert warm.cached >= 96
    assert_near(warm, cold)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shared", [1, 16, 21, 32, 40, 80])
@pytest.mark.parametrize("tier", ["memory", "files"])
def test_prompts_that_diverge_reuse_exactly_what_they_share(
    loaded: Loaded, name: str, shared: int, tier: str, tmp_path: Path
) -> None:
    """B01: neither is answered with the other's content, in whatever order."""
    model = loaded(name)
    head = tiny.tokens(shared)
    one = (*head, 95, *tiny.tokens(63, seed=1))
    other = (*head, 96, *tiny.tokens(63, seed=2))
    rig = Rig(model, files=tmp_path)
    rig.ask(one)
    if tier == "files":
        rig = Rig(model, files=tmp_path)

    second, first_again = rig.ask(other), rig.ask(one)

    assert second.cached == shared
    assert first_again.cached == len(one) - 1
    assert_near(second, alone(model, other))
    assert_near(first_again, alone(model, one))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("ahead", "fed"), [(False, 19), (True, 20)])
def test_the_next_turn_reuses_the_prompt_and_the_answer(
    loaded: Loaded, name: str, ahead: bool, fed: int
) -> None:
    """All of the answer that was fed: the last token only when the engine computes ahead."""
    model = loaded(name)
    rig = Rig(model, ahead=ahead)
    prompt = tiny.tokens(70)
    first = rig.ask(prompt, 20)
    turn = (*prompt, *first.tokens, *tiny.tokens(30, seed=3))

    second = rig.ask(turn)

    assert second.cached == 70 + fed
    assert_near(second, alone(model, turn))


def test_of_two_identical_requests_in_a_row_the_second_is_cached_whole(loaded: Loaded) -> None:
    """B67: blocks can be found before the answer that made them has ended."""
    rig = Rig(loaded("llama"))
    prompt = tiny.tokens(30 * BLOCK)

    rig.ask(prompt, 1)
    again = rig.ask(prompt, 1)

    assert again.cached == len(prompt) - 1
    assert again.closed is not None and again.closed.reuse_ended.reason is Reason.FULL


def test_identical_requests_at_once_are_all_right_and_leave_one_copy(
    loaded: Loaded, tmp_path: Path
) -> None:
    """B67: eight on a cold cache."""
    model = loaded("llama")
    prompt = tiny.tokens(10 * BLOCK)
    oracle = alone(model, prompt)
    rig = Rig(model, files=tmp_path)

    uids = [rig.submit(prompt) for _ in range(8)]
    rig.run()

    for uid in uids:
        assert_near(rig.answers[uid], oracle)
    stored = [found.identity.tokens for found in found_in(rig.files)] if rig.files else []
    assert len(stored) == len(set(stored))


# ── many rows ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
@AHEAD
def test_each_of_eight_rows_answers_as_it_would_alone(
    loaded: Loaded, name: str, ahead: bool
) -> None:
    """B04: nothing leaks between rows of different lengths."""
    model = loaded(name)
    prompts = [tiny.tokens(length, seed=length) for length in (3, 17, 31, 33, 50, 64, 90, 120)]
    rig = Rig(model, caching=False, ahead=ahead)

    uids = [rig.submit(prompt, 24) for prompt in prompts]
    rig.run()

    for uid, prompt in zip(uids, prompts, strict=True):
        assert_near(rig.answers[uid], alone(model, prompt, 24))


@pytest.mark.parametrize("name", MODELS)
def test_rows_with_a_common_prefix_answer_as_they_would_alone(loaded: Loaded, name: str) -> None:
    """B04: sixteen at once behind one system prompt, warm and cold mixed."""
    model = loaded(name)
    head = tiny.tokens(4 * BLOCK)
    prompts = [(*head, *tiny.tokens(5 + seed, seed=seed)) for seed in range(16)]
    rig = Rig(model, max_running=16)
    rig.ask(prompts[3])

    uids = [rig.submit(prompt, 6) for prompt in prompts]
    rig.run()

    for uid, prompt in zip(uids, prompts, strict=True):
        assert_near(rig.answers[uid], alone(model, prompt, 6))


@pytest.mark.parametrize("name", MODELS)
@AHEAD
def test_a_row_that_joins_and_leaves_does_not_disturb_the_others(
    loaded: Loaded, name: str, ahead: bool
) -> None:
    model = loaded(name)
    stays, joins = tiny.tokens(40, seed=1), tiny.tokens(75, seed=2)
    rig = Rig(model, ahead=ahead)
    staying = rig.submit(stays, 60)
    for _ in range(12):
        rig.step()
    joining = rig.submit(joins, 6)

    rig.run()

    assert_near(rig.answers[staying], alone(model, stays, 60))
    assert_near(rig.answers[joining], alone(model, joins, 6))


@pytest.mark.parametrize("name", MODELS)
@AHEAD
def test_a_batch_that_ran_empty_takes_rows_again(loaded: Loaded, name: str, ahead: bool) -> None:
    """B11: a new row starts from nothing that an old one left."""
    model = loaded(name)
    rig = Rig(model, caching=False, ahead=ahead)

    for seed in range(4):
        prompts = [tiny.tokens(20 + 30 * i, seed=10 * seed + i) for i in range(2)]
        uids = [rig.submit(prompt, 5) for prompt in prompts]
        rig.run()
        assert rig.engine.num_rows == 0
        for uid, prompt in zip(uids, prompts, strict=True):
            assert_near(rig.answers[uid], alone(model, prompt, 5))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("after", [1, 2, 4, 7])
def test_a_cancelled_row_leaves_the_others_right_and_its_prefix_reusable(
    loaded: Loaded, name: str, after: int
) -> None:
    """B35: in prefill, at its start and while decoding; only computed tokens are published."""
    model = loaded(name)
    gone, stays = tiny.tokens(100, seed=1), tiny.tokens(50, seed=2)
    rig = Rig(model)
    going = rig.submit(gone, 50)
    staying = rig.submit(stays, 20)
    for _ in range(after):
        rig.step()

    (computed,) = (s.num_computed for s in rig.core.sequences() if s.uid == going)
    rig.core.cancel(going, 0.0)
    rig.run()

    assert computed > 0
    assert_near(rig.answers[staying], alone(model, stays, 20))
    again = rig.ask(gone)
    assert again.cached == min(computed, 99)
    assert_near(again, alone(model, gone))


def test_blocks_that_leave_memory_while_their_reader_decodes_do_not_matter(loaded: Loaded) -> None:
    """B19: a tier of a few blocks, and two requests with one prefix."""
    model = loaded("llama")
    head = tiny.tokens(6 * BLOCK)
    prompts = [(*head, *tiny.tokens(40, seed=seed)) for seed in range(4)]
    rig = Rig(model, hot_bytes=7 * BLOCK * model.cache.bytes_per_token)

    uids = [rig.submit(prompt, 30) for prompt in prompts]
    rig.run()

    for uid, prompt in zip(uids, prompts, strict=True):
        assert_near(rig.answers[uid], alone(model, prompt, 30))


# ── sampling, row by row ─────────────────────────────────────────────────────────────────────

SAMPLINGS = {
    "greedy": Sampling(),
    "bias": Sampling(logit_bias=((42, 100.0), (43, -100.0))),
    "repetition": Sampling(repetition_penalty=1.1),
    "presence": Sampling(presence_penalty=0.4),
    "frequency": Sampling(frequency_penalty=0.5),
    "seeded": Sampling(temperature=1.0, seed=7),
    "other-seed": Sampling(temperature=1.0, seed=-9007199254740991),
    "nucleus": Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=7),
}


@AHEAD
def test_sampling_is_each_rows_own_alone_and_in_any_batch(loaded: Loaded, ahead: bool) -> None:
    """B32: rows with and without logits processors in one batch."""
    model = loaded("llama")
    prompt = tiny.tokens(40)
    expected = {kind: alone(model, prompt, 32, s) for kind, s in SAMPLINGS.items()}
    rig = Rig(model, ahead=ahead)

    uids = {kind: rig.submit(prompt, 32, sampling) for kind, sampling in SAMPLINGS.items()}
    rig.run()

    for kind, uid in uids.items():
        assert rig.answers[uid].tokens == expected[kind].tokens, kind
    assert expected["bias"].tokens == [42] * 32
    texts = {tuple(answer.tokens) for answer in expected.values()}
    assert len(texts) == len(expected), "each of these changes the answer"


def test_a_seed_gives_the_same_tokens_warm_and_cold(loaded: Loaded) -> None:
    rig = Rig(loaded("llama"))
    prompt = tiny.tokens(60)
    sampling = Sampling(temperature=1.0, seed=3)

    cold, warm = rig.ask(prompt, 12, sampling), rig.ask(prompt, 12, sampling)

    assert warm.cached == 59
    assert warm.tokens == cold.tokens


def test_penalties_see_the_restored_prefix_as_well(loaded: Loaded) -> None:
    rig = Rig(loaded("llama"))
    prompt = tiny.tokens(60)
    sampling = Sampling(repetition_penalty=1.8, frequency_penalty=0.5)

    cold, warm = rig.ask(prompt, 12, sampling), rig.ask(prompt, 12, sampling)

    assert warm.cached == 59
    assert warm.tokens == cold.tokens


@AHEAD
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_the_logits(loaded: Loaded, count: int, ahead: bool) -> None:
    """B88: as many alternatives as asked, sorted, and none above 0."""
    rig = Rig(loaded("llama"), ahead=ahead)
    uid = rig.submit(tiny.tokens(40), 5, Sampling(top_logprobs=count))
    rig.submit(tiny.tokens(50), 9)

    rig.run()

    answer = rig.answers[uid]

    for sampled, logits in zip(answer.sampled, answer.logits, strict=True):
        wanted = logits - np.log(np.sum(np.exp(logits)))
        best = np.argsort(-wanted)[:count]
        assert sampled.logprob == pytest.approx(wanted[sampled.token], abs=1e-4)
        assert [one.token for one in sampled.top] == best.tolist()
        assert [one.logprob for one in sampled.top] == pytest.approx(wanted[best], abs=1e-4)
        assert all(one.logprob <= 0 for one in sampled.top)


def test_nobody_pays_for_log_probabilities_that_were_not_asked(loaded: Loaded) -> None:
    answer = Rig(loaded("llama")).ask(tiny.tokens(40), 2)

    assert [(s.logprob, s.top) for s in answer.sampled] == [(None, ())] * 2


# ── faults ───────────────────────────────────────────────────────────────────────────────────


class Broken(Exception):
    pass


class Breaker:
    """A hook that raises once, in one phase of one row."""

    def __init__(self) -> None:
        self.where: tuple[str, Uid] | None = None

    def __call__(self, phase: str, uid: Uid | None) -> None:
        if (phase, uid) == self.where:
            self.where = None
            raise Broken("on purpose")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("phase", ["restore", "prefill", "start"])
def test_a_fault_in_one_row_is_that_rows_alone(loaded: Loaded, name: str, phase: str) -> None:
    """B32: the row ends with an error, the others with their answers."""
    model = loaded(name)
    breaker = Breaker()
    rig = Rig(model, hook=breaker)
    others = [tiny.tokens(45, seed=1), tiny.tokens(80, seed=2)]
    first = rig.submit(others[0], 30)
    for _ in range(5):
        rig.step()
    victim = rig.submit(tiny.tokens(60, seed=3), 30)
    second = rig.submit(others[1], 30)
    breaker.where = (phase, victim)

    rig.run()

    failed = rig.answers[victim].closed
    assert failed is not None
    assert failed.error == "Broken in the engine"
    assert failed.finish_reason is None
    for uid, prompt in zip((first, second), others, strict=True):
        assert_near(rig.answers[uid], alone(model, prompt, 30))
    assert_near(rig.ask(tiny.tokens(60, seed=3)), alone(model, tiny.tokens(60, seed=3)))


@pytest.mark.parametrize("name", [*MODELS, "qwen3_5"])
def test_a_block_that_cannot_be_stored_is_missing_and_nothing_else(
    loaded: Loaded, name: str, tmp_path: Path
) -> None:
    model, prompt = loaded(name), tiny.tokens(100)
    breaker = Breaker()
    rig = Rig(model, files=tmp_path, hook=breaker)
    uid = rig.submit(prompt, 30)
    breaker.where = ("store", uid)

    rig.run()
    again = rig.ask(prompt, 30)

    assert_near(rig.answers[uid], alone(model, prompt, 30))
    assert_near(again, alone(model, prompt, 30))
    assert again.cached < 99


@pytest.mark.parametrize("name", MODELS)
def test_a_fault_of_the_whole_step_ends_every_row_and_the_next_request_is_right(
    loaded: Loaded, name: str
) -> None:
    """B32: a batch that raised is not trusted any more."""
    model = loaded(name)
    breaker = Breaker()
    rig = Rig(model, hook=breaker)
    prompts = [tiny.tokens(40, seed=1), tiny.tokens(70, seed=2)]
    uids = [rig.submit(prompt, 30) for prompt in prompts]
    for _ in range(8):
        rig.step()
    breaker.where = ("decode", uids[1])

    rig.run()

    for uid in uids:
        failed = rig.answers[uid].closed
        assert failed is not None
        assert failed.error == "Broken"
    for prompt in prompts:
        assert_near(rig.ask(prompt, 30), alone(model, prompt, 30))


def test_what_waited_while_the_step_failed_is_answered(loaded: Loaded) -> None:
    model = loaded("llama")
    breaker = Breaker()
    rig = Rig(model, hook=breaker, max_running=1)
    first = rig.submit(tiny.tokens(40, seed=1), 30)
    waits = rig.submit(tiny.tokens(40, seed=2), 30)
    breaker.where = ("decode", first)

    rig.run()

    assert_near(rig.answers[waits], alone(model, tiny.tokens(40, seed=2), 30))


def test_an_engine_that_was_reset_has_no_rows_and_keeps_its_blocks(loaded: Loaded) -> None:
    model = loaded("llama")
    rig = Rig(model)
    prompt = tiny.tokens(50)
    rig.ask(prompt)

    rig.engine.reset()

    assert rig.engine.num_rows == 0
    again = rig.ask(prompt)
    assert again.cached == 49
    assert_near(again, alone(model, prompt))


# ── KV that is not finite ────────────────────────────────────────────────────────────────────

POISON = 99


@pytest.fixture
def poisoned(loaded: Loaded) -> Any:
    """llama whose embedding of POISON is not a number, for one test."""
    model: Any = loaded("llama")
    embedding = model.model.model.embed_tokens
    sound = embedding.weight
    weight = mx.array(sound)
    weight[POISON] = float("nan")
    embedding.weight = weight
    yield model
    embedding.weight = sound


def test_kv_that_is_not_finite_is_not_stored(poisoned: LoadedModel, tmp_path: Path) -> None:
    sound = tiny.tokens(2 * BLOCK)
    prompt = (*sound, *tiny.tokens(5, seed=1), POISON, *tiny.tokens(60, seed=2))
    rig = Rig(poisoned, files=tmp_path)

    rig.ask(prompt)

    again = rig.ask(prompt)
    assert again.cached == 2 * BLOCK
    assert rig.files is not None
    assert sum(len(found.identity.tokens) // 4 for found in found_in(rig.files)) == 2 * BLOCK


def test_a_row_that_is_not_finite_does_not_spoil_its_neighbours(poisoned: LoadedModel) -> None:
    rig = Rig(poisoned)
    prompt = tiny.tokens(50)
    uid = rig.submit(prompt, 20)
    rig.submit((*tiny.tokens(70, seed=1), POISON), 20)

    rig.run()

    assert_near(rig.answers[uid], alone(poisoned, prompt, 20))


# ── hand-made plans ──────────────────────────────────────────────────────────────────────────


@AHEAD
def test_each_step_emits_one_token(loaded: Loaded, ahead: bool) -> None:
    model = loaded("llama")
    prompt = tiny.tokens(20)
    expected = alone(model, prompt, 3).tokens
    engine = Engine(model.model, model.cache, ahead=ahead)
    uid = Uid(7)

    admitted = engine.run(StepPlan(admits=(Admit(uid, prompt, Sampling(), ()),)))
    prefilled = engine.run(StepPlan(prefills=(Prefill(uid, 19),)))
    first = engine.run(StepPlan(starts=(uid,), decode=True))
    second = engine.run(StepPlan(decode=True))

    assert admitted.result.sampled == prefilled.result.sampled == ()
    assert prefilled.result.prefilled_tokens == 19
    assert [s.token for s in first.result.sampled + second.result.sampled] == expected[:2]
    assert engine.num_rows == 1
    engine.run(StepPlan(removes=(uid,)))
    assert engine.num_rows == 0


@AHEAD
def test_removing_and_decoding_nothing_is_harmless(loaded: Loaded, ahead: bool) -> None:
    model = loaded("llama")
    engine = Engine(model.model, model.cache, ahead=ahead)

    output = engine.run(StepPlan(removes=(Uid(1),), decode=True))

    assert output.result.sampled == ()
    assert output.exports == ()
