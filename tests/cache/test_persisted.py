"""What has a file, what is on its way to one, and what deserves one."""

from __future__ import annotations

from omlx.cache.blocks import BlockHash, chain_hash, pack_tokens, root_hash, state_hash
from omlx.cache.checkpoints import Place
from omlx.cache.cold_tier import SIGHTINGS, WritePolicy
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.tickets import StoreTicket, StoreWish
from tests.cache.world import NAMESPACE

SIZE, BYTES = 4, 4
BLOCK_BYTES = SIZE * BYTES
CHECKPOINT_BYTES = 50
ROOT = root_hash(NAMESPACE, "")
PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 0]
FIRST, SECOND = pack_tokens(PROMPT[:4]), pack_tokens(PROMPT[4:8])
NAMES = (chain_hash(ROOT, FIRST), chain_hash(chain_hash(ROOT, FIRST), SECOND))
WISHES = (StoreWish(ROOT, NAMES[0], FIRST, True), StoreWish(NAMES[0], NAMES[1], SECOND, True))


def make_cache(
    *,
    hot: int = 100,
    ssd: int = 100,
    pending: int = 100,
    policy: WritePolicy = WritePolicy.BEHIND,
    checkpoint_bytes: int = 0,
) -> BlockAwarePrefixCache:
    """Limits in blocks. Somebody asked for the prompt, in vain."""
    cache = BlockAwarePrefixCache(
        namespace=NAMESPACE,
        block_size=SIZE,
        bytes_per_token=BYTES,
        hot_limit_bytes=hot * BLOCK_BYTES,
        ssd_limit_bytes=ssd * BLOCK_BYTES,
        pending_limit_bytes=pending * BLOCK_BYTES,
        checkpoint_bytes=checkpoint_bytes,
        write_policy=policy,
    )
    cache.look_up(pack_tokens(PROMPT))
    return cache


def stored(cache: BlockAwarePrefixCache, *wishes: StoreWish) -> list[StoreTicket | None]:
    """Computed, and whatever may be written is with the writer now."""
    tickets = [cache.store(wish) for wish in wishes]
    for ticket in tickets:
        if ticket is not None:
            block_id = ticket.block_id
            cache.seal(
                ticket.wish,
                block_id,
                stored=block_id is not None,
                writing=ticket.write,
                write=ticket.write,
            )
    cache.check()
    return tickets


def ask(cache: BlockAwarePrefixCache) -> list[tuple[bool, bool]]:
    """A look-up of the prompt; (cold, queued) of each block. Holds nothing afterwards."""
    grant = cache.look_up(pack_tokens(PROMPT))
    for ref in reversed(grant.refs):
        if ref.cold:
            cache.promoted(ref, stored=False)
    cache.pool.release([r.block_id for r in grant.refs if not r.cold and r.block_id is not None])
    cache.check()
    return [(ref.cold, ref.queued) for ref in grant.refs]


def write(cache: BlockAwarePrefixCache, *names: BlockHash) -> None:
    for name in names:
        assert cache.files.written(name, BLOCK_BYTES)
    cache.check()


# ── read your writes ─────────────────────────────────────────────────────────────────────────


def test_what_is_on_its_way_to_its_file_is_found() -> None:
    """B67: two identical prompts back to back, without a RAM tier."""
    cache = make_cache(hot=0)
    stored(cache, *WISHES)
    assert ask(cache) == [(True, True)] * 2

    write(cache, NAMES[0])
    assert ask(cache) == [(True, False), (True, True)]
    write(cache, NAMES[1])
    assert ask(cache) == [(True, False)] * 2


def test_what_the_writer_does_not_have_after_all_is_a_miss() -> None:
    cache = make_cache(hot=0)
    stored(cache, *WISHES)

    cache.files.lost(NAMES[0], corrupt=False)
    cache.check()

    assert ask(cache) == []
    write(cache, NAMES[0])  # it was on its way all the same
    assert ask(cache) == [(True, False), (True, True)]


def test_a_write_that_failed_takes_what_it_promised_along() -> None:
    cache = make_cache(hot=0)
    stored(cache, *WISHES)

    cache.files.write_failed(NAMES[0])
    cache.files.write_failed(NAMES[1])
    cache.check()

    assert ask(cache) == []
    assert cache.cold.pending_bytes == 0


def test_cleared_files_are_not_found_on_their_way_either() -> None:
    cache = make_cache(hot=0)
    stored(cache, *WISHES)

    cache.clear(hot=False, ssd=True)
    assert ask(cache) == []

    write(cache, *NAMES)
    assert ask(cache) == []
    assert set(cache.cold.take_deletes().blocks) == set(NAMES)


def test_a_checkpoint_in_its_block_is_found_on_its_way_too() -> None:
    cache = make_cache(hot=0, checkpoint_bytes=CHECKPOINT_BYTES)
    stored(cache, WISHES[0], StoreWish(NAMES[0], NAMES[1], SECOND, True, carries=Place.TURN))

    grant = cache.look_up(pack_tokens(PROMPT))
    assert grant.num_cached == 8
    state = grant.checkpoint
    assert state is not None
    assert state.block_hash == state_hash(NAMES[0], SECOND)
    assert state.queued

    cache.files.write_failed(NAMES[0])
    cache.files.write_failed(NAMES[1])
    cache.check()
    assert cache.look_up(pack_tokens(PROMPT)).checkpoint is None


def test_a_block_whose_checkpoint_could_not_be_written_is_offered_with_it_again() -> None:
    """The file that is there has none, and does not pretend to."""
    cache = make_cache(hot=0, checkpoint_bytes=CHECKPOINT_BYTES)
    carrying = StoreWish(NAMES[0], NAMES[1], SECOND, True, carries=Place.TURN)
    stored(cache, *WISHES)
    write(cache, *NAMES)

    stored(cache, carrying)
    cache.files.write_failed(NAMES[1])
    cache.check()

    ticket = cache.store(carrying)
    assert ticket is not None
    assert ticket.write


# ── clearing RAM ─────────────────────────────────────────────────────────────────────────────


def test_what_is_dirty_gets_its_file_before_it_leaves_ram() -> None:
    """B44: a clear of the RAM tier loses nothing that could be kept."""
    cache = make_cache(pending=1)
    stored(cache, *WISHES)
    assert cache.files.num_dirty == 1

    assert cache.clear(hot=True, ssd=False) == 1
    assert cache.pool.num_cached == 1
    write(cache, NAMES[0])
    (ticket,) = cache.files.take_writes(9)
    write(cache, ticket.block_hash)

    assert cache.pool.num_cached == 0
    assert ask(cache) == [(True, False)] * 2


def test_what_is_used_again_before_that_stays_in_ram() -> None:
    cache = make_cache(pending=1)
    stored(cache, *WISHES)
    cache.clear(hot=True, ssd=False)
    write(cache, NAMES[0])

    assert ask(cache) == [(True, False), (False, False)]
    (ticket,) = cache.files.take_writes(9)
    write(cache, ticket.block_hash)

    assert cache.pool.num_cached == 1


def test_a_tier_that_takes_nothing_keeps_nothing_in_ram() -> None:
    cache = make_cache(pending=1)
    stored(cache, *WISHES)
    cache.cold.writable = False

    cache.clear(hot=True, ssd=False)

    assert cache.pool.num_cached == 0


# ── what deserves a file ─────────────────────────────────────────────────────────────────────


def test_selective_writes_what_is_asked_for_a_second_time() -> None:
    cache = make_cache(policy=WritePolicy.SELECTIVE)
    stored(cache, *WISHES)
    assert not cache.files.pending
    assert cache.files.num_dirty == 0

    assert ask(cache) == [(False, False)] * 2
    assert [ticket.block_hash for ticket in cache.files.take_writes(9)] == list(NAMES)


def test_selective_remembers_without_a_ram_tier() -> None:
    cache = make_cache(hot=0, policy=WritePolicy.SELECTIVE)
    assert stored(cache, WISHES[0]) == [None]

    stored(cache, WISHES[0])

    assert cache.files.pending == (NAMES[0],)


def test_selective_forgets_in_the_end() -> None:
    cache = make_cache(hot=0, policy=WritePolicy.SELECTIVE)
    cache.cold.sighted(NAMES[0])
    for number in range(SIGHTINGS):
        cache.cold.sighted(BlockHash(number.to_bytes(32)))

    assert not cache.cold.sighted(NAMES[0])


def test_a_tail_that_a_longer_one_replaces_is_no_eviction() -> None:
    cache = make_cache(ssd=0)
    short, longer = pack_tokens(PROMPT[:2]), pack_tokens(PROMPT[:3])
    stored(cache, StoreWish(ROOT, chain_hash(ROOT, short), short, False))
    stored(cache, StoreWish(ROOT, chain_hash(ROOT, longer), longer, False))

    assert cache.pool.num_cached == 1
    assert cache.stats.evictions_ram == 0
