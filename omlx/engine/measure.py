"""How fast this device computes and reads memory, and how much memory a chunk of a prompt takes.

Speed is what prefill and decoding are bound by. It is measured in a process of its own, so that a
broken backend takes nothing else down and no measurement disturbs a server. Memory is measured by
the server itself, with its model, before it serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from omlx.core.memory import ChunkPeak
from omlx.engine.kv import as_if_long, fresh_caches, leaves
from omlx.engine.load import backend_name

SIDE = 1024
"""Of the square matrices that are multiplied."""

READ_BYTES = 1 << 28
"""Of the matrix that is read; beyond any cache of a processor we know."""

_REPEATS = 4
_PARTS = 4
"""The matrix is read in, where launching costs nothing."""

_READS_ON_GPU = 8
"""Of the matrix in one evaluation: launching costs as much as one read on a large GPU."""


PROBE_SHARE_OF_CHUNK = 8
"""A chunk of a large model takes seconds on a laptop; in so much less a token takes as much."""

PROBE_BEHIND = 4096
"""Tokens before the second probe: with fewer, scores hide behind what the wide layers take."""

SHOWS = 1.1
"""So much more a token takes far behind the beginning when scores are materialised."""

PROBE_SHARE_OF_MEMORY = 8
"""The second probe's caches take no more than one of so many parts of the memory."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Best of a few tries each, the first of which warms up."""

    matmul_gflops: float
    """float32 on CPU, where weights are float32; else float16."""
    matmul_threads: float
    """Processor seconds a second while it multiplied: how many threads worked. CPU only."""
    read_bytes_per_s: float
    """Of a matrix times a vector, which is what decoding one row does with each weight."""


def measure() -> Speed:
    """Takes 0.5 to 3 s and 600 MB."""
    on_cpu = backend_name() == "cpu"
    dtype = mx.float32 if on_cpu else mx.float16
    square = mx.random.normal((SIDE, SIDE)).astype(dtype)
    mx.eval(square)
    multiply_s, threads = _best(lambda: mx.eval(square @ square))
    width = 4096
    # Not ones: MLX keeps a constant as one number and would read no memory.
    matrix = (mx.arange(READ_BYTES // dtype.size) % 128).astype(dtype).reshape(-1, width)
    num_reads = 1 if on_cpu else _READS_ON_GPU
    vector = mx.random.normal((width, 1)).astype(dtype)
    # Parts in turn, so none is in a cache when it comes round again, and each is short enough to
    # be computed without an interruption now and then. A GPU gets all in one launch.
    parts = mx.split(matrix, _PARTS) if on_cpu else [matrix]
    mx.eval(parts, vector)
    turns = [
        _best(lambda part=part: mx.eval([part @ vector for _ in range(num_reads)]), 1)[0]
        for _ in range(_REPEATS)
        for part in parts
    ]
    return Speed(2 * SIDE**3 / multiply_s / 1e9, threads, num_reads * parts[0].nbytes / min(turns))


def measure_chunk(model: nn.Module, chunk_tokens: int, total_bytes: int) -> ChunkPeak:
    """Compute a part of a chunk at a prompt's beginning, and one far behind it, and see the peaks.

    On the MLX thread; the model's first passes, so kernels are compiled here. Begins a new count
    of the peak, and holds MLX to ``total_bytes``: it then gives back freed buffers before that.
    """
    mx.set_memory_limit(total_bytes)
    tokens = max(1, chunk_tokens // PROBE_SHARE_OF_CHUNK)
    near, _ = _peak(model, tokens, 0, total_bytes)
    far, behind = _peak(model, tokens, PROBE_BEHIND, total_bytes)
    # Where it shows, what is far behind is most of the peak; all of it is put down to that.
    pair_bytes = far / tokens / max(1, behind) if far > SHOWS * near else 0.0
    mx.clear_cache()
    mx.reset_peak_memory()
    return ChunkPeak(near / tokens, pair_bytes)


def _peak(model: nn.Module, tokens: int, behind: int, total_bytes: int) -> tuple[int, int]:
    """(bytes taken at most beside the caches, tokens before) for so many tokens of a prompt."""
    caches = fresh_caches(model)
    model(mx.zeros((1, 2), mx.int32), cache=caches)  # makes the buffers
    mx.eval([cache.state for cache in leaves(caches)])
    if behind:
        behind = as_if_long(caches, behind, tokens, total_bytes // PROBE_SHARE_OF_MEMORY)
    prompt = mx.zeros((1, tokens), mx.int32)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model(prompt, cache=caches)
    mx.eval([cache.state for cache in leaves(caches)])
    return max(0, mx.get_peak_memory() - before), behind


def device_name() -> str:
    """As the backend calls it; empty where it does not say."""
    return str(dict(mx.device_info()).get("device_name", ""))


def _best(run: Callable[[], None], repeats: int = _REPEATS) -> tuple[float, float]:
    """(seconds, processor seconds a second) of the fastest of some runs."""
    found: list[tuple[float, float]] = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        run()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        found.append((wall, processor / wall))
    return min(found)
