"""What is written down of a request that has ended."""

from __future__ import annotations

from collections.abc import Sequence

from omlx.core.events import Closed
from omlx.core.usage import RequestRecord


def record_of(choices: Sequence[Closed], *, wall_s: float, now_s: float) -> RequestRecord:
    """One for all choices: the prompt counts once, and every generated token."""
    closed = min(choices, key=lambda choice: choice.index)
    error = next((choice.error for choice in choices if choice.error), None)
    reasons = {choice.finish_reason for choice in choices}
    reason = "cancelled" if "cancelled" in reasons else closed.finish_reason
    times, request = closed.times, closed.request
    ended = max(choice.times.ended or now_s for choice in choices)

    def ms(start: float | None, stop: float | None) -> float:
        return 0.0 if start is None or stop is None else 1000 * (stop - start)

    first = times.first_token
    return RequestRecord(
        id=request.request_id,
        time=wall_s,
        client=request.client,
        route=request.route,
        model=request.model,
        prompt_tokens=len(request.prompt),
        cached_tokens=closed.cached_tokens,
        cached_ram=closed.cached_ram,
        cached_ssd=closed.cached_ssd,
        generated_tokens=sum(choice.generated_tokens for choice in choices),
        prefilled=closed.prefilled,
        finish_reason=None if error else reason,
        error=error,
        queue_ms=ms(times.submitted, times.looked_up),
        lookup_ms=ms(times.looked_up, times.granted),
        restore_ms=ms(times.granted, times.restored) + 1000 * closed.restore_s,
        prefill_ms=max(0.0, ms(times.restored, first) - 1000 * closed.restore_s),
        decode_ms=ms(first, ended),
        ttft_ms=None if first is None else ms(times.submitted, first),
        total_ms=ms(times.submitted, ended),
        reuse_reason=closed.reuse_ended.reason,
        reuse_token=closed.reuse_ended.token,
        attribution_stripped=request.attribution_stripped,
        stop=closed.stop,
    )
