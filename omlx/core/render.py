"""A conversation to token ids, so that no text of a client can pose as a control token.

The template is rendered to text and the text encoded with the tokenizer's control tokens; but
where something *of the client* contains the spelling of one, be it in a message, a tool or an
option, that spelling is encoded as the plain text it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from omlx.core.chat import Conversation, TemplateRefused, template_messages

# Private-use characters around a number stand for a spelling while the template is rendered.
_OPEN, _CLOSE = "\ue0b0", "\ue0b1"
_MARKS = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

_OTHER_WORDS = ("Zq", "7")
"""Two beginnings that have no first token in common."""


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
    control = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    # The longest first, or "<a>" would be found in "<<a>>"; and what a mark begins with.
    spellings = [*sorted(control, key=len, reverse=True), _OPEN]
    options = json.loads(conversation.template_options or "{}")
    tools = json.loads(conversation.tools) if conversation.tools else None
    template = getattr(tokenizer, "chat_template", None)
    knows_calls = not isinstance(template, str) or "tool_calls" in template
    messages = template_messages(conversation, calls_as_text=not knows_calls)
    try:
        text = tokenizer.apply_chat_template(
            _masked(messages, spellings),
            tools=_masked(tools, spellings),
            add_generation_prompt=True,
            tokenize=False,
            **_masked(options, spellings),
        )
    except Exception as error:  # templates raise whatever their author chose
        raise TemplateRefused(f"the model's chat template refuses it: {error}") from None
    ids: list[int] = []
    prompt: list[str] = []
    for index, part in enumerate(_MARKS.split(text)):
        literal = index % 2 == 1
        piece = spellings[int(part)] if literal else part
        if piece:
            prompt.append(piece)
            ids += tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=literal)
    return "".join(prompt), ids


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


def system_tokens(
    tokenizer: ChatTokenizer, conversation: Conversation, tokens: Sequence[int]
) -> int:
    """How many tokens of a rendered prompt stand before what its first user wrote.

    That is the part that another conversation with the same system text and tools shares. It is
    found by rendering the beginning twice more, with other words in the user's place, so it holds
    for every template.
    """
    first = next((i for i, m in enumerate(conversation.messages) if m.role == "user"), None)
    if first is None:
        return 0
    shared = len(tokens)
    for words in _OTHER_WORDS:
        user = replace(conversation.messages[first], content=words)
        other = replace(conversation, messages=(*conversation.messages[:first], user))
        try:
            _, ids = render(tokenizer, other)
        except TemplateRefused:
            return 0
        pairs = zip(tokens, ids, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
    return min(shared, len(tokens))


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
