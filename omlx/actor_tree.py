"""The actors that serve a model: who leans on whom, and what each is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from omlx.actors.grammars import GrammarCompiler
from omlx.actors.model_runner import ModelRunner
from omlx.actors.paged_cache import PagedCache
from omlx.actors.scheduler import SchedulerActor
from omlx.actors.ssd_reader import READ_THREADS, SsdReader
from omlx.actors.ssd_writer import SsdWriter
from omlx.actors.stats_messages import ModelServed
from omlx.actors.tokenizer import Tokenizer
from omlx.cache.blocks import BlockId
from omlx.cache.factory import CacheFactory
from omlx.cache.hybrid_cache import LayerKind
from omlx.core.markup import MarkupTokenizer, ModelMarkup
from omlx.core.plan import HostBlock, StepPlan
from omlx.core.preview import End, PreviewResult, PreviewWork
from omlx.core.render import ChatTokenizer
from omlx.core.scheduler import Scheduler
from omlx.core.usage import ModelFacts
from omlx.disk.block_files import BlockFiles, InThread
from omlx.disk.directory import CacheDirectory
from omlx.engine.grammar import Grammars
from omlx.engine.state_preview import StatePreview
from omlx.engine.step import Engine, StepOutput
from omlx.engine.thread import EngineThread
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import Supervisor
from omlx.live_settings import DRAIN_S, LiveSettings
from omlx.models.locate import Located
from omlx.web.edge import Edge

MAX_RESTARTS, RESTART_PERIOD_S = 3, 60.0

PASS_TOKENS = {"cpu": 10, "metal": 32, "cuda": 512}
"""Prompt tokens that could be computed in the time of a pass over none. SmolLM2: on two CPU cores a
pass over one token took 60 ms, each further one 5.5 ms; on an H200 3.7 ms and 4.6 us. Metal's is
between and a guess: a pass is bound by its memory, a token by its fewer FLOPs."""


@dataclass(frozen=True)
class EngineOnThread:
    """The engine's calls, run on its thread. A restart of the runner begins with new rows."""

    engine: Engine
    state_preview: StatePreview
    thread: EngineThread

    async def run(self, plan: StepPlan) -> StepOutput:
        return await self.thread.call(self.engine.run, plan)

    async def reset(self) -> None:
        await self.thread.call(self.engine.reset)

    async def start_over(self) -> None:
        await self.reset()
        await self.preview(End())
        await self.thread.call(self.engine.store.clear)

    async def read_hot(self, block_id: BlockId, checkpoint: bool) -> HostBlock | None:
        return await self.thread.call(self.engine.read_hot, block_id, checkpoint)

    async def preview(self, work: PreviewWork) -> PreviewResult:
        return await self.thread.call(self.state_preview.run, work)


class DiskThreads(Protocol):
    """Makes threads for one actor's files. They outlive it, so the calls of one stay in order."""

    def __call__(self, count: int, name: str, *, background: bool = False) -> InThread: ...


def build_actors(
    live: LiveSettings,
    located: Located,
    namespace: str,
    directory: CacheDirectory | None,
    thread: EngineThread,
    disk_threads: DiskThreads,
    edge: Edge,
) -> Supervisor:
    """Add them to a supervisor, and let the edge reach them. ``directory`` None: no SSD tier."""
    model, begun, stats = live.started.model, live.targets, edge.stats
    files = None
    if directory is not None and live.started.has_files:
        block_size, floor_bytes = begun.sizes.block_size, begun.sizes.ssd_floor_bytes
        files = BlockFiles(directory, namespace, model.cache, block_size, begun.codec, floor_bytes)
    compiled = Grammars(model.tokenizer)
    rows = Engine(
        model.model,
        model.cache,
        ahead=model.backend != "cpu",
        pass_tokens=PASS_TOKENS[model.backend],
        grammars=compiled,
    )
    preview = StatePreview(model.model, model.cache, rows.store)
    engine = EngineOnThread(rows, preview, thread)
    restarts = RestartBudget(MAX_RESTARTS, RESTART_PERIOD_S)
    supervisor = Supervisor(restarts, drain_s=DRAIN_S)
    # The wrapper passes most attributes on to the tokenizer it wraps.
    chat_tokenizer = cast(ChatTokenizer, model.tokenizer)
    recurrent = model.cache.is_recurrent
    tokenizer = supervisor.add(
        "tokenizer",
        Tokenizer.capacity,
        lambda: Tokenizer(chat_tokenizer, find_system=recurrent),
    )
    grammars = supervisor.add(
        "grammars", GrammarCompiler.capacity, lambda: GrammarCompiler(compiled)
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
            drain_s=begun.flush_s,
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
            CacheFactory.build(namespace, model.cache, live.targets.sizes),
            stats,
            reader,
            writer,
            gdn_storage=live.targets.storage,
            gdn_codec=live.targets.codec,
        ),
        "model_runner",
    )
    eos = frozenset(model.tokenizer.eos_token_ids)
    hidden = frozenset(model.tokenizer.all_special_ids)
    scheduler = supervisor.add(
        "scheduler",
        SchedulerActor.capacity,
        lambda: SchedulerActor(
            Scheduler(
                live.targets.limits,
                eos_tokens=eos,
                hidden_tokens=hidden,
                detokenizer=lambda: model.tokenizer.detokenizer,
            ),
            cache,
            reader,
            runner,
            stats,
            drain_s=live.targets.drain_s,
        ),
        "paged_cache",
        "model_runner",
        drain_s=begun.drain_s + begun.flush_s,
    )
    edge.model = ModelFacts(
        located.id,
        model.cache.count(LayerKind.KV),
        model.cache.count(LayerKind.ROTATING),
        model.cache.count(LayerKind.RECURRENT),
        begun.sizes.block_size,
        namespace,
    )
    edge.max_context, edge.vocab_size = begun.limits.max_context, model.vocab_size
    edge.codec_states = model.cache.states
    edge.decode_token = lambda token: model.tokenizer.decode([token])
    edge.markup = ModelMarkup.of(cast(MarkupTokenizer, model.tokenizer))
    edge.tool_parser = model.tokenizer.tool_parser
    edge.tokenizer, edge.scheduler, edge.cache = tokenizer, scheduler, cache
    edge.grammars = grammars
    edge.reader, edge.runner = reader, runner
    live.reach(cache, scheduler, supervisor.allow)
    edge.running_settings = live
    stats.offer(ModelServed(edge.model))
    return supervisor
