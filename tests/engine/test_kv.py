"""KV that was cut into blocks and put back is the KV that was computed, bit for bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from omlx.cache.blocks import BlockId
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig
from omlx.engine.kv import (
    BlockArrays,
    BlockStore,
    all_finite,
    fork_caches,
    fresh_caches,
    from_host,
    probe,
    to_host,
)
from omlx.engine.load import LoadedModel
from tests import tiny

Loaded = Callable[[str], LoadedModel]

BLOCK = 16
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 66, 80, 97)
"""Around the edges of blocks and of the window of 32."""

HOST = pytest.mark.parametrize("host", [False, True], ids=["device", "host"])


class Computed:
    """A prompt computed up to ``total`` in chunks of a block, and the blocks it was cut into.

    A last chunk of one token is computed with the one before it: alone it would be a decoding
    step, which leaves a full window in another order in memory, and sums in another order.
    """

    def __init__(self, model: LoadedModel, prompt: tuple[int, ...], total: int) -> None:
        self.store = BlockStore(model.cache)
        self.caches = fresh_caches(model.model)
        self.blocks: list[BlockArrays] = []
        done = 0
        for start in range(0, total, BLOCK):
            stop = min(start + BLOCK, total)
            if done < stop:
                done = total if total - stop == 1 else stop
                model.model(mx.array([prompt[start:done]]), cache=self.caches)
                mx.eval([cache.state for cache in self.caches])
            block = self.store.cut(self.caches, 0, start, stop)
            mx.eval(block)
            self.blocks.append(block)

    @property
    def takes(self) -> list[int]:
        return [block[0].shape[2] for block in self.blocks]


def restored(
    model: LoadedModel, blocks: list[BlockArrays], takes: list[int], *, host: bool = False
) -> tuple[BlockStore, list[Any]]:
    store, caches = BlockStore(model.cache, host_copies=host), fresh_caches(model.model)
    store.restore(caches, blocks, takes)
    return store, caches


def next_logits(model: LoadedModel, caches: list[Any], tokens: tuple[int, ...]) -> list[bytes]:
    """Feed tokens one by one; the logits behind each."""
    found = []
    for token in tokens:
        logits = model.model(mx.array([[token]]), cache=caches)[:, -1]
        mx.eval(logits, [cache.state for cache in caches])
        found += tiny.digests([logits])
    return found


def offsets(caches: list[Any]) -> list[int]:
    return [int(cache.offset.item()) for cache in caches]


# ── there and back ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("total", EDGES)
@HOST
def test_a_restored_row_goes_on_exactly_as_the_computed_one(
    loaded: Loaded, name: str, total: int, host: bool
) -> None:
    model = loaded(name)
    prompt = tiny.tokens(total + 40)
    computed = Computed(model, prompt, total)

    _, caches = restored(model, computed.blocks, computed.takes, host=host)

    rest = prompt[total:]
    assert next_logits(model, caches, rest) == next_logits(model, computed.caches, rest)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("total", EDGES)
def test_after_a_restore_every_layer_stands_at_the_restored_token(
    loaded: Loaded, name: str, total: int
) -> None:
    """B13: an offset that stays at 0 restarts the rotary positions."""
    model = loaded(name)
    computed = Computed(model, tiny.tokens(total), total)

    _, caches = restored(model, computed.blocks, computed.takes)

    assert offsets(caches) == offsets(computed.caches) == [total] * len(caches)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("take", [1, 7, 15, 16])
@pytest.mark.parametrize("full", [0, 1, 2, 4])
@HOST
def test_the_first_tokens_of_a_block_can_be_restored_without_the_rest(
    loaded: Loaded, name: str, take: int, full: int, host: bool
) -> None:
    model = loaded(name)
    prompt = tiny.tokens(BLOCK * 5)
    long = Computed(model, prompt, BLOCK * 5)
    total = full * BLOCK + take

    takes = [BLOCK] * full + [take]
    store, caches = restored(model, long.blocks[: full + 1], takes, host=host)

    visible = max(0, total - (tiny.WINDOW if name == "gemma3" else total))
    for start in range(visible - visible % BLOCK, total, BLOCK):
        first = max(start, visible)
        stop = min(start + BLOCK, total)
        whole = long.blocks[start // BLOCK]
        wanted = [array[:, :, first - start : stop - start] for array in whole]
        assert tiny.digests(store.cut(caches, 0, first, stop)) == tiny.digests(wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_blocks_that_were_cut_while_a_row_decodes_equal_those_cut_after_a_restore(
    loaded: Loaded, name: str
) -> None:
    model = loaded(name)
    prompt = tiny.tokens(130)
    row = Computed(model, prompt, 100)
    _, twin = restored(model, row.blocks, row.takes)
    for token in prompt[100:]:
        for caches in (row.caches, twin):
            model.model(mx.array([[token]]), cache=caches)
            mx.eval([cache.state for cache in caches])

    one, other = (row.store.cut(c, 0, 112, 128) for c in (row.caches, twin))

    assert tiny.digests(one) == tiny.digests(other)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("other", [20, 50, 90])
def test_a_row_is_cut_out_of_a_padded_batch_as_if_it_were_alone(
    loaded: Loaded, name: str, other: int
) -> None:
    model = loaded(name)
    row = Computed(model, tiny.tokens(50), 50)
    neighbour = Computed(model, tiny.tokens(other, seed=1), other)
    wanted = tiny.digests(row.store.cut(row.caches, 0, 32, 50))

    for cache, more in zip(row.caches, neighbour.caches, strict=True):
        cache.extend(more)

    assert tiny.digests(row.store.cut(row.caches, 0, 32, 50)) == wanted


# ── stored blocks belong to nobody else ──────────────────────────────────────────────────────


def payload_hash(block: BlockArrays) -> str:
    return hashlib.sha256(b"".join(tiny.digests(block))).hexdigest()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_stored_bytes_do_not_change_while_their_source_goes_on(loaded: Loaded, name: str) -> None:
    """B20: a stored entry must not alias the live buffer."""
    model = loaded(name)
    prompt = tiny.tokens(BLOCK * 5)
    row = Computed(model, prompt, BLOCK * 2)
    before = [payload_hash(block) for block in row.blocks]

    next_logits(model, row.caches, prompt[BLOCK * 2 :])

    assert [payload_hash(block) for block in row.blocks] == before


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@HOST
def test_a_block_does_not_change_while_a_row_that_was_restored_from_it_goes_on(
    loaded: Loaded, name: str, host: bool
) -> None:
    """B11, B19: restoring copies the data."""
    model = loaded(name)
    prompt = tiny.tokens(BLOCK * 5)
    row = Computed(model, prompt, BLOCK * 2)
    before = [payload_hash(block) for block in row.blocks]
    _, caches = restored(model, row.blocks, row.takes, host=host)

    next_logits(model, caches, prompt[BLOCK * 2 :])

    assert [payload_hash(block) for block in row.blocks] == before


def big_cache(kind: LayerKind, tokens: int) -> tuple[LayerConfig, Any]:
    """A filled batch cache of one row, some MiB large, without a model around it."""
    shape = (1, 4, tokens, 64)
    cache = (
        BatchKVCache([0])
        if kind is LayerKind.KV
        else BatchRotatingKVCache(max_size=tokens, left_padding=[0])
    )
    keys = mx.random.normal(shape, key=mx.random.key(1))
    values = mx.random.normal(shape, key=mx.random.key(2))
    cache.update_and_fetch(keys, values)
    mx.eval(cache.state)
    window = tokens if kind is LayerKind.ROTATING else 0
    return LayerConfig(kind, 4, 64, 64, "float32", window), cache


def blank(cache: Any) -> None:
    """Write over everything it holds, in place."""
    cache.keys[:] = 0.0
    cache.values[:] = 0.0
    mx.eval(cache.keys, cache.values)


MIB = 1 << 20


@pytest.mark.parametrize("kind", [LayerKind.KV, LayerKind.ROTATING])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("tokens", [BLOCK, 8192])
def test_blocks_are_compact_copies_that_keep_nothing_else_alive(
    kind: LayerKind, num_layers: int, tokens: int
) -> None:
    """B20: a small slice must not keep a huge parent, also where it is the whole parent."""
    mx.clear_cache()
    before = mx.get_active_memory()
    layers = [big_cache(kind, tokens) for _ in range(num_layers)]
    store = BlockStore(ModelCacheConfig(tuple(config for config, _ in layers)))
    block = store.cut([cache for _, cache in layers], 0, 0, BLOCK)
    mx.eval(block)
    stored = sum(array.nbytes for array in block)
    wanted = payload_hash(block)

    while layers:
        blank(layers.pop()[1])

    assert stored == num_layers * 2 * 4 * BLOCK * 64 * 4
    assert payload_hash(block) == wanted
    assert mx.get_active_memory() - before <= stored + MIB // 4


@pytest.mark.parametrize("kind", [LayerKind.KV, LayerKind.ROTATING])
@HOST
def test_a_restored_row_does_not_keep_the_blocks_alive(kind: LayerKind, host: bool) -> None:
    """B20: an evicted block gives its memory back although its readers go on."""
    mx.clear_cache()
    tokens = 4096
    config, cache = big_cache(kind, tokens)
    store = BlockStore(ModelCacheConfig((config,)), host_copies=host)
    block = store.cut([cache], 0, 0, tokens)
    mx.eval(block)
    del cache
    stored = sum(array.nbytes for array in block)
    twin: Any = (
        BatchKVCache([0])
        if kind is LayerKind.KV
        else BatchRotatingKVCache(max_size=tokens, left_padding=[0])
    )
    store.restore([twin], [block], [BLOCK])
    mx.eval(twin.state)
    mx.synchronize()  # a GPU lets go of what a pass read when the pass is over
    full = mx.get_active_memory()

    del block

    assert full - mx.get_active_memory() >= stored - MIB // 4


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("kind", [LayerKind.KV, LayerKind.ROTATING])
def test_a_block_of_any_number_of_layers_can_be_exported(kind: LayerKind, num_layers: int) -> None:
    layers = [big_cache(kind, 64) for _ in range(num_layers)]
    config = ModelCacheConfig(tuple(config for config, _ in layers))
    block = BlockStore(config).cut([cache for _, cache in layers], 0, 16, 32)
    mx.eval(block)

    tensors = to_host(config.tensors, block)

    assert [bytes(t.data) for t in tensors] == tiny.digests(block)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("total", [20, 50])
def test_forked_rows_go_their_own_ways(loaded: Loaded, name: str, total: int) -> None:
    """B19: each as if the other had never been."""
    model = loaded(name)
    prompt, one, other = (tiny.tokens(n, seed=n) for n in (total, 40, 41))
    expected = [
        next_logits(model, Computed(model, prompt, total).caches, way[:40]) for way in (one, other)
    ]
    row = Computed(model, prompt, total)

    forked = fork_caches(row.caches)
    found: list[list[bytes]] = [[], []]
    for mine, theirs in zip(one, other, strict=False):
        found[0] += next_logits(model, row.caches, (mine,))
        found[1] += next_logits(model, forked, (theirs,))

    assert found == expected
    assert offsets(forked) == offsets(row.caches) == [total + 40] * len(forked)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@HOST
def test_every_dtype_is_joined_byte_for_byte(dtype: str, host: bool) -> None:
    """B28: also where the join is done in host memory, which has no bfloat16."""
    config = ModelCacheConfig((LayerConfig(LayerKind.KV, 2, 16, 32, dtype),) * 2)
    bits = mx.random.randint(-(1 << 31), 1 << 31, (2, 2, 48, 32), mx.int32, mx.random.key(1))
    width = 1 if dtype == "float32" else 2
    raw = bits.view(getattr(mx, dtype))[..., : 32 * width]
    blocks = [(raw[:, :, a:b, :16], raw[:, :, a:b, :32]) for a, b in ((0, 16), (16, 32), (32, 48))]
    caches = [BatchKVCache([0]), BatchKVCache([0])]

    BlockStore(config, host_copies=host).restore(caches, blocks, [16, 16, 5])

    for layer, cache in enumerate(caches):
        assert cache.keys is not None and cache.values is not None
        found = (cache.keys[0, :, :37], cache.values[0, :, :37])
        wanted = (raw[layer, :, :37, :16], raw[layer, :, :37, :32])
        assert [array.dtype for array in found] == [getattr(mx, dtype)] * 2
        assert tiny.digests(found) == tiny.digests(wanted)


# ── host memory ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "items"), [("float32", np.uint32), ("float16", np.uint16)])
def test_every_bit_pattern_survives_the_way_through_host_memory(dtype: str, items: Any) -> None:
    _round_trip(dtype, items)


def test_bfloat16_survives_the_way_through_host_memory_without_a_cast() -> None:
    """B28: not through fp16 or fp32, where bits would change."""
    _round_trip("bfloat16", np.uint16)


def _round_trip(dtype: str, items: Any) -> None:
    config = ModelCacheConfig((LayerConfig(LayerKind.KV, 2, 16, 32, dtype),))
    patterns = np.arange(0, 1 << 16, dtype=np.uint32)  # each sign, exponent and NaN payload
    raw = (patterns << 16 | patterns) if items is np.uint32 else patterns
    keys, values = raw.astype(items)[: 2 * 16 * 512], raw.astype(items)[-2 * 32 * 512 :]
    block = tuple(
        mx.array(part.reshape(1, 2, 512, -1)).view(getattr(mx, dtype)) for part in (keys, values)
    )
    mx.eval(block)

    tensors = to_host(config.tensors, block)
    back = from_host(tensors)

    assert [(t.name, t.dtype, t.shape) for t in tensors] == [
        ("kv0.keys", dtype, (1, 2, 512, 16)),
        ("kv0.values", dtype, (1, 2, 512, 32)),
    ]
    assert [bytes(t.data) for t in tensors] == [keys.tobytes(), values.tobytes()]
    assert [array.dtype for array in back] == [getattr(mx, dtype)] * 2
    assert tiny.digests(back) == [keys.tobytes(), values.tobytes()]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_one_value_that_is_not_finite_is_noticed(dtype: mx.Dtype, value: float) -> None:
    good = mx.ones((2, 2, 16, 16), dtype)
    bad = mx.ones((2, 2, 16, 16), dtype)
    bad[1, 1, 15, 15] = value

    assert all_finite([good, good]).item()
    assert not all_finite([good, bad]).item()


# ── the store ────────────────────────────────────────────────────────────────────────────────


def test_the_store_keeps_what_is_put_until_it_is_dropped() -> None:
    store = BlockStore(ModelCacheConfig((LayerConfig(LayerKind.KV, 2, 16, 16, "float32"),)))
    block = (mx.zeros((1, 2, 16, 16)), mx.zeros((1, 2, 16, 16)))
    store.put(BlockId(3), block)
    store.put(BlockId(5), block)
    assert store.get(BlockId(3)) is block
    assert store.nbytes == 4 * 2 * 16 * 16 * 4

    store.drop([BlockId(3), BlockId(4)])

    assert len(store) == 1
    store.clear()
    assert store.nbytes == 0


# ── what a model keeps ───────────────────────────────────────────────────────────────────────


class Keeps(nn.Module):
    """A model that does nothing but to fill the caches it asked for."""

    def __init__(self, make: Callable[[], list[Any]], values: mx.Dtype = mx.float32) -> None:
        super().__init__()
        self.make_cache = make
        self._values = values

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        keys = mx.zeros((1, 2, tokens.shape[1], 64))
        for one in cache:
            if isinstance(one, ArraysCache):
                one[0] = mx.zeros((1, 3))
            else:
                one.update_and_fetch(keys, keys.astype(self._values))
        return keys


def test_what_each_layer_keeps_is_read_from_the_caches_the_model_makes(loaded: Loaded) -> None:
    kv = LayerConfig(LayerKind.KV, 2, 16, 16, "float32")
    rotating = LayerConfig(LayerKind.ROTATING, 2, 16, 16, "float32", window=tiny.WINDOW)

    assert loaded("llama").cache.layers == (kv, kv)
    assert loaded("gemma3").cache.layers == (rotating, kv) * 2
    assert [group.layers for group in loaded("gemma3").cache.groups] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("make", "kind", "why_not"),
    [
        (lambda: [KVCache()], LayerKind.KV, None),
        (lambda: [RotatingKVCache(max_size=8)], LayerKind.ROTATING, None),
        (
            lambda: [RotatingKVCache(max_size=8, keep=4)],
            LayerKind.UNSUPPORTED,
            "layer 0 uses RotatingKVCache, which can't be cut in blocks",
        ),
        (
            lambda: [QuantizedKVCache()],
            LayerKind.UNSUPPORTED,
            "layer 0 uses QuantizedKVCache, which can't be cut in blocks",
        ),
        (
            lambda: [KVCache(), ArraysCache(2)],
            LayerKind.KV,
            None,
        ),
    ],
)
def test_a_layer_that_cannot_be_cut_makes_the_prefix_not_reusable_and_says_why(
    make: Callable[[], list[Any]], kind: LayerKind, why_not: str | None
) -> None:
    config = probe(Keeps(make))

    assert config.layers[0].kind is kind
    assert config.why_not_cacheable == why_not


def test_keys_and_values_of_different_dtypes_are_not_reusable() -> None:
    config = probe(Keeps(lambda: [KVCache()], values=mx.float16))

    assert config.why_not_cacheable == "layer 0 mixes dtypes in keys and values"


@pytest.mark.parametrize(
    "make", [lambda: [ChunkedKVCache(8)], lambda: [RotatingKVCache(8, keep=4)]]
)
def test_a_model_with_a_cache_that_cannot_be_batched_gets_its_own_caches(
    make: Callable[[], list[Any]],
) -> None:
    model = Keeps(make)

    assert not probe(model).batches
    assert type(fresh_caches(model)[0]) is type(make()[0])
