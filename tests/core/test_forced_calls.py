"""A grammar of calls: one of the tools, with what its schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx.core.forced_calls import can_force, forced_calls
from omlx.core.markup import ModelMarkup

QWEN = ModelMarkup(call=("<call>", "</call>"), family="json_tools", takes_tools=True)
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/place"}, "next": {"items": [{"$ref": "#"}]}},
    "$defs": {"place": {"type": "string"}},
}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
        for name in ("look", "go", "rest")
    ]
)


def resolved(schema: Any, pointer: str) -> Any:
    for part in pointer.removeprefix("#/").split("/"):
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema


@pytest.mark.parametrize("names", [("go",), ("look", "rest")])
def test_each_call_has_its_name_and_its_tools_schema(names: tuple[str, ...]) -> None:
    grammar = forced_calls(QWEN, TOOLS, names, one_call=True)

    schema = json.loads(grammar.text)
    calls = schema.get("anyOf", [schema])
    assert [call["properties"]["name"]["const"] for call in calls] == list(names)
    for call in calls:
        assert list(call["properties"]) == call["required"] == ["name", "arguments"]
        arguments = call["properties"]["arguments"]
        assert arguments["type"] == "object"
        assert resolved(schema, arguments["properties"]["at"]["$ref"]) == {"type": "string"}
        assert resolved(schema, arguments["properties"]["next"]["items"][0]["$ref"]) == arguments


def test_it_stands_between_the_models_markers_once_or_more() -> None:
    one = forced_calls(QWEN, TOOLS, ["go"], one_call=True)
    more = forced_calls(QWEN, TOOLS, ["go"], one_call=False)

    assert (one.begins, one.ends) == ("<call>\n", "\n</call>")
    assert (one.repeats, more.repeats) == (False, True)


def test_only_formats_that_are_json_can_be_forced() -> None:
    assert can_force(QWEN)
    assert not can_force(ModelMarkup(call=("[TOOL_CALLS]", ""), family="mistral"))
    assert not can_force(ModelMarkup())
