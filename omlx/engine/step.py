"""The engine: rows, and one step of them.

A prompt is computed in caches of its own and joins the decoding batch when only its last token is
left. Rows end when the plan says so, never by themselves: what they computed is cut out first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx.cache.blocks import BlockId
from omlx.cache.checkpoints import Place
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.cache.tickets import StoreTicket, WriteTicket
from omlx.core.grammar import GrammarRefused
from omlx.core.plan import (
    Admit,
    Fault,
    Fork,
    HostBlock,
    Load,
    Prefill,
    Sampled,
    Sampling,
    Seal,
    StepPlan,
    StepResult,
    Store,
    TokenLogprob,
    Uid,
    Written,
)
from omlx.engine.apart import DecodeApart
from omlx.engine.batch import DecodeBatch, Emitted, Joining
from omlx.engine.grammar import GrammarFailed, Grammars, Matcher
from omlx.engine.join import Block
from omlx.engine.kv import (
    BlockArrays,
    BlockStore,
    all_finite,
    fork_caches,
    numbers,
    order_windows,
    to_host,
)
from omlx.engine.restore import Prefix, Restorer
from omlx.engine.together import compute, groups_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Row:
    """A prompt that is being computed: batch caches of one row, not in the decoding batch."""

    prompt: tuple[int, ...]
    sampling: Sampling
    caches: list[Any]
    position: int
    """Tokens in the caches."""


@dataclass(frozen=True, slots=True)
class Export:
    """A block's bytes on their way to the writer."""

    ticket: StoreTicket | WriteTicket
    payload: HostBlock


@dataclass(frozen=True, slots=True)
class Cut:
    """A block as it was cut out of a row; lazy until evaluated."""

    store: Store
    arrays: BlockArrays
    embedded: BlockArrays
    finite: mx.array
    """A scalar: whether all of it is."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    result: StepResult
    """Seals and writes say ``writing`` as if the writer took every export."""
    exports: tuple[Export, ...]


class Engine:
    """Lives on the engine thread. ``hook(phase, uid)`` runs before each phase of each row.

    ``ahead``: see ``DecodeBatch``. ``pass_tokens``: how many tokens could be computed in the time
    of a pass over none; chunks of several prompts share a pass where that gains more than it
    costs. ``grammars``: for rows that have one.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModelCacheConfig,
        *,
        ahead: bool,
        pass_tokens: int = 0,
        grammars: Grammars | None = None,
        hook: Callable[[str, Uid | None], None] = lambda _phase, _uid: None,
    ) -> None:
        self.model = model
        self.config = config
        self.store = BlockStore(config, host_copies=not ahead)
        self._hook = hook
        self._pass_tokens = pass_tokens
        self._grammars = grammars
        self._restorer = Restorer(model, config, self.store)
        self._prefixes: dict[Uid, Prefix] = {}
        """Of rows that are not admitted yet: what was restored of them so far."""
        self._rows: dict[Uid, Row] = {}
        self._ahead = ahead
        self._batch = self._new_batch()

    @property
    def num_rows(self) -> int:
        return len(self._prefixes) + len(self._rows) + len(self._batch)

    def reset(self) -> None:
        """Forget every row, after a step failed: a batch that raised can't be trusted."""
        self._rows.clear()
        self._prefixes.clear()
        self._batch = self._new_batch()
        mx.clear_cache()

    def _new_batch(self) -> DecodeBatch | DecodeApart:
        kind = DecodeBatch if self.config.batches else DecodeApart
        return kind(self.model, self.config, self._ahead)

    def read_hot(self, block_id: BlockId, checkpoint: bool) -> HostBlock | None:
        """The bytes of what the RAM tier holds under an id; None when it holds nothing there."""
        if block_id not in self.store:
            return None
        specs = self.config.states if checkpoint else self.config.tensors
        return to_host(specs, self.store.get(block_id))

    def run(self, plan: StepPlan) -> StepOutput:
        """One step, in the order of the plan's fields. Raises only when all rows are to be lost."""
        faults: list[Fault] = []
        self.store.drop(plan.drops)
        seals, exports = self._store_blocks(plan.stores)
        exports += self._export_dirty(plan.writes)
        self._remove(plan.removes)
        started = time.perf_counter()
        for load in plan.loads:
            self._contain(faults, load.uid, lambda load=load: self._load(load))
        for admit in plan.admits:
            self._contain(faults, admit.uid, lambda admit=admit: self._admit(admit))
        restored = time.perf_counter()
        before = sum(row.position for row in self._rows.values())
        self._prefill(plan.prefills, faults)
        prefilled = time.perf_counter()
        num_prefilled = sum(row.position for row in self._rows.values()) - before
        failed = {fault.uid: fault for fault in faults}
        for fork in plan.forks:
            if fork.parent in failed:
                faults.append(Fault(fork.uid, failed[fork.parent].message))
            else:
                self._contain(faults, fork.uid, lambda fork=fork: self._fork(fork))
        failed = {fault.uid for fault in faults}
        self._start([uid for uid in plan.starts if uid not in failed], faults)
        sampled = self._decode(faults) if plan.decode else ()
        return StepOutput(
            StepResult(
                sampled,
                tuple(seals),
                tuple(Written(ticket, writing=True) for ticket in plan.writes),
                tuple(faults),
                restore_s=restored - started if plan.loads or plan.admits else 0.0,
                prefill_s=prefilled - restored if plan.prefills else 0.0,
                decode_s=time.perf_counter() - prefilled if plan.decode else 0.0,
                prefilled_tokens=max(0, num_prefilled),
                active_bytes=mx.get_active_memory(),
                peak_bytes=mx.get_peak_memory(),
            ),
            tuple(exports),
        )

    # ── blocks ───────────────────────────────────────────────────────────────────────────────

    def _store_blocks(self, stores: tuple[Store, ...]) -> tuple[list[Seal], list[Export]]:
        """Copy computed blocks out of their rows. Only finite ones are kept."""
        cut: list[Cut] = []
        for store in stores:
            try:
                self._hook("store", store.uid)
                cut.append(self._cut(store))
            except Exception:
                log.exception("not stored: tokens %d..%d", store.start, store.stop)
        mx.eval([(one.arrays, one.embedded, one.finite) for one in cut])
        stored = {id(one.store) for one in cut}
        seals = [Seal(s.ticket, False, False) for s in stores if id(s) not in stored]
        exports: list[Export] = []
        for one in cut:
            store, arrays, embedded, ticket = one.store, one.arrays, one.embedded, one.store.ticket
            good = bool(one.finite.item())
            if not good:
                log.error("not stored: tokens %d..%d hold non-finite KV", store.start, store.stop)
            keep = good and ticket.block_id is not None
            if keep and ticket.block_id is not None:
                self.store.put(ticket.block_id, arrays)
            if good and ticket.write:
                export = self._export(ticket, ticket.wish.place, arrays)
                states = to_host(self.config.states, embedded) if embedded else ()
                exports.append(Export(ticket, (*export.payload, *states)))
            seals.append(Seal(ticket, stored=keep, writing=good and ticket.write))
        return seals, exports

    def _cut(self, store: Store) -> Cut:
        caches, row = self._caches_of(store.uid)
        wish = store.ticket.wish
        if wish.place is None:
            arrays = self.store.cut(caches, row, store.start, store.stop)
        else:
            arrays = self.store.cut_states(caches, row)
        embedded = self.store.cut_states(caches, row) if wish.carries is not None else ()
        return Cut(store, arrays, embedded, all_finite((*arrays, *embedded)))

    def _export_dirty(self, writes: tuple[WriteTicket, ...]) -> list[Export]:
        return [self._export(w, w.place, self.store.get(w.block_id)) for w in writes]

    def _export(
        self, ticket: StoreTicket | WriteTicket, place: Place | None, arrays: Block
    ) -> Export:
        specs = self.config.tensors if place is None else self.config.states
        return Export(ticket, to_host(specs, arrays))

    def _caches_of(self, uid: Uid) -> tuple[list[Any], int]:
        row = self._rows.get(uid)
        if row is not None:
            return row.caches, 0
        return self._batch.caches_of(uid)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────

    def _contain(self, faults: list[Fault], uid: Uid, work: Callable[[], None]) -> None:
        """A row that fails before it joined the batch fails alone."""
        try:
            work()
        except Exception as error:
            log.exception("sequence %d failed", uid)
            self._rows.pop(uid, None)
            self._prefixes.pop(uid, None)
            told = isinstance(error, GrammarRefused | GrammarFailed)
            message = str(error) if told else f"{type(error).__name__} in the engine"
            faults.append(Fault(uid, message))

    def _load(self, load: Load) -> None:
        self._hook("restore", load.uid)
        prefix = self._prefixes.get(load.uid)
        if prefix is None:
            prefix = self._prefixes[load.uid] = self._restorer.begin(load.restores)
        prefix.restore(load.tokens * self.config.bytes_per_token)

    def _admit(self, admit: Admit) -> None:
        self._hook("restore", admit.uid)
        prefix = self._prefixes.pop(admit.uid, None) or self._restorer.begin(admit.restores)
        self._restorer.finish(prefix, admit.state)
        assert prefix.position < len(admit.prompt), "at least one prompt token is computed"
        self._rows[admit.uid] = Row(admit.prompt, admit.sampling, prefix.caches, prefix.position)

    def _prefill(self, prefills: Sequence[Prefill], faults: list[Fault]) -> None:
        """A pass over several prompts that fails is repeated one by one, so each fails alone."""
        able = [prefill for prefill in prefills if self._may_prefill(prefill.uid, faults)]
        rows = [self._rows[prefill.uid] for prefill in able]
        positions = [row.position for row in rows]
        lengths = [p.stop - at for p, at in zip(able, positions, strict=True)]
        pass_tokens = self._pass_tokens if self.config.batches else 0
        for group in groups_of(lengths, positions, pass_tokens):
            members = [able[index] for index in group]
            if len(members) > 1:
                try:
                    self._compute(members)
                    continue
                except Exception:
                    log.exception("a pass over %d prompts failed; again one by one", len(members))
            for member in members:
                self._contain(faults, member.uid, lambda member=member: self._compute([member]))

    def _may_prefill(self, uid: Uid, faults: list[Fault]) -> bool:
        self._contain(faults, uid, lambda: self._hook("prefill", uid))
        return uid in self._rows

    def _compute(self, prefills: Sequence[Prefill]) -> None:
        rows = [self._rows[prefill.uid] for prefill in prefills]
        chunks = [
            list(row.prompt[row.position : prefill.stop])
            for row, prefill in zip(rows, prefills, strict=True)
        ]
        caches, positions = [row.caches for row in rows], [row.position for row in rows]
        computed = compute(self.model, self.config, caches, positions, chunks)
        for row, prefill, after in zip(rows, prefills, computed, strict=True):
            row.caches, row.position = after, prefill.stop

    def _fork(self, fork: Fork) -> None:
        self._hook("fork", fork.uid)
        parent = self._rows[fork.parent]
        caches = fork_caches(parent.caches)
        self._rows[fork.uid] = Row(parent.prompt, fork.sampling, caches, parent.position)

    def _start(self, uids: Sequence[Uid], faults: list[Fault]) -> None:
        """Move rows into the decoding batch, together; if that fails, one by one."""
        joining: list[Joining] = []
        for uid in uids:
            self._contain(faults, uid, lambda uid=uid: joining.append(self._joining(uid)))
        if len(joining) > 1:
            try:
                self._join(joining)
                return
            except Exception:
                log.exception("a pass over %d rows failed; again one by one", len(joining))
            # Their matchers may have gone on.
            again = [one.uid for one in joining]
            for uid in again:
                self._contain(faults, uid, lambda uid=uid: self._join([self._joining(uid)]))
            return
        for one in joining:
            self._contain(faults, one.uid, lambda one=one: self._join([one]))

    def _joining(self, uid: Uid) -> Joining:
        self._hook("start", uid)
        row = self._rows[uid]
        assert row.position == len(row.prompt) - 1, "only the last prompt token is left"
        order_windows(row.caches)
        return Joining(uid, row.sampling, row.prompt, self._matcher(row.sampling, row.prompt))

    def _join(self, joining: Sequence[Joining]) -> None:
        rows = [self._rows[one.uid].caches for one in joining]
        self._batch.join(self._batch.begin(joining, rows))
        for one in joining:
            del self._rows[one.uid]

    def _remove(self, uids: tuple[Uid, ...]) -> None:
        for uid in uids:
            self._rows.pop(uid, None)
            self._prefixes.pop(uid, None)
        self._batch.leave(set(uids))

    def _matcher(self, sampling: Sampling, prompt: tuple[int, ...]) -> Matcher | None:
        if sampling.grammar is None:
            return None
        assert self._grammars is not None, "a grammar was checked before it came here"
        matcher = self._grammars.matcher(sampling.grammar)
        matcher.follow(prompt[len(prompt) - sampling.drawn :])
        return matcher

    def _decode(self, faults: list[Fault]) -> tuple[Sampled, ...]:
        for row in self._batch.rows:
            self._hook("decode", row.uid)
        sampled = tuple(map(_sampled, self._batch.step()))
        failed = [Fault(row.uid, row.fault) for row in self._batch.rows if row.fault is not None]
        self._batch.leave({fault.uid for fault in failed})
        faults += failed
        return sampled


def _sampled(emitted: Emitted) -> Sampled:
    uid, logprobs = emitted.row.uid, emitted.logprobs
    count = emitted.row.sampling.top_logprobs
    if logprobs is None or count is None:
        return Sampled(uid, emitted.token)
    top: tuple[TokenLogprob, ...] = ()
    if count:
        best = mx.argpartition(-logprobs, kth=count - 1)[:count]
        pairs = zip(numbers(best), numbers(logprobs[best]), strict=True)
        top = tuple(sorted((TokenLogprob(*pair) for pair in pairs), key=lambda t: -t.logprob))
    return Sampled(uid, emitted.token, numbers(logprobs[emitted.token][None])[0], top)
