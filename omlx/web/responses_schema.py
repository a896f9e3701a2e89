"""What OpenAI's responses may ask for, and the conversation it means. Nothing is kept of one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from omlx.core.chat import ChatMessage, Conversation, GenerationRequest, ToolCall
from omlx.web.body import Count, Loose, parse, unsupported
from omlx.web.cache_hints import breaks_of, is_break
from omlx.web.errors import invalid
from omlx.web.sampling import (
    MAX_TOP_LOGPROBS,
    SamplingFields,
    choices_of,
    effort_options,
    sampling_of,
    template_options_of,
)
from omlx.web.structured import AnswerFormat, grammar_of
from omlx.web.tools_schema import Function, ToolUse, openai_tool_use, spelled_tools

LOGPROBS = "message.output_text.logprobs"
"""Of ``include``, what adds something to an answer of ours."""


class TextPart(Loose):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Loose):
    """What another model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class MessageItem(Loose):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class CallItem(Loose):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Loose):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class ReasoningText(Loose):
    text: str


class ReasoningItem(Loose):
    """Its summary is none of the model's words, and what is encrypted nobody here can read."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


def _kind(item: object) -> str | None:
    """Messages may come without their type."""
    return item.get("type", "message") if isinstance(item, dict) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ToolIn(Function):
    """Tools of other types run on OpenAI's machines, or have no arguments that are JSON."""

    type: Literal["function"]


class Reasoning(Loose):
    effort: str | None = None
    summary: str | None = None


class TextOptions(Loose):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(SamplingFields):
    input: str | list[Item] | None = None
    """Absent: an empty text. Instructions alone are enough to be computed ahead of time."""
    instructions: str | None = None
    max_output_tokens: Count | None = Field(None, ge=0)
    top_logprobs: Count | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: list[ToolIn] | None = None
    tool_choice: str | dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Said back in the answer, as clients expect it, and nothing else.
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def answer_format(self) -> AnswerFormat:
        return AnswerFormat(self.text.format if self.text else None, "text.format")

    @property
    def prewarm(self) -> bool:
        """Fill the cache, answer nothing."""
        return bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)

    @property
    def comparison_response_id(self) -> str | None:
        options = self.prompt_cache_options
        return options.comparison_response_id if options else None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def parse_responses(body: bytes) -> ResponsesRequest:
    """Raises ApiError, naming the field."""
    request = parse(ResponsesRequest, body)
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise invalid(
                f"{name} is not supported: no response is kept here. Send the whole conversation "
                "in input; what of it was computed before is not computed again.",
                name,
                "unsupported_value",
            )
    if request.prompt is not None:
        raise unsupported("prompt templates are", "prompt")
    if request.background:
        raise unsupported("background is", "background")
    use_of(request)
    grammar_of(request)
    choices_of(request, 1)
    if request.input == []:
        raise invalid("input must not be empty.", "input")
    conversation_of(request)
    return request


def conversation_of(request: ResponsesRequest) -> Conversation:
    turns = _Turns()
    if request.instructions:
        turns.add(ChatMessage("system", request.instructions))
    if request.input is None or isinstance(request.input, str):
        turns.add(ChatMessage("user", request.input or ""))
    else:
        for item in request.input:
            turns.add_item(item)
    turns.close()
    effort = request.reasoning.effort if request.reasoning else None
    options = effort_options(effort, "reasoning.effort")
    template_options = template_options_of(request.chat_template_kwargs, **options)
    tools = spelled_tools(request.tools or (), "tools[{}].name")
    after_tools = any(map(is_break, request.tools or ()))
    return Conversation(tuple(turns.closed), tools, template_options, after_tools)


def use_of(request: ResponsesRequest) -> ToolUse:
    """Raises ApiError for a choice of tools that can't be kept."""
    return openai_tool_use(request.tool_choice, request.tools or (), request.parallel_tool_calls)


def generation_of(request: ResponsesRequest, vocab_size: int) -> GenerationRequest:
    top_logprobs = (request.top_logprobs or 0) if request.wants_logprobs else None
    return GenerationRequest(
        prompt=conversation_of(request),
        field="input",
        sampling=sampling_of(request, vocab_size, top_logprobs),
        max_tokens=0 if request.prewarm else request.max_output_tokens,
        salt=request.cache_salt or "",
        caching=request.caching,
        group=request.prompt_cache_key or "",
        compare_with=request.comparison_response_id,
        **asdict(use_of(request)),
    )


@dataclass
class _Turns:
    """Items put together to turns: what an assistant thought, said and called is one turn."""

    closed: list[ChatMessage] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    texts: tuple[str, ...] | None = None
    breaks: tuple[int, ...] = ()
    calls: list[ToolCall] = field(default_factory=list)

    def add_item(self, item: Item) -> None:
        match item:
            case MessageItem(role="assistant"):
                if self.texts is not None or self.calls:
                    self.close()
                self.texts, self.breaks = _texts_of(item.content), _breaks_of(item.content)
            case MessageItem():
                breaks = _breaks_of(item.content)
                self.add(ChatMessage(item.role, _texts_of(item.content), breaks=breaks))
            case CallItem():
                self.calls.append(ToolCall(item.call_id, item.name, item.arguments))
            case CallOutputItem():
                said = _texts_of(item.output)
                self.add(ChatMessage("tool", said, tool_call_id=item.call_id))
            case ReasoningItem():
                if self.texts is not None or self.calls:
                    self.close()
                self.thoughts += [part.text for part in item.content or ()]

    def add(self, message: ChatMessage) -> None:
        self.close()
        self.closed.append(message)

    def close(self) -> None:
        """The assistant's turn is over; harmless when it is not its turn."""
        if self.texts is not None or self.calls or self.thoughts:
            reasoning = "".join(self.thoughts) or None
            turn = ChatMessage(
                "assistant",
                self.texts,
                tool_calls=tuple(self.calls),
                reasoning=reasoning,
                breaks=self.breaks,
            )
            self.closed.append(turn)
        self.thoughts, self.texts, self.breaks, self.calls = [], None, (), []


def _breaks_of(content: str | list[Part]) -> tuple[int, ...]:
    return () if isinstance(content, str) else breaks_of(content)


def _texts_of(content: str | list[Part]) -> tuple[str, ...]:
    return (content,) if isinstance(content, str) else tuple(part.text for part in content)
