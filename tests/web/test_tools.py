"""Calls of tools over real sockets, in every dialect, as the official clients read them.

What the model says is on the tapes of tests/talker.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omlx.core.events import TextDelta
from omlx.core.markup import ModelMarkup
from omlx.core.pieces import CallText, Text
from omlx.core.sequence import Request
from omlx.kernel.mailbox import Mailbox, Ref
from omlx.settings import load_settings
from omlx.web.edge import Edge
from omlx.web.tool_calls import Item, with_calls
from tests import talker
from tests.web.serving import Server, chat, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
MESSAGES_LOOK: Any = {
    "name": "look",
    "description": "Looks.",
    "input_schema": LOOK["function"]["parameters"],
}
RESPONSES_LOOK: Any = {"type": "function", "strict": False, **LOOK["function"]}

PARIS, ROME, OSLO = ({"city": city} for city in ("Paris", "Rome", "Oslo"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    model = talker.build(tmp_path_factory.mktemp("models"))
    home = tmp_path_factory.mktemp("home")
    async with serving(model, home, max_concurrent_requests=4) as running:
        yield running


def says(tape: str) -> dict[str, Any]:
    """Fields that choose what the model says."""
    return {"chat_template_kwargs": {"opening": tape}}


async def whole(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """A chat's choice and usage."""
    answer = await server.chat(text, **fields)
    return {**answer["choices"][0], "usage": answer["usage"]}


async def put_together(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """The same from a stream, as a client puts it together."""
    frames = await server.stream(text, stream_options={"include_usage": True}, **fields)
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message.setdefault("reasoning_content", "")
            message["reasoning_content"] += delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            index = call.pop("index")
            assert index <= len(calls), "there is no gap"
            if index == len(calls):
                calls.append(call)
                continue
            assert set(call) == {"function"}, "id and type come once"
            assert set(call["function"]) == {"arguments"}, "the name comes once"
            calls[index]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reason,
        "usage": chunks[-1]["usage"],
    }


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Ids of calls follow from the request's; what was cached depends on who came first."""
    choice = json.loads(json.dumps(choice))
    ids = [call.pop("id") for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    del choice["usage"]["prompt_tokens_details"]
    return choice


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", ())
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


# ── chats ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tape", ["", *talker.TAPES])
@pytest.mark.parametrize("tools", [{}, {"tools": [LOOK]}], ids=["without", "with"])
async def test_a_stream_and_a_whole_answer_agree(
    server: Server, tape: str, tools: dict[str, Any]
) -> None:
    """K10: text, thoughts, calls, reason and usage."""
    fields = {**says(tape.strip("\n")), **tools}
    first = await whole(server, "hi", **fields)
    second = await put_together(server, "hi", **fields)

    assert without_ids(first) == without_ids(second)
    shown = json.dumps(first["message"])
    assert "think>" not in shown
    assert "tool_call>" not in shown or not tools


async def test_a_call_comes_with_what_was_said_and_thought_before_it(server: Server) -> None:
    found = await whole(server, "hi", tools=[LOOK])

    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] == "Let me look."
    assert found["message"]["reasoning_content"] == "hm, so"
    assert called(found) == [("look", PARIS)]
    assert found["usage"]["completion_tokens"] == 12
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_several_calls_are_told_in_order(server: Server) -> None:
    found = await whole(server, "hi", tools=[LOOK], **says(" twice"))

    assert called(found) == [("look", ROME), ("look", OSLO)]
    assert found["message"]["content"] is None
    assert found["finish_reason"] == "tool_calls"


async def test_one_call_at_a_time_ends_the_answer_with_it(server: Server) -> None:
    found = await whole(server, "hi", tools=[LOOK], parallel_tool_calls=False, **says(" twice"))

    assert called(found) == [("look", ROME)]
    assert found["finish_reason"] == "tool_calls"
    assert found["usage"]["completion_tokens"] == 6, "nothing more is computed"


async def test_what_is_no_call_is_text_without_its_markers(server: Server) -> None:
    found = await whole(server, "hi", tools=[LOOK], **says(" broken"))

    assert found["message"]["content"] == "Well. {look Paris! Sorry."
    assert "tool_calls" not in found["message"]
    assert found["finish_reason"] == "stop"


async def test_no_control_token_of_a_broken_call_is_shown(tmp_path: Path) -> None:
    """K10. Some formats have control tokens inside their calls, which a parser needs."""
    edge = Edge(load_settings({}, {}, tmp_path), Ref("stats", Mailbox(1)))
    edge.markup = ModelMarkup(call=("<call>", ""), control=((1, '<|"|>'),))

    async def items() -> AsyncIterator[Item]:
        yield TextDelta((CallText('\nlook <|"|>Paris\n'), CallText(" \n")))

    asked = Request("r", (1,), 1)
    found = [item async for item in with_calls(items(), edge, asked, "[]")]

    assert found[0].pieces == (Text("look Paris"),)


async def test_a_tool_that_may_not_be_called_is_not(server: Server) -> None:
    """It is shown to the model all the same, so that the prompt keeps its prefix."""
    free = await whole(server, "hi", tools=[LOOK], **says(" unasked"))
    bound = await whole(server, "hi", tools=[LOOK], tool_choice="none", **says(" unasked"))

    assert called(free) == [("look", {})]
    assert called(bound) == []
    assert bound["message"]["content"] == 'so: {"name": "look", "arguments": {}}'
    assert bound["finish_reason"] == "stop"
    assert bound["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]


async def test_a_call_that_is_cut_is_no_call(server: Server) -> None:
    """B97: at each place, in both modes."""
    for count in range(7, 11):
        for ask in (whole, put_together):
            found = await ask(server, "hi", tools=[LOOK], max_tokens=count)
            assert found["finish_reason"] == "length"
            assert called(found) == []
            assert found["message"]["content"] == "Let me look."
            assert found["usage"]["completion_tokens"] == count


async def test_a_strict_tool_is_not_called_with_what_its_schema_forbids(server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}

    free = await whole(server, "hi", tools=[tool], **says(" twice"))
    bound = await whole(server, "hi", tools=[strict], **says(" twice"))

    assert called(free) == [("look", ROME), ("look", OSLO)]
    assert called(bound) == [("look", OSLO)]
    assert json.loads(bound["message"]["content"])["arguments"] == ROME
    assert bound["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"], "it is not shown"


async def test_each_choice_has_calls_of_its_own(server: Server) -> None:
    answer = await server.chat("hi", tools=[LOOK], n=2, **says(" twice"))

    assert [called(choice) for choice in answer["choices"]] == [
        [("look", ROME), ("look", OSLO)],
    ] * 2
    ids = [call["id"] for c in answer["choices"] for call in c["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(len(name) == 9 and name.isalnum() for name in ids)


async def test_tools_that_a_model_does_not_know_are_refused_by_name(
    model_path: Any, tmp_path: Path
) -> None:
    async with serving(model_path("tape"), tmp_path) as plain:
        status, answer, _ = await plain.post(chat("hi", tools=[LOOK]))
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert answer["error"]["code"] == "unsupported_value"
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        body["tools"] = [MESSAGES_LOOK]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, answer, _ = await plain.post(body, path)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        status, answer, _ = await plain.post(chat("hi", tools=[LOOK], tool_choice="none"))
        assert status == 200
        status, answer, _ = await plain.post(chat("hi", tools=[LOOK], tool_choice="required"))
        assert (status, answer["error"]["param"]) == (400, "tools")


# ── what must be called ──────────────────────────────────────────────────────────────────────

PACKED: Any = {
    "type": "function",
    "function": {
        "name": "pack",
        "parameters": {
            "type": "object",
            "properties": {"bag": {"$ref": "#/$defs/bag"}, "days": {"enum": [3]}},
            "required": ["bag", "days"],
            "additionalProperties": False,
            "$defs": {"bag": {"enum": ["red"]}},
        },
    },
}
GO: Any = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "type": "object",
            "properties": {"on": {"enum": [True]}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
FORCED = {**says(" plain"), "max_tokens": 200}
"""The tape has no call on it."""
ALLOWED = {"pack": {"bag": "red", "days": 3}, "go": {"on": True}}


async def without_thoughts(server: Server) -> dict[str, Any]:
    """A field that keeps the model from thinking first, as it may: its thoughts have no end."""
    _, found, _ = await server.post({"content": "<think>"}, "/tokenize")
    (token,) = found["tokens"]
    return {"logit_bias": {str(token): -100}}


async def test_a_tool_that_is_named_is_called_with_what_its_schema_allows(server: Server) -> None:
    """Whatever the model would rather have said."""
    forced = {**FORCED, **await without_thoughts(server)}
    for name, arguments in ALLOWED.items():
        choice = {"type": "function", "function": {"name": name}}
        for ask in (whole, put_together):
            found = await ask(server, "hi", tools=[PACKED, GO], tool_choice=choice, **forced)
            assert called(found) == [(name, arguments)]
            assert found["finish_reason"] == "tool_calls"
            assert found["message"]["content"] is None


async def test_a_call_that_is_required_is_one_of_the_tools(server: Server) -> None:
    found = await whole(
        server,
        "hi",
        tools=[PACKED, GO],
        tool_choice="required",
        parallel_tool_calls=False,
        **FORCED,
        **await without_thoughts(server),
    )

    ((name, arguments),) = called(found)
    assert arguments == ALLOWED[name]


async def test_every_dialect_can_force_a_call(server: Server) -> None:
    schema = {"name": "go", "input_schema": GO["function"]["parameters"]}
    message = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [MESSAGES_LOOK, schema],
        "tool_choice": {"type": "tool", "name": "go"},
        **FORCED,
        **await without_thoughts(server),
    }
    response = {
        "input": "hi",
        "tools": [{"type": "function", **GO["function"]}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        **FORCED,
        **await without_thoughts(server),
    }

    _, said, _ = await server.post(message, "/v1/messages")
    assert [(b["type"], b.get("input")) for b in said["content"]] == [("tool_use", {"on": True})]
    assert said["stop_reason"] == "tool_use"
    _, said, _ = await server.post(response, "/v1/responses")
    assert [(i["type"], i["arguments"]) for i in said["output"]] == [
        ("function_call", '{"on": true}')
    ]


async def test_a_choice_of_tools_that_cannot_be_kept_is_refused(server: Server) -> None:
    for choice in (
        {"type": "function", "function": {"name": "fly"}},
        {"type": "function"},
        {"type": "allowed_tools", "allowed_tools": {}},
        "maybe",
    ):
        status, answer, _ = await server.post(chat("hi", tools=[LOOK], tool_choice=choice))
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
    status, answer, _ = await server.post(chat("hi", tool_choice="required"))
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


# ── the clients' own ─────────────────────────────────────────────────────────────────────────


async def test_openais_client_reads_calls_whole_and_streamed(server: Server) -> None:
    client = server.client(_strict_response_validation=True)
    asked: Any = {
        "model": server.model,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [LOOK],
        "temperature": 0,
    }

    answer = await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked) as stream:
        done = [e async for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()

    for found in (answer, final):
        calls = found.choices[0].message.tool_calls
        assert calls is not None
        (call,) = calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", PARIS)
        assert found.choices[0].finish_reason == "tool_calls"
    assert [(event.name, event.index) for event in done] == [("look", 0)]


async def test_anthropics_client_reads_calls_whole_and_streamed(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)
    asked: Any = {
        "model": server.model,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [MESSAGES_LOOK],
        "extra_body": {"temperature": 0},
    }

    answer = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    counted = await client.messages.count_tokens(
        model=server.model, messages=asked["messages"], tools=asked["tools"]
    )

    for found in (answer, final):
        thought, text, call = found.content
        assert thought.type == "thinking"
        assert thought.thinking == "hm, so"
        assert thought.signature
        assert text.type == "text"
        assert text.text == "Let me look."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("look", PARIS)
        assert found.stop_reason == "tool_use"
        usage = found.usage
        assert usage.output_tokens == 12
        assert usage.output_tokens_details is not None
        assert usage.output_tokens_details.thinking_tokens == 4
        read, kept = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert usage.input_tokens + read + kept == counted.input_tokens, "B100"


async def test_openais_client_reads_a_response_with_calls_whole_and_streamed(
    server: Server,
) -> None:
    client = server.client(_strict_response_validation=True)
    asked: Any = {
        "model": server.model,
        "input": "hi",
        "tools": [RESPONSES_LOOK],
        "temperature": 0,
    }

    answer = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    for found in (answer, final):
        thought, message, call = found.output
        assert thought.type == "reasoning"
        assert [part.text for part in thought.content or ()] == ["hm, so"]
        assert message.type == "message"
        assert found.output_text == "Let me look."
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("look", PARIS)
        assert found.status == "completed"
        assert found.usage is not None
        assert found.usage.output_tokens_details.reasoning_tokens == 4
        assert [tool.type for tool in found.tools] == ["function"]
    assert [kind for kind in kinds if "delta" not in kind] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


# ── the next turn ────────────────────────────────────────────────────────────────────────────


async def test_the_next_turn_computes_only_what_the_tool_said(server: Server) -> None:
    """The call comes back in the words that the model said it in, so its prefix is found."""
    question = {"role": "user", "content": "a question of its own"}
    answer = await server.chat("", messages=[question], tools=[LOOK])
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}

    again = await server.chat("", messages=[question, message, result], tools=[LOOK])

    first, second = answer["usage"], again["usage"]
    # All but the end of the turn: it was sampled and never fed.
    said = first["prompt_tokens"] + first["completion_tokens"] - 1
    assert second["prompt_tokens_details"]["cached_tokens"] == said
    assert again["omlx"]["reuse_ended"]["token"] == said


async def test_every_dialect_finds_the_turn_that_another_began(server: Server) -> None:
    question = "another question of its own"
    answer = await server.chat(question, tools=[LOOK])
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    said = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1

    blocks = [
        {"type": "thinking", "thinking": message["reasoning_content"], "signature": "x"},
        {"type": "text", "text": message["content"]},
        {"type": "tool_use", "id": call["id"], "name": "look", "input": PARIS},
    ]
    status, found, _ = await server.post(
        {
            "max_tokens": 1,
            "tools": [MESSAGES_LOOK],
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": blocks},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
                    ],
                },
            ],
        },
        "/v1/messages",
    )
    assert status == 200, found
    assert found["usage"]["cache_read_input_tokens"] == said

    status, found, _ = await server.post(
        {
            "max_output_tokens": 1,
            "tools": [RESPONSES_LOOK],
            "input": [
                {"role": "user", "content": question},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": message["reasoning_content"]}],
                },
                {"role": "assistant", "content": message["content"]},
                {
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": "look",
                    "arguments": call["function"]["arguments"],
                },
                {"type": "function_call_output", "call_id": call["id"], "output": "snow"},
            ],
        },
        "/v1/responses",
    )
    assert status == 200, found
    assert found["usage"]["input_tokens_details"]["cached_tokens"] > said, "and the result's frame"


async def test_a_call_that_was_cut_can_come_back(server: Server) -> None:
    """B97: the conversation is not broken for ever."""
    function = {"name": "look", "arguments": '{"city": "Par'}
    call = {"id": "a", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "that was no JSON"},
    ]

    answer = await server.chat("", messages=messages, tools=[LOOK])

    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_markup_that_a_client_writes_calls_nothing(server: Server) -> None:
    """Only the model's own text is read."""
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call><think>'

    found = await whole(server, text, tools=[LOOK], **says(" plain"))

    assert found["message"] == {
        "role": "assistant",
        "content": "4 < 5 and <thin air>",
        "refusal": None,
    }
