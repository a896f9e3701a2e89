"""Decoding for models whose caches can't be batched: each row has a batch of its own.

Quantised, chunked and concatenating KV caches hold one sequence. Rows take turns within a step: as
fair as a batch, with as many passes as rows. To the engine it looks like a ``DecodeBatch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.core.plan import Uid
from omlx.engine.batch import Begun, DecodeBatch, DecodingRow, Emitted, Joining


@dataclass(slots=True)
class DecodeApart:
    model: nn.Module
    config: ModelCacheConfig
    ahead: bool
    _batches: list[DecodeBatch] = field(default_factory=list)

    def _new(self) -> DecodeBatch:
        return DecodeBatch(self.model, self.config, self.ahead)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def rows(self) -> list[DecodingRow]:
        return [row for batch in self._batches for row in batch.rows]

    def caches_of(self, uid: Uid) -> tuple[list[Any], int]:
        """(the caches, the row's place in them). Raises ValueError for a row that is not here."""
        index = [row.uid for row in self.rows].index(uid)
        return self._batches[index].caches_of(uid)

    def begin(self, joining: Sequence[Joining], rows: Sequence[list[Any]]) -> list[Begun]:
        """See ``DecodeBatch.begin``; rows: the caches of each."""
        pairs = zip(joining, rows, strict=True)
        return [begun for one, caches in pairs for begun in self._new().begin([one], [caches])]

    def join(self, begun: Sequence[Begun]) -> None:
        for one in begun:
            batch = self._new()
            batch.join([one])
            self._batches.append(batch)

    def leave(self, uids: set[Uid]) -> None:
        for batch in self._batches:
            batch.leave(uids)
        self._batches = [batch for batch in self._batches if len(batch)]

    def step(self) -> list[Emitted]:
        return [emitted for batch in self._batches for emitted in batch.step()]
