"""omlx without the server: core, cache, engine and files in one thread, for measuring and checking.

The round is the server's: settle, plan, run, apply. Only the actors are missing, so what is
measured here is what they add nothing to.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from omlx.actor_tree import PASS_TOKENS
from omlx.cache.block_file import Identity, Unreadable
from omlx.cache.factory import CacheFactory, CacheSizes
from omlx.cache.hybrid_cache import LayerKind
from omlx.cache.tickets import BlockRef, StoreTicket
from omlx.core.events import Closed, Delta
from omlx.core.limits import SchedulerLimits
from omlx.core.plan import HostBlock, LostFile, Settled, SettleWork, Store
from omlx.core.scheduler import Scheduler
from omlx.core.sequence import Request
from omlx.disk.block_files import BlockFiles
from omlx.disk.directory import CacheDirectory
from omlx.engine.load import load
from omlx.engine.step import Engine

PLENTY = 1 << 40


@dataclass
class Run:
    tokens: list[int] = field(default_factory=list)
    logits: np.ndarray | None = None
    """(vocabulary,) of the first token, when they are watched."""
    cached: int = 0
    closed: Closed | None = None

    @property
    def ttft_ms(self) -> float:
        assert self.closed is not None
        times = self.closed.times
        assert times.first_token is not None
        return 1000 * (times.first_token - times.submitted)


class InProcess:
    def __init__(
        self,
        model: Path,
        *,
        block_size: int = 256,
        chunk_tokens: int = 128,
        watch_logits: bool = False,
        hot_limit_bytes: int = PLENTY,
        checkpoint_interval: int = 2048,
        codec: str = "fp32",
        embedded: bool = False,
    ) -> None:
        self.loaded = load(model, PLENTY)
        self._interval, self._codec = checkpoint_interval, codec
        self._embedded = embedded
        self.vocab_size = self.loaded.vocab_size
        self._folder = tempfile.TemporaryDirectory(prefix="omlx-bench-")
        self._block_size, self._chunk = block_size, chunk_tokens
        self._hot_limit = hot_limit_bytes
        self._last: np.ndarray | None = None
        served: Any = _Watched(self.loaded.model, self) if watch_logits else self.loaded.model
        self.ahead = self.loaded.backend != "cpu"
        self.engine = Engine(
            served,
            self.loaded.cache,
            ahead=self.ahead,
            pass_tokens=PASS_TOKENS[self.loaded.backend],
        )
        self.clear()

    def clear(self) -> None:
        """Forget everything in RAM and in files."""
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="omlx-bench-")
        root = CacheDirectory(Path(self._folder.name))
        self.files = BlockFiles(root, "0" * 16, self.loaded.cache, self._block_size, self._codec)
        self.files.prepare()
        self._build()

    def forget_ram(self) -> None:
        """As a restart does: only the files are left."""
        self._build()
        for found in [found for part in self.files.census() for found in part.found]:
            name = found.identity
            self.cache.files.found(
                name.block_hash,
                name.parent,
                name.tokens,
                found.nbytes,
                name.place,
                found.carries,
            )

    def forget_payloads(self) -> None:
        """Empty the RAM of a running server: the books still know every file."""
        self.cache.clear(hot=True, ssd=False)

    def _build(self) -> None:
        sizes = CacheSizes(
            self._block_size,
            self._hot_limit,
            PLENTY,
            PLENTY,
            checkpoint_interval=self._interval,
        )
        self.cache = CacheFactory.build("0" * 16, self.loaded.cache, sizes)
        self.engine.store.clear()

    def run(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        caching: bool = True,
        keep: bool = True,
        num_system: int = 0,
    ) -> Run:
        """One greedy request. ``keep`` False: nothing it computes is stored."""
        return self.run_all(
            [prompt], num_tokens, caching=caching, keep=keep, num_system=num_system
        )[0]

    def run_all(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        caching: bool = True,
        keep: bool = True,
        num_system: int = 0,
    ) -> list[Run]:
        config = self.loaded.cache
        limits = SchedulerLimits(
            max_running=64,
            max_queued=64,
            max_context=PLENTY,
            chunk_tokens=self._chunk,
            block_size=self._block_size,
            caching=caching,
            feeds_ahead=self.ahead,
            checkpoint_interval=self._interval if config.is_recurrent else None,
            embedded=self._embedded,
            cut_before_decode=config.is_recurrent or config.count(LayerKind.ROTATING) > 0,
        )
        core = Scheduler(
            limits,
            eos_tokens=frozenset(),
            hidden_tokens=frozenset(),
            detokenizer=lambda: self.loaded.tokenizer.detokenizer,
        )
        now = time.perf_counter
        runs = {
            core.submit(
                Request(str(i), tuple(prompt), num_tokens, num_system=num_system), now()
            ): Run()
            for i, prompt in enumerate(prompts)
        }
        while True:
            work = core.settle_work(now())
            if work:
                core.settled(self._settle(work, keep), now())
            for uid, refs in core.take_reads():
                core.blocks_read(uid, *self._read(refs), now())
            core.close_ended(now())
            plan = core.plan()
            if plan is not None:
                output = self.engine.run(plan)
                for export in output.exports:
                    self._write(export.ticket, export.payload)
                core.apply(plan, output.result, now())
            for event in core.take_events():
                run = runs[event.uid]
                if isinstance(event, Delta):
                    if not run.tokens:
                        run.logits = self._last
                    run.tokens.append(event.sampled.token)
                else:
                    run.closed, run.cached = event, event.cached_tokens
            if plan is None and not work:
                return list(runs.values())

    def _settle(self, work: SettleWork, keep: bool) -> Settled:
        cache = self.cache
        for seal in work.seals:
            ticket = seal.ticket
            cache.seal(
                ticket.wish,
                ticket.block_id,
                stored=seal.stored,
                writing=seal.writing,
                write=ticket.write,
            )
        for promoted in work.promoted:
            cache.promoted(promoted.ref, stored=promoted.stored)
        for lost in work.lost:
            cache.files.lost(lost.block_hash, corrupt=lost.corrupt)
        for block_ids in work.releases:
            cache.pool.release(block_ids)
        grants = tuple((w.uid, cache.look_up(w.tokens, w.salt)) for w in work.look_ups)
        stores: list[Store] = []
        for uid, start, wish in work.wishes if keep else ():
            ticket = cache.store(wish)
            if ticket is not None:
                stores.append(Store(uid, start, start + len(wish.tokens) // 4, ticket))
        for name in cache.cold.take_deletes().blocks:
            self.files.remove(name)
        return Settled(grants, tuple(stores), (), cache.pool.take_dropped())

    def _read(self, refs: Sequence[BlockRef]) -> tuple[list[HostBlock], LostFile | None]:
        payloads: list[HostBlock] = []
        for ref in refs:
            try:
                payloads.append(self.files.read(_identity(ref)))
            except (Unreadable, FileNotFoundError) as error:
                corrupt = isinstance(error, Unreadable)
                return payloads, LostFile(ref.block_hash, corrupt)
        return payloads, None

    def _write(self, ticket: Any, payload: HostBlock) -> None:
        wish = ticket.wish if isinstance(ticket, StoreTicket) else ticket
        self.cache.files.written(
            wish.block_hash,
            self.files.write(_identity(wish), payload, getattr(wish, "carries", None)),
        )

    @staticmethod
    def max_difference(a: np.ndarray | None, b: np.ndarray | None) -> float:
        assert a is not None and b is not None, "logits were not watched"
        return float(np.abs(a - b).max())


def _identity(block: Any) -> Identity:
    return Identity("0" * 16, block.block_hash, block.parent, block.tokens, block.place)


class _Watched:
    """A model that shows the logits of its last one-token pass."""

    def __init__(self, model: Any, owner: InProcess) -> None:
        self._model, self._owner = model, owner

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = self._model(tokens, cache=cache)
        if tokens.shape[1] == 1:
            self._owner._last = np.array(logits[0, -1].astype(mx.float32))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
