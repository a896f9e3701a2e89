"""Which part of a prompt differs from that of an earlier request, and what that cost. Pure.

Of a prompt its fingerprint is kept: hashes of its parts and counts, no text. A prefix is reused
only up to the first difference, so the first part that differs says why:

    salt       another salt: nothing is shared, on purpose
    tools      a tool was added, taken away, changed or moved
    system     another system text
    messages   a turn that was there before reads differently now
    options    the same words, and other variables for the template
    template   all of that is the same, and the template made something else of it

A prompt that goes on where the earlier one ended differs in nothing. Nor is anything said of
prompts that are no conversations, or that have no turn in common.

How many tokens two prompts share is known to within ``STRIDE``: of every so many tokens there is
a mark, a hash of all tokens up to there.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from omlx.cache.blocks import TOKEN_BYTES, pack_tokens
from omlx.core.chat import SYSTEM_ROLES, ChatMessage, Conversation

STRIDE = 16
"""Tokens between two marks."""

HASH_BYTES = 8

CLOSING_TOKENS = 2 * STRIDE
"""Of the earlier prompt's end these may differ without a reason: it ends with the beginning of an
answer, which reads differently once the answer is a turn; and ``STRIDE`` are not known."""

FINGERPRINTS_MAX = 512
MARKS_BYTES_MAX = 4_000_000
"""Of all fingerprints: about 8 million tokens."""


class Section(StrEnum):
    SALT = "salt"
    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGES = "messages"
    OPTIONS = "options"
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True)
class Occasion:
    """What a prompt comes with, besides the conversation."""

    salt: str = ""
    group: str = ""
    """Requests of one group are of one conversation, whatever they have in common."""
    compare_with: str | None = None
    """Of the request to compare with; None: of those that are remembered, the one most like it."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    salt: bytes
    group: bytes
    options: bytes
    thinking: bytes
    """Of the options, those that say how much to think."""
    tools: tuple[bytes, ...]
    system: bytes
    messages: tuple[bytes, ...]
    """All but system messages."""
    marks: bytes
    num_tokens: int

    def shared_tokens(self, other: Fingerprint) -> int:
        """Tokens that both begin with, rounded down to ``STRIDE``."""
        most = min(len(self.marks), len(other.marks)) // HASH_BYTES

        def differ(index: int) -> bool:
            at = slice(index * HASH_BYTES, (index + 1) * HASH_BYTES)
            return self.marks[at] != other.marks[at]

        # A mark covers all tokens before it, so once two differ all later ones do.
        return STRIDE * bisect_left(range(most), True, key=differ)


@dataclass(frozen=True, slots=True)
class Change:
    """The first part in which a prompt differs from an earlier one."""

    since: str
    """The id of the earlier request."""
    section: Section
    shared_tokens: int
    reusable_tokens: int
    """Of the earlier prompt, had nothing changed."""
    message: int | None = None
    """Of messages: which turn, system messages not counted."""
    reordered: bool = False
    """Of tools: the same ones in another order."""
    thinking: bool = False
    """Of options: how much to think, and nothing else."""

    def missed_tokens(self, cached_tokens: int) -> int:
        """Tokens that would have been reused as well, had nothing changed."""
        return max(0, self.reusable_tokens - max(self.shared_tokens, cached_tokens))

    def as_json(self, cached_tokens: int) -> dict[str, Any] | None:
        """For the answer; None when it cost nothing after all."""
        missed = self.missed_tokens(cached_tokens)
        if not missed:
            return None
        found: dict[str, Any] = {"section": self.section.value, "since": self.since}
        if self.message is not None:
            found["message"] = self.message
        if self.reordered:
            found["reordered"] = True
        return {**found, "token": self.shared_tokens, "missed_tokens": missed}


@dataclass(frozen=True, slots=True)
class Comparison:
    """With one earlier request."""

    reusable_tokens: int
    """Of the earlier prompt, if nothing has changed."""
    change: Change | None
    """None: it goes on where the earlier prompt ended, or repeats it."""


def fingerprint(
    conversation: Conversation, tokens: Sequence[int], occasion: Occasion
) -> Fingerprint:
    """Breakpoints, ids of calls and thoughts are left out: clients change them from turn to turn,
    and few templates show them."""
    tools: list[Any] = json.loads(conversation.tools) if conversation.tools else []
    options: dict[str, Any] = json.loads(conversation.template_options or "{}")
    thinking = {name: options.pop(name) for name in _THINKING if name in options}
    system = [m.text for m in conversation.messages if m.role in SYSTEM_ROLES]
    turns = (m for m in conversation.messages if m.role not in SYSTEM_ROLES)
    return Fingerprint(
        salt=_hash(occasion.salt),
        group=_hash(occasion.group) if occasion.group else b"",
        options=_hash(options),
        thinking=_hash(thinking),
        tools=tuple(map(_hash, tools)),
        system=_hash(system),
        messages=tuple(map(_hash_of_turn, turns)),
        marks=_marks(tokens),
        num_tokens=len(tokens),
    )


class Diagnosis:
    """The fingerprints of the last requests; the oldest go first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Fingerprint] = OrderedDict()
        self._marks_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, name: str, print_: Fingerprint) -> None:
        self._forget(name)
        self._known[name] = print_
        self._marks_bytes += len(print_.marks)
        while len(self._known) > FINGERPRINTS_MAX or self._marks_bytes > MARKS_BYTES_MAX:
            self._forget(next(iter(self._known)))

    def compare(self, now: Fingerprint, name: str) -> Comparison | None:
        """With the request of this id; None when it is not known, or not any more."""
        earlier = self._known.get(name)
        if earlier is None:
            return None
        reusable = min(earlier.num_tokens, now.num_tokens - 1)
        return Comparison(reusable, _first_change(name, reusable, earlier, now))

    def compare_with_best(self, now: Fingerprint) -> Comparison | None:
        """With the request most like it, of two alike the later; None when none is of the same
        conversation: its first turn is the same, or its group."""
        alike = [
            (now.shared_tokens(earlier), _num_same(earlier.messages, now.messages), place, name)
            for place, (name, earlier) in enumerate(self._known.items())
            if earlier.salt == now.salt and _of_one_conversation(earlier, now)
        ]
        return self.compare(now, max(alike)[-1]) if alike else None

    def _forget(self, name: str) -> None:
        gone = self._known.pop(name, None)
        self._marks_bytes -= len(gone.marks) if gone else 0


def _first_change(
    name: str, reusable: int, earlier: Fingerprint, now: Fingerprint
) -> Change | None:
    if earlier.salt != now.salt:
        return Change(name, Section.SALT, 0, reusable)
    shared = now.shared_tokens(earlier)
    if earlier.tools != now.tools:
        reordered = sorted(earlier.tools) == sorted(now.tools)
        return Change(name, Section.TOOLS, shared, reusable, reordered=reordered)
    if earlier.system != now.system:
        return Change(name, Section.SYSTEM, shared, reusable)
    same = _num_same(earlier.messages, now.messages)
    if same < min(len(earlier.messages), len(now.messages)):
        return Change(name, Section.MESSAGES, shared, reusable, message=same)
    if reusable - shared <= CLOSING_TOKENS:
        return None
    if (earlier.options, earlier.thinking) != (now.options, now.thinking):
        thinking = earlier.options == now.options
        return Change(name, Section.OPTIONS, shared, reusable, thinking=thinking)
    return Change(name, Section.TEMPLATE, shared, reusable)


def _of_one_conversation(earlier: Fingerprint, now: Fingerprint) -> bool:
    same_group = bool(now.group) and earlier.group == now.group
    return same_group or earlier.messages[:1] == now.messages[:1] != ()


def _num_same(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many they begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


_THINKING = ("reasoning_effort", "enable_thinking", "thinking_budget")


def _hash_of_turn(message: ChatMessage) -> bytes:
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return _hash([message.role, message.name, message.text, calls])


def _hash(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True)  # ASCII, so half a character is no trouble
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def _marks(tokens: Iterable[int]) -> bytes:
    packed = memoryview(pack_tokens(tokens))
    step = STRIDE * TOKEN_BYTES
    running = blake2b(digest_size=HASH_BYTES)
    marks = bytearray()
    for end in range(step, len(packed) + 1, step):
        running.update(packed[end - step : end])
        marks += running.copy().digest()
    return bytes(marks)
