"""What is shown of a request that has not ended."""

from __future__ import annotations

from collections.abc import Sequence as Items

from omlx.core.sequence import Sequence, State
from omlx.core.usage import RunningRow

_STATE_WORDS = {
    State.WAITING: "waiting",
    State.LOOKING: "waiting",
    State.RESTORING: "restoring",
    State.READY: "restoring",
    State.FORKING: "prefill",
    State.PREFILL: "prefill",
    State.DECODE: "decode",
    State.CLOSING: "closing",
}


def running_row(choices: Items[Sequence], *, now_s: float, wall_s: float) -> RunningRow:
    """One for all choices. ``now_s`` is the scheduler's clock, ``wall_s`` Unix seconds."""
    sequence = choices[0]
    request = sequence.request
    computed = min(sequence.num_computed, sequence.num_prompt) - sequence.num_cached
    generated = sum(choice.num_generated for choice in choices)
    return RunningRow(
        id=request.request_id,
        time=wall_s - (now_s - sequence.times.submitted),
        client=request.client,
        route=request.route,
        model=request.model,
        state=_STATE_WORDS[sequence.state],
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.num_cached,
        computed_tokens=max(0, computed),
        generated_tokens=generated,
        tokens_per_s=_speed(sequence, max(0, computed), generated, now_s),
        conversation=request.conversation,
    )


def _speed(sequence: Sequence, computed: int, generated: int, now_s: float) -> float:
    """Of what it does now: of its prefill so far, or of its decoding so far."""
    times = sequence.times
    if sequence.state is State.PREFILL and times.restored is not None:
        return _rate(computed, now_s - times.restored)
    if sequence.state is State.DECODE and times.first_token is not None:
        return _rate(generated - 1, now_s - times.first_token)
    return 0.0


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 1) if seconds > 0 else 0.0
