"""The gated delta rule in chunks, where mlx-lm would go through a prompt token by token.

mlx-lm has a Metal kernel for Gated DeltaNet layers. Elsewhere it loops over tokens in Python. The
rule, for one head with state S (Dv, Dk), gate g in [0, 1] and beta:

    S <- g S;   d = beta (v - S k);   S <- S + d k^T;   y = S q

Within a chunk of C tokens every d is linear in the state S0 that the chunk starts from (the WY
form). With b the running sum of log g, K, Q, V the chunk's rows and D their d,

    (I + A) D = diag(beta) V - diag(beta e^b) K S0^T
    A[t, i]   = beta_t e^(b_t - b_i) k_t.k_i   for i < t, else 0

so one triangular inverse gives D = U - W S0^T. U and W do not depend on the state, and are made
for all chunks at once. What remains in order is one small step a chunk:

    D = U - W S0^T;   S1 = e^b S0 + D^T K'

Decays are exp of sums of log gates between two tokens, never a quotient, so nothing overflows, and
the sums are made per pair, so a weak gate after a strong one keeps its digits. The inverse doubles
blocks, [[X, 0], [-Y L X, Y]]; the power series of A would lose every digit on a prompt that
repeats one token.

On CUDA a kernel that goes token by token is faster (``gdn_kernel``), and chunks are for the shapes
that it does not take. MLX multiplies float32 matrices there in TF32 unless MLX_ENABLE_TF32=0, which
leaves an error of about 1e-3 in the state instead of 1e-6; ``install`` sets that variable.

One token alone, as in decoding, needs no chunk: on CPU two products do (``one_token``). On CUDA
mlx-lm's step stays: in the one measurement there, of one row, it gave 120 tok/s, the kernel 107.

Gates per key dimension (Kimi, Bailing) keep mlx-lm's loop: their decays do not factor out of k.k,
so A would need a product per pair and dimension, or exponentials of positive sums.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gated_delta

from omlx.engine import gdn_kernel

_theirs = gated_delta.gated_delta_update

LOOP_TOKENS = 7
"""From two to so many tokens mlx-lm's loop is as fast as chunks."""

_CPU_CHUNK, _GPU_CHUNK = 16, 128
_CPU_SEGMENT, _GPU_SEGMENT = 1 << 12, 1 << 18
"""Tokens x rows x value heads worked on at once: it bounds memory (CPU: stays in the cache)."""

_BLOCK = 16
"""Blocks of the inverse that masks double; above it real blocks do, with fewer FLOPs."""

_LOG_NOTHING = -40.0
"""Decays below e^-40 are 0. Products of those kept stay normal numbers: denormals crawl on CPU."""


# ── in the place of mlx-lm's function ────────────────────────────────────────
def install() -> bool:
    """Put ``update`` in the place of mlx-lm's function; False, and nothing done, on Metal.

    Holds for model modules imported before and later. Call it before the first matmul: on CUDA
    MLX reads MLX_ENABLE_TF32 once. A value the user has set stays.
    """
    if mx.metal.is_available():
        return False
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    _rebind(_theirs, update)
    return True


def uninstall() -> None:
    """Put mlx-lm's function back."""
    _rebind(update, _theirs)


def _rebind(old: object, new: object) -> None:
    # Models bind the name at import; the module it comes from is among these, for later ones.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("gated_delta_update") is old:
            module.__dict__["gated_delta_update"] = new


def update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's ``gated_delta_update``, whose arguments these are, in chunks.

    q, k: (B, T, Hk, Dk), normalised; v: (B, T, Hv, Dv); a, b: (B, T, Hv); mask: (B, T), True where
    a token counts. Returns y (B, T, Hv, Dv) as q's dtype and the state (B, Hv, Dv, Dk), float32.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    tokens = q.shape[1]
    alone = tokens == 1 and mask is None and on_cpu
    kernel = tokens > 1 and gdn_kernel.fits(q, v)
    if a.ndim != 3 or not (alone or kernel or tokens > LOOP_TOKENS):
        return _theirs(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            state,
            mask,
            use_kernel=use_kernel,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )
    beta = mx.sigmoid(b)
    if allow_neg_eigval:
        beta = beta * 2.0
    if alone or kernel:
        if lower_bound is None:
            g = gated_delta.compute_g(A_log, a, dt_bias)
        else:
            g = gated_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
        if alone:
            return one_token(q, k, v, g, beta, state)
        return gdn_kernel.delta_rule(q, k, v, g, beta, state, mask)
    rate = mx.exp(A_log.astype(mx.float32))
    if lower_bound is None:
        log_g = -rate * nn.softplus(a + dt_bias)
    else:
        log_g = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
    return delta_rule(q, k, v, log_g, beta, state, mask)


# ── the rule ─────────────────────────────────────────────────────────────────
def delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    chunk: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Apply the rule to any number of tokens; shapes as in ``update``, log_g and beta (B, T, Hv).

    log_g is <= 0, -inf included. A masked token leaves the state as it is; its y means nothing.
    ``chunk`` (a power of two) is for measuring: with it chunks do it, on CUDA too.
    """
    if chunk is None and gdn_kernel.fits(q, v):
        return gdn_kernel.delta_rule(q, k, v, mx.exp(log_g), beta, state, mask)
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    chunk = chunk or (_GPU_CHUNK if on_gpu else _CPU_CHUNK)
    chunk = min(chunk, max(_BLOCK, 1 << (T - 1).bit_length()))
    s = mx.zeros((B, Hv, Dv, Dk)) if state is None else state.astype(mx.float32)
    s = s.reshape(1, B, Hk, Hv // Hk, Dv, Dk)
    log_g, beta = log_g.astype(mx.float32), beta.astype(mx.float32)
    if mask is not None:
        log_g = mx.where(mask[..., None], log_g, 0.0)
        beta = mx.where(mask[..., None], beta, 0.0)
    # Zeros make no difference: decay 1, beta 0.
    rows = tuple(_pad(x, -T % chunk) for x in (q, k, v, log_g, beta))
    limit = _GPU_SEGMENT if on_gpu else _CPU_SEGMENT
    step = max(1, limit // (B * Hv * chunk)) * chunk
    ys: list[mx.array] = []
    for start in range(0, rows[0].shape[1], step):
        part = [x[:, start : start + step] for x in rows]
        y, s = _segment(*part, s, *_constants(chunk))
        ys.append(y)
    y = ys[0] if len(ys) == 1 else mx.concatenate(ys, axis=1)
    return y[:, :T], s.reshape(B, Hv, Dv, Dk)


def one_token(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Apply the rule to one token of each row; shapes as in ``update``, g and beta (B, 1, Hv).

    S k and S q are read off the state that the token finds, in one product: y = g S q + d k.q.
    So whoever waits for y does not wait for the new state.
    """
    B, _, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    heads = (B, Hk, Hv // Hk)
    s = mx.zeros((B, Hv, Dv, Dk)) if state is None else state.astype(mx.float32)
    s = s.reshape(B, Hk, -1, Dk)
    keys, queries = (x.reshape(B, Hk, Dk).astype(mx.float32) for x in (k, q))
    g = g.reshape(*heads, 1)
    read = (s @ mx.stack([keys, queries], axis=-1)).reshape(*heads, Dv, 2)
    d = beta.reshape(*heads, 1) * (v.reshape(*heads, Dv) - g * read[..., 0])
    y = g * read[..., 1] + d * (keys * queries).sum(axis=-1)[..., None, None]
    s = (s.reshape(*heads, Dv * Dk) * g).reshape(s.shape)
    s = mx.addmm(s, d.reshape(B, Hk, -1, 1), keys[:, :, None])
    return y.reshape(B, 1, Hv, Dv).astype(q.dtype), s.reshape(B, Hv, Dv, Dk)


def _pad(x: mx.array, count: int) -> mx.array:
    if count == 0:
        return x
    return mx.pad(x, [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))


@cache
def _constants(chunk: int) -> tuple[mx.array, ...]:
    """Lower triangle, strict lower triangle, and what lies below the blocks of 1, 2, 4 and so on.

    Made from numpy, so that they belong to no thread's stream.
    """
    i = np.arange(chunk)
    masks: list[Any] = [i[:, None] >= i, i[:, None] > i]
    small = i[: min(chunk, _BLOCK)]
    size = 1
    while size < len(small):
        t, s = small[:, None] // size, small // size
        masks.append(((t // 2 == s // 2) & (t > s)).astype(np.float32))
        size *= 2
    return tuple(mx.array(mask) for mask in masks)


def _segment(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array,
    lower: mx.array,
    strict: mx.array,
    *below: mx.array,
) -> tuple[mx.array, mx.array]:
    """Apply the rule to whole chunks: N of them, of C tokens, with heads as (Hk, Hv / Hk).

    state: (1, B, Hk, Hv / Hk, Dv, Dk), as is the one returned with y (B, N * C, Hv, Dv).
    """
    B, T, Hk, _ = q.shape
    Hv, Dv = v.shape[2:]
    C = lower.shape[0]
    N = T // C
    dtype = q.dtype

    def by_chunk(x: mx.array, heads: int) -> mx.array:
        """(B, T, Hk * heads, ...) -> (N, B, Hk, heads, C, ...), float32, contiguous."""
        x = x.reshape(B, N, C, Hk, heads, *x.shape[3:])
        order = (1, 0, 3, 4, 2, *range(5, x.ndim))
        return mx.contiguous(x.transpose(*order).astype(mx.float32))

    q, k = by_chunk(q, 1), by_chunk(k, 1)  # (N, B, Hk, 1, C, Dk)
    v, log_g, beta = (by_chunk(x, Hv // Hk) for x in (v, log_g, beta))
    k_t = k.swapaxes(-1, -2)

    sums = mx.cumsum(mx.where(strict, log_g[..., None], 0.0), axis=-2)
    decay = mx.where(lower & (sums > _LOG_NOTHING), mx.exp(sums), 0.0)  # (.., C, C), from i to t
    total = mx.cumsum(log_g, axis=-1)
    from_start = mx.where(total > _LOG_NOTHING, mx.exp(total), 0.0)  # (.., C)
    a = mx.where(strict, (k @ k_t) * decay * beta[..., None], 0.0)
    reads = (q @ k_t) * decay
    seen = q * from_start[..., None]
    written = k * decay[..., -1, :, None]  # K' above
    rows = mx.concatenate([k * (-beta * from_start)[..., None], v * beta[..., None]], axis=-1)
    wu = _inverse(a, below) @ rows  # (.., C, Dk + Dv): -W and U
    through = from_start[..., -1, None, None]
    starts: list[mx.array] = []
    deltas: list[mx.array] = []
    parts = [mx.split(x, N) for x in (*mx.split(wu, [k.shape[-1]], axis=-1), written, through)]
    for w, u, keys, passed in zip(*parts, strict=True):
        starts.append(state)
        delta = mx.addmm(u, w, state.swapaxes(-1, -2))
        deltas.append(delta)
        state = mx.addmm(state * passed, delta.swapaxes(-1, -2), keys)
    start = mx.concatenate(starts).swapaxes(-1, -2)
    y = mx.addmm(reads @ mx.concatenate(deltas), seen, start)
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(B, T, Hv, Dv)
    return y.astype(dtype), state


def _inverse(a: mx.array, below: tuple[mx.array, ...]) -> mx.array:
    """(I + a)^-1 for strictly lower triangular matrices a (.., C, C), C a power of two."""
    C = a.shape[-1]
    lead, a = a.shape[:-2], a.reshape(-1, C, C)
    size = below[0].shape[0]
    spans = [slice(i, i + size) for i in range(0, C, size)]
    diagonal = mx.stack([a[:, span, span] for span in spans], axis=1)  # (.., C / size, size, size)
    x = mx.eye(size) - diagonal * below[0]
    for mask in below[1:]:
        x = x - x @ (diagonal * mask) @ x
    while size < C:
        starts = range(0, C, 2 * size)
        corner = mx.stack([a[:, i + size : i + 2 * size, i : i + size] for i in starts], axis=1)
        upper, lower = x[:, 0::2], x[:, 1::2]
        left = mx.concatenate([upper, -(lower @ corner @ upper)], axis=-2)
        right = mx.concatenate([mx.zeros_like(upper), lower], axis=-2)
        x = mx.concatenate([left, right], axis=-1)
        size *= 2
    return x.reshape(*lead, C, C)
