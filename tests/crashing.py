"""Lives of a server that end by SIGKILL, and what must hold in each next one.

Every answer is compared with that of a server without any cache, which each chat is put to once.
Some clients stream; what a kill cuts off must be the beginning of the right answer. After each
death the files are counted, and after each start the temporaries.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from tests.process import (
    Faulty,
    Message,
    Server,
    block_files,
    cached,
    files_under,
    first_logprob,
    said,
    temporaries,
    until,
    user,
    writer_of,
)

log = logging.getLogger(__name__)

ANSWER_TOKENS = 12
CLEAR = 1e-3
"""Chats with a closer runner-up at any token are left out: rounding could choose it."""
NEAR = 1e-4
"""Of the first token's logprob, in another batch than the oracle's."""
SALTS = ("", "a", "b")
"""One text stored three times over, so that there is more to store than there is room."""
CLIENTS = 4
LOCK_BYTES = 16
"""The lock holds a number; whether it counts is nobody's concern."""
LIMITS = (
    *("--paged-cache-block-size", "16", "--gdn-checkpoint-interval", "64"),
    *("--max-concurrent-requests", str(CLIENTS)),
)
WORDS = ("a", "small", "cat", "sat", "on", "the", "mat", "two", "red", "birds", "fly", "over", "it")


class Moment(Enum):
    """When a life ends."""

    START = "before it is ready"
    LOAD = "while it says that it loads"
    SERVE = "while it serves"
    WRITE = "with a file half written"
    DRAIN = "while it stops"


WEIGHTS = {Moment.START: 3, Moment.LOAD: 2, Moment.SERVE: 7, Moment.WRITE: 5, Moment.DRAIN: 3}


@dataclass(frozen=True)
class Chat:
    messages: tuple[tuple[str, str], ...]
    tokens: tuple[int, ...]
    answer: str
    logprob: float
    """Of the first token of the answer."""
    topic: int
    """Chats of one topic share their system part."""
    salt: str = ""

    @property
    def body(self) -> list[Message]:
        return [{"role": role, "content": content} for role, content in self.messages]

    @property
    def fields(self) -> dict[str, Any]:
        salt = {"cache_salt": self.salt} if self.salt else {}
        return {"max_tokens": ANSWER_TOKENS, "logprobs": True, **salt}


def make_chats(model: Path, home: Path, seed: int, topics: int) -> list[Chat]:
    """Conversations of three turns that share system parts and branch, answered without a cache."""
    from mlx_lm.tokenizer_utils import load as load_tokenizer  # imports MLX

    rng = random.Random(seed)
    tokenizer: Any = load_tokenizer(model)
    chats: list[Chat] = []

    def sentence(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, most)))

    def put(history: list[Message], question: str, topic: int) -> list[Message]:
        asked = [*history, *user(question)]
        answer = oracle.chat(asked, max_tokens=ANSWER_TOKENS, logprobs=True, top_logprobs=2)
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True)
        assert answer["usage"]["prompt_tokens"] == len(prompt), "the prompt as the server sees it"
        if _runner_up(answer) > CLEAR:
            texts = tuple((m["role"], m["content"]) for m in asked)
            tokens = tuple(int(token) for token in prompt)
            chats.append(Chat(texts, tokens, said(answer), first_logprob(answer), topic))
        return [*asked, {"role": "assistant", "content": said(answer)}]

    with Server(model, home, "--no-cache", *LIMITS).wait_ready() as oracle:
        for topic in range(topics):
            system: Message = {"role": "system", "content": sentence(40)}
            for _ in range(2):
                first = put([system], sentence(30), topic)
                second = put(first, sentence(20), topic)
                put(second, sentence(20), topic)
                put(first, sentence(20), topic)  # it branches here
    return [replace(chat, salt=salt) for chat in chats for salt in SALTS]


def _runner_up(answer: dict[str, Any]) -> float:
    """The smallest distance of a second-best token."""
    gaps = [
        abs(one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"])
        for one in answer["choices"][0]["logprobs"]["content"]
    ]
    return min(gaps, default=0.0)


@dataclass
class Tally:
    kills: Counter[Moment] = field(default_factory=Counter)
    answers: int = 0
    streamed: int = 0
    interrupted: int = 0
    from_cache: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    files_found: int = 0
    """At all starts together."""
    files_lost: int = 0
    """There when a server had died and gone when the next was ready."""
    damaged: int = 0
    corrupt: int = 0
    """Files that the servers said were damaged."""
    evicted: int = 0
    torn: int = 0
    """Temporaries that kills left behind."""
    most_bytes: int = 0
    starts_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Crashes:
    """One cache directory and the servers that live and die on it."""

    def __init__(
        self,
        model: Path,
        home: Path,
        chats: Sequence[Chat],
        *,
        seed: int,
        ssd_bytes: int,
        hot_bytes: int,
        damage: bool = False,
    ) -> None:
        self._model, self._home, self._chats = model, home, chats
        self._cache = home / "cache"
        self._rng = random.Random(seed)
        self._ssd_bytes, self._damage = ssd_bytes, damage
        self._options = (
            *LIMITS,
            *("--ssd-cache-max-size", f"{ssd_bytes}B", "--ssd-free-space-floor", "0"),
            *("--hot-cache-max-size", f"{hot_bytes}B"),
        )
        self.tally = Tally(starts_s=[2.0])
        self._asked: set[Chat] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._largest = 0

    def kill_many(self, kills: int) -> None:
        """As many lives, each killed at some moment, then one that ends well."""
        for moment in self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=kills):
            self.kill_at(moment)
            if self.tally.kills.total() % 10 == 0:
                log.info("%d kills, %d wrong", self.tally.kills.total(), len(self.tally.wrong))
        self.end_well()

    def kill_at(self, moment: Moment) -> None:
        """One life."""
        before = block_files(self._cache)
        began = time.monotonic()
        with self._start() as server:
            if moment is Moment.START:
                until(lambda: False, self._rng.uniform(0, self.tally.starts_s[-1]))
            elif moment is Moment.LOAD:
                until(lambda: server.health() != "unreachable" or not server.alive)
                until(lambda: False, self._rng.uniform(0, 0.1))
            else:
                server.wait_ready()
                self.tally.starts_s.append(time.monotonic() - began)
                self._look_after_start(server, before)
                self._serve_until(server, moment)
            server.kill()
        self.tally.kills[moment] += 1
        self._look_after_death()
        if self._damage:
            self._damage_some()

    def end_well(self) -> None:
        """The last life: every chat once more, then the books against the files, then a stop."""
        before = block_files(self._cache)
        with self._start().wait_ready() as server:
            self._look_after_start(server, before)
            self._all_ask(server, self._chats)
            self._demand(until(server.settled), "writes were still waiting long after the end")
            until(lambda: abs(self._unaccounted(server)) <= LOCK_BYTES, 10)
            left = self._unaccounted(server)
            same = abs(left) <= LOCK_BYTES
            self._demand(same, f"ssd_bytes differs from the files' bytes by {left}")
            self._take_counters(server)
            try:
                server.stop()
            except Faulty as fault:
                self._demand(False, str(fault))
        self._look_after_death()
        self._demand(not temporaries(self._cache), "a polite end left a temporary")
        if not self._damage:
            self._demand(self.tally.corrupt == 0, "files were corrupt although nobody damaged them")

    # ── one life ─────────────────────────────────────────────────────────────────────────────

    def _start(self) -> Server:
        self._ending.clear()
        return Server(self._model, self._home, *self._options)

    def _serve_until(self, server: Server, moment: Moment) -> None:
        """Let the clients loose, and leave the server when its moment has come."""
        topic = self._rng.choice([chat.topic for chat in self._chats])
        clients = [
            threading.Thread(target=self._ask_on, args=(server, topic, self._rng.random()))
            for _ in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            until(lambda: self._ending.is_set(), self._rng.uniform(0.2, 1.5))
            self._take_counters(server)
            if moment is Moment.WRITE:
                self._stop_in_a_write(server)
            self._ending.set()
            if moment is Moment.DRAIN:
                server.send(signal.SIGTERM)
                until(lambda: not server.alive, self._rng.uniform(0, 0.3))
                self._demand(server.process.poll() in (None, 0), "a polite end failed")
        finally:
            self._ending.set()
            server.kill()
            for client in clients:
                client.join()

    def _stop_in_a_write(self, server: Server) -> None:
        """Freeze it until a temporary shows that a file is being written. It stays frozen."""
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s and not self._ending.is_set():
            server.send(signal.SIGSTOP)
            if temporaries(self._cache):
                return
            server.send(signal.SIGCONT)
            until(lambda: False, self._rng.uniform(0, 0.01))

    def _ask_on(self, server: Server, topic: int, seed: float) -> None:
        """A client: chats of one topic mostly, one after another, until the end is near."""
        rng = random.Random(seed)
        ours = [chat for chat in self._chats if chat.topic == topic]
        while not self._ending.is_set():
            self._ask(server, rng.choice(ours if rng.random() < 0.6 else self._chats), rng)

    def _all_ask(self, server: Server, chats: Sequence[Chat]) -> None:
        queue = list(chats)

        def client(seed: int) -> None:
            rng = random.Random(seed)
            while True:
                with self._lock:
                    if not queue:
                        return
                    chat = queue.pop()
                self._ask(server, chat, rng)

        clients = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()

    def _ask(self, server: Server, chat: Chat, rng: random.Random) -> None:
        with self._lock:
            storable = self._storable(chat)
            self._asked.add(chat)
        parts: list[str] = []
        try:
            if rng.random() < 0.4:
                answer = self._streamed(server, chat, parts)
            else:
                answer = server.chat(chat.body, **chat.fields)
        except (Faulty, OSError, HTTPException, ValueError) as error:
            self._cut_off(chat, "".join(parts), error)
            return
        with self._lock:
            self._check(chat, answer, storable)

    def _streamed(self, server: Server, chat: Chat, parts: list[str]) -> dict[str, Any]:
        """A whole answer out of its pieces, which are in ``parts`` as far as they came."""
        tokens: list[Any] = []
        usage: dict[str, Any] | None = None
        for event in server.stream(chat.body, **chat.fields):
            if "error" in event:
                raise Faulty(event["error"].get("code") or str(event["error"]))
            for choice in event["choices"]:
                parts.append(choice["delta"].get("content") or "")
                tokens += (choice.get("logprobs") or {}).get("content") or []
            usage = event.get("usage") or usage
        with self._lock:
            self.tally.streamed += 1
        choice = {"message": {"content": "".join(parts)}, "logprobs": {"content": tokens}}
        return {"choices": [choice], "usage": usage}

    def _storable(self, chat: Chat) -> int:
        """The most tokens of a chat that can have been stored: what it shares with any asked."""
        most = 0
        for other in self._asked:
            if other.salt == chat.salt:
                shared = _common(other.tokens, chat.tokens)
                turn = ANSWER_TOKENS if shared == len(other.tokens) else 0
                most = max(most, shared + turn)
        return min(most, len(chat.tokens) - 1)

    # ── what must hold ───────────────────────────────────────────────────────────────────────

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            self.tally.wrong.append(what)
            self._ending.set()

    def _check(self, chat: Chat, answer: dict[str, Any], storable: int) -> None:
        tally, reused = self.tally, cached(answer)
        tally.answers += 1
        tally.from_cache += reused > 0
        tally.cached_tokens += reused
        tally.prompt_tokens += len(chat.tokens)
        text = said(answer)
        self._demand(text == chat.answer, f"{text!r} instead of {chat.answer!r}")
        moved = abs(first_logprob(answer) - chat.logprob)
        self._demand(moved <= NEAR, f"the first token's logprob is off by {moved}")
        self._demand(reused <= storable, f"{reused} tokens cached, {storable} can be stored")

    def _cut_off(self, chat: Chat, so_far: str, error: Exception) -> None:
        with self._lock:
            if not self._ending.is_set():
                code = f" {error.read()!r}" if isinstance(error, HTTPError) else ""
                self._demand(False, f"a request failed in a server that lives: {error!r}{code}")
            self.tally.interrupted += 1
            self._demand(chat.answer.startswith(so_far), f"cut off, and wrong: {so_far!r}")

    def _look_after_start(self, server: Server, before: dict[Path, int]) -> None:
        left = [path for path in temporaries(self._cache) if writer_of(path) != server.process.pid]
        self._demand(not left, f"temporaries of a dead server: {left}")
        found = set(block_files(self._cache))
        self.tally.files_found += len(found & before.keys())
        gone = before.keys() - found
        # A kill between a write and the removal that makes room for it leaves that to the start.
        largest = max([self._largest, *before.values()])
        if sum(before.values()) + largest <= self._ssd_bytes:
            self.tally.files_lost += len(gone)

    def _look_after_death(self) -> None:
        """Nothing moves now: what is there must be within the limit, give or take one file."""
        sizes = files_under(self._cache)
        self.tally.torn += len(temporaries(self._cache))
        self._largest = max([self._largest, *block_files(self._cache).values()])
        nbytes = sum(sizes.values())
        self.tally.most_bytes = max(self.tally.most_bytes, nbytes)
        room = self._ssd_bytes + self._largest
        self._demand(nbytes <= room, f"{nbytes} bytes on disk, the limit is {self._ssd_bytes}")

    def _take_counters(self, server: Server) -> None:
        """Of a life, once, shortly before it ends."""
        counters = server.stats()["cache"]
        self.tally.corrupt += counters["corrupt_blocks"]
        self.tally.evicted += counters["evictions_ssd"]
        state = counters["tier_state"]
        # In its first second a server has reported nothing, which reads "off".
        self._demand(state in ("ok", "off"), f"tier_state is {state}")

    def _unaccounted(self, server: Server) -> int:
        """Bytes of the files less what the server says."""
        return sum(files_under(self._cache).values()) - server.stats()["cache"]["ssd_bytes"]

    # ── damage ───────────────────────────────────────────────────────────────────────────────

    def _damage_some(self) -> None:
        paths = sorted(block_files(self._cache))
        for path in self._rng.sample(paths, min(len(paths), self._rng.randint(1, 4))):
            self.tally.damaged += 1
            data = bytearray(path.read_bytes())
            match self._rng.choice(["truncate", "zero", "flip", "rename"]):
                case "truncate":
                    path.write_bytes(data[: self._rng.randrange(len(data))])
                case "zero":
                    path.write_bytes(bytes(len(data)))
                case "flip":
                    data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                    path.write_bytes(data)
                case "rename":
                    path.replace(self._rng.choice(paths))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
