"""A prompt's blocks are found wherever they are, and forgotten without a trace."""

from __future__ import annotations

import pytest

from omlx.cache.blocks import pack_tokens
from omlx.cache.one_chain import find_chain, forget_chain
from tests.cache.test_prefix_cache import PROMPT, answered, make_world, write_everything
from tests.cache.world import World

OTHER = [1, 1, 1, 1, 1]


def find(world: World, salt: str = "") -> list[tuple[int, bool, bool, bool]]:
    """Of each block: its tokens, whether it is in RAM, has a file, and will get one."""
    found = find_chain(world.cache, pack_tokens(PROMPT), salt)
    return [(w.ref.num_tokens, w.block_id is not None, w.filed, w.coming) for w in found]


def test_each_block_is_told_with_where_it_is() -> None:
    world = make_world()
    answered(world, PROMPT)
    assert find(world) == [(4, True, False, True), (4, True, False, True)]

    write_everything(world)
    assert find(world) == [(4, True, True, False), (4, True, True, False)]

    world.clear(hot=True, ssd=False)
    assert find(world) == [(4, False, True, False), (4, False, True, False)]


def test_another_salt_finds_nothing() -> None:
    world = make_world()
    answered(world, PROMPT)

    assert find(world, "another") == []


@pytest.mark.parametrize("written", [False, True], ids=["on the way", "in files"])
def test_what_is_forgotten_is_nowhere_and_comes_back_from_nowhere(written: bool) -> None:
    world = make_world()
    answered(world, PROMPT)
    if written:
        write_everything(world)
    before = world.cache.stats.evictions_ram

    forget_chain(world.cache, "")
    world.settle()
    while world.to_writer:
        world.write(good=True)
    world.check()

    assert find(world) == []
    assert world.disk == {}
    assert world.cache.pool.num_cached == 0
    assert world.cache.cold.pending_bytes == 0
    assert world.cache.stats.evictions_ram == before, "nothing made room for anything"


def test_only_what_hangs_on_that_salt_is_forgotten() -> None:
    world = make_world()
    answered(world, PROMPT)
    write_everything(world)
    whole = find(world)

    forget_chain(world.cache, "another")

    assert find(world) == whole


def test_what_somebody_holds_stays_until_it_is_let_go() -> None:
    world = make_world()
    answered(world, PROMPT)
    holder = world.submit("", [*PROMPT, 0])

    forget_chain(world.cache, "")

    assert all(in_ram for _, in_ram, _, _ in find(world))
    world.restore(holder, 99)
    world.finish(holder)
    world.check()
