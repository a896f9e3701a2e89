"""The file of the all-time totals: written whole or not at all, for this user's eyes only."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import aiofiles
import aiofiles.os

from omlx.core.usage import Totals

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 65_536

_fsync = aiofiles.os.wrap(os.fsync)


class StatsFile:
    """``path`` is ``stats.json`` in the home directory."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now

    async def load(self) -> Totals:
        """What was saved last; zeros when there is none.

        A file that cannot be understood is renamed to ``stats.json.corrupt-<time>``, with a
        warning: it counts for nothing, but it is not lost either.
        """
        try:
            async with aiofiles.open(self._path, "rb") as file:
                raw = await file.read(FILE_BYTES_MAX + 1)
            if len(raw) > FILE_BYTES_MAX:
                raise ValueError(f"longer than {FILE_BYTES_MAX} bytes")
            return Totals.load(json.loads(raw))
        except FileNotFoundError:
            return Totals()
        except (OSError, ValueError, RecursionError) as fault:
            place = await self._set_aside()
            log.warning(
                "the all-time totals in %s cannot be read (%s); %s; they start again at 0",
                self._path,
                fault,
                f"the file was moved to {place}" if place else "the file could not be moved",
            )
            return Totals()

    async def save(self, totals: Totals) -> None:
        """Replace the file. Raises OSError, and then the old one is still there."""
        text = json.dumps(totals.saved(), indent=2) + "\n"
        await aiofiles.os.makedirs(self._path.parent, mode=0o700, exist_ok=True)
        # With the process id: two servers of one home must not write into each other's file.
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            async with aiofiles.open(temporary, "w", encoding="utf-8", opener=_private) as file:
                await file.write(text)
                await file.flush()
                await _fsync(file.fileno())
            await aiofiles.os.replace(temporary, self._path)
        except BaseException:
            # Nothing may be awaited while a cancellation is on its way.
            temporary.unlink(missing_ok=True)
            raise

    async def _set_aside(self) -> Path | None:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now()))
        place = self._path.with_name(f"{self._path.name}.corrupt-{stamp}")
        num_tries = 1
        while await aiofiles.os.path.exists(place):
            num_tries += 1
            place = self._path.with_name(f"{self._path.name}.corrupt-{stamp}-{num_tries}")
        try:
            await aiofiles.os.rename(self._path, place)
        except OSError:
            return None
        return place


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
