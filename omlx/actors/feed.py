"""Server-sent events to many readers, none of whom can hold the writer up.

Each frame has an id, larger than all before it, those of an earlier start included, because the
first one is a time. A reader that comes back with the last id it saw gets the kept events that it
missed, after a fresh snapshot.
"""

from __future__ import annotations

from collections import deque

from omlx.kernel.message import Rejected
from omlx.kernel.stream import Stream

READERS_MAX = 64
KEPT_MAX = 50
"""Events kept for readers that come back."""

FRAMES_MAX = KEPT_MAX + 14
"""Frames that wait for one reader: those it missed, and some seconds of new ones."""

UNREAD_MAX = 60
"""Frames that a reader may lose in a row before its stream ends."""


class TooManyReaders(Rejected):
    """As many feeds as may be open at once are open."""


class FeedStream(Stream[str]):
    """A stream that loses the oldest frame where it would have no room for the newest."""

    def __init__(self) -> None:
        super().__init__(FRAMES_MAX)
        self.num_lost = 0
        """Frames lost in a row since one was last written without losing one."""

    def write(self, item: str) -> None:
        if self._items.qsize() < FRAMES_MAX:
            self.num_lost = 0
        else:
            self._items.get_nowait()
            self.num_lost += 1
        super().write(item)


class Feeds:
    """The open feeds."""

    def __init__(self, first_id: int) -> None:
        self._last_id = first_id
        self._kept: deque[tuple[int, str]] = deque(maxlen=KEPT_MAX)
        self._streams: list[FeedStream] = []

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, snapshot: str, after: int | None) -> Stream[str]:
        """A new reader: the snapshot at once, then what it missed after ``after``.

        Raises TooManyReaders.
        """
        self._forget_gone()
        if len(self._streams) >= READERS_MAX:
            raise TooManyReaders(f"{READERS_MAX} feeds are open; close one")
        known = after is not None and after <= self._last_id
        seen = after if after is not None and known else self._last_id
        stream = FeedStream()
        # The snapshot takes no id of its own: it carries the one up to which the reader knows.
        stream.write(frame("stats", seen, snapshot))
        for event_id, text in self._kept:
            if event_id > seen:
                stream.write(text)
        self._streams.append(stream)
        return stream

    def publish(self, event: str, data: str, *, keep: bool = False) -> None:
        """Send to all. ``keep``: also to those that come back later."""
        self._last_id += 1
        text = frame(event, self._last_id, data)
        if keep:
            self._kept.append((self._last_id, text))
        self._forget_gone()
        for stream in self._streams:
            stream.write(text)

    def end(self) -> None:
        """End every feed."""
        for stream in self._streams:
            stream.end()
        self._streams = []

    def _forget_gone(self) -> None:
        for stream in self._streams:
            if stream.num_lost >= UNREAD_MAX:
                stream.end()
        self._streams = [
            stream
            for stream in self._streams
            if not stream.cancelled and stream.num_lost < UNREAD_MAX
        ]


def frame(event: str, event_id: int, data: str) -> str:
    """One event as it goes over the wire. ``data`` is a single line."""
    assert "\n" not in data, "a line break would end the data"
    return f"event: {event}\nid: {event_id}\ndata: {data}\n\n"
