"""A conversation to token ids, so that no text of a client can pose as a control token.

The template is rendered to text and the text encoded with the tokenizer's control tokens; but
where something *of the client* contains the spelling of one, be it in a message, a tool or an
option, that spelling is encoded as the plain text it is.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from omlx.core.chat import (
    SYSTEM_ROLES,
    Conversation,
    TemplateRefused,
    has_unreadable_calls,
    template_messages,
)

# Private-use characters around a number stand for a spelling while the template is rendered.
_OPEN, _CLOSE = "\ue0b0", "\ue0b1"
_MARKS = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

_OTHER_WORDS = ("Zq", "7")
"""Two beginnings that have no first token in common."""

BREAKPOINTS_MAX = 4
"""As many as the makers of the field allow; each costs two renderings of what is before it."""


class AddedToken(Protocol):
    @property
    def special(self) -> bool:
        """Whether it is a control token. Others, such as <think>, are words of the model."""
        ...


class ChatTokenizer(Protocol):
    """What is used of mlx-lm's tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def apply_chat_template(self, messages: Any, /, **options: Any) -> Any: ...

    def encode(self, text: str, /, **options: Any) -> list[int]: ...

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...


def render(tokenizer: ChatTokenizer, conversation: Conversation) -> tuple[str, list[int]]:
    """The prompt as text and as ids, generation prompt added. Raises TemplateRefused."""
    return _encoded(tokenizer, _drawn(tokenizer, conversation))


def _drawn(tokenizer: ChatTokenizer, conversation: Conversation) -> str:
    """The prompt as text, with marks in place of spellings. Raises TemplateRefused."""
    spellings = _spellings(tokenizer)
    options = json.loads(conversation.template_options or "{}")
    tools = json.loads(conversation.tools) if conversation.tools else None
    template = getattr(tokenizer, "chat_template", None)
    knows_calls = not isinstance(template, str) or "tool_calls" in template

    def applied(*, unreadable_as_text: bool) -> str:
        messages = template_messages(
            conversation, calls_as_text=not knows_calls, unreadable_as_text=unreadable_as_text
        )
        return tokenizer.apply_chat_template(
            _masked(messages, spellings),
            tools=_masked(tools, spellings),
            add_generation_prompt=True,
            tokenize=False,
            **_masked(options, spellings),
        )

    try:
        try:
            return applied(unreadable_as_text=False)
        except Exception:
            if not any(map(has_unreadable_calls, conversation.messages)):
                raise
            return applied(unreadable_as_text=True)
    except Exception as error:  # templates raise whatever their author chose
        raise TemplateRefused(f"the model's chat template refuses it: {error}") from None


def _encoded(tokenizer: ChatTokenizer, text: str) -> tuple[str, list[int]]:
    """What a text with marks stands for, and its ids."""
    spellings = _spellings(tokenizer)
    ids: list[int] = []
    prompt: list[str] = []
    for index, part in enumerate(_MARKS.split(text)):
        literal = index % 2 == 1
        piece = spellings[int(part)] if literal else part
        if piece:
            prompt.append(piece)
            ids += tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=literal)
    return "".join(prompt), ids


def _spellings(tokenizer: ChatTokenizer) -> list[str]:
    """Of control tokens: the longest first, or "<a>" would be found in "<<a>>"; and what a mark
    begins with."""
    control = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return [*sorted(control, key=lambda one: (-len(one), one)), _OPEN]


def tokenize(
    tokenizer: ChatTokenizer, text: str, *, add_special: bool, parse_special: bool
) -> list[int]:
    """The ids of raw text.

    ``add_special``: with what the tokenizer puts around a text. ``parse_special``: the spelling of
    a control token is that token.
    """
    return tokenizer.encode(
        text, add_special_tokens=add_special, split_special_tokens=not parse_special
    )


def detokenize(tokenizer: ChatTokenizer, tokens: Sequence[int]) -> str:
    """The text of ids, control tokens spelled out."""
    return tokenizer.decode(list(tokens), skip_special_tokens=False)


def landmarks(
    tokenizer: ChatTokenizer, conversation: Conversation, tokens: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """How many tokens of a rendered prompt stand before what its first user wrote, and before
    each of its cache breakpoints: of the last ``BREAKPOINTS_MAX``, in rising order.

    The first is the part that another conversation with the same system text and tools shares; 0
    when nobody knows. A breakpoint that ends the system text is that place: tools may stand behind
    it. What comes out need not be exact, for a prompt can be cut anywhere.
    """
    first = next((i for i, m in enumerate(conversation.messages) if m.role == "user"), None)
    breaks = _breakpoints(conversation)[-BREAKPOINTS_MAX:]
    if first is None and not breaks:
        return 0, ()
    text = _drawn(tokenizer, conversation)
    spelled = re.compile("|".join(map(re.escape, _spellings(tokenizer)[:-1])) or "$^")
    control = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    parting = [at for at, token in enumerate(tokens) if token in control]

    def tokens_before(index: int, kept: tuple[str, ...]) -> int:
        shared = _shared(tokenizer, conversation, text, index, kept)
        # Control tokens part a text whatever stands around them, so only what follows the last one
        # is to be encoded. A client's are marks here, so each that is spelled is one of the tokens.
        parts = list(spelled.finditer(shared))
        start = parting[len(parts) - 1] + 1 if 0 < len(parts) <= len(parting) else 0
        _, ids = _encoded(tokenizer, shared[parts[-1].end() :] if start else shared)
        pairs = zip(tokens[start:], ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return start + (min(len(tokens) - start, len(ids)) if same is None else same)

    hints = {tokens_before(index, kept) for index, kept in breaks}
    num_system = 0 if first is None else tokens_before(first, ())
    return num_system, tuple(sorted(hints - {0}))


def _breakpoints(conversation: Conversation) -> list[tuple[int, tuple[str, ...]]]:
    """Of each the message that it stands in, and the parts before it; or the next message."""
    messages = conversation.messages
    system = [i for i, message in enumerate(messages) if message.role in SYSTEM_ROLES]
    found: list[tuple[int, tuple[str, ...]]] = []
    if conversation.break_after_tools and system:
        found.append((system[0], ()))
    for index, message in enumerate(messages):
        for count in message.breaks:
            if index == max(system, default=-1) and count >= len(message.parts):
                continue
            if count <= len(message.parts):
                found.append((index, message.parts[:count]))
            elif index + 1 < len(messages):
                found.append((index + 1, ()))
    return found


def _shared(
    tokenizer: ChatTokenizer,
    conversation: Conversation,
    text: str,
    index: int,
    kept: tuple[str, ...],
) -> str:
    """What of a drawn prompt others have as well whose message ``index`` goes on differently
    after the parts ``kept``; nothing when that can't be said.

    The beginning is drawn twice more, with other words in that place, so it holds for every
    template.
    """
    message = conversation.messages[index]
    reasoning = message.reasoning if kept else None
    for words in _OTHER_WORDS:
        other = replace(message, content=(*kept, words), tool_calls=(), reasoning=reasoning)
        head = replace(conversation, messages=(*conversation.messages[:index], other))
        try:
            text = _common(text, _drawn(tokenizer, head))
        except TemplateRefused:
            return ""
    half_a_mark = text.rfind(_OPEN) > text.rfind(_CLOSE)
    return text[: text.rfind(_OPEN)] if half_a_mark else text


def _common(one: str, other: str) -> str:
    """What both begin with."""
    most = min(len(one), len(other))
    return one[: bisect_left(range(most), True, key=lambda n: not other.startswith(one[: n + 1]))]


def _masked(value: Any, spellings: list[str]) -> Any:
    """``value`` with a mark in place of each spelling, in every text that it holds."""
    mark = {spelling: f"{_OPEN}{index}{_CLOSE}" for index, spelling in enumerate(spellings)}
    pattern = re.compile("|".join(map(re.escape, spellings)))

    def masked(value: Any) -> Any:
        match value:
            case str():
                return pattern.sub(lambda found: mark[found[0]], value)
            case list():
                return [masked(item) for item in value]
            case dict():
                return {masked(key): masked(item) for key, item in value.items()}
        return value

    return masked(value)
