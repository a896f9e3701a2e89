"""Figures for people: a table on a terminal, aligned plain text where it goes to a file or pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB")
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def size_text(nbytes: int) -> str:
    """``1.2 GB``; whole bytes below 1 kB."""
    amount = float(nbytes)
    for unit in _UNITS:
        if amount < 999.95 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("the last unit takes what is left")


def age_text(used_at: float | None, now: float) -> str:
    """How long ago, in one unit. Clocks that were wrong make it ``0 s``."""
    if used_at is None:
        return "-"
    age_s = max(0.0, now - used_at)
    for unit_s, unit in _AGES:
        if age_s >= unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print rows. The first ``left`` columns are words, the others numbers."""
    if sys.stdout.isatty():
        _rich_table(headings, rows, left)
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = [
            text.ljust(width) if index < left else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    from rich.console import Console  # takes a while, and most uses are in scripts
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        # A name is copied to be typed again, so it must be whole; the second column may wrap.
        justify = "left" if index < left else "right"
        made.add_column(heading, justify=justify, no_wrap=index != 1, min_width=4)
    for row in rows:
        made.add_row(*map(Text, row))
    Console().print(made)


class Progress:
    """One line on a terminal's stderr that replaces itself; nothing elsewhere."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()

    def say(self, text: str) -> None:
        if self._on:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def show_verified(result: Mapping[str, Any]) -> None:
    """Of a directory, or what a server answers."""
    for kind in ("corrupt", "unreadable", "orphans"):
        for bad in result.get(kind, ()):
            label = "orphan" if kind == "orphans" else kind
            print(f"{label}  {plain(bad['file'])}  {plain(bad['reason'])}")
    seconds = float(result["seconds"])
    rate = float(result["bytes"]) / 1e6 / seconds if seconds else 0.0
    print(
        f"{result['files']} files, {size_text(int(result['bytes']))} in {seconds:.1f} s "
        f"({rate:.0f} MB/s): {result['corrupt_files']} corrupt"
        + (f", {result['removed']} of them removed" if result.get("removed") else "")
    )
    for name, text in (
        ("unreadable_files", "could not be read, which says nothing about their bytes"),
        ("incompatible_files", "of another format version, not looked into"),
        ("unreachable_files", "sound, but no chain of sound files leads to them"),
        ("skipped", "could not be looked at"),
    ):
        if result.get(name):
            print(f"{result[name]} {text}")
    if not result.get("complete", True):
        print("stopped before the end")


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def plain(value: object) -> str:
    """What a server says, fit for a terminal."""
    text = str(value)
    return text if text.isprintable() else ascii(text)
