"""A conversation as the template sees it, whatever dialect it came in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, as the client sent it."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """``content`` None: an assistant turn that only calls tools."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[ChatMessage, ...]
    tools: str | None = None
    """JSON list of tools, in the client's order."""
    template_options: str | None = None
    """JSON object of extra variables for the template."""


class TemplateRefused(Exception):
    """The model's template does not take this conversation; the text says why."""


def template_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The dicts that chat templates expect.

    ``developer`` is ``system`` by its newer name. Templates want the system text first and once,
    so later system messages join the first one, in order.
    """
    system: list[str] = []
    rest: list[dict[str, Any]] = []
    for message in conversation.messages:
        if message.role in ("system", "developer"):
            system.append(message.content or "")
            continue
        entry: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.name:
            entry["name"] = message.name
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parsed(call.arguments)},
                }
                for call in message.tool_calls
            ]
        rest.append(entry)
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return [*head, *rest]


def _parsed(arguments: str) -> Any:
    """Templates iterate over the arguments; what is no JSON object is rendered as its text."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
