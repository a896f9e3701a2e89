"""How much of what was reused a cache of another size would have kept.

A block is found again by a least recently used cache exactly when the cache is at least as large
as everything that was used since, and the block itself: its stack distance (Mattson, Gecsei,
Slutz and Traiger, "Evaluation techniques for storage hierarchies", 1970). So one pass over what
is asked for answers for all sizes at once, those that we do not have among them: a block that had
to be computed again because it was evicted counts as well, when it is stored once more.

A chain is used as a whole, its head last, as our eviction has it: the leaf goes first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from omlx.cache.blocks import BlockHash

NAMES_MAX = 1 << 15
"""Blocks that are remembered, some 6 MB. What was used before all of them counts as new."""

SMALLEST = 1 << 20
NUM_SIZES = 24
"""Sizes told apart: 1 MiB and 23 doublings, up to 8 TiB."""

HOUR_S = 3600.0
HOURS = 24


@dataclass(frozen=True, slots=True)
class Used:
    """A block of a prompt."""

    block_hash: BlockHash
    nbytes: int
    num_tokens: int
    """How many of it were asked for; 0 for a checkpoint, which is needed and holds none."""


@dataclass(frozen=True, slots=True)
class ReuseBySize:
    """Of the last HOURS hours, or since the start."""

    reused_tokens: int
    kept: tuple[tuple[int, int], ...]
    """(bytes of a cache, how many of the reused tokens it would have kept), the smallest first."""


class ReuseDistances:
    """O(log NAMES_MAX) a block. Bounded by NAMES_MAX names. No clock: times are given."""

    def __init__(self) -> None:
        self._places: OrderedDict[BlockHash, tuple[int, int]] = OrderedDict()
        """By name, in the order of use: its place on the line of time, and its bytes."""
        self._line = _Sums(2 * NAMES_MAX)
        self._next = 0
        self._hours: deque[tuple[int, list[int]]] = deque(maxlen=HOURS)
        """Reused tokens by the smallest size that keeps them; the last place: by none of ours."""

    def use(self, chain: Sequence[Used], now: float) -> None:
        """Note that a prompt uses ``chain``, head first, at ``now`` in seconds."""
        counts = self._counts(now)
        for used in chain:  # all of them before the chain itself is moved
            distance = self._distance(used.block_hash)
            if distance is not None:
                counts[_size_index(distance)] += used.num_tokens
        for used in reversed(chain):
            self._move_to_front(used)

    def report(self, now: float) -> ReuseBySize:
        self._counts(now)
        totals = [
            sum(column) for column in zip(*(counts for _, counts in self._hours), strict=True)
        ]
        kept: list[tuple[int, int]] = []
        tokens = 0
        for index in range(NUM_SIZES):
            tokens += totals[index]
            kept.append((SMALLEST << index, tokens))
        return ReuseBySize(sum(totals), tuple(kept))

    def _counts(self, now: float) -> list[int]:
        hour = int(now // HOUR_S)
        while self._hours and self._hours[0][0] <= hour - HOURS:
            self._hours.popleft()
        if not self._hours or self._hours[-1][0] < hour:
            self._hours.append((hour, [0] * (NUM_SIZES + 1)))
        return self._hours[-1][1]

    def _distance(self, name: BlockHash) -> int | None:
        """Bytes of it and of all that was used since; None when it is not remembered."""
        found = self._places.get(name)
        return None if found is None else self._line.from_(found[0])

    def _move_to_front(self, used: Used) -> None:
        if self._next == self._line.length:
            self._close_gaps()
        known = self._places.pop(used.block_hash, None)
        if known is not None:
            self._line.add(known[0], -known[1])
        self._places[used.block_hash] = self._next, used.nbytes
        self._line.add(self._next, used.nbytes)
        self._next += 1
        if len(self._places) > NAMES_MAX:
            _, (place, nbytes) = self._places.popitem(last=False)
            self._line.add(place, -nbytes)

    def _close_gaps(self) -> None:
        """The line has twice as many places as there are names, so this is rare."""
        for place, (name, (_, nbytes)) in enumerate(self._places.items()):
            self._places[name] = place, nbytes
        self._line = _Sums(self._line.length, [nbytes for _, nbytes in self._places.values()])
        self._next = len(self._places)


class _Sums:
    """Numbers on a line, and the sum of all from a place on: a Fenwick tree."""

    def __init__(self, length: int, numbers: Sequence[int] = ()) -> None:
        """O(length). ``numbers``: those of the first places."""
        self.length = length
        self._total = sum(numbers)
        self._sums = [0, *numbers, *([0] * (length - len(numbers)))]
        for index in range(1, length + 1):
            above = index + (index & -index)
            if above <= length:
                self._sums[above] += self._sums[index]

    def add(self, place: int, number: int) -> None:
        self._total += number
        index = place + 1
        while index <= self.length:
            self._sums[index] += number
            index += index & -index

    def from_(self, place: int) -> int:
        before = 0
        index = place
        while index > 0:
            before += self._sums[index]
            index -= index & -index
        return self._total - before


def _size_index(distance: int) -> int:
    """The smallest size that is at least ``distance``; NUM_SIZES when none is."""
    index = max(0, (distance - 1).bit_length() - SMALLEST.bit_length() + 1)
    return min(index, NUM_SIZES)
