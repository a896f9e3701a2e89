"""What a check has to say: how bad it is, what was found, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``level``: a *problem* keeps a server from starting or from working as its settings ask.

    A *warning* makes it slower, less safe, or other than one may expect.
    """

    area: str
    level: Level
    text: str
    advice: str = ""
    """One sentence: what to do. Never empty unless the level is ok."""


def ok(area: str, text: str) -> Finding:
    return Finding(area, "ok", text)


def warning(area: str, text: str, advice: str) -> Finding:
    return Finding(area, "warning", text, advice)


def problem(area: str, text: str, advice: str) -> Finding:
    return Finding(area, "problem", text, advice)
