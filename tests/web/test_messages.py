"""Anthropic's dialect over real sockets, as its official client and as its bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests import tiny
from tests.web.serving import Server, loop_for_ever, named_events, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
TEXT = "alpha beta gamma delta"
PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
CACHE_FIELDS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def asking(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 16, "temperature": 0, **fields}


async def ask(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    status, answer, _ = await server.post(asking(text, **fields), PATH)
    assert status == 200, answer
    return answer


def shown(found: list[tuple[str, dict[str, Any]]]) -> str:
    deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
    assert all(delta["type"] == "text_delta" for delta in deltas)
    return "".join(delta["text"] for delta in deltas)


def one(found: list[tuple[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    (data,) = (data for kind, data in found if kind == name)
    return data


def prompt_tokens(usage: dict[str, Any]) -> int:
    return sum(usage[field] for field in CACHE_FIELDS)


# ── the official client ──────────────────────────────────────────────────────────────────────


async def test_the_strict_client_accepts_an_answer(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)

    answer = await client.messages.create(
        model=server.model,
        max_tokens=16,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "strict"}]}],
        extra_body={"temperature": 0},
        metadata={"user_id": "me"},
        thinking={"type": "disabled"},
    )

    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.model == server.model
    assert [block.text for block in answer.content if block.type == "text"] == [TEXT]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == 5
    assert answer._request_id == answer.id


async def test_the_strict_client_accepts_a_stream(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)

    async with client.messages.stream(
        model=server.model,
        max_tokens=16,
        messages=[{"role": "user", "content": "strict stream"}],
        extra_body={"temperature": 0},
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        answer = await stream.get_final_message()

    assert text == TEXT
    assert answer.content[0].type == "text"
    assert answer.content[0].text == TEXT
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == 5


async def test_the_strict_client_accepts_a_count(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)
    messages: Any = [{"role": "user", "content": "count me"}]

    count = await client.messages.count_tokens(model=server.model, messages=messages)
    answer = await client.messages.create(model=server.model, messages=messages, max_tokens=1)

    usage = answer.usage.to_dict()
    assert count.input_tokens == prompt_tokens(usage)


async def test_the_strict_client_accepts_the_models(model_path: ModelPath, tmp_path: Path) -> None:
    """On the path that OpenAI's client asks as well."""
    aliases = {"claude-local": "tape"}
    async with serving(model_path("tape"), tmp_path, model_aliases=aliases) as server:
        client = server.anthropic(_strict_response_validation=True)
        listed = [model async for model in client.models.list()]
        shown = await client.models.retrieve("claude-local")
        others = [model.id async for model in server.client().models.list()]
        answer = await client.messages.create(
            model="claude-local", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.models.retrieve("claude-other")

    assert [model.id for model in listed] == others == ["tape", "claude-local"]
    assert shown == listed[1]
    assert shown.type == "model"
    assert answer.model == "tape"
    assert unknown.value.body["error"]["type"] == "not_found_error"  # pyright: ignore


async def test_the_client_raises_its_own_errors(server: Server) -> None:
    client = server.anthropic()
    messages: Any = [{"role": "user", "content": "x"}]

    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="no-such-model", max_tokens=1, messages=messages)
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(model=server.model, max_tokens=-1, messages=messages)

    assert unknown.value.request_id
    assert bad.value.body["request_id"] == bad.value.request_id  # pyright: ignore
    assert "max_tokens" in str(bad.value)


# ── the bytes of a stream ────────────────────────────────────────────────────────────────────


async def test_a_stream_has_its_events_in_order(server: Server) -> None:
    """B92: each kind once but the deltas; no [DONE]."""
    found = await server.events(asking("order"), PATH)

    names = [name for name, _ in found]
    deltas = ["content_block_delta"] * (len(tiny.TAPE) - 2)
    assert names == [
        *("message_start", "ping", "content_block_start"),
        *deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = one(found, "message_start")["message"]
    assert start["id"].startswith("msg_")
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert one(found, "content_block_start")["content_block"] == {"type": "text", "text": ""}
    assert one(found, "content_block_start")["index"] == 0
    assert one(found, "content_block_stop")["index"] == 0


async def test_a_stream_has_the_headers_that_proxies_need(server: Server) -> None:
    body = asking("headers", stream=True)
    async with server.http.post(f"{server.url}{PATH}", json=body) as answer:
        found = named_events(await answer.text())

    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert answer.headers["request-id"] == one(found, "message_start")["message"]["id"]
    assert answer.headers["x-request-id"] == answer.headers["request-id"]


async def test_the_first_events_come_before_the_prefill(server: Server) -> None:
    """B95: and tell what the prompt takes."""
    server.gate.hold("prefill")
    body = asking("early " * 30, stream=True)
    async with server.http.post(f"{server.url}{PATH}", json=body) as answer:
        first = await answer.content.readuntil(b"\n\n")
        ping = await answer.content.readuntil(b"\n\n")
        await server.gate.reached()
        server.gate.open()
        rest = named_events((await answer.content.read()).decode())

    usage = named_events(first.decode())[0][1]["message"]["usage"]
    assert ping == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert prompt_tokens(usage) == prompt_tokens(one(rest, "message_delta")["usage"])
    assert usage["output_tokens"] == 0


async def test_pings_keep_an_idle_stream_alive(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B95: real events, by the wall clock."""
    from omlx.web import sse

    monkeypatch.setattr(sse.with_heartbeat, "__defaults__", (0.02,))
    server.gate.hold("start")
    body = asking("idle", stream=True)
    async with server.http.post(f"{server.url}{PATH}", json=body) as answer:
        first = await answer.content.readuntil(b"\n\n")
        pings = [await answer.content.readuntil(b"\n\n") for _ in range(4)]
        server.gate.open()
        rest = await answer.text()

    assert first.startswith(b"event: message_start")
    assert all(ping.startswith(b"event: ping") for ping in pings)
    assert shown(named_events(rest)) == TEXT


async def test_text_that_nobody_sees_keeps_no_stream_alive(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B95: while everything is held back for a stop string, pings go on."""
    from omlx.web import sse

    monkeypatch.setattr(sse.with_heartbeat, "__defaults__", (0.0,))
    held = "two three one two three one two three one two!"
    found = await server.events(
        asking("held", stop_sequences=[held], **loop_for_ever(max_tokens=10)), PATH
    )

    pings = [name for name, _ in found].count("ping")
    assert pings > 3
    assert len(shown(found).split()) == 10


# ── streamed or not, the same answer ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 0},
        {"stop_sequences": ["gamma"]},
        {"stop_sequences": ["zzz", "a g"]},
        {"stop_sequences": ["alpha"]},
        {"stop_sequences": []},
        {"system": "be brief"},
        {"temperature": 1, "top_k": 5, "top_p": 0.9, "seed": 7},
    ],
)
async def test_streamed_and_whole_answers_agree(server: Server, fields: dict[str, Any]) -> None:
    """B94: text, reason and usage."""
    text = f"agree {sorted(fields)} {fields.get('stop_sequences')}"
    await ask(server, text, **fields)
    whole = await ask(server, text, **fields)
    found = await server.events(asking(text, **fields), PATH)

    assert shown(found) == "".join(block["text"] for block in whole["content"])
    end = one(found, "message_delta")
    assert end["delta"] == {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    assert end["usage"] == whole["usage"]
    assert one(found, "message_start")["message"]["usage"] == {**whole["usage"], "output_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, TEXT, "end_turn", None),
        ({"stop_sequences": None}, TEXT, "end_turn", None),
        ({"stop_sequences": ["zzz"]}, TEXT, "end_turn", None),
        ({"stop_sequences": ["zzz", "gamma"]}, "alpha beta ", "stop_sequence", "gamma"),
        ({"stop_sequences": ["bet", "beta"]}, "alpha ", "stop_sequence", "bet"),
        ({"stop_sequences": ["alpha"]}, "", "stop_sequence", "alpha"),
        ({"max_tokens": 2}, "alpha beta", "max_tokens", None),
        ({"stop_sequences": ["beta gamma"], "max_tokens": 2}, "alpha beta", "max_tokens", None),
        ({"max_tokens": 0}, "", "max_tokens", None),
    ],
)
async def test_the_reason_to_stop_is_the_true_one(
    server: Server, fields: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    """B85, B91."""
    answer = await ask(server, "reason", **fields)

    assert answer["content"] == ([{"type": "text", "text": text}] if text else [])
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


async def test_the_end_of_the_context_is_a_reason_of_its_own(server: Server) -> None:
    """B83."""
    fields = loop_for_ever(max_tokens=10**6)
    overhead = (await server.post(asking("", **fields), COUNT))[1]["input_tokens"]

    answer = await ask(server, "x" * (tiny.CONTEXT - overhead - 5), **fields)

    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == 5


# ── usage ────────────────────────────────────────────────────────────────────────────────────


async def test_the_fields_of_usage_are_parts_of_the_prompt(server: Server) -> None:
    """B94, B100: on a miss, on a hit, and on a longer prompt with the same beginning."""
    text = "partition " * 20
    (_, count, _) = await server.post(asking(text), COUNT)
    miss = await ask(server, text)
    hit = await ask(server, text)
    longer = await ask(server, text + "and more of it " * 5)

    for answer in (miss, hit):
        assert prompt_tokens(answer["usage"]) == count["input_tokens"]
        assert answer["usage"]["input_tokens"] >= 1
    assert miss["usage"]["cache_creation_input_tokens"] > 0
    assert hit["usage"]["cache_read_input_tokens"] == count["input_tokens"] - 1
    assert hit["usage"]["cache_creation_input_tokens"] == 0
    assert longer["usage"]["cache_read_input_tokens"] > len(text)
    assert prompt_tokens(longer["usage"]) % 16 in range(16)
    assert (prompt_tokens(longer["usage"]) - longer["usage"]["input_tokens"]) % 16 == 0


async def test_without_a_cache_nothing_is_said_to_be_stored(
    model_path: ModelPath, tmp_path: Path
) -> None:
    async with serving(model_path("tape"), tmp_path, cache_enabled=False) as server:
        answer = await ask(server, "no cache " * 20)
        found = await server.events(asking("no cache " * 20), PATH)

    for usage in (answer["usage"], one(found, "message_start")["message"]["usage"]):
        assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
        assert usage["input_tokens"] > 100


async def test_counting_generates_stores_and_counts_nothing(server: Server) -> None:
    """B100."""
    body = asking("only counted " * 20, system="be brief", stream=True)
    async with server.http.get(f"{server.url}/admin/api/stats") as found:
        before = (await found.json())["session"]
    server.gate.calls.clear()

    status, count, headers = await server.post(body, COUNT)

    async with server.http.get(f"{server.url}/admin/api/stats") as found:
        assert (await found.json())["session"] == before
    assert status == 200
    assert count.keys() == {"input_tokens"}
    assert server.gate.calls == []
    assert headers["request-id"].startswith("req_")
    answer = await ask(server, "only counted " * 20, system="be brief")
    assert answer["usage"]["cache_read_input_tokens"] < 40
    assert prompt_tokens(answer["usage"]) == count["input_tokens"]


# ── what reaches the prompt ──────────────────────────────────────────────────────────────────


async def rendered(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": list(messages), "max_tokens": 1, "temperature": 0, **fields}
    status, answer, _ = await server.post(body, PATH)
    assert status == 200, answer
    return answer


async def test_blocks_are_the_same_prompt_as_their_text_and_as_a_chat(server: Server) -> None:
    """B80: one prefix whatever the dialect."""
    parts = [{"type": "text", "text": "The code is 7. "}, {"type": "text", "text": "Say it."}]
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    chat = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "The code is 7. Say it."},
        ]
    }
    await server.post({**chat, "max_tokens": 1})

    blocks = await rendered(server, {"role": "user", "content": parts}, system=system)
    text = await rendered(
        server, {"role": "user", "content": "The code is 7. Say it."}, system="be brief"
    )

    assert blocks["omlx"]["computed_tokens"] == text["omlx"]["computed_tokens"] == 1


async def test_a_tool_loop_in_the_history_is_the_same_prompt_as_in_a_chat(server: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = {
        "messages": [
            {"role": "user", "content": "call it"},
            {"role": "assistant", "content": "well", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "42"},
            {"role": "user", "content": "and?"},
        ]
    }
    await server.post({**chat, "max_tokens": 1})

    answer = await rendered(
        server,
        {"role": "user", "content": "call it"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "well"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "42"},
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    )

    assert answer["omlx"]["computed_tokens"] == 1


async def test_cache_breakpoints_change_nothing(server: Server) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    block = {"type": "text", "text": "marked " * 20}
    await rendered(server, {"role": "user", "content": [block]})

    answer = await rendered(server, {"role": "user", "content": [{**block, **mark}]}, **mark)

    assert answer["omlx"]["computed_tokens"] == 1


async def test_salts_keep_prefixes_apart(server: Server) -> None:
    text = "salted message " * 10
    await ask(server, text)

    apart = await ask(server, text, cache_salt="one")
    again = await ask(server, text, cache_salt="one")

    assert apart["usage"]["cache_read_input_tokens"] == 0
    assert again["usage"]["cache_read_input_tokens"] > 100


# ── errors ───────────────────────────────────────────────────────────────────────────────────


def assert_error(answer: dict[str, Any], kind: str, headers: Any) -> None:
    assert answer["type"] == "error"
    assert answer.keys() == {"type", "error", "request_id"}
    assert answer["error"].keys() == {"type", "message"}
    assert answer["error"]["type"] == kind
    assert answer["request_id"] == headers["request-id"] == headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_clients_look_for(
    server: Server, stream: bool
) -> None:
    """B83."""
    status, answer, headers = await server.post(asking("x" * 3000, stream=stream), PATH)

    assert status == 400
    assert_error(answer, "invalid_request_error", headers)
    assert answer["error"]["message"].startswith("prompt is too long: 30")
    assert answer["error"]["message"].endswith(f"tokens > {tiny.CONTEXT - 1} maximum")


async def test_errors_of_every_kind_have_the_dialects_shape(server: Server) -> None:
    for body, path, status, kind in [
        (b"{bad", PATH, 400, "invalid_request_error"),
        (b"{bad", COUNT, 400, "invalid_request_error"),
        (asking("x", model="other"), PATH, 404, "not_found_error"),
        (asking("x", model="other"), COUNT, 404, "not_found_error"),
        ({}, f"{PATH}/batches", 404, "not_found_error"),
        ({}, f"{PATH}/", 404, "not_found_error"),
    ]:
        found, answer, headers = await server.post(body, path)
        assert found == status
        assert_error(answer, kind, headers)
    async with server.http.get(f"{server.url}{PATH}") as refused:
        assert refused.status == 405
        assert_error(await refused.json(), "invalid_request_error", refused.headers)


async def test_a_body_beyond_the_limit_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    """B82."""
    async with serving(model_path("tape"), tmp_path, body_max_size="10kB") as server:
        for path in (PATH, COUNT):
            status, answer, headers = await server.post(b" " * 10_001, path)
            assert status == 413
            assert_error(answer, "request_too_large", headers)


async def test_a_server_that_is_not_ready_is_overloaded(server: Server) -> None:
    for state in ("loading", "stopping"):
        server.app.edge.state = state
        try:
            for path in (PATH, COUNT):
                status, answer, headers = await server.post(asking("x", stream=True), path)
                assert status == 503
                assert_error(answer, "overloaded_error", headers)
                assert int(headers["Retry-After"]) >= 1
        finally:
            server.app.edge.state = "ready"


async def test_more_than_may_wait_are_refused_at_once(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B89."""
    limits: dict[str, Any] = {"max_concurrent_requests": 1, "max_queued_requests": 1}
    async with serving(model_path("tape"), tmp_path, **limits) as server:
        server.gate.hold("start")
        waiting = [asyncio.create_task(ask(server, f"{n}")) for n in range(2)]
        await server.handling(2)

        status, answer, headers = await server.post(asking("refused", stream=True), PATH)
        server.gate.open()
        answers = await asyncio.gather(*waiting)

    assert status == 429
    assert_error(answer, "rate_limit_error", headers)
    assert int(headers["Retry-After"]) >= 1
    assert [found["content"][0]["text"] for found in answers] == [TEXT] * 2


@pytest.mark.parametrize("phase", ["restore", "prefill", "start"])
async def test_a_fault_is_an_error_event_and_no_reason_is_made_up(
    server: Server, phase: str
) -> None:
    """B32, B92."""
    server.gate.break_at(phase)
    status, answer, headers = await server.post(asking(f"broken {phase} " * 10), PATH)
    server.gate.break_at(phase)
    found = await server.events(asking(f"broken {phase} streamed " * 10), PATH)

    assert status == 500
    assert_error(answer, "api_error", headers)
    assert found[-1][0] == "error"
    assert found[-1][1]["error"]["type"] == "api_error"
    assert "on purpose" not in json.dumps(found)
    names = {name for name, _ in found}
    assert not names & {"message_delta", "message_stop"}
    assert (await ask(server, "after"))["content"][0]["text"] == TEXT


async def test_the_client_raises_what_breaks_in_a_stream(server: Server) -> None:
    server.gate.break_at("start")
    client = server.anthropic()

    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(
            model=server.model, max_tokens=9, messages=[{"role": "user", "content": "breaks"}]
        ) as stream:
            await stream.get_final_message()


async def test_a_client_that_goes_frees_its_slot(server: Server) -> None:
    """B35."""
    async with server.watching() as ended:
        body = asking("leaves", stream=True, **loop_for_ever(max_tokens=1500))
        async with server.http.post(f"{server.url}{PATH}", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
        record = await ended()

    assert record["state"] == "cancelled"
    assert record["route"] == PATH
    assert record["id"].startswith("msg_")


async def test_paths_without_the_version_are_the_same(server: Server) -> None:
    status, answer, _ = await server.post(asking("alias"), "/messages")
    counted, count, _ = await server.post(asking("alias"), "/messages/count_tokens")
    beta, _, _ = await server.post(asking("alias"), f"{PATH}?beta=true")

    assert status == counted == beta == 200
    assert count["input_tokens"] == prompt_tokens(answer["usage"])


async def test_what_was_ignored_is_listed_in_a_header(server: Server) -> None:
    body = asking("ignored", inference_geo="eu", service_tier="auto", speed=None)
    _, _, headers = await server.post(body, PATH)
    async with server.http.post(f"{server.url}{PATH}", json={**body, "stream": True}) as answer:
        await answer.read()

    assert headers["x-omlx-ignored"] == "inference_geo,service_tier"
    assert answer.headers["x-omlx-ignored"] == "inference_geo,service_tier"
    assert "x-omlx-ignored" not in (await server.post(asking("nothing"), PATH))[2]
