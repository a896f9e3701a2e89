"""OpenAI's responses, streamed and not. Stateless: each request brings its whole conversation."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from omlx.actors.messages import Ended, TextDelta
from omlx.core.plan import Sampled
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.body import ignored_fields
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import ApiError, json_response
from omlx.web.generation import Item, Prepared, check_served, prepare
from omlx.web.ids import new_id
from omlx.web.openai_shapes import logprob_entries
from omlx.web.prompt_usage import split_prompt
from omlx.web.responses_schema import ResponsesRequest, generation_of, parse_responses
from omlx.web.streaming import answer_headers, collect, ignored_header, stream

Json = dict[str, Any]


def add_responses(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/responses", responses)


async def responses(request: web.Request) -> web.StreamResponse:
    edge = request.app[EDGE]
    asked = parse_responses(await request.read())
    check_served(edge, asked.model)
    wanted = generation_of(asked, edge.vocab_size)
    prepared = await prepare(request, wanted, new_id("resp_"))
    answer = Answer(prepared, asked, edge)
    ignored = ignored_fields(asked)
    if asked.stream:
        return await stream(request, [prepared], answer, ignored_header(ignored))
    (choice,), (record,) = await collect(request, [prepared])
    headers = answer_headers([record], ignored)
    answer.say(choice.whole_text, choice.sampled)
    return json_response(answer.ended(choice.finish_reason, record), headers=headers)


class Answer:
    """One response: what it is at any moment, and the numbered events that lead there."""

    def __init__(self, prepared: Prepared, asked: ResponsesRequest, edge: Edge) -> None:
        self._id = prepared.request.request_id
        self._item_id = new_id("msg_")
        self._model = prepared.request.model
        self._asked = asked
        self._edge = edge
        self._created_at = int(time.time())
        self._number = 0
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def say(self, text: str, sampled: list[Sampled] | tuple[Sampled, ...]) -> list[Json]:
        """Add to the text; returns the log-probabilities that come with it."""
        self._text += [text] if text else []
        entries: list[Json] = []
        if self._asked.wants_logprobs:
            entries = logprob_entries(sampled, self._edge.decode_token)
        self._logprobs += entries
        return entries

    def ended(self, finish_reason: str | None, record: RequestRecord) -> Json:
        """The whole response once nothing will be added."""
        cut = finish_reason == "length" and not self._asked.prewarm
        split = split_prompt(self._edge, record)
        return {
            **self._response("incomplete" if cut else "completed"),
            "output": self._output("incomplete" if cut else "completed"),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": record.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": split.read,
                    "cache_write_tokens": split.written,
                },
                "output_tokens": record.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": record.prompt_tokens + record.generated_tokens,
            },
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
        frames = self._delta(item.text, item.sampled if isinstance(item, TextDelta) else ())
        if not isinstance(item, Ended):
            return frames
        response = self.ended(item.finish_reason, item.record)
        if self._has_text:
            frames += self._text_done(response["output"][0])
        return frames + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed")
        response["error"] = {"code": code, "message": str(error)}
        return self._event("response.failed", response=response)

    def end(self) -> bytes:
        return b""

    def _delta(self, text: str, sampled: tuple[Sampled, ...]) -> bytes:
        began = self._has_text
        logprobs = self.say(text, sampled)
        if not self._has_text or not (text or logprobs):
            return b""
        frames = b""
        if not began:
            item = self._item("in_progress", [])
            frames = self._event("response.output_item.added", output_index=0, item=item)
            part = _text_part("", [])
            frames += self._event("response.content_part.added", **self._place, part=part)
            logprobs = self._logprobs  # with those of tokens that gave no text yet
        return frames + self._event(
            "response.output_text.delta", **self._place, delta=text, logprobs=logprobs
        )

    def _text_done(self, item: Json) -> bytes:
        part = item["content"][0]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return (
            self._event("response.output_text.done", **self._place, **done)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    @property
    def _place(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.event(kind, {"type": kind, "sequence_number": number, **fields})

    # ── pieces ───────────────────────────────────────────────────────────────────────────────

    @property
    def _has_text(self) -> bool:
        return bool(self._text)

    def _output(self, status: str) -> list[Json]:
        if not self._has_text:
            return []
        return [self._item(status, [_text_part("".join(self._text), self._logprobs)])]

    def _item(self, status: str, content: list[Json]) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

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
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}, "verbosity": text.verbosity if text else None},
            "tool_choice": "none" if asked.tools else "auto",
            "tools": [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
