"""From the text of a call to calls: a parser of mlx-lm's reads it, the tool's schema types it.

A model may write anything between the markers of a call, and parsers raise whatever they raise on
it. What can't be read as calls is no call: its text, without the markers, is what the model said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from omlx.core.json_schema import fits
from omlx.core.pieces import ToolCall

Parser = Callable[[str, Any], Any]
"""mlx-lm's: text and tools, in the form that templates take them, to one call or several."""

UNREADABLE = "unknown"
"""The name that mlx-lm's parser for GLM gives to what it can't read."""

_HALVES = re.compile("[\ud800-\udfff]")
"""Of characters, which JSON can escape and no text can hold."""

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def read_calls(
    parser: Parser, text: str, tools: str | None, strict: Collection[str] = ()
) -> tuple[ToolCall, ...]:
    """The calls in the text between two markers, in order; none when any can't be read.

    ``tools``: JSON list of those offered. ``strict``: names of those whose calls are none unless
    they keep to the schema. The id of a call is empty unless the model gave one.
    """
    offered = tools_by_name(tools)
    try:
        found = parser(text, list(offered.values()))
        calls = found if isinstance(found, list) else [found]
        return tuple(_call(call, offered, strict) for call in calls)
    except Exception:  # parsers take any text to be well formed
        return ()


def tools_by_name(tools: str | None) -> dict[str, Any]:
    """The tools as parsers expect them: each has parameters, and each of those is an object."""
    offered: dict[str, Any] = {}
    for tool in json.loads(tools) if tools else []:
        function = tool["function"]
        given = function.get("parameters") or {}
        properties = given.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        known = {k: v for k, v in properties.items() if isinstance(v, dict)}
        parameters = {**given, "properties": known}
        offered[function["name"]] = {
            "type": "function",
            "function": {**function, "parameters": parameters},
        }
    return offered


def _call(call: Any, offered: Mapping[str, Any], strict: Collection[str]) -> ToolCall:
    """Raises whatever it meets in what is no call."""
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str) or not name or (name == UNREADABLE and name not in offered):
        raise ValueError("a call without a name")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    tool = offered.get(name)
    if tool is not None:
        properties = tool["function"]["parameters"]["properties"]
        arguments = {key: _typed(value, properties.get(key)) for key, value in arguments.items()}
        if name in strict and not fits(arguments, tool["function"]["parameters"]):
            raise ValueError("arguments that the schema does not allow")
    given = call.get("id")
    return ToolCall(given if isinstance(given, str) else "", name, _spelled(arguments))


def _typed(value: Any, schema: Any) -> Any:
    """The value as the type that the schema asks for, where it is only spelled otherwise.

    Some formats don't tell a number from its digits.
    """
    wanted = schema.get("type") if isinstance(schema, dict) else None
    if wanted == "string":
        return value if isinstance(value, str) or value is None else _spelled(value)
    if not isinstance(value, str) or not isinstance(wanted, str) or wanted not in _TYPES:
        return value
    try:
        meant = json.loads(value)
    except ValueError:
        return value
    if isinstance(meant, bool) and wanted != "boolean":
        return value
    return meant if isinstance(meant, _TYPES[wanted]) else value


def _spelled(value: Any) -> str:
    """JSON as templates spell it, so that the call is the same text when it comes back.

    Raises ValueError or TypeError for what JSON can't hold.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _HALVES.sub("\ufffd", text)
