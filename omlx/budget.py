"""How much memory and disk everything may take, resolved to numbers and said line by line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from omlx.cache.factory import CacheSizes
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.settings import Loaded

AUTO_SSD_SHARE = 0.10
"""Of the volume: what the SSD tier takes at most unless the limit was set by hand."""

AUTO_PENDING_SHARE = 0.02
"""Of RAM: blocks that wait to be written."""

AUTO_PENDING_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Budget:
    total_bytes: int
    """What the device or the machine may hold for us."""
    pool: str
    """What ``total_bytes`` is a share of, in words."""
    sizes: CacheSizes


def make_budget(
    loaded: Loaded,
    config: ModelCacheConfig,
    working_set_bytes: int | None,
    ssd_root: Path | None,
) -> Budget:
    """``ssd_root`` None: the SSD tier is off."""
    settings = loaded.settings
    ram = host_memory_bytes()
    if working_set_bytes is None:
        whole, pool = ram, "memory of this machine"
    else:
        whole, pool = working_set_bytes, "working set of the device"
    total = settings.memory_budget.resolve(whole)
    cacheable = settings.cache_enabled and config.why_not_cacheable is None
    block_bytes = settings.paged_cache_block_size * config.bytes_per_token
    hot = settings.hot_cache_max_size.resolve(total) if cacheable else 0
    ssd = _ssd_limit(loaded, ssd_root) if cacheable and ssd_root is not None else 0
    pending = settings.ssd_pending_max_size
    if isinstance(pending, str):
        pending_bytes = max(int(AUTO_PENDING_SHARE * ram), AUTO_PENDING_BLOCKS * block_bytes)
    else:
        pending_bytes = pending.resolve(ram)
    max_blocks = settings.max_cache_blocks
    return Budget(
        total,
        pool,
        CacheSizes(
            block_size=settings.paged_cache_block_size,
            hot_limit_bytes=hot,
            ssd_limit_bytes=ssd,
            pending_limit_bytes=pending_bytes,
            initial_blocks=settings.initial_cache_blocks,
            gdn_pending_limit_bytes=settings.gdn_ssd_pending_max_size.resolve(ram),
            checkpoint_interval=settings.gdn_checkpoint_interval,
            # A tail can be as small as one token, so bytes are the limit that counts.
            max_blocks=max_blocks or max(256, 16 * hot // max(1, block_bytes)),
        ),
    )


def _ssd_limit(loaded: Loaded, root: Path) -> int:
    status = os.statvfs(root)
    volume = status.f_blocks * status.f_frsize
    limit = loaded.settings.ssd_cache_max_size.resolve(volume)
    if loaded.is_set("ssd_cache_max_size"):
        return limit
    return min(limit, int(AUTO_SSD_SHARE * volume))


def host_memory_bytes() -> int:
    """RAM, or what the control group leaves of it."""
    ram = int(psutil.virtual_memory().total)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(name).read_text())
        except (OSError, ValueError):
            continue
        ram = min(ram, limit)
    return ram


def gigabytes(count: int) -> str:
    """Bytes for people.

    >>> gigabytes(1_500_000_000), gigabytes(12_000_000)
    ('1.50 GB', '12.0 MB')
    """
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB"
