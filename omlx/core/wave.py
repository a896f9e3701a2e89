"""Short prompts that arrived together, and how many of them a step computes. Pure."""

from __future__ import annotations

WAVE_CHUNKS = 4
"""A prompt of more chunks than this is a long one, whenever it came; and no step computes more."""

WAVE_PARTS = 4
"""A step computes a chunk each of so large a part of a wave. A pass over several is faster by a
twentieth on CPU and by more on a GPU, and first tokens that come some chunks later cost the mean of
all no more than that gains. With fewer than eight prompts it would."""


def most_chunks(num_rows: int) -> int:
    """That a step computes, when so many rows have prompts to compute."""
    return max(1, min(WAVE_CHUNKS, num_rows // WAVE_PARTS))
