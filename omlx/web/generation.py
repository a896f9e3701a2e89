"""From a checked request to a running generation, the same way for every dialect."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from omlx.actors.messages import (
    Accepted,
    Cancel,
    GenerationStream,
    Render,
    RequestRejected,
    Submit,
)
from omlx.actors.scheduler import TooManyRequests
from omlx.core.chat import ChatMessage, Conversation, ToolCall
from omlx.core.plan import Sampling
from omlx.core.sequence import Request
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import MailboxFull
from omlx.kernel.stream import Stream
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import ApiError, loading, shutting_down
from omlx.web.schema import (
    ChatRequest,
    choices_of,
    logit_bias_of,
    stops_of,
    template_options_of,
    text_of,
)

STREAM_SLACK = 4
"""Items of a choice beyond one for each token: the end, and what was held back."""

CLIENT_NAME_MAX = 120


@dataclass(frozen=True, slots=True)
class Actors:
    """The addresses a handler talks to, once the model is loaded."""

    tokenizer: Ref[Any]
    scheduler: Ref[Any]


def actors_of(edge: Edge) -> Actors:
    """Raises ApiError, and counts a refusal, when ``check_ready`` does."""
    try:
        check_ready(edge)
    except ApiError:
        edge.stats.offer(RequestRejected())
        raise
    assert edge.tokenizer is not None, "a ready server has its actors"
    assert edge.scheduler is not None, "a ready server has its actors"
    return Actors(edge.tokenizer, edge.scheduler)


def check_ready(edge: Edge) -> None:
    """Raises ApiError while the model is loading and once the server is stopping."""
    if edge.state == "stopping":
        raise shutting_down()
    if not edge.ready:
        raise loading()


def aliases_of(edge: Edge) -> list[str]:
    """Other names of the model that is served."""
    aliases = edge.loaded.settings.model_aliases
    return [alias for alias, name in aliases.items() if name == edge.model.id]


def served_model(edge: Edge, asked: str | None) -> str:
    """The id to answer with. Raises ApiError for a name that is not served."""
    if asked is None or asked == edge.model.id or asked in aliases_of(edge):
        return edge.model.id
    raise ApiError(
        404,
        f"The model {asked[:80]!r} is not served here; {edge.model.id!r} is.",
        param="model",
        code="model_not_found",
    )


def conversation_of(request: ChatRequest) -> Conversation:
    messages = tuple(
        ChatMessage(
            role=message.role,
            content=text_of(message.content),
            name=message.name,
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls or ()
            ),
            tool_call_id=message.tool_call_id,
            reasoning=message.reasoning_content,
        )
        for message in request.messages
    )
    return Conversation(messages, None, template_options_of(request))


def sampling_of(request: ChatRequest, vocab_size: int) -> Sampling:
    """Absent fields have OpenAI's defaults."""

    def either(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    return Sampling(
        temperature=either(request.temperature, 1.0),
        top_p=either(request.top_p, 1.0),
        top_k=min(request.top_k or 0, vocab_size - 1),
        min_p=either(request.min_p, 0.0),
        repetition_penalty=either(request.repetition_penalty, 1.0),
        presence_penalty=either(request.presence_penalty, 0.0),
        frequency_penalty=either(request.frequency_penalty, 0.0),
        logit_bias=logit_bias_of(request, vocab_size),
        seed=request.seed,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


async def prepare(request: web.Request, chat: ChatRequest, actors: Actors) -> Request:
    """Render the prompt and settle every number. Raises ApiError, before anything is queued."""
    edge = request.app[EDGE]
    settings = edge.loaded.settings
    sampling = sampling_of(chat, edge.vocab_size)
    choices = choices_of(chat, settings.max_concurrent_requests)
    rendered = await actors.tokenizer.ask(Render(conversation_of(chat)))
    if not rendered.tokens:
        raise ApiError(400, "The messages render to an empty prompt.", param="messages")
    context = edge.max_context
    if len(rendered.tokens) >= context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, your messages "
            f"take {len(rendered.tokens)} tokens, which leaves no room for an answer.",
            param="messages",
            code="context_length_exceeded",
        )
    asked = chat.tokens_asked
    wanted = settings.default_max_tokens if asked is None else max(1, asked)
    return Request(
        request_id=f"chatcmpl-{secrets.token_hex(12)}",
        prompt=rendered.tokens,
        max_tokens=min(wanted, context - len(rendered.tokens)),
        sampling=sampling,
        stops=stops_of(chat),
        salt=chat.cache_salt or "",
        num_system=rendered.num_system,
        n=choices,
        model=edge.model.id,
        client=request.headers.get("User-Agent", "")[:CLIENT_NAME_MAX],
        route=request.path,
    )


@asynccontextmanager
async def running(edge: Edge, actors: Actors, request: Request) -> AsyncIterator[GenerationStream]:
    """Submit a request; leaving the block, for whatever reason, ends its generation."""
    stream: GenerationStream = Stream(request.n * (request.max_tokens + STREAM_SLACK))
    accepted: Accepted | None = None
    try:
        # Left before the answer, as when the client goes, the stream says so to the scheduler.
        async with stream:
            accepted = await actors.scheduler.ask(Submit(request, stream))
            yield stream
    except (TooManyRequests, MailboxFull):
        edge.stats.offer(RequestRejected())
        raise
    finally:
        if stream.cancelled and accepted is not None:
            actors.scheduler.offer(Cancel(accepted.uid))
