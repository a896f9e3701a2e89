"""The history's file, from the event loop: each call runs in the one thread that it has."""

from __future__ import annotations

import asyncio
from typing import Protocol

from omlx.core.history import Kept
from omlx.disk.block_files import InThread
from omlx.disk.history_file import HistoryFile

LOAD_S = 10.0
"""A disk that hangs does not keep the server from starting; it begins without its past."""


class HistoryStore(Protocol):
    """Where the history is kept."""

    async def load(self) -> Kept:
        """What was kept. Raises OSError when it is out of reach."""
        ...

    async def save(self, changed: Kept) -> None:
        """Raises OSError when it could not be written."""
        ...


class HistoryInThread:
    """Outlives the actor: its next life finds the file as the former one left it."""

    def __init__(self, file: HistoryFile, in_thread: InThread) -> None:
        self._file = file
        self._in_thread = in_thread

    async def load(self) -> Kept:
        try:
            async with asyncio.timeout(LOAD_S):
                return await self._in_thread(self._file.load)
        except TimeoutError:
            raise OSError("the disk does not answer") from None

    async def save(self, changed: Kept) -> None:
        await self._in_thread(self._file.save, changed)


class NoHistory:
    """Nothing is kept; the charts begin with the process."""

    async def load(self) -> Kept:
        return Kept()

    async def save(self, changed: Kept) -> None:
        pass
