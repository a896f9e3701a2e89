"""What was found, as text for people and as JSON for scripts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from omlx import __version__
from omlx.budget import Budget, MemoryLine, memory_text
from omlx.doctor.facts import Disk, Mlx
from omlx.doctor.finding import Finding
from omlx.logs import printable
from omlx.settings import Loaded, describe

WIDTH = 100
_INDENT = 11
"""Columns before a finding's text: two, the longest level, two."""


@dataclass(frozen=True, slots=True)
class Report:
    findings: tuple[Finding, ...]
    loaded: Loaded
    budget: Budget | None
    """None when the model is not known, so nothing can be said of memory line by line."""
    lines: tuple[MemoryLine, ...]
    mlx: Mlx
    disk: Disk

    @property
    def num_problems(self) -> int:
        return sum(finding.level == "problem" for finding in self.findings)

    @property
    def num_warnings(self) -> int:
        return sum(finding.level == "warning" for finding in self.findings)

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """(name, value, source) of each that is set; a key's value is "set"."""
        return [
            (row.name, row.value or "none", row.source)
            for row in describe(self.loaded)
            if self.loaded.is_set(row.name)
        ]


def as_text(report: Report) -> str:
    return "\n".join(_text(report))


def _text(report: Report) -> Iterator[str]:
    yield f"omlx {__version__}"
    area = ""
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            yield ""
            yield area
        yield from _wrapped(f"  {finding.level:<7}  ", finding.text)
        if finding.advice:
            yield from _wrapped(" " * _INDENT, f"-> {finding.advice}")
    if report.budget is not None:
        yield ""
        yield "memory budget"
        for line in memory_text(report.budget, report.lines):
            yield f"  {line}"
    yield ""
    if report.settings:
        yield "settings that are set"
        for name, value, source in report.settings:
            yield from _wrapped("  ", f"{name} = {value}  ({source})")
    else:
        yield "all settings have their defaults"
    yield ""
    yield f"{_count(report.num_problems, 'problem')}, {_count(report.num_warnings, 'warning')}"


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def as_json(report: Report) -> dict[str, Any]:
    """No key is in it, and every number is in the unit of its name."""
    budget, mlx, disk = report.budget, report.mlx, report.disk
    return {
        "version": __version__,
        "ok": report.num_problems == 0,
        "problems": report.num_problems,
        "warnings": report.num_warnings,
        "findings": [asdict(finding) for finding in report.findings],
        "memory": None
        if budget is None
        else {
            "total_bytes": budget.total_bytes,
            "pool": budget.pool,
            "lines": [
                {"what": line.what, "bytes": line.nbytes, "why": line.why} for line in report.lines
            ],
        },
        "measured": {
            **({} if mlx.speeds is None else asdict(mlx.speeds)),
            "disk_write_bytes_per_s": disk.write_bytes_per_s,
            "disk_read_bytes_per_s": disk.read_bytes_per_s,
        },
        "settings": [
            {"name": name, "value": value, "source": source}
            for name, value, source in report.settings
        ],
    }
