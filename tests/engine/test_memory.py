"""Rows take what was reckoned, and those that had to wait again answer as if they had not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from omlx.core import admission
from omlx.core.memory import MemoryPlan, RowMemory
from omlx.core.plan import Sampling, Uid
from omlx.engine.load import LoadedModel, backend_name
from omlx.engine.measure import measure_chunk
from tests.engine.rig import CHUNK, Rig

Loaded = Callable[[str], LoadedModel]
MODELS = ["llama", "gemma3", "qwen3_5"]
PLENTY = 1 << 34
MUCH_TOO_MUCH = 1.5
"""A reckoning that is never exceeded but tells nothing would be as bad."""

A_LITTLE_MORE = 1.1
"""With ``ahead`` the next pass is being computed while we look."""

pytestmark = pytest.mark.skipif(
    backend_name() == "cuda", reason="CUDA gives small arrays more than they take"
)


def drawn_prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(20, 200) for _ in range(length))


def reckoned(model: LoadedModel) -> RowMemory:
    peak = measure_chunk(model.model, CHUNK, PLENTY)
    return RowMemory.of(model.cache, CHUNK, model.vocab_size, peak)


# ── the reckoning ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_take_what_was_reckoned(loaded: Loaded, name: str, ahead: bool) -> None:
    model = loaded(name)
    row = reckoned(model)
    rig = Rig(model, caching=False, ahead=ahead)
    lengths = [1500, 700, 1400]
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    for seed, length in enumerate(lengths):
        rig.submit(drawn_prompt(seed, length), max_tokens=500)
    while not all(s.num_generated > 40 for s in rig.core.sequences()):
        rig.recorder.logits.clear()
        rig.step()

    decoding = [s.num_tokens for s in rig.core.sequences()]
    assert len(decoding) == 3, "all of them decode together"
    kept = mx.get_active_memory() - before
    caches = row.caches(len(decoding), max(decoding))
    assert caches / MUCH_TOO_MUCH <= kept <= A_LITTLE_MORE * caches
    assert kept <= row.need(decoding)
    assert mx.get_peak_memory() - before <= row.need(decoding, max(lengths))


@pytest.mark.parametrize("name", MODELS)
def test_memory_comes_back_when_rows_end(loaded: Loaded, name: str) -> None:
    rig = Rig(loaded(name), caching=False)
    rig.ask(drawn_prompt(0, 40))
    rig.recorder.logits.clear()
    before = mx.get_active_memory()

    rig.ask(drawn_prompt(1, 1500), max_tokens=300)
    rig.recorder.logits.clear()

    assert mx.get_active_memory() - before < loaded(name).cache.bytes_per_token * 100


def test_a_chunk_far_behind_takes_more_where_scores_are_materialised(loaded: Loaded) -> None:
    peak = measure_chunk(loaded("llama").model, 128, PLENTY)

    assert peak.token_bytes > 64 * 4, "a token has at least its hidden values"
    assert 4 * 4 <= peak.pair_bytes < 10 * 4 * 4, "four heads with a float32 score each"


# ── rows that give their place up ────────────────────────────────────────────────────────────


def tight(model: LoadedModel, tokens: int) -> MemoryPlan:
    """Room for rows of so many tokens together; a row grows by one token at a time."""
    kept = model.cache.bytes_per_token
    row = RowMemory(kept, (), 0, 0, kept, 0, growth_tokens=0)
    return MemoryPlan(tokens * kept, 0, 0, tokens * kept, row)


SEEDED = Sampling(temperature=1.0, seed=5)
PENALISED = Sampling(repetition_penalty=1.3, frequency_penalty=0.4)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_waited_again_goes_on_as_if_it_had_not(
    loaded: Loaded,
    name: str,
    ahead: bool,
    cold: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "USUAL_TOKENS", 1)
    model = loaded(name)
    prompts = [drawn_prompt(seed, 40 + 9 * seed) for seed in range(4)]
    samplings = [Sampling(), SEEDED, PENALISED, Sampling()]
    alone = [
        Rig(model, caching=False, ahead=ahead).ask(prompt, 80, sampling).tokens
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    files = tmp_path if cold else None
    rig = Rig(model, files=files, ahead=ahead, memory=tight(model, 230))

    uids = [rig.submit(p, 80, s) for p, s in zip(prompts, samplings, strict=True)]
    rig.run()

    answers = [rig.answers[uid] for uid in uids]
    assert rig.core.admission.num_preempted > 0, "nobody had to wait again"
    assert [answer.tokens for answer in answers] == alone
    assert [answer.cached for answer in answers] == [0, 0, 0, 0], "recomputing is no hit"
    rig.step()
    assert rig.cache.pool.limit_bytes == 230 * model.cache.bytes_per_token, "it grew back"


def test_choices_go_on_one_by_one(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "USUAL_TOKENS", 1)
    model, prompt = loaded("llama"), drawn_prompt(3, 40)
    free = Rig(model)
    wanted = free.submit(prompt, 60, SEEDED, n=3)
    free.run()
    rig = Rig(model, memory=tight(model, 150))

    uid = rig.submit(prompt, 60, SEEDED, n=3)
    rig.run()

    assert rig.core.admission.num_preempted > 0
    for index in range(3):
        mine, theirs = rig.answers[Uid(uid + index)], free.answers[Uid(wanted + index)]
        assert mine.tokens == theirs.tokens


def test_a_row_is_stored_before_it_leaves_and_restored_when_it_is_back(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "USUAL_TOKENS", 1)
    model = loaded("llama")
    rig = Rig(model, files=tmp_path, memory=tight(model, 200))
    prompts = [drawn_prompt(seed, 60) for seed in range(2)]
    for prompt in prompts:
        rig.submit(prompt, 60)

    rig.run()

    assert rig.core.admission.num_preempted == 1
    admits = [admit for plan in rig.plans for admit in plan.admits]
    (again,) = [admit for admit in admits if admit.prompt not in prompts]
    restored = sum(restore.take for restore in again.restores)
    assert restored == len(again.prompt) - 1, "all but the token to go on from"


def test_an_answer_ends_where_memory_does(loaded: Loaded) -> None:
    model = loaded("llama")
    rig = Rig(model, memory=tight(model, 100))

    answer = rig.ask(drawn_prompt(0, 60), max_tokens=1000)

    assert len(answer.tokens) == 100 - 60
    assert answer.closed is not None and answer.closed.finish_reason == "length"


def test_who_came_first_ends_first(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "USUAL_TOKENS", 1)
    model = loaded("llama")
    rig = Rig(model, memory=tight(model, 260))
    uids = [rig.submit(drawn_prompt(seed, 50), 60) for seed in range(5)]

    ended: list[int] = []
    while rig.step():
        ended += [u for u in uids if rig.answers[u].closed and u not in ended]

    assert rig.core.admission.num_preempted > 0
    assert ended == uids, "in the order of arrival"
