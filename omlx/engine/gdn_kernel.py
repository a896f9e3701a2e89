"""The gated delta rule as one CUDA kernel, token by token.

mlx-lm has such a kernel for Metal alone. The rule is in ``gdn_chunked``. A row of the state S
depends on no other row, so rows are spread over the device, and each stays in the registers of a
few neighbouring threads through the whole prompt. Everything is float32, in the order of
mlx-lm's loop; only the sums over keys are made in another order.

Cutting a prompt anywhere changes no bit: each token is computed alike wherever a pass ends.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

_THREADS = 128
_LANES = 8
"""Threads that share a row of the state. More rows for each thread were slower."""

_SOURCE = """
  struct alignas(4 * sizeof(T)) Four { T x[4]; };
  constexpr int ROWS = THREADS / LANES;
  constexpr int PER_LANE = Dk / LANES;
  constexpr int TILE = Dk > 128 ? 16 : 32;
  const int lane = threadIdx.x % LANES;
  const int row = threadIdx.x / LANES;
  const int head = blockIdx.y % Hv;
  const int key_head = head / (Hv / Hk);
  const int first_row = blockIdx.x * ROWS;
  const int tokens = q_shape[1];
  const size_t first_token = size_t(blockIdx.y / Hv) * tokens;

  // A tile of tokens, in at most 35 of the 48 kB that a block has.
  __shared__ float4 keys[TILE][Dk / 4];
  __shared__ float4 queries[TILE][Dk / 4];
  __shared__ float values[TILE][ROWS];
  __shared__ float gates[TILE];
  __shared__ float betas[TILE];

  auto to_float4 = [](const T* from) {
    const Four four = *reinterpret_cast<const Four*>(from);
    return make_float4(float(four.x[0]), float(four.x[1]), float(four.x[2]), float(four.x[3]));
  };
  // Neighbouring lanes hold neighbouring fours, so that no two read one bank.
  auto read = [lane](float* to, const float4* from) {
    for (int i = 0; i < PER_LANE; i += 4) {
      const float4 four = from[i / 4 * LANES + lane];
      to[i] = four.x; to[i + 1] = four.y; to[i + 2] = four.z; to[i + 3] = four.w;
    }
  };
  auto dot = [](const float* one, const float* other) {
    float sums[4] = {0, 0, 0, 0};
    for (int i = 0; i < PER_LANE; ++i) {
      sums[i % 4] += one[i] * other[i];
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int step = LANES / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, step);
    }
    return sum;
  };

  float s[PER_LANE];
  const size_t state_at = (size_t(blockIdx.y) * Dv + first_row + row) * Dk;
  read(s, reinterpret_cast<const float4*>(state + state_at));
  for (int start = 0; start < tokens; start += TILE) {
    const int count = min(TILE, tokens - start);
    const size_t token = first_token + start;
    __syncthreads();
    for (int i = threadIdx.x; i < count * (Dk / 4); i += THREADS) {
      const int t = i / (Dk / 4), part = i % (Dk / 4);
      const size_t at = ((token + t) * Hk + key_head) * Dk + part * 4;
      keys[t][part] = to_float4(k + at);
      queries[t][part] = to_float4(q + at);
    }
    for (int i = threadIdx.x; i < count * ROWS; i += THREADS) {
      const int t = i / ROWS, r = i % ROWS;
      values[t][r] = float(v[((token + t) * Hv + head) * Dv + first_row + r]);
    }
    for (int t = threadIdx.x; t < count; t += THREADS) {
      gates[t] = g[(token + t) * Hv + head];
      betas[t] = beta[(token + t) * Hv + head];
    }
    __syncthreads();
    for (int t = 0; t < count; ++t) {
      float key[PER_LANE], query[PER_LANE];
      read(key, keys[t]);
      read(query, queries[t]);
      for (int i = 0; i < PER_LANE; ++i) {
        s[i] *= gates[t];
      }
      const float d = betas[t] * (values[t][row] - dot(s, key));
      for (int i = 0; i < PER_LANE; ++i) {
        s[i] += d * key[i];
      }
      const float out = dot(s, query);
      if (lane == 0) {
        y[((token + t) * Hv + head) * Dv + first_row + row] = static_cast<T>(out);
      }
    }
  }
  float4* to = reinterpret_cast<float4*>(new_state + state_at);
  for (int i = 0; i < PER_LANE; i += 4) {
    to[i / 4 * LANES + lane] = make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
  }
"""


def fits(q: mx.array, v: mx.array) -> bool:
    """Whether the kernel can take arrays of these shapes on the default device."""
    if not mx.cuda.is_available() or mx.default_device() != mx.Device(mx.gpu):
        return False
    key_dim, value_dim = q.shape[3], v.shape[3]
    return key_dim % (4 * _LANES) == 0 and key_dim <= 256 and value_dim % (_THREADS // _LANES) == 0


def delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Apply the rule to any number of tokens; shapes as in ``gdn_chunked.update``.

    g, beta: (B, T, Hv). A masked token leaves the state as it is; its y means nothing.
    """
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    s = mx.zeros((B, Hv, Dv, Dk)) if state is None else state.astype(mx.float32)
    g, beta = g.astype(mx.float32), beta.astype(mx.float32)
    if mask is not None:
        g = mx.where(mask[..., None], g, 1.0)
        beta = mx.where(mask[..., None], beta, 0.0)
    dtype = q.dtype if q.dtype == k.dtype == v.dtype else mx.float32
    sizes = {"Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}
    sizes |= {"THREADS": _THREADS, "LANES": _LANES}
    y, s = _kernel()(
        inputs=[q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta, s],
        template=[("T", dtype), *sizes.items()],
        grid=(_LANES * Dv, B * Hv, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(B, T, Hv, Dv), s.shape],
        output_dtypes=[dtype, mx.float32],
    )
    return y.astype(q.dtype), s


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="gated_delta_rule",
        input_names=["q", "k", "v", "g", "beta", "state"],
        output_names=["y", "new_state"],
        source=_SOURCE,
    )
