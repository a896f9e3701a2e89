"""Chats with any OpenAI-compatible server, as its client sees them, and documents to chat about."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PIECES_MIN = 8
"""Of each answer, for a rate."""

Message = dict[str, str]


class Refused(Exception):
    """A server did not answer a chat as it should; the text says what it said."""


@dataclass(frozen=True)
class Reading:
    """One streamed answer. Times are of ``time.perf_counter``, in seconds."""

    sent: float
    arrivals: tuple[float, ...]
    """When each piece of text came; most servers send one for each token."""
    text: str
    prompt_tokens: int | None
    """None, as the two below: the server does not say."""
    cached_tokens: int | None
    generated_tokens: int | None
    omlx: dict[str, Any] = field(default_factory=dict)
    """What omlx adds; empty from other servers."""

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.arrivals[0] - self.sent)

    @property
    def from_ssd(self) -> int:
        return self.omlx["cached_from"]["ssd"]


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI-compatible server listens."""

    url: str
    """Without ``/v1``."""
    model: str | None = None
    key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Added to each request."""


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    messages: Sequence[Message],
    max_tokens: int,
    on_piece: Callable[[int], object] | None = None,
    **fields: Any,
) -> Reading:
    """One greedy, streamed chat. Raises Refused.

    ``on_piece`` is told how many pieces there are now. ``fields`` are added to the request.
    """
    body: dict[str, Any] = {
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.fields,
        **fields,
    }
    if endpoint.model is not None:
        body["model"] = endpoint.model
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    arrivals: list[float] = []
    text: list[str] = []
    usage: dict[str, Any] = {}
    omlx: dict[str, Any] = {}
    sent = time.perf_counter()
    url = f"{endpoint.url}/v1/chat/completions"
    async with session.post(url, json=body, headers=headers) as answer:
        if answer.status != 200:
            raise Refused(f"{url}: {answer.status} {(await answer.text())[:300]}")
        async for raw in answer.content:
            now = time.perf_counter()
            line = raw.decode().strip()
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise Refused(f"{url}: {chunk['error']}")
            for choice in chunk.get("choices") or ():
                if piece := choice.get("delta", {}).get("content"):
                    arrivals.append(now)
                    text.append(piece)
                    if on_piece is not None:
                        on_piece(len(text))
            usage = chunk.get("usage") or usage
            omlx = chunk.get("omlx") or omlx
    if not arrivals:
        raise Refused(f"{url}: the answer has no text")
    details = usage.get("prompt_tokens_details") or {}
    return Reading(
        sent,
        tuple(arrivals),
        "".join(text),
        usage.get("prompt_tokens"),
        details.get("cached_tokens"),
        usage.get("completion_tokens"),
        omlx,
    )


class TooShort(Exception):
    """Answers did not run side by side for long enough to be measured."""


def rate_together(readings: Sequence[Reading]) -> float:
    """Tokens a second while all of them run, a piece of text counted as a token.

    Raises TooShort.
    """
    start = max(reading.arrivals[0] for reading in readings)
    stop = min(reading.arrivals[-1] for reading in readings)
    pieces = sum(start < arrival <= stop for r in readings for arrival in r.arrivals)
    if pieces < PIECES_MIN * len(readings):
        raise TooShort("the answers ended too early to be measured; ask for more, or --seed")
    return pieces / (stop - start)


async def throughput(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    chats: Sequence[Sequence[Message]],
    streams: int,
    max_tokens: int,
) -> float:
    """Tokens a second, prompts and answers together, from the first request to the last end.

    Each stream sends the next chat when it has an answer. Raises Refused.
    """
    waiting = iter(chats)
    readings: list[Reading] = []

    async def stream() -> None:
        for chat in waiting:
            readings.append(await ask(session, endpoint, chat, max_tokens))

    await asyncio.gather(*(stream() for _ in range(streams)))
    tokens = sum((r.prompt_tokens or 0) + (r.generated_tokens or 0) for r in readings)
    return tokens / (max(r.arrivals[-1] for r in readings) - min(r.sent for r in readings))


def http_session() -> aiohttp.ClientSession:
    """Without time limits: a cold prompt may take minutes."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))


# ── documents ────────────────────────────────────────────────────────────────────────────────

_PLACES = ("harbour", "mill", "bridge", "orchard", "quarry", "station", "lighthouse", "market")
_THINGS = ("lamp", "rope", "barrel", "ladder", "wagon", "anchor", "bell", "kettle", "plough")
_DEEDS = ("moved", "counted", "painted", "mended", "sold", "weighed", "borrowed", "cleaned")


class Documents:
    """Texts that share nothing, not even the beginning; equal seeds give equal texts."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0
        self.words_per_token = 0.7
        """Corrected by ``calibrate``."""

    def draw(self, num_tokens: int) -> list[Message]:
        """A chat of about so many tokens: a document, and a question about it.

        The document stands first, in the system message, as templates put words of their own in
        front of a chat without one.
        """
        self._count += 1
        drawn = random.Random(f"{self._seed} {self._count}")
        words = [f"{drawn.randrange(10**6):06d}"]
        while len(words) < self.words_per_token * (num_tokens - 20):
            place, thing, deed = (drawn.choice(kind) for kind in (_PLACES, _THINGS, _DEEDS))
            words += (
                f"At the {place} a {thing} was {deed} by number {drawn.randrange(1000)}.".split()
            )
        return [
            {"role": "system", "content": " ".join(words)},
            {"role": "user", "content": "Continue this list."},
        ]

    async def calibrate(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> int:
        """Learn from the server how many tokens its words make. Returns what a chat of 120 had."""
        messages = self.draw(120)
        reading = await ask(session, endpoint, messages, 1)
        if reading.prompt_tokens is not None:
            num_words = len(messages[0]["content"].split())
            self.words_per_token = num_words / max(1, reading.prompt_tokens - 20)
        return reading.prompt_tokens or 120
