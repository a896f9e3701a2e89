"""A call is what a parser reads and its tool's schema allows; anything else is no call."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any, cast

import hypothesis.strategies as st
import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings

from omlx.core.markup import MarkupTokenizer, ModelMarkup
from omlx.core.pieces import CallText, Text, ToolCall, calls_of
from omlx.core.tool_calls import read_calls
from tests.core.test_markup import read

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
        "at": {"type": "array"},
    },
}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
        for name in ("look", "go")
    ]
)
LOOK = ("look", {"city": "Paris", "days": 3})
GO = ("go", {"city": "7"})

FAMILIES: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "function_gemma": (
        "<start_function_call>call:look{city:<escape>Paris<escape>,days:3}<end_function_call>",
        [LOOK],
    ),
    "gemma4": (
        '<|tool_call>call:look{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:go{city:<|"|>7<|"|>}<tool_call|>',
        [LOOK, GO],
    ),
    "glm47": (
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [LOOK],
    ),
    "json_tools": (
        '<tool_call>\n{"name": "look", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "go", "arguments": {"city": "7"}}\n</tool_call>',
        [LOOK, GO],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
        '<|tool_call_begin|>functions.go:1<|tool_call_argument_begin|>{"city": "7"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [LOOK, GO],
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        [LOOK],
    ),
    "laguna": (
        "<tool_call>look\n<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        [LOOK],
    ),
    "longcat": (
        "<longcat_tool_call>go\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>7</longcat_arg_value>\n</longcat_tool_call>",
        [GO],
    ),
    "minicpm5": (
        '<function name="look"><param name="city">Paris</param><param name="days">3</param>'
        '</function><function name="go"><param name="city">7</param></function>',
        [LOOK, GO],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="go">\n'
        '<parameter name="city">7</parameter>\n</invoke>\n</minimax:tool_call>',
        [LOOK, GO],
    ),
    "mistral": (
        '[TOOL_CALLS]look[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]go[ARGS]{"city": "7"}',
        [LOOK, GO],
    ),
    "muse_spark": (
        '<atem:function_calls><atem:invoke name="look">'
        '<atem:parameter name="city">Paris</atem:parameter>'
        '<atem:parameter name="days">3</atem:parameter></atem:invoke>'
        '<atem:invoke name="go"><atem:parameter name="city">7</atem:parameter></atem:invoke>'
        "</atem:function_calls>",
        [LOOK, GO],
    ),
    "pythonic": (
        '<|tool_call_start|>[look(city="Paris", days=3), go(city=7)]<|tool_call_end|>',
        [LOOK, GO],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [LOOK],
    ),
}


def family(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.tool_parsers.{name}")


def calls_in(name: str, text: str, tools: str) -> list[ToolCall]:
    """The calls in an answer with ``text`` at its end."""
    module = family(name)
    model = ModelMarkup(call=(module.tool_call_start, module.tool_call_end))
    pieces, _ = read(list(f"I look.\n{text}"), model.reading("", tools=True))
    assert pieces[0] == Text("I look.")
    found: list[ToolCall] = []
    for piece in pieces[1:]:
        assert isinstance(piece, CallText)
        found += read_calls(module.parse_tool_call, piece.text, tools)
    return found


def test_every_family_of_the_library_has_an_example() -> None:
    found = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}

    assert found == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_of_each_family_are_read(name: str) -> None:
    text, expected = FAMILIES[name]

    found = calls_in(name, text, TOOLS)

    assert [(call.name, json.loads(call.arguments)) for call in found] == expected


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_that_a_model_writes_breaks_a_parser(name: str, data: st.DataObject) -> None:
    """Calls that are cut, and calls with anything in the middle."""
    module, (text, _) = family(name), FAMILIES[name]
    inner = text.removeprefix(module.tool_call_start)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(inner))] * 2)))
    junk = data.draw(st.sampled_from(["", "{", "}", '"', "\\", "(", "NaN", "\ud800", "[[", "<"]))

    for call in read_calls(module.parse_tool_call, inner[:start] + junk + inner[stop:], TOOLS):
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name
        call.arguments.encode()


def reading(found: Any) -> tuple[ToolCall, ...]:
    return read_calls(lambda text, tools: found, "", TOOLS)


@pytest.mark.parametrize(
    "found",
    [
        None,
        "look",
        {},
        {"name": "look", "arguments": [1]},
        {"name": "look", "arguments": "no JSON"},
        {"name": "look", "arguments": {"city": float("nan")}},
        {"name": "look", "arguments": {"city": {1, 2}}},
        {"name": "", "arguments": {}},
        {"name": 5, "arguments": {}},
        {"name": "unknown", "arguments": {"raw": "?"}},
        [{"name": "look", "arguments": {}}, {"name": None}],
    ],
    ids=range(11),
)
def test_what_is_no_call_is_none(found: Any) -> None:
    assert reading(found) == ()


def test_a_parser_that_fails_found_nothing() -> None:
    def parser(text: str, tools: Any) -> Any:
        raise RecursionError

    assert read_calls(parser, "", TOOLS) == ()


def test_a_model_that_gives_ids_keeps_them() -> None:
    (call,) = reading({"name": "look", "arguments": None, "id": "functions.look:0"})

    assert call == ToolCall("functions.look:0", "look", "{}")


@pytest.mark.parametrize(
    ("given_", "meant"),
    [
        ({"city": 75001}, {"city": "75001"}),
        ({"city": True}, {"city": "true"}),
        ({"city": {"a": 1}}, {"city": '{"a": 1}'}),
        ({"city": None}, {"city": None}),
        ({"days": "3"}, {"days": 3}),
        ({"days": "three"}, {"days": "three"}),
        ({"days": "true"}, {"days": "true"}),
        ({"wind": "true"}, {"wind": True}),
        ({"at": "[1, 2]"}, {"at": [1, 2]}),
        ({"at": '{"x": 1}'}, {"at": '{"x": 1}'}),
        ({"other": "3"}, {"other": "3"}),
        ({"city": "half \ud800"}, {"city": "half \ufffd"}),
    ],
)
def test_arguments_have_the_types_of_the_schema(given_: Any, meant: Any) -> None:
    (call,) = reading({"name": "look", "arguments": given_})

    assert json.loads(call.arguments) == meant


@pytest.mark.parametrize(
    ("arguments", "fit"),
    [({"city": "Paris"}, True), ({"city": 7}, True), ({"days": "three"}, False)],
)
def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(
    arguments: Any, fit: bool
) -> None:
    """What only looks otherwise is turned into what was meant first."""
    found = {"name": "look", "arguments": arguments}

    assert bool(read_calls(lambda text, tools: found, "", TOOLS, ["look"])) == fit
    assert read_calls(lambda text, tools: found, "", TOOLS, ["go"])


def test_arguments_are_spelled_as_templates_spell_them() -> None:
    """So that a call that comes back is the same text, and its prefix is found."""
    (call,) = reading({"name": "look", "arguments": {"city": "Zürich", "at": [1, 2]}})

    assert call.arguments == '{"city": "Zürich", "at": [1, 2]}'


def test_tools_with_odd_schemas_are_read_all_the_same() -> None:
    tools = json.dumps(
        [
            {"type": "function", "function": {"name": "go"}},
            {"type": "function", "function": {"name": "do", "parameters": {"properties": [1]}}},
            {
                "type": "function",
                "function": {"name": "look", "parameters": {"properties": {"city": True}}},
            },
        ]
    )
    for name, (text, expected) in FAMILIES.items():
        assert [call.name for call in calls_in(name, text, tools)] == [n for n, _ in expected]


# ── what is known of a tokenizer ─────────────────────────────────────────────────────────────


class Wrapper:
    """As mlx-lm's, with what a family's has."""

    think_start: str | None = None
    think_end: str | None = None
    tool_call_start: str | None = "<tool_call>"
    tool_call_end: str | None = "</tool_call>"
    structural_markers = ("<|close|>message<|sep|>",)
    response_initial_state: str | None = None
    all_special_ids = (0, 1)
    chat_template: object = "{% if tools %}{{ tools }}{% endif %}"
    has_chat_template = True

    def __init__(self) -> None:
        self.response_transitions = {"header": [("to=user", "normal")]}
        self.added_tokens_decoder = {0: "<|end|>", 1: "<|sep|>", 2: "</tool_call>"}
        self.eos_token_ids = {0}
        self.init_kwargs = {"tool_parser_type": "json_tools"}


def markup_of(**changed: Any) -> ModelMarkup:
    tokenizer = Wrapper()
    for name, value in changed.items():
        setattr(tokenizer, name, value)
    return ModelMarkup.of(cast(MarkupTokenizer, tokenizer))


def test_a_models_markup_is_what_its_tokenizer_says() -> None:
    found = markup_of(think_start="<t>", think_end="</t>")

    assert found.think == ("<t>", "</t>")
    assert found.call == ("<tool_call>", "</tool_call>")
    assert found.end_is_token
    assert found.control == ((1, "<|sep|>"),), "ends of answers are in no text"
    reading = found.reading("", tools=True)
    assert reading.spelled == reading.spelled_in_calls == {1}
    assert markup_of().think is None


def test_tools_need_a_template_with_a_place_for_them_and_a_parser() -> None:
    assert markup_of().takes_tools
    assert markup_of(chat_template={"default": "", "tool_use": "x"}).takes_tools
    assert markup_of(chat_template=None).takes_tools, "it is rendered by a program"
    assert not markup_of(chat_template="{{ messages }}").takes_tools
    assert not markup_of(tool_call_start=None, tool_call_end=None).takes_tools
    assert not markup_of(chat_template=None, has_chat_template=False).takes_tools


def test_calls_are_told_from_what_else_was_said() -> None:
    call = ToolCall("1", "look", "{}")

    assert calls_of([Text("a"), call]) == [call]
