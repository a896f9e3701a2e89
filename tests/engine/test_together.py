"""Prompts computed in one pass are what they would be alone, and nobody is in anybody's way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.core.plan import Uid
from omlx.engine.kv import fresh_caches, leaves
from omlx.engine.load import LoadedModel, backend_name
from omlx.engine.together import COPIED_PER_COMPUTED, compute, groups_of
from tests import tiny
from tests.engine.rig import Rig, greatest_difference

Loaded = Callable[[str], LoadedModel]

MODELS = pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "qwen3_next"])
NEAR = 1e-3


# ── who shares a pass ────────────────────────────────────────────────────────────────────────

CHUNKS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5_000)), min_size=1, max_size=12)


@given(CHUNKS, st.integers(0, 600))
def test_every_chunk_is_in_one_group(chunks: list[tuple[int, int]], pass_tokens: int) -> None:
    lengths, positions = map(list, zip(*chunks, strict=True))

    groups = groups_of(lengths, positions, pass_tokens)

    assert sorted(index for group in groups for index in group) == list(range(len(chunks)))


@given(CHUNKS, st.integers(0, 600))
def test_sharing_costs_less_than_passes_of_their_own(
    chunks: list[tuple[int, int]], pass_tokens: int
) -> None:
    lengths, positions = map(list, zip(*chunks, strict=True))

    for group in groups_of(lengths, positions, pass_tokens):
        padded = len(group) * max(lengths[index] for index in group)
        copied = sum(positions[index] for index in group) if len(group) > 1 else 0
        apart = sum(lengths[index] for index in group) + (len(group) - 1) * pass_tokens
        assert padded + copied / COPIED_PER_COMPUTED <= apart


def test_equal_chunks_of_new_prompts_share_a_pass_wherever_a_pass_costs_anything() -> None:
    assert groups_of([9] * 8, [0] * 8, 1) == [list(range(8))]
    assert groups_of([9] * 2, [0] * 2, 0) == [[0], [1]]


# ── what comes of it ─────────────────────────────────────────────────────────────────────────


def logits_after(model: LoadedModel, caches: list[Any]) -> np.ndarray[Any, Any]:
    logits = model.model(mx.array([[7]]), cache=caches)[0, -1]
    return np.array(logits.astype(mx.float32))


@MODELS
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_any_length_and_depth_end_where_they_would_alone(
    loaded: Loaded, name: str, seed: int
) -> None:
    """Several chunks, with other neighbours each time; lengths around the window and beyond it."""
    model, chance = loaded(name), random.Random(seed)
    prompts = [list(tiny.tokens(chance.randint(1, 90), seed=10 * seed + i)) for i in range(5)]
    rows = [fresh_caches(model.model) for _ in prompts]
    done = [0] * len(prompts)

    while left := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        some = chance.sample(left, chance.randint(1, len(left)))
        stops = [min(len(prompts[i]), done[i] + chance.randint(1, 40)) for i in some]
        chunks = [prompts[i][done[i] : stop] for i, stop in zip(some, stops, strict=True)]
        deep = [done[i] for i in some]
        computed = compute(model.model, model.cache, [rows[i] for i in some], deep, chunks)
        for i, stop, caches in zip(some, stops, computed, strict=True):
            rows[i], done[i] = caches, stop

    for prompt, caches in zip(prompts, rows, strict=True):
        alone = compute(model.model, model.cache, [fresh_caches(model.model)], [0], [prompt])[0]
        together = logits_after(model, caches)
        assert np.abs(together - logits_after(model, alone)).max() <= NEAR


@MODELS
@pytest.mark.skipif(backend_name() == "cuda", reason="CUDA gives small arrays more than they take")
def test_a_row_keeps_its_own_memory_only(loaded: Loaded, name: str) -> None:
    model = loaded(name)
    rows = [fresh_caches(model.model) for _ in range(4)]
    chunks = [list(tiny.tokens(64, seed=i)) for i in range(4)]
    before = mx.get_active_memory()

    one = compute(model.model, model.cache, rows, [0] * 4, chunks)[0]

    held = sum(array.nbytes for cache in leaves(one) for array in _arrays_of(cache))
    assert mx.get_active_memory() - before <= 1.5 * held


def _arrays_of(cache: Any) -> list[mx.array]:
    state = getattr(cache, "cache", None) or [cache.keys, cache.values]
    return [array for array in state if array is not None]


# ── in the engine ────────────────────────────────────────────────────────────────────────────


class Passes:
    """Counts the rows of each pass over prompts; breaks passes over more than one, if it is to."""

    def __init__(self, rig: Rig, *, breaks: bool) -> None:
        self._model = rig.engine.model
        self._breaks = breaks
        self.rows: list[int] = []
        rig.engine.model = self  # pyright: ignore[reportAttributeAccessIssue]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if tokens.shape[1] > 1:
            self.rows.append(tokens.shape[0])
            if self._breaks and tokens.shape[0] > 1:
                raise RuntimeError("this device takes one row at a time")
        return self._model(tokens, cache=cache)


@MODELS
@pytest.mark.parametrize("breaks", [False, True], ids=["", "breaks"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_prompts_that_arrive_together_are_computed_together_and_answered_as_if_alone(
    loaded: Loaded, name: str, breaks: bool, ahead: bool, count: int
) -> None:
    """And where a pass over several fails, each is computed alone, and nobody notices."""
    model = loaded(name)
    prompts = [tiny.tokens(length, seed=length) for length in (7, 8, 6, 7, 5)[:count]]
    alone = [Rig(model, caching=False, ahead=ahead).ask(prompt) for prompt in prompts]
    rig = Rig(model, ahead=ahead)
    passes = Passes(rig, breaks=breaks)

    uids: list[Uid] = [rig.submit(prompt) for prompt in prompts]
    rig.run()

    assert passes.rows == [count, *([1] * count if breaks else [])]
    for uid, answer in zip(uids, alone, strict=True):
        assert rig.answers[uid].tokens == answer.tokens
        assert greatest_difference(rig.answers[uid], answer) <= NEAR
