"""What each layer of a model keeps between tokens, and how a block of it is laid out.

The engine fills this in from the cache objects the model really makes; everything else reads it.
Layers of one kind, shape and dtype form a group, and a block holds two arrays a group, all its
layers stacked: Metal limits the *number* of buffers, not only their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class LayerKind(StrEnum):
    KV = "kv"
    """Keys and values of every token."""
    ROTATING = "rotating"
    """Keys and values of the last ``window`` tokens."""
    RECURRENT = "recurrent"
    """States of a fixed size that hold all tokens folded together."""
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one recurrent layer, ``gdn.<layer>.<k>``; the same shape at any position."""

    name: str
    shape: tuple[int, ...]
    """Of one row, without the batch."""
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_recurrent(self) -> bool:
        """Whether this is the state that codecs apply to.

        Recurrent states are float32 matrices per head, whatever the model's dtype. Convolution
        tails are (tokens, channels) and small; they stay as they are.
        """
        return self.dtype == "float32" and len(self.shape) >= 3


@dataclass(frozen=True, slots=True)
class LayerConfig:
    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: str = ""
    window: int = 0
    states: tuple[StateSpec, ...] = ()
    why_not: str = ""
    """For UNSUPPORTED: what stands in the way, for the start-up lines."""
    batches: bool = True
    """Whether rows of different length can share its cache."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a block: ``(layers, kv_heads, tokens, head_dim)``."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        return (self.layers, self.kv_heads, tokens, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys (and whose values) can be stacked into one array."""

    layers: tuple[int, ...]
    keys: TensorSpec
    values: TensorSpec
    window: int
    """0: all tokens are kept."""


@dataclass(frozen=True)
class ModelCacheConfig:
    layers: tuple[LayerConfig, ...]

    @property
    def why_not_cacheable(self) -> str | None:
        """Why prefixes of this model can't be reused, or None."""
        for index, layer in enumerate(self.layers):
            if layer.kind is LayerKind.UNSUPPORTED:
                return f"layer {index} {layer.why_not}"
        return None if self.layers else "the model has no layers that keep anything"

    @property
    def batches(self) -> bool:
        """Whether several rows can decode in one pass; else each has passes of its own."""
        return all(layer.batches for layer in self.layers)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        by_config: dict[LayerConfig, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.kind in (LayerKind.KV, LayerKind.ROTATING):
                by_config.setdefault(layer, []).append(index)

        def specs() -> Iterator[LayerGroup]:
            for number, (layer, indexes) in enumerate(by_config.items()):
                keys, values = (
                    TensorSpec(f"kv{number}.{part}", len(indexes), layer.kv_heads, dim, layer.dtype)
                    for part, dim in (("keys", layer.key_dim), ("values", layer.value_dim))
                )
                yield LayerGroup(tuple(indexes), keys, values, layer.window)

        return tuple(specs())

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of a block, in the order in which they are stored."""
        return tuple(spec for group in self.groups for spec in (group.keys, group.values))

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What a checkpoint holds, in the order in which it is stored."""
        return tuple(state for layer in self.layers for state in layer.states)

    @property
    def is_recurrent(self) -> bool:
        """Whether a prefix can be continued only from a checkpoint."""
        return bool(self.states)

    @property
    def checkpoint_bytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    @property
    def bytes_per_token(self) -> int:
        """Of KV that grows with every token."""
        return sum(spec.bytes_per_token for spec in self.tensors)

    def count(self, kind: LayerKind) -> int:
        return sum(layer.kind is kind for layer in self.layers)

    def describe(self) -> str:
        """One line that names everything that determines a block's bytes; part of the namespace."""
        return ";".join(
            f"{layer.kind},{layer.kv_heads},{layer.key_dim},{layer.value_dim},"
            f"{layer.dtype},{layer.window},"
            + "+".join(f"{state.shape}{state.dtype}" for state in layer.states)
            for layer in self.layers
        )
