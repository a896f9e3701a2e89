"""How the server is doing, in one sentence; the worst comes first. Pure.

A sentence has a code and values, so that a page can say it in its reader's language.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omlx.core.usage import CacheGauges, EngineGauges, ModelFacts

SILENT_S = 5.0
"""An engine that reports each second and has been silent for so long is in trouble."""

STALLED_S = 30.0
"""Work that waits while no step was made for so long is stuck; /health says so too."""

SENTENCES = {
    "loading": "The model is loading.",
    "unreported": "The engine has not reported yet.",
    "silent": "The engine has not reported for {seconds:.0f} s.",
    "stalled": "Requests wait, and no step was made for {seconds:.0f} s.",
    "degraded": "The SSD tier is degraded: new blocks stay in RAM only.",
    "full": "The SSD tier is full: it is read, but nothing new is written.",
    "damaged": "The cache works; {files:,.0f} damaged or foreign blocks counted as misses.",
    "off": "The cache is off: every prompt is computed in full.",
    "ram_only": "The cache works in RAM only: the SSD tier is off.",
    "unused": "The cache stores and restores; nothing was reused yet, no damaged blocks.",
    "works": "The cache stores and restores; it was last used {seconds:.0f} s ago, "
    "no damaged blocks.",
}


@dataclass(frozen=True, slots=True)
class Health:
    level: str
    """ok, wait, warn, bad"""
    code: str
    """A key of ``SENTENCES``."""
    text: str
    values: dict[str, float] = field(default_factory=dict)
    """What the sentence is filled with."""


def health(
    engine: EngineGauges,
    cache: CacheGauges,
    model: ModelFacts,
    report_age_s: float | None,
    reuse_age_s: float | None = None,
) -> Health:
    """Ages are of the engine's last report and of the last prompt that reused something."""
    damaged = cache.corrupt_blocks + sum(count for _, count in cache.rejected_files)
    if not model.id:
        return _of("wait", "loading")
    if report_age_s is None:
        return _of("wait", "unreported")
    if report_age_s > SILENT_S:
        return _of("bad", "silent", seconds=report_age_s)
    if (engine.running or engine.waiting) and engine.last_step_age_s > STALLED_S:
        return _of("bad", "stalled", seconds=engine.last_step_age_s)
    if cache.tier_state in ("degraded", "full"):
        return _of("warn", cache.tier_state)
    if damaged:
        return _of("warn", "damaged", files=damaged)
    if cache.tier_state == "off":
        return _of("ok", "ram_only" if cache.hot_limit_bytes else "off")
    if reuse_age_s is None:
        return _of("ok", "unused")
    return _of("ok", "works", seconds=reuse_age_s)


def _of(level: str, code: str, **values: float) -> Health:
    return Health(level, code, SENTENCES[code].format(**values), values)
