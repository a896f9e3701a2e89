"""What a client may rely on whatever dialect it speaks, in a stream and without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omlx.web import sse
from tests import tiny
from tests.web.serving import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)

HEARTBEATS = {
    CHAT: b": ",
    COMPLETIONS: b": ",
    MESSAGES: b"event: ping\n",
    RESPONSES: b"event: response.in_progress\n",
}
"""What the frame of a sign of life begins with. A client of responses drops comments."""

LIMIT = {RESPONSES: "max_output_tokens"}
ENDS = ('"finish_reason":"', "message_stop", "message_delta", "response.completed",
        "response.incomplete")  # fmt: skip


def asking(path: str, text: str, limit: int = 4, **fields: Any) -> dict[str, Any]:
    user = [{"role": "user", "content": text}]
    prompt = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": user}}
    return {
        **prompt.get(path, {"messages": user}),
        LIMIT.get(path, "max_tokens"): limit,
        "temperature": 0,
        **fields,
    }


def for_ever(path: str, text: str) -> dict[str, Any]:
    """What the tape model answers until the end of its context."""
    if path == COMPLETIONS:
        return asking(path, tiny.LOOP[0], tiny.CONTEXT)
    options = {"chat_template_kwargs": {"opening": tiny.LOOP[0]}}
    return asking(path, text, tiny.CONTEXT, **options)


async def streamed(server: Server, path: str, body: dict[str, Any]) -> tuple[str, Any]:
    """The whole stream, and the headers that came before it."""
    async with server.http.post(f"{server.url}{path}", json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text(), answer.headers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(
    model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    home = tmp_path_factory.mktemp("strict")
    async with serving(model_path("tape"), home, strict_requests=True) as running:
        yield running


# ── while nothing comes ──────────────────────────────────────────────────────────────────────


async def test_a_sign_of_life_comes_every_ten_seconds() -> None:
    """Twice in the 20 s after which some clients complain."""
    assert sse.HEARTBEAT_S == 10.0
    assert sse.with_heartbeat.__defaults__ == (sse.HEARTBEAT_S,)


@pytest.mark.parametrize("path", PATHS)
async def test_an_idle_stream_gives_the_signs_of_life_of_its_dialect(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(sse.with_heartbeat, "__defaults__", (0.02,))
    server.gate.hold("start")
    body = {**asking(path, "idle"), "stream": True}
    async with server.http.post(f"{server.url}{path}", json=body) as answer:
        begun = [await answer.content.readuntil(b"\n\n") for _ in range(2)]
        beats = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
        server.gate.open()
        rest = await answer.text()

    assert not begun[0].startswith(HEARTBEATS[path]), "the stream begins with something else"
    assert all(beat.startswith(HEARTBEATS[path]) for beat in beats)
    assert any(end in rest for end in ENDS)


# ── once the headers are out ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PATHS)
async def test_what_fails_then_is_an_event_and_no_end_is_made_up(server: Server, path: str) -> None:
    server.gate.break_at("start")
    found, _ = await streamed(server, path, asking(path, f"breaks {path}"))

    assert "error" in found
    assert "on purpose" not in found
    assert not any(end in found for end in ENDS)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_the_servers_end_cuts_is_told_so(
    model_path: ModelPath, tmp_path: Path, path: str
) -> None:
    """Not with a reason that is made up."""
    async with serving(model_path("tape"), tmp_path, drain_timeout_s=0) as server:
        server.gate.hold("decode")
        asked = asyncio.create_task(streamed(server, path, for_ever(path, "cut")))
        await server.gate.reached()
        server.app.stopping.set()
        server.gate.open()
        found, _ = await asked

    assert "the server is shutting down" in found.lower()
    assert not any(end in found for end in ENDS)
    if path in (CHAT, COMPLETIONS):
        assert '"code":"server_shutdown"' in found


# ── to fill the cache ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_at_all_fill_the_cache_and_answer_nothing(
    server: Server, path: str, stream: bool
) -> None:
    text = f"to be filled {path} {stream}"
    async with server.watching() as ended:
        if stream:
            raw, _ = await streamed(server, path, asking(path, text, 0))
        else:
            status, answer, _ = await server.post(asking(path, text, 0), path)
            assert status == 200, answer
            raw = json.dumps(answer)
        row = await ended()
    _, after, _ = await server.post(asking(path, text), path)

    assert row["state"] == "completed"
    assert row["generated_tokens"] == 0
    assert row["finish_reason"] == "length"
    assert not any(word in raw for word in ("alpha", "beta"))
    assert after["omlx"]["computed_tokens"] == 1


# ── what was found ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_says_in_its_headers_what_the_cache_has(server: Server, path: str) -> None:
    """As a whole answer does: the number is looked up before the headers go out."""
    body = asking(path, f"looked up before {path}")
    _, cold = await streamed(server, path, body)
    _, warm = await streamed(server, path, body)
    _, answer, whole = await server.post(body, path)

    assert int(cold["x-omlx-cached"]) < int(warm["x-omlx-cached"])
    assert warm["x-omlx-cached"] == whole["x-omlx-cached"]
    assert int(whole["x-omlx-cached"]) == answer["omlx"]["cached_from"]["ram"] > 10


async def test_several_prompts_are_one_number(server: Server) -> None:
    body = {"prompt": ["several prompts, one", "several prompts, two"], "max_tokens": 1}
    await server.post(body, COMPLETIONS)
    _, headers = await streamed(server, COMPLETIONS, body)
    _, answer, whole = await server.post(body, COMPLETIONS)

    told = sum(one["cached_from"]["ram"] for one in answer["omlx"])
    assert int(headers["x-omlx-cached"]) == int(whole["x-omlx-cached"]) == told


# ── what means nothing here ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_ignored_is_listed(server: Server, path: str, stream: bool) -> None:
    body = asking(path, "ignored", service_tier="auto", seventh_sense=True)
    if stream:
        _, headers = await streamed(server, path, body)
    else:
        _, _, headers = await server.post(body, path)

    assert headers["x-omlx-ignored"] == "service_tier,seventh_sense"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"seventh_sense": True}, "seventh_sense"),
        ({"prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options.ttl"),
    ],
)
async def test_strict_requests_are_refused_by_the_first_such_name(
    strict: Server, path: str, stream: bool, fields: dict[str, Any], name: str
) -> None:
    """Before anything is computed, and so as a status in both modes."""
    status, answer, _ = await strict.post(asking(path, "strict", stream=stream, **fields), path)

    assert status == 400
    assert name in answer["error"]["message"]
    if path != MESSAGES:
        assert (answer["error"]["param"], answer["error"]["code"]) == (name, "unknown_field")


@pytest.mark.parametrize("path", PATHS)
async def test_strict_requests_without_such_fields_are_answered(strict: Server, path: str) -> None:
    status, _, _ = await strict.post(asking(path, "strict", seventh_sense=None), path)

    assert status == 200
