"""How durations and lengths of requests are spread, in ranges that are fixed at the start. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from omlx.core.usage import RequestRecord

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class Histogram:
    """A range holds what is at most its bound and more than the one before."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def as_json(self) -> dict[str, Any]:
        """``counts`` has one more than ``bounds``: what is above them all."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


class Distributions:
    """Of requests that have ended. Each counts where it has something to tell."""

    def __init__(self) -> None:
        self._seconds = {
            name: Histogram(SECONDS)
            for name in ("ttft", "total", "queue", "lookup", "restore", "prefill", "decode")
        }
        self._tokens = {name: Histogram(TOKENS) for name in ("prompt", "generated")}

    def add(self, record: RequestRecord) -> None:
        if not record.prefilled:
            return
        values = {
            "ttft": record.ttft_ms,
            "total": record.total_ms,
            "queue": record.queue_ms,
            "lookup": record.lookup_ms,
            "restore": record.restore_ms,
            "prefill": record.prefill_ms,
            "decode": record.decode_ms,
        }
        for name, ms in values.items():
            if ms is not None:
                self._seconds[name].observe(ms / 1000)
        self._tokens["prompt"].observe(record.prompt_tokens)
        self._tokens["generated"].observe(record.generated_tokens)

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": {name: one.as_json() for name, one in self._seconds.items()},
            "tokens": {name: one.as_json() for name, one in self._tokens.items()},
        }
