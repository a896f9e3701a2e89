"""Records of requests that never ran."""

from __future__ import annotations

from dataclasses import replace

from omlx.core.usage import RequestRecord, RunningRow

_RECORD = RequestRecord(
    id="req-1",
    time=1000.0,
    client="curl/8.5",
    route="/v1/chat/completions",
    model="demo",
    prompt_tokens=100,
    cached_tokens=48,
    cached_ram=48,
    cached_ssd=0,
    generated_tokens=20,
    prefilled=True,
    finish_reason="stop",
    error=None,
    queue_ms=1.0,
    lookup_ms=0.5,
    restore_ms=2.0,
    prefill_ms=30.0,
    decode_ms=200.0,
    ttft_ms=34.0,
    total_ms=234.0,
    reuse_reason="no_block",
    reuse_token=48,
)

_ROW = RunningRow(
    id="req-2",
    time=1000.0,
    client="curl/8.5",
    route="/v1/chat/completions",
    model="demo",
    state="prefill",
    prompt_tokens=1000,
    cached_tokens=400,
    computed_tokens=100,
    generated_tokens=0,
)


def record(**changes: object) -> RequestRecord:
    """An ordinary record, and what is special about it."""
    return replace(_RECORD, **changes)


def running_row(**changes: object) -> RunningRow:
    return replace(_ROW, **changes)
