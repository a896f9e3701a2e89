"""Where a value came from, and how a message names it so that it can be found and corrected.

No message quotes a key: ``as_given`` leaves the value of a secret out. Other names and values
from outside go through ``quoted``, so a message stays one printable line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from omlx.settings.model import SECRETS

SourceKind = Literal["cli", "env", "file", "default"]
ErrorCode = Literal["invalid_value", "unknown_setting", "locked", "broken_file"]


class SettingsError(Exception):
    """The configuration cannot be used. The text is one line: what, from where, what to do.

    ``name`` is the setting, when it is about one.
    """

    def __init__(
        self, message: str, name: str | None = None, code: ErrorCode = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.name = name
        self.code: ErrorCode = code


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from. ``detail``: the variable, the flag, the file; empty for default."""

    kind: SourceKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()


def as_given(name: str, source: Source, value: object) -> str:
    """The setting as its source spells it, with its value unless that is secret."""
    shown = "" if name in SECRETS else quoted(value)
    match source.kind:
        case "cli" if isinstance(value, bool):
            return source.detail  # --no-cache says it all
        case "cli":
            return f"{source.detail} {shown}".rstrip()
        case "env":
            return f"{source.detail}={shown}" if shown else source.detail
        case _:
            return f"{name} {shown}".rstrip() + (f" ({source.detail})" if source.detail else "")


def quoted(value: object) -> str:
    """``value`` in printable ASCII, at most 80 characters of it."""
    text = ascii(value if isinstance(value, str | bool | int | float | None) else str(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: the known name that is closest to ``word``, if any is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."
