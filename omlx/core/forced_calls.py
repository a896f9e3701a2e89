"""What an answer that must call a tool looks like: a grammar of calls, in the model's own format.

Only formats that are JSON between two markers are described: the arguments then keep to the
tool's schema. Other formats have grammars of their own, which nobody wrote yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from omlx.core.grammar import Grammar, json_schema, surrounded
from omlx.core.markup import ModelMarkup
from omlx.core.tool_calls import tools_by_name

JSON_FAMILY = "json_tools"
"""mlx-lm's name for: {"name": ..., "arguments": ...} between two markers."""


def can_force(markup: ModelMarkup) -> bool:
    return markup.family == JSON_FAMILY and markup.call is not None


def forced_calls(
    markup: ModelMarkup, tools: str, names: Sequence[str], *, one_call: bool
) -> Grammar:
    """A call of one of the tools called ``names``, or several calls. ``can_force`` must hold.

    ``tools``: JSON list of those offered.
    """
    assert markup.call is not None, "the caller asks can_force"
    start, end = markup.call
    offered = tools_by_name(tools)
    single = len(names) == 1
    calls = [
        _call_schema(
            name,
            offered[name]["function"]["parameters"],
            "#/properties/arguments" if single else f"#/anyOf/{index}/properties/arguments",
        )
        for index, name in enumerate(names)
    ]
    schema = calls[0] if single else {"anyOf": calls}
    text = json.dumps(schema, ensure_ascii=False)
    # Line breaks as templates and models write them there.
    grammar = surrounded(
        json_schema(text, "tool_choice"), f"{start}\n", f"\n{end}", repeats=not one_call
    )
    return grammar


def _call_schema(name: str, parameters: dict[str, Any], place: str) -> dict[str, Any]:
    """``place``: where the tool's schema comes to lie, which its own references don't know."""
    arguments = _moved({**parameters, "type": "object"}, place)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    match schema:
        case dict():
            return {
                key: place + value[1:]
                if key == "$ref" and isinstance(value, str) and value.startswith("#")
                else _moved(value, place)
                for key, value in schema.items()
            }
        case list():
            return [_moved(item, place) for item in schema]
    return schema
