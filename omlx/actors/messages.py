"""Every message on a request's path, grouped by who receives it, in the order of that path."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.actors.admin_messages import CancelRequest
from omlx.actors.disk_messages import (
    FilesVerified,
    StopVerifying,
    TierChecked,
    VerifyFiles,
)
from omlx.actors.limit_messages import SetLimits, SetPace
from omlx.cache.block_file import Identity
from omlx.cache.blocks import BlockHash, BlockId, PackedTokens
from omlx.cache.checkpoints import Place
from omlx.cache.one_chain import Whereabouts
from omlx.cache.reuse_by_size import ReuseBySize
from omlx.cache.tickets import BlockRef, ReuseEnded
from omlx.cache.tree_view import TreeView
from omlx.core.chat import Conversation
from omlx.core.diagnosis import Comparison, Fingerprint, Occasion
from omlx.core.events import ChoiceEnded, Ended, TextDelta
from omlx.core.plan import (
    HostBlock,
    Settled,
    SettleWork,
    StepFailed,
    StepPlan,
    StepResult,
    Uid,
)
from omlx.core.preview import PreviewResult, PreviewWork
from omlx.core.reads import ReadOutcome
from omlx.core.sequence import Request
from omlx.disk.census import CensusSlice
from omlx.kernel.message import Ask, Message, Tick
from omlx.kernel.stream import Stream

# ── to the tokenizer ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rendered:
    prompt: str
    tokens: tuple[int, ...]
    num_system: int = 0
    """Tokens before what the first user wrote; 0 where nobody needs to know."""
    hints: tuple[int, ...] = ()
    """Tokens before each of the client's cache breakpoints; none where nobody needs to know."""
    fingerprint: Fingerprint | None = None
    comparison: Comparison | None = None
    """With the earlier request that was asked for, or the one most like it; None: there is none."""


@dataclass(frozen=True, slots=True)
class Render(Ask[Rendered]):
    """Template and token ids of a conversation. Rejected when the template refuses it.

    ``occasion`` None: it is compared with nothing.
    """

    conversation: Conversation
    occasion: Occasion | None = None


@dataclass(frozen=True, slots=True)
class Remember(Message):
    """Compare later prompts with this one."""

    request_id: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Tokenize(Ask["tuple[int, ...]"]):
    """The ids of raw text. See ``core/render.py`` for the two switches."""

    text: str
    add_special: bool
    parse_special: bool


@dataclass(frozen=True, slots=True)
class Detokenize(Ask[str]):
    """The text of ids, which are all in the vocabulary; control tokens are spelled out."""

    tokens: tuple[int, ...]


TokenizerMessage = Render | Remember | Tokenize | Detokenize


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
class ColdKnown(Message):
    """To self: what could be read for a request while it waits."""

    uid: Uid
    outcome: tuple[tuple[BlockRef, int], ...] | Exception


@dataclass(frozen=True, slots=True)
class Paused(Message):
    """To self: time to look whether the writer has room by now."""


@dataclass(frozen=True, slots=True)
class DrainExpired(Message):
    """To self, while stopping: what still runs has had its time."""


SchedulerMessage = (
    Submit
    | Cancel
    | CancelRequest
    | SetPace
    | CacheSettled
    | StepDone
    | BlocksRead
    | ColdKnown
    | Paused
    | DrainExpired
    | Tick
)


# ── to the paged cache ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Settle(Ask[Settled]):
    work: SettleWork


@dataclass(frozen=True, slots=True)
class FilesFound(Message):
    """To self: a slice of the census was taken, or the census is void."""

    outcome: CensusSlice | Exception


@dataclass(frozen=True, slots=True)
class StartOver(Ask[None]):
    """The scheduler begins a new life: whatever its former one held, filled or ran is void."""


@dataclass(frozen=True, slots=True)
class BlockWritten(Message):
    identity: Identity
    nbytes: int
    carries: Place | None = None
    """The checkpoint that is embedded in the block's file."""


@dataclass(frozen=True, slots=True)
class BlockLost(Message):
    """A block could not be written."""

    block_hash: BlockHash
    reason: str
    tier_down: bool = False
    """Nor will the next ones."""
    full: bool = False
    """For want of room."""


@dataclass(frozen=True, slots=True)
class WriterStarted(Message):
    """What the writer was told in its former life may not have been done."""


@dataclass(frozen=True, slots=True)
class WriterCaughtUp(Message):
    """To self: the writer has passed what it was told before it was asked, or is gone."""

    outcome: Exception | None


@dataclass(frozen=True, slots=True)
class TierLookedAt(Message):
    """To self: what the writer says of the tier, or that it says nothing."""

    outcome: TierChecked | Exception


@dataclass(frozen=True, slots=True)
class BeginFlush(Message):
    """The server stops: count what is written from now on, and say it at the end."""


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
class ColdOf(Ask["tuple[tuple[BlockRef, int], ...]"]):
    """What a look-up would have read from files, with its bytes. Changes and counts nothing."""

    tokens: PackedTokens
    salt: str = ""


@dataclass(frozen=True, slots=True)
class CacheTree(Ask[TreeView]):
    """What can be found: at most ``most`` nodes, ``depth`` blocks deep. Changes nothing."""

    depth: int
    most: int


@dataclass(frozen=True, slots=True)
class FindChain(Ask[tuple[Whereabouts, ...]]):
    """Where the blocks of a prompt are. Changes and counts nothing."""

    tokens: PackedTokens
    salt: str


@dataclass(frozen=True, slots=True)
class ForgetChain(Message):
    """Give up all that was stored under a salt."""

    salt: str


@dataclass(frozen=True, slots=True)
class TokensOf(Ask[PackedTokens | None]):
    """The tokens of a block; None when there is none of this name."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class AskReuseBySize(Ask[ReuseBySize]):
    """What a cache of another size would have kept of what was reused."""


@dataclass(frozen=True, slots=True)
class ReaderStuck(Message):
    """The reader waits in vain for a file: the tier does not answer."""

    reason: str


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
    | TierLookedAt
    | SetLimits
    | BeginFlush
    | ClearCache
    | ProbeCache
    | ColdOf
    | CacheTree
    | TokensOf
    | AskReuseBySize
    | FindChain
    | ForgetChain
    | VerifyFiles
    | StopVerifying
    | FilesVerified
    | ReaderStuck
    | Tick
)


# ── to the model runner ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RunStep(Ask["StepResult | StepFailed"]):
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class ReadHot(Ask[HostBlock | None]):
    """What the RAM tier holds under an id: a block, or a checkpoint. None: nothing."""

    block_id: BlockId
    checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class RunPreview(Ask[PreviewResult]):
    """A part of a codec preview, between two steps. Rejected when the engine can't do it."""

    work: PreviewWork


ModelRunnerMessage = RunStep | StartOver | ReadHot | RunPreview
