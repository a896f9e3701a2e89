"""What the scheduler tells of a sequence, text as it comes and once its end; and a client of it."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.cache.tickets import ReuseEnded
from omlx.core.pieces import Piece, Spoken, text_of
from omlx.core.plan import Sampled, Uid
from omlx.core.sequence import Request, Sequence, Times
from omlx.core.usage import RequestRecord


@dataclass(frozen=True, slots=True)
class Delta:
    """What can be shown now; may be nothing when a token completes no character."""

    uid: Uid
    pieces: tuple[Spoken, ...]
    sampled: Sampled
    leader: Uid
    index: int
    """Which choice of its request; ``leader`` is choice 0 and names the request."""

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a sequence, told once. Everything a client or a log may want to know of it."""

    uid: Uid
    request: Request
    finish_reason: str | None
    """stop, length, cancelled; None with ``error``."""
    error: str | None
    pieces: tuple[Spoken, ...]
    """What was still held back."""
    generated_tokens: int
    cached_tokens: int
    cached_ram: int
    cached_ssd: int
    prefilled: bool
    """Whether its prefill ended: only then it counts as processed."""
    reuse_ended: ReuseEnded
    times: Times
    prefill_s: float
    restore_s: float
    leader: Uid
    index: int
    stop: str | None = None
    """The stop string that ended it."""
    unfinished_tokens: int = 0
    """Computed of its prompt, if its prefill did not end."""
    reasoning_tokens: int = 0
    """Of those generated."""

    @property
    def text(self) -> str:
        return text_of(self.pieces)

    @classmethod
    def of(cls, sequence: Sequence) -> Closed:
        """What is to be told of a sequence that has ended."""
        prefilled = sequence.times.first_token is not None
        computed = 0 if prefilled else max(0, sequence.num_computed - sequence.num_cached)
        times, reuse_ended = sequence.told()
        return cls(
            sequence.uid,
            sequence.request,
            sequence.finish_reason,
            sequence.error,
            sequence.text.finish(complete=sequence.finish_reason == "stop"),
            sequence.num_generated,
            sequence.num_cached,
            sequence.cached_ram,
            sequence.cached_ssd,
            prefilled,
            reuse_ended,
            times,
            # What a row that was given up computed again is no measure of its prompt.
            0.0 if sequence.resumed else sequence.prefill_s,
            sequence.restore_s,
            sequence.leader,
            sequence.index,
            sequence.text.stopped,
            computed,
            sequence.text.num_reasoning,
        )


Event = Delta | Closed


# ── on a client's stream ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What can be shown now, and the tokens it came from."""

    pieces: tuple[Piece, ...]
    sampled: tuple[Sampled, ...] = ()
    index: int = 0
    """Which choice of the request."""

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice ended, and others of its request have not."""

    pieces: tuple[Piece, ...]
    """What was still held back."""
    finish_reason: str | None
    index: int

    @property
    def text(self) -> str:
        return text_of(self.pieces)


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of every stream that ends well: the last choice, and with it the request."""

    pieces: tuple[Piece, ...]
    """What was still held back."""
    finish_reason: str | None
    record: RequestRecord
    index: int = 0

    @property
    def text(self) -> str:
        return text_of(self.pieces)
