"""What a chat completion may ask for, in OpenAI's dialect."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field

from omlx.core.chat import ChatMessage, Conversation, GenerationRequest, ToolCall
from omlx.web.body import Count, Loose, parse, unsupported
from omlx.web.cache_hints import breaks_of, is_break
from omlx.web.errors import invalid
from omlx.web.sampling import (
    MAX_TOP_LOGPROBS,
    SamplingFields,
    StreamOptions,
    effort_options,
    sampling_of,
    stops_of,
    template_options_of,
)
from omlx.web.structured import AnswerFormat, grammar_of
from omlx.web.tools_schema import ToolIn, ToolUse, openai_tool_use, spelled_tools


class TextPart(Loose):
    type: Literal["text"]
    text: str


class FunctionCall(Loose):
    name: str
    arguments: str = ""


class ToolCallIn(Loose):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageIn(Loose):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The other name of it."""


class ChatRequest(SamplingFields):
    messages: list[MessageIn] = Field(min_length=1)
    max_tokens: Count | None = Field(None, ge=0)
    max_completion_tokens: Count | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[ToolIn] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def answer_format(self) -> AnswerFormat:
        return AnswerFormat(self.response_format, "response_format", nested=True)

    @property
    def tokens_asked(self) -> int | None:
        """The newer name wins. 0: fill the cache, answer nothing."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError, naming the field."""
    request = parse(ChatRequest, body)
    check_contents(request.messages)
    use_of(request)
    if request.functions and request.function_call != "none":
        raise unsupported("functions are", "functions")
    grammar_of(request)
    if set(request.modalities or ()) - {"text"}:
        raise unsupported("modalities other than text are", "modalities")
    stops_of(request.stop)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    conversation_of(request)
    return request


def check_contents(messages: list[MessageIn]) -> None:
    """Raises ApiError for a message without content, but for one that calls tools instead."""
    for index, message in enumerate(messages):
        empty = message.content is None or message.content == []
        if empty and not (message.role == "assistant" and message.tool_calls):
            raise invalid(
                f"messages[{index}].content is required for role {message.role}.",
                f"messages[{index}].content",
            )


def messages_of(messages: list[MessageIn]) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(
            role=message.role,
            content=content_of(message.content),
            name=message.name,
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls or ()
            ),
            tool_call_id=message.tool_call_id,
            reasoning=message.reasoning_content or message.reasoning,
            breaks=breaks_of(message.content) if isinstance(message.content, list) else (),
        )
        for message in messages
    )


def content_of(content: str | list[TextPart] | None) -> str | tuple[str, ...] | None:
    if content is None or isinstance(content, str):
        return content
    return tuple(part.text for part in content)


def conversation_of(request: ChatRequest) -> Conversation:
    effort = effort_options(request.reasoning_effort, "reasoning_effort")
    options = template_options_of(request.chat_template_kwargs, **effort)
    after_tools = any(map(is_break, request.tools or ()))
    return Conversation(
        messages_of(request.messages), tools_of(request.tools), options, after_tools
    )


def tools_of(tools: list[ToolIn] | None) -> str | None:
    return spelled_tools([tool.function for tool in tools or ()], "tools[{}].function.name")


def use_of(request: ChatRequest) -> ToolUse:
    """Raises ApiError for a choice of tools that can't be kept."""
    tools = [tool.function for tool in request.tools or ()]
    return openai_tool_use(request.tool_choice, tools, request.parallel_tool_calls)


def generation_of(request: ChatRequest, vocab_size: int, choices: int = 1) -> GenerationRequest:
    return GenerationRequest(
        prompt=conversation_of(request),
        field="messages",
        sampling=sampling_of(
            request, vocab_size, (request.top_logprobs or 0) if request.logprobs else None
        ),
        max_tokens=request.tokens_asked,
        stops=stops_of(request.stop),
        n=choices,
        salt=request.cache_salt or "",
        caching=request.caching,
        group=request.prompt_cache_key or "",
        **asdict(use_of(request)),
    )
