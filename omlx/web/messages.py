"""Anthropic's messages, streamed and not, and the count of a prompt's tokens."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from omlx.actors.messages import Ended, TextDelta
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.cache_diagnosis import anthropic_diagnostics
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import ApiError, json_response
from omlx.web.generation import (
    Item,
    Prepared,
    check_served,
    helpers_of,
    ignored_of,
    prepare,
    render,
    served_model,
)
from omlx.web.ids import new_id
from omlx.web.messages_blocks import Blocks, block_of, event
from omlx.web.messages_schema import generation_of, parse_count, parse_messages, prompt_of
from omlx.web.prompt_usage import PromptSplit, expected_split, split_prompt
from omlx.web.streaming import Choice, answer_headers, collect, stream, stream_headers

Json = dict[str, Any]


def add_messages(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/messages", messages)
        app.router.add_post(f"{prefix}/messages/count_tokens", count_tokens)


async def messages(request: web.Request) -> web.StreamResponse:
    edge = request.app[EDGE]
    asked = parse_messages(await request.read())
    check_served(edge, asked.model)
    budget = asked.thinking_budget and not edge.markup.takes_budget
    ignored = ignored_of(edge, asked, *(["thinking.budget_tokens"] if budget else []))
    wanted = generation_of(asked, edge.vocab_size)
    prepared = await prepare(request, wanted, new_id("msg_"))
    answer = Answer(prepared, edge, asked.previous_message_id)
    if asked.stream:
        headers, answer.expected_cached = await stream_headers(edge, [prepared], ignored)
        return await stream(request, [prepared], answer, headers)
    (choice,), (record,) = await collect(request, [prepared])
    headers = answer_headers([record], ignored)
    return json_response(answer.whole(choice, record), headers=headers)


async def count_tokens(request: web.Request) -> web.Response:
    """What the same request would take as its prompt. Nothing is computed, stored or counted."""
    edge = request.app[EDGE]
    asked = parse_count(await request.read())
    actors = helpers_of(edge)
    served_model(edge, asked.model)
    rendered, _ = await render(edge, actors, prompt_of(asked))
    return json_response({"input_tokens": len(rendered.tokens)})


class Answer:
    """The shapes of one answer, whole and in named events.

    A stream is message_start, ping, the content block by block, message_delta, message_stop.
    """

    def __init__(self, prepared: Prepared, edge: Edge, previous: str | None) -> None:
        """``previous``: the id of the message whose prompt it is to be compared with."""
        self._prepared = prepared
        self._previous = previous
        self._request = prepared.request
        self._capped = prepared.capped
        self._edge = edge
        self.expected_cached: int | None = None
        """For the beginning of a stream; its end has the truth."""
        self._blocks = Blocks()

    def whole(self, choice: Choice, record: RequestRecord) -> Json:
        return {
            **self._message([block_of(piece) for piece in choice.pieces], record.cached_tokens),
            **self._end_of(choice.finish_reason, record),
            "usage": self._usage_of(record),
            "omlx": record.omlx(),
        }

    # ── a stream ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> bytes:
        split = expected_split(self._edge, self._request, self.expected_cached)
        message = {
            **self._message([], split.read),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(split, 0, 0),
        }
        return event("message_start", message=message) + event("ping")

    def item(self, item: Item) -> bytes:
        frames = b"".join(map(self._blocks.take, item.pieces))
        if isinstance(item, TextDelta):
            return frames
        assert isinstance(item, Ended), "a message is one choice"
        frames += self._blocks.close()
        frames += event(
            "message_delta",
            delta=self._end_of(item.finish_reason, item.record),
            usage=self._usage_of(item.record),
            omlx=item.record.omlx(),
        )
        return frames + event("message_stop")

    def heartbeat(self) -> bytes:
        return event("ping")

    def failed(self, error: ApiError) -> bytes:
        return sse.event("error", error.anthropic_body(self._request.request_id))

    def end(self) -> bytes:
        return b""

    # ── pieces ───────────────────────────────────────────────────────────────────────────────

    def _message(self, content: list[Json], cached_tokens: int) -> Json:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            "diagnostics": anthropic_diagnostics(self._prepared, self._previous, cached_tokens),
        }

    def _end_of(self, finish_reason: str | None, record: RequestRecord) -> Json:
        if finish_reason == "length":
            reason = "model_context_window_exceeded" if self._capped else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if finish_reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        reason = "end_turn" if record.stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": record.stop}

    def _usage_of(self, record: RequestRecord) -> Json:
        split = split_prompt(self._edge, record)
        return _usage(split, record.generated_tokens, record.reasoning_tokens)


def _usage(split: PromptSplit, output_tokens: int, thinking_tokens: int) -> Json:
    return {
        "input_tokens": split.rest,
        "cache_creation_input_tokens": split.written,
        "cache_read_input_tokens": split.read,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }
