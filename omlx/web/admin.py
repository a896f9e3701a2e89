"""The dashboard: its first page, the files of all pages, and the numbers behind them.

The pages hold no numbers. They fetch them as JSON and then listen to one stream of events, so
what a client sent (names, ids) never passes through a template.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from aiohttp import web

from omlx.actors.stats import to_json
from omlx.actors.stats_messages import Feed, FindRequest, ReadHistory, RecentRequests, Snapshot
from omlx.core.history import RESOLUTIONS
from omlx.core.usage_ledger import REQUESTS_KEPT
from omlx.kernel.message import ActorGone, Ask, Rejected
from omlx.kernel.stream import Stream
from omlx.resources import resource_dir
from omlx.web.edge import EDGE
from omlx.web.errors import ApiError, invalid
from omlx.web.pages import add_page
from omlx.web.sse import open_stream

R = TypeVar("R")

ANSWER_S = 5.0
"""How long the statistics may take; they answer from memory."""

HEARTBEAT_S = 15.0
RETRY_MS = 2000
"""After a lost connection a browser waits so long before it tries again."""

REQUESTS_SHOWN = 50

JSON_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# Kept, but asked about each time: the answer is a 304 until a new version is installed.
STATIC_HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}


def add_admin(app: web.Application) -> None:
    """Add the routes of the dashboard. ``app[EDGE]`` must be there before the first request."""
    add_page(app, "/admin", "overview")
    app.router.add_get("/admin/api/stats", stats)
    app.router.add_get("/admin/api/history", history)
    app.router.add_get("/admin/api/requests", requests)
    app.router.add_get("/admin/api/requests/{id}", one_request)
    app.router.add_get("/admin/events", events, allow_head=False)
    app.router.add_static("/static", resource_dir("static"))
    app.on_response_prepare.append(_mark_static)


async def _mark_static(request: web.Request, response: web.StreamResponse) -> None:
    if request.path.startswith("/static/"):
        response.headers.update(STATIC_HEADERS)


async def stats(request: web.Request) -> web.Response:
    return _json(await ask_stats(request, Snapshot()))


async def history(request: web.Request) -> web.Response:
    resolution = request.query.get("res", "1s")
    if resolution not in RESOLUTIONS:
        raise invalid(f"res must be one of {', '.join(RESOLUTIONS)}.", "res")
    return _json(await ask_stats(request, ReadHistory(resolution)))


async def requests(request: web.Request) -> web.Response:
    given = request.query.get("limit", str(REQUESTS_SHOWN))
    # int() alone would take spaces, signs, underscores and the digits of every script.
    limit = int(given) if re.fullmatch(r"[0-9]{1,6}", given) else 0
    if not 1 <= limit <= REQUESTS_KEPT:
        raise invalid(f"limit must be a whole number from 1 to {REQUESTS_KEPT}.", "limit")
    return _json(await ask_stats(request, RecentRequests(limit)))


async def one_request(request: web.Request) -> web.Response:
    found = await ask_stats(request, FindRequest(request.match_info["id"]))
    if found is None:
        raise ApiError(
            404,
            "There is no such request, or it ended too long ago.",
            param="id",
            code="not_found",
        )
    return _json(found)


async def events(request: web.Request) -> web.StreamResponse:
    last_id = request.headers.get("Last-Event-ID", "")
    after = int(last_id) if re.fullmatch(r"[0-9]{1,18}", last_id) else None
    feed = await ask_stats(request, Feed(after))
    async with feed:  # leaving it, for whatever reason, tells the writer
        response = await open_stream(request, **JSON_HEADERS)
        try:
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            told = None
            while (text := await _next(feed)) is not None:
                await response.write(text.encode())
                if told != (told := request.app[EDGE].captures.on):
                    # Without an id: who comes back is told anew how it is by then.
                    await response.write(f"event: capture\ndata: {to_json(told)}\n\n".encode())
        except ConnectionError:
            pass  # the browser has gone, which is how most feeds end
        return response


async def _next(feed: Stream[str]) -> str | None:
    """The next frame, or a comment when there was none for a while; None at the end."""
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return await anext(feed, None)
    except TimeoutError:
        return ": still here\n\n"


async def ask_stats(request: web.Request, message: Ask[R]) -> R:
    """Ask the statistics. Raises a 503 when they are overloaded, restarting or stopped."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await request.app[EDGE].stats.ask(message)
    except (Rejected, ActorGone, TimeoutError):
        raise ApiError(
            503,
            "The statistics are busy or restarting. Try again in a second.",
            kind="server_error",
            code="busy",
            headers={"Retry-After": "1"},
        ) from None


def _json(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/json", headers=JSON_HEADERS)
