"""OpenAI's responses, streamed and not. Stateless: each request brings its whole conversation."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from omlx.actors.messages import Ended, TextDelta
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.cache_diagnosis import openai_diagnostics
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import ApiError, json_response
from omlx.web.generation import Item, Prepared, check_served, ignored_of, prepare
from omlx.web.ids import new_id
from omlx.web.openai_shapes import logprob_entries
from omlx.web.prompt_usage import split_prompt
from omlx.web.responses_output import Event, Output
from omlx.web.responses_schema import (
    ResponsesRequest,
    ToolIn,
    generation_of,
    parse_responses,
)
from omlx.web.streaming import answer_headers, collect, stream, stream_headers
from omlx.web.tools_schema import NO_PARAMETERS

Json = dict[str, Any]


def add_responses(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/responses", responses)


async def responses(request: web.Request) -> web.StreamResponse:
    edge = request.app[EDGE]
    asked = parse_responses(await request.read())
    check_served(edge, asked.model)
    ignored = ignored_of(edge, asked)
    wanted = generation_of(asked, edge.vocab_size)
    prepared = await prepare(request, wanted, new_id("resp_"))
    answer = Answer(prepared, asked, edge)
    if asked.stream:
        headers, _ = await stream_headers(edge, [prepared], ignored)
        return await stream(request, [prepared], answer, headers)
    (choice,), (record,) = await collect(request, [prepared])
    headers = answer_headers([record], ignored)
    for item in choice.items:
        answer.take(item)
    return json_response(answer.ended(choice.finish_reason, record)[1], headers=headers)


class Answer:
    """One response: what it is at any moment, and the numbered events that lead there."""

    def __init__(self, prepared: Prepared, asked: ResponsesRequest, edge: Edge) -> None:
        self._prepared = prepared
        self._id = prepared.request.request_id
        self._model = prepared.request.model
        self._asked = asked
        self._edge = edge
        self._created_at = int(time.time())
        self._number = 0
        self._output = Output()

    def ended(self, finish_reason: str | None, record: RequestRecord) -> tuple[bytes, Json]:
        """The last events of the output, and the whole response."""
        cut = finish_reason == "length" and not self._asked.prewarm
        status = "incomplete" if cut else "completed"
        split = split_prompt(self._edge, record)
        return self._events(self._output.close(status)), {
            **self._response(status),
            "output": self._output.items,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": record.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": split.read,
                    "cache_write_tokens": split.written,
                },
                "output_tokens": record.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": record.reasoning_tokens},
                "total_tokens": record.prompt_tokens + record.generated_tokens,
            },
            "prompt_cache_diagnostics": openai_diagnostics(
                self._prepared, self._asked.comparison_response_id, record.cached_tokens
            ),
            "omlx": record.omlx(),
        }

    # ── a stream ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._response("in_progress"))
        return created + self.heartbeat()

    def heartbeat(self) -> bytes:
        """A real event: some clients drop comments, and then take the stream for dead."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    def item(self, item: Item) -> bytes:
        frames = self.take(item)
        if not isinstance(item, Ended):
            return frames
        last, response = self.ended(item.finish_reason, item.record)
        return frames + last + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed")
        response["error"] = {"code": code, "message": str(error)}
        return self._event("response.failed", response=response)

    def end(self) -> bytes:
        return b""

    def take(self, item: Item) -> bytes:
        """Let the output grow by what came."""
        sampled = item.sampled if isinstance(item, TextDelta) else ()
        entries: list[Json] = []
        if self._asked.wants_logprobs:
            entries = logprob_entries(sampled, self._edge.decode_token)
        return self._events(self._output.take(item.pieces, entries))

    def _events(self, events: list[Event]) -> bytes:
        return b"".join(self._event(kind, **fields) for kind, fields in events)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.event(kind, {"type": kind, "sequence_number": number, **fields})

    # ── pieces ───────────────────────────────────────────────────────────────────────────────

    def _response(self, status: str) -> Json:
        """With what the client asked, said back."""
        asked = self._asked
        reasoning, text = asked.reasoning, asked.text
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_diagnostics": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {
                "format": (text and text.format) or {"type": "text"},
                "verbosity": text.verbosity if text else None,
            },
            "tool_choice": asked.tool_choice or "auto",
            "tools": [_tool(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }


def _tool(tool: ToolIn) -> Json:
    """As it was offered."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters or NO_PARAMETERS,
        "strict": bool(tool.strict),
    }
