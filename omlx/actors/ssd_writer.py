"""Writes and removes block files, one after another, in a thread of its own.

The order of the mailbox is the order on disk, so a parent's file is there before its child's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import assert_never

from omlx.actors.block_files import Files, InThread
from omlx.actors.messages import (
    BlockLost,
    BlockWritten,
    CatchUp,
    DeleteBlocks,
    PagedCacheMessage,
    SsdWriterMessage,
    WriteBlock,
    WriterStarted,
)
from omlx.cache.block_file import Identity
from omlx.cache.blocks import BlockHash
from omlx.cache.codecs import NotFinite
from omlx.cache.tickets import StoreTicket
from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref

log = logging.getLogger(__name__)


class SsdWriter(Actor):
    name = "ssd_writer"
    capacity = 1024

    def __init__(self, files: Files, cache: Ref[PagedCacheMessage], in_thread: InThread) -> None:
        self._files = files
        self._cache = cache
        self._in_thread = in_thread
        self._missing: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that could not be written: what hangs on them is not written either."""

    async def on_start(self) -> None:
        self._cache.offer(WriterStarted())

    async def receive(self, message: SsdWriterMessage) -> object:
        match message:
            case WriteBlock():
                await self._write(message)
                return None
            case DeleteBlocks(block_hashes):
                await self._in_thread(self._delete, block_hashes)
                return None
            case CatchUp():
                return None
        assert_never(message)

    async def _write(self, message: WriteBlock) -> None:
        ticket = message.ticket
        block = ticket.wish if isinstance(ticket, StoreTicket) else ticket
        if block.parent in self._missing:
            self._lost(block.block_hash, "its parent has no file", tier_down=False)
            return
        identity = Identity(
            self._files.namespace, block.block_hash, block.parent, block.tokens, block.place
        )
        try:
            carries = ticket.wish.carries if isinstance(ticket, StoreTicket) else None
            nbytes = await self._in_thread(self._files.write, identity, message.payload, carries)
        except NotFinite as error:
            self._lost(block.block_hash, str(error), tier_down=False)
        except OSError as error:
            # Whatever it is, the next write would most likely fail as well.
            self._lost(block.block_hash, error.strerror or "unwritable", tier_down=True)
        else:
            self._missing.pop(block.block_hash, None)
            self._cache.offer(BlockWritten(identity, nbytes))

    def _delete(self, block_hashes: tuple[BlockHash, ...]) -> None:
        for block_hash in block_hashes:
            try:
                self._files.remove(block_hash)
            except OSError as error:
                log.warning("a cache file was not removed: %s", error.strerror)

    def _lost(self, block_hash: BlockHash, reason: str, *, tier_down: bool) -> None:
        self._missing[block_hash] = None
        if len(self._missing) > 2 * self.capacity:  # what waits here hangs on younger ones
            self._missing.popitem(last=False)
        self._cache.offer(BlockLost(block_hash, reason, tier_down))
