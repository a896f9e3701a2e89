"""Texts of requests, for a person who looks for what differs. Off, unless switched on.

They are in memory only, of the newest ``KEPT_MAX`` requests at most ``TEXT_MAX`` characters of
each side, and are forgotten when it is switched off and when the server ends. No log, file, metric
or list of requests holds them: only the answer to somebody who asks for one request's text.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

KEPT_MAX = 50
TEXT_MAX = 200_000
"""Characters, some 50,000 tokens, of a prompt, and of all its answers together."""


@dataclass(slots=True)
class Text:
    """Of one request, as the model reads and writes it."""

    prompt: str
    answers: dict[int, str] = field(default_factory=dict)
    """By choice."""
    cut: bool = False
    """It was longer than ``TEXT_MAX``."""

    def add(self, index: int, more: str) -> None:
        room = TEXT_MAX - sum(map(len, self.answers.values()))
        self.cut = self.cut or len(more) > room
        self.answers[index] = self.answers.get(index, "") + more[:room]


class Captures:
    """``on``: whether texts are kept from now on."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, Text] = OrderedDict()
        self._on = False

    @property
    def on(self) -> bool:
        return self._on

    def switch(self, on: bool) -> None:
        """Off forgets everything that was kept."""
        self._on = on
        if not on:
            self._texts.clear()

    def begin(self, request_id: str, prompt: str) -> Text | None:
        """Where the answer is to be added; None while it is off."""
        if not self._on:
            return None
        text = Text(prompt[:TEXT_MAX], cut=len(prompt) > TEXT_MAX)
        self._texts[request_id] = text
        while len(self._texts) > KEPT_MAX:
            self._texts.popitem(last=False)
        return text

    def find(self, request_id: str) -> Text | None:
        return self._texts.get(request_id)

    def ids(self) -> list[str]:
        """Of the requests whose texts are kept, the oldest first."""
        return list(self._texts)
