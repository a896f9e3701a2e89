"""What a chat request may hold. Everything else is refused by name before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx.core.plan import Sampling
from omlx.web.chat_schema import ChatRequest, conversation_of, generation_of, parse_chat
from omlx.web.errors import ApiError
from omlx.web.sampling import logit_bias_of, stops_of

VOCABULARY = 300
START = b'{"messages": [{"role": "user", "content": "hi"}], '
USER = {"role": "user", "content": "hi"}


def parsed(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [USER], **fields}).encode())


def sampling_of(request: ChatRequest) -> Sampling:
    return generation_of(request, VOCABULARY).sampling


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        sampling_of(parse_chat(body))
    error = caught.value
    assert error.status == 400
    assert error.kind == "invalid_request_error"
    json.dumps(error.body(), allow_nan=False).encode()
    return error


def with_messages(messages: object) -> bytes:
    return json.dumps({"messages": messages}).encode()


# ── numbers ──────────────────────────────────────────────────────────────────────────────────

OUT_OF_RANGE = {
    "temperature": ["-1", "2.1", "-1e-9"],
    "top_p": ["-0.1", "0", "1.1"],
    "min_p": ["-0.1", "1.1"],
    "presence_penalty": ["-2.1", "2.1"],
    "frequency_penalty": ["-2.1", "2.1"],
    "repetition_penalty": ["-1", "0", "10.1"],
    "max_tokens": ["-1", "1.5", "-9223372036854775808"],
    "max_completion_tokens": ["-1", "1.5"],
    "top_k": ["-1", "1.5"],
    "top_logprobs": ["-1", "21", "1.5"],
    "n": ["0", "-1", "1.5", "129"],
    "seed": ["1.5", "9223372036854775808", "-1e19"],
}
NO_NUMBER = ["NaN", "Infinity", "-Infinity", "1e400", '"0.5"', "true", "[]", "{}"]


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in OUT_OF_RANGE.items() for value in [*values, *NO_NUMBER]],
)
def test_a_number_that_is_none_or_out_of_range_is_refused_by_its_name(
    field: str, value: str
) -> None:
    """B77: also what JSON has no word for, with an answer that is JSON all the same."""
    error = refusal(START + f'"{field}": {value}}}'.encode())

    assert error.param == field
    assert error.code == "invalid_value"


@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_null_is_as_good_as_absent(field: str) -> None:
    """B77: clients send every field they know."""
    assert sampling_of(parsed(**{field: None})) == sampling_of(parsed())


@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "top_k", "top_logprobs"])
def test_whole_numbers_may_be_written_with_a_point(field: str) -> None:
    request = parse_chat(START + f'"logprobs": true, "{field}": 1.0}}'.encode())

    assert getattr(request, field) == 1
    assert isinstance(getattr(request, field), int)


def test_the_edges_of_every_range_are_inside() -> None:
    low = parsed(
        temperature=0, top_p=1e-9, min_p=0, presence_penalty=-2, frequency_penalty=-2,
        repetition_penalty=0.01, max_tokens=0, top_k=0, n=1, seed=-(2**63),
    )  # fmt: skip
    high = parsed(
        temperature=2, top_p=1, min_p=1, presence_penalty=2, frequency_penalty=2,
        repetition_penalty=10, max_tokens=2**63, top_k=10**9, seed=2**63 - 1,
        logprobs=True, top_logprobs=20,
    )  # fmt: skip

    assert sampling_of(low).seed == -(2**63)
    assert sampling_of(high).top_k == VOCABULARY - 1
    assert sampling_of(high).top_logprobs == 20


def test_absent_fields_mean_what_they_mean_at_openai() -> None:
    assert sampling_of(parsed()) == Sampling(temperature=1.0)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 0, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 0}, 0),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ],
)
def test_of_the_two_names_of_one_limit_the_newer_wins(
    fields: dict[str, Any], asked: int | None
) -> None:
    assert parsed(**fields).tokens_asked == asked


# ── messages ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "messages"),
        (b'{"messages": null}', "messages"),
        (with_messages([]), "messages"),
        (with_messages("hi"), "messages"),
        (with_messages({"messages": [USER]}), "messages"),
        (with_messages([None]), "messages[0]"),
        (with_messages(["hi"]), "messages[0]"),
        (with_messages([USER, []]), "messages[1]"),
        (with_messages([{"role": "user"}]), "messages[0].content"),
        (with_messages([{"content": "hi"}]), "messages[0].role"),
        (with_messages([USER, {"role": "wizard", "content": "x"}]), "messages[1].role"),
        (with_messages([{"role": "user", "content": 7}]), "messages[0].content"),
        (with_messages([{"role": "user", "content": None}]), "messages[0].content"),
        (with_messages([{"role": "user", "content": []}]), "messages[0].content"),
        (with_messages([{"role": "user", "content": [None]}]), "messages[0].content[0]"),
        (with_messages([{"role": "user", "content": ["hi"]}]), "messages[0].content[0]"),
        (
            with_messages([{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text",
        ),
        (with_messages([{"role": "assistant", "content": None}]), "messages[0].content"),
        (with_messages([{"role": "tool", "content": None}]), "messages[0].content"),
        (
            with_messages([{"role": "assistant", "tool_calls": [{"id": "a"}]}]),
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_malformed_messages_are_refused_with_the_place(body: bytes, param: str) -> None:
    """B79: never a 500, never a 404, and no word about our own types."""
    error = refusal(body)

    assert error.param == param
    assert "Traceback" not in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{bad",
        b"\x00",
        b"\xff\xfe",
        b"[]",
        b'"x"',
        b"7",
        b"null",
        b"NaN",
        b"\x1f\x8b\x08\x00garbage",
        START[:-2],
        START + b'"x": "\\ud800"}',
        START + b'"user": "\xff"}',
        b"[" * 200 + b"]" * 200,
        b"[" * 100_000,
        START + b'"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    """B79: whatever arrives, and however deep."""
    error = refusal(body)

    assert error.code == "invalid_json"
    assert error.param is None


def test_of_a_key_that_is_there_twice_the_last_counts() -> None:
    assert refusal(START + b'"messages": []}').param == "messages"


@pytest.mark.parametrize("depth", [20, 200, 900])
def test_unknown_fields_are_ignored_however_deep(depth: int) -> None:
    assert parse_chat(START + b'"x": ' + b"[" * depth + b"]" * depth + b"}").model is None


def test_an_empty_text_is_a_text() -> None:
    """B79."""
    request = parse_chat(with_messages([{"role": "user", "content": ""}]))

    assert conversation_of(request).messages[0].content == ""


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", None, {}])
def test_a_part_that_is_no_text_is_refused_with_its_type(kind: object) -> None:
    """B80: not dropped in silence."""
    part = {"type": kind, "text": "x", "image_url": {"url": "data:,"}}
    error = refusal(with_messages([USER, {"role": "user", "content": [part]}]))

    assert error.param == "messages[1].content[0].type"
    assert error.code == "unsupported_value"
    assert repr(kind) in str(error)


def test_all_parts_of_a_message_are_kept_in_order() -> None:
    """B80: the array form is the string form."""
    parts = [{"type": "text", "text": "The code is 7."}, {"type": "text", "text": "Say it."}]
    request = parse_chat(with_messages([{"role": "user", "content": parts}]))

    assert conversation_of(request).messages[0].text == "The code is 7.Say it."


def test_an_assistant_that_only_calls_tools_needs_no_text() -> None:
    """B80."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    request = parse_chat(
        with_messages(
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": "42"},
            ]
        )
    )

    _, assistant, tool = conversation_of(request).messages
    assert assistant.content is None
    assert [(c.id, c.name, c.arguments) for c in assistant.tool_calls] == [("a", "f", '{"x": 1}')]
    assert (tool.content, tool.tool_call_id) == ("42", "a")


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_every_role_of_the_dialect_is_known(role: str) -> None:
    assert parse_chat(with_messages([{"role": role, "content": "x"}])).messages[0].role == role


# ── stop ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stop", "meant"),
    [
        (None, ()),
        ([], ()),
        ("X", ("X",)),
        (["a", "b", "c", "d", "e"], ("a", "b", "c", "d", "e")),
        ([" "], (" ",)),
    ],
)
def test_stop_strings_are_one_or_many_or_none(stop: object, meant: tuple[str, ...]) -> None:
    """B85: an empty list stops nothing; the model's own end still does."""
    assert stops_of(parsed(stop=stop).stop) == meant


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        ("", "stop[0]"),
        ([""], "stop[0]"),
        (["a", ""], "stop[1]"),
        (["a", 1], "stop[1]"),
        ([1], "stop[0]"),
        (5, "stop"),
        ({}, "stop"),
        (["x"] * 17, "stop"),
    ],
)
def test_a_stop_that_is_no_text_or_empty_is_refused(stop: object, param: str) -> None:
    """B85: an empty one would give an empty answer each time."""
    assert refusal(json.dumps({"messages": [USER], "stop": stop}).encode()).param == param


# ── what is asked for is done or refused ─────────────────────────────────────────────────────


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "none"}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": 5}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_what_cannot_be_done_is_refused_and_not_ignored(fields: dict[str, Any], param: str) -> None:
    """B88: an evaluation that asked for five and got one measures something else."""
    error = refusal(json.dumps({"messages": [USER], **fields}).encode())

    assert error.param == param
    assert error.code == "unsupported_value"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": 128},
        {"tools": []},
        {"tools": None, "tool_choice": None},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "parallel_tool_calls": None},
        {"tool_choice": "auto"},
        {"functions": []},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0},
        {"logit_bias": {}},
        {"modalities": ["text"]},
        {"stream": False, "stream_options": None},
        {"store": True, "service_tier": "auto", "user": "me", "metadata": {"a": "b"}},
        {"prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "low"},
    ],
)
def test_what_asks_for_nothing_is_no_reason_to_refuse(fields: dict[str, Any]) -> None:
    assert sampling_of(parsed(**fields)) == Sampling(temperature=1.0)


def test_alternatives_need_log_probabilities() -> None:
    """B88."""
    body = json.dumps({"messages": [USER], "top_logprobs": 5}).encode()

    assert refusal(body).param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": None}, None),
    ],
)
def test_log_probabilities_are_computed_when_they_are_asked(
    fields: dict[str, Any], meant: int | None
) -> None:
    assert sampling_of(parsed(**fields)).top_logprobs == meant


def test_biases_are_by_token_and_zeros_are_dropped_unseen() -> None:
    request = parsed(logit_bias={"5": -100, "7": 2.5, "foo": 0, "99999": 0.0})

    assert logit_bias_of(request, VOCABULARY) == ((5, -100), (7, 2.5))


@pytest.mark.parametrize(
    "bias",
    [
        {"foo": 1},
        {"-1": 1},
        {"+1": 1},
        {" 1": 1},
        {"1.0": 1},
        {"٣": 1},
        {"300": 1},
        {"": 1},
        {"9" * 5000: 1},
        {"5": 100.5},
        {"5": -101},
        {"5": "1"},
        {"5": None},
        [],
        "5",
    ],
)
def test_a_bias_that_is_none_or_of_no_token_is_refused(bias: object) -> None:
    """B88."""
    body = json.dumps({"messages": [USER], "logit_bias": bias}).encode()

    assert refusal(body).param == "logit_bias"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 7),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", []),
        ("logprobs", 1),
        ("tools", {}),
        ("response_format", "text"),
        ("chat_template_kwargs", []),
        ("cache_salt", 5),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_name(field: str, value: object) -> None:
    body = json.dumps({"messages": [USER], field: value}).encode()

    assert refusal(body).param == field


# ── variables of the template ────────────────────────────────────────────────────────────────


def test_variables_go_to_the_template() -> None:
    request = parsed(chat_template_kwargs={"enable_thinking": False})

    assert json.loads(conversation_of(request).template_options or "") == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"reasoning_effort": None}, None),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_how_much_to_think_is_the_templates_to_say(
    fields: dict[str, Any], options: dict[str, Any] | None
) -> None:
    found = conversation_of(parsed(**fields)).template_options

    assert (None if found is None else json.loads(found)) == options


def test_an_effort_that_nobody_knows_is_refused() -> None:
    body = json.dumps({"messages": [USER], "reasoning_effort": "huge"}).encode()

    assert refusal(body).param == "reasoning_effort"


@pytest.mark.parametrize(
    "name",
    ["chat_template", "add_generation_prompt", "tokenize", "tools", "documents", "messages"],
)
def test_a_client_cannot_bring_its_own_template_or_call_ours_differently(name: str) -> None:
    body = json.dumps({"messages": [USER], "chat_template_kwargs": {name: "{{ 7 }}"}}).encode()

    assert refusal(body).param == f"chat_template_kwargs.{name}"


def test_variables_that_are_nested_too_deeply_are_refused() -> None:
    deep = b'"chat_template_kwargs": {"x": ' + b"[" * 500 + b"]" * 500 + b"}}"

    assert refusal(START + deep).param == "chat_template_kwargs"
