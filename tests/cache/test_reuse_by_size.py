"""A cache of another size is judged by what was really asked for, as if it had been there."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from omlx.cache import reuse_by_size
from omlx.cache.blocks import BlockHash
from omlx.cache.reuse_by_size import (
    HOUR_S,
    HOURS,
    NUM_SIZES,
    SMALLEST,
    ReuseDistances,
    Used,
)

MB = SMALLEST


def block(name: int, nbytes: int = MB, tokens: int = 16) -> Used:
    return Used(BlockHash(name.to_bytes(32, "big")), nbytes, tokens)


def kept(distances: ReuseDistances, nbytes: int, now: float = 0.0) -> int:
    return dict(distances.report(now).kept)[nbytes]


def test_what_was_never_asked_before_is_no_reuse() -> None:
    distances = ReuseDistances()
    distances.use([block(1), block(2)], 0.0)

    assert distances.report(0.0).reused_tokens == 0


def test_a_block_needs_room_for_itself_and_for_all_that_came_since() -> None:
    distances = ReuseDistances()
    for name in (1, 2, 3, 4, 1):
        distances.use([block(name)], 0.0)

    assert (kept(distances, 2 * MB), kept(distances, 4 * MB)) == (0, 16)


def test_of_a_chain_the_head_needs_least_room() -> None:
    distances = ReuseDistances()
    chain = [block(name) for name in range(4)]
    distances.use(chain, 0.0)
    distances.use(chain, 0.0)

    assert [kept(distances, size * MB) for size in (1, 2, 4)] == [16, 32, 64]


def test_a_checkpoint_takes_room_and_holds_no_token() -> None:
    distances = ReuseDistances()
    state = block(9, nbytes=3 * MB, tokens=0)
    for chain in ([block(1), state], [block(2)], [block(1), state]):
        distances.use(chain, 0.0)

    assert distances.report(0.0).reused_tokens == 16
    assert (kept(distances, MB), kept(distances, 2 * MB)) == (0, 16)


def test_a_size_that_we_cannot_name_keeps_less_than_everything() -> None:
    distances = ReuseDistances()
    giant = block(1, nbytes=SMALLEST << NUM_SIZES)
    distances.use([giant], 0.0)
    distances.use([giant], 0.0)

    report = distances.report(0.0)

    assert report.reused_tokens == 16
    assert report.kept[-1] == (SMALLEST << (NUM_SIZES - 1), 0)


def test_a_day_later_it_is_forgotten() -> None:
    distances = ReuseDistances()
    distances.use([block(1)], 0.0)
    distances.use([block(1)], HOUR_S)

    assert distances.report(HOURS * HOUR_S).reused_tokens == 16
    assert distances.report((HOURS + 1) * HOUR_S).reused_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_each_size_keeps_what_a_cache_of_that_size_would(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with caches that are really run, with few places so that gaps are closed."""
    monkeypatch.setattr(reuse_by_size, "NAMES_MAX", 60)
    dice = random.Random(seed)
    asked = [block(min(dice.randrange(60), dice.randrange(60))) for _ in range(1500)]
    distances = ReuseDistances()
    for one in asked:
        distances.use([one], 0.0)

    for size in (1, 2, 4, 8, 16, 32, 64):
        held: OrderedDict[BlockHash, None] = OrderedDict()
        found = 0
        for one in asked:
            found += one.num_tokens * (one.block_hash in held)
            held[one.block_hash] = None
            held.move_to_end(one.block_hash)
            if len(held) > size:
                held.popitem(last=False)
        assert kept(distances, size * MB) == found, size


def test_no_more_names_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_by_size, "NAMES_MAX", 8)
    distances = ReuseDistances()
    for name in range(100):
        distances.use([block(name)], 0.0)

    assert len(distances._places) == 8
    assert distances._line.from_(0) == 8 * MB
    distances.use([block(0)], 0.0)
    assert distances.report(0.0).reused_tokens == 0
