"""Server-sent events out: frames, and a comment by the wall clock while nothing else comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import orjson
from aiohttp import web

T = TypeVar("T")

HEARTBEAT_S = 10.0
"""Proxies cut idle connections after 60 s, some clients complain after 20."""


async def open_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    """Send the headers of an event stream at once: clients count the time to the first byte."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            **headers,
        }
    )
    await response.prepare(request)
    return response


def data(value: Any) -> bytes:
    """One frame without an event name, as OpenAI's completions are streamed."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """One frame with its name: the clients of other streams pass over those without."""
    return b"event: " + name.encode() + b"\n" + data(value)


DONE = b"data: [DONE]\n\n"
COMMENT = b": working\n\n"


async def with_heartbeat(
    items: AsyncIterator[T], every_s: float = HEARTBEAT_S
) -> AsyncGenerator[T | None, None]:
    """The items, and None each time nothing came for ``every_s`` seconds."""
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(_next(items))
            done, _ = await asyncio.wait({pending}, timeout=every_s)
            if not done:
                yield None
                continue
            task, pending = pending, None
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if pending is not None and not pending.cancel() and not pending.cancelled():
            pending.exception()  # it ended just now, and nobody else will look at how


async def _next(items: AsyncIterator[T]) -> T:
    # A task can't end with StopIteration, but with StopAsyncIteration it can.
    return await anext(items)
