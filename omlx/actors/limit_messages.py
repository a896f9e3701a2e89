"""Messages by which a running server takes over limits: set them, and be told what is in force."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.actors.disk_messages import SetWriting, WriterLimits
from omlx.cache.cold_tier import WritePolicy
from omlx.core.limits import SchedulerLimits
from omlx.kernel.message import Ask

# ── to the scheduler ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pace:
    """What the scheduler goes by now, as it holds it itself."""

    limits: SchedulerLimits
    drain_s: float


@dataclass(frozen=True, slots=True)
class SetPace(Ask[Pace]):
    """New limits; None leaves a thing as it is. Answered with what is in force."""

    limits: SchedulerLimits | None = None
    drain_s: float | None = None


# ── to the paged cache ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What the cache and the writer go by now, as they hold it themselves."""

    hot_bytes: int
    hot_blocks: int
    ssd_bytes: int
    pending_bytes: int
    gdn_pending_bytes: int
    policy: WritePolicy
    writing: WriterLimits | None
    """None: there is no SSD tier."""


@dataclass(frozen=True, slots=True)
class SetLimits(Ask[CacheLimits]):
    """New limits, lower or higher ones; None leaves one as it is. Answered with those in force."""

    hot_bytes: int | None = None
    hot_blocks: int | None = None
    """Most blocks of the RAM tier, however small; a pool that is larger already does not shrink."""
    ssd_bytes: int | None = None
    pending_bytes: int | None = None
    gdn_pending_bytes: int | None = None
    policy: WritePolicy | None = None
    gdn_storage: str | None = None
    """Only told on; the scheduler decides where a checkpoint goes."""
    writing: SetWriting | None = None
    """For the writer."""
