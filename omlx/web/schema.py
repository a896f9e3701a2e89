"""What a chat request may hold, checked before anything is queued.

null means absent. Unknown fields are ignored. A field that asks for something is done, or refused
by its name; it is never accepted and ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from omlx.web.errors import ApiError, invalid

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_SEED = 1 << 63
MAX_TOKEN_DIGITS = 10

RENDERING = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)
"""Not the template's variables but our way to call it: a client may set none of them, least of all
the template itself."""


def _whole(value: object) -> object:
    """Some clients write whole numbers as 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(_whole)]


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


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


class StreamOptions(Loose):
    include_usage: bool | None = None


class ChatRequest(Loose):
    model: str | None = None
    messages: list[MessageIn] = Field(min_length=1)
    max_tokens: Count | None = Field(None, ge=0)
    max_completion_tokens: Count | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Count | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, float] | None = None
    seed: Count | None = Field(None, ge=-MAX_SEED, lt=MAX_SEED)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: Count | None = Field(None, ge=1, le=MAX_CHOICES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    @property
    def tokens_asked(self) -> int | None:
        """The newer name wins. 0: fill the cache, answer nothing."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError, naming the field."""
    try:
        request = _validated(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        lenient = _lenient(body)
        if lenient is not None:
            _validated(lenient)  # a number that is not finite has a field to be named
        raise invalid(f"The body is not valid JSON: {error}.", None, "invalid_json") from None
    _check_features(request)
    return request


def _lenient(body: bytes) -> object:
    """The body with NaN and infinities let through; None when it is no JSON even then."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _validated(value: object) -> ChatRequest:
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", None, "invalid_json")
    if "messages" not in value or value["messages"] is None:
        raise invalid("messages is required.", "messages", "missing_field")
    try:
        return ChatRequest.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from None


def _check_features(request: ChatRequest) -> None:
    for index, message in enumerate(request.messages):
        empty = message.content is None or message.content == []
        if empty and not (message.role == "assistant" and message.tool_calls):
            raise invalid(
                f"messages[{index}].content is required for role {message.role}.",
                f"messages[{index}].content",
            )
    if request.tools and request.tool_choice != "none":
        raise invalid("tools are not supported.", "tools", "unsupported_value")
    if request.functions:
        raise invalid("functions are not supported.", "functions", "unsupported_value")
    if request.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice needs tools.", "tool_choice", "unsupported_value")
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        raise invalid(
            f"response_format {kind!r} is not supported.", "response_format", "unsupported_value"
        )
    for index, stop in enumerate(stops_of(request)):
        if not stop:
            raise invalid("An empty stop string is not valid.", f"stop[{index}]")
    if len(stops_of(request)) > MAX_STOPS:
        raise invalid(f"At most {MAX_STOPS} stop strings are supported.", "stop")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    template_options_of(request)


def choices_of(request: ChatRequest, most: int) -> int:
    """Raises ApiError for more choices than can run at once."""
    choices = request.n or 1
    if choices > most:
        raise invalid(
            f"n is {choices}; this server runs at most {most} choices at once.",
            "n",
            "unsupported_value",
        )
    return choices


def template_options_of(request: ChatRequest) -> str | None:
    """JSON of the extra variables for the template. Raises ApiError for what is none."""
    options = request.chat_template_kwargs
    if not options:
        return None
    reserved = sorted(RENDERING & options.keys())
    if reserved:
        name = f"chat_template_kwargs.{reserved[0]}"
        raise invalid(f"{name} is not the client's to choose.", name, "unsupported_value")
    try:
        return orjson.dumps(options).decode()
    except orjson.JSONEncodeError:
        raise invalid(
            "chat_template_kwargs is nested too deeply.", "chat_template_kwargs"
        ) from None


def stops_of(request: ChatRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def logit_bias_of(request: ChatRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Raises ApiError for a key that is no token id. Zeros are dropped unseen."""
    pairs: list[tuple[int, float]] = []
    for key, bias in (request.logit_bias or {}).items():
        if bias == 0:
            continue
        digits = key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS
        if not digits or int(key) >= vocab_size:
            raise invalid(f"logit_bias has {key[:20]!r}, which is no token id.", "logit_bias")
        if not -100 <= bias <= 100:
            raise invalid("A logit_bias must be between -100 and 100.", "logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)


def text_of(content: str | list[TextPart] | None) -> str | None:
    """The array form renders as the string form: all text parts, in order."""
    if content is None or isinstance(content, str):
        return content
    return "".join(part.text for part in content)


def path_of(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` -> ``messages[0].content``, as clients write it."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = part
        elif part.isidentifier() and part not in ("str",):
            path += f".{part}"
    return path


def _refusal(errors: list[ErrorDetails]) -> ApiError:
    for known in errors:
        # Of a union's branches the one about a part's type says most.
        if known["loc"][-1] == "type" and "TextPart" in str(known["loc"]):
            kind = known.get("input")
            return invalid(
                f"Content parts of type {kind!r} are not supported.",
                path_of(tuple(p for p in known["loc"] if not str(p).startswith("list["))),
                "unsupported_value",
            )
    # Of a union's branches the one that got furthest is the one that was meant.
    error = max(errors, key=lambda one: len(one["loc"]))
    path = path_of(tuple(p for p in error["loc"] if not str(p).startswith("list[")))
    return invalid(f"{path or 'The body'}: {error['msg']}.", path or None)
