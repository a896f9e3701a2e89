"""The dashboard on a real socket, with real statistics under a real supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from omlx.actors.stats import Stats
from omlx.actors.stats_file import StatsFile
from omlx.kernel.mailbox import Ref
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import Supervisor
from omlx.settings import load_settings
from omlx.web.admin import add_admin
from omlx.web.admin_requests import add_admin_requests
from omlx.web.captures import Captures
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import error_middleware
from omlx.web.metrics import add_metrics


@dataclass
class Served:
    server: TestServer
    stats: Ref[Any]
    actor: list[Stats]
    """Its lives; the last is the present one."""
    captures: Captures
    stop: asyncio.Event
    """Stops the statistics, not the server."""


@asynccontextmanager
async def dashboard(home: Path, **settings: object) -> AsyncIterator[Served]:
    lives: list[Stats] = []

    def build() -> Stats:
        lives.append(Stats(StatsFile(home / "stats.json")))
        return lives[-1]

    supervisor = Supervisor(RestartBudget(3, 10.0))
    stats = supervisor.add("stats", Stats.capacity, build)
    app = web.Application(middlewares=[error_middleware])
    app[EDGE] = Edge(loaded=load_settings(settings, {}, home), stats=stats)
    add_admin(app)
    add_admin_requests(app)
    add_metrics(app)
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    server = TestServer(app)
    await server.start_server()
    try:
        yield Served(server, stats, lives, app[EDGE].captures, stop)
    finally:
        stop.set()
        await running
        await server.close()
