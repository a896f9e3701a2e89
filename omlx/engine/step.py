"""The engine: rows, and one step of them.

A prompt is computed in caches of its own and joins the decoding batch when only its last token is
left. Rows end when the plan says so, never by themselves: what they computed is cut out first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx.cache.blocks import BlockId
from omlx.cache.checkpoints import Place
from omlx.cache.hybrid_cache import ModelCacheConfig
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
    Sampling,
    Seal,
    StepPlan,
    StepResult,
    Store,
    TokenLogprob,
    Uid,
    Written,
)
from omlx.engine.batch import DecodeBatch, Emitted
from omlx.engine.join import Block
from omlx.engine.kv import (
    BlockArrays,
    BlockStore,
    all_finite,
    fork_caches,
    fresh_caches,
    from_host,
    leaves,
    numbers,
    order_windows,
    to_host,
    views_of,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Row:
    """A prompt that is being computed: batch caches of one row, not in the decoding batch."""

    prompt: tuple[int, ...]
    sampling: Sampling
    caches: list[Any]
    position: int
    """Tokens in the caches."""


@dataclass(slots=True)
class Prefix:
    """The restored part of a prompt on its way into a row."""

    caches: list[Any]
    position: int
    """Tokens in the caches once all of it is done."""
    parts: Iterator[int]
    """Does the next part, and gives its bytes."""
    kept: list[tuple[BlockId, Block]]
    """Blocks that were read, to be kept in RAM as well."""

    def restore(self, nbytes: int) -> None:
        """Do at least as much as ``nbytes`` of what is left."""
        while nbytes > 0:
            done = next(self.parts, None)
            if done is None:
                return
            nbytes -= done


@dataclass(frozen=True, slots=True)
class Export:
    """A block's bytes on their way to the writer."""

    ticket: StoreTicket | WriteTicket
    payload: HostBlock


@dataclass(frozen=True, slots=True)
class StepOutput:
    result: StepResult
    """Seals and writes say ``writing`` as if the writer took every export."""
    exports: tuple[Export, ...]


class Engine:
    """Lives on the engine thread. ``hook(phase, uid)`` runs before each phase of each row.

    ``ahead``: see ``DecodeBatch``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModelCacheConfig,
        *,
        ahead: bool,
        hook: Callable[[str, Uid | None], None] = lambda _phase, _uid: None,
    ) -> None:
        self.model = model
        self.config = config
        self.store = BlockStore(config, host_copies=not ahead)
        self._hook = hook
        self._prefixes: dict[Uid, Prefix] = {}
        """Of rows that are not admitted yet: what was restored of them so far."""
        self._rows: dict[Uid, Row] = {}
        self._batch = DecodeBatch(model, ahead)

    @property
    def num_rows(self) -> int:
        return len(self._prefixes) + len(self._rows) + len(self._batch)

    def reset(self) -> None:
        """Forget every row, after a step failed: a batch that raised can't be trusted."""
        self._rows.clear()
        self._prefixes.clear()
        self._batch = DecodeBatch(self.model, self._batch.ahead)
        mx.clear_cache()

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
        for prefill in plan.prefills:
            self._contain(faults, prefill.uid, lambda prefill=prefill: self._prefill(prefill))
        prefilled = time.perf_counter()
        num_prefilled = sum(row.position for row in self._rows.values()) - before
        failed = {fault.uid: fault for fault in faults}
        for fork in plan.forks:
            if fork.parent in failed:
                faults.append(Fault(fork.uid, failed[fork.parent].message))
            else:
                self._contain(faults, fork.uid, lambda fork=fork: self._fork(fork))
        failed = {fault.uid for fault in faults}
        for uid in plan.starts:
            if uid not in failed:
                self._contain(faults, uid, lambda uid=uid: self._start(uid))
        sampled = self._decode() if plan.decode else ()
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
            ),
            tuple(exports),
        )

    # ── blocks ───────────────────────────────────────────────────────────────────────────────

    def _store_blocks(self, stores: tuple[Store, ...]) -> tuple[list[Seal], list[Export]]:
        """Copy computed blocks out of their rows. Only finite ones are kept."""
        cut: list[tuple[Store, BlockArrays, BlockArrays, mx.array]] = []
        for store in stores:
            caches, row = self._caches_of(store.uid)
            wish = store.ticket.wish
            if wish.place is None:
                arrays = self.store.cut(caches, row, store.start, store.stop)
            else:
                arrays = self.store.cut_states(caches, row)
            embedded = self.store.cut_states(caches, row) if wish.carries is not None else ()
            cut.append((store, arrays, embedded, all_finite((*arrays, *embedded))))
        mx.eval([item[1:] for item in cut])
        seals: list[Seal] = []
        exports: list[Export] = []
        for store, arrays, embedded, finite in cut:
            ticket = store.ticket
            good = bool(finite.item())
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
        return self._batch.caches, self._batch.index(uid)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────

    def _contain(self, faults: list[Fault], uid: Uid, work: Callable[[], None]) -> None:
        """A row that fails before it joined the batch fails alone."""
        try:
            work()
        except Exception as error:
            log.exception("sequence %d failed", uid)
            self._rows.pop(uid, None)
            self._prefixes.pop(uid, None)
            faults.append(Fault(uid, f"{type(error).__name__} in the engine"))

    def _load(self, load: Load) -> None:
        self._hook("restore", load.uid)
        prefix = self._prefixes.get(load.uid)
        if prefix is None:
            prefix = self._prefixes[load.uid] = self._begin(load.restores)
        prefix.restore(load.tokens * self.config.bytes_per_token)

    def _admit(self, admit: Admit) -> None:
        self._hook("restore", admit.uid)
        prefix = self._prefixes.pop(admit.uid, None) or self._begin(admit.restores)
        for _ in prefix.parts:
            pass
        for block_id, arrays in prefix.kept:
            self.store.put(block_id, arrays)
        if admit.state is not None:
            arrays = self._state_of(admit.state)
            self.store.restore_states(prefix.caches, arrays)
        position = prefix.position
        assert not self.config.is_recurrent or bool(position) == (admit.state is not None), (
            "blocks and state travel together, or not at all"
        )
        assert position < len(admit.prompt), "at least one prompt token is computed"
        self._rows[admit.uid] = Row(admit.prompt, admit.sampling, prefix.caches, position)

    def _begin(self, restores: tuple[Restore, ...]) -> Prefix:
        caches = fresh_caches(self.model)
        takes = [restore.take for restore in restores]
        kept: list[tuple[BlockId, Block]] = []
        return Prefix(caches, sum(takes), self._parts(caches, restores, takes, kept), kept)

    def _parts(
        self,
        caches: list[Any],
        restores: tuple[Restore, ...],
        takes: list[int],
        kept: list[tuple[BlockId, Block]],
    ) -> Iterator[int]:
        """A device first gets what was read, block by block; then the layers are joined.

        In host memory what was read is used where it is. A block is held from the beginning, so it
        does not matter when it leaves the RAM tier.
        """
        blocks = [self._source(restore) for restore in restores]
        for index, restore in enumerate(restores):
            if restore.payload is None:
                continue
            if not self.store.host_copies:
                blocks[index] = arrays = from_host(restore.payload)
                mx.eval(arrays)
                yield sum(array.nbytes for array in arrays)
            if restore.block_id is not None:
                kept.append((restore.block_id, blocks[index]))
        if restores:
            joined = self.store.restore_in_parts(caches, blocks, takes)
            # A device joins lazily, within the next pass.
            yield from joined if self.store.host_copies else (0 for _ in joined)

    def _source(self, restore: Restore) -> Block:
        if restore.payload is not None:
            return views_of(restore.payload)
        assert restore.block_id is not None, "a block comes from RAM or with its payload"
        return self.store.get(restore.block_id)

    def _state_of(self, restore: Restore) -> Block:
        """A checkpoint's arrays. No layer is joined, so it is done at once: it has a fixed size."""
        arrays = self._source(restore)
        if restore.payload is not None:
            if not self.store.host_copies:
                arrays = from_host(restore.payload)
                mx.eval(arrays)
            if restore.block_id is not None:
                self.store.put(restore.block_id, arrays)
        return arrays

    def _prefill(self, prefill: Prefill) -> None:
        self._hook("prefill", prefill.uid)
        row = self._rows[prefill.uid]
        tokens = mx.array([row.prompt[row.position : prefill.stop]])  # (1, T)
        self.model(tokens, cache=row.caches)
        mx.eval([cache.state for cache in leaves(row.caches)])
        row.position = prefill.stop

    def _fork(self, fork: Fork) -> None:
        self._hook("fork", fork.uid)
        parent = self._rows[fork.parent]
        caches = fork_caches(parent.caches)
        self._rows[fork.uid] = Row(parent.prompt, fork.sampling, caches, parent.position)

    def _start(self, uid: Uid) -> None:
        """Move a row into the decoding batch."""
        self._hook("start", uid)
        row = self._rows[uid]
        assert row.position == len(row.prompt) - 1, "only the last prompt token is left"
        order_windows(row.caches)
        self._batch.join(uid, row.sampling, row.prompt, row.caches)
        del self._rows[uid]

    def _remove(self, uids: tuple[Uid, ...]) -> None:
        for uid in uids:
            self._rows.pop(uid, None)
            self._prefixes.pop(uid, None)
        self._batch.leave(set(uids))

    def _decode(self) -> tuple[Sampled, ...]:
        for row in self._batch.rows:
            self._hook("decode", row.uid)
        return tuple(map(_sampled, self._batch.step()))


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
