"""What pairs of first tokens, with and without the SSD tier, say about it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chats import Reading
from servers import CALM

Verdict = Literal["as wanted", "missed", "suspect"]

CONTROLS = ("no-reuse", "reuse-fits")
GAINS = ("spill-revisit", "restart")
ALIKE = (0.97, 1.03)
GAIN_MAX = 0.1
MOST, FEW = 0.9, 0.1
"""Shares of a prompt: as good as all of it, as good as nothing."""


@dataclass(frozen=True)
class Pair:
    """The same prompt at the server without the tier and at the one with it."""

    off: Reading
    on: Reading
    others: float = 0.0
    """Cores that others took meanwhile."""

    @property
    def ratio(self) -> float:
        return self.on.ttft_ms / self.off.ttft_ms


@dataclass(frozen=True)
class Result:
    """A workload: its pairs, and what the two tiers could hold."""

    workload: str
    pairs: Sequence[Pair]
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def wanted(self) -> tuple[float, float]:
        return ALIKE if self.workload in CONTROLS else (0.0, GAIN_MAX)

    @property
    def verdict(self) -> Verdict:
        low, high = self.wanted
        if self.mistake is not None:
            return "suspect"
        if low <= self.ratio <= high:
            return "as wanted"
        return "suspect" if self.workload in CONTROLS else "missed"

    @property
    def others(self) -> float:
        """Cores that others took; of the controls alone, where little matters."""
        return statistics.median(pair.others for pair in self.pairs)

    @property
    def mistake(self) -> str | None:
        """Why something else was measured than the workload, if it was."""
        if self.others > CALM:
            return "the machine was busy with other things"
        for pair in self.pairs:
            for reading in (pair.off, pair.on):
                known, prompt = reading.cached_tokens or 0, reading.prompt_tokens or 0
                fits = self.workload == "reuse-fits"
                if fits and known - reading.from_ssd < MOST * prompt:
                    return "a revisit was not served from RAM"
                if not fits and reading is pair.off and known > FEW * prompt:
                    return "the server without the tier knew the prompt"
            known = pair.on.cached_tokens or 0
            if self.workload == "no-reuse" and known > FEW * (pair.on.prompt_tokens or 0):
                return "a new prompt was known"
            if self.workload in GAINS and pair.on.from_ssd < MOST * (pair.on.prompt_tokens or 0):
                return "the prompt did not come from files"
        return None

    def as_json(self) -> dict[str, Any]:
        ratios = [pair.ratio for pair in self.pairs]
        return {
            "workload": self.workload,
            "prompt_tokens": statistics.median(p.on.prompt_tokens or 0 for p in self.pairs),
            "off_ms": statistics.median(pair.off.ttft_ms for pair in self.pairs),
            "on_ms": statistics.median(pair.on.ttft_ms for pair in self.pairs),
            "ratio": self.ratio,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "wanted": list(self.wanted),
            "from_ssd": statistics.median(pair.on.from_ssd for pair in self.pairs),
            "others": self.others,
            "verdict": self.verdict,
            "mistake": self.mistake,
            **self.limits,
            "pairs": [
                {
                    side: {"ttft_ms": r.ttft_ms, "cached": r.cached_tokens, "ssd": r.from_ssd}
                    for side, r in (("off", pair.off), ("on", pair.on))
                }
                for pair in self.pairs
            ],
        }


def overall(results: Sequence[Result]) -> Verdict:
    """A suspect control makes the whole run suspect."""
    verdicts = {result.verdict for result in results}
    order: tuple[Verdict, ...] = ("suspect", "missed", "as wanted")
    return next(verdict for verdict in order if verdict in verdicts)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line for each workload."""
    lines = [
        "| workload | prompt | RAM tier | off, ms | on, ms | on / off | min to max | wanted "
        "| from SSD | others | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["wanted"]
        wanted = f"{low} to {high}" if low else f"at most {high}"
        verdict = row["verdict"] + (f": {row['mistake']}" if row["mistake"] else "")
        lines.append(
            f"| {row['workload']} | {row['prompt_tokens']:.0f} "
            f"| {row.get('hot_limit_bytes', 0) / 1e6:,.0f} MB "
            f"| {row['off_ms']:,.1f} | {row['on_ms']:,.1f} | {row['ratio']:.4f} "
            f"| {row['ratio_min']:.4f} to {row['ratio_max']:.4f} | {wanted} "
            f"| {row['from_ssd']:.0f} | {row['others']:.2f} | {verdict} |"
        )
    return "\n".join(lines)
