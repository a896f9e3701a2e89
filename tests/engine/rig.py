"""The real scheduler, cache books, block files and engine, driven in lockstep on one thread.

No loop and no clock: ``step`` does one round, so a test decides what happens between two rounds.
The logits behind each token are recorded, row by row, as the model gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from omlx.actors.disk_messages import DeleteBlocks
from omlx.actors.messages import BlockWritten, Settle
from omlx.actors.paged_cache import PagedCache
from omlx.cache.block_file import Identity, Unreadable
from omlx.cache.factory import CacheFactory, CacheSizes
from omlx.cache.hybrid_cache import LayerKind
from omlx.cache.tickets import BlockRef, StoreTicket, StoreWish, WriteTicket
from omlx.core.events import Closed, Delta
from omlx.core.limits import SchedulerLimits
from omlx.core.memory import MemoryPlan
from omlx.core.plan import (
    GREEDY,
    HostBlock,
    LostFile,
    Sampling,
    Settled,
    StepFailed,
    StepPlan,
    StepResult,
    Uid,
)
from omlx.core.scheduler import Scheduler
from omlx.core.sequence import Request
from omlx.disk.block_files import BlockFiles
from omlx.disk.directory import CacheDirectory
from omlx.engine.grammar import Grammars
from omlx.engine.load import LoadedModel
from omlx.engine.step import Engine
from omlx.kernel.mailbox import Mailbox, Ref
from tests.found import found_in

T = TypeVar("T")
Hook = Callable[[str, Uid | None], None]

BLOCK = 16
CHUNK = 32
INTERVAL = 64
"""Of checkpoints, for models that need them."""
NAMESPACE = "00" * 8
ROUNDS_MAX = 5_000


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited for something")


class Recorder:
    """A model that keeps the logits of every decoding row. ``hook`` tells whose they are."""

    def __init__(self, model: nn.Module, ahead: bool, hook: Hook) -> None:
        self._model = model
        self._ahead = ahead
        self._hook = hook
        self._rows: list[Uid] = []
        self.logits: dict[Uid, list[mx.array]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def on_phase(self, phase: str, uid: Uid | None) -> None:
        self._hook(phase, uid)
        if phase not in ("start", "decode"):
            self._rows = []
        if uid is not None and (phase == "decode" or (phase == "start" and self._ahead)):
            self._rows.append(uid)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model(tokens, cache=cache)
        num_rows = tokens.shape[0]
        for row, uid in enumerate(self._rows[:num_rows]):
            self.logits.setdefault(uid, []).append(logits[row, -1])
        self._rows = self._rows[num_rows:]
        return logits


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """What each token was sampled from."""
    sampled: list[Any] = field(default_factory=list)
    closed: Closed | None = None

    @property
    def cached(self) -> int:
        assert self.closed is not None, "it has not ended"
        return self.closed.cached_tokens


class Rig:
    def __init__(
        self,
        model: LoadedModel,
        *,
        files: Path | None = None,
        caching: bool = True,
        hot_bytes: int = 1 << 30,
        max_running: int = 8,
        chunk: int = CHUNK,
        ahead: bool = False,
        interval: int = INTERVAL,
        codec: str = "fp32",
        embedded: bool = False,
        restore_tokens: int | None = None,
        pass_tokens: int = 64,
        grammars: Grammars | None = None,
        eos: frozenset[int] = frozenset(),
        memory: MemoryPlan | None = None,
        hook: Hook = lambda _phase, _uid: None,
    ) -> None:
        self.recorder = Recorder(model.model, ahead, hook)
        self.engine = Engine(
            cast(nn.Module, self.recorder),
            model.cache,
            ahead=ahead,
            pass_tokens=pass_tokens,
            grammars=grammars,
            hook=self.recorder.on_phase,
        )
        self.files: BlockFiles | None = None
        if files is not None:
            self.files = BlockFiles(CacheDirectory(files), NAMESPACE, model.cache, BLOCK, codec)
            self.files.prepare()
        sizes = CacheSizes(
            BLOCK,
            hot_bytes,
            1 << 40 if files else 0,
            1 << 30,
            initial_blocks=8,
            checkpoint_interval=interval,
        )
        self.cache = CacheFactory.build(NAMESPACE, model.cache, sizes)
        for found in found_in(self.files) if self.files else ():
            name = found.identity
            self.cache.files.found(
                name.block_hash,
                name.parent,
                name.tokens,
                found.nbytes,
                name.place,
                found.carries,
            )
        self._to_writer = Mailbox(1 << 16)
        self._actor = PagedCache(
            self.cache, Ref("stats", Mailbox(1)), None, Ref("writer", self._to_writer)
        )
        self.cache.cold.writable = files is not None  # every file is known by now
        recurrent = model.cache.is_recurrent
        self.core = Scheduler(
            SchedulerLimits(
                max_running=max_running,
                max_queued=1000,
                max_context=model.max_context,
                chunk_tokens=chunk,
                block_size=BLOCK,
                caching=caching,
                feeds_ahead=ahead,
                checkpoint_interval=interval if recurrent else None,
                embedded=embedded,
                restore_tokens=restore_tokens,
                hot_is_free=ahead,
                memory=memory,
                cut_before_decode=recurrent or model.cache.count(LayerKind.ROTATING) > 0,
            ),
            eos_tokens=eos,
            hidden_tokens=frozenset(),
            detokenizer=lambda: model.tokenizer.detokenizer,
        )
        self.answers: dict[Uid, Answer] = {}
        self.plans: list[StepPlan] = []

    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int = 8,
        sampling: Sampling = GREEDY,
        num_system: int = 0,
        n: int = 1,
    ) -> Uid:
        request = Request("r", prompt, max_tokens, sampling, num_system=num_system, n=n)
        uid = self.core.submit(request, 0.0)
        for index in range(n):
            self.answers[Uid(uid + index)] = Answer()
        return uid

    def ask(
        self,
        prompt: tuple[int, ...],
        max_tokens: int = 8,
        sampling: Sampling = GREEDY,
        num_system: int = 0,
    ) -> Answer:
        """One request from its beginning to its end."""
        uid = self.submit(prompt, max_tokens, sampling, num_system)
        self.run()
        return self.answers[uid]

    def run(self) -> None:
        """Rounds until everything has ended and nothing is left to be told."""
        for _ in range(ROUNDS_MAX):
            if not self.step():
                break
        assert self.core.idle, "work is pending and nothing can be done about it"
        assert self.engine.num_rows == 0, "a row outlived its sequence"
        self.cache.check()
        assert self.cache.pool.num_held == 0, "a block is held by nobody"

    def step(self) -> bool:
        """One round: settle, read, plan, compute, apply. False: there was nothing to do."""
        work = self.core.settle_work(0.0)
        if work:
            settled = cast(Settled, at_once(self._actor.receive(Settle(work))))
            self.core.settled(settled, 0.0)
        self._read()
        self.core.close_ended(0.0)
        self._take_events()
        plan = self.core.plan()
        if plan is None:
            return bool(work)
        self.plans.append(plan)
        self.core.apply(plan, self._compute(plan), 0.0)
        self._take_events()
        return True

    def _compute(self, plan: StepPlan) -> StepResult | StepFailed:
        try:
            output = self.engine.run(plan)
        except Exception as error:
            self.engine.reset()
            return StepFailed(type(error).__name__)
        for export in output.exports:
            assert self.files is not None, "nothing is written without a tier"
            ticket = export.ticket
            wish = ticket.wish if isinstance(ticket, StoreTicket) else ticket
            identity = _identity(wish)
            carries = wish.carries if isinstance(wish, StoreWish) else None
            nbytes = self.files.write(identity, export.payload, carries)
            at_once(self._actor.receive(BlockWritten(identity, nbytes)))
        return output.result

    def _read(self) -> None:
        for uid, refs in self.core.take_reads():
            assert self.files is not None, "nothing is read without a tier"
            payloads, lost = self._read_until_lost(refs)
            self.core.blocks_read(uid, payloads, lost, 0.0)
        while len(self._to_writer) and self.files is not None:
            message = at_once(self._to_writer.get()).message
            assert isinstance(message, DeleteBlocks)
            for block_hash in message.block_hashes:
                self.files.remove(block_hash)

    def _read_until_lost(
        self, refs: tuple[BlockRef, ...]
    ) -> tuple[list[HostBlock], LostFile | None]:
        assert self.files is not None, "nothing is read without a tier"
        payloads: list[HostBlock] = []
        for ref in refs:
            try:
                payloads.append(self.files.read(_identity(ref)))
            except Unreadable:
                self.files.remove(ref.block_hash)
                return payloads, LostFile(ref.block_hash, corrupt=True)
            except FileNotFoundError:
                return payloads, LostFile(ref.block_hash, corrupt=False)
        return payloads, None

    def _take_events(self) -> None:
        for event in self.core.take_events():
            answer = self.answers[event.uid]
            match event:
                case Delta():
                    answer.tokens.append(event.sampled.token)
                    answer.sampled.append(event.sampled)
                case Closed():
                    answer.closed = event
                    logits = self.recorder.logits.pop(event.uid, [])[: len(answer.tokens)]
                    answer.logits = [np.array(row.astype(mx.float32)) for row in logits]


def _identity(block: BlockRef | StoreWish | WriteTicket) -> Identity:
    return Identity(NAMESPACE, block.block_hash, block.parent, block.tokens, block.place)


def greatest_difference(one: Answer, other: Answer) -> float:
    """Of the logits, token for token."""
    assert len(one.logits) == len(other.logits) > 0, "answers of one length"
    pairs = zip(one.logits, other.logits, strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)
