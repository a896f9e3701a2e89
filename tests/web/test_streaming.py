"""What every stream and every answer has in common, whatever the dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from omlx.actors.messages import Tick
from omlx.core.sequence import Request
from omlx.core.usage import ModelFacts
from omlx.kernel.mailbox import Mailbox, Ref
from omlx.kernel.message import ActorGone
from omlx.settings import load_settings
from omlx.web import prompt_usage, sse, streaming
from omlx.web.edge import Edge
from tests.web.serving import Server, chat

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_whose_engine_stands_still_ends_with_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """B95: no heartbeat hides that nothing will come."""
    monkeypatch.setattr(sse.with_heartbeat, "__defaults__", (0.02,))
    monkeypatch.setattr(streaming, "STALLED_S", 0.3)
    server.gate.hold("start")
    body = {**STREAMS[path], "stream": True}
    async with server.http.post(f"{server.url}{path}", json=body) as answer:
        raw = await answer.text()
    server.gate.open()

    assert "made no step" in raw
    assert '"finish_reason":"stop"' not in raw
    assert "message_stop" not in raw
    assert "response.completed" not in raw
    await server.handling(0)


@pytest.mark.parametrize("path", STREAMS)
async def test_an_answer_whose_engine_stands_still_is_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(sse.with_heartbeat, "__defaults__", (0.02,))
    monkeypatch.setattr(streaming, "STALLED_S", 0.3)
    server.gate.hold("start")
    status, answer, headers = await server.post(STREAMS[path], path)
    server.gate.open()

    assert status == 503
    assert "made no step" in answer["error"]["message"]
    assert int(headers["Retry-After"]) >= 1
    await server.handling(0)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_one_id_in_its_headers_its_body_and_the_list(
    server: Server, path: str, stream: bool
) -> None:
    body = {**STREAMS[path], "stream": stream}
    async with server.watching() as ended:
        async with server.http.post(f"{server.url}{path}", json=body) as answer:
            raw = await answer.text()
        record = await ended()

    name = answer.headers["x-request-id"]
    assert name == answer.headers["request-id"] == record["id"]
    assert f'"id":"{name}"' in raw
    assert record["route"] == path


@pytest.mark.parametrize("path", STREAMS)
async def test_a_request_that_fails_is_known_by_the_id_that_its_client_got(
    server: Server, path: str
) -> None:
    server.gate.break_at("start")
    async with server.watching() as ended:
        status, _, headers = await server.post(STREAMS[path], path)
        record = await ended()

    assert status == 500
    assert record["state"] == "failed"
    assert headers["x-request-id"] == record["id"]


async def test_every_other_answer_has_an_id_too(server: Server) -> None:
    names: set[str] = set()
    for method, path in (
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("POST", "/v1/messages"),
        ("GET", "/nothing"),
        ("PUT", "/health"),
    ):
        async with server.http.request(method, f"{server.url}{path}") as answer:
            assert answer.headers["x-request-id"] == answer.headers["request-id"]
            names.add(answer.headers["x-request-id"])

    assert len(names) == 5
    assert all(name.startswith("req_") for name in names)


async def test_names_of_ignored_fields_cannot_break_a_header(server: Server) -> None:
    odd = {"a\r\nSet-Cookie: x": 1, "é": 1, "x" * 200: 1, "": 1, "a,b": 1}
    many = {f"f{n}": 1 for n in range(1000)}
    _, _, few = await server.post(chat("x", **odd, store=True, user=None))
    _, _, cut = await server.post(chat("x", **many))

    assert few["x-omlx-ignored"] == "store"
    assert "Set-Cookie" not in few
    assert len(cut["x-omlx-ignored"].split(",")) == 32


@pytest.mark.parametrize("trouble", ["full", "gone", "silent"])
async def test_a_stream_begins_without_the_cache_when_that_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """What a look-up found is told at the end all the same."""
    monkeypatch.setattr(prompt_usage, "PROBE_S", 0.01)
    mailbox = Mailbox(1)
    edge = Edge(load_settings({}, {}, tmp_path), Ref("stats", Mailbox(1)))
    edge.model = ModelFacts(block_size=16)
    edge.cache = Ref("cache", mailbox)
    if trouble == "full":
        edge.cache.offer(Tick())
    if trouble == "gone":
        mailbox.close(ActorGone("on purpose"))

    request = Request("r", tuple(range(33)), max_tokens=1)
    cached = await prompt_usage.expected_cached(edge, request)
    found = prompt_usage.expected_split(edge, request, cached)

    assert cached is None
    assert found == prompt_usage.PromptSplit(read=0, written=32, rest=1)


async def test_heartbeats_follow_the_clock_and_not_the_items() -> None:
    """Each comes after that long without anything, and none after the end."""

    async def items() -> AsyncIterator[str]:
        yield "a"
        await later.wait()
        yield "b"

    later = asyncio.Event()
    found: list[str | None] = []
    async for item in sse.with_heartbeat(items(), 0.01):
        found.append(item)
        if found.count(None) == 3:
            later.set()

    assert found == ["a", None, None, None, "b"]


async def test_what_fails_among_the_items_is_raised_where_they_are_read() -> None:
    async def items() -> AsyncIterator[str]:
        yield "a"
        raise RuntimeError("on purpose")

    found: list[str | None] = []
    with pytest.raises(RuntimeError):
        async for item in sse.with_heartbeat(items(), 10):
            found.append(item)

    assert found == ["a"]
