"""How much memory rows take: reckoned from what each layer keeps, and from what was measured. Pure.

    weights + reserve + rows + what computes them + hot tier + copies on their way  <=  total

Rows that decode together are dense: each has as much room as the longest. Buffers grow by 256
tokens; while one layer's grow, or are joined with those of a new row, old and new are there, and
MLX goes through the layers one after the other. Sliding windows stop to grow, recurrent states
never do. What a chunk of a prompt is computed with is measured (``engine/measure.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omlx.cache.hybrid_cache import LayerKind, ModelCacheConfig
from omlx.core.wave import most_chunks

GROWTH_TOKENS = 256
"""A buffer has room for at most so many tokens more than there are."""

LAYERS_AT_ONCE = 2
"""Layers of which old and new buffers are there while rows join or grow. Measured: 1.0 to 1.5."""

LOGIT_COPIES = 6
"""Of a row's float32 scores of all tokens: raw, normalised, sorted and summed up to sample."""


class NeverFits(Exception):
    """A request needs more memory than it could have if it were alone; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class ChunkPeak:
    """What computing takes beside weights and caches, as measured at the start."""

    token_bytes: float = 0.0
    """For each token that is computed at once."""
    pair_bytes: float = 0.0
    """For each such token and each one before it: scores, where attention materialises them."""


@dataclass(frozen=True, slots=True)
class RowMemory:
    """What one row keeps, and what all of them are computed with."""

    token_bytes: int
    """KV of one token in the layers that keep all of them."""
    windows: tuple[tuple[int, int], ...]
    """(tokens, bytes a token) of the layers with sliding windows."""
    state_bytes: int
    num_layers: int
    """Of those that keep all tokens."""
    block_token_bytes: int
    """KV of one token in blocks, where windows keep everything as well."""
    chunk_tokens: int
    vocab_size: int = 0
    peak: ChunkPeak = ChunkPeak()
    growth_tokens: int = GROWTH_TOKENS

    @classmethod
    def of(
        cls,
        config: ModelCacheConfig,
        chunk_tokens: int,
        vocab_size: int = 0,
        peak: ChunkPeak = ChunkPeak(),
    ) -> RowMemory:
        grows, windows = 0, list[tuple[int, int]]()
        for group in config.groups:
            nbytes = group.keys.bytes_per_token + group.values.bytes_per_token
            if group.window:
                windows.append((group.window, nbytes))
            else:
                grows += nbytes
        return cls(
            grows,
            tuple(windows),
            config.checkpoint_bytes,
            config.count(LayerKind.KV),
            config.bytes_per_token,
            chunk_tokens,
            vocab_size,
            peak,
        )

    def caches(self, num_rows: int, longest: int) -> int:
        """What rows keep, when the longest has so many tokens."""
        room = longest + self.growth_tokens
        windows = sum(min(room, size + self.chunk_tokens) * each for size, each in self.windows)
        return num_rows * (room * self.token_bytes + windows + self.state_bytes)

    def computing(self, num_rows: int, longest: int, prompt: int, num_prompts: int = 1) -> int:
        """What a step takes beside the caches.

        ``prompt``: the longest of the ``num_prompts`` that are still computed; 0: there are none.
        """
        chunk = self.chunk_tokens * most_chunks(num_prompts) if prompt else 0
        scores = max(
            chunk * (self.peak.token_bytes + prompt * self.peak.pair_bytes),
            num_rows * (self.peak.token_bytes + longest * self.peak.pair_bytes),
        )
        growing = num_rows * (longest + self.growth_tokens) * self.token_bytes
        growing = growing * min(LAYERS_AT_ONCE, self.num_layers) // max(1, self.num_layers)
        return int(scores) + growing + num_rows * self.vocab_size * 4 * LOGIT_COPIES

    def need(self, lengths: Sequence[int], prompt: int = 0, num_prompts: int = 1) -> int:
        """Rows of so many tokens each, and what computes them; the others as in ``computing``."""
        if not lengths:
            return 0
        num_rows, longest = len(lengths), max(lengths)
        computing = self.computing(num_rows, longest, prompt, num_prompts)
        return self.caches(num_rows, longest) + computing


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One total, and what of it is never free for rows."""

    total_bytes: int
    weight_bytes: int
    reserve_bytes: int
    hot_bytes: int
    """What the hot tier is set to; it has so much only while rows don't need it."""
    row: RowMemory
    host_is_apart: bool = False
    """The total is a device's memory, so what is on its way to or from files is not in it."""

    @property
    def room_bytes(self) -> int:
        """What rows can have at most: the hot tier empty, nothing on its way."""
        return self.total_bytes - self.weight_bytes - self.reserve_bytes

    def longest(self, context: int, num_rows: int = 1) -> int:
        """Tokens that each of so many rows can have, up to ``context``; 0: not even one.

        All of them could be a prompt: so a row that gave its place up can come back.
        """
        low, high = 0, context
        while low < high:
            middle = (low + high + 1) // 2
            if self.row.need([middle] * num_rows, middle) <= self.room_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def check(self, num_prompt: int, num_rows: int) -> None:
        """Raises NeverFits for a prompt that leaves no room for a token of each choice."""
        asked = self.row.need([num_prompt + 1] * num_rows, num_prompt + 1)
        if asked <= self.room_bytes:
            return
        choices = f" for {num_rows} choices" if num_rows > 1 else ""
        longest = self.longest(num_prompt, num_rows)
        raise NeverFits(
            f"This prompt is too long{choices}: its {num_prompt:,} tokens and an answer need "
            f"{megabytes(asked)} of memory, and memory_budget ({megabytes(self.total_bytes)}) "
            f"leaves {megabytes(max(0, self.room_bytes))} beside weights "
            f"({megabytes(self.weight_bytes)}) and reserve ({megabytes(self.reserve_bytes)}), "
            f"enough for {longest:,} tokens{choices}. Raise memory_budget or send less"
        )


def megabytes(count: int) -> str:
    """
    >>> megabytes(1_234_567_890), megabytes(56_789)
    ('1,234.6 MB', '0.1 MB')
    """
    return f"{count / 1e6:,.1f} MB"
