"""Which file is read next, for whom, and when a read has ended. Pure: the caller has the threads.

Reads take turns, file by file, so a short one does not wait for a long one. Several files of one
read are in flight at once; its payloads are told in the order asked for, up to the first file that
could not be read, and none is begun behind that one.

One file more is in flight than there are threads: it lies ready for the first that is free, which
so need not wait until the caller has heard of its last one. The threads take files in order.

A file that does not come within the deadline ends its read, and its thread counts as stuck until
the file comes after all. While every thread is stuck, every read ends at once. A file that lies
ready for a thread has no deadline yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from omlx.cache.tickets import BlockRef
from omlx.core.plan import HostBlock, LostFile

STUCK = "the disk did not answer in time"


@dataclass(frozen=True, slots=True)
class NotRead:
    """Why a file could not be read; ``lost`` when it will not come back."""

    reason: str
    lost: LostFile | None = None


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    payloads: tuple[HostBlock, ...]
    """In the order asked for, up to the first block that could not be read."""
    lost: LostFile | None = None
    reason: str = ""
    stuck: bool = False
    """A file did not come in time: nothing more is to be asked for the same request."""


@dataclass(slots=True, eq=False)
class Read:
    """One request for some blocks. ``ended`` is called once."""

    number: int
    refs: tuple[BlockRef, ...]
    ended: Callable[[ReadOutcome], None]
    begun: int = 0
    """Files that were handed out, from the first."""
    results: dict[int, HostBlock | NotRead] = field(default_factory=dict)
    stop: int = 0
    """Index of the first file that is not to be begun; all before it are waited for."""
    over: bool = False

    def __post_init__(self) -> None:
        self.stop = len(self.refs)


@dataclass(slots=True)
class InFlight:
    read: Read
    index: int
    since_s: float | None = None
    """When a thread began it; None: it lies ready."""


class ReadQueue:
    def __init__(self, num_threads: int, deadline_s: float) -> None:
        self._num_threads = num_threads
        self._deadline_s = deadline_s
        self._turns: deque[Read] = deque()
        """Reads with files to begin, by whose turn it is."""
        self._in_flight: dict[int, InFlight] = {}
        self._stuck: set[int] = set()
        """Tickets of files that did not come in time, and have not come since."""
        self._next_ticket = 0

    @property
    def num_stuck(self) -> int:
        return len(self._stuck)

    def add(self, read: Read) -> None:
        if self.num_stuck == self._num_threads:
            self._end(read, stuck=True)
        elif read.refs:
            self._turns.append(read)
        else:
            self._end(read)

    def stop(self, number: int | None) -> None:
        """Begin no more files of one read, or of any."""
        for read in self._live():
            if number in (None, read.number):
                read.stop = min(read.stop, read.begun)
                self._end_if_done(read)

    def next_files(self, now_s: float) -> list[tuple[int, BlockRef]]:
        """(ticket, block) of files to be begun now; each ticket comes back with ``file_read``.

        To be called after each ``file_read``: a thread is free for a file that lay ready.
        """
        files: list[tuple[int, BlockRef]] = []
        threads = self._num_threads - self.num_stuck
        while self._turns and 0 < threads >= len(self._in_flight):
            read = self._turns.popleft()
            if read.over or read.begun >= read.stop:
                continue
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._in_flight[ticket] = InFlight(read, read.begun)
            files.append((ticket, read.refs[read.begun]))
            read.begun += 1
            self._turns.append(read)
        for flight in islice(self._in_flight.values(), threads):
            flight.since_s = now_s if flight.since_s is None else flight.since_s
        return files

    def file_read(self, ticket: int, result: HostBlock | NotRead) -> None:
        self._stuck.discard(ticket)
        flight = self._in_flight.pop(ticket, None)
        if flight is None:
            return  # it came too late for anybody
        read = flight.read
        read.results[flight.index] = result
        if isinstance(result, NotRead):
            read.stop = min(read.stop, flight.index)
        self._end_if_done(read)

    def expire(self, now_s: float) -> int:
        """End the reads whose file does not come, and all if none can; returns how many files."""
        late = [
            ticket
            for ticket, flight in self._in_flight.items()
            if flight.since_s is not None and now_s - flight.since_s >= self._deadline_s
        ]
        for ticket in late:
            self._stuck.add(ticket)
            self._end(self._in_flight.pop(ticket).read, stuck=True)
        if self.num_stuck == self._num_threads:
            for read in self._live():
                self._end(read, stuck=True)
            self._turns.clear()
        return len(late)

    def _live(self) -> list[Read]:
        reads = [*(flight.read for flight in self._in_flight.values()), *self._turns]
        return [read for read in dict.fromkeys(reads) if not read.over]

    def _end_if_done(self, read: Read) -> None:
        if all(index in read.results for index in range(read.stop)):
            self._end(read)

    @staticmethod
    def _end(read: Read, *, stuck: bool = False) -> None:
        if read.over:
            return
        read.over = True
        payloads: list[HostBlock] = []
        for index in range(len(read.refs)):
            result = read.results.get(index)
            if isinstance(result, NotRead):
                read.ended(ReadOutcome(tuple(payloads), result.lost, result.reason, stuck))
                return
            if result is None:
                break
            payloads.append(result)
        read.ended(ReadOutcome(tuple(payloads), None, STUCK if stuck else "", stuck))
