"""Reads block files in a thread of its own and verifies them there."""

from __future__ import annotations

import logging
from typing import assert_never

from omlx.actors.block_files import Files, InThread
from omlx.actors.messages import (
    FoundFile,
    ReadBlocks,
    ReadOutcome,
    ScanFiles,
    SsdReaderMessage,
)
from omlx.cache.block_file import Identity, Unreadable
from omlx.cache.tickets import BlockRef
from omlx.core.plan import HostBlock, LostFile
from omlx.kernel.actor import Actor
from omlx.kernel.message import Rejected

log = logging.getLogger(__name__)


class Unlistable(Rejected):
    """The cache directory can't be listed now; the text says why."""


class SsdReader(Actor):
    name = "ssd_reader"
    capacity = 64

    def __init__(self, files: Files, in_thread: InThread) -> None:
        self._files = files
        self._in_thread = in_thread

    async def receive(self, message: SsdReaderMessage) -> object:
        match message:
            case ReadBlocks(refs):
                return await self._in_thread(self._read, refs)
            case ScanFiles():
                return await self._in_thread(self._scan)
        assert_never(message)

    def _read(self, refs: tuple[BlockRef, ...]) -> ReadOutcome:
        payloads: list[HostBlock] = []
        for ref in refs:
            identity = Identity(
                self._files.namespace, ref.block_hash, ref.parent, ref.tokens, ref.place
            )
            try:
                payloads.append(self._files.read(identity))
            except Unreadable as damage:
                log.warning("a damaged cache file is removed and recomputed: %s", damage)
                self._files.remove(ref.block_hash)
                lost = LostFile(ref.block_hash, corrupt=True)
                return ReadOutcome(tuple(payloads), lost, str(damage))
            except FileNotFoundError:
                lost = LostFile(ref.block_hash, corrupt=False)
                return ReadOutcome(tuple(payloads), lost, "the file is gone")
            except OSError as error:
                # The file may be sound: it is a miss now and stays where it is.
                log.warning("a cache file can't be read now: %s", error.strerror)
                return ReadOutcome(tuple(payloads), None, error.strerror or "unreadable")
        return ReadOutcome(tuple(payloads))

    def _scan(self) -> tuple[FoundFile, ...]:
        try:
            self._files.prepare()
            return tuple(self._files.scan())
        except OSError as error:
            raise Unlistable(f"the cache directory can't be listed: {error.strerror}") from None
