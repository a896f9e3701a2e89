"""OpenAI's text completions: a prompt as text or token ids, or several of them, continued."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field, PlainValidator

from omlx.actors.messages import ChoiceEnded, Detokenize, Ended, TextDelta
from omlx.core.chat import GenerationRequest
from omlx.core.plan import Sampled
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.body import Count, parse, unsupported
from omlx.web.edge import EDGE, Edge
from omlx.web.errors import invalid, json_response
from omlx.web.generation import (
    Actors,
    Item,
    Prepared,
    actors_of,
    check_served,
    ignored_of,
    prepare,
)
from omlx.web.ids import new_id
from omlx.web.openai_shapes import CompletionFrames, fingerprint_of, finite, usage_of
from omlx.web.sampling import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    SamplingFields,
    StreamOptions,
    choices_of,
    sampling_of,
    stops_of,
)
from omlx.web.streaming import Choice, answer_headers, collect, stream, stream_headers
from omlx.web.structured import AnswerFormat, grammar_of

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


def _prompts(value: object) -> list[Prompt]:
    """One or several. The first item says what the others are to be."""
    match value:
        case str():
            return [value]
        case [int(), *_] if _are_tokens(value):
            return [tuple(value)]
        case [str(), *_] if all(isinstance(one, str) for one in value):
            return list(value)
        case [list(), *_] if all(_are_tokens(one) for one in value):
            return [tuple(one) for one in value]
    raise ValueError("give a text, a list of texts, a list of token ids or a list of such lists")


def _are_tokens(value: object) -> bool:
    # type() rather than isinstance: true and false are no tokens.
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


class CompletionRequest(SamplingFields):
    prompt: Annotated[
        list[Prompt],
        PlainValidator(_prompts, str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: Count | None = Field(None, ge=0)
    suffix: str | None = None
    echo: bool | None = None
    best_of: Count | None = Field(None, ge=1)
    logprobs: Count | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    @property
    def answer_format(self) -> AnswerFormat:
        return AnswerFormat(self.response_format, "response_format", nested=True)


def add_completions(app: web.Application) -> None:
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/completions", completions)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError, naming the field."""
    request = parse(CompletionRequest, body)
    if request.suffix:
        raise unsupported("suffix is", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of other than n is", "best_of")
    if request.echo and request.logprobs is not None:
        raise unsupported("logprobs of an echoed prompt are", "logprobs")
    grammar_of(request)
    stops_of(request.stop)
    if len(request.prompt) * (request.n or 1) > MAX_CHOICES:
        raise invalid(f"At most {MAX_CHOICES} choices can be given at once.", "prompt")
    return request


def generation_of(
    request: CompletionRequest, prompt: Prompt, vocab_size: int, choices: int
) -> GenerationRequest:
    """Raises ApiError for ids that are no tokens."""
    if isinstance(prompt, tuple):
        check_tokens(prompt, vocab_size, "prompt")
    return GenerationRequest(
        prompt=prompt,
        field="prompt",
        sampling=sampling_of(request, vocab_size, request.logprobs),
        max_tokens=request.max_tokens,
        stops=stops_of(request.stop),
        n=choices,
        salt=request.cache_salt or "",
        caching=request.caching,
        group=request.prompt_cache_key or "",
    )


async def completions(request: web.Request) -> web.StreamResponse:
    edge = request.app[EDGE]
    asked = parse_completion(await request.read())
    check_served(edge, asked.model)
    ignored = ignored_of(edge, asked)
    choices = choices_of(asked, edge.loaded.settings.max_concurrent_requests)
    name = new_id("cmpl-")
    prepared: list[Prepared] = []
    echoed: list[str] = []
    for number, prompt in enumerate(asked.prompt):
        wanted = generation_of(asked, prompt, edge.vocab_size, choices)
        prepared.append(await prepare(request, wanted, f"{name}-{number}" if number else name))
        echoed.append(await _text_of(actors_of(edge), prompt) if asked.echo else "")
    answer = Answer(name, asked, edge, [text for text in echoed for _ in range(choices)])
    if asked.stream:
        headers, _ = await stream_headers(edge, prepared, ignored)
        return await stream(request, prepared, answer, headers)
    found, records = await collect(request, prepared)
    headers = answer_headers(records, ignored)
    return json_response(answer.whole(found, records), headers=headers)


def check_tokens(tokens: tuple[int, ...], vocab_size: int, field: str) -> None:
    """Raises ApiError for an id that is not in the vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        raise invalid(f"{field} has {max(tokens)}, which is no token id.", field)


async def _text_of(actors: Actors, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await actors.tokenizer.ask(Detokenize(prompt))


class Answer(CompletionFrames):
    """The shapes of one answer, whole and in pieces."""

    def __init__(
        self, name: str, asked: CompletionRequest, edge: Edge, echoed: Sequence[str]
    ) -> None:
        """``echoed``: what each choice begins with."""
        self._id = name
        self._created = int(time.time())
        self._edge = edge
        self._echoed = echoed
        self._num_top = asked.logprobs
        self._usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._records: list[RequestRecord] = []
        self._ends_left = len(echoed)
        self._length = [0] * len(echoed)
        """Characters of each choice that are told by now."""

    def whole(self, choices: list[Choice], records: list[RequestRecord]) -> dict[str, Any]:
        return {
            **self._head(),
            "choices": [
                {
                    "index": index,
                    "text": self._echoed[index] + choice.whole_text,
                    "logprobs": self._logprobs(choice.sampled, 0),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage_of(records, self._edge),
            "omlx": _timing(records),
        }

    # ── a stream ─────────────────────────────────────────────────────────────────────────────

    def begin(self) -> bytes:
        """What is echoed; and for a client that waits for a first byte, an empty text."""
        chunks = [self._chunk(index, text) for index, text in enumerate(self._echoed)]
        return b"".join(map(sse.data, chunks))

    def item(self, item: Item) -> bytes:
        match item:
            case TextDelta():
                if not item.text and self._num_top is None:
                    return b""
                return sse.data(self._chunk(item.index, item.text, item.sampled))
            case ChoiceEnded() | Ended():
                return self._ended(item)

    def _ended(self, item: ChoiceEnded | Ended) -> bytes:
        chunks = [self._chunk(item.index, item.text, finish_reason=item.finish_reason)]
        self._ends_left -= 1
        if isinstance(item, Ended):
            self._records.append(item.record)
        if not self._ends_left:
            if self._usage:
                usage = usage_of(self._records, self._edge)
                chunks.append({**self._head(), "choices": [], "usage": usage})
            chunks[-1]["omlx"] = _timing(self._records)
        return b"".join(map(sse.data, chunks))

    # ── pieces ───────────────────────────────────────────────────────────────────────────────

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._edge.model.id,
            "system_fingerprint": fingerprint_of(self._edge),
        }

    def _chunk(
        self,
        index: int,
        text: str,
        sampled: tuple[Sampled, ...] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(sampled, self._length[index]) if sampled else None
        self._length[index] += sum(len(self._edge.decode_token(one.token)) for one in sampled)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head(), "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, sampled: Iterable[Sampled], offset: int) -> dict[str, Any] | None:
        """Four lists with one entry a token. ``offset``: where the first of them begins."""
        if self._num_top is None:
            return None
        decode = self._edge.decode_token
        sampled = list(sampled)
        tokens = [decode(one.token) for one in sampled]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(one.logprob) for one in sampled],
            "top_logprobs": list(map(self._top, sampled)) if self._num_top else None,
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
        }

    def _top(self, one: Sampled) -> dict[str, float]:
        """By their text; of two tokens with one text the likelier."""
        top: dict[str, float] = {}
        for other in one.top:
            top.setdefault(self._edge.decode_token(other.token), finite(other.logprob))
        return top


def _timing(records: list[RequestRecord]) -> Any:
    """Of one prompt its times, of several a list of them."""
    return records[0].omlx() if len(records) == 1 else [record.omlx() for record in records]
