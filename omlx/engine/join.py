"""Blocks become the caches of a row: joined layer by layer, so that it can be done in parts.

Each layer gets a buffer of its own with room for what follows: the next update is then done in
place, so the payload is copied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from omlx.cache.hybrid_cache import LayerGroup

Array = mx.array | np.ndarray[Any, Any]
"""In a device's memory, or in the host's: there bfloat16 is the bits of uint16."""

Block = tuple[Array, ...]
"""A block's payload in the order of ``ModelCacheConfig.tensors``: (L, H, T, D) each."""

ROOM = 256
"""Batch caches grow by this many tokens; restored ones are made with room for the next ones."""


def join(
    caches: Sequence[Any],
    groups: Sequence[LayerGroup],
    blocks: Sequence[Block],
    takes: Sequence[int],
    *,
    on_host: bool,
) -> Iterator[int]:
    """Fill empty batch caches of one row with the first ``takes`` tokens of each block.

    caches: one a layer. Yields the bytes of each part that is done, one layer's keys or values.
    """
    for number, group in enumerate(groups):
        keys = [arrays[2 * number] for arrays in blocks]
        values = [arrays[2 * number + 1] for arrays in blocks]
        if group.window:
            yield from _join_rotating(caches, group, keys, values, takes, on_host)
        else:
            yield from _join_kv(caches, group, keys, values, takes, on_host)


def _join_kv(
    caches: Sequence[Any],
    group: LayerGroup,
    keys: Sequence[Array],
    values: Sequence[Array],
    takes: Sequence[int],
    on_host: bool,
) -> Iterator[int]:
    total = sum(takes)
    length = (total // ROOM + 1) * ROOM
    joined_keys = _joined(keys, takes, length, group.keys.dtype, on_host)
    joined_values = _joined(values, takes, length, group.values.dtype, on_host)
    for layer in group.layers:
        cache = caches[layer]
        cache.keys = next(joined_keys)
        yield cache.keys.nbytes
        cache.values = next(joined_values)
        yield cache.values.nbytes
        cache.offset = mx.array([total])
        cache._idx = total


def _join_rotating(
    caches: Sequence[Any],
    group: LayerGroup,
    keys: Sequence[Array],
    values: Sequence[Array],
    takes: Sequence[int],
    on_host: bool,
) -> Iterator[int]:
    """The last ``window`` tokens in temporal order, and the true offset."""
    total = sum(takes)
    kept = min(total, group.window)
    first = 0  # of the blocks that reach into the window
    while sum(takes[first + 1 :]) >= kept:
        first += 1
    takes = takes[first:]
    length = sum(takes)
    joined_keys = _joined(keys[first:], takes, length, group.keys.dtype, on_host)
    joined_values = _joined(values[first:], takes, length, group.values.dtype, on_host)
    for layer in group.layers:
        cache = caches[layer]
        cache.keys = mx.contiguous(next(joined_keys)[:, :, length - kept :])
        yield cache.keys.nbytes
        cache.values = mx.contiguous(next(joined_values)[:, :, length - kept :])
        yield cache.values.nbytes
        cache.offset = mx.array([total])
        cache._idx = cache._offset = kept


def _joined(
    arrays: Sequence[Array], takes: Sequence[int], length: int, dtype: str, on_host: bool
) -> Iterator[mx.array]:
    """Layer by layer the first ``takes`` tokens of each block: (1, H, length, D)."""
    if on_host:
        return _joined_on_host(arrays, takes, length, dtype)
    return _joined_on_device([on_device(array, dtype) for array in arrays], takes, length)


def _joined_on_device(
    arrays: Sequence[mx.array], takes: Sequence[int], length: int
) -> Iterator[mx.array]:
    num_layers, heads, _, dim = arrays[0].shape
    blank = mx.zeros((heads, length - sum(takes), dim), arrays[0].dtype)
    for layer in range(num_layers):
        parts = [array[layer, :, :take] for array, take in zip(arrays, takes, strict=True)]
        yield mx.concatenate([*parts, blank], axis=1)[None]


def _joined_on_host(
    arrays: Sequence[Array], takes: Sequence[int], length: int, dtype: str
) -> Iterator[mx.array]:
    """The same by NumPy, which copies whole runs; MLX's CPU backend copies item by item.

    Measured for 1,500 tokens of SmolLM2 in float32: 17 ms against 50 ms, a plain copy 12 ms.
    """
    sources = [on_host(array) for array in arrays]
    num_layers, heads, _, dim = sources[0].shape
    joined = np.zeros((1, heads, length, dim), sources[0].dtype)
    for layer in range(num_layers):
        position = 0
        for source, take in zip(sources, takes, strict=True):
            joined[0, :, position : position + take] = source[layer, :, :take]
            position += take
        yield on_device(joined, dtype)


def on_host(array: Array) -> np.ndarray[Any, Any]:
    """A view of an evaluated array; where arrays are in host memory nothing is copied."""
    if isinstance(array, np.ndarray):
        return array
    view = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(view)
    return np.asarray(view)


def on_device(array: Array, dtype: str) -> mx.array:
    """The same bytes as an array of ``dtype``, a copy if they were the host's."""
    if isinstance(array, mx.array):
        return array
    copied = mx.array(array)
    return copied.view(mx.bfloat16) if dtype == "bfloat16" else copied
