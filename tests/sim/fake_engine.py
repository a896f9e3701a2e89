"""An engine whose KV is its own provenance, and a model that any change of the context changes.

What a row holds for a position is every token up to there. Before the engine uses KV it checks
that it is the KV of this very context, so a stale, foreign or unfilled block fails in the step
that reads it, and not as odd text later.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from omlx.cache.block_file import HostTensor
from omlx.cache.blocks import BlockId
from omlx.cache.tickets import StoreTicket, WriteTicket
from omlx.core.plan import (
    Admit,
    Fault,
    Fork,
    HostBlock,
    Load,
    Prefill,
    Restore,
    Sampled,
    Seal,
    StepPlan,
    StepResult,
    Store,
    Uid,
    Written,
)

EOS = 2
LETTERS = "ab"
"""What tokens 0 and 1 are as text."""


def next_token(context: Sequence[int]) -> int:
    """0 or 1; sometimes EOS."""
    number = zlib.crc32(bytes(context))
    return EOS if number % 11 == 0 else number % 2


def alone(
    prompt: Sequence[int], max_tokens: int, stops: Sequence[str] = ()
) -> tuple[list[int], str, str]:
    """What a request gets that has the server to itself: tokens, text, finish reason."""
    tokens: list[int] = []
    text = ""
    while True:
        token = next_token([*prompt, *tokens])
        tokens.append(token)
        if token == EOS:
            return tokens, text, "stop"
        text += LETTERS[token]
        for stop in sorted(stops, key=len, reverse=True):
            if text.endswith(stop):
                return tokens, text[: -len(stop)], "stop"
        if len(tokens) == max_tokens:
            return tokens, text, "length"


class Letters:
    """The detokenizer of this model."""

    def __init__(self) -> None:
        self.last_segment = ""

    def add_token(self, token: int, /) -> None:
        self.last_segment = LETTERS[token]

    def finalize(self) -> None:
        self.last_segment = ""


@dataclass(frozen=True)
class Payload:
    """KV of the tokens from ``start`` on, as the tokens that it came from."""

    start: int
    context: tuple[int, ...]


_exported: dict[bytes, Payload] = {}
"""By digest. It stands for the world outside, so it outlives every engine."""


def to_host(payload: Payload) -> HostBlock:
    """Its digest: a file's size does not depend on how much comes before the block."""
    digest = hashlib.sha256(repr(payload).encode()).digest()
    _exported[digest] = payload
    return (HostTensor("kv", "uint8", (len(digest),), memoryview(digest)),)


def from_host(block: HostBlock) -> Payload:
    """Fails for any bytes that ``to_host`` has not given."""
    (tensor,) = block
    return _exported[bytes(tensor.data)]


@dataclass
class Row:
    prompt: tuple[int, ...]
    kv: list[int]
    """The tokens whose KV is computed."""
    fed: int | None = None
    """The token that the next step feeds; None: still in its prefill."""
    ahead: int | None = None
    """The token that is sampled already, and fed, but not emitted yet."""


@dataclass(frozen=True)
class Export:
    ticket: StoreTicket | WriteTicket
    payload: HostBlock


@dataclass(frozen=True)
class Output:
    result: StepResult
    exports: tuple[Export, ...]


class Broken(Exception):
    """The whole step failed, as a kernel that runs out of memory does."""


@dataclass
class Mishaps:
    """How likely what goes wrong is, each time that it may."""

    rng: random.Random
    row_faults: float = 0.0
    step_breaks: float = 0.0
    not_finite: float = 0.0

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability


@dataclass
class FakeEngine:
    """``feeds_ahead``: a token's KV is computed in the step that emits it, not in the next."""

    feeds_ahead: bool = True
    mishaps: Mishaps = field(default_factory=lambda: Mishaps(random.Random(0)))
    rows: dict[Uid, Row] = field(default_factory=dict)
    blocks: dict[BlockId, Payload] = field(default_factory=dict)
    cuts: defaultdict[tuple[int, ...], set[int]] = field(default_factory=lambda: defaultdict(set))
    """By prompt, where a chunk of it ended."""
    computed: defaultdict[Uid, int] = field(default_factory=lambda: defaultdict(int))
    """Prompt tokens that were computed."""
    loading: dict[Uid, list[Payload]] = field(default_factory=dict)
    """The blocks of each prefix that is restored in parts, as they were when that began."""
    loaded: list[tuple[Uid, int]] = field(default_factory=list)
    """Each part: whose, and how many tokens."""
    forked: dict[Uid, Uid] = field(default_factory=dict)
    """The parent of each row that computed no prompt of its own."""
    steps: int = 0
    hurt: set[Uid] = field(default_factory=set)
    """Rows that failed, alone or with the step."""

    def reset(self) -> None:
        self.hurt |= self.rows.keys()
        self.rows.clear()
        self.loading.clear()

    def start_over(self) -> None:
        self.reset()
        self.blocks.clear()

    def run(self, plan: StepPlan) -> Output:
        self.steps += 1
        self._may_break(plan)
        for block_id in plan.drops:
            self.blocks.pop(block_id, None)
        seals: list[Seal] = []
        exports: list[Export] = []
        for store in plan.stores:
            self._store(store, seals, exports)
        for ticket in plan.writes:
            exports.append(Export(ticket, to_host(self.blocks[ticket.block_id])))
        self._may_break(plan)
        for uid in plan.removes:
            assert (uid in self.rows) != (uid in self.loading) or uid in self.hurt, "removed twice"
            self.rows.pop(uid, None)
            self.loading.pop(uid, None)
        faults: list[Fault] = []
        for load in plan.loads:
            if not self._faulty(load.uid, faults):
                self._load(load)
        for admit in plan.admits:
            assert admit.uid not in self.rows, "a row of a former life"
            if not self._faulty(admit.uid, faults):
                self.rows[admit.uid] = Row(admit.prompt, self._restored(admit))
        self._may_break(plan)
        for prefill in plan.prefills:
            if prefill.uid in self.rows and not self._faulty(prefill.uid, faults):
                self._prefill(prefill)
        for fork in plan.forks:
            self._fork(fork, faults)
        for uid in plan.starts:
            if uid in self.rows and not self._faulty(uid, faults):
                self._start(self.rows[uid])
        sampled = self._decode() if plan.decode else ()
        self._may_break(plan)
        written = tuple(Written(ticket, writing=True) for ticket in plan.writes)
        return Output(StepResult(sampled, tuple(seals), written, tuple(faults)), tuple(exports))

    # ── what goes wrong ──────────────────────────────────────────────────────────────────────

    def _may_break(self, plan: StepPlan) -> None:
        if self.mishaps.happens(self.mishaps.step_breaks):
            self.hurt |= {admit.uid for admit in plan.admits}
            self.hurt |= {fork.uid for fork in plan.forks}
            raise Broken

    def _faulty(self, uid: Uid, faults: list[Fault]) -> bool:
        if not self.mishaps.happens(self.mishaps.row_faults):
            return False
        self.rows.pop(uid, None)
        self.loading.pop(uid, None)
        self.hurt.add(uid)
        faults.append(Fault(uid, "this row failed"))
        return True

    # ── blocks ───────────────────────────────────────────────────────────────────────────────

    def _store(self, store: Store, seals: list[Seal], exports: list[Export]) -> None:
        ticket, row = store.ticket, self.rows[store.uid]
        assert store.stop <= len(row.kv), "stored before it is computed"
        payload = Payload(store.start, tuple(row.kv[: store.stop]))
        good = not self.mishaps.happens(self.mishaps.not_finite)
        if good and ticket.block_id is not None:
            assert ticket.block_id not in self.blocks, "the place still holds another block"
            self.blocks[ticket.block_id] = payload
        if good and ticket.write:
            exports.append(Export(ticket, to_host(payload)))
        kept = good and ticket.block_id is not None
        seals.append(Seal(ticket, stored=kept, writing=good and ticket.write))

    def _load(self, load: Load) -> None:
        assert load.uid not in self.rows, "loaded after it was admitted"
        assert load.tokens > 0, "a part is something"
        if load.uid not in self.loading:
            self.loading[load.uid] = [self._peek(restore) for restore in load.restores]
        self.loaded.append((load.uid, load.tokens))

    def _peek(self, restore: Restore) -> Payload:
        if restore.payload is not None:
            return from_host(restore.payload)
        assert restore.block_id is not None, "a block comes from RAM or with its payload"
        return self.blocks[restore.block_id]

    def _restored(self, admit: Admit) -> list[int]:
        kv: list[int] = []
        loaded = self.loading.pop(admit.uid, None)
        assert loaded is None or loaded == [self._peek(r) for r in admit.restores]
        for restore in admit.restores:
            payload = self._payload(restore)
            assert payload.start == len(kv), "a block of another place in the prompt"
            end = len(kv) + restore.take
            assert end <= len(payload.context), "more tokens than the block has"
            assert payload.context[:end] == admit.prompt[:end], "KV of another context"
            kv = list(payload.context[:end])
        assert len(kv) < len(admit.prompt), "no token to compute, so nothing to sample from"
        return kv

    def _payload(self, restore: Restore) -> Payload:
        if restore.payload is None:
            assert restore.block_id is not None, "a block comes from RAM or with its payload"
            return self.blocks[restore.block_id]
        payload = from_host(restore.payload)
        if restore.block_id is not None:
            assert restore.block_id not in self.blocks, "the place still holds another block"
            self.blocks[restore.block_id] = payload
        return payload

    # ── rows ─────────────────────────────────────────────────────────────────────────────────

    def _prefill(self, prefill: Prefill) -> None:
        row = self.rows[prefill.uid]
        assert row.fed is None, "a prompt is computed before its row decodes"
        assert len(row.kv) < prefill.stop < len(row.prompt), "the last token is fed by decoding"
        self.cuts[row.prompt].add(prefill.stop)
        self.computed[prefill.uid] += prefill.stop - len(row.kv)
        row.kv = list(row.prompt[: prefill.stop])

    def _fork(self, fork: Fork, faults: list[Fault]) -> None:
        assert fork.uid not in self.rows, "a row of a former life"
        parent = self.rows.get(fork.parent)
        if parent is None:
            self.hurt.add(fork.uid)
            faults.append(Fault(fork.uid, "this row's parent failed"))
        elif not self._faulty(fork.uid, faults):
            assert parent.kv == list(parent.prompt[:-1]), "forked where its prompt ends"
            self.rows[fork.uid] = Row(parent.prompt, list(parent.kv))
            self.forked[fork.uid] = fork.parent

    def _start(self, row: Row) -> None:
        assert row.kv == list(row.prompt[:-1]), "only the last prompt token is left"
        row.fed = row.prompt[-1]
        if self.feeds_ahead:
            row.ahead = self._feed(row)

    def _decode(self) -> tuple[Sampled, ...]:
        return tuple(
            Sampled(uid, self._step(row)) for uid, row in self.rows.items() if row.fed is not None
        )

    def _step(self, row: Row) -> int:
        if row.ahead is None:
            row.fed = self._feed(row)
            return row.fed
        emitted = row.fed = row.ahead
        row.ahead = self._feed(row)
        return emitted

    def _feed(self, row: Row) -> int:
        assert row.fed is not None
        row.kv.append(row.fed)
        return next_token(row.kv)
