"""OpenAI's dialect: the models and chat completions, streamed and not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from omlx import __version__
from omlx.actors.messages import ChoiceEnded, Ended, GenerationStream, TextDelta
from omlx.core.plan import Sampled
from omlx.core.sequence import Request
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import from_exception, json_response
from omlx.web.generation import (
    actors_of,
    aliases_of,
    check_ready,
    prepare,
    running,
    served_model,
)
from omlx.web.schema import ChatRequest, parse_chat


def add_openai(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/chat/completions", chat_completions)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{id:.+}", show_model)


# ── models ───────────────────────────────────────────────────────────────────────────────────


async def list_models(request: web.Request) -> web.Response:
    """Exactly the names that are accepted as ``model``."""
    edge = request.app[EDGE]
    check_ready(edge)
    names = [edge.model.id, *aliases_of(edge)]
    return json_response({"object": "list", "data": [_model_entry(edge, name) for name in names]})


async def show_model(request: web.Request) -> web.Response:
    edge = request.app[EDGE]
    check_ready(edge)
    name = request.match_info["id"]
    served_model(edge, name)
    return json_response(_model_entry(edge, name))


def _model_entry(edge: Edge, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(edge.started_at),
        "owned_by": "omlx",
        "max_model_len": edge.max_context,
    }


# ── chat completions ─────────────────────────────────────────────────────────────────────────


async def chat_completions(request: web.Request) -> web.StreamResponse:
    edge = request.app[EDGE]
    chat = parse_chat(await request.read())
    actors = actors_of(edge)
    served_model(edge, chat.model)
    generation = await prepare(request, chat, actors)
    answer = Answer(generation, chat, edge)
    async with running(edge, actors, generation) as stream:
        if chat.stream:
            return await _streamed(request, answer, stream)
        return await _whole(answer, stream)


async def _whole(answer: Answer, stream: GenerationStream) -> web.Response:
    choices = [Choice() for _ in range(answer.num_choices)]
    record: RequestRecord | None = None
    async for item in stream:
        choice = choices[item.index]
        choice.text.append(item.text)
        if isinstance(item, TextDelta):
            choice.sampled += item.sampled
        else:
            choice.finish_reason = item.finish_reason
        if isinstance(item, Ended):
            record = item.record
    assert record is not None, "a stream ends with its record or with an error"
    return json_response(
        answer.whole(choices, record),
        headers={"x-request-id": answer.id, "x-omlx-cached": str(record.cached_tokens)},
    )


async def _streamed(
    request: web.Request, answer: Answer, stream: GenerationStream
) -> web.StreamResponse:
    response = await sse.open_stream(request, **{"x-request-id": answer.id})
    async with aclosing(_frames(answer, stream)) as frames:
        async for frame in frames:
            await response.write(frame)
    await response.write_eof()
    return response


async def _frames(answer: Answer, stream: GenerationStream) -> AsyncGenerator[bytes, None]:
    """The body of a stream. The headers are out, so whatever fails from here on is an event."""
    yield b"".join(map(sse.data, answer.first_chunks()))
    try:
        async for item in sse.with_heartbeat(stream):
            match item:
                case None:
                    yield sse.COMMENT
                case TextDelta() if answer.shows(item):
                    yield sse.data(answer.text_chunk(item))
                case ChoiceEnded() | Ended():
                    yield b"".join(map(sse.data, answer.last_chunks(item)))
    except Exception as failed:
        yield sse.data(from_exception(failed).body())
    yield sse.DONE


@dataclass
class Choice:
    """What has come of one choice."""

    text: list[str] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """The shapes of one answer. Its id, time and model are the same in every piece."""

    def __init__(self, generation: Request, chat: ChatRequest, edge: Edge) -> None:
        self.id = generation.request_id
        self.num_choices = generation.n
        self._wants_logprobs = bool(chat.logprobs)
        self._created = int(time.time())
        self._model = generation.model
        self._fingerprint = f"omlx-{__version__}-{edge.model.namespace}"
        self._usage = bool(chat.stream_options and chat.stream_options.include_usage)
        self._prefill_only = chat.tokens_asked == 0
        self._decode = edge.decode_token

    def whole(self, choices: list[Choice], record: RequestRecord) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self._usage_of(record),
            "omlx": record.omlx(),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "" if self._prefill_only else "".join(choice.text)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs([] if self._prefill_only else choice.sampled),
            "finish_reason": self._finish_reason(choice.finish_reason),
        }

    def first_chunks(self) -> list[dict[str, Any]]:
        """One a choice: whose words they will be."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(role, index) for index in range(self.num_choices)]

    def shows(self, delta: TextDelta) -> bool:
        """Whether a client has anything from it."""
        return not self._prefill_only and bool(delta.text or self._wants_logprobs)

    def text_chunk(self, delta: TextDelta) -> dict[str, Any]:
        return self._chunk({"content": delta.text}, delta.index, delta.sampled)

    def last_chunks(self, ended: ChoiceEnded | Ended) -> list[dict[str, Any]]:
        """What was held back of a choice, and the chunk that says why it ended.

        With the end of the last one the usage, if it was asked.
        """
        chunks: list[dict[str, Any]] = []
        if ended.text and not self._prefill_only:
            chunks.append(self._chunk({"content": ended.text}, ended.index))
        last = self._chunk({}, ended.index)
        last["choices"][0]["finish_reason"] = self._finish_reason(ended.finish_reason)
        chunks.append(last)
        if isinstance(ended, ChoiceEnded):
            return chunks
        if not self._usage:
            last["omlx"] = ended.record.omlx()
        else:
            chunks.append(
                {
                    **self._head("chat.completion.chunk"),
                    "choices": [],
                    "usage": self._usage_of(ended.record),
                    "omlx": ended.record.omlx(),
                }
            )
        return chunks

    def _finish_reason(self, reason: str | None) -> str | None:
        return "length" if self._prefill_only else reason

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(
        self, delta: dict[str, Any], index: int, sampled: tuple[Sampled, ...] = ()
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(sampled) if sampled else None,
            "finish_reason": None,
        }
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return chunk

    def _usage_of(self, record: RequestRecord) -> dict[str, Any]:
        completion = 0 if self._prefill_only else record.generated_tokens
        return {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": record.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _logprobs(self, sampled: tuple[Sampled, ...] | list[Sampled]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._logprob(one) for one in sampled], "refusal": None}

    def _logprob(self, one: Sampled) -> dict[str, Any]:
        top = [self._token(other.token, other.logprob) for other in one.top]
        return {**self._token(one.token, one.logprob or 0.0), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode(token)
        # JSON has no infinity; OpenAI's own answer for "never" is -9999.
        return {
            "token": text,
            "logprob": max(min(logprob, 0.0), -9999.0),
            "bytes": list(text.encode()),
        }
