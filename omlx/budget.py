"""How much memory and disk everything may take, resolved to numbers and said line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from omlx.cache.cold_tier import WritePolicy
from omlx.cache.factory import CacheSizes
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.core.memory import ChunkPeak, MemoryPlan, RowMemory
from omlx.settings import Loaded, Settings

AUTO_SSD_SHARE = 0.10
"""Of the volume: what the SSD tier takes at most unless the limit was set by hand."""

AUTO_PENDING_SHARE = 0.02
"""Of RAM: blocks that wait to be written."""

AUTO_PENDING_BLOCKS = 8

FLOAT32_SHARE = 0.5
"""Of the memory budget: what float32 weights may take on CPU."""

RESERVE_SHARE = 0.05
"""Of the budget: the server itself, and what MLX keeps to use again."""

NOT_MEASURED = ChunkPeak()


@dataclass(frozen=True, slots=True)
class Budget:
    total_bytes: int
    """What the device or the machine may hold for us."""
    pool: str
    """Where ``total_bytes`` comes from, in words."""
    sizes: CacheSizes
    on_device: bool = False
    """Whether it is memory of a device that has its own, apart from what the host holds."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One taker of memory, and at most how much."""

    what: str
    nbytes: int
    why: str


def make_budget(
    loaded: Loaded,
    config: ModelCacheConfig,
    working_set_bytes: int | None,
    ssd_root: Path | None,
) -> Budget:
    """``ssd_root`` None: the SSD tier is off."""
    settings = loaded.settings
    ram = host_memory_bytes()
    if working_set_bytes is not None:
        whole, pool = working_set_bytes, "the working set of the device"
    elif (limit := cgroup_limit_bytes()) is not None and limit <= ram:
        whole, pool = limit, "the cgroup's limit"
    else:
        whole, pool = ram, "the RAM"
    total = settings.memory_budget.resolve(whole)
    share = settings.memory_budget if settings.memory_budget.is_percent else "memory_budget"
    cacheable = settings.cache_enabled and config.why_not_cacheable is None
    block_bytes = settings.paged_cache_block_size * config.bytes_per_token
    hot = settings.hot_cache_max_size.resolve(total) if cacheable else 0
    ssd = floor = 0
    if cacheable and ssd_root is not None:
        ssd, floor = ssd_limits(loaded, ssd_root)
    pending = settings.ssd_pending_max_size
    if isinstance(pending, str):
        pending_bytes = max(int(AUTO_PENDING_SHARE * ram), AUTO_PENDING_BLOCKS * block_bytes)
    else:
        pending_bytes = pending.resolve(ram)
    max_blocks = settings.max_cache_blocks
    return Budget(
        total,
        f"{share} of {pool}, {gigabytes(whole)}",
        CacheSizes(
            block_size=settings.paged_cache_block_size,
            hot_limit_bytes=hot,
            ssd_limit_bytes=ssd,
            pending_limit_bytes=pending_bytes,
            initial_blocks=settings.initial_cache_blocks,
            gdn_pending_limit_bytes=settings.gdn_ssd_pending_max_size.resolve(ram),
            checkpoint_interval=settings.gdn_checkpoint_interval,
            ssd_floor_bytes=floor,
            ssd_write_policy=WritePolicy(settings.ssd_write_policy),
            # A tail can be as small as one token, so bytes are the limit that counts.
            max_blocks=max_blocks or max(256, 16 * hot // max(1, block_bytes)),
        ),
        # A Mac's GPU works in the memory of the machine.
        on_device=working_set_bytes is not None and sys.platform != "darwin",
    )


def ssd_limits(loaded: Loaded, root: Path) -> tuple[int, int]:
    """(what the SSD tier takes at most, what it leaves free) of the volume, in bytes."""
    status = os.statvfs(root)
    volume = status.f_blocks * status.f_frsize
    limit = loaded.settings.ssd_cache_max_size.resolve(volume)
    floor = loaded.settings.ssd_free_space_floor.resolve(volume)
    if not loaded.is_set("ssd_cache_max_size"):
        limit = min(limit, int(AUTO_SSD_SHARE * volume))
    return limit, floor


def host_memory_bytes() -> int:
    """RAM, or what the control group leaves of it."""
    ram, limit = int(psutil.virtual_memory().total), cgroup_limit_bytes()
    return ram if limit is None else min(ram, limit)


def cgroup_limit_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """What this process's control group may hold; None where there is no limit.

    In a container the group is the root; as a service it is named in ``own``, and each group
    above it may have a limit as well.
    """
    places = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            if number == "0":
                places.append(root / group / "memory.max")
            elif "memory" in controllers.split(","):
                places.append(root / "memory" / group / "memory.limit_in_bytes")
    limits: list[int] = []
    for place in places:
        try:
            limits.append(int(place.read_text()))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return min(limits, default=None)


# ── line by line ─────────────────────────────────────────────────────────────────────────────


def make_plan(
    budget: Budget,
    config: ModelCacheConfig,
    weight_bytes: int,
    chunk_tokens: int,
    vocab_size: int = 0,
    peak: ChunkPeak = NOT_MEASURED,
) -> MemoryPlan:
    """What requests are admitted by. ``peak``: see ``engine/measure.py``."""
    return MemoryPlan(
        budget.total_bytes,
        weight_bytes,
        int(RESERVE_SHARE * budget.total_bytes),
        budget.sizes.hot_limit_bytes,
        RowMemory.of(config, chunk_tokens, vocab_size, peak),
        host_is_apart=budget.on_device,
    )


def memory_lines(
    budget: Budget, plan: MemoryPlan, settings: Settings, config: ModelCacheConfig, context: int
) -> tuple[MemoryLine, ...]:
    """Who may take how much at most, all at once; not more than there is.

    ``context``: tokens that a row may have.
    """
    sizes, rows, row = budget.sizes, settings.max_concurrent_requests, plan.row
    longest = plan.longest(context)
    chunk = row.computing(1, longest, longest)
    lines = [
        MemoryLine("weights", plan.weight_bytes, "the model"),
        MemoryLine("reserve", plan.reserve_bytes, "the server itself, what MLX keeps to reuse"),
        MemoryLine(
            "computing",
            chunk,
            f"{row.chunk_tokens:,} tokens of a prompt behind {longest:,} others"
            + (", as measured" if row.peak != NOT_MEASURED else ""),
        ),
    ]
    left = room = max(0, plan.room_bytes - chunk)
    if sizes.ssd_limit_bytes and not budget.on_device:
        waiting = sizes.pending_limit_bytes
        waiting += sizes.gdn_pending_limit_bytes if config.is_recurrent else 0
        waiting = min(waiting, left)
        left -= waiting
        lines.append(MemoryLine("writes that wait", waiting, "copies on their way to the SSD"))
    if sizes.hot_limit_bytes:
        block = sizes.block_size * config.bytes_per_token
        hot = min(sizes.hot_limit_bytes, left)
        left -= hot
        text = f"{hot // max(1, block):,} blocks of {sizes.block_size} tokens, "
        text += f"{gigabytes(block)} each; gives way to live KV"
        lines.append(MemoryLine("hot tier", hot, text))
    wanted = row.caches(rows, context)
    text = f"{rows} rows of {context:,} tokens"
    if wanted > left:
        text += f" would take {gigabytes(wanted)}; up to {gigabytes(room)} as others give way, "
        text += "beyond it requests wait"
    lines.append(MemoryLine("live KV", min(wanted, left), text))
    return tuple(lines)


def memory_text(budget: Budget, lines: Sequence[MemoryLine]) -> list[str]:
    """The lines as they are printed, a sum at their end."""
    asked = sum(line.nbytes for line in lines)
    spare = budget.total_bytes - asked
    verdict = f"{gigabytes(spare)} to spare" if spare >= 0 else f"{gigabytes(-spare)} too much"
    return [
        f"{gigabytes(budget.total_bytes)}: {budget.pool}",
        *(f"{gigabytes(line.nbytes):>9}  {line.what}: {line.why}" for line in lines),
        f"{gigabytes(asked):>9}  in all, at most; {verdict}",
    ]


def memory_warning(plan: MemoryPlan, context: int) -> str | None:
    """What to do when memory is less than a single long request wants; None when it is not."""
    longest = plan.longest(context)
    if longest < 2:
        return (
            f"weights and reserve leave no room for any request in the memory budget of "
            f"{gigabytes(plan.total_bytes)}; serve a smaller model or raise memory_budget"
        )
    if longest < context:
        return (
            f"a prompt and its answer have room for {longest:,} tokens together, not for "
            f"{context:,}; raise memory_budget, or lower max_context to say so"
        )
    return None


def gigabytes(count: int) -> str:
    """Bytes for people.

    >>> gigabytes(1_500_000_000), gigabytes(12_000_000)
    ('1.50 GB', '12.0 MB')
    """
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB"
