"""The tools that a request offers, and whether they may be called: alike in every dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import Field

from omlx.web.body import Loose, unsupported
from omlx.web.errors import invalid

TOOL_NAME_MAX = 256

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(Loose):
    """What the model is told of a tool."""

    name: str = Field(min_length=1, max_length=TOOL_NAME_MAX)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolIn(Loose):
    """OpenAI's form, in chats."""

    type: Literal["function"]
    function: Function


def spelled_tools(functions: Sequence[Function], name_field: str) -> str | None:
    """JSON of the tools in the form that templates expect, in the client's order.

    The same in every dialect, so that the same tools are the same prompt: what a dialect adds for
    its own use is left out. ``name_field``: where the name of tool {} is, for errors. Raises
    ApiError for two of one name, and for a schema that is nested too deeply.
    """
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            field = name_field.format(index)
            raise invalid(f"{field} {function.name[:60]!r} is the name of another tool.", field)
        seen.add(function.name)
    tools = [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or NO_PARAMETERS,
            },
        }
        for function in functions
    ]
    try:
        return orjson.dumps(tools).decode() if tools else None
    except orjson.JSONEncodeError:
        raise invalid("tools are nested too deeply.", "tools") from None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request lets a model do with its tools, alike in every dialect."""

    may_call: bool
    must_call: tuple[str, ...] = ()
    """By name. None: it may answer instead."""
    one_call: bool = False
    strict: tuple[str, ...] = ()
    """By name: those whose calls keep to their schemas."""


def tool_use(
    kind: str | None, tools: Sequence[Function], *, name: object = None, one_call: bool = False
) -> ToolUse:
    """Raises ApiError for a choice that can't be kept.

    ``kind``: auto, none, required or named, or what a dialect has besides. ``name``: of the tool
    that is to be called.
    """
    offered = tuple(tool.name for tool in tools)
    strict = tuple(tool.name for tool in tools if tool.strict)
    match kind:
        case None | "auto":
            return ToolUse(bool(tools), one_call=one_call, strict=strict)
        case "none":
            return ToolUse(False)
        case "required" if offered:
            return ToolUse(True, offered, one_call, strict)
        case "required":
            raise invalid("tool_choice asks for a call, and there are no tools.", "tool_choice")
        case "named" if name in offered:
            return ToolUse(True, (str(name),), one_call=True, strict=strict)
        case "named":
            raise invalid(
                f"tool_choice names {str(name)[:60]!r}, which is none of the tools.", "tool_choice"
            )
    raise unsupported(f"tool_choice {kind[:60]!r} is", "tool_choice")


def openai_tool_use(
    choice: str | dict[str, Any] | None, tools: Sequence[Function], parallel: bool | None
) -> ToolUse:
    """Of a chat or of a response. Raises ApiError for a choice that can't be kept."""
    kind = str(choice.get("type")) if isinstance(choice, dict) else choice
    name = None
    if isinstance(choice, dict) and kind == "function":
        # In a chat the name lies one deeper.
        function = choice.get("function", choice)
        kind, name = "named", function.get("name") if isinstance(function, dict) else None
    return tool_use(kind, tools, name=name, one_call=parallel is False)
