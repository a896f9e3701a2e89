"""What bounds the scheduler, and what it must know of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.core.memory import MemoryPlan

RESTORE_BYTES_A_STEP = 50_000_000
"""Of restored prefixes with one step while rows decode: about 10 ms, at the 5 GB/s of one copying
thread. Fewer would let a long prefix wait for its many steps."""

PREFETCH_BYTES_MAX = 1 << 30
PREFETCH_SHARE = 4
"""What is read for requests that wait comes on top of the RAM tier, so it is a quarter of that at
most; and a gigabyte, half a second of a fast disk: nobody who waits longer gains by more."""


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
    restore_tokens: int | None = None
    """Tokens of restored prefixes with one step while rows decode; None: all there are."""
    hot_is_free: bool = False
    """Blocks in RAM don't count against ``restore_tokens``: the device joins them."""
    decode_share: float = 0.5
    """Of the time while prompts are computed: what running streams keep."""
    through: bool = False
    """A request does not end before its blocks have files."""
    patience_s: float = 2.0
    """How long an ended request waits for room to write what is kept nowhere else."""
    prefetch_bytes: int = 0
    """What may be read from files for requests that wait for a slot, in all."""
    memory: MemoryPlan | None = None
    """What rows and the hot tier share; None: nobody counts."""
    cut_before_decode: bool = False
    """What is stored must be cut out before the row decodes.

    A sliding window would lose its tokens, a recurrent state would be at another position.
    """
