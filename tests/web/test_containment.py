"""What breaks ends as an error in its dialect; the next request is right and the server healthy.

A fault is put before each phase of a row in the engine, and into each actor on a request's way.
How long it takes is counted in the engine's work, never in seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omlx.engine.step import Engine
from omlx.kernel.supervisor import GaveUp
from tests import tiny
from tests.sim.world import Break
from tests.web.serving import (
    SOON_S,
    OnPurpose,
    Server,
    events,
    loop_for_ever,
    named_events,
    serving,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "alpha beta gamma delta"
LONG = 1000
WORK_MAX = 12
"""Calls of the engine's hook after the fault: a step of every slot, and what it leaves to store."""


@dataclass(frozen=True)
class Dialect:
    path: str
    ask: Callable[[str], dict[str, Any]]
    said: Callable[[dict[str, Any]], str]
    """The text of a whole answer."""
    error: Callable[[list[tuple[str, Any]]], dict[str, Any]]
    """What the last event of a broken stream says went wrong."""
    reasons: frozenset[str]
    """Events, or values in them, that say an answer ended as it should."""


def _chat_error(found: list[tuple[str, Any]]) -> dict[str, Any]:
    assert found[-1][1] == "[DONE]" and [data for _, data in found].count("[DONE]") == 1
    return found[-2][1]["error"]


def _responses_error(found: list[tuple[str, Any]]) -> dict[str, Any]:
    assert found[-1][0] == "response.failed"
    return found[-1][1]["response"]["error"]


def _messages_error(found: list[tuple[str, Any]]) -> dict[str, Any]:
    assert found[-1][0] == "error"
    return found[-1][1]["error"]


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": text}]},
        lambda answer: answer["choices"][0]["message"]["content"],
        _chat_error,
        frozenset({'"finish_reason":"stop"', '"finish_reason":"length"'}),
    ),
    "completions": Dialect(
        "/v1/completions",
        lambda text: {"prompt": text + "\n"},
        lambda answer: answer["choices"][0]["text"],
        _chat_error,
        frozenset({'"finish_reason":"stop"', '"finish_reason":"length"'}),
    ),
    "messages": Dialect(
        "/v1/messages",
        lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": LONG},
        lambda answer: answer["content"][0]["text"],
        _messages_error,
        frozenset({"message_stop", "message_delta"}),
    ),
    "responses": Dialect(
        "/v1/responses",
        lambda text: {"input": text},
        lambda answer: answer["output"][0]["content"][0]["text"],
        _responses_error,
        frozenset({"response.completed", "response.incomplete"}),
    ),
}
EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def ask(server: Server, dialect: Dialect, text: str, **fields: Any) -> dict[str, Any]:
    body = {**dialect.ask(text), "temperature": 0, **fields}
    status, answer, _ = await server.post(body, dialect.path)
    assert status == 200, answer
    return answer


async def broken(
    server: Server, dialect: Dialect, text: str, *, stream: bool, **fields: Any
) -> tuple[int, dict[str, Any]]:
    """How it is told: a status and the error; of a stream, 200 and the error in its last event."""
    body = {**dialect.ask(text), "temperature": 0, "stream": stream, **fields}
    async with server.http.post(f"{server.url}{dialect.path}", json=body) as answer:
        raw = await answer.text()
        if answer.content_type == "application/json":
            assert answer.status >= 400, raw
            return answer.status, json.loads(raw)["error"]
        assert answer.status == 200, raw
    assert not any(reason in raw for reason in dialect.reasons), raw
    if dialect.error is _chat_error:
        found = [("", data if data == "[DONE]" else json.loads(data)) for data in events(raw)]
    else:
        found = named_events(raw)
    return 200, dialect.error(found)


async def assert_serves(server: Server, dialect: Dialect, *texts: str) -> None:
    """Healthy, with nothing held; and these are answered as ever. A slot that was lost each time
    would be missed by the tests that follow: there are four of them.
    """
    async with server.http.get(f"{server.url}/health") as health:
        assert (health.status, (await health.json())["status"]) == (200, "ok")
    for text in (*texts, "after"):
        assert dialect.said(await ask(server, dialect, text)).strip() == TEXT
    assert (await server.clear_memory()).kept_in_use == 0


def work_after(server: Server, phase: str) -> int:
    """Calls of the hook since the last one at which it broke."""
    calls = server.gate.calls
    return len(calls) - 1 - max(n for n, call in enumerate(calls) if call == phase)


# ── in the engine ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("phase", ["restore", "prefill", "start", "decode"])
@EVERY
@STREAM
async def test_a_fault_before_the_first_token_is_told_at_once(
    server: Server, dialect: Dialect, phase: str, stream: bool
) -> None:
    """B32, B92: 500, or one error event after what begins a stream."""
    text = f"{phase} {stream} {dialect.path} " * 6
    server.gate.calls.clear()
    server.gate.break_at(phase)

    status, error = await broken(server, dialect, text, stream=stream)

    assert status == (200 if stream else 500)
    assert error["message"]
    assert "on purpose" not in json.dumps(error) and "Traceback" not in json.dumps(error)
    assert work_after(server, phase) <= WORK_MAX
    await assert_serves(server, dialect, text)


@EVERY
@STREAM
async def test_a_fault_in_the_middle_of_an_answer_ends_it_as_an_error(
    server: Server, dialect: Dialect, stream: bool
) -> None:
    """B32, B92: at its fifth token; what was said stays said, and no reason to end is made up."""
    server.gate.calls.clear()
    server.gate.break_at("decode", time=5)

    text = f"middle {stream} " * 6
    status, error = await broken(server, dialect, text, stream=stream)

    assert status == (200 if stream else 500)
    assert "on purpose" not in json.dumps(error)
    assert server.gate.calls.count("decode") == 5
    assert work_after(server, "decode") <= WORK_MAX
    await assert_serves(server, dialect, text)


@EVERY
@STREAM
async def test_a_block_that_cannot_be_stored_fails_no_answer(
    server: Server, dialect: Dialect, stream: bool
) -> None:
    """K7: what was computed is told all the same, and again when it is asked again."""
    text = f"store {stream} {dialect.path} " * 6
    server.gate.break_at("store")
    body = {**dialect.ask(text), "temperature": 0, "stream": stream}

    async with server.http.post(f"{server.url}{dialect.path}", json=body) as answer:
        raw = await answer.text()

    assert answer.status == 200
    assert " delta" in raw and "error" not in raw.replace('"error":null', "")
    assert any(reason in raw for reason in dialect.reasons) or not stream
    await assert_serves(server, dialect, text)


@pytest.mark.parametrize("phase", ["restore", "prefill", "start", "decode"])
@EVERY
async def test_who_decodes_beside_a_fault_is_answered_or_told(
    server: Server, dialect: Dialect, phase: str
) -> None:
    """B32: a row's fault is its own; of a step that broke everybody learns."""
    server.gate.hold("decode")
    async with server.opened("beside", **loop_for_ever(max_tokens=40)) as beside:
        await server.gate.reached()
        asked = asyncio.create_task(
            broken(server, dialect, f"victim {phase} {dialect.path} " * 6, stream=False)
        )
        await server.handling(2)
        server.gate.break_at(phase)
        server.gate.open()
        await asyncio.wait({asked}, timeout=SOON_S)
        found = events(await beside.text())

    if phase == "decode":
        assert json.loads(found[-2])["error"]["code"] == "engine_error"
        asked.cancel()  # it may have come after the step that broke
        await asyncio.wait({asked})
    else:
        assert asked.result()[0] == 500
        said = [json.loads(event)["choices"][0]["delta"].get("content") for event in found[:-1]]
        assert "".join(filter(None, said)).split() == [
            tiny.LOOP[(n + 1) % 3].strip() for n in range(40)
        ]
    await assert_serves(server, dialect)


# ── in an actor ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["scheduler", "cache", "runner"])
@EVERY
async def test_when_an_actor_crashes_all_who_run_and_wait_are_told_at_once(
    dialect: Dialect, name: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """B32, B92: none waits for the step that the engine is in, but if its own actor crashes."""
    async with serving(model_path("tape"), tmp_path, max_concurrent_requests=1) as server:
        await ask(server, dialect, "before")
        server.gate.hold("decode")
        running = asyncio.create_task(broken(server, dialect, "running " * 9, stream=True))
        await server.gate.reached()
        waiting = [
            asyncio.create_task(broken(server, dialect, f"waiting {stream}", stream=stream))
            for stream in (False, True)
        ]
        await server.handling(3)
        server.gate.calls.clear()

        getattr(server.app.edge, name).offer(Break())
        if name == "runner":
            server.gate.open()
        async with asyncio.timeout(SOON_S):
            told = await asyncio.gather(running, *waiting)

        assert [status for status, _ in told] == [200, 503, 200]
        for _, error in told:
            assert "restarting" in error["message"]
        assert server.gate.calls == [] or name == "runner", "the engine has not moved"
        server.gate.open()
        await assert_serves(server, dialect, "before", "running " * 9)


async def test_an_engine_that_can_not_begin_anew_ends_the_server(
    model_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K7: it gives up, which ends the process; who waits is told before."""
    chat = DIALECTS["chat"]
    told: list[tuple[int, dict[str, Any]]] = []
    with pytest.raises(GaveUp, match="model_runner crashed too often"):
        async with serving(model_path("tape"), tmp_path) as server:

            def lost(_: Engine) -> None:
                raise OnPurpose("the device is lost")

            monkeypatch.setattr(Engine, "reset", lost)
            server.gate.break_at("decode", time=3)
            told.append(await broken(server, chat, "lost", stream=True))
            assert server.app.back is not None
            await asyncio.wait({server.app.back}, timeout=SOON_S)

    assert "the device is lost" not in json.dumps(told)
    assert told[0][1]["code"] in ("engine_restarting", "server_shutdown")
