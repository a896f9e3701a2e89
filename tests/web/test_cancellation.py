"""A client that goes, wherever its request is: all it held is free, what it computed is kept.

Each place on the way is held while the client goes: in the queue, while its blocks are read from
files, and before each phase in the engine.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omlx.disk.block_files import BlockFiles
from tests.web.serving import SOON_S, Server, serving
from tests.web.test_containment import EVERY, STREAM, TEXT, Dialect, ask

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
CHUNK = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_slot(
    model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """A slot that is not given back is missed by the next test."""
    home = tmp_path_factory.mktemp("home")
    async with serving(model_path("tape"), home, max_concurrent_requests=1) as server:
        yield server


class Reads:
    """Of block files; they can be held in the reader's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()
        read = BlockFiles.read

        def held(files: BlockFiles, expected: Any) -> Any:
            self._begun.set()
            assert self._go_on.wait(SOON_S), "nobody let it go on"
            return read(files, expected)

        monkeypatch.setattr(BlockFiles, "read", held)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, SOON_S), "nothing was read"

    def open(self) -> None:
        self._go_on.set()


@asynccontextmanager
async def gone(
    server: Server, dialect: Dialect, text: str, *, stream: bool
) -> AsyncIterator[Callable[[], dict[str, Any]]]:
    """Ask; the client goes when the block is left. Gives what tells of the request afterwards."""
    body = {**dialect.ask(text), "temperature": 0, "stream": stream}
    data = json.dumps(body).encode()
    ended: list[dict[str, Any]] = []
    async with server.watching() as wait:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(
            b"POST " + dialect.path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: %d\r\n\r\n" % len(data) + data
        )
        yield lambda: ended[0]
        client.close()
        await server.gone()
        server.gate.calls.clear()
        server.gate.open()
        while (row := await wait())["state"] == "completed":
            pass  # somebody else's
        ended.append(row)


@pytest.mark.parametrize(
    ("phase", "whole"),
    [("restore", False), ("prefill", False), ("start", True), ("decode", True)],
)
@EVERY
@STREAM
async def test_a_client_that_goes_leaves_what_it_computed_and_nothing_else(
    one_slot: Server,
    dialect: Dialect,
    phase: str,
    whole: bool,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B35: within a step; ``whole``: its prompt was computed by then."""
    text = f"{phase} {stream} {dialect.path} " * 5
    one_slot.gate.hold(phase)
    async with gone(one_slot, dialect, text, stream=stream) as told:
        await one_slot.gate.reached()

    record = told()
    assert record["state"] == "cancelled"
    # The step that it was in is computed to its end, and no other one.
    assert record["generated_tokens"] <= (phase == "decode")
    assert one_slot.gate.calls.count("decode") + one_slot.gate.calls.count("prefill") <= 1
    probe = await ask(one_slot, dialect, text)
    assert dialect.said(probe).strip() == TEXT
    reused = sum(probe["omlx"]["cached_from"].values())
    assert reused >= record["computed_tokens"] + record["cached_tokens"] - 1
    assert reused == record["prompt_tokens"] - 1 or not whole
    assert reused >= CHUNK or phase == "restore"
    assert (await one_slot.clear_memory()).kept_in_use == 0
    assert not [entry for entry in caplog.records if entry.exc_info]


@EVERY
@STREAM
async def test_a_client_that_goes_while_it_waits_is_never_computed(
    one_slot: Server, dialect: Dialect, stream: bool
) -> None:
    """B35, B89: who has the slot is answered, and nothing was looked up for the other."""
    await one_slot.handling(0)  # or what was the case a second ago would do
    one_slot.gate.hold("start")
    first = asyncio.create_task(ask(one_slot, dialect, f"first {stream}"))
    await one_slot.gate.reached()
    async with gone(one_slot, dialect, "waits " * 20, stream=stream) as told:
        await one_slot.handling(2)

    assert dialect.said(await first).strip() == TEXT
    assert told()["state"] == "cancelled"
    assert (told()["computed_tokens"], told()["generated_tokens"]) == (0, 0)
    assert "restore" not in one_slot.gate.calls
    assert (await one_slot.clear_memory()).kept_in_use == 0


@EVERY
@STREAM
async def test_a_client_that_goes_while_its_files_are_read_frees_its_slot_before_the_disk_answers(
    one_slot: Server, dialect: Dialect, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B35, B61: another request has the slot meanwhile, and the files serve the next one."""
    text = f"files {stream} {dialect.path} " * 5
    await ask(one_slot, dialect, text)
    await one_slot.gauges(lambda stats: stats["cache"]["pending_bytes"] == 0)
    await one_slot.clear_memory()

    with monkeypatch.context() as patch:
        reads = Reads(patch)
        async with gone(one_slot, dialect, text, stream=stream) as told:
            await reads.reached()
        assert told()["state"] == "cancelled"
        assert told()["computed_tokens"] == 0
        assert one_slot.gate.calls == [], "it never had a row"
        other = await ask(one_slot, dialect, "other", cache_salt=f"{stream} {dialect.path}")
        assert dialect.said(other).strip() == TEXT
        reads.open()

    again = await ask(one_slot, dialect, text)
    assert dialect.said(again).strip() == TEXT
    assert again["omlx"]["computed_tokens"] <= 16
    assert (await one_slot.clear_memory()).kept_in_use == 0


async def test_after_all_of_them_nothing_runs_waits_or_is_held(one_slot: Server) -> None:
    def at_rest(stats: dict[str, Any]) -> bool:
        cache = stats["cache"]
        held = cache["blocks_total"] - cache["blocks_free"] - cache["blocks_cached"]
        return stats["engine"]["running"] == stats["engine"]["waiting"] == held == 0

    stats = await one_slot.gauges(at_rest)
    assert stats["session"]["requests"]["failed"] == 0
    assert stats["running"] == []
