"""What a message request may ask for, in Anthropic's dialect, and the conversation it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from omlx.core.chat import ChatMessage, Conversation, GenerationRequest, ToolCall
from omlx.web.body import Count, Loose, parse, unsupported
from omlx.web.errors import invalid
from omlx.web.sampling import (
    SamplingFields,
    choices_of,
    effort_options,
    sampling_of,
    stops_of,
    template_options_of,
)
from omlx.web.unsupported import refuse_format, refuse_tools

# Cache breakpoints (cache_control) may stand in any block. Every prefix is cached, so they say
# nothing that is not done already, and nothing of them reaches the prompt.


class TextBlock(Loose):
    type: Literal["text"]
    text: str


class ToolUseBlock(Loose):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Loose):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None


class ThinkingBlock(Loose):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Loose):
    """Another provider's, encrypted: there is nothing in it that we could read."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]

PLACES = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
"""Whose messages these blocks belong to; text stands anywhere."""


class MessageIn(Loose):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Thinking(Loose):
    type: str


class OutputConfig(Loose):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(SamplingFields):
    """Of these fields only those that shape the prompt count."""

    messages: list[MessageIn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    max_tokens: Count = Field(ge=0)
    """0: fill the cache, answer nothing."""
    stop_sequences: list[str] | None = None


def parse_messages(body: bytes) -> MessagesRequest:
    """Raises ApiError, naming the field."""
    request = parse(MessagesRequest, body)
    check(request)
    stops_of(request.stop_sequences, "stop_sequences")
    choices_of(request, 1)
    if request.messages[-1].role == "assistant":
        raise unsupported("An answer that continues an assistant message is", "messages")
    return request


def parse_count(body: bytes) -> CountRequest:
    """Raises ApiError, naming the field."""
    request = parse(CountRequest, body)
    check(request)
    return request


def check(request: CountRequest) -> None:
    """Raises ApiError for blocks in the wrong place, and for what is not done yet."""
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if message.content == []:
            raise invalid(f"{where} must not be empty.", where)
        for position, block in enumerate(_blocks_of(message)):
            role = PLACES.get(block.type, message.role)
            if role != message.role:
                raise invalid(
                    f"A {block.type} block belongs to the role {role}.",
                    f"{where}[{position}].type",
                )
    refuse_tools(request.tools, request.tool_choice)
    if request.mcp_servers:
        raise unsupported("mcp_servers are", "mcp_servers")
    if request.output_config:
        refuse_format(request.output_config.format, "output_config.format")
    conversation_of(request)


def conversation_of(request: CountRequest) -> Conversation:
    messages: list[ChatMessage] = []
    if request.system:
        messages.append(ChatMessage("system", _text_of(request.system)))
    for index, message in enumerate(request.messages):
        messages += _turns_of(message, f"messages[{index}].content")
    options = {**_effort_options(request.output_config), **_thinking_options(request.thinking)}
    template_options = template_options_of(request.chat_template_kwargs, **options)
    return Conversation(tuple(messages), None, template_options)


def generation_of(request: MessagesRequest, vocab_size: int) -> GenerationRequest:
    return GenerationRequest(
        prompt=conversation_of(request),
        field="messages",
        sampling=sampling_of(request, vocab_size),
        max_tokens=request.max_tokens,
        stops=stops_of(request.stop_sequences, "stop_sequences"),
        salt=request.cache_salt or "",
    )


def _thinking_options(thinking: Thinking | None) -> dict[str, Any]:
    """``adaptive`` leaves it to the model, and so do we. Raises ApiError for a budget."""
    match thinking.type if thinking else None:
        case "disabled":
            return {"enable_thinking": False}
        case None | "adaptive":
            return {}
        case kind:
            raise unsupported(f"thinking of type {str(kind)[:60]!r} is", "thinking.type")


def _effort_options(config: OutputConfig | None) -> dict[str, Any]:
    return effort_options(config.effort if config else None, "output_config.effort")


def _turns_of(message: MessageIn, where: str) -> list[ChatMessage]:
    """One turn, or more: what tools said are turns of their own, in the order of the blocks."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    if message.role == "assistant":
        return [_assistant_turn(message.content, where)]
    turns: list[ChatMessage] = []
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                turns.append(ChatMessage(message.role, tuple(texts)))
                texts = []
            said = _text_of(block.content or "")
            turns.append(ChatMessage("tool", said, tool_call_id=block.tool_use_id))
    if texts:
        turns.append(ChatMessage(message.role, tuple(texts)))
    return turns


def _assistant_turn(blocks: list[Block], where: str) -> ChatMessage:
    texts = tuple(block.text for block in blocks if isinstance(block, TextBlock))
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = tuple(
        ToolCall(block.id, block.name, _arguments_of(block, f"{where}[{index}].input"))
        for index, block in enumerate(blocks)
        if isinstance(block, ToolUseBlock)
    )
    reasoning = "".join(thoughts) or None
    return ChatMessage("assistant", texts or None, tool_calls=calls, reasoning=reasoning)


def _arguments_of(block: ToolUseBlock, where: str) -> str:
    try:
        return orjson.dumps(block.input).decode()
    except orjson.JSONEncodeError:
        raise invalid(f"{where} is nested too deeply.", where) from None


def _blocks_of(message: MessageIn) -> list[Block]:
    return [] if isinstance(message.content, str) else message.content


def _text_of(content: str | list[TextBlock]) -> str | tuple[str, ...]:
    return content if isinstance(content, str) else tuple(block.text for block in content)
