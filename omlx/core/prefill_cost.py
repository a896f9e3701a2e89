"""How long a cold prefill takes, from those that were measured; the deeper, the dearer a token.

Speeds are kept by depth, in ranges that double: 0..512, 512..1024, 1024..2048, and so on. In each
a measurement counts by the square of its tokens: a short stretch pays for a whole step and says
little about a long prompt, and what many short ones say must not make the reuse look better than
it is. For the same reason a range that was never measured costs what the nearest one below does,
and a short stretch that was faster than what is known replaces it: the machine was busy then.

It depends on the model and the machine alone, so it is kept in the history's file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FIRST_RANGE = 512
TOKENS_MIN = 32
"""Of a stretch: a shorter one tells more of the step than of the tokens."""

SHORTEST = 8
"""Of fewer tokens the time is mostly chance."""

WEIGHT_MAX = 2.0**40
"""Beyond it what was measured first is forgotten by and by."""

RANGES_MAX = 32


def range_of(position: int) -> int:
    """In which range of depths a token is."""
    return (position // FIRST_RANGE).bit_length()


def _start(depth: int) -> int:
    return FIRST_RANGE * 2 ** (depth - 1) if depth else 0


class PrefillCost:
    def __init__(self, saved: Sequence[tuple[int, float, float]] = ()) -> None:
        """``saved``: what ``saved()`` gave. Raises ValueError when it cannot have."""
        self._by_depth: dict[int, tuple[float, float]] = {}
        """By range: the sum of weights, and of weighted seconds a token."""
        for depth, weight, weighted in saved:
            known = isinstance(depth, int) and 0 <= depth < RANGES_MAX
            if not known or not all(math.isfinite(x) and x > 0 for x in (weight, weighted)):
                raise ValueError(f"{(depth, weight, weighted)} is no measured speed")
            self._by_depth[depth] = (weight, weighted)

    def measured(self, start: int, stop: int, seconds: float) -> None:
        """The engine took so long for the prompt's tokens from ``start`` to ``stop``, exclusive."""
        if stop - start < SHORTEST or seconds <= 0:
            return
        rate = seconds / (stop - start)
        if stop - start < TOKENS_MIN:
            self._no_slower(range_of(start), rate)
            return
        for depth in range(range_of(start), min(range_of(stop - 1) + 1, RANGES_MAX)):
            tokens = min(stop, _start(depth + 1)) - max(start, _start(depth))
            weight, weighted = self._by_depth.get(depth, (0.0, 0.0))
            weight, weighted = weight + tokens**2, weighted + tokens**2 * rate
            share = min(1.0, WEIGHT_MAX / weight)
            self._by_depth[depth] = (share * weight, share * weighted)

    def _no_slower(self, depth: int, rate: float) -> None:
        weight, weighted = self._by_depth.get(depth, (0.0, 0.0))
        if weighted > weight * rate:
            self._by_depth[depth] = (weight, weight * rate)

    def seconds(self, num_tokens: int) -> float | None:
        """Of the first tokens of a prompt; None while nothing was measured."""
        if not self._by_depth:
            return None
        total = 0.0
        for depth in range(range_of(max(0, num_tokens - 1)) + 1):
            tokens = min(num_tokens, _start(depth + 1)) - _start(depth)
            total += max(0, tokens) * self._rate(depth)
        return total

    def _rate(self, depth: int) -> float:
        """Seconds a token in a range: its own, the nearest one's below, or the lowest's."""
        known = [d for d in self._by_depth if d <= depth] or [min(self._by_depth)]
        weight, weighted = self._by_depth[max(known)]
        return weighted / weight

    def saved(self) -> tuple[tuple[int, float, float], ...]:
        """(range, weight, weighted seconds a token)"""
        return tuple((d, *sums) for d, sums in sorted(self._by_depth.items()))
