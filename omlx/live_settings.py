"""What the running server goes by, setting by setting, and changing it while it runs.

The settings file says what a start would take; the actors hold what is so. ``LiveSettings`` tells
each actor what concerns it and then believes nobody but the actor: in force is what its owner
answers. What no actor can take over is in force after a restart.

Actors are built from here as well, so one that crashed comes back with what was set last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omlx.actors.disk_messages import SetWriting, WriterLimits
from omlx.actors.limit_messages import CacheLimits, Pace, SetLimits, SetPace
from omlx.budget import make_budget, make_plan
from omlx.cache.cold_tier import WritePolicy
from omlx.cache.factory import CacheSizes
from omlx.cache.hybrid_cache import LayerKind
from omlx.core.limits import (
    PREFETCH_BYTES_MAX,
    PREFETCH_SHARE,
    RESTORE_BYTES_A_STEP,
    SchedulerLimits,
)
from omlx.core.memory import ChunkPeak
from omlx.engine.load import LoadedModel
from omlx.kernel.mailbox import Ref
from omlx.logs import LEVELS, set_level
from omlx.settings import Loaded, Settings, SettingsError
from omlx.start_checks import check_start
from omlx.web.edge import Edge, InForce

CHUNK_TOKENS = {"cpu": 128, "metal": 2048, "cuda": 2048}
"""Prefill chunks by backend, under the ceiling of ``prefill_step_tokens``. On CPU smaller ones
are faster: 1,490 tokens of SmolLM2 in float32 took 75 tok/s at 2048 and 112 tok/s at 128."""

FLUSH_BYTES_PER_S = 50_000_000
"""Slower than any disk we met; the deadline for the last writes follows from it."""

DRAIN_S = 5.0
ANSWER_S = 10.0
"""For an actor to take over its limits. Removing files is not waited for."""


@dataclass(frozen=True)
class Started:
    """What does not change while the server runs."""

    model: LoadedModel
    working_set_bytes: int | None
    root: Path | None
    """Of the SSD tier; None: it is off."""
    has_files: bool
    """Whether that tier was built."""
    peak: ChunkPeak
    """Measured when the model was loaded."""


@dataclass(frozen=True)
class Targets:
    """Everything that the actors are built with, or told, for given settings."""

    sizes: CacheSizes
    limits: SchedulerLimits
    codec: str
    storage: str
    drain_s: float

    @property
    def flush_s(self) -> float:
        """What the last writes may take."""
        return DRAIN_S + self.sizes.pending_limit_bytes / FLUSH_BYTES_PER_S


def targets_of(loaded: Loaded, started: Started) -> Targets:
    """Resolve settings to numbers. Asks the file system for the size of the volume."""
    settings, model = loaded.settings, started.model
    config, ahead = model.cache, model.backend != "cpu"
    budget = make_budget(loaded, config, started.working_set_bytes, started.root)
    sizes, chunk = budget.sizes, chunk_tokens(loaded, model)
    storage = resolve_storage(settings.gdn_snapshot_storage, ssd=started.has_files)
    limits = SchedulerLimits(
        max_running=settings.max_concurrent_requests,
        max_queued=settings.max_queued_requests,
        max_context=min(settings.max_context or model.max_context, model.max_context),
        chunk_tokens=chunk,
        block_size=sizes.block_size,
        decode_share=settings.decode_share,
        caching=settings.cache_enabled and config.why_not_cacheable is None,
        through=sizes.ssd_write_policy is WritePolicy.THROUGH,
        feeds_ahead=ahead,
        checkpoint_interval=settings.gdn_checkpoint_interval if config.is_recurrent else None,
        embedded=storage == "embedded",
        memory=make_plan(budget, config, model.weight_bytes, chunk, model.vocab_size, started.peak),
        cut_before_decode=config.is_recurrent or config.count(LayerKind.ROTATING) > 0,
        restore_tokens=RESTORE_BYTES_A_STEP // max(1, config.bytes_per_token) + 1,
        hot_is_free=ahead,
        prefetch_bytes=min(PREFETCH_BYTES_MAX, sizes.hot_limit_bytes // PREFETCH_SHARE),
    )
    codec = settings.gdn_sidecar_state_dtype
    return Targets(sizes, limits, codec, storage, settings.drain_timeout_s)


def chunk_tokens(loaded: Loaded, model: LoadedModel) -> int:
    """Most tokens of prompts that are computed at once."""
    return min(loaded.settings.prefill_step_tokens, CHUNK_TOKENS[model.backend])


def resolve_storage(setting: str, *, ssd: bool) -> str:
    """What ``gdn_snapshot_storage`` means here: auto is sidecars where there are files at all."""
    if setting != "auto":
        return setting
    return "ssd_sidecar" if ssd else "embedded"


# ── who holds what ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Facts:
    """What the owners of live settings hold, or are to hold."""

    cache: CacheLimits
    pace: Pace
    edge: Settings
    max_context: int
    log_level: int


def _writer(facts: Facts, field: str) -> object:
    return None if facts.cache.writing is None else getattr(facts.cache.writing, field)


READERS: dict[str, Callable[[Facts], object]] = {
    "hot_cache_max_size": lambda facts: facts.cache.hot_bytes,
    "ssd_cache_max_size": lambda facts: facts.cache.ssd_bytes,
    "ssd_free_space_floor": lambda facts: _writer(facts, "floor_bytes"),
    "ssd_write_policy": lambda facts: (
        str(facts.cache.policy)
        if (facts.cache.policy is WritePolicy.THROUGH) is facts.pace.limits.through
        else "changing"
    ),
    "ssd_pending_max_size": lambda facts: facts.cache.pending_bytes,
    "gdn_ssd_pending_max_size": lambda facts: facts.cache.gdn_pending_bytes,
    "gdn_sidecar_state_dtype": lambda facts: _writer(facts, "codec"),
    "gdn_snapshot_storage": lambda facts: (
        "embedded" if facts.pace.limits.embedded else "ssd_sidecar"
    ),
    "max_concurrent_requests": lambda facts: facts.pace.limits.max_running,
    "max_queued_requests": lambda facts: facts.pace.limits.max_queued,
    "prefill_step_tokens": lambda facts: facts.pace.limits.chunk_tokens,
    "decode_share": lambda facts: facts.pace.limits.decode_share,
    "max_context": lambda facts: min(facts.pace.limits.max_context, facts.max_context),
    "drain_timeout_s": lambda facts: facts.pace.drain_s,
    "log_level": lambda facts: facts.log_level,
}
"""Who holds each live setting. What is not here, handlers read from the edge at each request."""


def read_fact(name: str, facts: Facts) -> object:
    reader = READERS.get(name)
    return getattr(facts.edge, name) if reader is None else reader(facts)


class LiveSettings:
    def __init__(self, loaded: Loaded, started: Started, edge: Edge) -> None:
        self.loaded = loaded
        self.started = started
        self.targets = targets_of(loaded, started)
        self._edge = edge
        self._allow: Callable[[str, float], None] | None = None
        self._cache: Ref[Any] | None = None
        self._scheduler: Ref[Any] | None = None

    def reach(
        self, cache: Ref[Any], scheduler: Ref[Any], allow: Callable[[str, float], None]
    ) -> None:
        """Learn the actors' addresses, and how to give one of them more time for its end."""
        self._cache, self._scheduler, self._allow = cache, scheduler, allow

    async def check(self, changed: Loaded, names: Iterable[str]) -> None:
        """See ``RunningSettings``."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.to_thread(check_start, self.loaded, changed, frozenset(names))
        except TimeoutError:
            raise SettingsError("The disk does not answer. Try again later.") from None

    async def apply(self, loaded: Loaded) -> None:
        """See ``RunningSettings``."""
        async with asyncio.timeout(ANSWER_S):
            targets = await asyncio.to_thread(targets_of, loaded, self.started)
        self.loaded, self.targets = loaded, targets
        self._edge.loaded, self._edge.max_context = loaded, targets.limits.max_context
        set_level(loaded.settings.log_level)
        assert self._allow is not None, "the actors are built"
        self._allow("scheduler", targets.drain_s + targets.flush_s)
        if self.started.has_files:
            self._allow("ssd_writer", targets.flush_s)
        await self._ask(_cache_limits(targets), SetPace(targets.limits, targets.drain_s))

    async def read(self, names: Iterable[str]) -> dict[str, InForce]:
        """See ``RunningSettings``."""
        cache, pace = await self._ask(SetLimits(), SetPace())
        edge = self._edge
        level = logging.getLogger().getEffectiveLevel()
        found = Facts(cache, pace, edge.loaded.settings, edge.max_context, level)
        wanted = self._wanted()
        values = {name: (read_fact(name, found), read_fact(name, wanted)) for name in names}
        return {
            name: InForce(value == want and not self._tier_is_missing(name), value)
            for name, (value, want) in values.items()
        }

    async def _ask(self, limits: SetLimits, pace: SetPace) -> tuple[CacheLimits, Pace]:
        assert self._cache is not None and self._scheduler is not None, "the actors are built"
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.gather(self._cache.ask(limits), self._scheduler.ask(pace))

    def _wanted(self) -> Facts:
        settings, targets = self.loaded.settings, self.targets
        sizes = targets.sizes
        writing = WriterLimits(targets.codec, sizes.ssd_floor_bytes)
        return Facts(
            CacheLimits(
                sizes.hot_limit_bytes,
                sizes.max_blocks,
                sizes.ssd_limit_bytes,
                max(1, sizes.pending_limit_bytes),
                sizes.gdn_pending_limit_bytes,
                sizes.ssd_write_policy,
                writing if self.started.has_files else None,
            ),
            Pace(targets.limits, targets.drain_s),
            settings,
            targets.limits.max_context,
            LEVELS[settings.log_level],
        )

    def _tier_is_missing(self, name: str) -> bool:
        """Whether an SSD tier is wanted that was not built at the start."""
        wanted = self.targets.limits.caching and not self.loaded.settings.ssd_cache_max_size.is_zero
        return name == "ssd_cache_max_size" and wanted and not self.started.has_files


def _cache_limits(targets: Targets) -> SetLimits:
    sizes = targets.sizes
    return SetLimits(
        sizes.hot_limit_bytes,
        sizes.max_blocks,
        sizes.ssd_limit_bytes,
        sizes.pending_limit_bytes,
        sizes.gdn_pending_limit_bytes,
        sizes.ssd_write_policy,
        targets.storage,
        SetWriting(targets.codec, sizes.ssd_floor_bytes),
    )
