"""What an answer consists of: text, thoughts, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """What is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallText:
    """What stands between the markers of a call, whole: one call, or several, or neither."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, as the client sent it or the model meant it."""


Spoken = Text | Thought | CallText
"""What comes of tokens."""

Piece = Spoken | ToolCall
"""What comes to a dialect, which gets no CallText."""


def text_of(pieces: Iterable[Piece]) -> str:
    """What is said to the user."""
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def thought_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Thought))


def calls_of(pieces: Iterable[Piece]) -> list[ToolCall]:
    return [piece for piece in pieces if isinstance(piece, ToolCall)]


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, neighbours of one kind put together: however they came, it is one answer."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        match last, piece:
            case (Text(before), Text(after)):
                found[-1] = Text(before + after)
            case (Thought(before), Thought(after)):
                found[-1] = Thought(before + after)
            case _:
                found.append(piece)
    return found
