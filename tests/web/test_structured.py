"""Answers in a given form, in every dialect, by a real model with random weights."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import pytest_asyncio

from omlx.core.grammar import TEXT_MAX
from omlx.core.markup import Edge
from tests.web.serving import Server, chat, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
LONG = 500
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    home = tmp_path_factory.mktemp("home")
    async with serving(model_path("llama"), home, max_concurrent_requests=4) as running:
        yield running


def json_format(schema: Json, **fields: Any) -> Json:
    described = {"name": "answer", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def bodies(**fields: Any) -> dict[str, Json]:
    """The same request in each dialect, at temperature 1."""
    drawn = {"temperature": 1, "seed": 3, **fields}
    return {
        "chat": chat("hi", **{"max_tokens": LONG, **drawn}),
        "completions": {"prompt": "hi", "max_tokens": LONG, **drawn},
        "messages": {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": LONG,
            **drawn,
        },
        "responses": {"input": "hi", "max_output_tokens": LONG, **drawn},
    }


def said(dialect: str, answer: Json) -> tuple[str, str]:
    """Text, and the dialect's word for how it ended."""
    match dialect:
        case "chat":
            choice = answer["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]
        case "completions":
            return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        case "messages":
            return answer["content"][0]["text"], answer["stop_reason"]
    return answer["output"][0]["content"][0]["text"], answer["status"]


ENDS = {
    "chat": ("stop", "length"),
    "completions": ("stop", "length"),
    "messages": ("end_turn", "max_tokens"),
    "responses": ("completed", "incomplete"),
}
FORMATS: dict[str, Json] = {
    "chat": json_format(SCHEMA, strict=True),
    "completions": json_format(SCHEMA),
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "responses": {
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    },
}
"""The dialects' own words for the same."""


# ── what is answered ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_an_answer_satisfies_its_schema(server: Server, dialect: str, seed: int) -> None:
    body = {**bodies(seed=seed)[dialect], **FORMATS[dialect]}

    status, answer, _ = await server.post(body, PATHS[dialect])

    assert status == 200, answer
    text, end = said(dialect, answer)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert end == ENDS[dialect][0]


@pytest.mark.parametrize("dialect", PATHS)
async def test_an_answer_that_is_cut_says_so(server: Server, dialect: str) -> None:
    count = "max_output_tokens" if dialect == "responses" else "max_tokens"
    body = {**bodies(guided_regex="[a-z]{40}")[dialect], count: 6}

    status, answer, _ = await server.post(body, PATHS[dialect])

    assert status == 200, answer
    text, end = said(dialect, answer)
    assert re.fullmatch("[a-z]+", text.strip())
    assert end == ENDS[dialect][1]


async def test_a_stream_says_the_same(server: Server) -> None:
    fields = {"temperature": 1, "seed": 5, "max_tokens": LONG, **json_format(SCHEMA)}

    whole = await server.chat("hi", **fields)
    chunks = [json.loads(frame) for frame in (await server.stream("hi", **fields))[:-1]]

    content = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert content == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


GUIDED: dict[str, tuple[Json, str]] = {
    "json": ({"json": SCHEMA}, r'(?s)\s*\{.*"name".*"count".*\}'),
    "json as a text": ({"json": json.dumps(SCHEMA)}, r'(?s)\{.*"name".*"count".*\}'),
    "regex": ({"regex": "[0-9]{3}/[a-c]"}, "[0-9]{3}/[a-c]"),
    "choice": ({"choice": ["positive", 'nega"tive', "größe"]}, 'positive|nega"tive|größe'),
    "lark": ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
    "gbnf": ({"grammar": 'root ::= "y" [0-9]'}, "y[0-9]"),
}


@pytest.mark.parametrize("name", GUIDED)
@pytest.mark.parametrize("dialect", PATHS)
async def test_every_dialect_takes_the_guided_fields(
    server: Server, name: str, dialect: str
) -> None:
    """vLLM's names, the older and the newer ones."""
    asked, expected = GUIDED[name]
    older = {f"guided_{key}": value for key, value in asked.items()}
    texts: set[str] = set()
    for fields in (older, {"structured_outputs": asked}):
        status, answer, _ = await server.post(bodies(**fields)[dialect], PATHS[dialect])
        assert status == 200, answer
        texts.add(said(dialect, answer)[0])

    (text,) = texts
    assert re.fullmatch(expected, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json_object": False, "json": SCHEMA, "regex": None}},
    ],
    ids=["a schema beside json_object", "what is null or false asks for nothing"],
)
async def test_other_ways_to_say_it(server: Server, fields: Json) -> None:
    answer = await server.chat("hi", temperature=1, seed=1, max_tokens=LONG, **fields)

    jsonschema.validate(json.loads(said("chat", answer)[0]), SCHEMA)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ],
)
async def test_any_object(server: Server, fields: Json) -> None:
    status, found, _ = await server.post({"content": "}"}, "/tokenize")
    assert status == 200
    (brace,) = found["tokens"]

    answer = await server.chat(
        "hi", temperature=1, seed=1, max_tokens=LONG, logit_bias={str(brace): 4}, **fields
    )

    assert isinstance(json.loads(said("chat", answer)[0]), dict)


async def test_choices_are_each_in_the_form(server: Server) -> None:
    answer = await server.chat(
        "hi", temperature=1, seed=7, n=3, max_tokens=LONG, **json_format(SCHEMA)
    )

    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == 3


async def test_the_official_client_parses_its_own_type(server: Server) -> None:
    class Verdict(pydantic.BaseModel):
        good: bool
        score: int = pydantic.Field(ge=0, le=10)

    client = server.client(_strict_response_validation=True)
    completion = await client.chat.completions.parse(
        model=server.model,
        messages=[{"role": "user", "content": "hi"}],
        response_format=Verdict,
        seed=2,
        max_tokens=LONG,
    )

    assert isinstance(completion.choices[0].message.parsed, Verdict)


async def test_a_response_says_the_format_back(server: Server) -> None:
    body = {**bodies()["responses"], **FORMATS["responses"]}

    _, answer, _ = await server.post(body, PATHS["responses"])

    assert answer["text"]["format"] == body["text"]["format"]


async def test_a_model_thinks_first_and_then_keeps_to_the_form(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its markers here are two words that are one token each; the prompt ends with the first."""
    thinking = replace(server.app.edge.markup, think=(" one", " two"))
    monkeypatch.setattr(server.app.edge, "markup", thinking)
    _, found, _ = await server.post({"content": " two"}, "/tokenize")
    (end,) = found["tokens"]

    answer = await server.chat(
        "hi",
        temperature=1,
        seed=1,
        max_tokens=LONG,
        logit_bias={str(end): 3},
        chat_template_kwargs={"opening": " one"},
        **json_format(SCHEMA),
    )

    message = answer["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert message["reasoning_content"]


async def test_text_asks_for_nothing(server: Server) -> None:
    fields = {"temperature": 1, "seed": 4, "max_tokens": 12}

    plain = await server.chat("hi", **fields)
    asked = await server.chat("hi", **fields, response_format={"type": "text"})

    assert said("chat", asked) == said("chat", plain)


# ── what is refused ──────────────────────────────────────────────────────────────────────────


async def refused(server: Server, body: Json, path: str = PATHS["chat"]) -> Json:
    status, answer, _ = await server.post(body, path)
    assert status == 400, answer
    return answer["error"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "unsupported_value"),
        ({"response_format": {"type": 5}}, "response_format", "unsupported_value"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": "[]"}, "guided_json", "invalid_value"),
        ({"guided_json": []}, "guided_json", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_choice": [""]}, "guided_choice", "invalid_value"),
        ({"guided_choice": "a"}, "guided_choice", "invalid_value"),
        ({"guided_regex": 5}, "guided_regex", "invalid_value"),
        ({"guided_regex": "a" * (TEXT_MAX + 1)}, "guided_regex", "invalid_value"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "unsupported_value"),
        ({"grammar": 'root ::= "a"'}, "grammar", "unsupported_value"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "invalid_value"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "unsupported_value",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "invalid_value",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "invalid_value",
        ),
    ],
)
async def test_what_can_not_be_meant_is_named(
    server: Server, fields: Json, param: str, code: str
) -> None:
    error = await refused(server, chat("hi", **fields))

    assert (error["param"], error["code"]) == (param, code)


BAD = {"type": "object", "properties": {"a": {"type": "number", "not": {"const": 1}}}}
BAD_FORMATS: dict[str, tuple[Json, str]] = {
    "chat": (json_format(BAD), "response_format.json_schema.schema"),
    "completions": (json_format(BAD), "response_format.json_schema.schema"),
    "messages": (
        {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
        "output_config.format.schema",
    ),
    "responses": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": BAD}}},
        "text.format.schema",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
@pytest.mark.parametrize("dialect", PATHS)
async def test_a_schema_that_can_not_be_compiled_is_refused_before_anything_is_queued(
    server: Server, dialect: str, stream: bool
) -> None:
    fields, param = BAD_FORMATS[dialect]
    server.gate.calls.clear()

    error = await refused(server, {**bodies()[dialect], **fields, "stream": stream}, PATHS[dialect])

    assert f'{param} can\'t be followed: Unimplemented keys: ["not"]' in error["message"]
    assert not server.gate.calls


async def test_without_the_extra_it_is_said_how_to_get_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "llguidance" else find(name, *rest),
    )

    error = await refused(server, chat("hi", guided_regex="nobody asked for this before"))

    assert (error["param"], error["code"]) == ("guided_regex", "unsupported_value")
    assert 'pip install "omlx[structured]"' in error["message"]
    assert (await server.chat("hi", max_tokens=3))["choices"]


async def test_a_model_with_channels_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer would have to begin with a marker that no schema speaks of."""
    channels = replace(server.app.edge.markup, edges=(Edge("normal", "<final>", "final"),))
    monkeypatch.setattr(server.app.edge, "markup", channels)

    error = await refused(server, chat("hi", guided_regex="a"))

    assert (error["param"], error["code"]) == ("guided_regex", "unsupported_value")
    assert "channels" in error["message"]


async def test_a_grammar_that_fails_later_ends_its_request_alone(server: Server) -> None:
    too_much = chat("hi", temperature=1, guided_regex="((a{1000}){1000}){1000}")

    status, answer, _ = await server.post(too_much)

    assert status == 500
    assert "the grammar can't be followed" in answer["error"]["message"]
    assert (await server.chat("hi", max_tokens=3))["choices"]
