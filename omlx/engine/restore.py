"""A prompt's prefix on its way from blocks into the caches of a row, in parts or at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx.cache.blocks import BlockId
from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.core.plan import Restore
from omlx.engine.join import Block
from omlx.engine.kv import BlockStore, fresh_caches, from_host, views_of


@dataclass(slots=True)
class Prefix:
    """The restored part of a prompt on its way into a row."""

    caches: list[Any]
    position: int
    """Tokens in the caches once all of it is done."""
    parts: Iterator[int]
    """Does the next part, and gives its bytes."""
    kept: list[tuple[BlockId, Block]]
    """Blocks that were read, to be kept in RAM as well."""

    def restore(self, nbytes: int) -> None:
        """Do at least as much as ``nbytes`` of what is left."""
        while nbytes > 0:
            done = next(self.parts, None)
            if done is None:
                return
            nbytes -= done


class Restorer:
    def __init__(self, model: nn.Module, config: ModelCacheConfig, store: BlockStore) -> None:
        self.model = model
        self.config = config
        self.store = store

    def finish(self, prefix: Prefix, state: Restore | None) -> None:
        """Do what is left of it, keep what was read, and put the recurrent state in."""
        for _ in prefix.parts:
            pass
        for block_id, arrays in prefix.kept:
            self.store.put(block_id, arrays)
        if state is not None:
            self.store.restore_states(prefix.caches, self._state_of(state))
        assert not self.config.is_recurrent or bool(prefix.position) == (state is not None), (
            "blocks and state travel together, or not at all"
        )

    def begin(self, restores: tuple[Restore, ...]) -> Prefix:
        caches = fresh_caches(self.model)
        takes = [restore.take for restore in restores]
        kept: list[tuple[BlockId, Block]] = []
        return Prefix(caches, sum(takes), self._parts(caches, restores, takes, kept), kept)

    def _parts(
        self,
        caches: list[Any],
        restores: tuple[Restore, ...],
        takes: list[int],
        kept: list[tuple[BlockId, Block]],
    ) -> Iterator[int]:
        """A device first gets what was read, block by block; then the layers are joined.

        In host memory what was read is used where it is. A block is held from the beginning, so it
        does not matter when it leaves the RAM tier.
        """
        blocks = [self._source(restore) for restore in restores]
        for index, restore in enumerate(restores):
            if restore.payload is None:
                continue
            if not self.store.host_copies:
                blocks[index] = arrays = from_host(restore.payload)
                mx.eval(arrays)
                yield sum(array.nbytes for array in arrays)
            if restore.block_id is not None:
                kept.append((restore.block_id, blocks[index]))
        if restores:
            joined = self.store.restore_in_parts(caches, blocks, takes)
            # A device joins lazily, within the next pass.
            yield from joined if self.store.host_copies else (0 for _ in joined)

    def _source(self, restore: Restore) -> Block:
        if restore.payload is not None:
            return views_of(restore.payload)
        assert restore.block_id is not None, "a block comes from RAM or with its payload"
        return self.store.get(restore.block_id)

    def _state_of(self, restore: Restore) -> Block:
        """A checkpoint's arrays. No layer is joined, so it is done at once: it has a fixed size."""
        arrays = self._source(restore)
        if restore.payload is not None:
            if not self.store.host_copies:
                arrays = from_host(restore.payload)
                mx.eval(arrays)
            if restore.block_id is not None:
                self.store.put(restore.block_id, arrays)
        return arrays
