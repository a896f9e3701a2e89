"""KV between a live batch and blocks: probing, cutting out, putting back, and the hot tier itself.

This is the one place that reaches into mlx-lm's batch caches (mlx-lm 0.32). Row ``b`` of a
``BatchKVCache`` keeps token ``t`` at ``left_padding[b] + t``; a ``BatchRotatingKVCache`` keeps the
last tokens only, and ends at token ``offset[b]`` once it is put into temporal order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    _BaseCache,
    make_prompt_cache,
)

from omlx.cache.block_file import HostTensor
from omlx.cache.blocks import BlockId
from omlx.cache.hybrid_cache import (
    DTYPE_BYTES,
    LayerConfig,
    LayerKind,
    ModelCacheConfig,
    StateSpec,
    TensorSpec,
)
from omlx.core.plan import HostBlock
from omlx.engine.join import Block, join, on_device, on_host

BlockArrays = tuple[mx.array, ...]
"""A block's payload as MLX arrays, evaluated; see ``join.Block``."""

WASTE_BYTES_MAX = 64 << 10
"""A block that was read keeps its whole file in memory; more than a header on top is too much.
That of a checkpoint of a hundred states takes some tens of kilobytes."""


class UnsupportedModel(Exception):
    """The model can't be computed with; the text says why."""


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches that keep something, with lists opened; a place here is a layer's index."""
    flat: list[Any] = []
    for cache in caches:
        flat += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return flat


def probe(model: nn.Module, *, evaluate: bool = True) -> ModelCacheConfig:
    """What each layer keeps, from the cache objects that the model makes and fills.

    ``evaluate`` False: shapes and dtypes only, so no weight is read or computed with.
    """
    caches = make_prompt_cache(model)
    model(mx.array([[0, 0]]), cache=caches)
    if evaluate:
        mx.eval([c.state for c in leaves(caches)])
    return ModelCacheConfig(
        tuple(_probe_layer(index, cache) for index, cache in enumerate(leaves(caches)))
    )


def _probe_layer(index: int, cache: Any) -> LayerConfig:
    if type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0):
        rotating = type(cache) is RotatingKVCache
        assert cache.keys is not None and cache.values is not None, "a forward pass filled it"
        dtype = _dtype_name(cache.keys)
        if _dtype_name(cache.values) != dtype:
            return LayerConfig(LayerKind.UNSUPPORTED, why_not="mixes dtypes in keys and values")
        return LayerConfig(
            LayerKind.ROTATING if rotating else LayerKind.KV,
            kv_heads=cache.keys.shape[1],
            key_dim=cache.keys.shape[3],
            value_dim=cache.values.shape[3],
            dtype=dtype,
            window=cache.max_size if rotating else 0,
        )
    if type(cache) is ArraysCache:
        return _probe_states(index, cache)
    return LayerConfig(
        LayerKind.UNSUPPORTED,
        why_not=f"uses {type(cache).__name__}, which can't be cut in blocks",
        batches=can_be_batched(cache),
    )


def _probe_states(index: int, cache: ArraysCache) -> LayerConfig:
    """A layer of one, two or more states; those that the model leaves empty are none."""
    states = tuple(
        StateSpec(f"gdn.{index}.{place}", tuple(array.shape[1:]), _dtype_name(array))
        for place, array in enumerate(cache.cache)
        if array is not None
    )
    unknown = [state.dtype for state in states if state.dtype not in DTYPE_BYTES]
    if unknown:
        return LayerConfig(LayerKind.UNSUPPORTED, why_not=f"keeps a state of {unknown[0]}")
    if not states:
        return LayerConfig(LayerKind.UNSUPPORTED, why_not="keeps states that it never fills")
    return LayerConfig(LayerKind.RECURRENT, states=states)


def can_be_batched(cache: Any) -> bool:
    """Whether mlx-lm has a form of a layer's cache for several rows; it has none that keeps a
    window's first tokens."""
    return hasattr(cache, "merge") and not getattr(cache, "keep", 0)


def fresh_caches(model: nn.Module) -> list[Any]:
    """Empty caches for one row: batch caches, or the model's own if one has no such form."""
    caches = make_prompt_cache(model)
    if all(map(can_be_batched, leaves(caches))):
        return [_batched(cache) for cache in caches]
    return caches


def as_if_long(caches: Sequence[Any], length: int, more: int, nbytes: int) -> int:
    """Let a row's caches that keep all tokens look as if it had ``length``, with room for ``more``.

    They hold zeros. Returns the length, which is less where it would take more than ``nbytes``.
    """
    full = [cache for cache in leaves(caches) if isinstance(cache, BatchKVCache)]
    a_token = sum(cache.nbytes // cache.keys.shape[2] for cache in full if cache.keys is not None)
    length = min(length, nbytes // max(1, a_token))
    for cache in full:
        assert cache.keys is not None and cache.values is not None, "a computed row has keys"
        for name in ("keys", "values"):
            array = getattr(cache, name)
            shape = (*array.shape[:2], length + more, array.shape[3])
            setattr(cache, name, mx.zeros(shape, array.dtype))
        cache.offset, cache._idx = mx.array([length]), length
    mx.eval([cache.state for cache in full])
    return length


def order_windows(caches: Sequence[Any]) -> None:
    """Put sliding windows in the order of time.

    A window that a chunk of one token was written into is rotated; a restored one is not. In one
    order both round alike.
    """
    for cache in leaves(caches):
        if isinstance(cache, BatchRotatingKVCache):
            cache._temporal_order()


def fork_caches(caches: Sequence[Any]) -> list[Any]:
    """Caches that start equal and go their own ways; data is copied only once it is written.

    MLX writes into the array *object*, so each copy needs objects of its own; they share the
    buffer until one of them is written to.
    """
    return [_forked(cache) for cache in caches]


def _forked(value: Any) -> Any:
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_forked(item) for item in value)
    if isinstance(value, _BaseCache):
        forked = copy.copy(value)
        for name, attribute in vars(value).items():
            setattr(forked, name, _forked(attribute))
        return forked
    return value


def _batched(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_batched(part) for part in cache.caches))
    if type(cache) is KVCache:
        return BatchKVCache([0])
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return BatchRotatingKVCache(cache.max_size, [0])
    if type(cache) is ArraysCache:
        # Merging would set a left padding of zeros, and with it another kernel than for a
        # restored row.
        return cache
    return cache.merge([cache])


class BlockStore:
    """The hot tier's payloads, by block id. The pool decides; this only keeps."""

    def __init__(self, config: ModelCacheConfig, *, host_copies: bool = False) -> None:
        """``host_copies``: arrays are in host memory, so a block that was read is used where it is,
        and blocks are joined with NumPy, which is faster there."""
        self._config = config
        self.host_copies = host_copies
        self._groups = config.groups
        self._blocks: dict[BlockId, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for arrays in self._blocks.values() for array in arrays)

    def put(self, block_id: BlockId, arrays: Block) -> None:
        self._blocks[block_id] = arrays

    def get(self, block_id: BlockId) -> Block:
        return self._blocks[block_id]

    def drop(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            self._blocks.pop(block_id, None)

    def clear(self) -> None:
        self._blocks.clear()

    def cut(self, caches: Sequence[Any], row: int, start: int, stop: int) -> BlockArrays:
        """Tokens ``start``..``stop`` of a row, as compact copies; lazy until evaluated."""
        caches = leaves(caches)
        arrays: list[mx.array] = []
        for group in self._groups:
            spans = [_span(caches[layer], row, start, stop) for layer in group.layers]
            arrays.append(_stacked([keys for keys, _ in spans]))
            arrays.append(_stacked([values for _, values in spans]))
        return tuple(arrays)

    def restore(self, caches: list[Any], blocks: Sequence[Block], takes: Sequence[int]) -> None:
        """Fill empty batch caches of one row with the first ``takes`` tokens of each block."""
        for _ in self.restore_in_parts(caches, blocks, takes):
            pass

    def restore_in_parts(
        self, caches: list[Any], blocks: Sequence[Block], takes: Sequence[int]
    ) -> Iterator[int]:
        """As ``restore``, a part with each item: its bytes."""
        return join(leaves(caches), self._groups, blocks, takes, on_host=self.host_copies)

    def cut_states(self, caches: Sequence[Any], row: int) -> BlockArrays:
        """A checkpoint: every state of a row as it is now, as compact copies."""
        flat = leaves(caches)
        places = (state_place(spec) for spec in self._config.states)
        return tuple(
            mx.take(flat[layer].cache[place], mx.array([row]), axis=0)[0] for layer, place in places
        )

    def restore_states(self, caches: Sequence[Any], arrays: Block) -> None:
        """Put a checkpoint into the empty caches of one row. The checkpoint stays unchanged."""
        flat = leaves(caches)
        for spec, array in zip(self._config.states, arrays, strict=True):
            layer, place = state_place(spec)
            flat[layer].cache[place] = on_device(array, spec.dtype)[None]


def _stacked(slices: list[mx.array]) -> mx.array:
    """(L, H, T, D), always a copy: a view would keep the whole batch alive."""
    if len(slices) == 1:
        return mx.take(slices[0][None], mx.array([0]), axis=0)
    return mx.stack(slices)


def state_place(spec: StateSpec) -> tuple[int, int]:
    """(layer, place in its list of states)"""
    _, layer, place = spec.name.split(".")
    return int(layer), int(place)


def _span(cache: Any, row: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
    """Keys and values of a row's tokens ``start``..``stop``: (H, T, D) each."""
    if isinstance(cache, BatchKVCache):
        assert cache.keys is not None and cache.values is not None, "a computed row has keys"
        padding = numbers(cache.left_padding)[row]
        a, b = padding + start, padding + stop
        assert b <= cache._idx, "tokens that are not computed yet"
        return cache.keys[row, :, a:b], cache.values[row, :, a:b]
    assert isinstance(cache, BatchRotatingKVCache), "other kinds are never cut"
    keys, values, end = cache.keys, cache.values, cache._idx
    assert keys is not None and values is not None, "a computed row has keys"
    if cache.rotated:
        keys = mx.roll(keys, -cache._idx, 2)
        values = mx.roll(values, -cache._idx, 2)
        end = keys.shape[2]
    behind = numbers(cache.offset)[row]
    a, b = end - (behind - start), end - (behind - stop)
    assert 0 <= a <= b <= end, "tokens that left the window, or are not computed yet"
    return keys[row, :, a:b], values[row, :, a:b]


def numbers(array: mx.array) -> list[Any]:
    """The items of a vector; MLX's own type for them covers scalars and nested lists too."""
    return cast(list[Any], array.tolist())


def _dtype_name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def all_finite(arrays: Iterable[mx.array]) -> mx.array:
    """A lazy scalar: whether no value is infinite or not a number."""
    return mx.all(mx.stack([mx.all(mx.isfinite(array)) for array in arrays]))


def to_host(specs: Sequence[TensorSpec | StateSpec], arrays: Block) -> HostBlock:
    """Views of evaluated arrays' bytes; on shared-memory backends nothing is copied."""
    return tuple(
        HostTensor(spec.name, spec.dtype, tuple(array.shape), on_host(array).data.cast("B"))
        for spec, array in zip(specs, arrays, strict=True)
    )


def views_of(block: HostBlock) -> Block:
    """Arrays in host memory on the very bytes of a block that was read; see ``Array``.

    A block whose file brought more along is copied, or the rest would stay in memory with it.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    whole = {id(t.data.obj): memoryview(t.data.obj).nbytes for t in block}
    copied = sum(whole.values()) - sum(t.nbytes for t in block) > WASTE_BYTES_MAX
    for tensor in block:
        items = np.uint16 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype)
        view = np.frombuffer(tensor.data, items).reshape(tensor.shape)
        arrays.append(view.copy() if copied else view)
    return tuple(arrays)


def from_host(block: HostBlock) -> BlockArrays:
    """Arrays with the bytes of a block that was read; every dtype comes back byte for byte."""
    return tuple(
        on_device(view, tensor.dtype) for view, tensor in zip(views_of(block), block, strict=True)
    )
