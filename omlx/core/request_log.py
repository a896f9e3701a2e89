"""One log line a request, at its end, and a bound on lines about errors that repeat.

    completed request=chatcmpl-4a1c route=/v1/chat/completions client=curl/8.5 model=demo
    reason=stop prompt_tokens=100 cached_tokens=48 cached_ram=48 cached_ssd=0 computed_tokens=52 ...

(one line in the log). What a client chose (its name) and what an error says is put in quotes and
escaped unless it is one plain word, so it can neither begin a line nor look like another field.
Text of prompts and answers is not in a record, so it cannot be here.

Requests that end well are always told. Of those that fail alike, ``ALIKE_MAX`` are told in
``PERIOD_S``; the rest are counted, and the count is told when the period is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from omlx.core.usage import RequestRecord

ALIKE_MAX = 5
PERIOD_S = 60.0
KINDS_MAX = 32
"""Kinds of errors told apart at a time; all beyond these are one kind."""

CHARACTERS_MAX = 120
"""Of any one text."""

_PLAIN = re.compile(r"[A-Za-z0-9/._:+@,;()~-]+")
_OTHER_ERRORS = "other errors"


def word(text: str) -> str:
    """``text`` as one field's value: printable, without a line break, and with a known end.

    >>> word("curl/8.5"), word("a b"), word("x\\nERROR forged")
    ('curl/8.5', "'a b'", "'x\\\\nERROR forged'")
    """
    text = text[:CHARACTERS_MAX]
    return text if _PLAIN.fullmatch(text) else repr(text)


def line_of(record: RequestRecord) -> str:
    """The line of a request that has ended."""
    fields: dict[str, object] = {
        "request": word(record.id),
        "route": word(record.route),
        "client": word(record.client),
        "model": word(record.model),
        "reason": word(record.finish_reason or "error"),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "cached_ram": record.cached_ram,
        "cached_ssd": record.cached_ssd,
        "computed_tokens": record.computed_tokens,
        "generated_tokens": record.generated_tokens,
        "ttft_ms": "none" if record.ttft_ms is None else f"{record.ttft_ms:.0f}",
        "tokens_per_s": "none" if record.tokens_per_s is None else record.tokens_per_s,
        "queue_ms": f"{record.queue_ms:.0f}",
        "lookup_ms": f"{record.lookup_ms:.0f}",
        "restore_ms": f"{record.restore_ms:.0f}",
        "prefill_ms": f"{record.prefill_ms:.0f}",
        "decode_ms": f"{record.decode_ms:.0f}",
        "total_ms": f"{record.total_ms:.0f}",
        "saved_ms": "unknown" if record.saved_ms is None else record.saved_ms,
        "reuse_ended": word(record.reuse_reason),
        "reuse_token": record.reuse_token,
    }
    if record.conversation:
        fields["conversation"] = word(record.conversation)
    if record.change is not None and (missed := record.change.missed_tokens(record.cached_tokens)):
        fields["changed"] = record.change.section
        fields["missed_tokens"] = missed
    if record.error is not None:
        fields["error"] = word(record.error)
    return " ".join([record.state, *(f"{name}={value}" for name, value in fields.items())])


@dataclass(slots=True)
class _Alike:
    """Requests that failed alike since ``since_s``."""

    since_s: float
    num_seen: int = 0

    @property
    def num_untold(self) -> int:
        return max(0, self.num_seen - ALIKE_MAX)


class RequestLog:
    """Which lines to write. ``now_s`` is any clock; where it steps back, a count is told later."""

    def __init__(self) -> None:
        self._alike: dict[str, _Alike] = {}

    def ended(self, record: RequestRecord, now_s: float) -> list[str]:
        """The lines to write now that a request has ended: its own, or none."""
        lines = self.due(now_s)
        if record.error is not None:
            kind = self._kind(record.error)
            alike = self._alike.setdefault(kind, _Alike(now_s))
            alike.num_seen += 1
            if alike.num_untold:
                return lines
        return [*lines, line_of(record)]

    def due(self, now_s: float) -> list[str]:
        """The counts of periods that are over. ``now_s`` infinite: of all of them."""
        over = [k for k, alike in self._alike.items() if now_s - alike.since_s >= PERIOD_S]
        ended = [(kind, self._alike.pop(kind)) for kind in over]
        return [
            f"{alike.num_untold} more requests failed alike within {PERIOD_S:.0f} s: {word(kind)}"
            for kind, alike in ended
            if alike.num_untold
        ]

    def _kind(self, error: str) -> str:
        """What an error is counted as: numbers differ from one request to the next."""
        kind = re.sub(r"\d+", "#", error[:CHARACTERS_MAX])
        full = len(self._alike) >= KINDS_MAX
        return _OTHER_ERRORS if full and kind not in self._alike else kind
