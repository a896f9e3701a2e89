"""Counters of the cache, in the words of the dashboard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Monotonic since start. hits and misses count block look-ups."""

    hits: int = 0
    misses: int = 0
    cow_copies: int = 0
    evictions_ram: int = 0
    """Blocks that left RAM without a copy elsewhere."""
    evictions_ssd: int = 0
    """Files removed to make room."""
    shared_blocks: int = 0
    ssd_written_bytes: int = 0
    ssd_written_files: int = 0
    ssd_restored_bytes: int = 0
    pending_stops: int = 0
    """Chains that stopped being persisted because the writer had no room."""
    corrupt_blocks: int = 0
    gdn_checkpoint_loads: int = 0
    gdn_checkpoint_walkbacks: int = 0
    """Checkpoints that were granted and could not be read: the one before was taken."""
    gdn_decode_failures: int = 0
