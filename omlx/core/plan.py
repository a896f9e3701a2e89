"""What the scheduler asks of the cache and of the engine, and what they answer.

SettleWork -> Settled       once a step, before it: give back, hand in, look up, ask to store
StepPlan   -> StepResult    one engine call; its parts run in the order of its fields
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from omlx.cache.block_file import HostTensor
from omlx.cache.blocks import BlockHash, BlockId, PackedTokens
from omlx.cache.tickets import BlockRef, Grant, StoreTicket, StoreWish, WriteTicket
from omlx.core.grammar import Grammar

Uid = NewType("Uid", int)
"""Names one sequence from its submission to its end. Never reused."""

HostBlock = tuple[HostTensor, ...]
"""The payload of one block in host memory, in the order of ``ModelCacheConfig.tensors``."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose each token. The defaults are greedy and leave the logits alone."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    drawn: int = 0
    """Tokens of the answer that are in the prompt already: a row that goes on draws the next."""
    top_logprobs: int | None = None
    """None: no log-probabilities; n: of the sampled token and of the n likeliest."""
    grammar: Grammar | None = None
    """What the answer must look like; None: as the model likes."""


GREEDY = Sampling()


# ── to the cache ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LookUp:
    uid: Uid
    tokens: PackedTokens
    salt: str


@dataclass(frozen=True, slots=True)
class Seal:
    """How a ticket ended: kept in RAM or not, taken by the writer or not."""

    ticket: StoreTicket
    stored: bool
    writing: bool


@dataclass(frozen=True, slots=True)
class Promoted:
    """How the restore of a cold block, and its place if it had one, ended."""

    ref: BlockRef
    stored: bool


@dataclass(frozen=True, slots=True)
class LostFile:
    block_hash: BlockHash
    corrupt: bool


@dataclass(frozen=True, slots=True)
class Written:
    """How a dirty block's write began: the writer took it, or had no room."""

    ticket: WriteTicket
    writing: bool


@dataclass(frozen=True, slots=True)
class SettleWork:
    """Handled in the order of the fields."""

    seals: tuple[Seal, ...] = ()
    promoted: tuple[Promoted, ...] = ()
    written: tuple[Written, ...] = ()
    releases: tuple[tuple[BlockId, ...], ...] = ()
    lost: tuple[LostFile, ...] = ()
    touches: tuple[tuple[BlockHash, ...], ...] = ()
    look_ups: tuple[LookUp, ...] = ()
    wishes: tuple[tuple[Uid, int, StoreWish], ...] = ()
    """(sequence, position of the block's first token, wish)"""
    ending: tuple[tuple[Uid, tuple[BlockHash, ...]], ...] = ()
    """Sequences that would end, if these blocks had their files."""
    given_up: int = 0
    """Blocks that found no room to wait for their files in time."""
    hot_allowed: int | None = None
    """Bytes that the hot tier may have from now on, whatever it is set to; None: as before."""

    def __bool__(self) -> bool:
        return any(
            (
                self.seals,
                self.promoted,
                self.written,
                self.releases,
                self.lost,
                self.touches,
                self.look_ups,
                self.wishes,
                self.ending,
                self.given_up,
                self.hot_allowed is not None,
            )
        )


@dataclass(frozen=True, slots=True)
class Store:
    """Copy tokens ``start``..``stop`` of a row's KV out of the batch.

    For a checkpoint: its recurrent state, which is at ``stop`` now.
    """

    uid: Uid
    start: int
    stop: int
    ticket: StoreTicket


@dataclass(frozen=True, slots=True)
class Settled:
    grants: tuple[tuple[Uid, Grant], ...] = ()
    stores: tuple[Store, ...] = ()
    writes: tuple[WriteTicket, ...] = ()
    drops: tuple[BlockId, ...] = ()
    flushing: bool = False
    """The writer has something to do."""
    dirty: bool = False
    """Blocks are left that are to be handed to it."""
    refused: tuple[tuple[Uid, int], ...] = ()
    """(sequence, position) of wishes that are to be repeated when there is room."""
    unfiled: tuple[Uid, ...] = ()
    """Of those that are ending: their blocks have no files yet."""
    pending_bytes: int = 0
    """Of blocks that wait to be written."""


# ── to the engine ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Restore:
    """The first ``take`` tokens of a block: from RAM under ``block_id``, or from ``payload``.

    With both, the payload is also kept in RAM under that id.
    """

    take: int
    block_id: BlockId | None
    payload: HostBlock | None


@dataclass(frozen=True, slots=True)
class Load:
    """Restore a part of a prefix, ``tokens`` more; an Admit of the same row does the rest."""

    uid: Uid
    tokens: int
    restores: tuple[Restore, ...]
    """The whole prefix, as in the Admit."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Make a row whose KV is the restored prefix; nothing is computed yet."""

    uid: Uid
    prompt: tuple[int, ...]
    sampling: Sampling
    restores: tuple[Restore, ...]
    state: Restore | None = None
    """The recurrent state after the restored tokens."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute a row's prompt tokens up to ``stop``, exclusive."""

    uid: Uid
    stop: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Make a row that continues where ``parent`` is now, sharing what is computed."""

    parent: Uid
    uid: Uid
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class StepPlan:
    drops: tuple[BlockId, ...] = ()
    stores: tuple[Store, ...] = ()
    writes: tuple[WriteTicket, ...] = ()
    removes: tuple[Uid, ...] = ()
    """Rows that have ended, and those that were being loaded and will not be admitted."""
    loads: tuple[Load, ...] = ()
    admits: tuple[Admit, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    forks: tuple[Fork, ...] = ()
    starts: tuple[Uid, ...] = ()
    """Rows whose prompt is computed but for its last token: they join the decoding batch."""
    decode: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    uid: Uid
    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One row failed; the others did not notice."""

    uid: Uid
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: tuple[Sampled, ...] = ()
    seals: tuple[Seal, ...] = ()
    written: tuple[Written, ...] = ()
    faults: tuple[Fault, ...] = ()
    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefilled_tokens: int = 0
    active_bytes: int = 0
    """What MLX holds after it: weights, rows, blocks."""
    peak_bytes: int = 0
    """The most that it held since the start."""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The whole step failed: every row is gone, and what it was to store was not stored."""

    message: str
