"""A whole server in this process: real actors, the real engine thread, real sockets, a tiny model.

Only the signals are left out, and the engine has a hook: a test can hold it at a phase of a
request, or break it there, and everything else goes on as it would.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

import omlx.actor_tree
from omlx.actors.messages import ClearCache, Cleared
from omlx.actors.stats_messages import Feed
from omlx.app import App
from omlx.engine.step import Engine
from omlx.settings import Loaded, load_settings, save_settings_file
from tests import tiny

SOON_S = 20.0
"""Far more than anything here takes; reached only by something that never comes."""


class OnPurpose(Exception):
    pass


class Gate:
    """The engine's hook. Called on its thread, before each phase of each row."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._fault: str | None = None
        self._fault_in = 0
        self._reached = threading.Event()
        self._open = threading.Event()
        self.calls: list[str] = []

    def __call__(self, phase: str, uid: object) -> None:
        self.calls.append(phase)
        if phase == self._fault:
            self._fault_in -= 1
            if self._fault_in == 0:
                self._fault = None
                raise OnPurpose("on purpose")
        if phase == self._phase:
            self._phase = None
            self._reached.set()
            assert self._open.wait(SOON_S), "nobody opened the gate"

    def hold(self, phase: str) -> None:
        """The next row that comes to ``phase`` waits there, and the engine with it."""
        self._reached.clear()
        self._open.clear()
        self._phase = phase

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, SOON_S), "nobody came to the gate"

    def open(self) -> None:
        self._phase = None
        self._open.set()

    def break_at(self, phase: str, time: int = 1) -> None:
        """The next row that comes to ``phase`` raises there; or the ``time``-th that does."""
        self._fault, self._fault_in = phase, time


class AppInTest(App):
    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.is_ready = asyncio.Event()

    def _catch_signals(self) -> None:
        """Those belong to pytest."""

    async def _become_ready(self) -> None:
        await super()._become_ready()
        self.is_ready.set()


@dataclass
class Server:
    app: App
    url: str
    gate: Gate
    http: aiohttp.ClientSession
    port: int

    @property
    def model(self) -> str:
        return self.app.edge.model.id

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """The official client; it checks nothing of what it parses, unless told so."""
        given = {"api_key": "not-needed", "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """The other official client."""
        given = {"api_key": "not-needed", "max_retries": 0, **options}
        return anthropic.AsyncAnthropic(base_url=self.url, **given)

    async def post(
        self, body: object, path: str = "/v1/chat/completions", **options: Any
    ) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, JSON and headers. ``body``: bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(f"{self.url}{path}", data=data, **options) as answer:
            return answer.status, await answer.json(), answer.headers

    async def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        status, answer, _ = await self.post(chat(text, **fields))
        assert status == 200, answer
        return answer

    async def stream(self, text: str, **fields: Any) -> list[str]:
        """The ``data:`` of each event of a streamed chat, in order."""
        body = chat(text, stream=True, **fields)
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            raw = await answer.text()
        return events(raw)

    async def events(self, body: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
        """Name and data of each named event of a stream, in order."""
        async with self.http.post(f"{self.url}{path}", json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            return named_events(await answer.text())

    @asynccontextmanager
    async def opened(self, text: str, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A streamed chat that was accepted; its first event is read already."""
        body = chat(text, stream=True, **fields)
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            yield answer

    async def raw(self, request: bytes, at_most: int = 1 << 30) -> bytes:
        """What comes back for the bytes of a request, until the server closes the connection.

        ``at_most``: give up waiting for the end once as many bytes have come.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            found = b""
            async with asyncio.timeout(SOON_S):
                while len(found) < at_most and (more := await reader.read(1 << 16)):
                    found += more
            return found
        finally:
            writer.close()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Callable[[], Any]]:
        """Gives a function that waits for the next request to end, and returns its row."""
        async with await self.app.edge.stats.ask(Feed()) as feed:

            async def ended() -> dict[str, Any]:
                async with asyncio.timeout(SOON_S):
                    async for frame in feed:
                        fields = dict(
                            line.split(": ", 1)
                            for line in frame.strip().split("\n")
                            if ": " in line
                        )
                        if fields["event"] == "request":
                            return json.loads(fields["data"])
                raise AssertionError("the feed ended")

            yield ended

    async def gauges(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first statistics that satisfy ``wanted``; there are new ones each second."""
        async with asyncio.timeout(SOON_S), await self.app.edge.stats.ask(Feed()) as feed:
            async for frame in feed:
                if frame.startswith("event: stats") and wanted(_data(frame)):
                    return _data(frame)
        raise AssertionError("the feed ended")

    async def handling(self, count: int) -> None:
        """Wait until as many requests run and wait."""
        await self.gauges(
            lambda stats: stats["engine"]["running"] + stats["engine"]["waiting"] == count
        )

    async def gone(self) -> None:
        """Wait until the server knows that the clients that left have left."""
        for _ in range(3):
            await self.http.get(f"{self.url}/health")

    async def clear_memory(self) -> Cleared:
        assert self.app.edge.cache is not None
        return await self.app.edge.cache.ask(ClearCache(hot=True, ssd=False))


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def loop_for_ever(**fields: Any) -> dict[str, Any]:
    """Fields that make the tape model answer " two three one two three ..." up to max_tokens."""
    return {"chat_template_kwargs": {"opening": tiny.LOOP[0]}, **fields}


def events(raw: str) -> list[str]:
    """The ``data:`` of each frame. Comments are left out; anything else is a broken stream."""
    frames = raw.removesuffix("\n\n").split("\n\n")
    for frame in frames:
        assert frame.startswith(("data: ", ": ")), frame
        assert "\n" not in frame, frame
    return [frame.removeprefix("data: ") for frame in frames if frame.startswith("data: ")]


def named_events(raw: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each frame, which says its name twice."""
    found: list[tuple[str, dict[str, Any]]] = []
    for frame in raw.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}", frame
        found.append((value["type"], value))
    return found


def _data(frame: str) -> dict[str, Any]:
    return json.loads(frame.split("data: ", 1)[1])


@asynccontextmanager
async def serving(
    model: Path,
    home: Path,
    *,
    variables: Mapping[str, str] | None = None,
    in_file: bool = False,
    **settings: object,
) -> AsyncIterator[Server]:
    """Serve until the block is left; then everything is drained and closed.

    ``settings`` are flags, or stand in the settings file if ``in_file``, unless they stand there
    already; ``variables`` are those of the environment.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {
        "port": port,
        "model": str(model),
        "paged_cache_block_size": 16,
        "prefill_step_tokens": 64,
        "drain_timeout_s": 5,
        **settings,
    }
    gate = Gate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omlx.actor_tree, "Engine", partial(Engine, hook=gate))
        if in_file:
            stored = load_settings({}, {}, home)
            save_settings_file(home, {n: v for n, v in given.items() if not stored.is_set(n)})
            given = {}
        app = AppInTest(load_settings(given, variables or {}, home))
        port = app.settings.port
        run = asyncio.create_task(app.run(), name="server")
        try:
            await _until_ready(app, run)
            async with aiohttp.ClientSession() as http:
                yield Server(app, f"http://127.0.0.1:{port}", gate, http, port)
        finally:
            gate.open()
            app.stopping.set()
            await run


async def _until_ready(app: AppInTest, run: asyncio.Task[None]) -> None:
    ready = asyncio.create_task(app.is_ready.wait())
    await asyncio.wait({ready, run}, timeout=SOON_S, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if run.done():
        run.result()
    assert app.edge.state == "ready"
