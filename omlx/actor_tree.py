"""The actors that serve a model: who leans on whom, and what each is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from omlx.actors.model_runner import ModelRunner
from omlx.actors.paged_cache import PagedCache
from omlx.actors.scheduler import SchedulerActor
from omlx.actors.ssd_reader import READ_THREADS, SsdReader
from omlx.actors.ssd_writer import SsdWriter
from omlx.actors.stats_messages import ModelServed
from omlx.actors.tokenizer import Tokenizer
from omlx.budget import Budget
from omlx.cache.cold_tier import WritePolicy
from omlx.cache.factory import CacheFactory
from omlx.cache.hybrid_cache import LayerKind
from omlx.core.limits import (
    PREFETCH_BYTES_MAX,
    PREFETCH_SHARE,
    RESTORE_BYTES_A_STEP,
    SchedulerLimits,
)
from omlx.core.plan import StepPlan
from omlx.core.render import ChatTokenizer
from omlx.core.scheduler import Scheduler
from omlx.core.usage import ModelFacts
from omlx.disk.block_files import BlockFiles, InThread
from omlx.disk.directory import CacheDirectory
from omlx.engine.load import LoadedModel
from omlx.engine.step import Engine, StepOutput
from omlx.engine.thread import EngineThread
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import Supervisor
from omlx.models.locate import Located
from omlx.settings import Loaded
from omlx.web.edge import Edge

CHUNK_TOKENS = {"cpu": 128, "metal": 2048, "cuda": 2048}
"""Prefill chunks by backend, under the ceiling of ``prefill_step_tokens``. On CPU smaller ones
are faster: 1,490 tokens of SmolLM2 in float32 took 75 tok/s at 2048 and 112 tok/s at 128."""

MAX_RESTARTS, RESTART_PERIOD_S = 3, 60.0
DRAIN_S = 5.0
FLUSH_BYTES_PER_S = 50_000_000
"""Slower than any disk we met; the deadline for the last writes follows from it."""


@dataclass(frozen=True)
class EngineOnThread:
    """The engine's calls, run on its thread. A restart of the runner begins with new rows."""

    engine: Engine
    thread: EngineThread

    async def run(self, plan: StepPlan) -> StepOutput:
        return await self.thread.call(self.engine.run, plan)

    async def reset(self) -> None:
        await self.thread.call(self.engine.reset)

    async def start_over(self) -> None:
        await self.reset()
        await self.thread.call(self.engine.store.clear)


class DiskThreads(Protocol):
    """Makes threads for one actor's files. They outlive it, so the calls of one stay in order."""

    def __call__(self, count: int, name: str, *, background: bool = False) -> InThread: ...


def build_actors(
    loaded: Loaded,
    located: Located,
    model: LoadedModel,
    budget: Budget,
    namespace: str,
    directory: CacheDirectory | None,
    thread: EngineThread,
    disk_threads: DiskThreads,
    edge: Edge,
) -> Supervisor:
    """Add them to a supervisor, and let the edge reach them. ``directory`` None: no SSD tier."""
    settings, sizes, stats = loaded.settings, budget.sizes, edge.stats
    caching = settings.cache_enabled and model.cache.why_not_cacheable is None
    files = None
    if directory is not None and sizes.ssd_limit_bytes and caching:
        files = BlockFiles(
            directory,
            namespace,
            model.cache,
            sizes.block_size,
            settings.gdn_sidecar_state_dtype,
            sizes.ssd_floor_bytes,
        )
    ahead = model.backend != "cpu"
    engine = EngineOnThread(Engine(model.model, model.cache, ahead=ahead), thread)
    restarts = RestartBudget(MAX_RESTARTS, RESTART_PERIOD_S)
    supervisor = Supervisor(restarts, drain_s=DRAIN_S)
    # The wrapper passes most attributes on to the tokenizer it wraps.
    chat_tokenizer = cast(ChatTokenizer, model.tokenizer)
    flush_s = DRAIN_S + sizes.pending_limit_bytes / FLUSH_BYTES_PER_S
    recurrent = model.cache.is_recurrent
    storage = resolve_storage(settings.gdn_snapshot_storage, ssd=files is not None)
    tokenizer = supervisor.add(
        "tokenizer",
        Tokenizer.capacity,
        lambda: Tokenizer(chat_tokenizer, find_system=recurrent),
    )
    writer = reader = None
    if files is not None:
        in_writer = disk_threads(1, "ssd-write", background=True)
        in_reader = disk_threads(READ_THREADS, "ssd-read")
        in_census = disk_threads(1, "ssd-census")
        writer = supervisor.add(
            "ssd_writer",
            SsdWriter.capacity,
            lambda: SsdWriter(files, cache, in_writer),
            drain_s=flush_s,
        )
        reader = supervisor.add(
            "ssd_reader",
            SsdReader.capacity,
            lambda: SsdReader(files, cache, writer, in_reader, in_census),
        )
    runner = supervisor.add(
        "model_runner", ModelRunner.capacity, lambda: ModelRunner(engine, writer)
    )
    cache = supervisor.add(
        "paged_cache",
        PagedCache.capacity,
        lambda: PagedCache(
            CacheFactory.build(namespace, model.cache, sizes),
            stats,
            reader,
            writer,
            gdn_storage=storage,
            gdn_codec=settings.gdn_sidecar_state_dtype,
        ),
        "model_runner",
    )
    eos = frozenset(model.tokenizer.eos_token_ids)
    limits = SchedulerLimits(
        max_running=settings.max_concurrent_requests,
        max_queued=settings.max_queued_requests,
        max_context=min(settings.max_context or model.max_context, model.max_context),
        chunk_tokens=min(settings.prefill_step_tokens, CHUNK_TOKENS[model.backend]),
        block_size=sizes.block_size,
        decode_share=settings.decode_share,
        caching=caching,
        through=sizes.ssd_write_policy is WritePolicy.THROUGH,
        feeds_ahead=ahead,
        checkpoint_interval=(
            settings.gdn_checkpoint_interval if model.cache.is_recurrent else None
        ),
        embedded=storage == "embedded",
        cut_before_decode=model.cache.is_recurrent or model.cache.count(LayerKind.ROTATING) > 0,
        restore_tokens=RESTORE_BYTES_A_STEP // max(1, model.cache.bytes_per_token) + 1,
        hot_is_free=ahead,
        prefetch_bytes=min(PREFETCH_BYTES_MAX, sizes.hot_limit_bytes // PREFETCH_SHARE),
    )
    hidden = frozenset(model.tokenizer.all_special_ids)
    scheduler = supervisor.add(
        "scheduler",
        SchedulerActor.capacity,
        lambda: SchedulerActor(
            Scheduler(
                limits,
                eos_tokens=eos,
                hidden_tokens=hidden,
                detokenizer=lambda: model.tokenizer.detokenizer,
            ),
            cache,
            reader,
            runner,
            stats,
            drain_s=settings.drain_timeout_s,
        ),
        "paged_cache",
        "model_runner",
        drain_s=settings.drain_timeout_s + flush_s,
    )
    edge.model = ModelFacts(
        located.id,
        model.cache.count(LayerKind.KV),
        model.cache.count(LayerKind.ROTATING),
        model.cache.count(LayerKind.RECURRENT),
        sizes.block_size,
        namespace,
    )
    edge.max_context, edge.vocab_size = limits.max_context, model.vocab_size
    edge.decode_token = lambda token: model.tokenizer.decode([token])
    edge.tokenizer, edge.scheduler, edge.cache = tokenizer, scheduler, cache
    stats.offer(ModelServed(edge.model))
    return supervisor


def resolve_storage(setting: str, *, ssd: bool) -> str:
    """What ``gdn_snapshot_storage`` means here: auto is sidecars where there are files at all."""
    if setting != "auto":
        return setting
    return "ssd_sidecar" if ssd else "embedded"
