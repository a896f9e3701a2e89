"""Clients of every kind at once: what they get must be right, and what they leave must be nothing.

Chats with known answers, streamed or not; answers of random length and choice; clients that go
away while they wait, compute or listen; prompts too long and bodies that are wrong. The server has
a few blocks of RAM, less room on disk than it would fill, and a small memory budget.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.crashing import LIMITS, NEAR, Chat
from tests.process import Server, until

PATIENCE_S = 120.0
"""No request takes so long, however busy the machine: one that does is stuck."""

COUNTED = Path(__file__).with_name("counted.py")


class Kind(Enum):
    CHECKED = "answered as without a cache"
    RANDOM = "drawn at random"
    LONG = "long prompts"
    CANCELLED = "left by their client"
    REFUSED = "refused, as they should be"


WEIGHTS = {Kind.CHECKED: 8, Kind.RANDOM: 4, Kind.LONG: 2, Kind.CANCELLED: 5, Kind.REFUSED: 1}


@dataclass
class Tally:
    ended: Counter[Kind] = field(default_factory=Counter)
    turned_away: int = 0
    """429, and asked again."""
    cached_tokens: int = 0
    faults: list[str] = field(default_factory=list)


class Mix:
    def __init__(self, model: Path, home: Path, chats: Sequence[Chat], seed: int) -> None:
        self.chats = chats
        self.tally = Tally()
        self._random = random.Random(seed)
        self._counts = home / "counts"
        home.mkdir(parents=True, exist_ok=True)
        self.server = Server(
            model,
            home,
            *LIMITS,
            *("--hot-cache-max-size", "300000", "--ssd-cache-max-size", "2000000"),
            *("--max-queued-requests", "12"),
            through=(
                sys.executable,
                str(Path(__file__).with_name("counted.py")),
                str(self._counts),
            ),
        )

    def held(self) -> dict[str, int]:
        """What the server holds when nothing runs."""
        assert until(self.server.settled), "something still runs or waits"
        before = self._lines()
        self.server.send(signal.SIGUSR1)
        assert until(lambda: len(self._lines()) > len(before)), "it does not count"
        rss = psutil.Process(self.server.process.pid).memory_info().rss
        return {**json.loads(self._lines()[-1]), "rss_bytes": rss}

    def _lines(self) -> list[str]:
        if not self._counts.exists():
            return []
        return [line for line in self._counts.read_text().splitlines() if line.endswith("}")]

    async def run(self, requests: int, clients: int = 8) -> None:
        left = iter(range(requests))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
            await asyncio.gather(*(self._client(session, left) for _ in range(clients)))

    async def _client(self, session: aiohttp.ClientSession, left: Any) -> None:
        for _ in left:
            kind = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            try:
                await self._one(session, kind)
            except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
                self.tally.faults.append(f"{kind.value}: {error!r}")
            self.tally.ended[kind] += 1

    async def _one(self, session: aiohttp.ClientSession, kind: Kind) -> None:
        draw = self._random
        chat = draw.choice(self.chats)
        match kind:
            case Kind.CHECKED:
                await self._checked(session, chat)
            case Kind.RANDOM:
                tokens, n = draw.randint(1, 60), draw.choice([1, 1, 1, 2, 3])
                body = {
                    **self._body(chat),
                    "max_tokens": tokens,
                    "n": n,
                    "temperature": draw.choice([0.0, 0.7, 1.5]),
                    "top_p": draw.choice([1.0, 0.9]),
                    "seed": draw.choice([None, draw.randrange(99)]),
                    "frequency_penalty": draw.choice([0.0, 0.5]),
                }
                answer = await self._answer(session, body)
                usage = answer["usage"]
                self._expect(len(answer["choices"]) == n, f"{n} choices: {answer}")
                self._expect(usage["completion_tokens"] <= n * tokens, f"too long: {usage}")
            case Kind.LONG:
                words = " ".join(str(draw.randrange(10_000)) for _ in range(draw.randint(50, 250)))
                body = {"messages": [{"role": "user", "content": words}], "max_tokens": 8}
                answer = await self._answer(session, body)
                self._expect(answer["usage"]["prompt_tokens"] > 100, f"{answer['usage']}")
            case Kind.CANCELLED:
                await self._left(session, chat)
            case Kind.REFUSED:
                body = draw.choice(
                    [
                        {"messages": "none"},
                        {**self._body(chat), "temperature": -1},
                        {**self._body(chat), "max_tokens": "many"},
                        {"messages": [{"role": "user", "content": "9 " * 9_000}]},
                    ]
                )
                status, answer = await self._post(session, body)
                refused = status == 400 and answer["error"]["message"]
                self._expect(bool(refused), f"{status}: {answer}")

    async def _checked(self, session: aiohttp.ClientSession, chat: Chat) -> None:
        body = {**self._body(chat), **chat.fields, "temperature": 0}
        if self._random.random() < 0.5:
            answer = await self._answer(session, body)
            choice = answer["choices"][0]
            text, logprob = (
                choice["message"]["content"],
                choice["logprobs"]["content"][0]["logprob"],
            )
        else:
            text, logprob, answer = await self._streamed(session, body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.tally.cached_tokens += cached
        self._expect(text == chat.answer, f"{text!r} with {cached} cached, not {chat.answer!r}")
        self._expect(abs(logprob - chat.logprob) <= NEAR, f"{logprob}, not {chat.logprob}")

    async def _left(self, session: aiohttp.ClientSession, chat: Chat) -> None:
        """Gone after some events, or after some time, or at once."""
        body = {**self._body(chat), "max_tokens": 200, "stream": self._random.random() < 0.6}
        patience = self._random.choice([0.0, 0.01, 0.05, 0.2])
        events = self._random.randint(0, 20)
        try:
            async with asyncio.timeout(patience or None):
                async with self._sent(session, body) as answer:
                    async for _ in answer.content:
                        events -= 1
                        if events < 0:
                            return
        except TimeoutError:
            pass

    async def _streamed(
        self, session: aiohttp.ClientSession, body: dict[str, Any]
    ) -> tuple[str, float, dict[str, Any]]:
        """(text, logprob of its first token, its last event)"""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        while True:
            text, logprobs, last = "", list[float](), dict[str, Any]()
            async with self._sent(session, body) as answer:
                if answer.status == 429:
                    await self._wait(answer)
                    continue
                lines = [line async for line in answer.content]
            events = [line.decode().strip().removeprefix("data: ") for line in lines]
            self._expect("[DONE]" in events, f"a stream without its end: {events[-3:]}")
            for event in (json.loads(one) for one in events if one.startswith("{")):
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    told = (choice.get("logprobs") or {}).get("content") or ()
                    logprobs += [one["logprob"] for one in told]
                last = event
            return text, logprobs[0], last

    async def _answer(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self._post(session, body)
        if status != 200:
            raise ValueError(f"{status}: {answer}")
        return answer

    async def _post(
        self, session: aiohttp.ClientSession, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        while True:
            async with self._sent(session, body) as answer:
                if answer.status != 429:
                    return answer.status, await answer.json()
                await self._wait(answer)

    async def _wait(self, answer: aiohttp.ClientResponse) -> None:
        self.tally.turned_away += 1
        self._expect(int(answer.headers["Retry-After"]) > 0, "429 does not say how long to wait")
        await asyncio.sleep(0.1)

    def _sent(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
        return session.post(f"{self.server.url}/v1/chat/completions", json=body)

    @staticmethod
    def _body(chat: Chat) -> dict[str, Any]:
        return {"messages": chat.body, **({"cache_salt": chat.salt} if chat.salt else {})}

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.tally.faults.append(otherwise)
