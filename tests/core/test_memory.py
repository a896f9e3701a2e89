"""What rows need follows from what layers keep, and what can never fit is refused in numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig, StateSpec
from omlx.core.memory import GROWTH_TOKENS, ChunkPeak, MemoryPlan, NeverFits, RowMemory

FULL = LayerConfig(LayerKind.KV, 2, 64, 64, "float32")
WINDOW = LayerConfig(LayerKind.ROTATING, 2, 64, 64, "float32", window=128)
STATE = LayerConfig(LayerKind.RECURRENT, states=(StateSpec("gdn.2.0", (4, 8, 8), "float32"),))
TOKEN = 2 * 2 * 64 * 4
"""Bytes of keys and values of one token in one layer."""

STATE_BYTES = 4 * 8 * 8 * 4


def row(*layers: LayerConfig, chunk: int = 16, **changes: object) -> RowMemory:
    return replace(RowMemory.of(ModelCacheConfig(layers), chunk), **changes)


def plan(room: int, **changes: object) -> MemoryPlan:
    """Rows of one byte a token, two tokens at once, nothing to grow."""
    one = RowMemory(1, (), 0, 0, 1, 2, growth_tokens=0)
    return replace(MemoryPlan(room + 30, 20, 10, room // 2, one), **changes)


def test_every_row_has_as_much_room_as_the_longest() -> None:
    one = row(FULL)

    assert one.caches(3, 1000) == 3 * (1000 + GROWTH_TOKENS) * TOKEN
    assert one.need([10, 1000, 20], 7) == one.caches(3, 1000) + one.computing(3, 1000, 7)


def test_a_window_ends_its_growth_and_states_never_grow() -> None:
    one = row(FULL, WINDOW, STATE)

    first, second = one.caches(1, 1000), one.caches(1, 3000)

    assert second - first == 2000 * TOKEN
    assert first == (1000 + GROWTH_TOKENS) * TOKEN + (128 + 16) * TOKEN + STATE_BYTES


def test_blocks_keep_what_a_window_lets_go() -> None:
    assert row(FULL, WINDOW).block_token_bytes == 2 * TOKEN


def test_a_chunk_takes_what_was_measured_for_its_tokens_and_for_those_before() -> None:
    one = row(STATE, chunk=100, peak=ChunkPeak(token_bytes=10.0, pair_bytes=0.5))

    assert one.computing(1, 2000, 0) == 10 + 2000 // 2, "one token of a row"
    assert one.computing(1, 2000, 2000) == 1000 + 100 * 2000 // 2
    assert one.computing(1, 2000, 2000, 16) == 4 * one.computing(1, 2000, 2000), "a wave's chunks"
    assert one.computing(500, 0, 1) == 5000, "one after the other, so the larger counts"


def test_scores_of_all_tokens_are_there_for_each_row() -> None:
    one = row(STATE, vocab_size=1000)

    assert one.computing(8, 0, 0) == 8 * one.computing(1, 0, 0) > 8 * 1000 * 4


def test_nothing_needs_nothing() -> None:
    assert row(FULL).need([]) == 0


@pytest.mark.parametrize("room", [0, 1, 2, 99, 100])
def test_the_longest_row_is_the_longest_that_fits(room: int) -> None:
    found = plan(room).longest(60)

    assert found == min(room, 60)
    assert plan(room).longest(60, num_rows=3) == min(room // 3, 60)


def test_a_prompt_that_leaves_room_for_one_token_is_taken() -> None:
    plan(100).check(99, 1)
    plan(100).check(24, 4)


def test_one_token_more_is_refused_with_the_numbers() -> None:
    mb = 1_000_000
    large = MemoryPlan(90 * mb, 50 * mb, 5 * mb, 0, RowMemory(10_000, (), 0, 0, 1, 0, 0))

    with pytest.raises(NeverFits) as refused:
        large.check(4000, 1)

    text = str(refused.value)
    for part in (
        "prompt is too long",
        "4,000 tokens",
        f"{large.row.need([4001], 4001) / mb:.1f} MB",
        "memory_budget (90.0 MB)",
        "leaves 35.0 MB",
        "weights (50.0 MB)",
        "reserve (5.0 MB)",
        f"enough for {large.longest(4000):,} tokens",
    ):
        assert part in text


def test_choices_count_and_are_named() -> None:
    with pytest.raises(NeverFits, match=r"for 5 choices.*enough for 20 tokens for 5 choices"):
        plan(100).check(24, 5)
