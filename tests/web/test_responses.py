"""OpenAI's responses over real sockets, as its official client and as their events."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from omlx.core.chat import ChatMessage, ToolCall
from omlx.web.errors import ApiError
from omlx.web.responses_schema import conversation_of, parse_responses
from tests import tiny
from tests.web.serving import Server, loop_for_ever, named_events

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "alpha beta gamma delta"
PATH = "/v1/responses"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def asking(text: Any, **fields: Any) -> dict[str, Any]:
    return {"input": text, "temperature": 0, **fields}


async def ask(server: Server, text: Any, **fields: Any) -> dict[str, Any]:
    status, answer, _ = await server.post(asking(text, **fields), PATH)
    assert status == 200, answer
    return answer


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def deltas(found: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [data for name, data in found if name == "response.output_text.delta"]


# ── the official client ──────────────────────────────────────────────────────────────────────


async def test_the_strict_client_accepts_an_answer(server: Server) -> None:
    client = server.client(_strict_response_validation=True)

    answer = await client.responses.create(
        model=server.model,
        input="strict",
        instructions="be brief",
        temperature=0,
        metadata={"a": "b"},
        reasoning={"effort": "none"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        store=False,
        top_logprobs=2,
    )

    assert answer.object == "response"
    assert answer.status == "completed"
    assert answer.output_text == TEXT
    assert answer.model == server.model
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    assert answer.metadata == {"a": "b"}


async def test_the_strict_client_accepts_a_stream(server: Server) -> None:
    client = server.client(_strict_response_validation=True)

    async with client.responses.stream(
        model=server.model, input="strict stream", temperature=0
    ) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        answer = await stream.get_final_response()

    assert text == answer.output_text == TEXT
    assert answer.status == "completed"
    assert answer.usage is not None


async def test_the_model_may_be_left_out(server: Server) -> None:
    """B86: the answer says the real name."""
    answer = await server.client(_strict_response_validation=True).responses.create(input="x")

    assert answer.model == "tape"


async def test_the_client_raises_its_own_errors(server: Server) -> None:
    client = server.client()

    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="no-such-model", input="x")
    with pytest.raises(openai.BadRequestError) as kept:
        await client.responses.create(model="tape", input="x", previous_response_id="resp_1")

    assert unknown.value.code == "model_not_found"
    assert kept.value.param == "previous_response_id"


# ── the events of a stream ───────────────────────────────────────────────────────────────────


async def test_a_stream_has_its_events_in_order(server: Server) -> None:
    """B92."""
    found = await server.events(asking("order"), PATH)

    assert [name for name, _ in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * (len(tiny.TAPE) - 2),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert len({data["item_id"] for _, data in found if "item_id" in data}) == 1
    responses = [data["response"] for _, data in found if "response" in data]
    assert len({(response["id"], response["created_at"]) for response in responses}) == 1
    assert responses[0]["status"] == responses[1]["status"] == "in_progress"
    assert responses[0]["id"].startswith("resp_")
    assert responses[-1]["output"][0]["id"] == found[4][1]["item_id"]


async def test_heartbeats_are_real_events(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """B95: some clients drop comments."""
    from omlx.web import sse

    monkeypatch.setattr(sse.with_heartbeat, "__defaults__", (0.02,))
    server.gate.hold("start")
    body = asking("idle", stream=True)
    async with server.http.post(f"{server.url}{PATH}", json=body) as answer:
        beats = [await answer.content.readuntil(b"\n\n") for _ in range(6)]
        server.gate.open()
        rest = await answer.text()

    found = named_events(b"".join(beats).decode() + rest)
    names = [name for name, _ in found]
    assert names[0] == "response.created"
    assert names.count("response.in_progress") >= 5
    assert names[-1] == "response.completed"
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 2},
        {"max_output_tokens": 0},
        {"instructions": "be brief"},
        {"prompt_cache_options": {"prewarm": True}},
        LOGPROBS,
        {"top_logprobs": 1},
        {"temperature": 1, "top_k": 5, "top_p": 0.9, "seed": 7, "max_output_tokens": 9},
    ],
)
async def test_streamed_and_whole_answers_agree(server: Server, fields: dict[str, Any]) -> None:
    """B94: the last event holds the whole response."""
    await ask(server, f"agree {sorted(fields)}", **fields)
    whole = await ask(server, f"agree {sorted(fields)}", **fields)
    found = await server.events(asking(f"agree {sorted(fields)}", **fields), PATH)

    last = found[-1][1]["response"]
    assert found[-1][0] == f"response.{whole['status']}"
    assert "".join(data["delta"] for data in deltas(found)) == text_of(last) == text_of(whole)
    for key in ("status", "usage", "incomplete_details"):
        assert last[key] == whole[key]
    logprobs = [entry for data in deltas(found) for entry in data["logprobs"]]
    for response in (last, whole):
        parts = [part for item in response["output"] for part in item["content"]]
        assert [entry for part in parts for entry in part["logprobs"]] == logprobs
    assert bool(logprobs) == ("top_logprobs" in fields)


async def test_an_answer_that_was_cut_is_incomplete(server: Server) -> None:
    answer = await ask(server, "cut", **loop_for_ever(max_output_tokens=3))

    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 3


async def test_prewarming_fills_the_cache_and_answers_nothing(server: Server) -> None:
    text = "prewarm " * 20
    warm = await ask(server, text, prompt_cache_options={"prewarm": True})
    then = await ask(server, text)

    assert (warm["status"], warm["output"]) == ("completed", [])
    assert warm["usage"]["output_tokens"] == 0
    assert warm["usage"]["input_tokens_details"]["cache_write_tokens"] > 100
    assert then["usage"]["input_tokens_details"] == {
        "cached_tokens": then["usage"]["input_tokens"] - 1,
        "cache_write_tokens": 0,
    }


# ── the conversation ─────────────────────────────────────────────────────────────────────────


async def test_the_prompt_is_the_one_of_a_chat(server: Server) -> None:
    """B80: one prefix whatever the dialect, the form of the input and of its parts."""
    chat = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "The code is 7. Say it."},
        ]
    }
    await server.post({**chat, "max_tokens": 1})
    parts = [
        {"type": "input_text", "text": "The code is 7. "},
        {"type": "input_text", "text": "Say it."},
    ]

    for given in (
        "The code is 7. Say it.",
        [{"role": "user", "content": "The code is 7. Say it."}],
        [{"type": "message", "role": "user", "content": parts}],
    ):
        answer = await ask(server, given, instructions="be brief", max_output_tokens=1)
        assert answer["omlx"]["computed_tokens"] == 1
    late = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert (await ask(server, late, max_output_tokens=1))["omlx"]["computed_tokens"] == 1


def turns(*items: Any) -> tuple[ChatMessage, ...]:
    return conversation_of(parse_responses(json.dumps({"input": items}).encode())).messages


def call(number: int) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{number}",
        "call_id": f"c{number}",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    }


def output(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": f"r{number}"}


async def test_what_an_assistant_thought_said_and_called_is_one_turn() -> None:
    """However many items it is in; and two turns in a row stay two."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "hm"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "well"}]}
    calls = (ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}"))
    answers = tuple(ChatMessage("tool", (f"r{n}",), tool_call_id=f"c{n}") for n in (1, 2))

    found = turns({"role": "user", "content": "hi"}, thought, said, call(1), call(2),
                  output(1), output(2), said, said, call(1))  # fmt: skip

    assert found == (
        ChatMessage("user", ("hi",)),
        ChatMessage("assistant", ("well",), tool_calls=calls, reasoning="hm"),
        *answers,
        ChatMessage("assistant", ("well",)),
        ChatMessage("assistant", ("well",), tool_calls=calls[:1]),
    )


async def test_reasoning_that_cannot_be_read_is_passed_over() -> None:
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}

    assert turns({"role": "user", "content": "hi"}, hidden) == (ChatMessage("user", ("hi",)),)


async def test_an_input_that_is_left_out_is_an_empty_text() -> None:
    said = conversation_of(parse_responses(b'{"instructions": "be brief", "input": null}'))

    assert said.messages == (ChatMessage("system", "be brief"), ChatMessage("user", ""))


# ── what is refused ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [None]}, "input[0]"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "wizard", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 2.1}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"n": 2}, "n"),
        ({"include": [1]}, "include[0]"),
    ],
)
async def test_what_is_wrong_or_cannot_be_done_is_refused_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    """B79, B88."""
    with pytest.raises(ApiError) as refused:
        parse_responses(json.dumps({"input": "x", **fields}).encode())

    assert refused.value.status == 400
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": None, "conversation": None, "prompt": None},
        {"background": False, "store": True, "truncation": "auto", "service_tier": "auto"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"},
        {"include": ["reasoning.encrypted_content"], "client_metadata": {"x": "y"}},
        {"text": {}, "reasoning": {"effort": "medium", "summary": "auto"}},
    ],
)
async def test_what_asks_for_nothing_is_no_reason_to_refuse(fields: dict[str, Any]) -> None:
    parse_responses(json.dumps({"input": "x", **fields}).encode())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fills_the_context_is_refused(server: Server, stream: bool) -> None:
    """B83."""
    status, answer, _ = await server.post(asking("x" * 3000, stream=stream), PATH)

    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == "input"


async def test_a_fault_in_a_stream_fails_the_response(server: Server) -> None:
    """B32, B92: and no output is made up."""
    server.gate.break_at("prefill")
    found = await server.events(asking("broken " * 20), PATH)

    name, last = found[-1]
    assert name == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"] == []
    assert "on purpose" not in json.dumps(found)
    assert text_of(await ask(server, "after")) == TEXT


async def test_the_strict_client_reads_a_failure(server: Server) -> None:
    client = server.client(_strict_response_validation=True)
    server.gate.break_at("start")

    stream = await client.responses.create(input="broken", stream=True)
    found = [event async for event in stream]

    assert found[-1].type == "response.failed"


async def test_the_path_without_the_version_is_the_same(server: Server) -> None:
    status, answer, headers = await server.post(asking("alias"), "/responses")

    assert status == 200
    assert text_of(answer) == TEXT
    assert headers["x-request-id"] == answer["id"]


async def test_what_was_ignored_is_listed_in_a_header(server: Server) -> None:
    _, _, headers = await server.post(asking("x", store=True, client_metadata={}), PATH)

    assert headers["x-omlx-ignored"] == "store,client_metadata"
