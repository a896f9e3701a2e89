"""What bounds the scheduler, and what it must know of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_running: int
    max_queued: int
    max_context: int
    chunk_tokens: int
    block_size: int
    caching: bool
    """False: nothing is looked up or stored; prompts are cut at the same places all the same."""
    feeds_ahead: bool = True
    """Whether the engine has computed a token's KV by the time it emits it."""
    checkpoint_interval: int | None = None
    """For recurrent models: tokens between the checkpoints of a long prompt."""
    embedded: bool = False
    """Whether a checkpoint goes into the file of the block that ends with it."""
    cut_before_decode: bool = False
    """What is stored must be cut out before the row decodes.

    A sliding window would lose its tokens, a recurrent state would be at another position.
    """
