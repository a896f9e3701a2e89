"""How much may wait to be written: one bound for blocks, one for checkpoints.

At the bound nobody waits. The chain stops being persisted there, its blocks stay dirty in RAM and
are offered again when there is room.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pending:
    limit_bytes: int
    nbytes: int = 0

    def has_room(self, size: int) -> bool:
        """One oversize item is let in on an empty queue, or it could never be written.

        A limit of 0 lets nothing wait at all.
        """
        if self.limit_bytes == 0:
            return False
        return self.nbytes == 0 or self.nbytes + size <= self.limit_bytes

    def begin(self, size: int) -> None:
        self.nbytes += size

    def end(self, size: int) -> None:
        assert self.nbytes >= size, "more writes ended than were let in"
        self.nbytes -= size
