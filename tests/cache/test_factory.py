"""A namespace says everything that determines a block's bytes; the factory wires the limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from omlx.cache.block_file import HostTensor, Identity, encode_header
from omlx.cache.blocks import BlockHash, PackedTokens
from omlx.cache.checkpoint_file import encode_states
from omlx.cache.checkpoints import Place
from omlx.cache.factory import CacheFactory, CacheSizes, header_bytes, namespace_of
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig, StateSpec

LAYER = LayerConfig(LayerKind.KV, kv_heads=2, key_dim=8, value_dim=16, dtype="float16")
CONFIG = ModelCacheConfig((LAYER, LAYER))


def with_layer(**changes: object) -> ModelCacheConfig:
    return ModelCacheConfig((LAYER, replace(LAYER, **changes)))


OTHERS = {
    "weights": namespace_of("other weights", CONFIG, 16),
    "block size": namespace_of("weights", CONFIG, 32),
    "one layer less": namespace_of("weights", ModelCacheConfig((LAYER,)), 16),
    "one layer more": namespace_of("weights", ModelCacheConfig((LAYER,) * 3), 16),
    "kind": namespace_of("weights", with_layer(kind=LayerKind.ROTATING), 16),
    "heads": namespace_of("weights", with_layer(kv_heads=4), 16),
    "key size": namespace_of("weights", with_layer(key_dim=4), 16),
    "value size": namespace_of("weights", with_layer(value_dim=4), 16),
    "dtype": namespace_of("weights", with_layer(dtype="bfloat16"), 16),
    "window": namespace_of("weights", with_layer(window=64), 16),
    "order of layers": namespace_of(
        "weights", ModelCacheConfig((replace(LAYER, kv_heads=4), LAYER)), 16
    ),
}


def test_a_namespace_is_a_name_that_can_be_a_folder() -> None:
    name = namespace_of("weights", CONFIG, 16)

    assert len(name) == 16
    assert set(name) <= set("0123456789abcdef")
    assert namespace_of("weights", CONFIG, 16) == name


@pytest.mark.parametrize("ingredient", OTHERS)
def test_another_ingredient_is_another_namespace(ingredient: str) -> None:
    """B05, B31: what would give other bytes has other files."""
    assert OTHERS[ingredient] != namespace_of("weights", CONFIG, 16)


def test_no_two_of_them_share_a_namespace() -> None:
    assert len(set(OTHERS.values())) == len(OTHERS)


def test_the_factory_hands_on_every_limit() -> None:
    sizes = CacheSizes(
        block_size=16,
        hot_limit_bytes=1000,
        ssd_limit_bytes=2000,
        pending_limit_bytes=300,
        initial_blocks=3,
        max_blocks=7,
    )

    cache = CacheFactory.build("name", CONFIG, sizes)

    assert cache.namespace == "name"
    assert cache.block_size == 16
    assert CONFIG.bytes_per_token == 2 * 2 * (8 + 16) * 2
    assert cache.pool.limit_bytes == 1000
    assert cache.cold.ledger.limit_bytes == 2000
    assert cache.cold.block_writes.limit_bytes == 300
    assert cache.pool.num_blocks == 3
    assert cache.cold.writable


def test_without_a_cold_tier_nothing_is_to_be_written() -> None:
    cache = CacheFactory.build("name", CONFIG, CacheSizes(16, 1000, 0, 300))

    assert not cache.cold.writable


@pytest.mark.parametrize("block_size", [16, 256, 4096])
@pytest.mark.parametrize("codec", ["fp32", "rht_int8"])
def test_the_bytes_set_aside_for_a_header_are_enough_and_not_many(
    block_size: int, codec: str
) -> None:
    """Or many small files on their way would together exceed the limit."""
    states = tuple(
        StateSpec(f"gdn.{layer}.{place}", shape, "float32")
        for layer in range(24)
        for place, shape in enumerate([(3, 512), (8, 64, 64)])
    )
    kinds = [LayerConfig(LayerKind.RECURRENT, states=states[2 * n : 2 * n + 2]) for n in range(24)]
    config = ModelCacheConfig((*CONFIG.layers, *kinds))
    name, tokens = BlockHash(bytes(32)), PackedTokens(bytes(4 * block_size))
    identity = Identity("n" * 16, name, name, tokens)
    raw = tuple(
        HostTensor(s.name, s.dtype, s.shape, memoryview(bytes(4 * math.prod(s.shape))))
        for s in states
    )
    kv = tuple(
        HostTensor(t.name, t.dtype, t.shape(1), memoryview(bytes(math.prod(t.shape(1)) * 2)))
        for t in config.tensors
    )
    encoded, more = encode_states(codec, identity, Place.TURN, raw, states)

    tensors = (*kv, *encoded)
    header = encode_header(identity, tensors, block_size=block_size, layer_kinds="kv", more=more)

    assert len(header) <= header_bytes(config, block_size) <= 3 * len(header)
