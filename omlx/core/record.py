"""What is written down of a request that has ended.

Its time is cut into five phases without a gap, so they add up to the total whatever happened:

    queue      until its prefix was looked up
    lookup     until the cache granted what it knows
    restore    until that was in the engine: files read, blocks joined
    prefill    until the first token, so it holds the waiting between chunks as well
    decode     until the last token

A request that ends early has ended in one of them; the later ones took nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from omlx.core.events import Closed
from omlx.core.sequence import Times
from omlx.core.usage import RequestRecord


@dataclass(frozen=True, slots=True)
class Phases:
    """Durations in ms, each at least 0."""

    queue: float
    lookup: float
    restore: float
    prefill: float
    decode: float


def phases_of(times: Times, ended: float, restore_s: float) -> Phases:
    """Where the time went. ``restore_s`` is the engine's part of the restore, of a later step."""
    marks = (times.looked_up, times.granted, times.restored, times.first_token)
    reached = [times.submitted]
    for mark in marks:
        if mark is None:
            break
        reached.append(mark)
    # A mark may be set once the request has ended, when the cache answers somebody who has left.
    reached += [ended] * (6 - len(reached))
    cuts = list(accumulate((min(mark, ended) for mark in reached), max))
    queue, lookup, restore, prefill, decode = (
        1000 * (stop - start) for start, stop in pairwise(cuts)
    )
    in_engine = min(1000 * restore_s, prefill)
    return Phases(queue, lookup, restore + in_engine, prefill - in_engine, decode)


def record_of(choices: Sequence[Closed], *, wall_s: float, now_s: float) -> RequestRecord:
    """One for all choices: the prompt counts once, and every generated token."""
    closed = min(choices, key=lambda choice: choice.index)
    error = next((choice.error for choice in choices if choice.error), None)
    reasons = {choice.finish_reason for choice in choices}
    reason = "cancelled" if "cancelled" in reasons else closed.finish_reason
    times, request = closed.times, closed.request
    ended = max(choice.times.ended or now_s for choice in choices)
    phases = phases_of(times, ended, closed.restore_s)
    first = times.first_token
    generated = sum(choice.generated_tokens for choice in choices)
    if request.only_fills:
        generated, reason = 0, "cancelled" if reason == "cancelled" else "length"
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
        generated_tokens=generated,
        prefilled=closed.prefilled,
        finish_reason=None if error else reason,
        error=error,
        queue_ms=phases.queue,
        lookup_ms=phases.lookup,
        restore_ms=phases.restore,
        prefill_ms=phases.prefill,
        decode_ms=phases.decode,
        ttft_ms=None if first is None else 1000 * (first - times.submitted),
        total_ms=1000 * (ended - times.submitted),
        reuse_reason=closed.reuse_ended.reason,
        reuse_token=closed.reuse_ended.token,
        attribution_stripped=request.attribution_stripped,
        stop=None if request.only_fills else closed.stop,
        unfinished_tokens=closed.unfinished_tokens,
        engine_ms=1000 * closed.prefill_s,
        reasoning_tokens=min(generated, sum(choice.reasoning_tokens for choice in choices)),
        conversation=request.conversation,
        change=request.change,
    )
