"""OpenAI's chat completions, streamed and not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from aiohttp import web

from omlx.actors.messages import ChoiceEnded, Ended, TextDelta
from omlx.core.pieces import Piece, Text, Thought, ToolCall, calls_of, text_of, thought_of
from omlx.core.plan import Sampled
from omlx.core.sequence import Request
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.chat_schema import ChatRequest, generation_of, parse_chat
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import json_response
from omlx.web.generation import Item, check_served, ignored_of, prepare
from omlx.web.ids import new_id
from omlx.web.openai_shapes import (
    CompletionFrames,
    fingerprint_of,
    logprob_entries,
    usage_of,
)
from omlx.web.sampling import choices_of
from omlx.web.streaming import Choice, answer_headers, collect, stream, stream_headers

REASONING_KEYS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}
"""What clients call it; both names are in use."""


def add_chat_completions(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/chat/completions", chat_completions)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    edge = request.app[EDGE]
    chat = parse_chat(await request.read())
    check_served(edge, chat.model)
    ignored = ignored_of(edge, chat)
    choices = choices_of(chat, edge.loaded.settings.max_concurrent_requests)
    asked = generation_of(chat, edge.vocab_size, choices)
    prepared = await prepare(request, asked, new_id("chatcmpl-"))
    answer = Answer(prepared.request, chat, edge)
    if chat.stream:
        headers, _ = await stream_headers(edge, [prepared], ignored)
        return await stream(request, [prepared], answer, headers)
    found, records = await collect(request, [prepared])
    headers = answer_headers(records, ignored)
    return json_response(answer.whole(found, records[0]), headers=headers)


class Answer(CompletionFrames):
    """The shapes of one answer. Its id, time and model are the same in every piece."""

    def __init__(self, generation: Request, chat: ChatRequest, edge: Edge) -> None:
        self._id = generation.request_id
        self._num_choices = generation.n
        self._wants_logprobs = bool(chat.logprobs)
        self._created = int(time.time())
        self._model = generation.model
        self._reasoning_keys = REASONING_KEYS[edge.loaded.settings.reasoning_field]
        self._calls = [0] * generation.n
        """Calls of each choice that are told by now."""
        self._usage = bool(chat.stream_options and chat.stream_options.include_usage)
        self._edge = edge

    def whole(self, choices: list[Choice], record: RequestRecord) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_of([record], self._edge),
            "omlx": record.omlx(),
        }

    # ── a stream ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> bytes:
        """Whose words they will be, once a choice."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return _data(self._chunk(role, index) for index in range(self._num_choices))

    def item(self, item: Item) -> bytes:
        match item:
            case TextDelta():
                return _data(self._chunks(item))
            case ChoiceEnded() | Ended():
                return _data(self._last_chunks(item))

    def _chunks(self, item: TextDelta) -> list[dict[str, Any]]:
        """What is said now; log-probabilities come with the first of it, or with an empty text."""
        deltas = self._deltas(item)
        if not deltas and self._wants_logprobs:
            deltas = [{"content": ""}]
        sampled = [item.sampled, *[()] * len(deltas)]
        return [
            self._chunk(delta, item.index, tokens)
            for delta, tokens in zip(deltas, sampled, strict=False)
        ]

    def _deltas(self, item: Item) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in item.pieces:
            match piece:
                case Text(text):
                    deltas.append({"content": text})
                case Thought(text):
                    deltas.append(dict.fromkeys(self._reasoning_keys, text))
                case ToolCall():
                    number = self._calls[item.index]
                    self._calls[item.index] += 1
                    # The name comes once, and then what the call is made with.
                    begun = {"index": number, **_call(replace(piece, arguments=""))}
                    rest = {"index": number, "function": {"arguments": piece.arguments}}
                    deltas += [{"tool_calls": [begun]}, {"tool_calls": [rest]}]
        return deltas

    def _last_chunks(self, ended: ChoiceEnded | Ended) -> list[dict[str, Any]]:
        """What was held back of a choice, and the chunk that says why it ended.

        With the end of the last one the usage, if it was asked.
        """
        chunks = [self._chunk(delta, ended.index) for delta in self._deltas(ended)]
        last = self._chunk({}, ended.index)
        last["choices"][0]["finish_reason"] = ended.finish_reason
        chunks.append(last)
        if isinstance(ended, ChoiceEnded):
            return chunks
        if self._usage:
            last = {
                **self._head("chat.completion.chunk"),
                "choices": [],
                "usage": usage_of([ended.record], self._edge),
            }
            chunks.append(last)
        last["omlx"] = ended.record.omlx()
        return chunks

    # ── pieces ───────────────────────────────────────────────────────────────────────────────

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(choice.pieces),
            "logprobs": self._logprobs(choice.sampled),
            "finish_reason": choice.finish_reason,
        }

    def _message(self, pieces: list[Piece]) -> dict[str, Any]:
        calls, thought, text = calls_of(pieces), thought_of(pieces), text_of(pieces)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if thought:
            message |= dict.fromkeys(self._reasoning_keys, thought)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return message

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint_of(self._edge),
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

    def _logprobs(self, sampled: Iterable[Sampled]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": logprob_entries(sampled, self._edge.decode_token), "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _data(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(sse.data, chunks))
