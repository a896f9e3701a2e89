"""How many bytes a block or a checkpoint takes, in RAM and in its file."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.cache.blocks import PackedTokens, num_tokens
from omlx.cache.checkpoints import Place
from omlx.cache.tickets import StoreWish


@dataclass(frozen=True, slots=True)
class BlockSizes:
    bytes_per_token: int
    checkpoint_bytes: int
    header_bytes: int = 0
    """What a file's header takes at most. Counted before the file is there, or many small files
    that are on their way would together exceed the limit."""

    def in_ram(self, tokens: PackedTokens, place: Place | None) -> int:
        """Of a block, or of a checkpoint."""
        if place is not None:
            return self.checkpoint_bytes
        return num_tokens(tokens) * self.bytes_per_token

    def in_file(self, wish: StoreWish) -> int:
        """At most: before any codec."""
        embedded = self.checkpoint_bytes if wish.carries is not None else 0
        return self.in_ram(wish.tokens, wish.place) + embedded + self.header_bytes
