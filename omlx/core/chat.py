"""What a client asks for, whatever dialect it came in, and the conversation as templates see it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from omlx.core.pieces import ToolCall
from omlx.core.plan import GREEDY, Sampling

SYSTEM_ROLES = ("system", "developer")
"""``developer`` is ``system`` by its newer name."""

ATTRIBUTION = "x-anthropic-billing-header:"
"""A coding agent begins its system text with it, and with a number that is new each time."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """``content`` None: an assistant turn that only calls tools. A tuple: parts of one text."""

    role: str
    content: str | tuple[str, ...] | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    breaks: tuple[int, ...] = ()
    """After how many of its parts a client put a cache breakpoint. One more than there are: behind
    its calls. They say nothing to the model."""

    @property
    def parts(self) -> tuple[str, ...]:
        if self.content is None:
            return ()
        return (self.content,) if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        """Its parts in order, with nothing between them: both forms are the same prompt."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[ChatMessage, ...]
    tools: str | None = None
    """JSON list of tools in the form that templates take, in the client's order."""
    template_options: str | None = None
    """JSON object of extra variables for the template."""
    break_after_tools: bool = False
    """A cache breakpoint."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asks for: checked, and not rendered yet."""

    prompt: Conversation | str | tuple[int, ...]
    """str: raw text, encoded as it stands; a tuple: token ids."""
    field: str
    """The name of the field that the prompt came in, for errors."""
    sampling: Sampling = GREEDY
    max_tokens: int | None = None
    """None: the server's default. 0: fill the cache, answer nothing."""
    stops: tuple[str, ...] = ()
    n: int = 1
    salt: str = ""
    may_call: bool = False
    """Whether the model may call the tools of the conversation."""
    must_call: tuple[str, ...] = ()
    """The tools of which the model has to call one or more, by name; none: it may answer."""
    one_call: bool = False
    """Whether the answer ends with its first call."""
    strict: tuple[str, ...] = ()
    """The tools whose calls keep to their schemas, by name."""
    caching: bool = True
    """False: nothing of it is looked up or stored."""
    group: str = ""
    """What the client calls the conversation. It never says what may be reused."""
    compare_with: str | None = None
    """The id of an earlier answer, to say what differs from its prompt."""

    @property
    def tools(self) -> str | None:
        return self.prompt.tools if isinstance(self.prompt, Conversation) else None

    @property
    def tools_to_call(self) -> str | None:
        return self.tools if self.may_call else None


class TemplateRefused(Exception):
    """The model's template does not take this conversation; the text says why."""


def template_messages(
    conversation: Conversation, *, calls_as_text: bool = False, unreadable_as_text: bool = False
) -> list[dict[str, Any]]:
    """The dicts that chat templates expect.

    ``calls_as_text``: for templates that know no tool calls, and would leave them out.
    ``unreadable_as_text``: for templates that fail on calls whose arguments are no JSON object,
    such as calls that were cut.

    Templates want the system text first and once, so later system messages join the first one,
    in order.
    """
    system: list[str] = []
    rest: list[dict[str, Any]] = []
    for message in conversation.messages:
        if message.role in SYSTEM_ROLES:
            system.append(message.text)
            continue
        entry: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.name:
            entry["name"] = message.name
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        spell = calls_as_text or (unreadable_as_text and has_unreadable_calls(message))
        if message.tool_calls and spell:
            calls = (_spelled(call) for call in message.tool_calls)
            entry["content"] = "\n".join(filter(None, (message.text, *calls)))
        elif message.tool_calls:
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


def has_unreadable_calls(message: ChatMessage) -> bool:
    return any(isinstance(_parsed(call.arguments), str) for call in message.tool_calls)


def without_attribution(conversation: Conversation) -> Conversation:
    """The conversation without the attribution that leads its system text.

    That is a first part, or a first line of it, of ``ATTRIBUTION`` and values alone. The same
    object when there is none.
    """
    messages = conversation.messages
    index = next((i for i, m in enumerate(messages) if m.role in SYSTEM_ROLES and m.parts), None)
    if index is None:
        return conversation
    first, *others = messages[index].parts
    line, _, rest = first.partition("\n")
    if not _is_attribution(line):
        return conversation
    parts = (rest, *others) if rest else tuple(others)
    dropped = 0 if rest else 1
    breaks = tuple(count - dropped for count in messages[index].breaks if count > dropped)
    kept = (replace(messages[index], content=parts, breaks=breaks),) if parts else ()
    return replace(conversation, messages=(*messages[:index], *kept, *messages[index + 1 :]))


def _is_attribution(line: str) -> bool:
    """Whether it holds nothing else: words between semicolons are values, a sentence is not."""
    if not line.startswith(ATTRIBUTION):
        return False
    values = line.removeprefix(ATTRIBUTION).split(";")
    return all(len(value.split()) <= 1 for value in values)


def _spelled(call: ToolCall) -> str:
    value = {"name": call.name, "arguments": _parsed(call.arguments)}
    return json.dumps(value, ensure_ascii=False)


def _parsed(arguments: str) -> Any:
    """Templates iterate over the arguments; what is no JSON object is rendered as its text."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False).encode()  # half a character is no text
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
