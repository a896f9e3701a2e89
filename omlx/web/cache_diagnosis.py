"""Why a prompt was not found, in the fields that the makers of the clients gave it.

Both know fewer reasons than there are. What has no name of theirs is ``unavailable``; our own
extension, ``omlx.changed``, says it all the same. Evictions and the like are in
``omlx.reuse_ended``: there the prompt did not change.
"""

from __future__ import annotations

from typing import Any

from omlx.core.diagnosis import STRIDE, Section
from omlx.web.generation import Prepared

Json = dict[str, Any]

ANTHROPIC = {
    Section.TOOLS: "tools_changed",
    Section.SYSTEM: "system_changed",
    Section.MESSAGES: "messages_changed",
}
OPENAI = {
    Section.TOOLS: "tools_changed",
    Section.SYSTEM: "input_changed",
    Section.MESSAGES: "input_changed",
}


def anthropic_diagnostics(
    prepared: Prepared, previous: str | None, cached_tokens: int
) -> Json | None:
    """``diagnostics`` of a message. None: nothing that was asked about has changed."""
    if previous is None:
        return None
    if prepared.fingerprint is None:
        return _reason("unavailable")
    if prepared.comparison is None:
        return _reason("previous_message_not_found")
    change = prepared.comparison.change
    if change is None or not (missed := change.missed_tokens(cached_tokens)):
        return None
    if change.section not in ANTHROPIC:
        return _reason("unavailable")
    return _reason(ANTHROPIC[change.section], cache_missed_input_tokens=missed)


def openai_diagnostics(prepared: Prepared, previous: str | None, cached_tokens: int) -> Json | None:
    """``prompt_cache_diagnostics`` of a response. None: nobody asked."""
    if previous is None:
        return None
    if prepared.fingerprint is None:
        return {"type": "unavailable"}
    if prepared.comparison is None:
        return {"type": "comparison_response_not_found"}
    change, reusable = prepared.comparison.change, prepared.comparison.reusable_tokens
    if change is None or not (missed := change.missed_tokens(cached_tokens)):
        # The prompt is the same; but what was computed for it may be gone.
        hit = cached_tokens > 0 and cached_tokens + STRIDE >= reusable
        return {"type": "cache_hit" if hit else "unavailable"}
    reason = "reasoning_effort_changed" if change.thinking else OPENAI.get(change.section)
    if reason is None:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": missed,
        "comparison_reusable_tokens": change.shared_tokens,
    }


def _reason(kind: str, **fields: int) -> Json:
    return {"cache_miss_reason": {"type": kind, **fields}}
