"""Builds everything, runs it, and takes it down: settings, bind, lock, load; in this order.

Nothing of the cache is touched before the port is ours, so a second server that is started by
mistake does no harm.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from omlx import __version__
from omlx.actors.block_files import (
    BlockFiles,
    CacheDirectoryLocked,
    CacheDirectoryUnusable,
    DirectoryLock,
    InThread,
)
from omlx.actors.messages import IsScanned, ModelServed
from omlx.actors.model_runner import ModelRunner
from omlx.actors.paged_cache import PagedCache
from omlx.actors.scheduler import SchedulerActor
from omlx.actors.ssd_reader import SsdReader
from omlx.actors.ssd_writer import SsdWriter
from omlx.actors.stats import Stats
from omlx.actors.stats_file import StatsFile
from omlx.actors.tokenizer import Tokenizer
from omlx.announce import announce
from omlx.budget import Budget, host_memory_bytes, make_budget
from omlx.cache.factory import CacheFactory, namespace_of
from omlx.cache.hybrid_cache import LayerKind
from omlx.core.limits import SchedulerLimits
from omlx.core.plan import StepPlan
from omlx.core.render import ChatTokenizer
from omlx.core.scheduler import Scheduler
from omlx.core.usage import GdnGauges, ModelFacts
from omlx.engine.kv import UnsupportedModel
from omlx.engine.load import LoadedModel, load, working_set_bytes
from omlx.engine.step import Engine, StepOutput
from omlx.engine.thread import EngineThread
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import GaveUp, Supervisor
from omlx.models.fingerprint import fingerprint
from omlx.models.locate import Located, ModelUnavailable
from omlx.models.obtain import obtain
from omlx.settings import Loaded
from omlx.web.edge import Edge
from omlx.web.server import make_app, make_runner

log = logging.getLogger("omlx")

MAX_RESTARTS, RESTART_PERIOD_S = 3, 60.0
SCAN_WAIT_S = 5.0
"""After this the server is ready although not every cache file is known: those are misses."""

FLOAT32_SHARE = 0.5
"""Of the memory budget: what float32 weights may take on CPU."""

CHUNK_TOKENS = {"cpu": 128, "metal": 2048, "cuda": 2048}
"""Prefill chunks by backend, under the ceiling of ``prefill_step_tokens``. On CPU smaller ones
are faster: 1,490 tokens of SmolLM2 in float32 took 75 tok/s at 2048 and 112 tok/s at 128."""

DRAIN_S = 5.0
FLUSH_BYTES_PER_S = 50_000_000
"""Slower than any disk we met; the deadline for the last writes follows from it."""


class StartFailed(Exception):
    """The server can't start. The text is one clear line; ``code`` the process's exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


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


class App:
    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.settings = loaded.settings
        self.stopping = asyncio.Event()
        budget = RestartBudget(MAX_RESTARTS, RESTART_PERIOD_S)
        self.front = Supervisor(budget, drain_s=DRAIN_S)
        stats: Any = self.front.add("stats", Stats.capacity, self._build_stats)
        self.edge = Edge(loaded, stats, started_at=time.time())
        self.thread = EngineThread()
        self.disk_threads: list[ThreadPoolExecutor] = []
        self.lock: DirectoryLock | None = None

    def _build_stats(self) -> Stats:
        settings = self.settings
        gdn = GdnGauges(
            storage=settings.gdn_snapshot_storage, codec=settings.gdn_sidecar_state_dtype
        )
        return Stats(StatsFile(self.loaded.home / "stats.json"), gdn)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises StartFailed or GaveUp."""
        runner = make_runner(make_app(self.edge))
        await runner.setup()
        stop_front = asyncio.Event()
        front = asyncio.create_task(self.front.run(stop_front), name="front")
        try:
            await self._bind(runner)
            self._catch_signals()
            serving = asyncio.create_task(self._serve(), name="serve")
            await asyncio.wait({serving, front}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                serving.cancel()
                await asyncio.wait({serving})
                await front
            await serving
        finally:
            self.edge.state = "stopping"
            await runner.cleanup()
            stop_front.set()
            await asyncio.wait({front})
            self.thread.close()
            for thread in self.disk_threads:
                thread.shutdown(wait=True, cancel_futures=True)
            if self.lock is not None:
                self.lock.release()

    # ── start ────────────────────────────────────────────────────────────────────────────────

    async def _bind(self, runner: web.AppRunner) -> None:
        host, port = self.settings.host, self.settings.port
        try:
            site = web.TCPSite(runner, host, port, backlog=self.settings.max_connections)
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartFailed(
                    3, f"port {port} on {host} is in use; stop that server or choose --port"
                ) from None
            raise StartFailed(2, f"can't listen on {host}:{port}: {error.strerror}") from None
        address = runner.addresses[0]
        log.info("omlx %s on http://%s:%d, dashboard at /admin", __version__, host, address[1])

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        log.info("stopping: finishing what runs, for at most %g s", self.settings.drain_timeout_s)
        self.edge.state = "stopping"
        self.stopping.set()

    async def _serve(self) -> None:
        root = self._lock_cache_directory()
        located, path = await self._obtain()
        model = await self._load(path)
        budget = make_budget(self.loaded, model.cache, await self._working_set(), root)
        namespace = namespace_of(
            await asyncio.to_thread(fingerprint, path), model.cache, budget.sizes.block_size
        )
        announce(self.loaded, located.id, model, budget, root)
        supervisor = self._build_actors(located, model, budget, namespace, root)
        back = asyncio.create_task(supervisor.run(self.stopping), name="back")
        ready = asyncio.create_task(self._become_ready(), name="ready")
        await asyncio.wait({back})
        ready.cancel()
        await back

    def _lock_cache_directory(self) -> Path | None:
        """The directory of the SSD tier, ours alone; None when that tier is off."""
        settings = self.settings
        if not settings.cache_enabled or settings.ssd_cache_max_size.is_zero:
            return None
        root = settings.ssd_cache_dir
        try:
            self.lock = DirectoryLock(root)
        except CacheDirectoryLocked as error:
            raise StartFailed(4, str(error)) from None
        except CacheDirectoryUnusable as error:
            if self.loaded.is_set("ssd_cache_dir"):
                raise StartFailed(2, f"{error}; name another with --ssd-cache-dir") from None
            log.warning("%s; the SSD tier is off", error)
            return None
        return root

    async def _obtain(self) -> tuple[Located, Path]:
        settings = self.settings
        try:
            return await asyncio.to_thread(obtain, settings.model, settings.model_dir)
        except ModelUnavailable as error:
            raise StartFailed(5, str(error)) from None

    async def _load(self, path: Path) -> LoadedModel:
        limit = int(FLOAT32_SHARE * (await self._memory()))
        try:
            return await self.thread.call(load, path, limit)
        except (UnsupportedModel, ValueError, FileNotFoundError) as error:
            raise StartFailed(5, f"the model in {path} can't be served: {error}") from None

    async def _working_set(self) -> int | None:
        return await self.thread.call(working_set_bytes)

    async def _memory(self) -> int:
        whole = await self._working_set() or host_memory_bytes()
        return self.settings.memory_budget.resolve(whole)

    def _build_actors(
        self,
        located: Located,
        model: LoadedModel,
        budget: Budget,
        namespace: str,
        root: Path | None,
    ) -> Supervisor:
        settings, sizes, stats = self.settings, budget.sizes, self.edge.stats
        caching = settings.cache_enabled and model.cache.why_not_cacheable is None
        files = None
        if root is not None and sizes.ssd_limit_bytes and caching:
            files = BlockFiles(
                root,
                namespace,
                model.cache,
                sizes.block_size,
                settings.gdn_sidecar_state_dtype,
            )
        ahead = model.backend != "cpu"
        engine = EngineOnThread(Engine(model.model, model.cache, ahead=ahead), self.thread)
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
            in_writer, in_reader = self._disk_thread("ssd-write"), self._disk_thread("ssd-read")
            writer = supervisor.add(
                "ssd_writer",
                SsdWriter.capacity,
                lambda: SsdWriter(files, cache, in_writer),
                drain_s=flush_s,
            )
            reader = supervisor.add(
                "ssd_reader", SsdReader.capacity, lambda: SsdReader(files, in_reader)
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
            caching=caching,
            feeds_ahead=ahead,
            checkpoint_interval=(
                settings.gdn_checkpoint_interval if model.cache.is_recurrent else None
            ),
            cut_before_decode=model.cache.is_recurrent or model.cache.count(LayerKind.ROTATING) > 0,
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
        edge = self.edge
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

    def _disk_thread(self, name: str) -> InThread:
        """A thread for one actor's files. It outlives the actor, so its calls stay in order."""
        thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.disk_threads.append(thread)
        return partial(asyncio.get_running_loop().run_in_executor, thread)

    async def _become_ready(self) -> None:
        assert self.edge.cache is not None, "the actors are built"
        deadline = time.monotonic() + SCAN_WAIT_S
        while time.monotonic() < deadline:
            if await self.edge.cache.ask(IsScanned()):
                break
            await asyncio.sleep(0.02)
        if self.edge.state == "loading":
            self.edge.state = "ready"
            log.info("ready")


def resolve_storage(setting: str, *, ssd: bool) -> str:
    """What ``gdn_snapshot_storage`` means here: auto is sidecars where there are files at all."""
    if setting != "auto":
        return setting
    return "ssd_sidecar" if ssd else "embedded"


async def serve(loaded: Loaded) -> int:
    """Run the server; returns the process's exit code."""
    try:
        await App(loaded).run()
    except StartFailed as failed:
        log.error("%s", failed)
        return failed.code
    except GaveUp as error:
        log.critical("giving up: %s", error, exc_info=error.__cause__)
        return 70
    log.info("stopped")
    return 0
