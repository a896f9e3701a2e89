"""Tokens to text, as it may be shown: whole characters, no control tokens, no stop strings.

Text is held back only while it may still turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Gives whole characters only; what is incomplete waits for the next token."""

    def add_token(self, token: int, /) -> None: ...

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str: ...


class TextStream:
    """The text of one sequence. ``stopped`` is set once a stop string is complete."""

    def __init__(
        self, detokenizer: Detokenizer, *, stops: Sequence[str], hidden: Collection[int]
    ) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._hidden = hidden
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Add a token; returns the text that can be shown now."""
        if self.stopped is not None or token in self._hidden:
            return ""
        self._detokenizer.add_token(token)
        return self._release(self._detokenizer.last_segment)

    def finish(self) -> str:
        """The rest of the text, once no token will follow."""
        if self.stopped is not None:
            return ""
        self._detokenizer.finalize()
        shown = self._release(self._detokenizer.last_segment)
        if self.stopped is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _release(self, segment: str) -> str:
        if not self._stops:
            return segment
        text = self._held + segment
        # The match that is complete first wins, or it would depend on how the text is cut into
        # tokens; of those that end at one place, the longest.
        matches = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if matches:
            _, at, self.stopped = min(matches)
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop)), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
