"""What a message request may hold. Everything else is refused by name before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx.core.chat import ChatMessage, Conversation, ToolCall
from omlx.core.plan import Sampling
from omlx.web.errors import ApiError
from omlx.web.messages_schema import (
    conversation_of,
    generation_of,
    parse_count,
    parse_messages,
)

VOCABULARY = 300
USER = {"role": "user", "content": "hi"}
START = b'{"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], '


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], "max_tokens": 5, **fields}).encode()


def refusal(given: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        generation_of(parse_messages(given), VOCABULARY)
    assert caught.value.status == 400
    json.dumps(caught.value.anthropic_body("req_1"), allow_nan=False).encode()
    return caught.value


def conversation(*messages: Any, **fields: Any) -> Conversation:
    return conversation_of(parse_count(body(messages=messages, **fields)))


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def used(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"b": 1, "a": [2]}}


def result(number: int, content: Any = "42") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": content}


# ── fields ───────────────────────────────────────────────────────────────────────────────────

OUT_OF_RANGE = {
    "max_tokens": ["-1", "1.5", '"5"', "null"],
    "temperature": ["-1", "2.1", "NaN", '"1"'],
    "top_p": ["0", "1.1", "Infinity"],
    "top_k": ["-1", "1.5"],
    "n": ["0", "2"],
    "seed": ["1.5", "9223372036854775808"],
    "model": ["7"],
    "stream": ['"true"'],
    "stop_sequences": ['"x"', "5", "{}"],
    "system": ["7", "{}"],
    "tools": ["{}"],
    "tool_choice": ['"auto"'],
    "thinking": ["5"],
    "output_config": ["[]"],
    "messages": ["[]", "null", '"hi"', "{}"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, all_ in OUT_OF_RANGE.items() for value in all_]
)
def test_a_value_that_is_none_or_out_of_range_is_refused_by_its_name(
    field: str, value: str
) -> None:
    """B77, B79."""
    given = START + f'"{field}": {value}}}'.encode()

    assert refusal(given).param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a", 1]}, "stop_sequences[1]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "wizard"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"logit_bias": {"foo": 1}}, "logit_bias"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_refused_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    """B88."""
    assert refusal(body(**fields)).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_sequences": [], "system": None, "tools": [], "thinking": None},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "none"}},
        {"tool_choice": {"type": "auto"}},
        {"thinking": {"type": "adaptive"}},
        {"mcp_servers": [], "output_config": {}, "n": 1, "stream": False},
        {"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "x"}},
        {"service_tier": "auto", "inference_geo": "eu", "speed": "fast", "container": None},
        {"diagnostics": {"previous_message_id": None}},
    ],
)
def test_what_asks_for_nothing_is_no_reason_to_refuse(fields: dict[str, Any]) -> None:
    found = generation_of(parse_messages(body(**fields)), VOCABULARY)

    assert found.sampling == Sampling(temperature=1.0)
    assert found.prompt == Conversation((ChatMessage("user", "hi"),))


def test_a_limit_is_required_for_an_answer_and_not_for_a_count() -> None:
    given = json.dumps({"messages": [USER]}).encode()

    assert refusal(given).code == "missing_field"
    assert parse_count(given).messages


def test_sampling_and_stops_are_taken_over() -> None:
    fields = {"temperature": 0.5, "top_p": 0.5, "top_k": 9, "seed": 3, "stop_sequences": ["a", "b"]}
    found = generation_of(parse_messages(body(**fields, cache_salt="s")), VOCABULARY)

    assert found.sampling == Sampling(temperature=0.5, top_p=0.5, top_k=9, seed=3)
    assert (found.stops, found.max_tokens, found.salt) == (("a", "b"), 5, "s")


# ── messages ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (None, ""),
        ("hi", ""),
        ({"role": "user"}, ".content"),
        ({"content": "hi"}, ".role"),
        ({"role": "wizard", "content": "x"}, ".role"),
        ({"role": "tool", "content": "x"}, ".role"),
        ({"role": "user", "content": None}, ".content"),
        ({"role": "user", "content": 7}, ".content"),
        ({"role": "user", "content": {}}, ".content"),
        ({"role": "user", "content": []}, ".content"),
        (user(None), ".content[0]"),  # pyright: ignore[reportArgumentType]
        (user({}), ".content[0].type"),
        (user({"type": "image", "source": {}}), ".content[0].type"),
        (user({"type": "document", "source": {}}), ".content[0].type"),
        (user({"type": 7}), ".content[0].type"),
        (user(text("a"), {"type": "text"}), ".content[1].text"),
        (user({"type": "text", "text": 5}), ".content[0].text"),
        (user(used(1)), ".content[0].type"),
        (assistant(result(1)), ".content[0].type"),
        (user(result(1, 5)), ".content[0].content"),
        (user(result(1, [{"type": "image"}])), ".content[0].content[0].type"),
        (assistant({"type": "tool_use", "id": "t", "name": "f"}), ".content[0].input"),
        (assistant({**used(1), "input": "x"}), ".content[0].input"),
        (assistant({"type": "server_tool_use", "id": "t"}), ".content[0].type"),
    ],
)
def test_malformed_messages_are_refused_with_the_place(message: Any, place: str) -> None:
    """B79, B80: never dropped in silence."""
    error = refusal(body(messages=[USER, message, USER]))

    assert error.param == f"messages[1]{place}"


def test_an_answer_that_would_go_on_from_an_assistant_is_refused() -> None:
    """It would be a new turn instead. It can be counted."""
    given = body(messages=[USER, assistant(text("The answer is ("))])

    assert refusal(given).param == "messages"
    assert len(conversation_of(parse_count(given)).messages) == 2


def test_input_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    call = {**used(1), "input": {"x": deep}}

    assert refusal(body(messages=[assistant(call), USER])).param == "messages[0].content[0].input"


def test_system_and_blocks_keep_their_order() -> None:
    """B80."""
    found = conversation(
        user(text("one "), text("two")), system=[text("be "), text("brief")]
    ).messages

    assert [(message.role, message.text) for message in found] == [
        ("system", "be brief"),
        ("user", "one two"),
    ]


def test_what_tools_said_are_turns_of_their_own_and_the_rest_follows() -> None:
    found = conversation(
        USER,
        assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("so"), used(1),
                  used(2), {"type": "redacted_thinking", "data": "x"}),
        user(result(1), result(2, [text("4"), text("2")]), text("and"), text(" now?")),
        user(text("before"), result(3, None), text("after")),
    ).messages  # fmt: skip

    arguments = '{"b":1,"a":[2]}'
    calls = (ToolCall("t1", "f", arguments), ToolCall("t2", "f", arguments))
    assert found == (
        ChatMessage("user", "hi"),
        ChatMessage("assistant", ("so",), tool_calls=calls, reasoning="hm"),
        ChatMessage("tool", "42", tool_call_id="t1"),
        ChatMessage("tool", ("4", "2"), tool_call_id="t2"),
        ChatMessage("user", ("and", " now?")),
        ChatMessage("user", ("before",)),
        ChatMessage("tool", "", tool_call_id="t3"),
        ChatMessage("user", ("after",)),
    )


def test_a_turn_that_only_calls_tools_needs_no_text() -> None:
    (turn,) = conversation(assistant(used(1))).messages

    assert turn.content is None
    assert len(turn.tool_calls) == 1


# ── variables of the template ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking_budget": 1024},
        ),
        (
            {"output_config": {"effort": "high"}},
            {"reasoning_effort": "high", "enable_thinking": True},
        ),
        (
            {"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}},
            {"reasoning_effort": "max", "enable_thinking": False},
        ),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_how_much_to_think_is_the_templates_to_say(
    fields: dict[str, Any], options: dict[str, Any] | None
) -> None:
    found = conversation(USER, **fields).template_options

    assert (None if found is None else json.loads(found)) == options
