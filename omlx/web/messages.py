"""Anthropic's messages, streamed and not, and the count of a prompt's tokens."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from omlx.actors.messages import Ended, TextDelta
from omlx.core.chat import GenerationRequest
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.body import ignored_fields
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import ApiError, json_response
from omlx.web.generation import (
    Item,
    Prepared,
    check_served,
    helpers_of,
    prepare,
    render,
    served_model,
)
from omlx.web.ids import new_id
from omlx.web.messages_schema import conversation_of, generation_of, parse_count, parse_messages
from omlx.web.prompt_usage import PromptSplit, expected_split, split_prompt
from omlx.web.streaming import Choice, answer_headers, collect, ignored_header, stream

Json = dict[str, Any]


def add_messages(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/messages", messages)
        app.router.add_post(f"{prefix}/messages/count_tokens", count_tokens)


async def messages(request: web.Request) -> web.StreamResponse:
    edge = request.app[EDGE]
    asked = parse_messages(await request.read())
    check_served(edge, asked.model)
    wanted = generation_of(asked, edge.vocab_size)
    prepared = await prepare(request, wanted, new_id("msg_"))
    ignored = ignored_fields(asked)
    if asked.stream:
        answer = Answer(prepared, edge, await expected_split(edge, prepared.request))
        return await stream(request, [prepared], answer, ignored_header(ignored))
    (choice,), (record,) = await collect(request, [prepared])
    headers = answer_headers([record], ignored)
    return json_response(Answer(prepared, edge).whole(choice, record), headers=headers)


async def count_tokens(request: web.Request) -> web.Response:
    """What the same request would take as its prompt. Nothing is computed, stored or counted."""
    edge = request.app[EDGE]
    asked = parse_count(await request.read())
    actors = helpers_of(edge)
    served_model(edge, asked.model)
    prompt = GenerationRequest(conversation_of(asked), "messages")
    rendered, _ = await render(edge, actors, prompt)
    return json_response({"input_tokens": len(rendered.tokens)})


class Answer:
    """The shapes of one answer, whole and in named events.

    A stream is message_start, ping, the text as one content block, message_delta, message_stop.
    """

    def __init__(self, prepared: Prepared, edge: Edge, expected: PromptSplit | None = None) -> None:
        """``expected``: of the prompt, for the beginning of a stream; its end has the truth."""
        self._request = prepared.request
        self._capped = prepared.capped
        self._edge = edge
        self._expected = expected
        self._text_began = False

    def whole(self, choice: Choice, record: RequestRecord) -> Json:
        text = choice.whole_text
        return {
            **self._message([{"type": "text", "text": text}] if text else []),
            **self._end_of(choice.finish_reason, record),
            "usage": self._usage_of(record),
            "omlx": record.omlx(),
        }

    # ── a stream ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> bytes:
        assert self._expected is not None, "a stream tells first what its prompt takes"
        message = {
            **self._message([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._expected, 0),
        }
        return _event("message_start", message=message) + _event("ping")

    def item(self, item: Item) -> bytes:
        frames = self._text(item.text) if item.text else b""
        if isinstance(item, TextDelta):
            return frames
        assert isinstance(item, Ended), "a message is one choice"
        if self._text_began:
            frames += _event("content_block_stop", index=0)
        frames += _event(
            "message_delta",
            delta=self._end_of(item.finish_reason, item.record),
            usage=self._usage_of(item.record),
            omlx=item.record.omlx(),
        )
        return frames + _event("message_stop")

    def heartbeat(self) -> bytes:
        return _event("ping")

    def failed(self, error: ApiError) -> bytes:
        return sse.event("error", error.anthropic_body(self._request.request_id))

    def end(self) -> bytes:
        return b""

    def _text(self, text: str) -> bytes:
        frames = b""
        if not self._text_began:
            self._text_began = True
            block = {"type": "text", "text": ""}
            frames = _event("content_block_start", index=0, content_block=block)
        delta = {"type": "text_delta", "text": text}
        return frames + _event("content_block_delta", index=0, delta=delta)

    # ── pieces ───────────────────────────────────────────────────────────────────────────────

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
        }

    def _end_of(self, finish_reason: str | None, record: RequestRecord) -> Json:
        if finish_reason == "length":
            reason = "model_context_window_exceeded" if self._capped else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        reason = "end_turn" if record.stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": record.stop}

    def _usage_of(self, record: RequestRecord) -> Json:
        return _usage(split_prompt(self._edge, record), record.generated_tokens)


def _usage(split: PromptSplit, output_tokens: int) -> Json:
    return {
        "input_tokens": split.rest,
        "cache_creation_input_tokens": split.written,
        "cache_read_input_tokens": split.read,
        "output_tokens": output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event(kind, {"type": kind, **fields})
