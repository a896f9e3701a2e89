"""Runs a generation and answers with it, whole or as a stream; the shapes are the dialect's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson
from aiohttp import web

from omlx.actors.messages import Ended, TextDelta
from omlx.actors.stats_messages import Snapshot
from omlx.core.pieces import Piece, joined, text_of
from omlx.core.plan import Sampled
from omlx.core.usage import RequestRecord
from omlx.kernel.message import ActorGone, MailboxFull
from omlx.web import sse
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import ApiError, from_exception
from omlx.web.generation import Item, Prepared, actors_of, running
from omlx.web.ids import set_request_id
from omlx.web.prompt_usage import expected_cached

STALLED_S = 120.0
"""An answer whose engine makes no step for so long ends, in a stream as well: its heartbeat must
not hide that."""


class Frames(Protocol):
    """One stream in one dialect. Each method gives the bytes to send, maybe none."""

    def begin(self) -> bytes: ...

    def item(self, item: Item) -> bytes: ...

    def heartbeat(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes: ...

    def end(self) -> bytes: ...


@dataclass
class Choice:
    """What has come of one choice, in order."""

    items: list[Item] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        return joined(piece for item in self.items for piece in item.pieces)

    @property
    def sampled(self) -> list[Sampled]:
        deltas = [item for item in self.items if isinstance(item, TextDelta)]
        return [one for delta in deltas for one in delta.sampled]

    @property
    def finish_reason(self) -> str | None:
        last = self.items[-1]
        return None if isinstance(last, TextDelta) else last.finish_reason

    @property
    def whole_text(self) -> str:
        return text_of(self.pieces)


async def collect(
    request: web.Request, prompts: Sequence[Prepared]
) -> tuple[list[Choice], list[RequestRecord]]:
    """Every choice, those of a prompt together, and one record a prompt.

    Raises ApiError when the engine has made no step for too long.
    """
    choices = [Choice() for prepared in prompts for _ in range(prepared.request.n)]
    records: list[RequestRecord] = []
    async with AsyncExitStack() as stack:
        items = sse.with_heartbeat(await _started(request, prompts, stack))
        async for item in await stack.enter_async_context(aclosing(items)):
            if item is None:
                await _check_progress(request.app[EDGE])
                continue
            choices[item.index].items.append(item)
            if isinstance(item, Ended):
                records.append(item.record)
    assert len(records) == len(prompts), "a stream ends with its record or with an error"
    return choices, records


async def stream(
    request: web.Request, prompts: Sequence[Prepared], frames: Frames, headers: dict[str, str]
) -> web.StreamResponse:
    """Send the headers and what begins the stream at once, then what comes as it comes."""
    async with AsyncExitStack() as stack:
        items = await _started(request, prompts, stack)
        response = await sse.open_stream(request, **headers)
        async with aclosing(_body(request.app[EDGE], frames, items)) as body:
            async for frame in body:
                await response.write(frame)
        await response.write_eof()
    return response


async def _started(
    request: web.Request, prompts: Sequence[Prepared], stack: AsyncExitStack
) -> AsyncIterator[Item]:
    """Submit every prompt, and give the items of one after the other.

    They are computed together all the same: a stream has room for all that it is told.
    """
    edge = request.app[EDGE]
    actors = actors_of(edge)
    set_request_id(request, prompts[0].request.request_id)  # whatever comes of it
    streams = [await stack.enter_async_context(running(edge, actors, one)) for one in prompts]
    return _in_turn(streams, prompts[0].request.n)


async def _in_turn(streams: list[AsyncIterator[Item]], choices: int) -> AsyncIterator[Item]:
    for number, items in enumerate(streams):
        async for item in items:
            yield replace(item, index=item.index + number * choices) if number else item


async def _body(
    edge: Edge, frames: Frames, items: AsyncIterator[Item]
) -> AsyncGenerator[bytes, None]:
    """The headers are out, so whatever fails from here on is an event."""
    yield frames.begin()
    try:
        async with aclosing(sse.with_heartbeat(_frames_of(frames, items))) as beating:
            async for frame in beating:
                if frame is None:
                    await _check_progress(edge)
                    frame = frames.heartbeat()
                yield frame
    except Exception as failed:
        yield frames.failed(from_exception(failed))
    if last := frames.end():
        yield last


async def _frames_of(frames: Frames, items: AsyncIterator[Item]) -> AsyncIterator[bytes]:
    """Without the empty ones: what shows a client nothing does not keep its connection alive."""
    async for item in items:
        if frame := frames.item(item):
            yield frame


async def _check_progress(edge: Edge) -> None:
    """Raises ApiError when the engine has made no step for too long."""
    try:
        async with asyncio.timeout(1):
            snapshot: dict[str, Any] = orjson.loads(await edge.stats.ask(Snapshot()))
    except (ActorGone, MailboxFull, TimeoutError):
        return  # the statistics say nothing, which says nothing about the engine
    if snapshot["engine"]["last_step_age_s"] > STALLED_S:
        raise ApiError(
            503,
            f"The engine made no step for {STALLED_S:.0f} s.",
            kind="server_error",
            code="engine_stalled",
            headers={"Retry-After": "10"},
        )


def answer_headers(records: Sequence[RequestRecord], ignored: str) -> dict[str, str]:
    """Of a whole answer."""
    return _headers(sum(record.cached_tokens for record in records), ignored)


async def stream_headers(
    edge: Edge, prompts: Sequence[Prepared], ignored: str
) -> tuple[dict[str, str], int | None]:
    """Of a stream, and the number in them: what the cache has now. Left out when it is busy.

    The headers go out before the request has its turn, and its end tells what was the case then.
    """
    cached = await expected_cached(edge, *(prepared.request for prepared in prompts))
    return _headers(cached, ignored), cached


def _headers(cached: int | None, ignored: str) -> dict[str, str]:
    found = {} if cached is None else {"x-omlx-cached": str(cached)}
    return {**found, "x-omlx-ignored": ignored} if ignored else found
