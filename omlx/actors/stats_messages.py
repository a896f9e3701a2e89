"""Every message to those who count and show."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.core.history import Kept
from omlx.core.usage import (
    CacheGauges,
    EngineGauges,
    GdnGauges,
    MemoryGauges,
    ModelFacts,
    RequestRecord,
    RunningRow,
)
from omlx.kernel.message import Ask, Message, Tick
from omlx.kernel.stream import Stream


@dataclass(frozen=True, slots=True)
class RequestEnded(Message):
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class RequestRejected(Message):
    """Refused at admission, 429 or 503."""


@dataclass(frozen=True, slots=True)
class EngineReport(Message):
    """From the scheduler, each second while it lives."""

    gauges: EngineGauges
    rows: tuple[RunningRow, ...]
    memory: MemoryGauges | None = None
    """None: nobody counts it."""


@dataclass(frozen=True, slots=True)
class CacheReport(Message):
    """From the paged cache, each second while it lives."""

    gauges: CacheGauges
    gdn: GdnGauges | None = None
    """None: the model keeps no recurrent states."""


@dataclass(frozen=True, slots=True)
class ModelServed(Message):
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class SettingsChanged(Message):
    """Settings of these names were saved: an event for those who look."""

    names: tuple[str, ...]
    time: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Snapshot(Ask[str]):
    """The statistics as JSON text, as the admin API gives them."""


@dataclass(frozen=True, slots=True)
class ReadMetrics(Ask[str]):
    """The statistics as JSON text, and how requests are spread; for /metrics."""


@dataclass(frozen=True, slots=True)
class RecentRequests(Ask[str]):
    """Running and ended requests as JSON text, newest first."""

    limit: int


@dataclass(frozen=True, slots=True)
class ReadHistory(Ask[str]):
    """Token counts over time as JSON text. ``resolution`` is a key of ``RESOLUTIONS``."""

    resolution: str


@dataclass(frozen=True, slots=True)
class FindRequest(Ask["str | None"]):
    """One running or ended request as JSON text; None when it is unknown or forgotten."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Feed(Ask[Stream[str]]):
    """A stream of server-sent events, each a whole ``event:/id:/data:`` frame.

    First ``stats``, then one each second, ``request`` for each request that ends and ``settings``
    for each change of them. A reader that falls behind loses the oldest, and its stream ends when
    it has read nothing for a minute, and when the server stops. Rejected with TooManyReaders.
    """

    after: int | None = None
    """The last id that the reader saw, to get the ``request`` events that it missed."""


@dataclass(frozen=True, slots=True)
class TotalsSaved(Message):
    """To self: the all-time totals were written, or could not be."""

    error: Exception | None


@dataclass(frozen=True, slots=True)
class HistorySaved(Message):
    """To self: what changed of the history was written, or could not be."""

    changed: Kept
    error: Exception | None


StatsMessage = (
    RequestEnded
    | RequestRejected
    | EngineReport
    | CacheReport
    | ModelServed
    | SettingsChanged
    | Snapshot
    | ReadMetrics
    | RecentRequests
    | ReadHistory
    | FindRequest
    | Feed
    | TotalsSaved
    | HistorySaved
    | Tick
)
