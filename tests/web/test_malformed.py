"""Whatever body arrives on whatever route: an answer, or the dialect's error, and never a 5xx."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from omlx.core.chat import Conversation, GenerationRequest, template_messages, without_attribution
from omlx.web import chat_schema, completions, messages_schema, responses_schema
from omlx.web.errors import ApiError
from tests.web.serving import Server

VOCABULARY = 300

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "42"},
            ],
            "max_tokens": 2,
            "stop": ["x"],
            "n": 1,
            "logit_bias": {"5": 1.5},
            "logprobs": True,
            "top_logprobs": 1,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "low",
            "chat_template_kwargs": {"opening": ""},
            "response_format": {"type": "text"},
            "tools": [],
        }
    ],
    "/v1/completions": [
        {"prompt": "hi", "max_tokens": 2, "logprobs": 1, "stop": "x", "seed": 3},
        {"prompt": [[10, 11], [12]], "max_tokens": 2, "echo": True},
    ],
    "/v1/messages": [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "42"}],
                },
            ],
            "system": [{"type": "text", "text": "be brief"}],
            "max_tokens": 2,
            "stop_sequences": ["x"],
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low"},
        }
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "42"},
            ],
            "instructions": "be brief",
            "max_output_tokens": 2,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
        }
    ],
}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "/v1/messages/count_tokens": VALID["/v1/messages"],
    "/tokenize": [{"content": "hi", "add_special": False, "parse_special": True}],
    "/detokenize": [{"tokens": [10, 11]}],
    "/apply-template": [{"messages": [{"role": "user", "content": "hi"}], "tools": []}],
}


def asked_of(path: str, body: bytes) -> list[GenerationRequest]:
    """What the route of this path makes of a body."""
    match path:
        case "/v1/chat/completions":
            return [chat_schema.generation_of(chat_schema.parse_chat(body), VOCABULARY)]
        case "/v1/completions":
            request = completions.parse_completion(body)
            return [
                completions.generation_of(request, prompt, VOCABULARY, 1)
                for prompt in request.prompt
            ]
        case "/v1/messages":
            return [messages_schema.generation_of(messages_schema.parse_messages(body), VOCABULARY)]
    request = responses_schema.parse_responses(body)
    return [responses_schema.generation_of(request, VOCABULARY)]


WORDS = [
    "user", "assistant", "system", "text", "tool_use", "tool_result", "thinking", "message",
    "function_call", "input_text", "image", "none", "low", "json_schema", "", "x", "\0", "é", "5",
    "x-anthropic-billing-header: a;\n",
]  # fmt: skip
NAMES = ["type", "text", "role", "content", "name", "input", "id", "messages", "stop", "5", "x"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, 1, -1, 2, 1.0, 1.5, 299, 300, 2**31, 2**63, -(2**63), 2**64, 10**30, 1e308]
    ),
    st.sampled_from(WORDS),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything that a body holds."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    for key, below in inner:
        yield (*path, key)
        yield from places(below, (*path, key))


def with_value(body: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    changed: Any = copy.deepcopy(body)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return changed


@pytest.mark.parametrize("path", VALID)
@settings(max_examples=300)
@given(data=st.data())
def test_a_body_with_one_wrong_value_is_understood_or_refused_by_name(
    path: str, data: st.DataObject
) -> None:
    """B77, B79: nothing else is raised, and the place that is named is one that is there."""
    valid = data.draw(st.sampled_from(VALID[path]))
    place = data.draw(st.sampled_from(list(places(valid))))
    body = with_value(valid, place, data.draw(values))

    try:
        asked = asked_of(path, json.dumps(body).encode())
    except ApiError as refused:
        assert refused.status == 400
        assert refused.param is not None
        root = refused.param.split(".")[0].split("[")[0]
        assert root == place[0] or root in valid
        return
    for one in asked:
        if isinstance(one.prompt, Conversation):
            json.dumps(template_messages(without_attribution(one.prompt)))


@pytest.mark.parametrize("path", VALID)
@given(body=st.dictionaries(st.sampled_from([*NAMES, "prompt", "max_tokens", "n"]), values))
def test_any_object_is_understood_or_refused(path: str, body: dict[str, Any]) -> None:
    try:
        asked_of(path, json.dumps(body).encode())
    except ApiError as refused:
        assert refused.status == 400


@pytest.mark.parametrize("path", VALID)
@given(body=st.binary(max_size=40))
def test_any_bytes_are_refused(path: str, body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        asked_of(path, body)

    assert refused.value.status == 400


# ── over sockets ─────────────────────────────────────────────────────────────────────────────

WRONG: list[object] = [None, True, -1, 1.5, 10**30, "", "\0", [], {}, [None], [[]], {"type": "x"}]


def assert_dialect(path: str, answer: Any) -> None:
    """The shape of an error on this path."""
    error = answer["error"]
    if path.startswith("/v1/messages"):
        assert answer.keys() == {"type", "error", "request_id"}
        assert error.keys() == {"type", "message"}
    else:
        assert answer.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [*VALID, *OTHERS])
async def test_a_valid_body_is_answered_and_a_wrong_one_is_the_clients_fault(
    server: Server, path: str
) -> None:
    """Each place of each body in turn, with one of the wrong values, streamed and not."""
    choose = random.Random(path).choice
    for valid in {**VALID, **OTHERS}[path]:
        assert (await server.post(valid, path))[0] == 200
        for place in places(valid):
            wrong = with_value(valid, place, choose(WRONG))
            for body in (wrong, {**wrong, "stream": True}):
                url = f"{server.url}{path}"
                async with server.http.post(url, data=json.dumps(body)) as answer:
                    assert answer.status in (200, 400, 404), (place, body)
                    if answer.status != 200:
                        assert_dialect(path, await answer.json())
                    else:
                        assert b"Traceback" not in await answer.read()


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda body: body[:-1],
    "not UTF-8": lambda body: body.replace(b"hi", b"\xff"),
    "a lone surrogate": lambda body: body.replace(b"hi", b"\\ud800"),
    "not finite": lambda body: body[:-1] + b', "temperature": NaN}',
    "an array": lambda body: b"[" + body + b"]",
    "nested": lambda body: body[:-1] + b', "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "compressed": lambda _: b"\x1f\x8b\x08\x00garbage",
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [*VALID, *OTHERS])
async def test_a_body_that_is_no_json_object_is_refused_on_every_route(
    server: Server, path: str
) -> None:
    """B79."""
    body = json.dumps({**VALID, **OTHERS}[path][0]).encode()
    for name, broken in BROKEN.items():
        status, answer, _ = await server.post(broken(body), path)
        assert status == 400 or broken(body) == body, name
        if status != 200:
            assert_dialect(path, answer)
