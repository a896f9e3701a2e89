"""The whole back of the server on a virtual clock: every actor, a fake engine and a fake disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from omlx.actors.messages import ChoiceEnded, Ended, GenerationStream, Submit, TextDelta
from omlx.actors.model_runner import ModelRunner
from omlx.actors.paged_cache import PagedCache
from omlx.actors.scheduler import GenerationFailed, SchedulerActor
from omlx.actors.ssd_reader import READ_THREADS, SsdReader
from omlx.actors.ssd_writer import SsdWriter
from omlx.actors.stats import Stats
from omlx.cache.blocks import BlockId, root_hash
from omlx.cache.cold_tier import WritePolicy
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.core.plan import HostBlock, StepPlan
from omlx.core.preview import PreviewResult, PreviewWork
from omlx.core.scheduler import Scheduler, SchedulerLimits
from omlx.core.sequence import Request
from omlx.core.usage import RequestRecord, Totals
from omlx.kernel.message import ActorGone, Message, Rejected
from omlx.kernel.restart import RestartBudget
from omlx.kernel.stream import Stream
from omlx.kernel.supervisor import Supervisor
from tests.found import found_in
from tests.sim.fake_disk import FakeDisk, FakeThread, FakeThreads
from tests.sim.fake_engine import EOS, FakeEngine, Letters, Mishaps, Output
from tests.sim.loop import seeded_pause

BLOCK_SIZE = 4
BYTES_PER_TOKEN = 200
"""A file takes about 700 bytes."""

ACTORS = ("stats", "ssd_writer", "ssd_reader", "model_runner", "paged_cache", "scheduler")


@dataclass(frozen=True, slots=True)
class Break(Message):
    """No actor knows it, so whoever gets it crashes."""


class NoStore:
    """Totals that nobody keeps."""

    async def load(self) -> Totals:
        return Totals()

    async def save(self, totals: Totals) -> None:
        pass


@dataclass
class EngineInThread:
    engine: FakeEngine
    thread: FakeThread

    async def run(self, plan: StepPlan) -> Output:
        return await self.thread(self.engine.run, plan)

    async def reset(self) -> None:
        await self.thread(self.engine.reset)

    async def start_over(self) -> None:
        await self.thread(self.engine.start_over)

    async def read_hot(self, block_id: BlockId, checkpoint: bool) -> HostBlock | None:
        raise NotImplementedError  # nobody here tests himself

    async def preview(self, work: PreviewWork) -> PreviewResult:
        raise NotImplementedError  # letters have no recurrent states


@dataclass
class Answer:
    """What a client got."""

    request: Request
    outcome: str = "waiting"
    """refused, gone, failed, left or ended"""
    error: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    record: RequestRecord | None = None
    ended_s: float = 0.0


@dataclass
class Sizes:
    """In blocks."""

    hot: int = 1000
    ssd: int = 1000
    pending: int = 1000
    policy: WritePolicy = WritePolicy.BEHIND


class World:
    """Runs inside ``async with``; then drains, as the server does on SIGTERM."""

    def __init__(
        self,
        seed: int,
        disk: FakeDisk,
        sizes: Sizes | None = None,
        *,
        writer_capacity: int = SsdWriter.capacity,
        crashes: int = 1000,
        drain_s: float = 600.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.disk = disk
        self.sizes = sizes or Sizes()
        self.writer_capacity = writer_capacity
        self.engine = FakeEngine(mishaps=Mishaps(random.Random(seed)))
        self.step_s = self.read_s = self.write_s = 0.01
        budget = RestartBudget(crashes, 60.0)
        self.supervisor = Supervisor(budget, drain_s=drain_s, pause=seeded_pause(seed))
        self.stopping = asyncio.Event()
        self.caches: list[BlockAwarePrefixCache] = []
        self.cores: list[Scheduler] = []
        self.refs: dict[str, Any] = {}
        self._build()

    def _build(self) -> None:
        refs = self.refs
        in_writer = FakeThread(lambda: self._about(self.write_s))
        in_reader = FakeThreads(READ_THREADS, lambda: self._about(self.read_s))
        in_census = FakeThread(lambda: self._about(self.read_s))
        engine = EngineInThread(self.engine, FakeThread(lambda: self._about(self.step_s)))
        self._add("stats", Stats.capacity, lambda: Stats(NoStore(), now=lambda: 0.0))
        self._add(
            "ssd_writer",
            self.writer_capacity,
            lambda: SsdWriter(self.disk, refs["paged_cache"], in_writer),
        )
        self._add(
            "ssd_reader",
            SsdReader.capacity,
            lambda: SsdReader(
                self.disk, refs["paged_cache"], refs["ssd_writer"], in_reader, in_census
            ),
        )
        self._add(
            "model_runner", ModelRunner.capacity, lambda: ModelRunner(engine, refs["ssd_writer"])
        )
        self._add(
            "paged_cache",
            PagedCache.capacity,
            lambda: PagedCache(
                self._new_cache(), refs["stats"], refs["ssd_reader"], refs["ssd_writer"]
            ),
            "model_runner",
        )
        self._add(
            "scheduler",
            SchedulerActor.capacity,
            lambda: SchedulerActor(
                self._new_core(),
                refs["paged_cache"],
                refs["ssd_reader"],
                refs["model_runner"],
                refs["stats"],
                wall=lambda: 0.0,
            ),
            "paged_cache",
            "model_runner",
        )

    def _add(self, name: str, capacity: int, build: Callable[[], Any], *leans_on: str) -> None:
        self.refs[name] = self.supervisor.add(name, capacity, build, *leans_on)

    def _about(self, seconds: float) -> float:
        return seconds * self.rng.uniform(0.1, 2.0)

    def _new_cache(self) -> BlockAwarePrefixCache:
        block = BLOCK_SIZE * BYTES_PER_TOKEN
        cache = BlockAwarePrefixCache(
            namespace=self.disk.namespace,
            block_size=BLOCK_SIZE,
            bytes_per_token=BYTES_PER_TOKEN,
            hot_limit_bytes=self.sizes.hot * block,
            ssd_limit_bytes=self.sizes.ssd * block,
            pending_limit_bytes=self.sizes.pending * block,
            initial_blocks=2,
            write_policy=self.sizes.policy,
        )
        self.caches.append(cache)
        return cache

    def _new_core(self) -> Scheduler:
        limits = SchedulerLimits(
            max_running=3,
            max_queued=100,
            max_context=1000,
            chunk_tokens=8,
            block_size=BLOCK_SIZE,
            caching=True,
            feeds_ahead=self.engine.feeds_ahead,
            through=self.sizes.policy is WritePolicy.THROUGH,
            restore_tokens=5,
            prefetch_bytes=20 * BLOCK_SIZE * BYTES_PER_TOKEN,
        )
        core = Scheduler(
            limits,
            eos_tokens=frozenset({EOS}),
            hidden_tokens=frozenset(),
            detokenizer=Letters,
        )
        self.cores.append(core)
        return core

    @property
    def cache(self) -> BlockAwarePrefixCache:
        return self.caches[-1]

    async def __aenter__(self) -> Self:
        self.running = asyncio.create_task(self.supervisor.run(self.stopping))
        await asyncio.sleep(1.0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stopping.set()
        await self.running

    # ── clients ──────────────────────────────────────────────────────────────────────────────

    async def ask(self, request: Request, *, leaves_after: int = 10**6) -> Answer:
        """One client, who goes away after so many tokens."""
        answer = Answer(request)
        stream: GenerationStream = Stream(request.max_tokens + 1)
        try:
            await self.refs["scheduler"].ask(Submit(request, stream))
            async with stream:
                async for item in stream:
                    assert answer.record is None, "something came after the end"
                    self._take(answer, item)
                    if len(answer.tokens) >= leaves_after:
                        answer.outcome = "left"
                        break
                else:
                    answer.outcome = "ended"
        except Rejected:
            answer.outcome = "refused"
        except ActorGone:
            answer.outcome = "gone"
        except GenerationFailed as error:
            answer.outcome, answer.error = "failed", f"{error.code}: {error}"
        answer.ended_s = asyncio.get_running_loop().time()
        return answer

    @staticmethod
    def _take(answer: Answer, item: TextDelta | ChoiceEnded | Ended) -> None:
        answer.text += item.text
        match item:
            case TextDelta(sampled=sampled):
                answer.tokens += [one.token for one in sampled]
            case Ended(record=record):
                answer.record = record

    def crash(self, name: str) -> None:
        self.refs[name].offer(Break())

    async def quiet(self) -> None:
        """Long enough for everything to be written, retried and reported."""
        await asyncio.sleep(120.0)

    def check_persisted(self) -> None:
        """What has files of a chain is a prefix of it."""
        found = {file.identity.block_hash: file.identity for file in found_in(self.disk)}
        roots = {root_hash(self.disk.namespace, salt) for salt in ("", "s")}
        assert all(name.parent in found or name.parent in roots for name in found.values())

    def check_at_rest(self) -> None:
        """Nothing is held or on its way, and no file is there that does not count."""
        self.cache.check()
        assert self.cores[-1].idle
        assert not self.engine.rows, "a row outlived its sequence"
        assert self.cache.pool.num_held == 0, "references return to zero"
        assert self.cache.cold.pending_bytes == 0, "something is on its way for ever"
        assert len(self.engine.blocks) == self.cache.pool.num_cached
        uncounted = [name for name in self.disk.files if name not in self.cache.cold.ledger]
        assert not uncounted, "files that nobody counts"
        assert self.cache.cold.ledger.total_bytes <= self.cache.cold.ledger.limit_bytes
