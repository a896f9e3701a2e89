"""Forms of two operations that are faster than MLX's own on CPU, and give the same bits.

A pass over one token is a thousand small operations there, of some microseconds each whatever
they compute. So the number of them counts, and is what these forms are about:

    rms_norm          eight operations in MLX; here one sum, and one fused pass over its result
    DepthwiseConv1d   MLX multiplies matrices of one row; here a few products and sums

Over SMALL values the fused pass loses to MLX's vectorised ones, and MLX's function is called.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

SMALL = 8192
"""Values of an array; where both ways are as fast."""

TAPS_MAX = 8
"""Longest kernel that is a sum of products; the usual one is 4."""

_theirs = mx.fast.rms_norm


def install(model: nn.Module) -> None:
    """Put the faster forms in their places: for all models, and within ``model``."""
    mx.fast.__dict__["rms_norm"] = rms_norm
    for _, module in model.named_modules():
        if type(module) is nn.Conv1d and _is_depthwise(module):
            module.__class__ = DepthwiseConv1d


def uninstall() -> None:
    """Put MLX's own rms_norm back."""
    mx.fast.__dict__["rms_norm"] = _theirs


def rms_norm(
    x: mx.array,
    weight: mx.array | None,
    eps: float,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``mx.fast.rms_norm``: x (.., D), weight (D,)."""
    floats = x.dtype == mx.float32 and (weight is None or weight.dtype == mx.float32)
    if x.size > SMALL or not floats or stream is not None:
        return _theirs(x, weight, eps, stream=stream)
    return _scaled(x, eps) if weight is None else _weighted(x, weight, eps)


@mx.compile
def _scaled(x: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + eps)


@mx.compile
def _weighted(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + eps) * weight


def _is_depthwise(conv: nn.Conv1d) -> bool:
    channels, taps, per_group = conv.weight.shape
    plain = (conv.stride, conv.padding, conv.dilation) == (1, 0, 1)
    one_each = per_group == 1 and conv.groups == channels
    return plain and one_each and taps <= TAPS_MAX and conv.weight.dtype == mx.float32


class DepthwiseConv1d(nn.Conv1d):
    """A ``Conv1d`` of one filter a channel, stride 1 and no padding."""

    def __call__(self, x: mx.array) -> mx.array:
        """x: (B, T + K - 1, C). Returns (B, T, C)."""
        taps = self.weight[..., 0].T  # (K, C)
        count = x.shape[1] - len(taps) + 1
        if count == 1:
            y = (x * taps).sum(axis=1, keepdims=True)
        else:
            y = x[:, :count] * taps[0]
            for i in range(1, len(taps)):
                y = y + x[:, i : i + count] * taps[i]
        return y + self.bias if "bias" in self else y
