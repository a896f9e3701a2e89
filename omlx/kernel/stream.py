"""Values from one writer to one reader, over time, with an end."""

from __future__ import annotations

import asyncio
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """The writer never waits: ``capacity`` is all it may ever write, agreed beforehand.

    The reader iterates inside ``async with``; leaving the block before the end, for whatever
    reason, sets ``cancelled``, which the writer checks before it makes the next value.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0, "room for the end comes on top"
        self._items: asyncio.Queue[T | Exception | None] = asyncio.Queue(maxsize=capacity + 1)
        self._ended = False
        self._read_to_end = False
        self.cancelled = False

    @property
    def ended(self) -> bool:
        """Whether the writer has closed it."""
        return self._ended

    def write(self, item: T) -> None:
        """Hand the reader one more value. Never waits."""
        assert not self._ended, "written after its end"
        assert self._items.maxsize - self._items.qsize() > 1, "more than the agreed capacity"
        self._items.put_nowait(item)

    def end(self, error: Exception | None = None) -> None:
        """Close the stream, normally or with an error. Later calls do nothing."""
        if not self._ended:
            self._ended = True
            self._items.put_nowait(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancelled = not self._read_to_end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item = await self._items.get()
        if item is None or isinstance(item, Exception):
            self._read_to_end = True
            raise item or StopAsyncIteration
        return item
