"""The form of one recurrent float32 state inside a checkpoint: raw, rounded, or quantised by rows.

Pure: an array in, host tensors and metadata out, and back. A state has any shape; its last axis is
a row, of ``width`` >= 1 values. NAME is what the file calls the state, ``gdn.<layer>.<k>``.

    codec       tensors                              error of a row x, besides float32's rounding
    fp32        NAME        float32   as the state   none, bit for bit
    bf16        NAME        bfloat16  as the state   |error| <= 2^-8 |value|, or 2^-134
    int8        NAME.q      int8      as the state   |error| <= max|x| / 254 + one ulp of max|x|
                NAME.scale  float32   (..., 1)
    rht_int8    NAME.rht_q  int8      as the state   L2 <= sqrt(width)/2 max|Hx| / 127
                NAME.scale  float32   (..., groups)  Gaussian rows: relative L2 <= 2e-2
    rht_int16   NAME.rht_q  int16     as the state   L2 <= sqrt(width)/2 max|Hx| / 32767
                NAME.scale  float32   (..., groups)  Gaussian rows: relative L2 <= 1e-4

    metadata    codec, codec_version ("1"), dtype ("float32"), shape (list of int)

bf16 rounds to nearest, ties to even, and stops at the largest finite value.
For int8 value = q scale.

rht, the random Hadamard transform, spreads an outlier over its row before the row is quantised.
A row is cut into groups, each the largest power of two <= 128 that still fits: 128 -> 128,
96 -> 64 + 32, 300 -> 128 + 128 + 32 + 8 + 4. For a group of n values H = W D / sqrt(n), where
W[i, j] = (-1)^popcount(i & j) and D holds signs that only depend on the width: sign i is minus when
bit i (lowest bit of a byte first) of the bytes SHA-256("omlx/gdn/rht/1" | u32 width | u32 k),
k = 0, 1, .., is set, integers little-endian. Each group has its scale: group = D W q scale.
W q is a sum of integers below 2^24, exact in float32 in any order, so a file decodes to the same
bits on every machine. Encoding sums floats; there a q may differ by one between machines.

A scale is rounded up, so that no q exceeds qmax, and is 0 only for a group of zeros, which decodes
to +0. Scales below 2^-126 have steps of 2^-149; that adds at most n 2^-150 to the L2 of a group.
Rows near 0 or near the largest float are transformed after scaling by a power of two. What
quantisation would carry beyond the largest float stops there.

A reader takes nothing on trust: any doubt about metadata, tensors or values is Undecodable.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from omlx.cache.block_file import DTYPES, HostTensor
from omlx.cache.finite import all_finite

CODECS = ("fp32", "bf16", "int8", "rht_int8", "rht_int16")
VERSION = "1"
GROUP_MAX = 128

_QMAX = {"int8": 127, "rht_int8": 127, "rht_int16": 32767}
_NUMPY = {"float32": "<f4", "bfloat16": "<u2", "int8": "i1", "int16": "<i2"}
_KEYS = {"codec", "codec_version", "dtype", "shape"}
_SIGNS_PREFIX = b"omlx/gdn/rht/1"
_U32_PAIR = struct.Struct("<II")
_CHUNK_ITEMS = 1 << 16
"""Values worked on at a time: a few buffers of this size stay in a core's cache."""

_PRODUCT_ROWS = 16
"""Rows of a product. 512 at once took up to 45 times as long with two BLAS threads as with one."""

_FLOAT_MAX = float(np.finfo(np.float32).max)
_INFINITY = 0x7F800000
_BF16_INFINITY = 0x7F80
_SAFE_MIN, _SAFE_MAX = np.float32(2.0**-100), np.float32(2.0**126)
"""A peak between these needed no scaling: no overflow, no denormals, which a BLAS may flush."""
assert GROUP_MAX * 32767 < 1 << 24, "sums of q are exact in float32"

Float32 = npt.NDArray[np.float32]
Metadata = Mapping[str, object]


class NotFinite(Exception):
    """A state with an infinity or NaN, which is never stored."""


class Undecodable(Exception):
    """Not, beyond doubt, what an encoder of this version wrote for this state."""


@dataclass(frozen=True, slots=True)
class Encoded:
    metadata: dict[str, object]
    """What ``decode`` needs besides the tensors; goes through JSON unchanged."""
    tensors: tuple[HostTensor, ...]


def layout(
    codec: str, name: str, shape: Sequence[int]
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """(name, dtype, shape) of each tensor. Raises ValueError for what no codec can encode."""
    shape = tuple(shape)
    if not shape or min(shape) < 1:
        raise ValueError(f"a state of shape {shape} has no rows")
    match codec:
        case "fp32":
            return ((name, "float32", shape),)
        case "bf16":
            return ((name, "bfloat16", shape),)
        case "int8":
            return (f"{name}.q", "int8", shape), (f"{name}.scale", "float32", (*shape[:-1], 1))
        case "rht_int8" | "rht_int16":
            groups = shape[-1] // GROUP_MAX + (shape[-1] % GROUP_MAX).bit_count()
            dtype = codec.removeprefix("rht_")
            scale = (f"{name}.scale", "float32", (*shape[:-1], groups))
            return (f"{name}.rht_q", dtype, shape), scale
    raise ValueError(f"codec {codec!r}, want one of {', '.join(CODECS)}")


def encoded_nbytes(codec: str, shape: Sequence[int]) -> int:
    return sum(prod(dims) * DTYPES[dtype][1] for _, dtype, dims in layout(codec, "", shape))


def encode(codec: str, name: str, state: Float32) -> Encoded:
    """Encode one state. Raises NotFinite; ValueError for what no codec can encode.

    fp32 does not copy a contiguous state: its tensor is a view, so the state must not change.
    """
    if state.dtype != np.float32:
        raise ValueError(f"{name} is {state.dtype}, codecs are for float32")
    forms = layout(codec, name, state.shape)
    rows = np.ascontiguousarray(state).reshape(-1, state.shape[-1])
    if not all_finite(rows):
        raise NotFinite(f"{name} has values that are not finite")
    match codec:
        case "fp32":
            arrays: tuple[npt.NDArray[Any], ...] = (rows.astype("<f4", copy=False),)
        case "bf16":
            arrays = (_encode_bf16(rows),)
        case _:
            arrays = _encode_rows(codec, rows)
    tensors = tuple(
        HostTensor(*form, array.reshape(-1).view(np.uint8).data)
        for form, array in zip(forms, arrays, strict=True)
    )
    metadata: dict[str, object] = {
        "codec": codec,
        "codec_version": VERSION,
        "dtype": "float32",
        "shape": list(state.shape),
    }
    return Encoded(metadata, tensors)


def decode(name: str, metadata: Metadata, tensors: Sequence[HostTensor]) -> Float32:
    """The state that ``tensors``, no more and no fewer, hold. Raises Undecodable.

    fp32 gives a view of the tensor's memory, which may be read-only; the others a new array.
    """
    codec, shape = _read_metadata(metadata)
    arrays = _read_tensors(layout(codec, name, shape), tensors)
    match codec:
        case "fp32":
            state = arrays[0].astype(np.float32, copy=False)
            if not (tensors[0].known_finite or all_finite(state)):
                raise Undecodable(f"{name} has values that are not finite")
        case "bf16":
            state = _decode_bf16(name, arrays[0])
        case _:
            state = _decode_rows(codec, name, *arrays)
    return state.reshape(shape)


def _read_metadata(metadata: Metadata) -> tuple[str, tuple[int, ...]]:
    if metadata.keys() != _KEYS:
        raise Undecodable(f"metadata has {sorted(metadata)}, want {sorted(_KEYS)}")
    codec, version, shape = metadata["codec"], metadata["codec_version"], metadata["shape"]
    if not isinstance(codec, str) or codec not in CODECS:
        raise Undecodable(f"codec {codec!r}, want one of {', '.join(CODECS)}")
    if version != VERSION:
        raise Undecodable(f"version {version!r} of {codec}, want {VERSION!r}")
    if metadata["dtype"] != "float32":
        raise Undecodable(f"a state of {metadata['dtype']!r}, want 'float32'")
    if not (isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape)):
        raise Undecodable(f"shape {shape!r}, want a list of positive int")
    return codec, tuple(shape)


def _read_tensors(
    forms: Sequence[tuple[str, str, tuple[int, ...]]], tensors: Sequence[HostTensor]
) -> tuple[npt.NDArray[Any], ...]:
    """The tensors in the order of ``forms``, each (rows, values of a row)."""
    found = {tensor.name: tensor for tensor in tensors}
    names = [name for name, _, _ in forms]
    if len(found) != len(tensors) or found.keys() != set(names):
        raise Undecodable(f"tensors {sorted(t.name for t in tensors)}, want {names}")
    arrays: list[npt.NDArray[Any]] = []
    for name, dtype, shape in forms:
        tensor = found[name]
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise Undecodable(f"{name} is {tensor.dtype}{tensor.shape}, want {dtype}{shape}")
        nbytes = prod(shape) * DTYPES[dtype][1]
        if tensor.nbytes != nbytes or not tensor.data.c_contiguous:
            raise Undecodable(f"{name} has {tensor.nbytes} bytes, want {nbytes}")
        arrays.append(np.frombuffer(tensor.data, _NUMPY[dtype]).reshape(-1, shape[-1]))
    return tuple(arrays)


# ── by values ────────────────────────────────────────────────────────────────────────────────────
def _encode_bf16(rows: Float32) -> npt.NDArray[np.uint16]:
    out = np.empty(rows.shape, "<u2")
    flat = out.reshape(-1)
    work = np.empty(min(rows.size, _CHUNK_ITEMS), np.uint32)
    for start, part in _chunks(rows):
        bits = part.view(np.uint32)
        rounded = work[: len(part)]
        np.right_shift(bits, 16, out=rounded)
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        words = flat[start : start + len(part)]
        np.copyto(words, rounded, casting="unsafe")
        magnitude = words & 0x7FFF
        if magnitude.max() >= _BF16_INFINITY:
            words[magnitude == _BF16_INFINITY] -= 1
    return out


def _decode_bf16(name: str, words: npt.NDArray[np.uint16]) -> Float32:
    out = np.empty(words.size, np.float32)
    for start, part in _chunks(words):
        if (part & 0x7FFF).max() >= _BF16_INFINITY:
            raise Undecodable(f"{name} has values that are not finite")
        bits = out[start : start + len(part)].view(np.uint32)
        np.copyto(bits, part)
        bits <<= 16
    return out


def _chunks(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    flat = array.reshape(-1)
    for start in range(0, len(flat), _CHUNK_ITEMS):
        yield start, flat[start : start + _CHUNK_ITEMS]


# ── by rows ──────────────────────────────────────────────────────────────────────────────────────
_Group = tuple[slice, int, tuple[Float32, Float32] | None]
"""Columns of a row that share a scale; n of their transform, or 1 without one; D W and W D."""


def _groups(width: int) -> Iterator[slice]:
    start = 0
    while start < width:
        size = min(GROUP_MAX, 1 << ((width - start).bit_length() - 1))
        yield slice(start, start + size)
        start += size


def _signs(width: int) -> Float32:
    """(width,) of +-1: D of the whole row."""
    stream = b"".join(
        hashlib.sha256(_SIGNS_PREFIX + _U32_PAIR.pack(width, k)).digest()
        for k in range(-(-width // 256))
    )
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")[:width]
    return np.where(bits == 1, np.float32(-1), np.float32(1))


@lru_cache(maxsize=16)
def _plan(codec: str, width: int) -> tuple[_Group, ...]:
    if codec == "int8":
        return ((slice(0, width), 1, None),)
    signs = _signs(width)
    plan: list[_Group] = []
    for columns in _groups(width):
        walsh = np.ones((1, 1), np.float32)
        while len(walsh) < columns.stop - columns.start:
            walsh = np.block([[walsh, walsh], [walsh, -walsh]])
        plan.append((columns, len(walsh), (signs[columns, None] * walsh, walsh * signs[columns])))
    return tuple(plan)


def _encode_rows(codec: str, rows: Float32) -> tuple[npt.NDArray[np.signedinteger], Float32]:
    plan, qmax = _plan(codec, rows.shape[1]), _QMAX[codec]
    q = np.empty(rows.shape, _NUMPY[codec.removeprefix("rht_")])
    scales = np.empty((len(rows), len(plan)), "<f4")
    parts = _row_chunks(rows.shape)
    work, spare = np.empty((2, *rows[parts[0]].shape), np.float32)
    for part in parts:
        for k, (columns, size, matrices) in enumerate(plan):
            values = rows[part, columns]
            out = work.reshape(-1)[: values.size].reshape(values.shape)
            scratch = spare.reshape(-1)[: values.size].reshape(values.shape)
            if matrices is None:
                peak, exponent = _peaks(values, scratch), np.zeros(len(values), np.int32)
            else:
                peak, exponent = _transform(values, matrices[0], out, scratch)
                values = out
            scales[part, k], span = _scale(peak, exponent, size, qmax)
            np.divide(values, span[:, None], out=out)
            np.rint(out, out=out)
            np.copyto(q[part, columns], out, casting="unsafe")
    return q, scales


def _row_chunks(shape: tuple[int, ...]) -> list[slice]:
    step = max(1, _CHUNK_ITEMS // shape[1])
    return [slice(start, start + step) for start in range(0, shape[0], step)]


def _transform(
    values: Float32, matrix: Float32, out: Float32, scratch: Float32
) -> tuple[Float32, npt.NDArray[np.int32]]:
    """Put the transform of each row into ``out``, divided by a power of two where it must be.

    Returns the largest magnitude of each row of ``out``, and the exponent of its power of two.
    """
    exponent = np.zeros(len(values), np.int32)
    with np.errstate(over="ignore", invalid="ignore"):
        _multiply(values, matrix, out)
    peak = _peaks(out, scratch)
    # An overflow on the way leaves an infinity or NaN, and neither is below _SAFE_MAX.
    odd = np.flatnonzero(~((peak > _SAFE_MIN) & (peak < _SAFE_MAX)))
    if len(odd):
        rows = values[odd]
        _, exponent[odd] = np.frexp(np.abs(rows).max(axis=1))
        out[odd] = np.ldexp(rows, -exponent[odd, None]) @ matrix
        peak[odd] = np.abs(out[odd]).max(axis=1)
    return peak, exponent


def _multiply(values: Float32, matrix: Float32, out: Float32) -> None:
    """Put ``values @ matrix`` into ``out``; (rows, n) each."""
    whole, shape = len(values) // _PRODUCT_ROWS * _PRODUCT_ROWS, (-1, _PRODUCT_ROWS, len(matrix))
    np.matmul(values[:whole].reshape(shape), matrix, out=out[:whole].reshape(shape))
    np.matmul(values[whole:], matrix, out=out[whole:])


def _peaks(values: Float32, scratch: Float32) -> Float32:
    """(rows,) of max|value|. Magnitudes order as their bits do, and integers compare faster."""
    bits = scratch.view(np.int32)
    np.bitwise_and(values.view(np.int32), 0x7FFFFFFF, out=bits)
    return bits.max(axis=1).view(np.float32)


def _scale(
    peak: Float32, exponent: npt.NDArray[np.int32], size: int, qmax: int
) -> tuple[Float32, Float32]:
    """The scale of each row, and the span of transformed values that one unit of q covers."""
    divisor = np.float32(size * qmax)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.ldexp(peak / divisor, exponent)
        short = np.ldexp(scale, -exponent) * divisor < peak
        scale[short] = np.nextafter(scale[short], np.float32(np.inf))
        span = np.ldexp(scale, -exponent) * np.float32(size)
    span[peak == 0] = 1
    return scale, span


def _decode_rows(
    codec: str, name: str, q: npt.NDArray[np.signedinteger], scales: Float32
) -> Float32:
    plan, qmax = _plan(codec, q.shape[1]), _QMAX[codec]
    if scales.view("<u4").max() >= _INFINITY:  # so is a sign bit
        raise Undecodable(f"{name} has scales that are negative or not finite")
    scales = scales.astype(np.float32, copy=False)
    result = np.empty(q.shape, np.float32)
    parts = _row_chunks(q.shape)
    work = np.empty(q[parts[0]].size, np.float32)
    for part in parts:
        if q[part].min() < -qmax:
            raise Undecodable(f"{name} has values below -{qmax}")
        for k, (columns, size, matrices) in enumerate(plan):
            values, out, scale = q[part, columns], result[part, columns], scales[part, k]
            if matrices is None:
                np.copyto(out, values)
            else:
                floats = work[: values.size].reshape(values.shape)
                np.copyto(floats, values)
                _multiply(floats, matrices[1], out)
            if float(scale.max()) * qmax * size > _FLOAT_MAX:
                _multiply_near_the_limit(name, out, scale, size)
            else:
                out *= scale[:, None]
            zero = scale == 0
            if zero.any():
                if values[zero].any():
                    raise Undecodable(f"{name} has values in a row of scale 0")
                out[zero] = 0
    return result


def _multiply_near_the_limit(name: str, values: Float32, scale: Float32, size: int) -> None:
    """Multiply in place. What the codec's own error carries beyond a float stops at the limit."""
    wide = values * scale[:, None].astype(np.float64)
    if (np.abs(wide) > _FLOAT_MAX + size * scale[:, None].astype(np.float64)).any():
        raise Undecodable(f"{name} has values beyond float32")
    np.copyto(values, np.clip(wide, -_FLOAT_MAX, _FLOAT_MAX), casting="same_kind")
