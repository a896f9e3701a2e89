"""Keep freed memory for the next buffer, where MLX takes it from the C library (CPU on Linux).

Arrays of a megabyte are mapped and unmapped anew each time by default, and the kernel clears every
page of them first. Restoring 1,500 tokens of SmolLM2 from RAM took 35 ms so and 15 ms with these
settings; a plain copy takes 9 ms.

There is one heap for all threads. One of a thread's own grows in parts of 64 MB that are unmapped
when they are empty, so each reader would clear the pages of every file anew, at a third of the
speed; and what the engine thread freed would be of no use to it. Few threads ask for memory, and
for buffers that take milliseconds to fill: none waits for another.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
MMAP_BYTES_MIN = 32 << 20
"""The most that glibc accepts: what is larger is mapped, and returned when it is freed."""
KEPT_BYTES_MAX = 256 << 20
"""Free memory at the heap's end beyond this goes back to the system."""


def keep_freed_memory() -> bool:
    """Tell glibc so, before threads start: one keeps the heap it has. False without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    results = [
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES_MIN),
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX),
        mallopt(_M_ARENA_MAX, 1),
    ]
    return all(results)
