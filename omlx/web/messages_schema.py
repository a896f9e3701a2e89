"""What a message request may ask for, in Anthropic's dialect, and the conversation it means."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from omlx.core.chat import ChatMessage, Conversation, GenerationRequest, ToolCall
from omlx.web.body import Count, Loose, parse, unsupported
from omlx.web.cache_hints import breaks_of, is_break
from omlx.web.errors import invalid
from omlx.web.sampling import (
    SamplingFields,
    choices_of,
    effort_options,
    sampling_of,
    stops_of,
    template_options_of,
)
from omlx.web.structured import AnswerFormat, grammar_of
from omlx.web.tools_schema import TOOL_NAME_MAX, Function, ToolUse, spelled_tools, tool_use


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
    budget_tokens: Count | None = Field(None, ge=1)


class ToolIn(Loose):
    """Tools of other types are Anthropic's own, which run on their machines."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=TOOL_NAME_MAX)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @property
    def function(self) -> Function:
        return Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )


class ToolChoice(Loose):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Loose):
    effort: str | None = None
    format: dict[str, Any] | None = None


class Metadata(Loose):
    user_id: str | None = None


class Diagnostics(Loose):
    previous_message_id: str | None = None


class CountRequest(SamplingFields):
    """Of these fields only those that shape the prompt count."""

    messages: list[MessageIn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoice | None = None
    mcp_servers: list[Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def thinking_budget(self) -> int | None:
        return self.thinking.budget_tokens if self.thinking else None

    @property
    def answer_format(self) -> AnswerFormat:
        form = self.output_config.format if self.output_config else None
        return AnswerFormat(form, "output_config.format")


class MessagesRequest(CountRequest):
    max_tokens: Count = Field(ge=0)
    """0: fill the cache, answer nothing."""
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    diagnostics: Diagnostics | None = None
    cache_control: dict[str, Any] | None = None
    """A breakpoint at the end of the prompt, where a state is kept anyway."""

    @property
    def previous_message_id(self) -> str | None:
        return self.diagnostics.previous_message_id if self.diagnostics else None

    @property
    def group(self) -> str:
        user = self.metadata.user_id if self.metadata else None
        return self.prompt_cache_key or user or ""


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
    use_of(request)
    if request.mcp_servers:
        raise unsupported("mcp_servers are", "mcp_servers")
    grammar_of(request)
    conversation_of(request)


def conversation_of(request: CountRequest) -> Conversation:
    messages: list[ChatMessage] = []
    if request.system:
        breaks = _breaks_of(request.system)
        messages.append(ChatMessage("system", _text_of(request.system), breaks=breaks))
    for index, message in enumerate(request.messages):
        messages += _turns_of(message, f"messages[{index}].content")
    options = {**_effort_options(request.output_config), **_thinking_options(request.thinking)}
    template_options = template_options_of(request.chat_template_kwargs, **options)
    after_tools = any(map(is_break, request.tools or ()))
    return Conversation(tuple(messages), _tools_of(request.tools), template_options, after_tools)


def prompt_of(request: CountRequest) -> GenerationRequest:
    """What its prompt is made of."""
    return GenerationRequest(
        prompt=conversation_of(request), field="messages", **asdict(use_of(request))
    )


def use_of(request: CountRequest) -> ToolUse:
    """Raises ApiError for a choice of tools that can't be kept."""
    tools = [tool.function for tool in request.tools or ()]
    choice = request.tool_choice
    if choice is None:
        return tool_use(None, tools)
    kind = {"any": "required", "tool": "named"}.get(choice.type, choice.type)
    one_call = choice.disable_parallel_tool_use is True
    return tool_use(kind, tools, name=choice.name, one_call=one_call)


def generation_of(request: MessagesRequest, vocab_size: int) -> GenerationRequest:
    return replace(
        prompt_of(request),
        sampling=sampling_of(request, vocab_size),
        max_tokens=request.max_tokens,
        stops=stops_of(request.stop_sequences, "stop_sequences"),
        salt=request.cache_salt or "",
        caching=request.caching,
        group=request.group,
        compare_with=request.previous_message_id,
    )


def _thinking_options(thinking: Thinking | None) -> dict[str, Any]:
    """Variables for the template: all that a model can be told about its thoughts.

    Few templates take a budget; ``max_tokens`` holds for thoughts and answer together.
    ``adaptive`` leaves it to the model, and so do we. Raises ApiError.
    """
    match thinking.type if thinking else None:
        case "disabled":
            return {"enable_thinking": False}
        case "enabled":
            budget = thinking.budget_tokens if thinking else None
            if budget is None:
                raise invalid("thinking.budget_tokens is required.", "thinking.budget_tokens")
            return {"enable_thinking": True, "thinking_budget": budget}
        case None | "adaptive":
            return {}
        case kind:
            raise unsupported(f"thinking of type {str(kind)[:60]!r} is", "thinking.type")


def _tools_of(tools: list[ToolIn] | None) -> str | None:
    return spelled_tools([tool.function for tool in tools or ()], "tools[{}].name")


def _effort_options(config: OutputConfig | None) -> dict[str, Any]:
    return effort_options(config.effort if config else None, "output_config.effort")


def _turns_of(message: MessageIn, where: str) -> list[ChatMessage]:
    """One turn, or more: what tools said are turns of their own, in the order of the blocks."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    if message.role == "assistant":
        return [_assistant_turn(message.content, where)]
    turns: list[ChatMessage] = []
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                turns.append(_text_turn(message.role, texts))
                texts = []
            turns.append(_result_turn(block))
    if texts:
        turns.append(_text_turn(message.role, texts))
    return turns


def _text_turn(role: str, texts: list[TextBlock]) -> ChatMessage:
    return ChatMessage(role, _text_of(texts), breaks=breaks_of(texts))


def _result_turn(block: ToolResultBlock) -> ChatMessage:
    content = block.content or ""
    turn = ChatMessage("tool", _text_of(content), tool_call_id=block.tool_use_id)
    last = (len(turn.parts),) if is_break(block) else ()
    return replace(turn, breaks=(*_breaks_of(content), *last))


def _assistant_turn(blocks: list[Block], where: str) -> ChatMessage:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = tuple(
        ToolCall(block.id, block.name, _arguments_of(block, f"{where}[{index}].input"))
        for index, block in enumerate(blocks)
        if isinstance(block, ToolUseBlock)
    )
    reasoning = "".join(thoughts) or None
    after_calls = any(is_break(block) for block in blocks if isinstance(block, ToolUseBlock))
    return ChatMessage(
        "assistant",
        _text_of(texts) or None,
        tool_calls=calls,
        reasoning=reasoning,
        breaks=(*breaks_of(texts), *([len(texts) + 1] if after_calls else [])),
    )


def _arguments_of(block: ToolUseBlock, where: str) -> str:
    try:
        return orjson.dumps(block.input).decode()
    except orjson.JSONEncodeError:
        raise invalid(f"{where} is nested too deeply.", where) from None


def _blocks_of(message: MessageIn) -> list[Block]:
    return [] if isinstance(message.content, str) else message.content


def _breaks_of(content: str | list[TextBlock]) -> tuple[int, ...]:
    return () if isinstance(content, str) else breaks_of(content)


def _text_of(content: str | list[TextBlock]) -> str | tuple[str, ...]:
    return content if isinstance(content, str) else tuple(block.text for block in content)
