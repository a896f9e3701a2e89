"""Every message to those who read and write the cache files."""

from __future__ import annotations

from dataclasses import dataclass, field

from omlx.cache.block_file import Identity
from omlx.cache.blocks import BlockHash
from omlx.cache.tickets import BlockRef, StoreTicket, WriteTicket
from omlx.core.plan import (
    HostBlock,
)
from omlx.core.reads import NotRead, ReadOutcome
from omlx.disk.census import CensusSlice
from omlx.kernel.message import Ask, Message, Tick

# ── to the SSD reader ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ReadBlocks(Ask[ReadOutcome]):
    """Read and verify blocks of one chain, in order, beside other reads."""

    refs: tuple[BlockRef, ...]
    number: int = 0
    """By which it can be stopped."""


@dataclass(frozen=True, slots=True)
class StopReading(Message):
    """Nobody needs the rest of a read, or of any: each ends with the files that are in flight."""

    number: int | None


@dataclass(frozen=True, slots=True)
class FileRead(Message):
    """To self: one file of a read was read, or could not be."""

    ticket: int
    outcome: HostBlock | NotRead | Exception


@dataclass(frozen=True, slots=True)
class ScanFiles(Ask[CensusSlice]):
    """The next slice of what lies in the cache directory, known from names and headers alone.

    Rejected when it can't be listed now, or no census is under way: then begin a new one.
    """

    begin: bool
    """A new census, with its first slice."""


@dataclass(frozen=True, slots=True)
class VerifyFiles(Ask[str]):
    """Read and check every file, beside everything else; answered with a summary as JSON text.

    Rejected when there is no SSD tier, it can't be listed, or it is being verified already. To the
    cache, which passes it on to the reader.
    """


@dataclass(frozen=True, slots=True)
class StopVerifying(Message):
    """Nobody waits for it any more. Harmless when nothing is verified."""


@dataclass(frozen=True, slots=True)
class FilesVerified(Ask[int | None]):
    """How many files were looked at by the verification that runs; None when none does."""


SsdReaderMessage = (
    ReadBlocks
    | StopReading
    | FileRead
    | ScanFiles
    | VerifyFiles
    | StopVerifying
    | FilesVerified
    | Tick
)


# ── to the SSD writer ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WriteBlock(Message):
    """Write a block's file; answered to the cache by BlockWritten or BlockLost."""

    ticket: StoreTicket | WriteTicket
    payload: HostBlock = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeleteBlocks(Message):
    """Remove files of the served model by name, and others by their path under the root."""

    block_hashes: tuple[BlockHash, ...]
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatchUp(Ask[None]):
    """Answered when everything that was sent before is done and reported."""


@dataclass(frozen=True, slots=True)
class TierChecked:
    generation: int
    """Another one than before: the cache directory had vanished, and what was known is lost."""
    reason: str | None = None
    """Why the tier can't be written now; None: it can."""
    full: bool = False
    """There is no room for more; it works otherwise."""


@dataclass(frozen=True, slots=True)
class CheckTier(Ask[TierChecked]):
    """Whether the tier can be written; with ``write`` by writing a little to it."""

    write: bool


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """What the writer goes by now, as it holds it itself."""

    codec: str
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class SetWriting(Ask[WriterLimits]):
    """How the next files are written; None leaves a thing as it is. Answered with what is so."""

    codec: str | None = None
    floor_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReadQueued(Ask["HostBlock | None"]):
    """The payload of a block that waits for its file. None: it has it by now, or never will."""

    identity: Identity


@dataclass(frozen=True, slots=True)
class BatchDone(Message):
    """To self: what became of the first of the jobs that the thread was given, one each."""

    outcomes: list[object] | Exception


WriterJob = WriteBlock | DeleteBlocks | CatchUp | CheckTier
SsdWriterMessage = WriterJob | SetWriting | ReadQueued | BatchDone
