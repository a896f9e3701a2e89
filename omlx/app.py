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
from pathlib import Path
from typing import Any

from aiohttp import web

from omlx import __version__
from omlx.actor_tree import MAX_RESTARTS, RESTART_PERIOD_S, build_actors
from omlx.actors.daemon_threads import DaemonThreads
from omlx.actors.history import HistoryInThread
from omlx.actors.messages import BeginFlush, IsScanned
from omlx.actors.stats import Stats
from omlx.actors.stats_file import StatsFile
from omlx.announce import announce
from omlx.budget import FLOAT32_SHARE, host_memory_bytes, make_budget
from omlx.cache.factory import namespace_of
from omlx.core.usage import GdnGauges
from omlx.disk.block_files import InThread
from omlx.disk.directory import CacheDirectory, CacheDirectoryLocked, CacheDirectoryUnusable
from omlx.disk.history_file import HistoryFile
from omlx.engine.host_memory import keep_freed_memory
from omlx.engine.kv import UnsupportedModel
from omlx.engine.load import LoadedModel, load, working_set_bytes
from omlx.engine.measure import measure_chunk
from omlx.engine.thread import EngineThread, take_short_turns
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import GaveUp, Supervisor
from omlx.live_settings import DRAIN_S, LiveSettings, Started, chunk_tokens
from omlx.models.fingerprint import fingerprint
from omlx.models.locate import Located, ModelUnavailable
from omlx.models.obtain import obtain
from omlx.settings import Loaded
from omlx.web.edge import Edge
from omlx.web.server import make_app, make_runner

log = logging.getLogger("omlx")

SCAN_WAIT_S = 5.0
"""After this the server is ready although not every cache file is known: those are misses."""

THREADS_S = 1.0
"""For the call a disk's thread is at; one that takes longer hangs."""


class StartFailed(Exception):
    """The server can't start. The text is one clear line; ``code`` the process's exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class App:
    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.settings = loaded.settings
        self.stopping = asyncio.Event()
        budget = RestartBudget(MAX_RESTARTS, RESTART_PERIOD_S)
        self.front = Supervisor(budget, drain_s=DRAIN_S)
        self.disk_threads: list[DaemonThreads] = []
        self.history = HistoryInThread(
            HistoryFile(loaded.home / "history.sqlite"),
            self._disk_threads(1, "history", background=True),
        )
        stats: Any = self.front.add("stats", Stats.capacity, self._build_stats)
        self.edge = Edge(loaded, stats, started_at=time.time())
        self.thread = EngineThread()
        self.back: asyncio.Task[None] | None = None
        self.directory: CacheDirectory | None = None

    def _build_stats(self) -> Stats:
        settings = self.settings
        gdn = GdnGauges(
            storage=settings.gdn_snapshot_storage, codec=settings.gdn_sidecar_state_dtype
        )
        return Stats(StatsFile(self.loaded.home / "stats.json"), gdn, history=self.history)

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
            for threads in self.disk_threads:
                if not threads.close(THREADS_S):
                    log.warning("the disk does not answer; leaving without it")
            if self.directory is not None:
                self.directory.release()

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
        if self.stopping.is_set():
            log.warning("stopping at once: what runs is cut, what is not written is dropped")
            if self.back is not None:
                self.back.cancel()
            return
        drain_s = self.edge.loaded.settings.drain_timeout_s
        log.info("stopping: finishing what runs, for at most %g s", drain_s)
        self.edge.state = "stopping"
        if self.edge.cache is not None:
            self.edge.cache.offer(BeginFlush())
        self.stopping.set()

    async def _serve(self) -> None:
        root = self._lock_cache_directory()
        located, path = await self._obtain()
        model = await self._load(path)
        working_set = await self._working_set()
        budget = make_budget(self.loaded, model.cache, working_set, root)
        namespace = namespace_of(
            await asyncio.to_thread(fingerprint, path), model.cache, budget.sizes.block_size
        )
        has_files = root is not None and budget.sizes.ssd_limit_bytes > 0
        peak = await self.thread.call(
            measure_chunk, model.model, chunk_tokens(self.loaded, model), budget.total_bytes
        )
        started = Started(model, working_set, root, has_files, peak)
        live = LiveSettings(self.loaded, started, self.edge)
        assert live.targets.limits.memory is not None, "a server counts its memory"
        announce(self.loaded, located.id, model, budget, live.targets.limits.memory, root)
        supervisor = build_actors(
            live,
            located,
            namespace,
            self.directory,
            self.thread,
            self._disk_threads,
            self.edge,
        )
        self.back = back = asyncio.create_task(supervisor.run(self.stopping), name="back")
        ready = asyncio.create_task(self._become_ready(), name="ready")
        await asyncio.wait({back})
        ready.cancel()
        if not back.cancelled():
            await back

    def _lock_cache_directory(self) -> Path | None:
        """The directory of the SSD tier, ours alone; None when that tier is off."""
        settings = self.settings
        if not settings.cache_enabled or settings.ssd_cache_max_size.is_zero:
            return None
        root = settings.ssd_cache_dir
        try:
            directory = CacheDirectory(root)
            directory.acquire()
            self.directory = directory
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

    def _disk_threads(self, count: int, name: str, *, background: bool = False) -> InThread:
        """Threads for one actor's files. They outlive it, so the calls of one stay in order."""
        threads = DaemonThreads(count, name, background=background)
        self.disk_threads.append(threads)
        return threads

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


async def serve(loaded: Loaded) -> int:
    """Run the server; returns the process's exit code."""
    take_short_turns()
    keep_freed_memory()  # a thread that has begun keeps a heap of its own
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
