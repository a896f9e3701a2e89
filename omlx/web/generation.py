"""From a checked request to a running generation, the same way for every dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from aiohttp import web

from omlx.actors.messages import (
    Accepted,
    Cancel,
    ChoiceEnded,
    Ended,
    GenerationStream,
    Remember,
    Render,
    Rendered,
    Submit,
    TextDelta,
    Tokenize,
)
from omlx.actors.scheduler import TooManyRequests
from omlx.actors.stats_messages import RequestRejected
from omlx.actors.tokenizer import PromptRejected
from omlx.core.chat import Conversation, GenerationRequest, without_attribution
from omlx.core.diagnosis import Comparison, Fingerprint, Occasion
from omlx.core.pieces import Text as Said
from omlx.core.pieces import ToolCall
from omlx.core.sequence import Request
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import MailboxFull
from omlx.kernel.stream import Stream
from omlx.web.body import ignored_fields
from omlx.web.captures import Text
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import ApiError, ContextTooLong, invalid, loading, shutting_down
from omlx.web.sampling import SamplingFields
from omlx.web.structured import constrained
from omlx.web.tool_calls import Item, check_tools, forced, markup_for, with_calls

STREAM_SLACK = 4
"""Items of a choice beyond one for each token: the end, and what was held back."""

CLIENT_NAME_MAX = 120
GROUP_NAME_MAX = 120


@dataclass(frozen=True, slots=True)
class Actors:
    """The addresses a handler talks to, once the model is loaded."""

    tokenizer: Ref[Any]
    scheduler: Ref[Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be submitted."""

    request: Request
    text: Text | None = None
    """Where its answer is kept for a person to look at; None, as nearly always: nowhere."""
    raw: bool = False
    """Its prompt is no conversation: the text goes on where the prompt ends."""
    capped: bool = False
    """The context leaves less room than was asked."""
    tools: str | None = None
    """JSON list of those the model may call."""
    strict: tuple[str, ...] = ()
    """Of these, the names of those whose calls keep to their schemas."""
    fingerprint: Fingerprint | None = None
    """Of its prompt, for later ones to be compared with."""
    comparison: Comparison | None = None
    """With an earlier prompt, if one is known."""


def actors_of(edge: Edge) -> Actors:
    """Raises ApiError, and counts a refusal, when ``check_ready`` does."""
    try:
        check_ready(edge)
    except ApiError:
        edge.stats.offer(RequestRejected())
        raise
    return helpers_of(edge)


def helpers_of(edge: Edge) -> Actors:
    """For routes that generate nothing, so that a refusal of theirs counts nowhere."""
    check_ready(edge)
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


def check_served(edge: Edge, model: str | None) -> None:
    """Raises ApiError while nothing is served, and counts that; and for a model that is not."""
    actors_of(edge)
    served_model(edge, model)


def ignored_of(edge: Edge, request: SamplingFields, *others: str) -> str:
    """Fields of a request that mean nothing here, as a header's value.

    ``others``: more of them. Raises ApiError if there are any and settings want to know.
    """
    strict = edge.loaded.settings.strict_requests
    return ignored_fields(request, *others, *request.lifetimes, strict=strict)


def shown_conversation(edge: Edge, conversation: Conversation) -> Conversation:
    """What of a conversation reaches the prompt."""
    if edge.loaded.settings.strip_attribution:
        return without_attribution(conversation)
    return conversation


async def render(
    edge: Edge, actors: Actors, asked: GenerationRequest, occasion: Occasion | None = None
) -> tuple[Rendered, bool]:
    """The prompt's tokens, and whether an attribution was left out. Raises ApiError.

    ``occasion``: what to compare it with; None: nothing.
    """
    match asked.prompt:
        case str():
            tokens = await actors.tokenizer.ask(
                Tokenize(asked.prompt, add_special=True, parse_special=True)
            )
            return Rendered(asked.prompt, tokens), False
        case tuple():
            return Rendered("", asked.prompt), False
    check_tools(edge, asked)
    conversation = shown_conversation(edge, asked.prompt)
    try:
        rendered = await actors.tokenizer.ask(Render(conversation, occasion))
    except PromptRejected as refused:
        _not_rendered(refused, asked.field)
    return rendered, conversation is not asked.prompt


def _not_rendered(refused: PromptRejected, field: str) -> NoReturn:
    raise invalid(f"The {field} can't be rendered: {refused}.", field) from None


async def prepare(request: web.Request, asked: GenerationRequest, name: str) -> Prepared:
    """Render the prompt and settle every number. Raises ApiError, before anything is queued.

    ``name``: the request's id.
    """
    edge = request.app[EDGE]
    caching = asked.caching and edge.loaded.settings.cache_enabled
    occasion = Occasion(asked.salt, asked.group, asked.compare_with) if caching else None
    rendered, stripped = await render(edge, actors_of(edge), asked, occasion)
    if not rendered.tokens:
        raise invalid(f"The {asked.field} gives an empty prompt.", asked.field)
    context = edge.max_context
    room = context - len(rendered.tokens)
    if room <= 0:
        raise ContextTooLong(len(rendered.tokens), context, asked.field)
    wanted = asked.max_tokens
    if wanted is None:
        wanted = edge.loaded.settings.default_max_tokens
    return Prepared(
        Request(
            request_id=name,
            prompt=rendered.tokens,
            max_tokens=min(max(1, wanted), room),
            sampling=await constrained(edge, forced(edge, asked), rendered.prompt),
            stops=asked.stops,
            salt=asked.salt,
            num_system=rendered.num_system,
            n=asked.n,
            model=edge.model.id,
            client=request.headers.get("User-Agent", "")[:CLIENT_NAME_MAX],
            route=request.path,
            attribution_stripped=stripped,
            only_fills=asked.max_tokens == 0,
            markup=markup_for(edge, asked, rendered.prompt),
            hints=rendered.hints,
            caching=asked.caching,
            conversation=asked.group[:GROUP_NAME_MAX],
            change=rendered.comparison.change if rendered.comparison else None,
        ),
        fingerprint=rendered.fingerprint,
        comparison=rendered.comparison,
        tools=asked.tools_to_call,
        strict=asked.strict,
        text=edge.captures.begin(name, rendered.prompt),
        raw=not isinstance(asked.prompt, Conversation),
        capped=wanted > room,
    )


@asynccontextmanager
async def running(
    edge: Edge, actors: Actors, prepared: Prepared
) -> AsyncIterator[AsyncIterator[Item]]:
    """Submit a request; leaving the block, for whatever reason, ends its generation."""
    request = prepared.request
    stream: GenerationStream = Stream(request.n * (request.max_tokens + STREAM_SLACK))
    accepted: Accepted | None = None
    try:
        # Left before the answer, as when the client goes, the stream says so to the scheduler.
        async with stream:
            accepted = await actors.scheduler.ask(Submit(request, stream))
            if prepared.fingerprint is not None:
                actors.tokenizer.offer(Remember(request.request_id, prepared.fingerprint))
            items: AsyncIterator[Item] = stream
            if request.only_fills:
                items = _ends_of(stream)
            elif prepared.raw:
                items = _with_first_space(stream, edge.decode_token)
            else:
                items = with_calls(stream, edge, request, prepared.tools, prepared.strict)
            yield items if prepared.text is None else _kept(items, prepared.text)
    except (TooManyRequests, MailboxFull):
        edge.stats.offer(RequestRejected())
        raise
    finally:
        if stream.cancelled and accepted is not None:
            actors.scheduler.offer(Cancel(accepted.uid))


async def _kept(items: AsyncIterator[Item], text: Text) -> AsyncIterator[Item]:
    async for item in items:
        for piece in item.pieces:
            more = f"{piece.name}({piece.arguments})" if isinstance(piece, ToolCall) else piece.text
            text.add(item.index, more)
        yield item


async def _ends_of(stream: GenerationStream) -> AsyncIterator[Item]:
    """The stream of a request that only fills the cache: nothing was said, nothing is counted."""
    async for item in stream:
        match item:
            case ChoiceEnded():
                yield replace(item, pieces=(), finish_reason="length")
            case Ended():
                yield replace(item, pieces=(), finish_reason="length")


async def _with_first_space(
    stream: GenerationStream, decode: Callable[[int], str]
) -> AsyncIterator[Item]:
    """The stream with the space that detokenizers leave out where a text begins.

    An answer may do without it. What continues a text needs it, or two words become one.
    """
    begun: dict[int, str] = {}  # by choice, the text of its tokens while none is shown
    shown: set[int] = set()
    async for item in stream:
        if item.index not in shown:
            tokens = item.sampled if isinstance(item, TextDelta) else ()
            text = begun.get(item.index, "") + "".join(decode(one.token) for one in tokens)
            begun[item.index] = text
            if item.text:
                shown.add(item.index)
                if _leading_spaces(text) - _leading_spaces(item.text) == 1:
                    item = replace(item, pieces=(Said(" "), *item.pieces))
        yield item


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
