"""Tokens to what may be shown: whole characters, no control tokens, no markup, no stop strings.

Text is held back only while it may still turn out to be the beginning of a stop string or of a
marker, or a line break before one: line breaks next to a marker belong to the markup, as
templates put them there. A call is held back until it is whole.

Stop strings end what is said to the user. They are not looked for in thoughts and in calls: a
client that stops at an empty line means the answer's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from omlx.core.markup import CALL, CONTENT, PLAIN, REASONING, Markup, Reader, overlap
from omlx.core.pieces import CallText, Spoken, Text, Thought


class Detokenizer(Protocol):
    """Gives whole characters only; what is incomplete waits for the next token."""

    def add_token(self, token: int, /) -> None: ...

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str: ...


class TextStream:
    """The text of one sequence. ``stopped`` is set once a stop string is complete."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        hidden: Collection[int],
        markup: Markup = PLAIN,
    ) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._hidden = hidden
        self._markup = markup
        self._reader = Reader(markup.edges, markup.initial)
        self._state = markup.initial
        self._call: list[str] = []
        self._held = ""
        """What may begin a stop string."""
        self._breaks = ""
        """Line breaks that may stand before a marker."""
        self._after_marker = markup.initial != CONTENT
        self._called = False
        self.stopped: str | None = None
        self.num_reasoning = 0
        """Tokens of thoughts, with the one that completes the marker at either end."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and no token should follow."""
        return self.stopped is not None or (self._called and self._markup.one_call)

    def push(self, token: int) -> tuple[Spoken, ...]:
        """Add a token; returns what can be shown now."""
        if self.ended:
            return ()
        before = self._reader.state
        pieces: list[Spoken] = []
        if token not in self._hidden or token in self._spelled:
            self._detokenizer.add_token(token)
            pieces = self._take(self._reader.read(self._detokenizer.last_segment))
        self.num_reasoning += REASONING in (before, self._reader.state)
        return tuple(pieces)

    def finish(self, *, complete: bool = True) -> tuple[Spoken, ...]:
        """The rest, once no token will follow.

        ``complete``: the model ended it. A call that was cut is no call, and is not shown: half of
        it can't be run, and its markup is no text.
        """
        pieces: list[Spoken] = []
        if not self.ended:
            self._detokenizer.finalize()
            pieces = self._take(self._reader.read(self._detokenizer.last_segment))
        if not self.ended:
            pieces += self._take(self._reader.finish())
        if not self.ended and self._state == CALL and complete:
            pieces += self._leave()
        if self.stopped is None:
            held, self._held = self._held, ""
            pieces += self._show(held)
        if self._state == CONTENT and self._breaks:
            pieces.append(Text(self._breaks))
        self._breaks = ""
        return tuple(pieces)

    @property
    def _spelled(self) -> Collection[int]:
        in_call = self._reader.state == CALL
        return self._markup.spelled_in_calls if in_call else self._markup.spelled

    def _take(self, read: list[tuple[str, str]]) -> list[Spoken]:
        pieces: list[Spoken] = []
        for state, text in read:
            if self.ended:
                break  # a stop string was complete before this marker
            if state != self._state:
                pieces += self._leave()
                self._state = state
            if self.ended:
                break
            if self._after_marker and state != CALL:
                text = text.lstrip("\n")
                self._after_marker = not text
            if state == CONTENT:
                pieces += self._show(self._until_stop(text))
            elif state == REASONING:
                pieces += self._show(text)
            elif state == CALL:
                self._call.append(text)
        return pieces

    def _leave(self) -> list[Spoken]:
        """A marker was read: what was held before it is sure, or belongs to it."""
        held, self._held = self._held, ""
        pieces = self._show(held)
        self._breaks, self._after_marker = "", True
        if self._state == CALL:
            pieces.append(CallText("".join(self._call)))
            self._call.clear()
            self._called = True
        return pieces

    def _show(self, text: str) -> list[Spoken]:
        """The text without line breaks that may stand before a marker."""
        if not text:
            return []
        if self._markup.edges:
            text = self._breaks + text
            shown = text.rstrip("\n")
            self._breaks = text[len(shown) :]
            text = shown
        kind = Thought if self._state == REASONING else Text
        return [kind(text)] if text else []

    def _until_stop(self, segment: str) -> str:
        if not self._stops:
            return segment
        text = self._held + segment
        # The match that is complete first wins, or it would depend on how the text is cut into
        # tokens; of those that end at one place, the longest.
        matches = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if matches:
            _, at, self.stopped = min(matches)
            self._held = ""
            return text[:at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
