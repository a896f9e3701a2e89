"""Rows that share one forward pass: chosen by what it costs, merged for it, and split again.

A pass over few tokens takes as long as reading every weight; so short chunks of several prompts
are computed in one pass, padded on the right to the longest. Each row keeps caches of its own
between two passes, so it can be cut, forked or dropped without a look at the others. Merging copies
what the rows hold, which is little beside computing it, and counts against the gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList

from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.engine.kv import fork_caches, leaves, state_place

COPIED_PER_COMPUTED = 64
"""Tokens that can be merged and split while one is computed: SmolLM2 in float32 on CPU took 46 us
and 5.5 ms, with slow strided copies; an H200 0.06 us and 4.6 us."""

PAD_TOKEN = 0


def groups_of(
    lengths: Sequence[int], positions: Sequence[int], pass_tokens: int
) -> list[list[int]]:
    """Which chunks, by index, share a pass; longest first within each.

    lengths: tokens to compute of each row; positions: tokens in its caches. ``pass_tokens``: as
    many as could be computed in the time of a pass over none. A row joins while the padding it gets
    and the copies of what it holds cost less than a pass of its own.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        group = groups[-1] if groups else []
        padding = lengths[group[0]] - lengths[index] if group else 0
        copied = positions[index] + (positions[group[0]] if len(group) == 1 else 0)
        if group and padding + copied / COPIED_PER_COMPUTED < pass_tokens:
            group.append(index)
        else:
            groups.append([index])
    return groups


def compute(
    model: nn.Module,
    config: ModelCacheConfig,
    rows: Sequence[list[Any]],
    positions: Sequence[int],
    chunks: Sequence[list[int]],
) -> list[list[Any]]:
    """Each row's caches after its chunk, evaluated.

    rows: the caches of one row each, a cache a layer; positions: tokens in them; chunks: each
    row's tokens, at least one. Several rows are unchanged, so a pass that fails can be repeated
    row by row.
    """
    if len(rows) == 1:
        model(mx.array([chunks[0]]), cache=rows[0])  # (1, T)
        mx.eval([cache.state for cache in leaves(rows[0])])
        return [rows[0]]
    lengths = [len(chunk) for chunk in chunks]
    padding = [max(lengths) - length for length in lengths]
    merged = merge(config, rows)
    if any(padding):
        for cache in merged:
            cache.prepare(lengths=lengths, right_padding=padding)
    padded = [[*chunk, *[PAD_TOKEN] * pad] for chunk, pad in zip(chunks, padding, strict=True)]
    model(mx.array(padded), cache=merged)  # (B, T)
    if any(padding):
        for cache in merged:
            cache.finalize()
    parts = split(merged, [at + length for at, length in zip(positions, lengths, strict=True)])
    mx.eval([cache.state for part in parts for cache in leaves(part)])
    return parts


def merge(config: ModelCacheConfig, rows: Sequence[list[Any]]) -> list[Any]:
    """Caches of all rows in order. What was given is unchanged if there are more than one."""
    return rows[0] if len(rows) == 1 else _merged(config, rows)


def _merged(config: ModelCacheConfig, rows: Sequence[list[Any]]) -> list[Any]:
    """The same by halves, so that no row is copied more often than needed; never the rows' own."""
    if len(rows) == 1:
        return _own(config, rows[0])
    half = len(rows) // 2
    left, right = _merged(config, rows[:half]), _merged(config, rows[half:])
    for cache, other in zip(left, right, strict=True):
        cache.extend(other)
    return left


def split(merged: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """The caches of each row as lazy copies: none keeps the others in memory.

    lengths: tokens in each.
    """
    return [
        [_part(cache, mx.array([row]), length) for cache in merged]
        for row, length in enumerate(lengths)
    ]


def _part(cache: Any, row: mx.array, length: int) -> Any:
    """One row of a layer's cache. row: its index in a vector of one."""
    if isinstance(cache, CacheList):
        return CacheList(*(_part(inner, row, length) for inner in cache.caches))
    if not isinstance(cache, BatchKVCache):
        (part,) = fork_caches([cache])
        part.filter(row)
        return part
    # Its own filter asks the device for the padding, layer by layer; it is known here.
    assert cache.keys is not None and cache.values is not None, "a pass has filled it"
    part = BatchKVCache([0])
    start = cache._idx - length
    part.keys = mx.take(cache.keys[:, :, start:], row, axis=0)
    part.values = mx.take(cache.values[:, :, start:], row, axis=0)
    part.offset = mx.array([length])
    part._idx = length
    return part


def _own(config: ModelCacheConfig, row: list[Any]) -> list[Any]:
    """The row's caches as objects of their own; states that are not there yet are zeros.

    An empty ``ArraysCache`` does not say how many rows it stands for.
    """
    own = fork_caches(row)
    flat = leaves(own)
    for spec in config.states:
        layer, place = state_place(spec)
        cache: ArraysCache = flat[layer]
        if cache.cache[place] is None:
            dtype: mx.Dtype = getattr(mx, spec.dtype)
            cache.cache[place] = mx.zeros((1, *spec.shape), dtype)
    return own
