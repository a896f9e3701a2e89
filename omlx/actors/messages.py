"""Every message, grouped by who receives it, in the order of a request's path."""

from __future__ import annotations

from dataclasses import dataclass, field

from omlx.cache.block_file import Identity
from omlx.cache.blocks import BlockHash, PackedTokens
from omlx.cache.checkpoints import Place
from omlx.cache.tickets import BlockRef, ReuseEnded, StoreTicket, WriteTicket
from omlx.core.chat import Conversation
from omlx.core.events import ChoiceEnded, Ended, TextDelta
from omlx.core.plan import (
    HostBlock,
    LostFile,
    Settled,
    SettleWork,
    StepFailed,
    StepPlan,
    StepResult,
    Uid,
)
from omlx.core.sequence import Request
from omlx.core.usage import (
    CacheGauges,
    EngineGauges,
    GdnGauges,
    ModelFacts,
    RequestRecord,
    RunningRow,
)
from omlx.kernel.message import Ask, Message
from omlx.kernel.stream import Stream

# ── to the tokenizer ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rendered:
    prompt: str
    tokens: tuple[int, ...]
    num_system: int = 0
    """Tokens before what the first user wrote; 0 where nobody needs to know."""


@dataclass(frozen=True, slots=True)
class Render(Ask[Rendered]):
    """Template and token ids of a conversation. Rejected when the template refuses it."""

    conversation: Conversation


TokenizerMessage = Render


# ── to the scheduler ─────────────────────────────────────────────────────────────────────────


GenerationStream = Stream[TextDelta | ChoiceEnded | Ended]


@dataclass(frozen=True, slots=True)
class Accepted:
    uid: Uid


@dataclass(frozen=True, slots=True)
class Submit(Ask[Accepted]):
    """Generate. Rejected with TooManyRequests when as many run and wait as may.

    The stream gets TextDelta items, a ChoiceEnded for each choice but the last to end, and one
    Ended; an error ends it as an exception.
    """

    request: Request
    stream: GenerationStream


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Stop generating. Harmless for a request that is unknown or has ended."""

    uid: Uid


@dataclass(frozen=True, slots=True)
class CacheSettled(Message):
    """To self: the cache answered, or failed."""

    outcome: Settled | Exception


@dataclass(frozen=True, slots=True)
class StepDone(Message):
    """To self: the engine ran the plan, or failed."""

    plan: StepPlan
    outcome: StepResult | StepFailed | Exception


@dataclass(frozen=True, slots=True)
class BlocksRead(Message):
    """To self: cold blocks were read, up to the first that could not be."""

    uid: Uid
    outcome: ReadOutcome | Exception


@dataclass(frozen=True, slots=True)
class Tick(Message):
    """To self, each second: report, flush what is dirty, and look whether a client has gone."""


@dataclass(frozen=True, slots=True)
class DrainExpired(Message):
    """To self, while stopping: what still runs has had its time."""


SchedulerMessage = Submit | Cancel | CacheSettled | StepDone | BlocksRead | DrainExpired | Tick


# ── to the paged cache ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Settle(Ask[Settled]):
    work: SettleWork


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A valid block file that was there at start."""

    identity: Identity
    nbytes: int
    used_at: float
    """Unix seconds of its last use."""
    carries: Place | None = None
    """Of a block: the checkpoint that is embedded in its file."""


@dataclass(frozen=True, slots=True)
class FilesFound(Message):
    """To self: the scan of the block files has ended."""

    outcome: tuple[FoundFile, ...] | Exception


@dataclass(frozen=True, slots=True)
class StartOver(Ask[None]):
    """The scheduler begins a new life: whatever its former one held, filled or ran is void."""


@dataclass(frozen=True, slots=True)
class BlockWritten(Message):
    identity: Identity
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockLost(Message):
    """A block could not be written. ``tier_down``: nor will the next ones."""

    block_hash: BlockHash
    reason: str
    tier_down: bool


@dataclass(frozen=True, slots=True)
class WriterStarted(Message):
    """What the writer was told in its former life may not have been done."""


@dataclass(frozen=True, slots=True)
class WriterCaughtUp(Message):
    """To self: the writer has passed what it was told before it was asked, or is gone."""

    outcome: Exception | None


@dataclass(frozen=True, slots=True)
class Cleared:
    freed_bytes: int
    freed_blocks: int
    kept_in_use: int


@dataclass(frozen=True, slots=True)
class ClearCache(Ask[Cleared]):
    hot: bool
    ssd: bool


@dataclass(frozen=True, slots=True)
class Probed:
    cached_ram: int
    cached_ssd: int
    reuse_ended: ReuseEnded


@dataclass(frozen=True, slots=True)
class ProbeCache(Ask[Probed]):
    """How much of a prompt a look-up would find. Changes and counts nothing."""

    tokens: PackedTokens
    salt: str = ""


@dataclass(frozen=True, slots=True)
class IsScanned(Ask[bool]):
    """Whether every file that was there at start is known."""


PagedCacheMessage = (
    IsScanned
    | StartOver
    | Settle
    | FilesFound
    | BlockWritten
    | BlockLost
    | WriterStarted
    | WriterCaughtUp
    | ClearCache
    | ProbeCache
    | Tick
)


# ── to the SSD reader ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    payloads: tuple[HostBlock, ...]
    """In the order asked for, up to the first block that could not be read."""
    lost: LostFile | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReadBlocks(Ask[ReadOutcome]):
    """Read and verify blocks of one chain, in order."""

    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class ScanFiles(Ask[tuple[FoundFile, ...]]):
    """Every valid block file of the served namespace, from the headers alone.

    Rejected when they can't be listed now.
    """


SsdReaderMessage = ReadBlocks | ScanFiles


# ── to the model runner ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RunStep(Ask["StepResult | StepFailed"]):
    plan: StepPlan


ModelRunnerMessage = RunStep | StartOver


# ── to the SSD writer ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WriteBlock(Message):
    """Write a block's file; answered to the cache by BlockWritten or BlockLost."""

    ticket: StoreTicket | WriteTicket
    payload: HostBlock = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeleteBlocks(Message):
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class CatchUp(Ask[None]):
    """Answered when everything that was sent before is done and reported."""


SsdWriterMessage = WriteBlock | DeleteBlocks | CatchUp


# ── to stats ─────────────────────────────────────────────────────────────────────────────────


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
class Snapshot(Ask[str]):
    """The statistics as JSON text, as the admin API gives them."""


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
class Feed(Ask["Stream[str]"]):
    """A stream of server-sent events, each a whole ``event:/id:/data:`` frame.

    First ``stats``, then one each second, and ``request`` for each request that ends. A reader
    that falls behind loses the oldest, and its stream ends when it has read nothing for a minute,
    and when the server stops. Rejected with TooManyReaders.
    """

    after: int | None = None
    """The last id that the reader saw, to get the ``request`` events that it missed."""


@dataclass(frozen=True, slots=True)
class TotalsSaved(Message):
    """To self: the all-time totals were written, or could not be."""

    error: Exception | None


StatsMessage = (
    RequestEnded
    | RequestRejected
    | EngineReport
    | CacheReport
    | ModelServed
    | Snapshot
    | RecentRequests
    | ReadHistory
    | FindRequest
    | Feed
    | TotalsSaved
    | Tick
)
