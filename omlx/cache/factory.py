"""Puts the cache together from what the settings and the model say."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from omlx.cache.cold_tier import WritePolicy
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.cache.prefix_cache import BlockAwarePrefixCache


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Every limit of the cache, resolved to numbers."""

    block_size: int
    hot_limit_bytes: int
    ssd_limit_bytes: int
    pending_limit_bytes: int
    initial_blocks: int = 256
    max_blocks: int = 1 << 20
    checkpoint_interval: int = 2048
    gdn_pending_limit_bytes: int = 512_000_000
    ssd_floor_bytes: int = 0
    """Free space of the volume that is not written into."""
    ssd_write_policy: WritePolicy = WritePolicy.BEHIND


def namespace_of(fingerprint: str, config: ModelCacheConfig, block_size: int) -> str:
    """16 hex digits for everything that determines a block's bytes; another value, other files.

    ``fingerprint`` covers weights, config and tokenizer; the layout covers layer kinds, shapes
    and KV dtype.
    """
    parts = ("3", fingerprint, config.describe(), str(block_size))
    joined = b"".join(len(p).to_bytes(4, "little") + p for p in (t.encode() for t in parts))
    return hashlib.sha256(joined).hexdigest()[:16]


def header_bytes(config: ModelCacheConfig, block_size: int) -> int:
    """What the header of a file takes, or somewhat more: names, token ids, a line a tensor."""
    return 1024 + 6 * block_size + 250 * (len(config.tensors) + 2 * len(config.states))


class CacheFactory:
    @staticmethod
    def build(namespace: str, config: ModelCacheConfig, sizes: CacheSizes) -> BlockAwarePrefixCache:
        return BlockAwarePrefixCache(
            namespace=namespace,
            block_size=sizes.block_size,
            bytes_per_token=config.bytes_per_token,
            hot_limit_bytes=sizes.hot_limit_bytes,
            ssd_limit_bytes=sizes.ssd_limit_bytes,
            pending_limit_bytes=sizes.pending_limit_bytes,
            gdn_pending_limit_bytes=sizes.gdn_pending_limit_bytes,
            checkpoint_bytes=config.checkpoint_bytes,
            header_bytes=header_bytes(config, sizes.block_size),
            initial_blocks=sizes.initial_blocks,
            max_blocks=sizes.max_blocks,
            write_policy=sizes.ssd_write_policy,
        )
