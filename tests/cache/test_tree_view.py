"""The tree as people see it is bounded, whole from its beginning, and tells who holds what."""

from __future__ import annotations

from omlx.cache.blocks import BlockHash, chain_hash, pack_tokens, root_hash, state_hash
from omlx.cache.checkpoints import Place
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.tickets import StoreWish

NAMESPACE = "tiny"
ROOT = root_hash(NAMESPACE)


def new_cache(checkpoint_bytes: int = 0) -> BlockAwarePrefixCache:
    return BlockAwarePrefixCache(
        namespace=NAMESPACE,
        block_size=2,
        bytes_per_token=10,
        hot_limit_bytes=10_000,
        ssd_limit_bytes=10_000,
        pending_limit_bytes=10_000,
        checkpoint_bytes=checkpoint_bytes,
    )


def store(cache: BlockAwarePrefixCache, wish: StoreWish, *, hot: bool = True) -> BlockHash:
    ticket = cache.store(wish)
    assert ticket is not None
    cache.seal(wish, ticket.block_id, stored=hot, writing=ticket.write, write=ticket.write)
    return wish.block_hash


def chain(cache: BlockAwarePrefixCache, length: int, token: int = 1) -> list[BlockHash]:
    """Blocks of the same token behind each other, in RAM alone."""
    cache.look_up(pack_tokens([token]))
    names = [ROOT]
    for _ in range(length):
        tokens = pack_tokens([token, token])
        wish = StoreWish(names[-1], chain_hash(names[-1], tokens), tokens, persist=False)
        names.append(store(cache, wish))
    return names[1:]


def test_an_empty_cache_has_an_empty_tree() -> None:
    seen = new_cache().view(depth=1, most=1)

    assert (seen.nodes, seen.left_out) == ((), 0)


def test_parents_come_before_their_children_and_the_rest_is_counted() -> None:
    cache = new_cache()
    names = chain(cache, 5)

    seen = cache.view(depth=9, most=3)

    assert [node.block_hash for node in seen.nodes] == names[:3]
    assert seen.left_out == 2


def test_a_chain_is_shown_to_the_depth_that_was_asked_for() -> None:
    cache = new_cache()
    names = chain(cache, 5)

    seen = cache.view(depth=2, most=9)

    assert [node.block_hash for node in seen.nodes] == names[:2]
    assert seen.left_out == 3


def test_the_chain_that_was_used_last_comes_first() -> None:
    cache = new_cache()
    cache.now = 10.0
    (first,) = chain(cache, 1, token=1)
    cache.now = 20.0
    (second,) = chain(cache, 1, token=2)
    assert [node.block_hash for node in cache.view(depth=1, most=9).nodes] == [second, first]

    cache.now = 30.0
    cache.touch([first])

    seen = cache.view(depth=1, most=9).nodes
    assert [(node.block_hash, node.used_at) for node in seen] == [(first, 30.0), (second, 20.0)]


def test_who_holds_a_block_is_told() -> None:
    cache = new_cache()
    (name,) = chain(cache, 1)
    prompt = pack_tokens([1, 1, 7])
    cache.look_up(prompt)
    cache.look_up(prompt)

    (node,) = cache.view(depth=1, most=9).nodes

    assert node.refs == 2
    assert (node.hot, node.ssd, node.nbytes, node.num_tokens) == (True, False, 20, 2)
    assert cache.pool.get(name) is not None


def test_a_file_is_as_old_as_it_was_found() -> None:
    cache = new_cache()
    tokens = pack_tokens([3, 3])
    name = chain_hash(ROOT, tokens)
    cache.files.found(name, ROOT, tokens, 99)
    cache.files.order_files({name: 77.0})

    (node,) = cache.view(depth=1, most=9).nodes

    assert (node.hot, node.ssd, node.used_at, node.nbytes) == (False, True, 77.0, 20)


def test_a_checkpoint_is_told_from_a_block() -> None:
    cache = new_cache(checkpoint_bytes=500)
    (head,) = chain(cache, 1)
    tokens = pack_tokens([1])
    wish = StoreWish(head, state_hash(head, tokens), tokens, persist=False, place=Place.LAST)
    state = store(cache, wish)

    seen = {node.block_hash: node for node in cache.view(depth=2, most=9).nodes}

    assert seen[state].is_checkpoint and not seen[head].is_checkpoint
    assert (seen[state].parent, seen[state].nbytes) == (head, 500)
    assert (seen[state].place, seen[head].place) == (Place.LAST, None)
    assert (seen[state].block, seen[head].block) == (None, None)


def test_a_checkpoint_is_told_with_the_block_in_which_it_was_taken() -> None:
    cache = new_cache(checkpoint_bytes=500)
    head, inner = chain(cache, 2)
    tokens = pack_tokens([1])
    wish = StoreWish(head, state_hash(head, tokens), tokens, persist=False, place=Place.TURN)
    state = store(cache, wish)

    seen = {node.block_hash: node for node in cache.view(depth=2, most=9).nodes}

    assert seen[state].block == inner


def test_looking_changes_nothing() -> None:
    cache = new_cache()
    chain(cache, 3)
    before = (cache.stats.hits, cache.stats.misses, cache.pool.num_held, cache.pool.num_cached)

    cache.view(depth=9, most=9)

    cache.check()
    assert before == (
        cache.stats.hits,
        cache.stats.misses,
        cache.pool.num_held,
        cache.pool.num_cached,
    )
