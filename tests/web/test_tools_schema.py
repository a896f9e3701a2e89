"""The tools a request may offer, alike in every dialect; and whether they may be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx.core.chat import Conversation
from omlx.web import messages_schema, responses_schema
from omlx.web.chat_schema import conversation_of, generation_of, parse_chat
from omlx.web.tools_schema import ToolUse
from tests.web.test_schema import TOOL, USER, parsed, refusal

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


GO = {"type": "function", "function": {"name": "go"}}


def spelled(conversation: Conversation) -> Any:
    return json.loads(conversation.tools or "")


def test_tools_are_the_same_prompt_in_every_dialect() -> None:
    """What a dialect adds for itself, such as a breakpoint for a cache, is no part of it."""
    named = {"name": "look", "description": "Looks."}
    chat = {
        "messages": [USER],
        "tools": [
            {"type": "function", "function": {**named, "parameters": PARAMETERS, "strict": False}}
        ],
    }
    message = {
        "messages": [USER],
        "max_tokens": 1,
        "tools": [
            {"input_schema": PARAMETERS, **named, "cache_control": {"type": "ephemeral"}},
        ],
    }
    response = {
        "input": "hi",
        "tools": [{"type": "function", "strict": None, **named, "parameters": PARAMETERS}],
    }

    found = [
        conversation_of(parse_chat(json.dumps(chat).encode())),
        messages_schema.conversation_of(
            messages_schema.parse_messages(json.dumps(message).encode())
        ),
        responses_schema.conversation_of(
            responses_schema.parse_responses(json.dumps(response).encode())
        ),
    ]

    assert found[0].tools == found[1].tools == found[2].tools
    assert spelled(found[0]) == [
        {"type": "function", "function": {**named, "parameters": PARAMETERS}}
    ]


def test_tools_stay_in_the_clients_order() -> None:
    """Sorting them would change the prompt behind the client's back."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("b", "a", "c")]

    found = spelled(conversation_of(parsed(tools=tools)))

    assert [tool["function"]["name"] for tool in found] == ["b", "a", "c"]
    assert found[0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([TOOL, {"type": "function", "function": {}}], "tools[1].function.name"),
        ([TOOL, TOOL], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "x" * 257}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            "tools[0].function.parameters",
        ),
        ({}, "tools"),
    ],
)
def test_a_tool_that_is_none_is_refused_by_its_name(tools: Any, param: str) -> None:
    assert refusal(json.dumps({"messages": [USER], "tools": tools}).encode()).param == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ToolUse(False)),
        ({"tools": [TOOL]}, ToolUse(True)),
        ({"tools": [TOOL], "tool_choice": "auto"}, ToolUse(True)),
        ({"tools": [TOOL], "tool_choice": "none"}, ToolUse(False)),
        ({"tools": [TOOL], "parallel_tool_calls": False}, ToolUse(True, one_call=True)),
        ({"tools": [TOOL], "parallel_tool_calls": True}, ToolUse(True)),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "s", "strict": True}}]},
            ToolUse(True, strict=("s",)),
        ),
        ({"tools": [TOOL, GO], "tool_choice": "required"}, ToolUse(True, ("f", "go"))),
        (
            {"tools": [TOOL, GO], "tool_choice": {"type": "function", "function": {"name": "go"}}},
            ToolUse(True, ("go",), one_call=True),
        ),
    ],
)
def test_whether_tools_may_or_must_be_called(fields: dict[str, Any], expected: ToolUse) -> None:
    asked = generation_of(parsed(**fields), 100)

    found = ToolUse(asked.may_call, asked.must_call, asked.one_call, asked.strict)
    assert found == expected
    assert bool(asked.tools) == ("tools" in fields), "they are shown all the same"


def test_thoughts_of_earlier_turns_have_two_names() -> None:
    for name in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "so", name: "hm"}
        conversation = conversation_of(parsed(messages=[turn, USER]))
        assert conversation.messages[0].reasoning == "hm"
