"""Calls of tools, the same way for every dialect: whether they may be asked for, and what comes.

An answer with a call ends with ``tool_calls``, unless it was cut. Every call has an id: the
model's own, if its format has ids, else one that follows from the request's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

from omlx.core.chat import Conversation, GenerationRequest
from omlx.core.events import ChoiceEnded, Ended, TextDelta
from omlx.core.forced_calls import can_force, forced_calls
from omlx.core.markup import PLAIN, Markup, ModelMarkup
from omlx.core.pieces import CallText, Piece, Text, ToolCall
from omlx.core.sequence import Request
from omlx.core.tool_calls import read_calls
from omlx.web.edge import Edge
from omlx.web.errors import invalid

Item = TextDelta | ChoiceEnded | Ended
"""What comes of a generation."""

ID_CHARACTERS = 9
"""Mistral's templates take no other ids than those of so many letters and digits."""


def check_tools(edge: Edge, asked: GenerationRequest) -> None:
    """Raises ApiError for tools that the model may call and can't."""
    if asked.tools_to_call and not edge.markup.takes_tools:
        raise invalid(
            f"tools are not supported by {edge.model.id}: its chat template has no place for "
            "them, or the format of its calls is not known.",
            "tools",
            "unsupported_value",
        )
    if asked.must_call and not can_force(edge.markup):
        raise invalid(
            f"A tool_choice that forces a call is not supported for {edge.model.id}: it needs a "
            f"grammar of the model's calls, whose format is {edge.markup.family}.",
            "tool_choice",
            "unsupported_value",
        )


def forced(edge: Edge, asked: GenerationRequest) -> GenerationRequest:
    """With a grammar of calls, if it has to call; nothing else can be said then."""
    if not asked.must_call:
        return asked
    assert asked.tools is not None, "what must be called was offered"
    grammar = forced_calls(edge.markup, asked.tools, asked.must_call, one_call=asked.one_call)
    return replace(asked, sampling=replace(asked.sampling, grammar=grammar))


def markup_for(edge: Edge, asked: GenerationRequest, prompt: str) -> Markup:
    """How the answer to a rendered conversation is read.

    Where tools are shown and may not be called the markers are read as well, so that none of them
    is taken for text. What goes on with a raw text is text throughout.
    """
    if not isinstance(asked.prompt, Conversation):
        return PLAIN
    return edge.markup.reading(prompt, tools=bool(asked.tools), one_call=asked.one_call)


async def with_calls(
    items: AsyncIterator[Item],
    edge: Edge,
    request: Request,
    tools: str | None,
    strict: tuple[str, ...] = (),
) -> AsyncIterator[Item]:
    """The items with calls in place of their text.

    What can't be read as a call, or may not be one, is text. ``tools``: those it may call;
    ``strict``: of these, those whose calls keep to their schemas.
    """
    told: Counter[int] = Counter()
    async for item in items:
        pieces: list[Piece] = []
        for piece in item.pieces:
            if not isinstance(piece, CallText):
                pieces.append(piece)
                continue
            calls = await _calls_in(piece.text, edge, tools, strict)
            if not calls and (text := _without_control(piece.text, edge.markup)):
                pieces.append(Text(text))
            for call in calls[:1] if request.markup.one_call else calls:
                name = call.id or _call_id(request.request_id, item.index, told[item.index])
                pieces.append(replace(call, id=name))
                told[item.index] += 1
        item = replace(item, pieces=tuple(pieces))
        if not isinstance(item, TextDelta) and told[item.index] and item.finish_reason == "stop":
            item = replace(item, finish_reason="tool_calls")
        yield item


async def _calls_in(
    text: str, edge: Edge, tools: str | None, strict: tuple[str, ...]
) -> tuple[ToolCall, ...]:
    if tools is None or edge.tool_parser is None:
        return ()
    # In a thread: some parsers try many ways to read a text, and it may be long.
    return await asyncio.to_thread(read_calls, edge.tool_parser, text, tools, strict)


def _without_control(text: str, markup: ModelMarkup) -> str:
    """What the model said with the text of a call that is none."""
    for _, spelling in markup.control:
        text = text.replace(spelling, "")
    return text.strip()


def _call_id(request_id: str, choice: int, number: int) -> str:
    digest = hashlib.sha256(f"{request_id}/{choice}/{number}".encode())
    return digest.hexdigest()[:ID_CHARACTERS]
