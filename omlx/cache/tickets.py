"""What the cache answers: granted prefixes, permissions to store and to write, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omlx.cache.blocks import TOKEN_BYTES, BlockHash, BlockId, PackedTokens
from omlx.cache.checkpoints import Place


class Reason(StrEnum):
    """Why reuse ended where it did."""

    FULL = "full"
    NO_BLOCK = "no_block"
    NO_CHECKPOINT = "no_checkpoint"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    REJECTED_FILE = "rejected_file"
    LIMIT = "limit"
    DISABLED = "disabled"
    REPLY_RENDERED_DIFFERENTLY = "reply_rendered_differently"


@dataclass(frozen=True, slots=True)
class ReuseEnded:
    reason: Reason
    token: int
    """The first token that is not reused."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a granted prefix. Its first ``take`` tokens are used."""

    block_hash: BlockHash
    parent: BlockHash
    tokens: PackedTokens
    take: int
    block_id: BlockId | None
    """Its place in RAM; for a cold block the place to fill, None when there is no room."""
    cold: bool
    """The payload is to be read from its file."""
    place: Place | None = None
    """Of a checkpoint; None: a block."""
    queued: bool = False
    """Cold, and on its way to its file: the writer has it, or has just written it."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Grant:
    """A prefix whose hot blocks are held until they are released by id."""

    root: BlockHash
    blocks: tuple[BlockRef, ...]
    ended: ReuseEnded
    checkpoint: BlockRef | None = None
    """The recurrent state after exactly the tokens of ``blocks``; it takes none itself."""
    branch: int | None = None
    """Where the blocks that are known end, if that is behind the checkpoint."""

    @property
    def num_cached(self) -> int:
        return sum(block.take for block in self.blocks)

    @property
    def refs(self) -> tuple[BlockRef, ...]:
        """Everything that is held or read for it; the checkpoint last."""
        return self.blocks if self.checkpoint is None else (*self.blocks, self.checkpoint)

    @property
    def cold(self) -> tuple[BlockRef, ...]:
        """What is to be read, in order; the checkpoint first, as the likelier to be refused."""
        first = () if self.checkpoint is None else (self.checkpoint,)
        return tuple(ref for ref in (*first, *self.blocks) if ref.cold)

    @property
    def chain(self) -> tuple[BlockHash, ...]:
        return tuple(ref.block_hash for ref in self.refs)


@dataclass(frozen=True, slots=True)
class StoreWish:
    """Tokens whose KV was computed behind ``parent``, a full block or a tail.

    With a ``place``: the recurrent state after these tokens, a checkpoint.
    """

    parent: BlockHash
    block_hash: BlockHash
    tokens: PackedTokens
    persist: bool
    """False: a tail that will be replaced by a longer one soon, so not worth a file."""
    place: Place | None = None
    cost_s: float = 0.0
    """What computing it again would take, for an eviction order that asks."""
    carries: Place | None = None
    """Of a block: the checkpoint at its end is embedded in its file."""


@dataclass(frozen=True, slots=True)
class StoreTicket:
    """Permission to store a block; ends with ``seal``."""

    wish: StoreWish
    block_id: BlockId | None
    """Where to keep it in RAM; None: it goes to its file only."""
    write: bool

    @property
    def block_hash(self) -> BlockHash:
        return self.wish.block_hash

    @property
    def parent(self) -> BlockHash:
        return self.wish.parent

    @property
    def tokens(self) -> PackedTokens:
        return self.wish.tokens

    @property
    def place(self) -> Place | None:
        return self.wish.place

    @property
    def carries(self) -> Place | None:
        return self.wish.carries


@dataclass(frozen=True, slots=True)
class WriteTicket:
    """A dirty block to be written in the next step: until then it is in RAM under its id."""

    block_id: BlockId
    block_hash: BlockHash
    parent: BlockHash
    tokens: PackedTokens
    place: Place | None = None
    carries: Place | None = None
