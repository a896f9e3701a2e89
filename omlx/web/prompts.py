"""For people who ask why a prompt is what it is: text to tokens and back, and a chat's prompt."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import Field

from omlx.actors.messages import Detokenize, Tokenize
from omlx.core.chat import Conversation, GenerationRequest
from omlx.web.body import Count, Loose, parse
from omlx.web.chat_schema import MessageIn, check_contents, messages_of, tools_of
from omlx.web.completions import check_tokens
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import invalid, json_response
from omlx.web.generation import Actors, helpers_of, render, served_model
from omlx.web.sampling import effort_options, template_options_of
from omlx.web.tools_schema import ToolIn


class TokenizeRequest(Loose):
    model: str | None = None
    content: str
    add_special: bool = False
    """Add what the tokenizer puts around a text, such as a beginning-of-sequence token."""
    parse_special: bool = True
    """Take the spelling of a control token for that token."""


class DetokenizeRequest(Loose):
    model: str | None = None
    tokens: list[Count]


class TemplateRequest(Loose):
    model: str | None = None
    messages: list[MessageIn] = Field(min_length=1)
    tools: list[ToolIn] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def add_prompts(app: web.Application) -> None:
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_post("/apply-template", apply_template)


async def tokenize(request: web.Request) -> web.Response:
    asked = parse(TokenizeRequest, await request.read())
    _, actors = _served(request, asked.model)
    tokens = await actors.tokenizer.ask(
        Tokenize(asked.content, asked.add_special, asked.parse_special)
    )
    return json_response({"tokens": tokens})


async def detokenize(request: web.Request) -> web.Response:
    asked = parse(DetokenizeRequest, await request.read())
    edge, actors = _served(request, asked.model)
    if any(token < 0 for token in asked.tokens):
        raise invalid("tokens must not be negative.", "tokens")
    check_tokens(tuple(asked.tokens), edge.vocab_size, "tokens")
    return json_response({"content": await actors.tokenizer.ask(Detokenize(tuple(asked.tokens)))})


async def apply_template(request: web.Request) -> web.Response:
    """The prompt as text, and as the tokens that are computed: they are the truth.

    A client's text is encoded without control tokens, so encoding the whole prompt again may give
    others.
    """
    asked = parse(TemplateRequest, await request.read())
    edge, actors = _served(request, asked.model)
    check_contents(asked.messages)
    prompt = GenerationRequest(_conversation_of(asked), "messages")
    rendered, _ = await render(edge, actors, prompt)
    return json_response({"prompt": rendered.prompt, "tokens": rendered.tokens})


def _served(request: web.Request, model: str | None) -> tuple[Edge, Actors]:
    edge = request.app[EDGE]
    actors = helpers_of(edge)
    served_model(edge, model)
    return edge, actors


def _conversation_of(asked: TemplateRequest) -> Conversation:
    effort = effort_options(asked.reasoning_effort, "reasoning_effort")
    options = template_options_of(asked.chat_template_kwargs, **effort)
    return Conversation(messages_of(asked.messages), tools_of(asked.tools), options)
